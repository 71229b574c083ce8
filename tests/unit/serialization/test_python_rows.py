"""Rows without the kernel have the same bytes, the same bad rows and the same limits as with it."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from support.generated_columns import random_array, random_struct
from support.without_kernel import without_kernel

from spark_kafka_sink.record.kernel import has_kernel
from spark_kafka_sink.serialization import column_encoder, python_rows
from spark_kafka_sink.serialization.column_encoder import TOO_LONG, ColumnEncoder
from spark_kafka_sink.serialization.column_format import FormatSettings
from spark_kafka_sink.serialization.plan import Node
from spark_kafka_sink.serialization.python_rows import json_string
from spark_kafka_sink.serialization.python_rows import raw_values as python_raw_values
from spark_kafka_sink.serialization.schemas import column_format

BOTH = pytest.mark.parametrize("name", ["avro", "json"])
pytestmark = pytest.mark.skipif(not has_kernel(), reason="compares with the kernel")


def compare(seed: int, name: str, patch: pytest.MonkeyPatch, rows: int = 20) -> int:
    rng = random.Random(seed)
    column = random_array(rng, random_struct(rng, 3), rows)
    encoder = ColumnEncoder(column_format(FormatSettings("value", name), column.type), column.type)
    expected = without_kernel(encoder, column, 1 << 20, patch)
    encoded = encoder.encode(column, 1 << 20)
    assert encoded.values.to_pylist() == expected.values.to_pylist(), (seed, column.type)
    assert encoded.bad_rows == expected.bad_rows
    return len(column)


@BOTH
@pytest.mark.parametrize("seed", range(2000, 2015))
def test_both_write_the_same_bytes(seed: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(seed, name, monkeypatch)


@pytest.mark.slow
@BOTH
def test_both_write_the_same_bytes_for_many_types(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(compare(seed, name, monkeypatch) for seed in range(3000, 4000)) == 20_000


def test_both_find_the_same_bad_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = (
        '{"type":"record","name":"r","fields":['
        '{"name":"u","type":"long"},{"name":"e","type":{"type":"enum","name":"e","symbols":["A","B"]}},'
        '{"name":"f","type":{"type":"fixed","name":"f","size":2}},'
        '{"name":"t","type":{"type":"long","logicalType":"time-micros"}},'
        '{"name":"x","type":[{"type":"fixed","name":"x","size":2,"logicalType":"decimal","precision":4,"scale":0},"null"]},'
        '{"name":"m","type":["int","string"]}]}'
    )
    member = pa.struct([("member0", pa.int32()), ("member1", pa.string())])
    data_type = pa.struct(
        [
            ("u", pa.uint64()),
            ("e", pa.dictionary(pa.int8(), pa.string())),
            ("f", pa.binary()),
            ("t", pa.time64("ns")),
            ("x", pa.decimal128(4, 0)),
            ("m", member),
        ]
    )
    good: dict[str, Any] = {"u": 1, "e": "A", "f": b"xy", "t": 5000, "x": 7, "m": {"member0": None, "member1": "s"}}
    changes: list[dict[str, Any]] = [
        {},
        {"u": 2**63},
        {"e": "C"},
        {"e": None},
        {"f": b"x"},
        {"f": None},
        {"t": 5001},
        {"m": {}},
        {"m": None},
        {"m": {"member0": 1, "member1": "s"}},
    ]
    changes += [{"x": None}]
    rows = [{**good, **change} for change in changes]
    children = [pa.array([row[of.name] for row in rows], of.type) for of in data_type]
    too_large = pa.Array.from_buffers(
        pa.decimal128(4, 0), len(rows), [None, pa.py_buffer(bytes(16 * 9) + b"\0\0\1" + bytes(13) + bytes(16))]
    )
    for column in (
        pa.StructArray.from_arrays(children, fields=list(data_type)),
        pa.StructArray.from_arrays([*children[:4], too_large, children[5]], fields=list(data_type)),
    ):
        encoder = ColumnEncoder(column_format(FormatSettings("value", "avro", schema), data_type), data_type)
        encoded = encoder.encode(column)
        expected = without_kernel(encoder, column, 1 << 20, monkeypatch)
        assert encoded.bad_rows == expected.bad_rows
        assert encoded.values.to_pylist() == expected.values.to_pylist()
        assert len(encoded.bad_rows) == 9


def test_floats_at_powers_of_two_have_the_same_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: without the kernel, a power of two such as 2^-96 had one digit more, so JSON was another text."""
    column = pa.StructArray.from_arrays(
        [pa.array([sign * 2.0**power for power in range(-149, 128) for sign in (1, -1)], pa.float32())], names=["f"]
    )
    encoder = ColumnEncoder(column_format(FormatSettings("value", "json"), column.type), column.type)
    made = without_kernel(encoder, column, 1 << 20, monkeypatch).values.to_pylist()
    assert made == encoder.encode(column).values.to_pylist()
    assert made[2 * (149 - 96)] == b'{"f":1.2621775E-29}'


