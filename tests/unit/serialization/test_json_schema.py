"""JSON Schemas: made of Arrow types, and the checks of a column and its rows against a given one."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.record.kernel import has_kernel
from spark_kafka_sink.serialization import column_encoder
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import BadRow, FormatSettings, JsonOptions
from spark_kafka_sink.serialization.schemas import column_format

WITH_NULLS = JsonOptions(ignore_null_fields=False)


def encode(column: pa.Array, schema: Any = None, options: JsonOptions | None = None) -> tuple[list[Any], list[BadRow]]:
    text = None if schema is None else json.dumps(schema)
    used = column_format(FormatSettings("value", "json-schema", text, json=options or JsonOptions()), column.type)
    encoded = ColumnEncoder(used, column.type).encode(column)
    return [None if value is None else value.decode() for value in encoded.values.to_pylist()], list(encoded.bad_rows)


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def null_or(kind: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": [{"type": "null"}, kind]}


@pytest.mark.parametrize(
    ("data_type", "expected"),
    [
        (pa.bool_(), {"type": "boolean"}),
        (pa.uint16(), {"type": "integer"}),
        (pa.float32(), {"type": "number"}),
        (pa.decimal128(9, 2), {"type": "number"}),
        (pa.dictionary(pa.int8(), pa.string()), {"type": "string"}),
        (pa.binary(4), {"type": "string", "contentEncoding": "base64"}),
        (pa.date32(), {"type": "string", "format": "date"}),
        (pa.timestamp("us", "UTC"), {"type": "string", "format": "date-time"}),
        (pa.timestamp("us"), {"type": "string"}),
        (pa.list_(pa.int32()), {"type": "array", "items": null_or({"type": "integer"})}),
        (pa.map_(pa.string(), pa.int32()), {"type": "object", "additionalProperties": null_or({"type": "integer"})}),
        (
            pa.struct([pa.field("x", pa.int8(), False)]),
            {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        ),
    ],
    ids=str,
)
def test_schema_of_a_type(data_type: pa.DataType, expected: Any) -> None:
    made = column_format(FormatSettings("value", "json-schema"), pa.struct([("c", data_type)])).schema
    assert json.loads(made or "") == {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "topLevelRecord",
        "type": "object",
        "properties": {"c": null_or(expected)},
        "additionalProperties": False,
    }


def test_schema_in_the_same_text_may_have_an_id_that_a_reference_names() -> None:
    schema = {**of(x={"$ref": "part.json"}), "$defs": {"part": {"$id": "part.json", "type": "string"}}}
    assert encode(pa.array([{"a": 1}]), schema) == (['{"a":1}'], [])


def test_fields_that_differ_in_case_are_two_properties() -> None:
    assert encode(pa.array([{"a": 1, "A": 2}]), of(A={"type": "integer"})) == (['{"a":1,"A":2}'], [])


@pytest.mark.parametrize("schema", ["[" * 100_000, '{"items":' * 100_000])
def test_schema_of_too_many_levels_is_refused(schema: str) -> None:
    with pytest.raises(SchemaError, match="value: the JSON Schema has too many levels"):
        column_format(FormatSettings("value", "json-schema", schema), pa.list_(pa.int64()))


def test_values_are_those_of_json() -> None:
    column = pa.array([{"a": 1, "b": None}, None])
    assert encode(column) == (['{"a":1}', None], [])
    assert encode(column, of(a={"type": "integer"}), WITH_NULLS) == (['{"a":1,"b":null}', None], [])


NUMBER, TEXT = pa.struct([("c", pa.int32())]), pa.struct([("c", pa.string())])


@pytest.mark.parametrize(
    ("data_type", "schema", "message"),
    [
        (NUMBER, of(c={"type": "string"}), "value.c: the Arrow type int32 does not fit the type string"),
        (TEXT, of(c={"type": "integer"}), "value.c: the Arrow type string does not fit the type integer"),
        (NUMBER, {"type": "array"}, "does not fit the type array"),
        (NUMBER, {**of(), "additionalProperties": False}, "value.c: the JSON Schema has no such property"),
        (NUMBER, {**of(), "additionalProperties": {"type": "string"}}, "value.c: the Arrow type int32 does not fit"),
        (NUMBER, {**of(), "required": ["d"]}, "value.d: the JSON Schema requires this field"),
        (NUMBER, of(c={"$ref": "#/definitions/x"}), "value.c: the JSON Schema has nothing at #/definitions/x"),
        (NUMBER, of(c={"$ref": "other.json"}), "refers to another schema, other.json, and this sink"),
        (NUMBER, of(c={"$ref": "#/properties/c"}), "or refers to itself"),
        (NUMBER, {"allOf": [of()]}, "value: allOf in a JSON Schema is not supported"),
        (NUMBER, of(x={"$ref": "other.json"}), "refers to another schema, other.json, and this sink"),
        (
            NUMBER,
            of(C={"type": "integer"}),
            "value.c: the JSON Schema has the property C, and upper and lower case count",
        ),
        (
            pa.struct([("c", pa.binary())]),
            of(c={"type": "string", "contentEncoding": "base16"}),
            "value.c: bytes become text in Base64, and the JSON Schema has the contentEncoding base16",
        ),
        (NUMBER, of(c=False), "value.c: the JSON Schema allows no value"),
        (NUMBER, of(c={"type": ["string", "null"]}), "value.c: the Arrow type int32 does not fit the type string"),
        (
            pa.struct([("l", pa.list_(pa.int32()))]),
            of(l={"type": "array", "items": {"type": "string"}}),
            "value.l.element: the Arrow type int32",
        ),
        (
            pa.struct([("m", pa.map_(pa.string(), pa.int32()))]),
            of(m={"type": "object", "additionalProperties": {"type": "boolean"}}),
            "value.m.value: the Arrow type int32",
        ),
    ],
)
def test_type_that_does_not_fit_is_refused_with_the_path(data_type: pa.DataType, schema: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        column_format(FormatSettings("value", "json-schema", json.dumps(schema)), data_type)
    assert message in str(caught.value)


FIELDS = pa.struct([("a", pa.int32()), ("l", pa.list_(pa.int32()))])
TEXT = {"type": "string"}
NAMED = {"a b": TEXT, "one": {"type": "integer"}, "a%20b": {"type": "integer"}}


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("patternProperties", {"^a": TEXT}),
        ("unevaluatedProperties", False),
        ("unevaluatedProperties", {"not": {}}),
        ("unevaluatedItems", False),
        ("prefixItems", [TEXT]),
        ("prefixItems", 7),
        ("dependentRequired", {"a": ["b"]}),
        ("dependentSchemas", {"a": {"required": ["b"]}}),
        ("dependencies", {"a": ["b"]}),
        ("propertyNames", {"pattern": "^b"}),
        ("$dynamicRef", "#a"),
        ("$recursiveRef", "#"),
        ("not", {}),
        ("if", {}),
    ],
)
@pytest.mark.parametrize("column", [FIELDS, pa.list_(FIELDS)])
def test_what_a_reader_would_refuse_rows_for_and_is_not_checked_is_refused(
    key: str, part: Any, column: pa.DataType
) -> None:
    schema = {"properties": {}, key: part}
    given = schema if pa.types.is_struct(column) else {"type": "array", "items": {"anyOf": [schema]}}
    with pytest.raises(SchemaError, match=re.escape(f"{key} in a JSON Schema is not supported")):
        encode(pa.array([], column), given)


@pytest.mark.parametrize(
    "harmless",
    [
        {"patternProperties": {"^a": True}},
        {"patternProperties": {}},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
        {"prefixItems": [True, {}]},
        {"dependentRequired": {"a": []}},
        {"dependencies": {}},
        {"propertyNames": True},
    ],
)
def test_parts_that_allow_every_value_are_no_error(harmless: Any) -> None:
    assert encode(pa.array([{"a": 1, "l": [2]}], FIELDS), harmless)[0] == ['{"a":1,"l":[2]}']


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"required": True}, "required in the JSON Schema is not a list of names"),
        ({"required": "a"}, "required in the JSON Schema is not a list of names"),
        ({"properties": []}, "properties in the JSON Schema is not an object"),
        ({"type": []}, "type in the JSON Schema is not a type or a list of types"),
        ({"type": ["object", {"type": "null"}]}, "type in the JSON Schema is not a type or a list of types"),
        ({"oneOf": {}}, "oneOf in the JSON Schema is not a list"),
        ({"anyOf": True}, "anyOf in the JSON Schema is not a list"),
    ],
)
def test_part_of_a_wrong_form_is_an_error_that_names_it(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=f"value: {message}"):
        encode(pa.array([], FIELDS), schema)


@pytest.mark.parametrize("reference", ["#/$defs/a%20b", "#/$defs/a b"])
def test_reference_is_percent_decoded(reference: str) -> None:
    with pytest.raises(SchemaError, match="int32 does not fit the type string"):
        encode(pa.array([], NUMBER), {"$defs": NAMED, **of(c={"$ref": reference})})


@pytest.mark.parametrize("reference", ["#one", "#one/$defs/one"])
def test_reference_to_an_anchor_is_refused_and_not_taken_for_the_root(reference: str) -> None:
    with pytest.raises(SchemaError, match="only # and references that begin with #/ work"):
        encode(pa.array([], NUMBER), {"$defs": NAMED, **of(c={"$ref": reference})})


@pytest.mark.parametrize("key", ["$id", "id"])
def test_reference_inside_a_part_with_an_id_is_refused(key: str) -> None:
    inner = {key: "inner.json", "$defs": {"one": TEXT}, **of(c={"$ref": "#/$defs/one"})}
    with pytest.raises(SchemaError, match=r"value: the JSON Schema has a \$ref inside a part with an \$id"):
        encode(pa.array([], pa.struct([("o", NUMBER)])), {"$defs": NAMED, **of(o=inner)})


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "https://example.org/root.json", "$defs": NAMED, **of(c={"$ref": "#/$defs/one"})},
        {"$defs": {"one": {"$id": "#one", "type": "integer"}}, **of(c={"$ref": "#/$defs/one"})},
        {"$defs": {"one": {"$id": "one.json", "type": "integer"}}, **of(c={"$ref": "#/$defs/one"})},
        {"$defs": NAMED, **of(c={"$ref": "#/$defs/one"}, id={"$ref": "#/$defs/one"})},
    ],
)
def test_ids_that_change_no_reference_are_allowed(schema: Any) -> None:
    assert encode(pa.array([{"c": 1}], NUMBER), schema)[0] == ['{"c":1}']


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"value\.schema is not JSON"):
        column_format(FormatSettings("value", "json-schema", "{"), NUMBER)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        of(c={"type": "number"}),
        of(c={"type": ["null", "integer"]}),
        of(c={"anyOf": [{"type": "string"}, {"type": "integer"}]}),
        {**of(c={"$ref": "#/definitions/a~1b"}), "definitions": {"a/b": {"type": "integer"}}},
        {**of(), "additionalProperties": {"type": "integer"}},
    ],
)
def test_type_that_fits_is_written(schema: Any) -> None:
    assert encode(pa.array([{"c": 1}], NUMBER), schema) == (['{"c":1}'], [])


FLOATS = pa.struct([("c", pa.float64()), ("l", pa.list_(pa.int32())), ("d", pa.dictionary(pa.int8(), pa.string()))])
STRICT = {
    **of(c={"type": "number"}, l={"type": "array", "items": {"type": "integer"}}, d={"type": "string"}),
    "required": ["d"],
}
NULL = "it is null, and the JSON Schema allows no null there"


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_that_do_not_fit_are_bad(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled or not has_kernel():
        monkeypatch.setattr(column_encoder, "KERNEL", None)
    children = [
        pa.array([1.5, float("nan"), None, float("-inf"), 1.0]),
        pa.array([[1], None, [], [1], [1, None]], pa.list_(pa.int32())),
        pa.array(["x", "x", None, "x", "x"]).dictionary_encode().cast(FLOATS.field(2).type),
    ]
    column = pa.StructArray.from_arrays(children, fields=list(FLOATS))
    numbers = "NaN and infinity are no numbers in JSON, and the JSON Schema has a number there"
    values, bad = encode(column, STRICT)
    assert values == ['{"c":1.5,"l":[1],"d":"x"}', None, None, None, None]
    assert bad == [
        BadRow(1, "value.c", numbers),
        BadRow(2, "value.d", NULL),
        BadRow(3, "value.c", numbers),
        BadRow(4, "value.l.element", NULL),
    ]
    assert encode(column.slice(2), STRICT, WITH_NULLS)[1] == [
        BadRow(0, "value.c", NULL),
        BadRow(1, "value.c", numbers),
        BadRow(2, "value.l.element", NULL),
    ]
    assert encode(column.slice(1, 1), of(c={"type": ["number", "string"]}))[0] == ['{"c":"NaN","d":"x"}']


def test_null_fields_are_left_out_where_the_schema_takes_text_too() -> None:
    """Bug: they were written as null, which the schema of the field does not allow, where the schema of the struct has
    no type or takes a string.
    """
    inner = pa.struct([("n", pa.int32())])
    column = pa.array([{"c": 1, "s": {"n": None}}, {"c": None}], pa.struct([("c", pa.int32()), ("s", inner)]))
    without_type = {"properties": {"n": {"type": "integer"}}}
    schema = {"properties": {"c": {"type": "integer"}, "s": without_type}}
    either = {"properties": {"s": {"anyOf": [{"type": "object"}, {"type": "string"}]}}}
    for given in (schema, either, {}, True):
        assert encode(column, given) == (['{"c":1,"s":{}}', "{}"], [])
        assert encode(column, given, WITH_NULLS)[0][0] == (None if given is schema else '{"c":1,"s":{"n":null}}')


@pytest.mark.parametrize("compiled", [True, False])
def test_a_null_that_is_left_out_though_it_is_required_is_a_bad_row_with_the_option_that_keeps_it(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the reason was that the schema allows no null, and it does."""
    if not compiled or not has_kernel():
        monkeypatch.setattr(column_encoder, "KERNEL", None)
    column = pa.array([{"s": None}, {"s": {"a": None}}], pa.struct([("s", pa.struct([("a", pa.string())]))]))
    inner = {**of(a={"type": ["string", "null"]}), "required": ["a"]}
    schema = {**of(s=null_or(inner)), "required": ["s"]}
    said = "it is null, so it is left out, and the JSON Schema requires it: set value.json.ignoreNullFields=false"
    assert encode(column, schema) == ([None, None], [BadRow(0, "value.s", said), BadRow(1, "value.s.a", said)])
    assert encode(column, schema, WITH_NULLS) == (['{"s":null}', '{"s":{"a":null}}'], [])


