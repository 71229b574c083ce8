"""docs/migrating-from-confluent-kafka.md: the partitions that librdkafka chooses for keys, and how rows keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from integration.parity.cases import TO_THE_TOPIC
from integration.parity.conftest import Topics
from integration.parity.ways import BATCH_WAYS
from pyspark.sql import functions as F  # noqa: N812

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

PARTITIONS = 12
KEYED = "SELECT concat('customer ', id) AS key, CAST(id AS STRING) AS value FROM rows"


def through_confluent(frame: DataFrame, topics: Topics, partitioner: str) -> None:
    servers, topic = topics.servers, topics.names["topic"]

    def write_rows(rows: Iterator[Row]) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": servers, "partitioner": partitioner})
        for row in rows:
            producer.produce(topic, key=row.key, value=row.value)
            producer.poll(0)
        assert producer.flush(30) == 0

    frame.foreachPartition(write_rows)


@pytest.mark.parametrize("partitioner", ["consistent_random", "murmur2_random"])
@pytest.mark.parametrize("way", BATCH_WAYS)
def test_rows_of_a_key_stay_on_librdkafkas_partition(
    frame_of: Callable[..., DataFrame], new_topics: Callable[..., Topics], way: str, partitioner: str
) -> None:
    before, after = new_topics("", PARTITIONS), new_topics("", PARTITIONS)
    frame = frame_of(KEYED, 500)
    through_confluent(frame, before, partitioner)
    if partitioner == "consistent_random":  # its default
        frame = frame.withColumn("partition", (F.crc32("key") % PARTITIONS).cast("int"))
    BATCH_WAYS[way](frame, after.options(TO_THE_TOPIC))
    assert after.contents() == before.contents()
    assert len(after.contents()) == PARTITIONS
