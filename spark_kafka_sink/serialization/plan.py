"""One plan for a type tree: nodes that say how values are stored and how they are written. And the buffers for it.

`avro.py`, `json_text.py` and `protobuf.py` make the nodes of a format. A `Plan` holds them as a flat table of bytes,
which the kernel reads (`_columns.h` describes the fields), and finds the buffers of an Arrow array for each node. Nodes
and plans never change, so any thread may use them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from functools import cache
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError


class Op(IntEnum):
    """How the values of a node are stored, in the order of `_columns.h`."""

    ABSENT = 0
    BOOL = 1
    I8 = 2
    I16 = 3
    I32 = 4
    I64 = 5
    U8 = 6
    U16 = 7
    U32 = 8
    U64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    TEXT32 = 13
    TEXT64 = 14
    TEXT_VIEW = 15
    BYTES32 = 16
    BYTES64 = 17
    BYTES_VIEW = 18
    BYTES_FIXED = 19
    DECIMAL = 20
    STRUCT = 21
    LIST32 = 22
    LIST64 = 23
    LIST_FIXED = 24
    MAP = 25
    DICT = 26
    VARIANT = 27


class How(IntEnum):
    """How a value is written. Each kind of op has its own numbers, as in `_columns.h`. 0 is the plain way."""

    PLAIN = 0
    # numbers in Avro: the unit of time is divided by `arg` (rounded down), multiplied, or divided without a rest
    DIVIDED = 1
    MULTIPLIED = 2
    EXACTLY_DIVIDED = 3
    # numbers in JSON; `arg`: units in a second
    DATE = 4
    TIMESTAMP = 5
    TIME = 6
    INTERVAL = 7


SIZED, OF_SIZE, SYMBOL, UNSIZED = range(4)
"""Text and bytes in Avro: with the length before it, exactly `other` bytes, one of `other` symbols, the bytes alone."""
AS_FIXED, AS_BYTES = range(2)
"""Decimals in Avro: in `other` bytes, or in as few as hold it."""
RECORD, UNION = range(2)
"""Structs in Avro: all fields, or the one that is not null."""
NULL_IS_BAD, NOTHING = range(2)
"""Absent values in Avro, outside of a union: an error, or no bytes (the type null)."""
ANY_NUMBER, FINITE = range(2)
"""Float and double in JSON: with NaN and infinity, or these are an error."""
REQUIRED: Final = -2
"""The branch of null in JSON and Protobuf: a null is an error."""
WITH_NULLS, WITHOUT_NULLS = range(2)
"""Structs in JSON: with or without the fields that are null."""
VARINT, ZIGZAG, BITS_32, BITS_64, INSTANT, SPAN = range(6)
"""Numbers in Protobuf. `arg` divides them without a rest and `other` multiplies them, where these are above 1. INSTANT
and SPAN are a Timestamp and a Duration; `arg`: units in a second.
"""
AS_FLOAT, AS_DOUBLE = range(2)
"""Float in Protobuf."""
EACH_WITH_TAG, PACKED = range(2)
"""Lists in Protobuf."""
WITHOUT_DEFAULT, WRAPPED = range(2)
"""The branch of a value in Protobuf: 0 and "" are left out, or the value is in a message of its own."""

IS_NULL, TOO_LARGE, NO_SYMBOL, WRONG_SIZE, OUT_OF_RANGE, INEXACT, NOT_UTF8, SECOND = range(2, 10)
NOT_VARIANT, UNKNOWN_VARIANT, TOO_DEEP, NO_ZONE = range(10, 14)
ZONE_IS_MISSING: Final = "the variant has a timestamp, and the session's time zone is not known here."
"""Why a row is bad, as the kernel says it."""

PER_SECOND: Final[Mapping[str, int]] = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
"""Unit of time in Arrow → how many are a second."""
MOST_DEPTH: Final = 100
MOST_OF_A_SIZE: Final = (1 << 22) - 1


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the type tree: how it is stored, and how it is written."""

    op: Op
    path: str
    """For errors: the column, and the field in it."""
    how: int = 0
    children: tuple[Node, ...] = ()
    null_branch: int = -1
    """Avro: the number of null in the union, -1 if there is none. Protobuf: the number of the field's oneof, or -1."""
    value_branch: int = -1
    """Avro: the number of the value in the union, -1 if there is no union."""
    arg: int = 0
    """Bytes of a value (BYTES_FIXED, DECIMAL, DICT), length of a list (LIST_FIXED), or see `How`."""
    other: int = 0
    """The scale of a decimal in JSON, 1 for unsigned indices of a dictionary, or see the constants above."""
    name: bytes = b""
    """JSON: the field's name with comma, quotes and colon. Protobuf: the field's tag."""
    extra: bytes = b""
    """The symbols of an enum, the changes of a time zone, the numbers that are allowed, or (decimals in Avro) 10 to the
    power of the precision, in 16 bytes.
    """
    source: int = -1
    """The number of the field in the parent's struct."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """What is said if a row is bad, where the sentences of `REASONS` do not say enough."""


REASONS: Final = {
    IS_NULL: "it is null, and the schema allows no null there",
    TOO_LARGE: "the decimal has more digits than the schema allows",
    OUT_OF_RANGE: "the number is out of the range that can be written",
    INEXACT: "it is not a whole number of the schema's unit, and its rest would be lost",
    NOT_UTF8: "the text is not UTF-8, which Protobuf demands",
    SECOND: "another member of the union has a value too, and only one may have one",
    NOT_VARIANT: "its bytes are not those of a variant",
    UNKNOWN_VARIANT: "the variant has a value of a type that Spark 4.2 does not know",
    TOO_DEEP: "the variant has more than 1000 levels of arrays and objects",
}


# ---- Arrow types ---------------------------------------------------------------------------------------------------


class Storage(NamedTuple):
    """How Arrow stores values of a type."""

    op: Op
    arg: int = 0
    other: int = 0


_PLAIN_STORAGE: Final[dict[pa.DataType, Op]] = {
    pa.null(): Op.ABSENT,
    pa.bool_(): Op.BOOL,
    pa.int8(): Op.I8,
    pa.int16(): Op.I16,
    pa.int32(): Op.I32,
    pa.int64(): Op.I64,
    pa.uint8(): Op.U8,
    pa.uint16(): Op.U16,
    pa.uint32(): Op.U32,
    pa.uint64(): Op.U64,
    pa.float16(): Op.F16,
    pa.float32(): Op.F32,
    pa.float64(): Op.F64,
    pa.string(): Op.TEXT32,
    pa.large_string(): Op.TEXT64,
    pa.binary(): Op.BYTES32,
    pa.large_binary(): Op.BYTES64,
    pa.date32(): Op.I32,
    pa.date64(): Op.I64,
}
if hasattr(pa, "string_view"):  # from pyarrow 16 on
    _PLAIN_STORAGE.update({pa.string_view(): Op.TEXT_VIEW, pa.binary_view(): Op.BYTES_VIEW})

_STORAGE_BY_KIND: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], Storage]], ...]] = (
    (pat.is_timestamp, lambda _: Storage(Op.I64)),
    (pat.is_duration, lambda _: Storage(Op.I64)),
    (pat.is_time64, lambda _: Storage(Op.I64)),
    (pat.is_time32, lambda _: Storage(Op.I32)),
    (pat.is_fixed_size_binary, lambda of: Storage(Op.BYTES_FIXED, of.byte_width)),
    (pat.is_decimal, lambda of: Storage(Op.DECIMAL, of.bit_width // 8)),
    (pat.is_struct, lambda _: Storage(Op.STRUCT)),
    (pat.is_map, lambda _: Storage(Op.MAP)),
    (pat.is_list, lambda _: Storage(Op.LIST32)),
    (pat.is_large_list, lambda _: Storage(Op.LIST64)),
    (pat.is_fixed_size_list, lambda of: Storage(Op.LIST_FIXED, of.list_size)),
)


def storage(data_type: pa.DataType, path: str) -> Storage:
    """Return how Arrow stores the values. Raises SchemaError for a type that cannot be read here."""
    plain = _PLAIN_STORAGE.get(data_type)
    if plain is not None:
        return Storage(plain)
    for is_kind, made in _STORAGE_BY_KIND:
        if is_kind(data_type):
            found = made(data_type)
            if (found.op is Op.DECIMAL and found.arg > 16) or found.arg > MOST_OF_A_SIZE:
                break
            return found
    raise SchemaError(f"{path}: values of the Arrow type {data_type} cannot be written. Cast the column before.")


class Kind(Enum):
    """What the values of an Arrow type are, for the formats: each has a table by it."""

    NULL = auto()
    BOOLEAN = auto()
    INTEGER = auto()
    FLOATING = auto()
    TEXT = auto()
    BYTES = auto()
    DECIMAL = auto()
    DATE = auto()
    TIMESTAMP = auto()
    TIME = auto()
    DURATION = auto()
    STRUCT = auto()
    LIST = auto()
    MAP = auto()
    VARIANT = auto()
    """Only of a node: by its type it is a struct, see `special_kind`."""


_KIND_OF_TIMES: Final[tuple[tuple[Callable[[pa.DataType], bool], Kind], ...]] = (
    (pat.is_date, Kind.DATE),
    (pat.is_timestamp, Kind.TIMESTAMP),
    (pat.is_time, Kind.TIME),
    (pat.is_duration, Kind.DURATION),
)
KIND_OF_OPS: Final[Mapping[Op, Kind]] = {
    Op.ABSENT: Kind.NULL,
    Op.BOOL: Kind.BOOLEAN,
    **dict.fromkeys((Op.I8, Op.I16, Op.I32, Op.I64, Op.U8, Op.U16, Op.U32, Op.U64), Kind.INTEGER),
    **dict.fromkeys((Op.F16, Op.F32, Op.F64), Kind.FLOATING),
    **dict.fromkeys((Op.TEXT32, Op.TEXT64, Op.TEXT_VIEW), Kind.TEXT),
    **dict.fromkeys((Op.BYTES32, Op.BYTES64, Op.BYTES_VIEW, Op.BYTES_FIXED), Kind.BYTES),
    Op.DECIMAL: Kind.DECIMAL,
    Op.STRUCT: Kind.STRUCT,
    **dict.fromkeys((Op.LIST32, Op.LIST64, Op.LIST_FIXED), Kind.LIST),
    Op.MAP: Kind.MAP,
    Op.VARIANT: Kind.VARIANT,
}


def kind_of(data_type: pa.DataType, path: str) -> Kind:
    """Return the kind of a type that is no dictionary. Raises SchemaError as `storage`."""
    of_time = next((kind for is_kind, kind in _KIND_OF_TIMES if is_kind(data_type)), None)
    return of_time or KIND_OF_OPS[storage(data_type, path).op]


def plain_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type of the values: without dictionaries and extensions."""
    while True:
        if pat.is_dictionary(data_type):
            data_type = data_type.value_type
        elif isinstance(data_type, pa.BaseExtensionType):
            data_type = pa.bool_() if _is_bool8(data_type) else data_type.storage_type
        else:
            return data_type


