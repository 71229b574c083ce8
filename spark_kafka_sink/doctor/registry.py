"""The schema registry: whether each address answers, takes the login, and has or would take the schemas.

`gather` asks, and registers nothing; `judge` decides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from spark_kafka_sink.common.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigError,
    KafkaError,
    RegistryError,
    SchemaError,
)
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.doctor.findings import Area, Finding, not_checked, ok, problem
from spark_kafka_sink.serialization import registry
from spark_kafka_sink.serialization.column_format import JSON, ColumnFormat, FormatSettings
from spark_kafka_sink.serialization.format_options import Formats
from spark_kafka_sink.serialization.registry import Examined

_AREA: Final = Area.REGISTRY


@dataclass(frozen=True, slots=True)
class Asked:
    """What the registry says about one column. `error`: why it was not asked."""

    column: FormatSettings
    answers: tuple[Examined, ...] = ()
    error: KafkaError | None = None


def gather(formats: Formats, topic: str | None, limit_ms: int) -> list[Asked]:
    """Ask about each column with a schema, without retries."""
    assert formats.registry is not None
    settings = replace(formats.registry, max_retries=0, timeout=min(formats.registry.timeout, limit_ms / 1000))
    found = []
    for column in formats.settings():
        if column.name == JSON:
            continue
        own = ColumnFormat(column.field, column.name, column.schema, column.message)
        try:
            answers = tuple(registry.examined(own, settings, column.strategy, topic))
            found.append(Asked(column, answers))
        except KafkaError as error:
            found.append(Asked(column, error=error))
    return found


def judge(asked: Sequence[Asked]) -> list[Finding]:
    return [finding for each in asked for finding in _column(each)]


def _column(asked: Asked) -> list[Finding]:
    field = asked.column.field
    if isinstance(asked.error, ConfigError):
        what, text = f"{field}.format", one_line(str(asked.error))
        return [problem("registry-client-missing", _AREA, what, text, python=sys.executable or "python")]
    if asked.error is not None:
        return [not_checked(_AREA, f"{field}.format", one_line(str(asked.error)))]
    return [_address(each, asked.column) for each in asked.answers]


def _address(answer: Examined, column: FormatSettings) -> Finding:
    what = one_line(f"{answer.address}, {column.field}")
    if answer.error is not None:
        text = one_line(str(answer.error))
        return problem(_name_of(answer.error), _AREA, what, text)
    if not answer.is_known:
        return ok(_AREA, what, "reached; the subject is new, and the first write registers it")
    if answer.is_compatible is False:
        seen = "the subject's compatibility refuses it"
        return problem("schema-incompatible", _AREA, what, seen, option=f"{column.field}.schema")
    if answer.is_compatible:
        return ok(_AREA, what, "reached; the given schema is compatible")
    if column.schema is None:
        return ok(_AREA, what, "reached; the schema comes from the DataFrame's columns, so it was not compared")
    return ok(_AREA, what, "reached; the schema is there")


_OF_REGISTRY: Final[Mapping[str, str]] = {
    registry.NO_CONNECTION: "registry-unreachable",
    registry.UNTRUSTED: "registry-certificate",
    registry.NO_REGISTRY: "registry-not-there",
    registry.BUSY: "registry-busy",
}
_OF_CLASS: Final[Sequence[tuple[type[KafkaError], str]]] = (
    (AuthenticationError, "registry-login-refused"),
    (AuthorizationError, "registry-denied"),
    (SchemaError, "schema-unusable"),
)


def _name_of(error: KafkaError) -> str:
    if isinstance(error, RegistryError):
        return _OF_REGISTRY.get(error.fault, "registry-unreachable")
    return next((name for kind, name in _OF_CLASS if isinstance(error, kind)), "registry-unreachable")
