"""A Protobuf message as tasks need it: plain values that pickle. protobuf_parser.py makes them on the driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProtoField:
    """A field of a message."""

    name: str
    number: int
    kind: str
    """The type, such as `int32`; `enum`, `message`, or `group`."""
    of: str = ""
    """The full name of the enum or message."""
    is_repeated: bool = False
    """A list or a map."""
    is_packed: bool = False
    is_required: bool = False
    has_presence: bool = False
    """Whether 0 and "" are written as other values. Without it they are left out."""
    oneof: str = ""
    """The name of the oneof that the field belongs to, "" for none."""


@dataclass(frozen=True, slots=True)
class ProtoMessage:
    name: str
    fields: tuple[ProtoField, ...]
    """By their numbers."""
    is_entry: bool = False
    """Whether it is the entry of a map: its fields are `key` and `value`."""


@dataclass(frozen=True, slots=True)
class ProtoEnum:
    name: str
    values: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ProtoSchema:
    """A message, with all messages and enums that it uses. A plain value that pickles."""

    root: str
    """The full name of the message."""
    messages: tuple[ProtoMessage, ...]
    enums: tuple[ProtoEnum, ...]