def plain_array(column: pa.Array) -> pa.Array:
    """Return a column without extensions. No bytes are copied, but for booleans that are stored as bytes."""
    while isinstance(column.type, pa.BaseExtensionType):
        column = column.storage.cast(pa.bool_()) if _is_bool8(column.type) else column.storage
    return column


def _is_bool8(data_type: pa.DataType) -> bool:
    """Return whether the values are booleans in bytes: each that is not 0 is true."""
    return bool(data_type.extension_name == "arrow.bool8")  # pyarrow has a class for it from 18 on


def list_field(data_type: pa.DataType) -> pa.Field:
    """Return the field of a list's elements."""
    return data_type.value_field


def with_dictionaries(data_type: pa.DataType, node: Node) -> Node:
    """Return the node of a column of `data_type` whose values `node` writes: below one for each dictionary."""
    while isinstance(data_type, pa.BaseExtensionType):
        data_type = data_type.storage_type
    if not pat.is_dictionary(data_type):
        return node
    child = with_dictionaries(data_type.value_type, node)
    index = data_type.index_type
    return Node(
        Op.DICT,
        node.path,
        children=(child,),
        null_branch=node.null_branch,
        arg=index.bit_width // 8,
        other=int(pat.is_unsigned_integer(index)),
        name=node.name,
        source=node.source,
        reasons=node.reasons,
    )


