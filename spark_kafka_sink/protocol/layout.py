"""Check the bytes of a response against the layout of kio's entities, before kio reads them.

kio's reader trusts its input. It reserves memory for any count, so that one count can abort the process; it takes a
null where the schema allows none; it fails on an error code or a tag that it does not know. So functions walk over the
response first. They are made once per class, from the same dataclasses. They compare counts and lengths with the
remaining bytes, and nulls with the schema, and note each place that kio could not read as an edit. A run of fields of
fixed size is one step, because a walk is made for every response.

Sources: the protocol guide ("Protocol Primitive Types"), KIP-482 (tagged fields).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import NoneType
from typing import Any, Final, NamedTuple, TypeAlias, get_args, get_origin

from kio.schema.errors import ErrorCode

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.protocol.versions import Message, MessageType

Data: TypeAlias = bytes | bytearray | memoryview


class Edit(NamedTuple):
    """Bytes to replace before kio reads the payload.

    `note` is for the log, or empty. `code` is the error code that stood there, for each that kio reads as
    UNKNOWN_SERVER_ERROR.
    """

    start: int
    end: int
    replacement: bytes
    note: str
    code: int | None = None


Step: TypeAlias = Callable[[Data, int, list[Edit]], int]
"""Walk one field or entity at an offset and return the offset after it. Raises IndexError, struct.error or
ProtocolError.
"""

_FIXED_SIZES: Final = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "error_code": 2, "int32": 4, "uint32": 4, "int64": 8,
    "uint64": 8, "float64": 8, "timedelta_i32": 4, "timedelta_i64": 8, "datetime_i64": 8, "uuid": 16,
}  # fmt: skip
_KNOWN_CODES: Final = frozenset(int(code) for code in ErrorCode)
_UNKNOWN_SERVER_ERROR: Final = struct.pack(">h", -1)
_INT64: Final = struct.Struct(">q")
_INT32: Final = struct.Struct(">i")
_INT16: Final = struct.Struct(">h")


class _Field(NamedTuple):
    step: Step
    min_size: int
    fixed_size: int | None
    is_error_code: bool


@cache
def layout_of(entity_type: MessageType) -> Step:
    """Return the walk over one entity of this class."""
    return _entity(entity_type)[0]


def apply_edits(data: Data, edits: Sequence[Edit]) -> bytes:
    """Return the bytes with all edits made. Edits are in order and do not overlap."""
    pieces: list[Data] = []
    at = 0
    for edit in edits:
        pieces += (data[at : edit.start], edit.replacement)
        at = edit.end
    pieces.append(data[at:])
    return b"".join(pieces)


def restore_codes(entity: Message, codes: Iterator[int]) -> None:
    """Put `codes` where kio has read UNKNOWN_SERVER_ERROR, in the order of the payload.

    Codes inside tagged fields stay UNKNOWN_SERVER_ERROR.
    """
    for declared in dataclasses.fields(entity):
        if declared.metadata.get("tag") is not None:
            continue
        value = getattr(entity, declared.name)
        if value is ErrorCode.unknown_server_error:
            object.__setattr__(entity, declared.name, next(codes))  # frozen, but no other object has it yet
            continue
        for item in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(item):
                restore_codes(item, codes)


def read_varint(data: Data, at: int) -> tuple[int, int]:
    """Return an unsigned varint of at most 31 bits, and the offset after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 28:
            raise ProtocolError("a varint runs past five bytes")
    if value > 0x7FFFFFFF:
        raise ProtocolError(f"a varint of {value} is beyond 31 bits")
    return value, at


def write_varint(value: int) -> bytes:
    """Return the bytes of an unsigned varint."""
    if value <= 0x7F:
        return bytes((value,))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(0x80 | (value & 0x7F))
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


# ---- one entity ----------------------------------------------------------------------------------------------------


@cache
def _entity(entity_type: MessageType) -> tuple[Step, int]:
    """Return the walk over an entity, and the fewest bytes that an entity takes."""
    steps, min_size = _steps_of(entity_type)

    def walk(data: Data, at: int, edits: list[Edit]) -> int:
        for step in steps:
            at = step(data, at, edits)
        return at

    return walk, min_size


@cache
def _steps_of(entity_type: MessageType) -> tuple[tuple[Step, ...], int]:
    flexible = bool(entity_type.__flexible__)
    plain: list[_Field] = []
    tagged: dict[int, Step] = {}
    for declared in dataclasses.fields(entity_type):
        field = _field(declared, flexible)
        tag = declared.metadata.get("tag")
        if tag is None:
            plain.append(field)
        else:
            tagged[int(tag)] = field.step
    steps = _merge_fixed_runs(plain)
    if flexible:
        steps.append(_tags(tagged))
    return tuple(steps), sum(field.min_size for field in plain) + flexible


def _merge_fixed_runs(fields: Sequence[_Field]) -> list[Step]:
    steps: list[Step] = []
    size = 0
    codes: list[int] = []
    for field in fields:
        if field.fixed_size is None:
            if size:
                steps.append(_fixed(size, tuple(codes)))
            steps.append(field.step)
            size, codes = 0, []
            continue
        if field.is_error_code:
            codes.append(size)
        size += field.fixed_size
    if size:
        steps.append(_fixed(size, tuple(codes)))
    return steps


