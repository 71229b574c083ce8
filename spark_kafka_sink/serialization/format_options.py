"""The options of formats: what the columns `value` and `key` become, and where their schemas are registered.

`formats_of` parses them, once and without I/O, for the sink and for `KafkaProducer.write`: both have the same names.
Each Python worker of Spark imports this module, also if there are no formats, so it imports little itself. Plain
functions and values; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import RefusalError, boolean, nearest, non_empty_text, one_of
from spark_kafka_sink.common.texts import shown
from spark_kafka_sink.serialization.column_format import (
    AVRO,
    JSON,
    JSON_SCHEMA,
    NULL_FIRST,
    NULL_LAST,
    PROTOBUF,
    STRATEGIES,
    FormatSettings,
    JsonOptions,
)

if TYPE_CHECKING:
    from spark_kafka_sink.serialization.registry_settings import RegistrySettings

FIELDS: Final = ("value", "key")
REGISTRY: Final = "schema.registry."
URL: Final = f"{REGISTRY}url"
LOCATION: Final = "schema.id.location"

_OF_FORMATS: Final[Mapping[str, tuple[str, ...]]] = {
    AVRO: ("schema", "avro.nullable", "subject.name.strategy"),
    PROTOBUF: ("schema", "schema.message", "subject.name.strategy"),
    JSON: ("json.ignoreNullFields", "json.timeZone"),
    JSON_SCHEMA: ("schema", "subject.name.strategy", "json.ignoreNullFields", "json.timeZone"),
}
"""Format → its options, after `value.` or `key.`."""
_WITH_SCHEMA: Final = tuple(name for name, own in _OF_FORMATS.items() if "schema" in own)
_PARSERS: Final[Mapping[str, Callable[[object], Any]]] = {
    "format": one_of(*_OF_FORMATS),
    "schema": non_empty_text,
    "schema.message": non_empty_text,
    "avro.nullable": one_of(NULL_LAST, NULL_FIRST),
    "json.ignoreNullFields": boolean,
    "json.timeZone": non_empty_text,
    "subject.name.strategy": one_of(*STRATEGIES),
}
"""Option, after `value.` or `key.` → its parser."""
OPTIONS: Final = (*(f"{field}.{name}" for field in FIELDS for name in _PARSERS), URL, LOCATION)
"""Every option but the registry client's own settings, as the pages spell them."""
_SPELLED: Final = {name.lower(): name for name in OPTIONS}
_PATTERNS: Final = {
    f"{field}.json.{name}".lower()
    for field in FIELDS
    for name in ("dateFormat", "timestampFormat", "timestampNTZFormat", "locale", "pretty", "encoding")
}
"""Other options of `to_json`. None of them can be used here."""


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats that the options ask for. No secret is in its repr."""

    value: FormatSettings | None = None
    key: FormatSettings | None = None
    registry: RegistrySettings | None = None

    def settings(self) -> Iterator[FormatSettings]:
        """Yield the settings of the columns that have a format."""
        return (each for each in (self.value, self.key) if each is not None)

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that have a format."""
        return tuple(each.field for each in self.settings())

    def describe(self) -> list[str]:
        """Return the formats as options, for a text."""
        return [f"{each.field}.format={each.name!r}" for each in self.settings()]


def is_option(key: str) -> bool:
    """Return whether `key`, in lower case, is an option of formats. Those of the registry's client are not checked."""
    return key in _SPELLED or key in _PATTERNS or _is_of_registry(key)


def _is_of_registry(key: str) -> bool:
    return key.startswith(REGISTRY) or key == LOCATION


def formats_of(options: Mapping[str, object]) -> Formats | None:
    """Parse the options of formats among `options`, whose names are in lower case. None if there are none.

    Raises ConfigError for a value that is malformed, and for an option that has no effect without another.
    """
    given = {_SPELLED.get(key, key): value for key, value in options.items() if is_option(key) and value is not None}
    if not given:
        return None
    for key in given:
        if key in _PATTERNS:
            raise ConfigError(
                f"There is no option {key}: JSON is written as to_json writes it by default. For another pattern make"
                " the field a string, by date_format for example; or write the column as text, by to_json with its"
                " options.",
                setting=key,
            )
    settings = {field: _settings(field, given) for field in FIELDS}
    if not any(settings.values()):
        raise _without(min(given), "value.format or key.format")
    registry = _registry({key: value for key, value in given.items() if _is_of_registry(key)})
    if registry is not None and not any(each is not None and each.name in _WITH_SCHEMA for each in settings.values()):
        raise ConfigError(
            f"{URL} is set, and {JSON} has no schema to register. Take another format for the column that shall have"
            f" one: {', '.join(_WITH_SCHEMA)}.",
            setting=URL,
        )
    if registry is not None and registry.use_schema_id is not None:
        _check_one_schema([each for each in settings.values() if each is not None and each.name in _WITH_SCHEMA])
    return Formats(settings["value"], settings["key"], registry)