@BOTH
def test_both_refuse_a_row_above_the_limit_of_offsets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: without the kernel such a row was an OverflowError, which no setting passes over."""
    monkeypatch.setattr(column_encoder, "MAX_COLUMN_BYTES", 4096)
    column = pa.array([{"a": "x" * 5000}, {"a": "y"}, {"a": "x" * 3000}])
    encoder = ColumnEncoder(column_format(FormatSettings("value", name), column.type), column.type)
    for first, is_refused in ((0, True), (1, False), (2, False)):
        expected = without_kernel(encoder, column.slice(first), 1 << 20, monkeypatch)
        encoded = encoder.encode(column.slice(first), 1 << 20)
        assert encoded.bad_rows == expected.bad_rows
        assert [(bad.row, bad.path, bad.reason) for bad in encoded.bad_rows] == [(0, "value", TOO_LONG)] * is_refused
        count = min(len(encoded.values), len(expected.values))
        assert encoded.values.slice(0, count) == expected.values.slice(0, count)
        assert encoded.values.slice(0, 1).null_count == is_refused


def test_slice_of_lists_reads_no_elements_of_other_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: each slice of a table made Python values of all its lists, so the work grew with the square of the rows."""
    lists = pa.array([[row, row] for row in range(1000)], pa.list_(pa.int32()))
    fixed = lists.cast(pa.list_(pa.int32(), 2))
    maps = pa.array([[(str(row), row), ("", None)] for row in range(1000)], pa.map_(pa.string(), pa.int32()))
    column = pa.StructArray.from_arrays([lists, fixed, maps], names=["l", "f", "m"])
    encoder = ColumnEncoder(column_format(FormatSettings("value", "json"), column.type), column.type)
    lengths = []

    def raw_values(node: Node, part: pa.Array) -> list[Any]:
        lengths.append(len(part))
        return python_raw_values(node, part)

    monkeypatch.setattr(python_rows, "raw_values", raw_values)
    values = without_kernel(encoder, column.slice(500, 2), 1 << 20, monkeypatch).values.to_pylist()
    assert values == [b'{"l":[%d,%d],"f":[%d,%d],"m":{"%d":%d,"":null}}' % ((row,) * 6) for row in (500, 501)]
    assert lengths
    assert max(lengths) == 4


@BOTH
def test_both_stop_at_the_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    column = pa.array([{"a": "x" * 50}] * 100)
    encoder = ColumnEncoder(column_format(FormatSettings("value", name), column.type), column.type)
    values = without_kernel(encoder, column, 1000, monkeypatch).values
    assert 0 < len(values) < 100
    assert values.to_pylist() == encoder.encode(column).values.to_pylist()[: len(values)]


@pytest.mark.parametrize("seed", range(20))
def test_text_that_is_no_utf8_has_the_same_replacements(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    pieces = [
        b"a",
        b"plain text ",
        b"\xc3\xa4",
        b"\xe2\x82\xac",
        b"\xf0\x9f\x98\x80",
        b"\x80",
        b"\xc3",
        b"\xe2\x82",
        b"\xe2",
    ]
    pieces += [
        b"\xf0\x9f\x98",
        b"\xf0\x9f",
        b"\xed\xa0\x80",
        b"\xed\xa0",
        b"\xc0\x80",
        b"\xf5",
        b"\xff",
        b"\xe0\x80",
        b"\xf4\x90",
        b'"',
    ]
    texts = [b"".join(rng.choice(pieces) for _ in range(rng.randrange(8))) for _ in range(100)]
    texts += [rng.randbytes(rng.randrange(20)) for _ in range(100)]
    strings = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())
    column = pa.StructArray.from_arrays([strings], names=["a"])
    encoder = ColumnEncoder(column_format(FormatSettings("value", "json"), column.type), column.type)
    encoded = encoder.encode(column).values.to_pylist()
    assert encoded == without_kernel(encoder, column, 1 << 20, monkeypatch).values.to_pylist()
    assert encoded == [b'{"a":' + json_string(text) + b"}" for text in texts]
    for text in encoded:
        text.decode()
