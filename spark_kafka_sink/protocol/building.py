"""Fill kio's classes from plain values by field name, in any version.

Durations are given in ms, and arrays of entities as lists of mappings. A field that a version lacks is left out if its
value is the default that an older broker assumes, and refused otherwise. So no request to an old broker loses a part
of its meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Final, NamedTuple, get_args, get_origin

from spark_kafka_sink.common.errors import UnsupportedVersionError
from spark_kafka_sink.protocol.framing import encode_request
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, Message, MessageType, Request, request_type


class VersionedRequest:
    """A request in every version of `SUPPORTED_VERSIONS`. The base class of our requests."""

    api_key: ClassVar[ApiKey]

    @property
    def oldest_version(self) -> int:
        return SUPPORTED_VERSIONS[self.api_key].oldest

    @property
    def latest_version(self) -> int:
        return SUPPORTED_VERSIONS[self.api_key].latest

    @property
    def purpose(self) -> str:
        return ""

    def encode(self: Request, version: int, correlation_id: int, client_id: str | None) -> list[memoryview]:
        return encode_request(self.build(version), correlation_id, client_id)

    def _fill(self, version: int, values: Mapping[str, object]) -> Message:
        newest = request_type(self.api_key, SUPPORTED_VERSIONS[self.api_key].latest)
        return fill(request_type(self.api_key, version), newest, values)


class _FieldPlan(NamedTuple):
    default: object
    nested: MessageType | None
    is_duration: bool
    is_nullable: bool


_ZEROES: Final[dict[str, object]] = {"string": "", "bytes": b"", "bool": False, "uuid": None, "records": None}


def fill(entity_type: MessageType, newest_type: MessageType, values: Mapping[str, object]) -> Message:
    """Return an entity of `entity_type` from values by field name. A field without a value takes the schema's default.

    `newest_type` is the same message in the latest supported version: it knows the default of a field that
    `entity_type` lacks. Raises UnsupportedVersionError for a field that `entity_type` lacks and that is not at its
    default.
    """
    plan, newest = _plan(entity_type), _plan(newest_type)
    arguments: dict[str, Any] = {}
    for name, field in plan.items():
        value = values.get(name, field.default)
        if field.nested is not None and isinstance(value, (tuple, list)):
            newest_nested = (newest[name].nested if name in newest else None) or field.nested
            value = tuple(fill(field.nested, newest_nested, item) for item in value)
        elif field.is_duration and isinstance(value, int):
            value = timedelta(milliseconds=value)
        if value is None and not field.is_nullable:
            raise _too_old(entity_type, f"takes no null for {name}")
        arguments[name] = value
    for name, value in values.items():
        if name not in plan and value != newest[name].default:
            raise _too_old(entity_type, f"has no {name}, and {name}={value!r} cannot be left out")
    return entity_type(**arguments)


@cache
def _plan(entity_type: MessageType) -> dict[str, _FieldPlan]:
    return {field.name: _field_plan(field) for field in dataclasses.fields(entity_type)}


def _field_plan(field: dataclasses.Field[Any]) -> _FieldPlan:
    kafka_type = str(field.metadata.get("kafka_type", ""))
    nested = _nested_type(field.type)
    if field.default is not dataclasses.MISSING:
        default: object = field.default
    elif NoneType in get_args(field.type):
        default = None
    elif get_origin(field.type) is tuple:
        default = ()
    else:
        default = _ZEROES.get(kafka_type, 0)
    is_nullable = NoneType in get_args(field.type)
    return _FieldPlan(default, nested, kafka_type.startswith("timedelta"), is_nullable)


def _too_old(entity_type: MessageType, lack: str) -> UnsupportedVersionError:
    version = f"{entity_type.__name__} version {entity_type.__version__}"
    return UnsupportedVersionError(f"{version} {lack}: the broker is too old for this.")


def _nested_type(annotation: Any) -> MessageType | None:
    for part in (annotation, *get_args(annotation)):
        for inner in (part, *get_args(part)):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                return inner
    return None
