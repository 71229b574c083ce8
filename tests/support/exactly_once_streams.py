"""Streaming queries of exactly-once delivery over files of numbered rows, and checks of the rows in Kafka."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from confluent_kafka import Message
from support.librdkafka import read_topic, text_of
from support.pyspark_capabilities import SAME_NAME

from spark_kafka_sink.admin.transaction_values import TransactionState
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.sink.exactly_once.cluster import connect
from spark_kafka_sink.sink.kafka_sink import KafkaSink
from spark_kafka_sink.sink.options import DECISION_TOPIC

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource
    from pyspark.sql.streaming.query import StreamingQuery

KEYS = 5
PARTITIONS = 3
_EARLIEST_S = 1_700_000_000


class Stream(NamedTuple):
    """One query: a file of `rows` rows is a batch. `form` is "format" or "foreachBatch". `decisions` is its decision
    topic, empty for at-least-once.
    """

    servers: str
    topic: str
    folder: Path
    form: str
    rows: int = 40
    data_source: type[DataSource] | None = None
    """None: `KafkaSinkDataSource`, which PySpark 3.5 cannot import."""
    sink: type[KafkaSink] = KafkaSink
    decisions: str = DECISION_TOPIC

    @property
    def prefix(self) -> str:
        return f"prefix-of-{self.topic}"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def source(self) -> Path:
        return self.folder / "rows"

    def write_files(self, first: int, count: int) -> None:
        """Write more input: consecutive files."""
        self.source.mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            lines = [
                json.dumps({"key": str(row % KEYS), "value": str(row)})
                for row in range(number * self.rows, (number + 1) * self.rows)
            ]
            new = self.folder / f"{number:05}.json"
            new.write_text("\n".join(lines))
            os.utime(new, (_EARLIEST_S + number,) * 2)  # Spark reads the oldest first
            new.rename(self.source / new.name)

    @property
    def options(self) -> dict[str, Any]:
        options = {
            "kafka.bootstrap.servers": self.servers,
            "topic": self.topic,
            "kafka.linger.ms": "0",
            "kafka.retry.backoff.ms": "20",
        }
        exactly_once = {
            "delivery.guarantee": "exactly-once",
            "transactional.id.prefix": self.prefix,
            "decision.topic": self.decisions,
        }
        return options | (exactly_once if self.decisions else {})

    def start(self, spark: SparkSession, partitions: int, order: str = "") -> StreamingQuery:
        """Start the query over all files, with that many tasks a batch (0: the task that reads, without a shuffle).

        All rows of a key are in one task, in their order. `order`: the order of keys in a task, "ascending" or
        "descending", else as they come.
        """
        reader = spark.readStream.schema("key STRING, value STRING").option("maxFilesPerTrigger", 1)
        read = reader.json(str(self.source))
        stream = keys_in_order(read.repartition(partitions, "key") if partitions else read, order).writeStream
        if self.form == "format":
            register_format(spark, self.data_source)
            name = "kafka_sink" if self.data_source is None else self.data_source.name()
            stream = stream.format(name).options(**self.options)
        else:
            write: Any = self.sink(self.options).write_batch
            stream = stream.foreachBatch(write)
        return stream.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()

    def run(self, spark: SparkSession, partitions: int, order: str = "") -> None:
        self.start(spark, partitions, order).awaitTermination()

    def last_batch(self) -> int:
        """Return the last batch that Spark has logged as committed; -1 for none."""
        folder = self.checkpoint / "commits"
        return max((int(file.name) for file in folder.glob("[0-9]*")), default=-1) if folder.exists() else -1

    def forget_commit(self, batch: int) -> None:
        """Delete Spark's log of the last commit, as if Spark had died before it."""
        (self.checkpoint / "commits" / str(batch)).unlink()
        (self.checkpoint / "commits" / f".{batch}.crc").unlink(missing_ok=True)

    def check(self, files: int) -> None:
        """Check that every row of the first `files` files is there once, the rows of a key in order, and nothing is
        open.
        """
        batches = self._batch_by_file()
        check_content(
            self.servers, self.topic, files * self.rows, KEYS, lambda row: batches[row // self.rows], self.rows
        )
        check_nothing_open(self.servers, self.prefix)

    def _batch_by_file(self) -> list[int]:
        """Return the batch of each file.

        A file is a batch, except after a kill: Spark's source may put a file that it had found before into a batch with
        the next one, and reads the two in any order.
        """
        found: list[int] = []
        for log in sorted((self.checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name)):
            last_file = json.loads(log.read_text().splitlines()[-1])["logOffset"]
            found += [int(log.name)] * (last_file + 1 - len(found))
        return found


def register_format(spark: SparkSession, source: type[DataSource] | None = None) -> None:
    """Register `source`, or `KafkaSinkDataSource`. That one needs no registration, and PySpark 4.0 refuses its name,
    because it has found the format by itself. PySpark 3.5 has no data sources.
    """
    if source is not None:
        spark.dataSource.register(source)
    elif SAME_NAME.is_there:
        from spark_kafka_sink.sink.data_source import KafkaSinkDataSource

        spark.dataSource.register(KafkaSinkDataSource)


def keys_in_order(rows: DataFrame, order: str) -> DataFrame:
    """Put each task's rows into another order, which keeps the order of each key's rows: Spark sorts no stream."""
    if not order:
        return rows

    def sort(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow.compute

        for batch in batches:
            yield batch.take(pyarrow.compute.sort_indices(batch, sort_keys=[("key", order)]))  # the sort is stable

    return rows.mapInArrow(sort, rows.schema)


def check_content(
    servers: str, topic: str, rows: int, keys: int, batch_of: Callable[[int], int] = lambda _: 0, file_rows: int = 0
) -> None:
    """Check the rows: row n has key n % keys. Readers with librdkafka under read_committed see every row once.

    The batches of a key are in order, and in a batch the rows of each file (of `file_rows` rows; 0: of all).
    """
    by_key: dict[int, list[int]] = defaultdict(list)
    for message in read_visible(servers, topic):
        by_key[int(message.key() or b"")].append(int(text_of(message)))
    seen = [row for found in by_key.values() for row in found]
    assert len(seen) == len(set(seen)), f"duplicated: {sorted({row for row in seen if seen.count(row) > 1})[:20]}"
    assert len(seen) == rows, f"lost: {sorted(set(range(rows)) - set(seen))[:20]}; too many: {len(seen) - rows}"
    for key, found in by_key.items():
        batches = [batch_of(row) for row in found]
        assert batches == sorted(batches), f"key {key}: batches are out of order"
        files: dict[int, list[int]] = defaultdict(list)
        for row in found:
            files[row // file_rows if file_rows else 0].append(row)
        assert all(of_file == sorted(of_file) for of_file in files.values()), f"key {key} is out of order"
        assert sorted(found) == list(range(key, rows, keys))


def read_visible(servers: str, topic: str, timeout_s: float = 30.0) -> list[Message]:
    """Return the rows that readers under read_committed see when all markers are written."""
    await_markers(servers, timeout_s)
    return read_topic(servers, topic, PARTITIONS)


def await_markers(servers: str, timeout_s: float = 30.0) -> None:
    """Wait until the coordinators have written all end markers, which they do after they answer an EndTxn."""
    states = [TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT]
    deadline = time.monotonic() + timeout_s
    with connect(ProducerConfig.from_mapping({"bootstrap.servers": servers})) as coordinator:
        while left := coordinator.transactions.list_transactions(coordinator.timer(30_000), states=states):
            assert time.monotonic() < deadline, f"no markers within {timeout_s} s: {left}"
            time.sleep(0.02)


def visible_values(servers: str, topic: str) -> list[int]:
    """Return the numbers of `read_visible`, sorted."""
    return sorted(int(text_of(message)) for message in read_visible(servers, topic))


def open_transactions(servers: str, prefix: str) -> list[str]:
    """Return the open transactional ids of this prefix, from the brokers' own listing."""
    return [each for each in ongoing_ids(servers) if each.startswith(f"{prefix}/")]


def ongoing_ids(servers: str) -> list[str]:
    """Return the open transactional ids of all prefixes."""
    with connect(ProducerConfig.from_mapping({"bootstrap.servers": servers})) as coordinator:
        listed = coordinator.transactions.list_transactions(
            coordinator.timer(30_000), states=[TransactionState.ONGOING]
        )
    return [each.transactional_id for each in listed]


def known_ids(servers: str) -> set[str]:
    """Return every transactional id that the brokers keep."""
    with connect(ProducerConfig.from_mapping({"bootstrap.servers": servers})) as coordinator:
        return {each.transactional_id for each in coordinator.transactions.list_transactions(coordinator.timer(30_000))}


def check_nothing_open(servers: str, prefix: str) -> None:
    assert open_transactions(servers, prefix) == []


def kill_a_python_worker(spark: SparkSession, rng: random.Random) -> bool:
    """Kill one of the workers that the session's Python daemons have forked. Return whether one existed."""
    gateway: Any = spark.sparkContext._gateway
    jvm = psutil.Process(gateway.proc.pid)
    workers = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in jvm.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = process.parent()  # a daemon, which the following tests need
                if process.name().startswith("python") and parent and parent.name().startswith("python"):
                    workers.append(process)
    if not workers:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        rng.choice(sorted(workers, key=lambda each: each.pid)).send_signal(signal.SIGKILL)
    return True
