"""Plain values into a response frame, by kio. Values that a version does not have are dropped, as by a broker."""

from __future__ import annotations

import dataclasses
import datetime
import io
import struct
from collections.abc import Mapping
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin

from kio.index import load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer
from kio.static.primitive import i32


class RawErrorCode(int):
    """An error code that kio does not know; its writer asks for `value`."""

    @property
    def value(self) -> int:
        return int(self)


class NoTime:
    """A missing time: Kafka writes -1 ms, which no datetime is."""

    def timestamp(self) -> float:
        return -0.001


def encode_response(api_key: int, version: int, correlation_id: int, values: Mapping[str, Any]) -> bytes:
    """Return the whole frame, size included. Durations and times are ms, nested entities mappings, error codes ints."""
    entity_type = load_response_schema(api_key, version)
    header_type = entity_type.__header_schema__
    buffer = io.BytesIO()
    entity_writer(header_type)(buffer, header_type(correlation_id=i32(correlation_id)))
    entity_writer(entity_type)(buffer, build_entity(entity_type, values))
    body = buffer.getvalue()
    return struct.pack(">i", len(body)) + body


def build_entity(entity_type: Any, values: Mapping[str, Any]) -> Any:
    arguments = {}
    for name, kafka_type, nested, zero in _fields(entity_type):
        if name not in values:
            if zero is not dataclasses.MISSING:
                arguments[name] = zero
            continue
        value = values[name]
        if nested is not None and value is not None:
            value = (
                build_entity(nested, value)
                if isinstance(value, Mapping)
                else tuple(build_entity(nested, item) for item in value)
            )
        elif kafka_type == "error_code":
            value = _code(value)
        elif kafka_type.startswith("timedelta"):
            value = datetime.timedelta(milliseconds=value)
        elif kafka_type == "datetime_i64" and value is not None:
            value = datetime.datetime.fromtimestamp(value / 1000, datetime.UTC) if value >= 0 else NoTime()
        arguments[name] = value
    return entity_type(**arguments)


def _code(value: int) -> Any:
    try:
        return ErrorCode(value)
    except ValueError:
        return RawErrorCode(value)


@cache
def _fields(entity_type: Any) -> list[tuple[str, str, Any, Any]]:
    """Return (name, kafka type, nested class, default value) of every field."""
    found = []
    for field in dataclasses.fields(entity_type):
        kafka_type = field.metadata.get("kafka_type", "")
        if field.default is not dataclasses.MISSING:
            zero: Any = dataclasses.MISSING  # kio fills it in
        elif NoneType in get_args(field.type):
            zero = None
        elif get_origin(field.type) is tuple:
            zero = ()
        else:
            zero = {"error_code": ErrorCode.none, "string": "", "bool": False}.get(kafka_type, 0)
            if kafka_type.startswith("timedelta"):
                zero = datetime.timedelta(0)
            elif kafka_type == "datetime_i64":
                zero = datetime.datetime.fromtimestamp(0, datetime.UTC)
        found.append((field.name, kafka_type, _nested(field.type), zero))
    return found


def _nested(annotation: Any) -> Any:
    for part in (annotation, *get_args(annotation)):
        for inner in (part, *get_args(part)):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                return inner
    return None