VARIANT: Final = "variant"
WHAT_INSTEAD: Final[Mapping[str, str]] = {
    VARIANT: "Take the format json or json-schema, make it a string before, by to_json, or cast its fields to their"
    " types",
    "geometry": "Make it bytes before, by st_asbinary",
    "geography": "Make it bytes before, by st_asbinary",
}
"""Kind → what to do where it cannot be written."""


def special_kind(data_type: pa.DataType) -> str | None:
    """Return `variant`, `geometry` or `geography` for a struct with which Spark hands over a value of this type."""
    if not pat.is_struct(data_type):
        return None
    for number in range(data_type.num_fields):
        for name, said in (data_type.field(number).metadata or {}).items():
            if said == b"true" and name.decode() in WHAT_INSTEAD:
                return str(name.decode())
    return None


def refuse_special(data_type: pa.DataType, path: str, taker: str) -> None:
    """Raise SchemaError if a format, named by `taker`, would take such a struct for one of the user's."""
    special = special_kind(data_type)
    if special is not None:
        raise SchemaError(f"{path}: {taker} has no type for a {special}. {WHAT_INSTEAD[special]}.")


# ---- the plan ------------------------------------------------------------------------------------------------------

_FIELDS: Final = 12


class Bound(NamedTuple):
    """A plan with the buffers of one array."""

    table: array[int]
    """Four numbers for each node: rows, the number of the first, the first of its buffers, how many buffers it has."""
    buffers: tuple[Any, ...]


