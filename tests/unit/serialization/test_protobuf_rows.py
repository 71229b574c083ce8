"""Protobuf without the kernel has the same bytes, the same bad rows and the same limits as with it."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from support.generated_columns import random_array
from support.generated_protobuf import ProtoFile, random_value
from support.without_kernel import without_kernel

from spark_kafka_sink.record.kernel import has_kernel
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import FormatSettings
from spark_kafka_sink.serialization.schemas import column_format

pytestmark = pytest.mark.skipif(not has_kernel(), reason="compares with the kernel")


def compare(seed: int, messages: int, rows: int, patch: pytest.MonkeyPatch) -> int:
    """Return the number of bad rows."""
    file = ProtoFile(seed, messages)
    bad = 0
    for number, data_type in enumerate(file.types):
        column = random_array(random.Random(f"{seed} {number}"), data_type, rows, value=random_value)
        used = column_format(FormatSettings("value", "protobuf", file.text, message=f"M{number}"), data_type)
        encoder = ColumnEncoder(used, data_type)
        encoded, expected = encoder.encode(column), without_kernel(encoder, column, 1 << 20, patch)
        assert encoded.values.to_pylist() == expected.values.to_pylist(), (seed, number)
        assert encoded.bad_rows == expected.bad_rows, (seed, number)
        bad += len(encoded.bad_rows)
    return bad


@pytest.mark.parametrize("seed", range(2000, 2003))
def test_both_write_the_same_bytes_and_find_the_same_bad_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(seed, 20, 12, monkeypatch) > 10


@pytest.mark.slow
def test_both_write_the_same_bytes_for_many_types(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(compare(seed, 110, 60, monkeypatch) for seed in range(3000, 3003)) > 1000


def test_both_refuse_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = """
    syntax = "proto2";
    import "google/protobuf/timestamp.proto";
    import "google/protobuf/duration.proto";
    message M {
      required string text = 1; optional google.protobuf.Timestamp at = 2; optional google.protobuf.Duration span = 3;
      optional int32 day = 4; optional int64 time = 5; oneof o { int32 a = 6; int32 b = 7; } repeated int32 list = 8;
    }
    """
    texts = pa.Array.from_buffers(pa.string(), 8, pa.array([b"a\xff", *[b"ok"] * 6, None], pa.binary()).buffers())
    column = pa.StructArray.from_arrays(
        [
            texts.take(pa.array([0, 1, 2, 3, 4, 5, 6, None])),
            pa.array([0, -62_135_596_801, -(2**63), 0, 0, 0, 0, 0]).view(pa.timestamp("s", "UTC")),
            pa.array([0, 0, 0, 315_576_000_001, -(2**63), 0, 0, 0]).view(pa.duration("s")),
            pa.array([0, 0, 0, 0, 0, 1, 0, 0]).view(pa.date64()),
            pa.array([0, 0, 0, 0, 0, 0, 1, 0]).view(pa.time64("ns")),
            pa.array([1, *[None] * 7], pa.int32()),
            pa.array([1, *[None] * 7], pa.int32()),
            pa.array([[1]] * 7 + [[None]], pa.list_(pa.int32())),
        ],
        names=["text", "at", "span", "day", "time", "a", "b", "list"],
    )
    encoder = ColumnEncoder(column_format(FormatSettings("value", "protobuf", proto), column.type), column.type)
    encoded, expected = encoder.encode(column), without_kernel(encoder, column, 1 << 20, monkeypatch)
    assert [each.path for each in encoded.bad_rows] == [
        f"value.{name}" for name in ("text", "at", "at", "span", "span", "day", "time", "text")
    ]
    assert encoded.bad_rows == expected.bad_rows
    assert encoded.values.to_pylist() == expected.values.to_pylist() == [None] * 8


def test_both_stop_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    column = pa.array([{"a": "x" * 50, "b": [{"c": "y" * 200}]}] * 100)
    encoder = ColumnEncoder(column_format(FormatSettings("value", "protobuf"), column.type), column.type)
    values = without_kernel(encoder, column, 1000, monkeypatch).values
    assert 0 < len(values) < 100
    assert values.to_pylist() == encoder.encode(column).values.to_pylist()[: len(values)]
    parts, left = 0, column
    while len(left):  # whatever the size of the output, no row is cut
        some = encoder.encode(left, 300 + 97 * parts).values
        assert set(some.to_pylist()) == {values[0].as_py()}
        left = left.slice(len(some))
        parts += 1
    assert parts > 3
