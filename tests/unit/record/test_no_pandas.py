"""Much of pyarrow imports pandas if it is installed, 40 MB in each of Spark's workers. A task must not reach it. Each
test runs in its own process, because one import anywhere in this process would stay.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pandas")

SUPPORT = Path(__file__).parents[2]

PROLOGUE = """
import itertools
from array import array
import sys
import pyarrow as pa
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.record.batch import seal
from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.decoder import decode_batches
from spark_kafka_sink.record.encoder import EncodedRun, encode_rows
from spark_kafka_sink.record.partitioning import highest_partition, place
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]

def written(columns):
    '''What a producer does with columns, and a reader with the bytes: the values of all records.'''
    values = []
    highest_partition(columns)
    partitions, free = place(columns, 7)
    if free is not None:
        partitions[free] = 3
    block = Block(columns, 3 if partitions is None else partitions, 1000)
    whole = [(start, end, 0, 900) for _, start, end in block.groups]
    halves = [(0, (block.num_rows + 1) // 2, 0, 900)]
    for runs in (whole, halves):
        chunks, latest = block.encode(array("q", itertools.chain.from_iterable(runs)))
        for (start, end, _, _), chunk, latest_ms, name in zip(runs, chunks, latest, itertools.cycle(CODECS)):
            values += readable(EncodedRun(chunk, end - start, latest_ms, 0), codec_for(name))
    return values

def readable(run, codec):
    sealed = seal([run.chunk], run.count, 900, run.max_timestamp_ms, codec)
    (batch,) = decode_batches(b"".join(sealed.buffers))
    return [record.value for record in batch.records]

def pool():
    from support.scripted_producer import ScriptedProducer
    producer = ScriptedProducer(on_send=lambda sent: done.extend(written(sent.columns)))
    return ProducerPool(lambda _: producer, SystemClock())

done = []
config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1"})
"""

EPILOGUE = """
assert done, "nothing was written"
print("pandas" in sys.modules)
"""

ROWS = """
import datetime
from pyspark.sql import Row
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.rows import PartitionWriter

def rows(count):
    for n in range(count):
        yield Row(
            topic=f"t{n % 2}",
            key=None if n % 3 == 0 else f"k{n}",
            value=("x" if n % 2 else "ö") * (n % 300) if n % 5 else bytearray(b"bytes"),
            headers=[("h", b"1"), ("i", None)] if n % 4 else None,
            timestamp=None if n % 6 == 0 else datetime.datetime(2024, 1, 1),
            partition=n % 7 if n % 8 == 0 else None,
        )

writer = PartitionWriter(TaskDelivery(config, pool()))
writer.write(rows(2000))
writer.finish()
done += readable(encode_rows([b"k", None], ["v", b"w"], [[("h", b"1")], None], [900, 901], 0, 900), codec_for("none"))
"""

COLUMNS = """
from spark_kafka_sink.sink.arrow_writer import write_arrow

batches = pa.ipc.open_stream(sys.stdin.buffer)
(report,) = write_arrow(config, pool(), batches)
assert report.num_rows > 1
"""

REFUSED = """
from spark_kafka_sink.common.errors import SerializationError
try:
    RecordColumns.from_rows([b"a", 7])
except SerializationError:
    done.append(b"refused")
"""

PYARROW_ALONE = "done = [pa.scalar(b'')]"


def imports_pandas(code: str, stdin: bytes = b"") -> bool:
    script = f"{PROLOGUE}\n{code}\n{EPILOGUE}"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(SUPPORT)!r})\n{script}"],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode()
    return {b"True": True, b"False": False}[run.stdout.strip()]


def arrow_stream() -> bytes:
    """Return batches as Spark sends them, with nulls in every column."""
    import pyarrow as pa  # imported here, so that its imports do not affect the other tests

    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    count = 500
    columns = {
        "value": pa.array([None if n % 9 == 0 else b"v" * n for n in range(count)], pa.binary()),
        "key": pa.array([None if n % 3 == 0 else f"k{n}" for n in range(count)], pa.string()),
        "headers": pa.array([None if n % 4 else [("h", b"1"), ("i", None)] for n in range(count)], header),
        "timestamp": pa.array([None if n % 6 == 0 else 1_700_000_000_000 + n for n in range(count)], pa.int64()),
        "partition": pa.array([n % 7 if n % 8 == 0 else None for n in range(count)], pa.int32()),
        "topic": pa.array([f"t{n % 2}" for n in range(count)], pa.string()),
    }
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
        stream.write_batch(batch.slice(3, 100))
        stream.write_batch(batch.slice(0, 0))
    return bytes(sink.getvalue())


def test_rows_are_written_without_pandas() -> None:
    assert not imports_pandas(ROWS)


def test_columns_are_written_without_pandas() -> None:
    assert not imports_pandas(COLUMNS, arrow_stream())


def test_row_that_does_not_fit_is_refused_without_pandas() -> None:
    assert not imports_pandas(REFUSED)


def test_pandas_is_installed_and_would_be_found() -> None:
    assert importlib.util.find_spec("pandas")
    assert imports_pandas(PYARROW_ALONE)
