"""Topics for a case, and the records that arrive in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, Message
from support.librdkafka import read_topic

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.local import Admin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Record(NamedTuple):
    """A record without its partition, offset and time."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    has_create_time: bool

    @classmethod
    def of(cls, message: Message) -> Record:
        kind, _ = message.timestamp()
        return cls(message.key(), message.value(), tuple(message.headers() or ()), kind == TIMESTAMP_CREATE_TIME)  # type: ignore[arg-type]


WARM_UP = b"the first record of a partition"

Contents = dict[tuple[str, int], list[Record]]
"""The topic (under its name in the case) and partition → records by offset."""


@dataclass(frozen=True)
class Topics:
    """The topics of one case for one sink."""

    servers: str
    names: Mapping[str, str]
    partitions: int

    def fill_in(self, text: str) -> str:
        """`text` with the names of the topics."""
        for alias, name in self.names.items():
            text = text.replace(f"{{{alias}}}", name)
        return text

    def options(self, options: Mapping[str, str]) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.servers} | {key: self.fill_in(value) for key, value in options.items()}

    def contents(self) -> Contents:
        """The records that were written since the topics were made."""
        found: Contents = {}
        for alias, name in self.names.items():
            for message in read_topic(self.servers, name, self.partitions):
                if message.offset() == 0:
                    assert message.value() == WARM_UP
                    continue
                found.setdefault((alias, message.partition()), []).append(Record.of(message))
        return found


@pytest.fixture(scope="module")
def warm_up(kafka_broker: Admin) -> Iterator[Callable[[str, int], None]]:
    """Write every partition of a new topic once.

    Spark's sink sometimes waits two minutes without success for its first records in a partition with a new leader, if
    the leader takes the second batch and not the first.
    """
    with KafkaProducer({"bootstrap.servers": kafka_broker.bootstrap_servers}) as producer:

        def write(topic: str, partitions: int) -> None:
            sent = [producer.send(topic, WARM_UP, partition=partition) for partition in range(partitions)]
            producer.flush()
            for future in sent:
                future.result(0)

        yield write


@pytest.fixture
def new_topics(
    new_topic: Callable[..., str], kafka_broker: Admin, warm_up: Callable[[str, int], None]
) -> Callable[..., Topics]:
    """`new_topics(text, partitions, config)`: the topics that `text` names, and always "topic"."""

    def create(text: str, partitions: int = 1, config: Mapping[str, str | int] | None = None) -> Topics:
        aliases = [alias for alias in ("topic", "second", "third") if alias == "topic" or f"{{{alias}}}" in text]
        names = {alias: new_topic(partitions, config=config) for alias in aliases}
        for name in names.values():
            warm_up(name, partitions)
        return Topics(kafka_broker.bootstrap_servers, names, partitions)

    return create


@pytest.fixture
def frame_of(spark: SparkSession, spark_sink: str) -> Iterator[Callable[..., DataFrame]]:
    """`frame_of(query, rows, tasks)`: the query over that many numbers in that many tasks."""

    def frame(query: str, rows: int = 100, tasks: int = 1) -> DataFrame:
        spark.range(0, rows, 1, tasks).createOrReplaceTempView("rows")
        return spark.sql(query)

    yield frame
    spark.catalog.dropTempView("rows")


@pytest.fixture
def stream_of(spark: SparkSession, spark_sink: str, tmp_path: Path) -> Iterator[Callable[..., DataFrame]]:
    """Like `frame_of`, as a stream over files."""

    def stream(query: str, rows: int = 100, tasks: int = 1) -> DataFrame:
        spark.range(0, rows, 1, tasks).write.mode("overwrite").parquet(str(tmp_path / "rows"))
        spark.readStream.schema("id BIGINT").parquet(str(tmp_path / "rows")).createOrReplaceTempView("rows")
        return spark.sql(query)

    yield stream
    spark.catalog.dropTempView("rows")
