"""JSON Schemas of columns: made of an Arrow type, or given and then checked against it.

The values are the JSON of json_text.py. A made schema (draft 7) is closed (`additionalProperties` is false): a registry
then takes one more optional field for compatible. Of a given schema the types, `properties`, `required`,
`additionalProperties`, `items`, `oneOf`, `anyOf` and local `$ref` are checked; what it says about single values, such
as `pattern` or `maximum`, is not. What else it says about types and fields is refused, so that no row is written that
a reader would refuse for it. Runs on the driver and at the start of a task; no state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.avro_schema import TOP_RECORD
from spark_kafka_sink.serialization.column_format import JsonOptions
from spark_kafka_sink.serialization.json_text import json_plan
from spark_kafka_sink.serialization.plan import (
    ANY_NUMBER,
    FINITE,
    IS_NULL,
    KIND_OF_OPS,
    MOST_DEPTH,
    OUT_OF_RANGE,
    REQUIRED,
    VARIANT,
    Kind,
    Node,
    Op,
    kind_of,
    list_field,
    plain_type,
    special_kind,
)

_SAYS_NOTHING: Final = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "default", "examples", "definitions", "$defs"}
)
"""Parts of a schema that say nothing about values."""
_UNSUPPORTED: Final = ("allOf", "not", "if", "$dynamicRef", "$recursiveRef")
_OF_SCHEMAS: Final = ("patternProperties", "prefixItems", "dependentRequired", "dependentSchemas", "dependencies")
"""Not supported either, unless each of their parts allows every value."""
_OF_ONE_SCHEMA: Final = ("unevaluatedProperties", "unevaluatedItems")
"""Not supported either, unless they allow every value."""
_ANYTHING: Final[tuple[Any, ...]] = (True, {}, [])
_DRAFT: Final = "http://json-schema.org/draft-07/schema#"
_IS_NULL: Final = {IS_NULL: "it is null, and the JSON Schema allows no null there"}
_NOT_FINITE: Final = {OUT_OF_RANGE: "NaN and infinity are no numbers in JSON, and the JSON Schema has a number there"}

_BASE64: Final = "base64"
_KINDS: Final[Mapping[Kind, tuple[tuple[str, ...], Mapping[str, str]]]] = {
    Kind.NULL: (("null",), {}),
    Kind.BOOLEAN: (("boolean",), {}),
    Kind.INTEGER: (("integer", "number"), {}),
    Kind.FLOATING: (("number",), {}),
    Kind.DECIMAL: (("number",), {}),
    Kind.TEXT: (("string",), {}),
    Kind.BYTES: (("string",), {"contentEncoding": _BASE64}),
    Kind.DATE: (("string",), {"format": "date"}),
    Kind.TIMESTAMP: (("string",), {"format": "date-time"}),
    Kind.TIME: (("string",), {}),
    Kind.DURATION: (("string",), {}),
    Kind.STRUCT: (("object",), {}),
    Kind.LIST: (("array",), {}),
    Kind.MAP: (("object",), {}),
}
"""Kind → the types of JSON Schema that take it, and what else a made schema says."""


def _kind(data_type: pa.DataType) -> tuple[tuple[str, ...], Mapping[str, str]]:
    types, more = _KINDS[kind_of(data_type, "")]
    is_local = pat.is_timestamp(data_type) and data_type.tz is None
    return types, {} if is_local else more


# ---- made of an Arrow type -----------------------------------------------------------------------------------------


def json_schema_text(data_type: pa.DataType, path: str, options: JsonOptions) -> str:
    """Return the JSON Schema of a column. Raises SchemaError, with the path, for a type that JSON does not take."""
    json_plan(options, data_type, path)
    return json.dumps({"$schema": _DRAFT, "title": TOP_RECORD, **_made(data_type)}, separators=(",", ":"))


def _made(data_type: pa.DataType) -> dict[str, Any]:
    data_type = plain_type(data_type)
    if special_kind(data_type) == VARIANT:
        return {}  # any value, null too
    types, more = _kind(data_type)
    made: dict[str, Any] = {"type": types[0], **more}
    if pat.is_struct(data_type):
        fields = [data_type.field(number) for number in range(data_type.num_fields)]
        made["properties"] = {of.name: _nullable(of) for of in fields}
        required = [of.name for of in fields if not of.nullable]
        made |= {"required": required} if required else {}
        made["additionalProperties"] = False
    elif pat.is_map(data_type):
        made["additionalProperties"] = _nullable(data_type.item_field)
    elif kind_of(data_type, "") is Kind.LIST:
        made["items"] = _nullable(list_field(data_type))
    return made


def _nullable(of: pa.Field) -> dict[str, Any]:
    made = _made(of.type)
    return {"oneOf": [{"type": "null"}, made]} if of.nullable and made.get("type", "null") != "null" else made


# ---- given ---------------------------------------------------------------------------------------------------------


def json_schema_plan(schema: str, options: JsonOptions, data_type: pa.DataType, path: str) -> Node:
    """Return the node that writes a column of `data_type`, with the checks that the schema asks for.

    Raises SchemaError, with the path, if the type does not fit or the text is no JSON Schema.
    """
    node = json_plan(options, data_type, path)
    try:
        written = json.loads(schema)
    except RecursionError:
        raise SchemaError(f"{path}: the JSON Schema has too many levels.") from None
    except ValueError:
        raise SchemaError(f"{path}: the JSON Schema is not JSON.") from None
    _refuse_other_bases(written, path)
    _refuse_other_schemas(written, path)
    fitter = _Fitter(written, options.ignore_null_fields)
    return replace(fitter.fitted(node, data_type, written), null_branch=-1)


@dataclass(frozen=True, slots=True)
class _Fitter:
    root: Any
    ignores_nulls: bool

    def fitted(self, node: Node, data_type: pa.DataType, schema: Any, depth: int = 0) -> Node:
        """Return the node with checks for values that the schema does not allow. Its null is allowed or REQUIRED."""
        alternatives = self._alternatives(schema, node.path, depth)
        null_branch = -1 if any(_takes(each, "null") for each in alternatives) else REQUIRED
        if pat.is_null(plain_type(data_type)) and null_branch != REQUIRED:
            return node
        if special_kind(plain_type(data_type)) == VARIANT:
            return _of_variant(node, alternatives)
        others = [each for each in alternatives if each.get("type") != "null"] or alternatives
        refusals = []
        for each in others:
            try:
                made = self._value(node, plain_type(data_type), each, depth)
            except SchemaError as refusal:
                refusals.append(refusal)
            else:
                if any(_takes(each, "string") for each in alternatives):
                    made = _any_number(made)
                return replace(made, null_branch=null_branch, reasons={**_IS_NULL, **made.reasons})
        raise refusals[0]

    def _alternatives(self, schema: Any, path: str, depth: int) -> list[dict[str, Any]]:
        """Return the schemas of which one must fit, each with one type or without a type."""
        if depth > MOST_DEPTH:
            raise SchemaError(f"{path}: the JSON Schema has more than {MOST_DEPTH} levels, or refers to itself.")
        if schema is True:
            return [{}]
        if not isinstance(schema, dict):
            raise SchemaError(f"{path}: the JSON Schema allows no value, or is no JSON Schema.")
        _check_form(schema, path)
        _refuse_unsupported(schema, path)
        key, named = self._named_schemas(schema, path)
        if key is not None:
            beside = self._alternatives({name: schema[name] for name in schema if name != key}, path, depth + 1)
            parts = [each for part in named for each in self._alternatives(part, path, depth + 1)]
            both = (_both(one, part, path) for one in beside for part in parts)
            possible = [each for each in both if each is not None]
            if not possible:
                raise SchemaError(f"{path}: {key} in the JSON Schema allows no value.")
            return possible
        kinds = schema.get("type")
        return [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else [schema]

    def _named_schemas(self, schema: Mapping[str, Any], path: str) -> tuple[str | None, Sequence[Any]]:
        """Return the key under which other schemas count, beside the rest, and these. Since 2019 what stands beside
        $ref counts as well; earlier versions of JSON Schema ignore it.
        """
        if "$ref" in schema:
            return "$ref", [self._referred(schema["$ref"], path)]
        return next(((key, schema[key]) for key in ("oneOf", "anyOf") if isinstance(schema.get(key), list)), (None, ()))

    def _referred(self, reference: Any, path: str) -> Any:
        found = self.root
        fragment = unquote(reference[1:]) if isinstance(reference, str) and reference.startswith("#") else None
        if fragment is None or not (fragment == "" or fragment.startswith("/")):
            raise SchemaError(
                f"{path}: the JSON Schema refers to {reference}, and only # and references that begin with #/ work."
            )
        for part in fragment.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise SchemaError(f"{path}: the JSON Schema has nothing at {reference}.")
            found = found[name]
        return found

    def _value(self, node: Node, data_type: pa.DataType, schema: dict[str, Any], depth: int) -> Node:
        if node.op is Op.DICT:
            return replace(node, children=(self._value(node.children[0], data_type, schema, depth),))
        types, _ = _kind(data_type)
        if not any(_takes(schema, kind) for kind in types):
            raise SchemaError(
                f"{node.path}: the Arrow type {data_type} does not fit the type {schema['type']} of the JSON Schema."
                " Cast the column, or change the schema."
            )
        if pat.is_struct(data_type):
            return self._struct(node, data_type, schema, depth)
        if pat.is_map(data_type):
            part = self.fitted(
                node.children[1], data_type.item_type, schema.get("additionalProperties", True), depth + 1
            )
            return replace(node, children=(node.children[0], part))
        if kind_of(data_type, "") is Kind.LIST:
            part = self.fitted(node.children[0], list_field(data_type).type, schema.get("items", True), depth + 1)
            return replace(node, children=(part,))
        if kind_of(data_type, "") is Kind.BYTES and schema.get("contentEncoding", _BASE64) != _BASE64:
            raise SchemaError(
                f"{node.path}: bytes become text in Base64, and the JSON Schema has the contentEncoding"
                f" {schema['contentEncoding']}. Change the schema, or make the text yourself."
            )
        if pat.is_floating(data_type) and "type" in schema:
            return replace(node, how=FINITE, reasons=_NOT_FINITE)
        return node

    def _struct(self, node: Node, data_type: pa.DataType, schema: dict[str, Any], depth: int) -> Node:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        names = [data_type.field(number).name for number in range(data_type.num_fields)]
        missing = [name for name in required if name not in names]
        if missing:
            raise SchemaError(
                f"{node.path}.{missing[0]}: the JSON Schema requires this field, and the column has none."
            )
        if schema.get("propertyNames", True) not in _ANYTHING:
            raise SchemaError(f"{node.path}: {_not_supported('propertyNames')}")
        children = []
        for child, name in zip(node.children, names, strict=True):
            if name not in properties:
                _refuse_other_case(name, properties.keys() - names, child.path)
            if name not in properties and others is False:
                raise SchemaError(
                    f"{child.path}: the JSON Schema has no such property, and allows no others. Rename or drop the"
                    " column's field, or add it to the schema."
                )
            made = self.fitted(child, data_type.field(child.source).type, properties.get(name, others), depth + 1)
            if self.ignores_nulls:  # a null is left out
                made = _required(made, f"{node.path.partition('.')[0]}.json") if name in required else _optional(made)
            children.append(made)
        return replace(node, children=tuple(children))


def _refuse_other_case(name: str, absent: Iterable[str], path: str) -> None:
    """Refuse a field whose name differs only in case from a property that the column lacks: readers would not find it.
    Spark takes both for the same column.
    """
    alike = next((each for each in absent if each.lower() == name.lower()), None)
    if alike is not None:
        raise SchemaError(
            f"{path}: the JSON Schema has the property {alike}, and upper and lower case count. Rename the column's"
            f" field to {alike}."
        )


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_FORMS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "type": (lambda found: isinstance(found, str) or (_is_names(found) and bool(found)), "a type or a list of types"),
    "required": (_is_names, "a list of names"),
    "properties": (lambda found: isinstance(found, dict), "an object"),
    "oneOf": (lambda found: isinstance(found, list), "a list"),
    "anyOf": (lambda found: isinstance(found, list), "a list"),
}
"""Part of a schema → whether a value may stand there, and what may."""


def _check_form(schema: Mapping[str, Any], path: str) -> None:
    for name, (is_right, expected) in _FORMS.items():
        if name in schema and not is_right(schema[name]):
            raise SchemaError(f"{path}: {name} in the JSON Schema is not {expected}. Correct the schema.")


def _refuse_unsupported(schema: Mapping[str, Any], path: str) -> None:
    """Refuse what says more about fields, elements and types, and is not checked."""
    found = [name for name in _UNSUPPORTED if name in schema]
    found += [name for name in _OF_SCHEMAS if any(each not in _ANYTHING for each in _parts(schema.get(name)))]
    found += [name for name in _OF_ONE_SCHEMA if schema.get(name, True) not in _ANYTHING]
    if found:
        raise SchemaError(f"{path}: {_not_supported(found[0])}")


def _not_supported(name: str) -> str:
    return f"{name} in a JSON Schema is not supported. Write the schema without it."


def _parts(value: Any) -> Sequence[Any]:
    """Return the schemas in a part of a schema: of an object, or of a list."""
    if isinstance(value, dict):
        return [*value.values()]
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _refuse_other_bases(root: Any, path: str) -> None:
    """Refuse a `$ref` inside a part that has an `$id` of its own (draft 4: `id`): it does not begin at the root."""
    for part in _objects_below(root):
        names = (part.get("$id"), part.get("id"))
        if any(isinstance(name, str) and not name.startswith("#") for name in names) and any(
            isinstance(each.get("$ref"), str) for each in (part, *_objects_below(part))
        ):
            raise SchemaError(
                f"{path}: the JSON Schema has a $ref inside a part with an $id of its own, which is not supported. Take"
                " the $id out of the part."
            )


def _refuse_other_schemas(root: Any, path: str) -> None:
    """Refuse a `$ref` to a schema that is not in this text, also in parts that the column does not have: the registry
    would get a schema without it.
    """
    parts = [*_objects_below([root])]
    ids = {found for part in parts for found in (part.get("$id"), part.get("id")) if isinstance(found, str)}
    for part in parts:
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#") and reference.partition("#")[0] not in ids:
            raise SchemaError(
                f"{path}: the JSON Schema refers to another schema, {reference}, and this sink follows no references."
                " Write it into the schema itself."
            )


def _objects_below(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        yield from (each for each in members if isinstance(each, dict))
        waiting += members


def _optional(node: Node) -> Node:
    return replace(node, null_branch=-1)


def _required(node: Node, options: str) -> Node:
    """Return the node of a field that must be there. Its null would be left out, also one that the schema allows.
    `options`: what the names of the column's options begin with.
    """
    if node.null_branch == REQUIRED:
        return node
    said = f"it is null, so it is left out, and the JSON Schema requires it: set {options}.ignoreNullFields=false"
    return replace(node, null_branch=REQUIRED, reasons={**node.reasons, IS_NULL: said})


def _any_number(node: Node) -> Node:
    """Return the node without a check of NaN and infinity: they are strings, which the schema takes."""
    if node.op is Op.DICT:
        return replace(node, children=(_any_number(node.children[0]),))
    return replace(node, how=ANY_NUMBER) if KIND_OF_OPS[node.op] is Kind.FLOATING else node


def _both(one: dict[str, Any], part: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return a schema that says what both say: what stands beside $ref, oneOf or anyOf, and one of its parts. None if
    their types exclude each other. Raises SchemaError for what cannot be said in one schema.
    """
    types = {each["type"] for each in (one, part) if "type" in each}
    if types == {"integer", "number"}:
        types = {"integer"}
    if len(types) > 1:
        return None
    clash = _clash(one, part)
    if clash is not None:
        raise SchemaError(
            f"{path}: the JSON Schema has {clash} beside $ref, oneOf or anyOf, which changes what is in it. Write it"
            " into each of the other schemas."
        )
    made = {**one, **part}
    if types:
        (made["type"],) = types
    if "required" in made:
        made["required"] = [*one.get("required", ()), *part.get("required", ())]
    return made


def _clash(one: Mapping[str, Any], part: Mapping[str, Any]) -> str | None:
    """Return what two schemas say about members so that one schema cannot say both, or None."""
    for key in ("properties", "additionalProperties", "items"):
        if key in one and key in part and one[key] != part[key]:
            return key
    for own, other in ((one, part), (part, one)):
        limits_others = own.get("additionalProperties", True) not in (True, {})
        if limits_others and other.get("properties", {}).keys() - own.get("properties", {}).keys():
            return "additionalProperties"
    return None


def _of_variant(node: Node, alternatives: list[dict[str, Any]]) -> Node:
    """Return the node if the schema takes any value. Raises SchemaError: which values come is not known before."""
    limits = sorted({key for each in alternatives for key in each} - _SAYS_NOTHING)
    if limits or len(alternatives) > 1:
        raise SchemaError(
            f"{node.path}: a variant may be any value, and the JSON Schema limits it, by"
            f" {', '.join(limits) or 'oneOf or anyOf'}. Write true as its schema, or cast the variant."
        )
    return node


def _takes(schema: Mapping[str, Any], kind: str) -> bool:
    return "type" not in schema or schema["type"] == kind