class Plan:
    """A tree of nodes as a flat table: the children of a node stand side by side, after it."""

    def __init__(self, root: Node) -> None:
        """Raise SchemaError if the tree is too deep."""
        self.nodes: Final = tuple(_in_order(root))
        self.table: Final = array("q")
        pool = bytearray()
        next_child = 1
        for node in self.nodes:
            name_at, extra_at = len(pool), len(pool) + len(node.name)
            pool += node.name + node.extra
            self.table.extend((node.op, node.how, node.null_branch, node.value_branch, next_child, len(node.children)))
            self.table.extend((node.arg, node.other, name_at, len(node.name), extra_at, len(node.extra)))
            next_child += len(node.children)
        self.pool: Final = bytes(pool)

    def bind(self, column: pa.Array) -> Bound:
        """Return the buffers of a column, which has the type for which the plan was made. No bytes are copied, but
        for those of `plain_array`.
        """
        table: array[int] = array("q")
        buffers: list[Any] = []
        arrays: list[pa.Array | None] = [column]
        for index, node in enumerate(self.nodes):
            found = arrays[index]
            if found is None or node.op is Op.ABSENT:
                table.extend((0 if found is None else len(found), 0, 0, 0))
                arrays.extend([None] * len(node.children))
                continue
            found = plain_array(found)
            own = _own_buffers(node.op, found)
            table.extend((len(found), found.offset, len(buffers), len(own)))
            buffers.extend(own)
            arrays.extend(_children(node, found))
        return Bound(table, tuple(buffers))

    def reason(self, index: int, code: int) -> tuple[str, str]:
        """Return the path and the reason of a bad row, by the number of the node and the kernel's code."""
        node = self.nodes[index]
        return node.path, node.reasons.get(code) or REASONS[code]


def _in_order(root: Node) -> Iterator[Node]:
    """Yield the nodes level by level. Raises SchemaError if there are more levels than the kernel takes."""
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise SchemaError(f"{level[0].path}: the type has more than {MOST_DEPTH} levels.")
        yield from level
        level = [child for node in level for child in node.children]


_BUFFERS: Final[Mapping[Op, int]] = {
    Op.STRUCT: 1,
    Op.VARIANT: 1,
    Op.LIST_FIXED: 1,
    Op.LIST32: 2,
    Op.LIST64: 2,
    Op.MAP: 2,
}


def _own_buffers(op: Op, found: pa.Array) -> list[Any]:
    """Return the buffers of an array without those of its children. The bits of nulls are None if no row is null."""
    if op is Op.DICT:
        found = found.indices
    own: list[Any] = found.buffers()[: _BUFFERS.get(op)]
    if found.null_count == 0:
        own[0] = None
    return own


def _children(node: Node, found: pa.Array) -> list[pa.Array | None]:
    if node.op in (Op.STRUCT, Op.VARIANT):
        return [found.field(child.source) if child.source >= 0 else None for child in node.children]
    if node.op is Op.DICT:
        return [found.dictionary]
    if node.op is Op.MAP:
        entries = found.values
        return [entries.field(0), entries.field(1)]
    return [found.values] if node.children else []


@cache
def powers_of_ten() -> bytes:
    """Return the powers of ten from 10^-292 to 10^324 for `_numbers.c`: 617 times 128 bits, low half first.

    Each is 10^n / 2^m, with the m that makes it at least 2^127 and less than 2^128, rounded up.
    """
    made = bytearray()
    for power in range(-292, 325):
        above, below = 10 ** max(power, 0), 10 ** max(-power, 0)
        shift = 128 - above.bit_length() + below.bit_length()
        number = _rounded_up(above, below, shift)
        if number.bit_length() > 128:
            number = _rounded_up(above, below, shift - 1)
        made += number.to_bytes(16, "little")
    return bytes(made)


def _rounded_up(above: int, below: int, shift: int) -> int:
    """Return above / below * 2^shift, rounded up."""
    if shift < 0:
        below <<= -shift
    else:
        above <<= shift
    return -(-above // below)
