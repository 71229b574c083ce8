"""Entities of kio's classes with random contents: all that the schema allows a peer to send."""

from __future__ import annotations

import dataclasses
import datetime
import io
import struct
import uuid
from collections.abc import Callable
from random import Random
from types import NoneType
from typing import Any, get_args, get_origin

from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

_CODES = sorted(ErrorCode)
_INT_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_UINT_BITS = {"uint8": 8, "uint16": 16, "uint32": 32}


def random_entity(entity_type: Any, random: Random) -> Any:
    """Return an entity with random fields; arrays of up to three items, nulls if they are allowed."""
    return entity_type(**{field.name: _field(field, random) for field in dataclasses.fields(entity_type)})


def response_payload(entity: Any, correlation_id: int) -> bytes:
    """Return the response's frame without its size, written by kio."""
    header_type = type(entity).__header_schema__
    buffer = io.BytesIO()
    entity_writer(header_type)(buffer, header_type(correlation_id=correlation_id))
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += struct.pack("B", 0x80 | value & 0x7F)
        value >>= 7
    return encoded + struct.pack("B", value)


def _field(field: Any, random: Random) -> Any:
    annotation, kafka_type = field.type, field.metadata.get("kafka_type", "")
    is_tagged = "tag" in field.metadata
    if NoneType in get_args(annotation):
        if random.random() < 0.3 and kafka_type != "uuid" and not is_tagged:
            return None
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)[0]
        inner = next((part for part in get_args(inner) if part is not NoneType), inner)
        return tuple(_value(inner, kafka_type, random) for _ in range(random.randrange(4)))
    return _value(annotation, kafka_type, random)


def _value(annotation: Any, kafka_type: str, random: Random) -> Any:
    if dataclasses.is_dataclass(annotation):
        return random_entity(annotation, random)
    if kafka_type in _INT_BITS:
        bits = _INT_BITS[kafka_type]
        return random.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    if kafka_type in _UINT_BITS:
        return random.randrange(2 ** _UINT_BITS[kafka_type])
    simple: dict[str, Callable[[], Any]] = {
        "bool": lambda: random.random() < 0.5,
        "string": lambda: "".join(random.choices("aé語🙂 .", k=random.choice((0, 1, 5, 130)))),
        "bytes": lambda: random.randbytes(random.choice((0, 3, 200))),
        "records": lambda: random.randbytes(random.choice((0, 3, 200))),
        "uuid": lambda: uuid.UUID(int=random.getrandbits(128) or 1),
        "error_code": lambda: random.choice(_CODES),
        "timedelta_i32": lambda: datetime.timedelta(milliseconds=random.randrange(2**31)),
        "timedelta_i64": lambda: datetime.timedelta(milliseconds=random.randrange(2**40)),
        "datetime_i64": lambda: datetime.datetime.fromtimestamp(random.randrange(2**31), datetime.UTC),
    }
    return simple[kafka_type]()
