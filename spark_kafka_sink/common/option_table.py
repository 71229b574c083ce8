"""How a row of a table of settings is written: a dataclass field whose metadata say what it takes and means. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, NamedTuple, TypeVar

from spark_kafka_sink.common import option_parsers as parsers
from spark_kafka_sink.common.errors import ConfigError

T = TypeVar("T")


class OptionRow(NamedTuple):
    """A row of the option table as a reader wants it."""

    name: str
    type: str
    default: str
    doc: str


def option(parse: Callable[[object], T], default: object, type_name: str, doc: str, *, is_secret: bool = False) -> Any:
    """A row of the table. `default` is parsed like a caller's value, so it cannot be one that a caller could not
    give. No error and no `repr` shows the value of one that `is_secret`.
    """
    metadata = {"parse": parse, "type": type_name, "default": default, "doc": doc, "is_secret": is_secret}
    if default is None:
        return field(default=None, metadata=metadata, repr=not is_secret)
    return field(default=parse(default), metadata=metadata, repr=not is_secret)


def key_of(field_name: str) -> str:
    return field_name.replace("_", ".")


def field_name_of(key: str) -> str:
    return key.replace(".", "_")


def table_of(settings: Any) -> dict[str, Any]:
    """Key → dataclass field, for a class whose fields are made by `option`."""
    return {key_of(f.name): f for f in fields(settings)}


def parse_value(key: str, value: object, metadata: Mapping[str, Any]) -> object:
    """Raises ConfigError naming the key, and the value unless it is a secret."""
    try:
        return metadata["parse"](value)
    except parsers.RefusalError as refusal:
        shown = "***" if metadata.get("is_secret") else repr(value)
        raise ConfigError(f"{key}={shown}: {refusal}.", setting=key) from None


def row_of(key: str, metadata: Mapping[str, Any]) -> OptionRow:
    default = metadata["default"]
    text = "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
    return OptionRow(key, metadata["type"], text, metadata["doc"])