def test_dictionary_of_numbers_takes_nan_where_the_schema_takes_text() -> None:
    column = pa.StructArray.from_arrays([pa.array([float("nan"), 1.5]).dictionary_encode()], names=["c"])
    assert encode(column, of(c={"type": ["number", "string"]})) == (['{"c":"NaN"}', '{"c":1.5}'], [])
    assert encode(column, of(c={"type": "number"}))[0] == [None, '{"c":1.5}']


BESIDE = {**of(a={"type": "integer"}, b={"type": "integer"}), "required": ["a"]}
A_AND_B = pa.struct([("a", pa.int32()), ("b", pa.int32())])


@pytest.mark.parametrize("key", ["oneOf", "anyOf"])
def test_what_stands_beside_alternatives_counts(key: str) -> None:
    """Bug: only the alternatives were checked, and rows were written that the rest of the schema does not allow."""
    column = pa.array([{"a": 1, "b": 2}, {"a": None, "b": 2}, {"a": 1, "b": None}], A_AND_B)
    schema = {**BESIDE, key: [{"required": ["b"]}, {"type": "string"}]}
    assert encode(column, schema) == (
        ['{"a":1,"b":2}', None, None],
        [BadRow(1, "value.a", NULL), BadRow(2, "value.b", NULL)],
    )
    texts = pa.array([{"a": "1", "b": 2}])
    with pytest.raises(SchemaError, match=r"value\.a: the Arrow type string does not fit the type integer"):
        encode(texts, schema)
    numbers = pa.array([{"a": 1.5}])
    with pytest.raises(SchemaError, match="does not fit the type integer"):
        encode(numbers, of(a={"type": "number", key: [{"type": "integer"}]}))


