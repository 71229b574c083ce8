"""Where a message stands in a .proto file, and the bytes that tell readers so.

In Confluent's format the indexes of a Protobuf message follow the schema's id: those of the message and of the messages
around it, each counted from 0 in the order of the text. Clients do not agree on what counts inside a message: Java's
counts `message` blocks (ProtobufSchema.toMessageIndexes), Python's and Go's also the entries of map fields and groups,
which are messages in a descriptor. So a message that has one of these before it, in the same message, is refused.

Reads only the names of blocks, not what is in them. No state; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from spark_kafka_sink.common.errors import SchemaError

_WORD: Final = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | (?P<word>[A-Za-z_][\w.]* | [^\s])""",
    re.VERBOSE | re.DOTALL,
)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}")
_BEFORE_A_BLOCK: Final = frozenset({"", ";", "{", "}", "export", "local"})
"""What may stand before the word `message`; "" for the beginning of the file."""


class Message(NamedTuple):
    name: str
    """With the package and the messages around it, as in `shop.Order.Line`."""
    indexes: tuple[int, ...]


class _Block(NamedTuple):
    """A `message` block of the file."""

    path: str
    indexes: tuple[int, ...]
    is_unclear: bool
    """Whether clients would count another index."""


def message_name(proto: str, name: str | None) -> str:
    """Return the full name of the message `name`, which may lack the package; of the first one if `name` is None.

    Raises SchemaError, which names the messages that there are.
    """
    return _found(proto, name)[0]


def outer_messages(proto: str) -> list[str]:
    """Return the full names of the messages that stand in no other one, in the order of the text."""
    package, blocks = _blocks(proto)
    return [f"{package}.{each.path}" if package else each.path for each in blocks if len(each.indexes) == 1]


def find_message(proto: str, name: str | None) -> Message:
    """Return the message `name` with its indexes. Raises as `message_name`, and if the indexes are unclear."""
    full_name, found = _found(proto, name)
    if found.is_unclear:
        raise SchemaError(
            f"The message {found.path} stands behind a map field or a group of the message around it. Kafka clients in"
            " different languages would read it as different messages: move it to before that field."
        )
    return Message(full_name, found.indexes)


def _found(proto: str, name: str | None) -> tuple[str, _Block]:
    """Return the full name of a message, and its block."""
    package, blocks = _blocks(proto)
    prefix = f"{package}." if package else ""
    found = _named(blocks, prefix, name) if name is not None else next(iter(blocks), None)
    if found is None and not blocks:
        encoded = " It is no text but a descriptor in base64: register the text." if _BASE64.fullmatch(proto) else ""
        raise SchemaError(f"The Protobuf schema has no message.{encoded}")
    if found is None:
        known = ", ".join(block.path for block in blocks)
        raise SchemaError(f"The Protobuf schema has no message {name}. It has: {known}.")
    return prefix + found.path, found


def _named(blocks: Sequence[_Block], prefix: str, name: str) -> _Block | None:
    """Return the message with this name, without the package or with it. With a dot before it a full name comes first,
    as in the schema itself. Raises SchemaError if two messages have the name.
    """
    own = name.removeprefix(".")
    full = next((block for block in blocks if prefix + block.path == own), None)
    relative = next((block for block in blocks if block.path == own), None)
    if full is not None and relative not in (None, full) and name == own:
        raise SchemaError(
            f"The Protobuf schema has two messages for the name {name}: {prefix}{full.path} and"
            f" {prefix}{relative.path}. Write .{prefix}{full.path} or .{prefix}{relative.path}."
        )
    return full or relative


def index_bytes(indexes: Sequence[int]) -> bytes:
    """Return the count and the indexes as zig-zag varints; for the first message of the file only the byte 00."""
    if list(indexes) == [0]:
        return b"\0"
    return b"".join(varint(2 * number) for number in (len(indexes), *indexes))  # zig-zag of what is not negative


def varint(number: int) -> bytes:
    """Return a number of 64 bits with 7 bits in each byte, the lowest first; a negative one as its two's complement."""
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _words(proto: str) -> list[str]:
    text = proto.removeprefix("\ufeff")  # a byte order mark
    return [match["word"] for match in _WORD.finditer(text) if match["word"] is not None]


def _package(words: Sequence[str]) -> str:
    """Return the package, "" without one. Its parts and dots may be words of their own."""
    depth = 0
    for at, word in enumerate(words):
        depth += (word == "{") - (word == "}")
        if word == "package" and depth == 0 and (at == 0 or words[at - 1] in {";", "}"}):
            return "".join(takewhile(lambda each: each != ";", words[at + 1 :]))
    return ""


def _blocks(proto: str) -> tuple[str, list[_Block]]:
    """Return the package ("" without one) and the message blocks in the order of the text."""
    words = _words(proto)
    blocks: list[_Block] = []
    levels = [_Level(_Block("", (), False))]  # the file, and each open message
    is_message: list[bool] = []  # of each open block
    before, middle, last = "", "", ""
    for word in words:
        if word == "{":
            opens = middle == "message" and before in _BEFORE_A_BLOCK and all(is_message)
            is_message.append(opens)
            if opens:
                block = levels[-1].next_block(last)
                blocks.append(block)
                levels.append(_Level(block))
        elif word == "}" and is_message:
            if is_message.pop():
                levels.pop()
        elif (word == "<" and last == "map") or (word == "=" and middle == "group"):
            levels[-1].is_unclear = True
        before, middle, last = middle, last, word
    return _package(words), blocks


class _Level:
    """The file, or a message that is open."""

    def __init__(self, block: _Block) -> None:
        self._block = block
        self._count = 0
        self.is_unclear = block.is_unclear
        """Whether the next message in it has an unclear index."""

    def next_block(self, name: str) -> _Block:
        outer = self._block
        path = f"{outer.path}.{name}" if outer.path else name
        found = _Block(path, (*outer.indexes, self._count), self.is_unclear)
        self._count += 1
        return found
