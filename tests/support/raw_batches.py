"""The record batches of a partition as its leader stores them: with headers, sequences and sizes."""

from __future__ import annotations

import random

from spark_kafka_sink.admin.request_client import RequestClient, Timer
from spark_kafka_sink.admin.topics import TopicsMetadata
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import error_for_code
from spark_kafka_sink.protocol.fetch import FetchPartition, FetchRequest
from spark_kafka_sink.record.decoder import DecodedBatch, decode_batches

PARTITION_BYTES = 32 * 1024 * 1024


def read_batches(
    bootstrap_servers: str, topic: str, partition: int = 0, *, timeout_s: float = 30.0
) -> list[DecodedBatch]:
    """Return the batches from offset 0 on, up to the limit of one response."""
    config = ProducerConfig.from_mapping({"bootstrap.servers": bootstrap_servers})
    clock, rng = SystemClock(), random.Random()
    metadata = TopicsMetadata([topic], 50, 50, 60_000, rng)
    client = RequestClient.connect(config, metadata, clock, rng)
    timer = Timer(clock, int(timeout_s * 1000))
    try:
        place = TopicPartition(topic, partition)
        while (leader := metadata.current_leader(place).leader) is None:
            assert not timer.is_expired, f"{place} has no leader after {timeout_s} s"
            client.await_metadata_update(timer)
        asked = FetchPartition(partition, 0, PARTITION_BYTES, -1)
        future = client.send(leader, FetchRequest({topic: [asked]}, max_wait_ms=10))
        client.poll_until(future, timer)
        assert future.is_done(), f"{place} was not read within {timeout_s} s"
        ((answer,),) = (found.partitions for found in future.value().body.responses)
        if answer.error_code:
            raise error_for_code(int(answer.error_code))
        return list(decode_batches(answer.records or b""))
    finally:
        client.close()