def _field(declared: dataclasses.Field[Any], flexible: bool) -> _Field:
    nullable, is_array, inner = _shape(declared.type)
    if hasattr(inner, "__flexible__"):
        if is_array:
            item_steps, min_item = _steps_of(inner)
            return _Field(_array(item_steps, min_item, flexible, nullable), 1 if flexible else 4, None, False)
        if nullable:
            raise TypeError(f"{declared.name} of {inner.__name__} is a nullable struct (KIP-893): not walked yet")
        step, min_size = _entity(inner)
        return _Field(step, min_size, None, False)
    kafka_type = str(declared.metadata["kafka_type"])
    size = _FIXED_SIZES.get(kafka_type)
    if kafka_type == "datetime_i64" and not nullable and not is_array:
        return _Field(_date, _INT64.size, None, False)
    if size is not None:
        fixed = _fixed(size, (0,) if kafka_type == "error_code" else ())
        if not is_array:
            return _Field(fixed, size, size, kafka_type == "error_code")
        return _Field(_array((fixed,), size, flexible, nullable), 1 if flexible else 4, None, False)
    width = 2 if kafka_type == "string" else 4
    bytes_step = _bytes(width, flexible, nullable and not is_array)
    if not is_array:
        return _Field(bytes_step, 1 if flexible else width, None, False)
    return _Field(
        _array((bytes_step,), 1 if flexible else width, flexible, nullable), 1 if flexible else 4, None, False
    )


def _shape(annotation: Any) -> tuple[bool, bool, MessageType]:
    """Return (nullable, array, inner type) of a kio field: `X`, `X | None`, `tuple[X, ...]`, `tuple[X, ...] | None`."""
    nullable = NoneType in get_args(annotation)
    if nullable:
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is not tuple:
        return nullable, False, annotation
    inner = get_args(annotation)[0]
    return nullable, True, next((part for part in get_args(inner) if part is not NoneType), inner)


# ---- its parts -----------------------------------------------------------------------------------------------------


def _fixed(size: int, codes: tuple[int, ...]) -> Step:
    def walk(data: Data, at: int, edits: list[Edit]) -> int:
        end = at + size
        if end > len(data):
            raise IndexError
        for code_at in codes:
            (code,) = _INT16.unpack_from(data, at + code_at)
            if code not in _KNOWN_CODES or code == -1:
                note = "" if code == -1 else f"unknown error code {code}, read as UNKNOWN_SERVER_ERROR"
                edits.append(Edit(at + code_at, at + code_at + 2, _UNKNOWN_SERVER_ERROR, note, code))
        return end

    return walk


def _date(data: Data, at: int, edits: list[Edit]) -> int:
    """Walk a time in ms.

    Kafka sends -1 for "none" even in fields that allow no null. kio refuses -1, so it gets the epoch instead.
    """
    if _INT64.unpack_from(data, at)[0] == -1:
        edits.append(Edit(at, at + _INT64.size, bytes(_INT64.size), ""))
    return at + _INT64.size


def _length(data: Data, at: int, width: int, flexible: bool) -> tuple[int, int]:
    """Return a length or count (-1 for null), and the offset after it."""
    if flexible:
        value = data[at]
        if value < 0x80:
            return value - 1, at + 1
        value, at = read_varint(data, at)
        return value - 1, at
    return (_INT16 if width == 2 else _INT32).unpack_from(data, at)[0], at + width


def _bytes(width: int, flexible: bool, nullable: bool) -> Step:
    def walk(data: Data, at: int, _edits: list[Edit]) -> int:
        if nullable and flexible and data[at] == 0:  # a null, the usual case
            return at + 1
        length, at = _length(data, at, width, flexible)
        if length < 0:
            if nullable and length == -1:
                return at
            raise ProtocolError(f"a length of {length}")
        at += length
        if at > len(data):
            raise IndexError
        return at

    return walk


def _array(steps: tuple[Step, ...], min_item: int, flexible: bool, nullable: bool) -> Step:
    item_size = max(1, min_item)

    def walk(data: Data, at: int, edits: list[Edit]) -> int:
        if flexible and data[at] == 1:  # empty, the usual case
            return at + 1
        count, at = _length(data, at, 4, flexible)
        if count < 0:
            if nullable and count == -1:
                return at
            raise ProtocolError(f"a count of {count}")
        if count * item_size > len(data) - at:
            raise ProtocolError(f"a count of {count} with {len(data) - at} bytes left")
        for _ in range(count):
            for step in steps:
                at = step(data, at, edits)
        return at

    return walk


def _tags(known: dict[int, Step]) -> Step:
    def walk(data: Data, at: int, edits: list[Edit]) -> int:
        if data[at] == 0:
            return at + 1
        count_at = at
        count, at = read_varint(data, at)
        after_count = at
        kept = 0
        changes: list[Edit] = []
        for _ in range(count):
            start = at
            tag, at = read_varint(data, at)
            size, at = read_varint(data, at)
            end = at + size
            if end > len(data):
                raise IndexError
            step = known.get(tag)
            if step is None:
                changes.append(Edit(start, end, b"", ""))
            else:
                kept += 1
                inner: list[Edit] = []
                if step(data, at, inner) != end:
                    raise ProtocolError(f"tag {tag} does not fill its {size} bytes")
                if inner:
                    changes.append(_rewritten_tag(data, start, tag, at, end, inner))
            at = end
        if kept != count:
            edits.append(Edit(count_at, after_count, write_varint(kept), ""))
        edits += changes
        return at

    return walk


def _rewritten_tag(data: Data, start: int, tag: int, body: int, end: int, inner: Sequence[Edit]) -> Edit:
    moved = [edit._replace(start=edit.start - body, end=edit.end - body) for edit in inner]
    content = apply_edits(data[body:end], moved)
    note = "; ".join(edit.note for edit in inner if edit.note)
    return Edit(start, end, write_varint(tag) + write_varint(len(content)) + content, note)
