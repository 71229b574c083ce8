"""The plan of a column for Protobuf: the fields of a struct, matched by name with those of a message.

Values are written as by the official runtimes, fields in the order of their numbers. A null is left out, also in a list
or map as a whole; a null element of a list, and a null key or value of a map, is an error. Integers fit every integer
type of Protobuf: a number out of its range is an error of the row. A pair of types that would lose something without a
word is refused. Runs on the driver and at the start of a task; no state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.message_indexes import varint
from spark_kafka_sink.serialization.plan import (
    AS_DOUBLE,
    BITS_32,
    BITS_64,
    EACH_WITH_TAG,
    INSTANT,
    IS_NULL,
    MOST_DEPTH,
    NO_SYMBOL,
    OUT_OF_RANGE,
    PACKED,
    PER_SECOND,
    REQUIRED,
    SECOND,
    SPAN,
    SYMBOL,
    VARINT,
    WITHOUT_DEFAULT,
    WRAPPED,
    ZIGZAG,
    Kind,
    Node,
    Op,
    kind_of,
    list_field,
    plain_type,
    refuse_special,
    storage,
    with_dictionaries,
)
from spark_kafka_sink.serialization.protobuf_schema import ProtoField, ProtoMessage, ProtoSchema

TIMESTAMP: Final = "google.protobuf.Timestamp"
DURATION: Final = "google.protobuf.Duration"
WRAPPERS: Final = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
MOST_ONEOFS: Final = 64
_MICROS: Final = 1_000_000
_DAY_MILLIS: Final = 86_400_000
_NO_NULL: Final = {IS_NULL: "it is null, and Protobuf has no null in lists and maps"}
_OUT_OF_TIME: Final[Mapping[str, str]] = {
    TIMESTAMP: "it is not in the years 1 to 9999, which a Timestamp of Protobuf can hold",
    DURATION: "it is longer than the 10,000 years that a Duration of Protobuf can hold",
}


def _bits(count: int, *, signed: bool) -> tuple[int, int]:
    return (-(1 << (count - 1)), (1 << (count - 1)) - 1) if signed else (0, (1 << count) - 1)


_LONG: Final = _bits(64, signed=True)
_INTEGERS: Final[Mapping[str, tuple[int, tuple[int, int]]]] = {
    "int32": (VARINT, _bits(32, signed=True)),
    "int64": (VARINT, _LONG),
    "uint32": (VARINT, _bits(32, signed=False)),
    "uint64": (VARINT, _bits(64, signed=False)),
    "sint32": (ZIGZAG, _bits(32, signed=True)),
    "sint64": (ZIGZAG, _LONG),
    "fixed32": (BITS_32, _bits(32, signed=False)),
    "fixed64": (BITS_64, _bits(64, signed=False)),
    "sfixed32": (BITS_32, _bits(32, signed=True)),
    "sfixed64": (BITS_64, _LONG),
}
"""Type → how a number is written, the least and the most."""
_WIRE_OF_NUMBERS: Final = {VARINT: 0, ZIGZAG: 0, BITS_64: 1, BITS_32: 5}
_WIRE: Final[Mapping[str, int]] = {
    **{name: _WIRE_OF_NUMBERS[how] for name, (how, _) in _INTEGERS.items()},
    "bool": 0,
    "enum": 0,
    "double": 1,
    "float": 5,
}
"""Type → the number of its layout in a tag. All others have a length: 2."""


def _tag(field: ProtoField, *, has_length: bool = False) -> bytes:
    return varint(field.number << 3 | (2 if has_length else _WIRE.get(field.kind, 2)))


def protobuf_plan(schema: ProtoSchema, data_type: pa.DataType, path: str) -> Node:
    """Return the node that writes a column of `data_type` as the schema's message. `path`: the column's name.

    Raises SchemaError, with the path, if the type does not fit.
    """
    plain = plain_type(data_type)
    refuse_special(plain, path, "Protobuf")
    if not pat.is_struct(plain):
        raise SchemaError(
            f"{path}: the format protobuf takes a struct, not the Arrow type {data_type}. Put it into a struct, or"
            " leave the format out."
        )
    maker = _Maker(
        {each.name: each for each in schema.messages}, {each.name: dict(each.values) for each in schema.enums}
    )
    return with_dictionaries(data_type, maker.message(plain, maker.messages[schema.root], path, 0))


@dataclass(frozen=True, slots=True)
class _Maker:
    messages: Mapping[str, ProtoMessage]
    enums: Mapping[str, Mapping[str, int]]

    # ---- messages --------------------------------------------------------------------------------------------------

    def message(self, data_type: pa.DataType, message: ProtoMessage, path: str, depth: int) -> Node:
        """Return the node of a struct, without the tag of its field."""
        own = {data_type.field(number).name: number for number in range(data_type.num_fields)}
        if len(own) < data_type.num_fields:
            names = [data_type.field(number).name for number in range(data_type.num_fields)]
            twice = next(name for name in names if names.count(name) > 1)
            raise SchemaError(f"{path}: two fields have the name '{twice}'. Rename one of them.")
        known = [field.name for field in message.fields]
        extra = [name for name in own if name not in known]
        if extra:
            raise SchemaError(
                f"{path}.{extra[0]}: the Protobuf message '{message.name}' has no field of this name"
                f"{_hint(extra[0], known)}. Rename or drop the column's field, or add it to the schema."
            )
        missing = [field.name for field in message.fields if field.is_required and field.name not in own]
        if missing:
            raise SchemaError(
                f"{path}.{missing[0]}: the Protobuf message '{message.name}' requires this field, and the column has"
                " none. Add it to the column, or make it optional in the schema."
            )
        return Node(Op.STRUCT, path, children=tuple(self._fields(data_type, message, own, path, depth)))

    def _fields(
        self, data_type: pa.DataType, message: ProtoMessage, own: Mapping[str, int], path: str, depth: int
    ) -> Iterator[Node]:
        """Yield the nodes of the fields that a struct has. `own`: their numbers in it."""
        oneofs = sorted({field.oneof for field in message.fields if field.oneof and field.name in own})
        if len(oneofs) > MOST_ONEOFS:
            raise SchemaError(f"{path}: the Protobuf message '{message.name}' has more than {MOST_ONEOFS} oneofs.")
        for field in message.fields:
            if field.name not in own:
                continue
            null_branch, reasons = REQUIRED if field.is_required else -1, {}
            if field.oneof:
                null_branch = oneofs.index(field.oneof)
                reasons[SECOND] = (
                    f"another field of the oneof '{field.oneof}' has a value too, and only one may have one"
                )
            number = own[field.name]
            made = self.field(
                data_type.field(number).type, field, f"{path}.{field.name}", depth + 1, null_branch, reasons
            )
            yield replace(made, source=number)

    def field(
        self,
        data_type: pa.DataType,
        field: ProtoField,
        path: str,
        depth: int,
        null_branch: int,
        reasons: Mapping[int, str],
        *,
        has_tag: bool = True,
    ) -> Node:
        """Return the node of a field, with its tag and its dictionaries."""
        if depth > MOST_DEPTH:
            raise SchemaError(f"{path}: the type has more than {MOST_DEPTH} levels.")
        plain = plain_type(data_type)
        if pat.is_null(plain):
            return Node(Op.ABSENT, path, null_branch=null_branch, reasons=reasons)
        if field.is_repeated:
            made = self._repeated(plain, field, path, depth)
        else:
            made = self._value(plain, field, path, depth)
            made = replace(made, name=_tag(field) + made.name if has_tag else made.name)
        made = replace(made, null_branch=null_branch, reasons={**made.reasons, **reasons})
        return with_dictionaries(data_type, made)

    def _repeated(self, data_type: pa.DataType, field: ProtoField, path: str, depth: int) -> Node:
        """Return the node of a list or map, which has the tag only if its elements have none."""
        found = storage(data_type, path)
        kind = kind_of(data_type, path)
        entry = self._entry(field)
        if kind is not (Kind.LIST if entry is None else Kind.MAP):
            raise self._misfit(path, data_type, field)
        if entry is not None:
            types = (data_type.key_type, data_type.item_type)
            parts = [
                self._part(of, part, f"{path}.{part.name}", depth) for of, part in zip(types, entry.fields, strict=True)
            ]
            return Node(Op.MAP, path, children=tuple(parts), name=_tag(field))
        one = replace(field, is_repeated=False)
        part = self._part(list_field(data_type).type, one, f"{path}.element", depth, has_tag=not field.is_packed)
        how, name = (PACKED, _tag(field, has_length=True)) if field.is_packed else (EACH_WITH_TAG, b"")
        return Node(found.op, path, how=how, children=(part,), arg=found.arg, name=name)

    def _entry(self, field: ProtoField) -> ProtoMessage | None:
        """Return the message of a map's entry, None for a field that is no map."""
        found = self.messages.get(field.of)
        return found if found is not None and found.is_entry else None

    def _part(self, data_type: pa.DataType, field: ProtoField, path: str, depth: int, *, has_tag: bool = True) -> Node:
        """Return the node of an element, a key or a value: written also if it is 0, and never null."""
        written = replace(field, has_presence=True)
        return self.field(data_type, written, path, depth + 1, REQUIRED, _NO_NULL, has_tag=has_tag)

    # ---- values ----------------------------------------------------------------------------------------------------

    def _value(self, data_type: pa.DataType, field: ProtoField, path: str, depth: int) -> Node:
        """Return the node of a value that is not null and no list, without its tag."""
        refuse_special(data_type, path, "Protobuf")
        if field.kind == "group":  # also Timestamp, Duration and wrappers, whose bytes would have a length before them
            raise self._misfit(path, data_type, field)
        kind = kind_of(data_type, path)
        if field.of in WRAPPERS and kind is not Kind.STRUCT:
            (inner,) = self.messages[field.of].fields
            made = self._value(data_type, inner, path, depth)
            return replace(made, value_branch=WRAPPED, name=_tag(inner))
        make = _VALUES.get(kind)
        node = None if make is None else make(self, data_type, field, path)
        if kind is Kind.STRUCT and field.kind == "message" and not self.messages[field.of].is_entry:
            node = self.message(data_type, self.messages[field.of], path, depth)
        if node is None:
            raise self._misfit(path, data_type, field)
        value_branch = -1 if field.has_presence or field.kind == "message" else WITHOUT_DEFAULT
        return replace(node, value_branch=value_branch)

    def _misfit(self, path: str, data_type: pa.DataType, field: ProtoField) -> SchemaError:
        """Return the error for a type that does not fit a field."""
        if self._entry(field) is not None:
            wanted = "map"
        elif field.kind == "group":
            wanted = f"{field.of} as a group (by the word group, or by features.message_encoding = DELIMITED)"
        else:
            kind = field.kind if not field.of else f"{field.kind} {field.of}" if field.kind == "enum" else field.of
            wanted = f"repeated {kind}" if field.is_repeated else kind
        return SchemaError(
            f"{path}: the Arrow type {data_type} does not fit Protobuf's {wanted}. {self._advice(data_type, field)}"
        )

    def _advice(self, data_type: pa.DataType, field: ProtoField) -> str:
        if field.kind == "group":
            return "Groups are not supported: make the field an ordinary message in the schema."
        if pat.is_timestamp(data_type) and field.of == TIMESTAMP:
            return "A timestamp without a time zone is no point in time: cast it to a timestamp that is one."
        if self._is_list(data_type) and not field.is_repeated:
            return "Protobuf has no list of lists: put the inner list into a struct, or make the field repeated."
        return "Cast the column, or change the schema."

    @staticmethod
    def _is_list(data_type: pa.DataType) -> bool:
        return kind_of(data_type, "") in (Kind.LIST, Kind.MAP)

    # ---- one value of each kind ------------------------------------------------------------------------------------

    def boolean(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        return Node(storage(data_type, path).op, path) if field.kind == "bool" else None

    def integer(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        own = _bits(data_type.bit_width, signed=pat.is_signed_integer(data_type))
        if field.kind == "enum":
            said = {OUT_OF_RANGE: f"the enum '{field.of}' has no such number"}
            numbers = [number for number in self.enums[field.of].values() if number >= own[0]]
            return Node(storage(data_type, path).op, path, extra=_runs(numbers), reasons=said) if numbers else None
        return _ranged(data_type, field, path, own)

    def floating(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        op = storage(data_type, path).op
        if field.kind == "double":
            return Node(op, path, how=AS_DOUBLE)
        return Node(op, path) if field.kind == "float" and op is not Op.F64 else None

    def text(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        op = storage(data_type, path).op
        if field.kind == "string":
            return Node(op, path)
        if field.kind != "enum":
            return None
        pairs = [part for name, number in self.enums[field.of].items() for part in (name.encode(), varint(number))]
        return Node(
            op,
            path,
            how=SYMBOL,
            other=len(pairs),
            extra=b"".join(struct.pack("<i", len(part)) + part for part in pairs),
            reasons={NO_SYMBOL: f"the enum '{field.of}' has no such value"},
        )

    def bytes(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        found = storage(data_type, path)
        return Node(found.op, path, arg=found.arg) if field.kind == "bytes" else None

    def decimal(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        if field.kind != "string":
            return None
        if not -200 <= data_type.scale <= 100:
            raise SchemaError(f"{path}: the scale of {data_type} must be from -200 to 100.")
        found = storage(data_type, path)
        return Node(found.op, path, arg=found.arg, other=data_type.scale)

    def date(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        if pat.is_date32(data_type):
            return _ranged(data_type, field, path, _bits(32, signed=True))
        node = _ranged(data_type, field, path, _LONG)
        return None if node is None else replace(node, arg=_DAY_MILLIS)

    def time(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        if not field.kind.endswith("64"):
            return None
        node, own = _ranged(data_type, field, path, _LONG), PER_SECOND[data_type.unit]
        return None if node is None else replace(node, arg=own // _MICROS or 1, other=_MICROS // own)

    def timestamp(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        return _seconds(data_type, path, INSTANT, TIMESTAMP) if field.of == TIMESTAMP and data_type.tz else None

    def duration(self, data_type: pa.DataType, field: ProtoField, path: str) -> Node | None:
        return _seconds(data_type, path, SPAN, DURATION) if field.of == DURATION else None


_VALUES: Final[Mapping[Kind, Callable[[_Maker, pa.DataType, ProtoField, str], Node | None]]] = {
    Kind.BOOLEAN: _Maker.boolean,
    Kind.INTEGER: _Maker.integer,
    Kind.FLOATING: _Maker.floating,
    Kind.TEXT: _Maker.text,
    Kind.BYTES: _Maker.bytes,
    Kind.DECIMAL: _Maker.decimal,
    Kind.DATE: _Maker.date,
    Kind.TIME: _Maker.time,
    Kind.TIMESTAMP: _Maker.timestamp,
    Kind.DURATION: _Maker.duration,
}


def _hint(name: str, known: Sequence[str]) -> str:
    alike = [other for other in known if other.lower() == name.lower()]
    return f" (but '{alike[0]}': upper and lower case count)" if alike else ""


def _seconds(data_type: pa.DataType, path: str, how: int, name: str) -> Node:
    arg = PER_SECOND[data_type.unit]
    return Node(storage(data_type, path).op, path, how=how, arg=arg, reasons={OUT_OF_RANGE: _OUT_OF_TIME[name]})


def _ranged(data_type: pa.DataType, field: ProtoField, path: str, own: tuple[int, int]) -> Node | None:
    """Return the node of an integer. `own`: the least and the most that the column can hold."""
    if field.kind not in _INTEGERS:
        return None
    how, (least, most) = _INTEGERS[field.kind]
    node = Node(storage(data_type, path).op, path, how=how, arg=1)
    if least <= own[0] and own[1] <= most:
        return node
    said = {OUT_OF_RANGE: f"the number is out of the range of {field.kind}"}
    return replace(node, extra=struct.pack("<qq", max(least, own[0]), min(most, own[1])), reasons=said)


def _runs(numbers: Iterable[int]) -> bytes:
    """Return the numbers as ranges: the first and the last of each, as 64 bits."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number <= runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return b"".join(struct.pack("<qq", *run) for run in runs)
