"""Writes a transaction by single requests, without a producer, as a task does.

Works over any `ClusterClient`, on real and scripted clusters.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.request_client import RequestClient
from spark_kafka_sink.admin.topics import TopicsMetadata
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import error_for_code
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.protocol.framing import RecordChunks
from spark_kafka_sink.protocol.metadata import GROUP, TRANSACTION, FindCoordinatorRequest, coordinator_of
from spark_kafka_sink.protocol.produce import ProduceRequest
from spark_kafka_sink.protocol.transactions import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    OffsetToCommit,
    TxnOffsetCommitRequest,
)
from spark_kafka_sink.protocol.versions import Request
from spark_kafka_sink.record.batch import seal
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.encoder import encode_rows

LIMIT_MS = 15_000
_RETRIED = frozenset(
    {
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.concurrent_transactions,
    }
)
TIMEOUT_MS = 60_000


class RawTransactions:
    """Writes under transactional ids, in one transaction version."""

    def __init__(self, coordinator: ClusterClient, version: int) -> None:
        self.coordinator = coordinator
        self.version = version
        self._sequences: dict[tuple[int, int, TopicPartition], int] = {}

    @property
    def _client(self) -> RequestClient:
        return self.coordinator._client

    @property
    def _metadata(self) -> TopicsMetadata:
        return self.coordinator._metadata

    @property
    def _clock(self) -> Clock:
        return self.coordinator._clock

    def begin(self, transactional_id: str, timeout_ms: int = TIMEOUT_MS) -> OpenTransaction:
        """Begin a new epoch, with an empty transaction."""
        timer = self.coordinator.timer(LIMIT_MS)
        given = self.coordinator.transactions.init_producer_id(transactional_id, timeout_ms, timer)
        return OpenTransaction.of(transactional_id, given, self.version)

    def write(self, open_: OpenTransaction, place: TopicPartition, *values: str) -> None:
        if self.version < 2:
            name = open_.transactional_id
            node = self.coordinator_of(TRANSACTION, name)
            request = AddPartitionsToTxnRequest(name, *open_.producer, {place.topic: [place.partition]})
            self._ask(node, request, lambda body: _add_code(body))
        self.produce(open_, place, values)

    def mark(self, open_: OpenTransaction, group: str, place: TopicPartition, offset: int, metadata: str) -> None:
        """Commit an offset for a group, in the transaction."""
        name = open_.transactional_id
        if self.version < 2:
            added = AddOffsetsToTxnRequest(name, *open_.producer, group)
            self._ask(self.coordinator_of(TRANSACTION, name), added, lambda body: int(body.error_code))
        commits = {place.topic: [OffsetToCommit(place.partition, offset, metadata)]}
        request = TxnOffsetCommitRequest(name, *open_.producer, group, commits, transaction_version=self.version)
        self._ask(self.coordinator_of(GROUP, group), request, lambda body: _offset_code(body))

    def produce(self, open_: OpenTransaction, place: TopicPartition, values: tuple[str, ...]) -> None:
        run = encode_rows(None, list(values), None, [1_000] * len(values), 0, 1_000)
        key = (open_.producer_id, open_.producer_epoch, place)
        sequence = self._sequences.get(key, 0)
        sealed = seal(
            [run.chunk],
            run.count,
            1_000,
            run.max_timestamp_ms,
            codec_for("none"),
            open_.producer_id,
            open_.producer_epoch,
            sequence,
            is_transactional=True,
        )
        batches = {place.topic: [(place.partition, RecordChunks(sealed.buffers))]}
        self.coordinator.topics.list_offsets([place], -2, self.coordinator.timer(LIMIT_MS))
        leader = self._metadata.current_leader(place).leader
        assert leader is not None
        request = ProduceRequest(-1, 5_000, batches, open_.transactional_id, self.version)
        self._ask(leader, request, lambda body: _produce_code(body))
        self._sequences[key] = sequence + len(values)

    def coordinator_of(self, key_type: int, key: str) -> Node:
        """Return the node that coordinates the group or transactional id now."""
        timer = self.coordinator.timer(LIMIT_MS)
        while True:
            node = self._client.least_loaded_node()
            assert node is not None
            future = self._client.send(node, FindCoordinatorRequest(key, key_type))
            assert self._client.poll_until(future, timer), f"no node named the coordinator of {key}"
            found = coordinator_of(future.value().body, key)
            assert found is not None
            if not found.error_code:
                return Node(found.node_id, found.host, found.port)
            if found.error_code not in _RETRIED or timer.is_expired:
                raise error_for_code(found.error_code)
            self._clock.sleep_ms(20)

    def _ask(self, node: Node, request: Request, code_of: Any) -> None:
        """Send until it succeeds; raises errors that are not retriable."""
        timer = self.coordinator.timer(LIMIT_MS)
        while True:
            future = self._client.send(node, request)
            assert self._client.poll_until(future, timer), f"{request} was not answered"
            code = code_of(future.value().body)
            if not code:
                return
            if code not in _RETRIED or timer.is_expired:
                raise error_for_code(code)
            self._clock.sleep_ms(20)


def _add_code(body: Any) -> int:
    return next(
        (
            int(result.partition_error_code)
            for topic in body.results_by_topic_v3_and_below
            for result in topic.results_by_partition
            if result.partition_error_code
        ),
        0,
    )


def _offset_code(body: Any) -> int:
    return next((int(each.error_code) for topic in body.topics for each in topic.partitions if each.error_code), 0)


def _produce_code(body: Any) -> int:
    answers = (each for topic in body.responses for each in topic.partition_responses)
    return next((int(each.error_code) for each in answers if each.error_code), 0)