def test_what_stands_beside_a_reference_counts() -> None:
    """Bug: only the schema that it names was checked. JSON Schema counts both since 2019."""
    column = pa.array([{"a": 1, "b": 2}, {"a": None, "b": 2}], A_AND_B)
    schema = {"$ref": "#/$defs/x", "description": "x", "required": ["a"], "$defs": {"x": of(a={"type": "integer"})}}
    assert encode(column, schema) == (['{"a":1,"b":2}', None], [BadRow(1, "value.a", NULL)])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({**of(a=True), "anyOf": [of(b=True)]}, "value: the JSON Schema has properties beside $ref, oneOf or anyOf"),
        (
            {"additionalProperties": False, "oneOf": [of(a=True, b=True)]},
            "value: the JSON Schema has additionalProperties beside $ref, oneOf or anyOf",
        ),
        (
            {**of(a=True), "$ref": "#/definitions/x", "definitions": {"x": of(b=True)}},
            "value: the JSON Schema has properties beside $ref",
        ),
        ({"type": "string", "oneOf": [{"type": "object"}]}, "value: oneOf in the JSON Schema allows no value"),
    ],
)
def test_alternatives_that_contradict_what_stands_beside_them_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        column_format(FormatSettings("value", "json-schema", json.dumps(schema)), A_AND_B)
    assert message in str(caught.value)