def _check_one_schema(settings: Sequence[FormatSettings]) -> None:
    """Raise ConfigError if two columns have a schema. One id is the schema of one of them."""
    if len(settings) > 1:
        option = f"{REGISTRY}use.schema.id"
        columns = " and ".join(f"{each.field}.format={each.name}" for each in settings)
        raise ConfigError(
            f"{option} is the id of one schema, and {columns} need one each. Leave it out: a schema that is given by"
            f" value.schema or key.schema has the id that the registry gave it. Or set {REGISTRY}use.latest.version.",
            setting=option,
        )


def formats_of_write(options: Mapping[str, object]) -> Formats:
    """Parse the argument `serialization` of `KafkaProducer.write`: only options of this module. Case does not count.

    Raises ConfigError for an unknown option too, and without a format.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"serialization takes a mapping of options, not {type(options).__name__}.")
    by_key = {str(key).strip().lower(): value for key, value in options.items()}
    if len(by_key) < len(options):
        raise ConfigError("An option of serialization is given twice: case does not count in option names.")
    for key in by_key:
        if not is_option(key):
            meant = nearest(key, _SPELLED)
            advice = "leave it out" if meant is None else f"the nearest one is {_SPELLED[meant]}"
            raise ConfigError(f"serialization has no option {key}: {advice}.", setting=key)
    formats = formats_of(by_key)
    if formats is None:
        raise ConfigError("serialization has no format: set value.format or key.format, or leave the argument out.")
    return formats


def _registry(given: Mapping[str, object]) -> RegistrySettings | None:
    if not given:
        return None
    from spark_kafka_sink.serialization.registry_settings import RegistrySettings  # few writes need it

    return RegistrySettings.from_options(given)


def _settings(field: str, given: Mapping[str, object]) -> FormatSettings | None:
    found = {name: _parsed(f"{field}.{name}", given, parse) for name, parse in _PARSERS.items()}
    found = {name: value for name, value in found.items() if value is not None}
    if not found:
        return None
    own = found.pop("format", None)
    if own is None:
        raise _without(f"{field}.{next(iter(found))}", f"{field}.format")
    for name in found:
        if name not in _OF_FORMATS[own]:
            formats = " and ".join(each for each, options in _OF_FORMATS.items() if name in options)
            raise ConfigError(
                f"{field}.{name} has no effect with {field}.format={own}: leave it out. It is for {formats}.",
                setting=f"{field}.{name}",
            )
    _check_pairs(field, found, given)
    return FormatSettings(
        field,
        own,
        schema=found.get("schema"),
        message=found.get("schema.message"),
        nullable=found.get("avro.nullable", NULL_LAST),
        json=JsonOptions(
            ignore_null_fields=found.get("json.ignoreNullFields", True), time_zone=found.get("json.timeZone")
        ),
        strategy=found.get("subject.name.strategy", STRATEGIES[0]),
    )


def _check_pairs(field: str, found: Mapping[str, Any], given: Mapping[str, object]) -> None:
    """Raise ConfigError for an option that has no effect beside the others, or lacks one."""
    if "avro.nullable" in found and "schema" in found:
        raise ConfigError(
            f"{field}.avro.nullable has no effect with {field}.schema, which has its own unions: leave one out.",
            setting=f"{field}.avro.nullable",
        )
    if "subject.name.strategy" in found and URL not in given:
        raise _without(f"{field}.subject.name.strategy", URL)


def _parsed(key: str, given: Mapping[str, object], parse: Callable[[object], Any]) -> Any:
    if key not in given:
        return None
    try:
        return parse(given[key])
    except RefusalError as refusal:
        raise ConfigError(f"{key}={shown(given[key]):.100} {refusal}.", setting=key) from None


def _without(key: str, needed: str) -> ConfigError:
    return ConfigError(f"{key} has no effect without {needed}: set that too, or leave it out.", setting=key)
