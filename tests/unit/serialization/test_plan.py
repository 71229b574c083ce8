"""The plan as a table, and the kernel's checks of what is handed over with it."""

from __future__ import annotations

import random
from array import array
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest

from spark_kafka_sink.record.kernel import KERNEL, has_kernel
from spark_kafka_sink.serialization.column_format import JsonOptions
from spark_kafka_sink.serialization.json_text import json_plan
from spark_kafka_sink.serialization.plan import Op, Plan, powers_of_ten
from spark_kafka_sink.serialization.protobuf import protobuf_plan
from spark_kafka_sink.serialization.protobuf_parser import parse_proto

TYPE = pa.struct([("a", pa.list_(pa.string())), ("b", pa.struct([("c", pa.int8())])), ("d", pa.binary(3))])


def test_children_stand_side_by_side_after_their_parent() -> None:
    plan = Plan(json_plan(JsonOptions(), TYPE, "value"))
    assert [(node.op, node.path) for node in plan.nodes] == [
        (Op.STRUCT, "value"),
        (Op.LIST32, "value.a"),
        (Op.STRUCT, "value.b"),
        (Op.BYTES_FIXED, "value.d"),
        (Op.TEXT32, "value.a.element"),
        (Op.I8, "value.b.c"),
    ]
    assert plan.table[4::12].tolist() == [1, 4, 5, 6, 6, 6]
    assert plan.table[5::12].tolist() == [3, 1, 1, 0, 0, 0]


def test_powers_of_ten_are_rounded_up_to_128_bits() -> None:
    table = powers_of_ten()
    assert len(table) == 617 * 16
    for index, power in enumerate(range(-292, 325)):
        number = int.from_bytes(table[16 * index : 16 * index + 16], "little")
        assert number.bit_length() == 128
        exact = Fraction(10) ** power
        shift = number.bit_length() - (int(exact).bit_length() if power >= 0 else -int(1 / exact).bit_length() + 1)
        scaled = [exact * Fraction(2) ** (shift + step) for step in (-1, 0, 1)]
        assert any(0 <= number - each < 1 for each in scaled)


def arguments(plan: Plan, column: pa.Array) -> list[Any]:
    rows = len(column)
    outputs = [bytearray(4096), 0, bytearray(4 * rows + 4), bytearray(rows + 1), array("q", bytes(24))]
    return [1, plan.table, plan.pool, *plan.bind(column), 0, rows, b"", powers_of_ten(), *outputs]


COLUMN = pa.array([{"a": ["x", "long enough for no view"], "b": {"c": 1}, "d": b"abc"}, None], TYPE)
NAMES = (
    "form",
    "plan",
    "pool",
    "bound",
    "buffers",
    "row",
    "last",
    "prefix",
    "powers",
    "out",
    "used",
    "offsets",
    "valid",
    "bad",
)


@pytest.mark.skipif(not has_kernel(), reason="about the kernel")
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("plan", b""),
        ("plan", bytes(100)),
        ("bound", b""),
        ("powers", bytes(16)),
        ("offsets", bytearray(4)),
        ("valid", bytearray(0)),
        ("last", 3),
        ("last", -1),
        ("row", -1),
        ("used", 5000),
        ("used", -1),
        ("buffers", ()),
        ("form", 3),
        ("form", -1),
    ],
)
def test_kernel_refuses_sizes_that_do_not_fit(name: str, given: object) -> None:
    plan = Plan(json_plan(JsonOptions(), TYPE, "value"))
    changed = arguments(plan, COLUMN)
    assert KERNEL.encode_rows(*changed)[0] == 2
    changed = arguments(plan, COLUMN)
    changed[NAMES.index(name)] = given
    with pytest.raises(ValueError, match=r"."):
        KERNEL.encode_rows(*changed)


PROTO = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
enum E { A = 0; LONG_NAME = 300; }
message M {
  repeated string a = 1; N b = 2; bytes d = 3; repeated E e = 4; map<string, sint64> m = 536870911;
  google.protobuf.Timestamp at = 5; google.protobuf.StringValue w = 6; oneof o { E f = 7; string dec = 8; }
}
message N { int32 c = 1; }
"""
PROTO_COLUMN = pa.array(
    [
        {
            "a": ["x", "long enough for no view"],
            "b": {"c": 1},
            "d": b"abc",
            "e": ["A", "LONG_NAME"],
            "m": [("k", -1), ("", 2**62)],
            "at": -1,
            "w": "wrapped",
            "f": None,
            "dec": Decimal("1.25"),
        },
        None,
    ],
    pa.struct(
        [
            *TYPE,
            ("e", pa.list_(pa.string())),
            ("m", pa.map_(pa.string(), pa.int64())),
            ("at", pa.timestamp("us", "UTC")),
            ("w", pa.string()),
            ("f", pa.uint8()),
            ("dec", pa.decimal128(20, 2)),
        ]
    ),
)
PLANS = {
    "json": lambda: (Plan(json_plan(JsonOptions(), TYPE, "value")), COLUMN),
    "protobuf": lambda: (
        Plan(protobuf_plan(parse_proto(PROTO, "M", "value"), PROTO_COLUMN.type, "value")),
        PROTO_COLUMN,
    ),
}


@pytest.mark.skipif(not has_kernel(), reason="about the kernel")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", PLANS)
def test_kernel_survives_any_table(name: str, seed: int) -> None:
    """Numbers of the plan and of the bound buffers are changed. It writes rows or raises ValueError."""
    rng = random.Random(seed)
    plan, column = PLANS[name]()
    for _ in range(200):
        changed = arguments(plan, column)
        changed[0] = rng.randrange(3)
        for place in (1, 3):
            table = array("q", changed[place])
            for _ in range(rng.randrange(3)):
                table[rng.randrange(len(table))] = rng.choice(
                    (-1, 0, 1, 2, 3, 5, 16, 27, 63, 64, 1 << 31, 1 << 62, -(1 << 63))
                )
            changed[place] = table
        try:
            row, used, bad, _ = KERNEL.encode_rows(*changed)
        except ValueError:
            continue
        assert 0 <= row <= 2
        assert 0 <= used <= 4096
        assert 0 <= bad <= 1
