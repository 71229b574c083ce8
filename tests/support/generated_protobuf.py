"""Protobuf messages from a seed, Arrow types that fit them, and the judge: the messages of the official runtime.

A schema has many messages, because parsing takes a while. Its enum is written by text of the type `large_string` or by
numbers of the type `uint8`; no other column has these types, so that `random_value` knows which values an enum has.
Some rows do not fit, by a null, a number or a oneof.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pat
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from support import generated_columns

from spark_kafka_sink.serialization.plan import plain_type
from spark_kafka_sink.serialization.protobuf_parser import descriptor_set

SYNTAXES = ('syntax = "proto3";', 'syntax = "proto2";', 'edition = "2023";')
COLORS = {"RED": 0, "GREEN": 1, "BLUE": 2, "FAR": 200, "BELOW": -7}
_HEAD = """
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/wrappers.proto";
enum Color { RED = 0; GREEN = 1; BLUE = 2; FAR = 200; BELOW = -7; }
"""
_SMALL = (pa.int8(), pa.int16(), pa.int32(), pa.uint16(), pa.date32(), pa.dictionary(pa.int32(), pa.int16()))
_WIDE = (pa.int64(), pa.int32(), pa.uint32(), pa.time64("us"), pa.date32(), pa.dictionary(pa.int8(), pa.int64()))
_FITTING: dict[str, Sequence[pa.DataType]] = {
    "bool": (pa.bool_(),),
    "int32": _SMALL,
    "sint32": _SMALL,
    "sfixed32": _SMALL,
    "uint32": (pa.uint16(), pa.uint32()),
    "fixed32": (pa.uint16(), pa.uint32()),
    "int64": _WIDE,
    "sint64": _WIDE,
    "sfixed64": _WIDE,
    "uint64": (pa.uint64(), pa.uint32()),
    "fixed64": (pa.uint64(), pa.uint32()),
    "float": (pa.float32(), pa.float16()),
    "double": (pa.float64(), pa.float32(), pa.float16()),
    "string": (
        pa.string(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.decimal128(9, 2),
        pa.decimal128(38, 10),
        pa.decimal128(18, 0),
    ),
    "bytes": (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(5)),
    "Color": (pa.large_string(), pa.dictionary(pa.uint16(), pa.large_string()), pa.uint8()),
}
_NARROW: dict[str, pa.DataType] = {
    "int32": pa.int64(),
    "sint32": pa.uint32(),
    "sfixed32": pa.int64(),
    "uint32": pa.int32(),
    "fixed32": pa.int64(),
    "int64": pa.uint64(),
    "uint64": pa.int64(),
}
"""Columns whose values do not all fit."""
_TIMES: dict[str, Sequence[pa.DataType]] = {
    "google.protobuf.Timestamp": (
        pa.timestamp("us", "UTC"),
        pa.timestamp("ms", "America/New_York"),
        pa.timestamp("s", "UTC"),
    ),
    "google.protobuf.Duration": (pa.duration("us"), pa.duration("ms")),
}
_WRAPPED = {
    "google.protobuf.DoubleValue": "double",
    "google.protobuf.FloatValue": "float",
    "google.protobuf.Int64Value": "int64",
    "google.protobuf.UInt64Value": "uint64",
    "google.protobuf.Int32Value": "int32",
    "google.protobuf.UInt32Value": "uint32",
    "google.protobuf.BoolValue": "bool",
    "google.protobuf.StringValue": "string",
    "google.protobuf.BytesValue": "bytes",
}
_KEYS = ("string", "int32", "sint64", "uint32", "bool", "fixed64")
_PACKABLE = frozenset(_FITTING) - {"string", "bytes"}


def random_value(rng: random.Random, data_type: pa.DataType) -> Any:
    """Return a value of a leaf: of the enum for its types, with some that it does not have."""
    if data_type == pa.large_string():
        return rng.choice([*COLORS, *COLORS, *COLORS, *COLORS, "PINK"])
    if data_type == pa.uint8():
        return rng.choice([0, 1, 2, 0, 1, 2, 200, 200, 9])
    if rng.random() < 0.1 and (pat.is_integer(data_type) or pat.is_floating(data_type)):
        return 0
    return generated_columns.random_value(rng, data_type)


# ---- messages and types that fit -----------------------------------------------------------------------------------


@dataclass
class ProtoFile:
    """A schema of `count` messages, M0, M1 and so on, and a type for each."""

    seed: int
    count: int
    types: list[pa.DataType] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        syntax = self.seed % len(SYNTAXES)
        lines = [SYNTAXES[syntax] + _HEAD]
        for number in range(self.count):
            made = _Message(rng, syntax, f"M{number}", 2)
            lines.append(made.text)
            self.types.append(made.type)
        self.text = "\n".join(lines)

    def classes(self) -> list[Any]:
        """Return the official runtime's classes of the messages."""
        return [message_class(self.text, f"shop.M{number}") for number in range(self.count)]


def message_class(proto: str, name: str) -> Any:
    """Return the class of a message of a .proto file."""
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(descriptor_set(proto)).file:
        pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(name))


class _Message:
    """A message as text, and the type of a struct for it."""

    def __init__(self, rng: random.Random, syntax: int, name: str, depth: int) -> None:
        self._rng, self._syntax, self._depth = rng, syntax, depth
        self._lines: list[str] = []
        self._numbers = iter(rng.sample((*range(1, 40), 100, 2047, 2048, 18_999, 536_870_911), 30))
        self._nested = 0
        self._fields: list[pa.Field] = []
        for _ in range(rng.randint(0, 7)):
            rng.choice((self._single, self._single, self._single, self._list, self._map, self._oneof))()
        rng.shuffle(self._lines)
        rng.shuffle(self._fields)
        self.text = "\n".join([f"message {name} {{", *self._lines, "}"])
        self.type = pa.struct(self._fields)

    def _add(self, name: str, data_type: pa.DataType, *, nullable: bool, always: bool = False) -> None:
        if always or self._rng.random() < 0.85:
            self._fields.append(pa.field(name, data_type, nullable))

    def _value(self) -> tuple[str, pa.DataType]:
        """Return a type of Protobuf that is no list, and one of Arrow."""
        rng = self._rng
        kind = rng.choice([*_FITTING, *_FITTING, *_TIMES, *_TIMES, *rng.sample(sorted(_WRAPPED), 4), *["message"] * 6])
        if kind in _TIMES:
            return kind, rng.choice(_TIMES[kind])
        if kind in _WRAPPED:
            return kind, rng.choice(_FITTING[_WRAPPED[kind]])
        if kind == "message" and self._depth > 0:
            self._nested += 1
            made = _Message(rng, self._syntax, f"N{self._nested}", self._depth - 1)
            self._lines.append(made.text)
            return f"N{self._nested}", made.type
        kind = "int64" if kind == "message" else kind
        is_narrow = kind in _NARROW and rng.random() < 0.04
        return kind, _NARROW[kind] if is_narrow else rng.choice(_FITTING[kind])

    def _name(self) -> tuple[str, int]:
        number = next(self._numbers)
        return f"f{number}", number

    def _single(self) -> None:
        (name, number), (kind, data_type) = self._name(), self._value()
        is_scalar = kind in _FITTING
        is_required = self._syntax > 0 and self._rng.random() < 0.15
        label, options = "", ""
        if self._syntax == 0 and self._rng.random() < 0.5:
            label = "optional "
        if self._syntax == 1:
            label = "required " if is_required else "optional "
            options = " [default = 7]" if kind == "int32" and not is_required and self._rng.random() < 0.5 else ""
        if self._syntax == 2 and is_required:
            options = " [features.field_presence = LEGACY_REQUIRED]"
        elif self._syntax == 2 and is_scalar and self._rng.random() < 0.5:
            options = " [features.field_presence = IMPLICIT]"
        self._lines.append(f"{label}{kind} {name} = {number}{options};")
        nullable = self._rng.random() < (0.2 if is_required else 0.8)
        self._add(name, data_type, nullable=nullable, always=is_required)

    def _list(self) -> None:
        (name, number), (kind, data_type) = self._name(), self._value()
        options = ""
        if kind in _PACKABLE and self._rng.random() < 0.5:
            options = self._rng.choice((" [packed = true]", " [packed = false]"))
            if self._syntax == 2:
                options = f" [features.repeated_field_encoding = {self._rng.choice(('PACKED', 'EXPANDED'))}]"
        self._lines.append(f"repeated {kind} {name} = {number}{options};")
        element = pa.field("element", data_type, self._rng.random() < 0.06)
        make: Callable[[pa.Field], pa.DataType] = self._rng.choice(
            (pa.list_, pa.list_, pa.large_list, lambda of: pa.list_(of, self._rng.randrange(4)))
        )
        self._add(name, make(element), nullable=True)

    def _map(self) -> None:
        (name, number), (kind, data_type) = self._name(), self._value()
        key = self._rng.choice(_KEYS)
        self._lines.append(f"map<{key}, {kind}> {name} = {number};")
        key_type = pa.field("key", self._rng.choice(_FITTING[key][:2]), nullable=False)
        self._add(name, pa.map_(key_type, pa.field("value", data_type, self._rng.random() < 0.06)), nullable=True)

    def _oneof(self) -> None:
        members = [(self._name(), self._value()) for _ in range(3)]
        written = " ".join(f"{kind} {name} = {number};" for (name, number), (kind, _) in members)
        self._lines.append(f"oneof {members[0][0][0]}_or {{ {written} }}")
        for (name, _), (_, data_type) in members[: self._rng.choice((1, 1, 2))]:
            self._add(name, data_type, nullable=True)


# ---- the judge -----------------------------------------------------------------------------------------------------


class DoesNotFitError(Exception):
    """A row that no message can hold."""


def message_of(made: Any, value: dict[str, Any], data_type: pa.DataType) -> Any:
    """Fill a message with a struct as Python values, and return it. Raises DoesNotFitError."""
    chosen: set[str] = set()
    for of in data_type:
        descriptor = made.DESCRIPTOR.fields_by_name[of.name]
        part = value[of.name]
        if part is None:
            if descriptor.is_required:
                raise DoesNotFitError(of.name)
            continue
        oneof = descriptor.containing_oneof
        if oneof is not None:
            if oneof.name in chosen:
                raise DoesNotFitError(oneof.name)
            chosen.add(oneof.name)
        if descriptor.is_repeated:
            _fill_repeated(getattr(made, of.name), part, plain_type(of.type), descriptor)
        else:
            _set(made, descriptor, part, of.type)
    return made


def _fill_repeated(target: Any, values: Any, data_type: pa.DataType, descriptor: Any) -> None:
    if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        key_of, value_of = (
            descriptor.message_type.fields_by_name["key"],
            descriptor.message_type.fields_by_name["value"],
        )
        for key, value in values:
            if value is None:
                raise DoesNotFitError(descriptor.name)
            with _in_range():
                if value_of.message_type is None:
                    target[_scalar(key, key_of)] = _scalar(value, value_of)
                else:
                    target[_scalar(key, key_of)].CopyFrom(_message(value, value_of, data_type.item_type))
        return
    for value in values:
        if value is None:
            raise DoesNotFitError(descriptor.name)
        if descriptor.message_type is not None:
            target.append(_message(value, descriptor, data_type.value_type))
        else:
            with _in_range():
                target.append(_scalar(value, descriptor))


def _set(made: Any, descriptor: Any, value: Any, data_type: pa.DataType) -> None:
    if descriptor.message_type is not None:
        part = getattr(made, descriptor.name)
        part.SetInParent()
        part.CopyFrom(_message(value, descriptor, data_type))
    else:
        with _in_range():
            setattr(made, descriptor.name, _scalar(value, descriptor))


def _message(value: Any, descriptor: Any, data_type: pa.DataType) -> Any:
    made = GetMessageClass(descriptor.message_type)()
    if isinstance(value, datetime):
        made.FromDatetime(value)
    elif isinstance(value, timedelta):
        made.FromTimedelta(value)
    elif isinstance(value, dict):
        message_of(made, value, plain_type(data_type))
    else:
        with _in_range():
            made.value = _scalar(value, descriptor.message_type.fields_by_name["value"])
    return made


def _scalar(value: Any, descriptor: Any) -> Any:
    if descriptor.enum_type is not None:
        found = descriptor.enum_type.values_by_number if isinstance(value, int) else descriptor.enum_type.values_by_name
        if value not in found:
            raise DoesNotFitError(descriptor.name)
        return found[value].number
    if isinstance(value, date):
        return (value - date(1970, 1, 1)).days
    if isinstance(value, time):
        return (value.hour * 3600 + value.minute * 60 + value.second) * 1_000_000 + value.microsecond
    return str(value) if isinstance(value, Decimal) else value


class _in_range:  # noqa: N801  used like a function
    """The runtime refuses a number that is out of the range of its field by a ValueError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise DoesNotFitError(str(error)) from None


def has_long_map(value: Any, data_type: pa.DataType) -> bool:
    """Whether a map has several entries, whose order the runtime chooses."""
    return any(_long_maps(value, data_type))


def _long_maps(value: Any, data_type: pa.DataType) -> Iterator[bool]:
    data_type = plain_type(data_type)
    if value is None:
        return
    if pat.is_struct(data_type):
        for of in data_type:
            yield from _long_maps(value[of.name], of.type)
    elif pat.is_map(data_type):
        yield len(value) > 1
        for _, item in value:
            yield from _long_maps(item, data_type.item_type)
    elif pat.is_list(data_type) or pat.is_large_list(data_type) or pat.is_fixed_size_list(data_type):
        for element in value:
            yield from _long_maps(element, data_type.value_type)
