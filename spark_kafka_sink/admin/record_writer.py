"""Writes single records, mostly into open transactions, for a driver that has no producer and records its decisions.

It runs on the caller's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from spark_kafka_sink.admin.coordinator_calls import CoordinatorApi, CoordinatorCalls
from spark_kafka_sink.admin.request_client import RequestClient, Timer
from spark_kafka_sink.admin.topics import TopicAbsence
from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    CoordinatorNotAvailableError,
    DuplicateSequenceError,
    InvalidProducerEpochError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    RequestTimedOutError,
    UnknownTopicOrPartitionError,
    error_for_code,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.protocol.framing import RecordChunks
from spark_kafka_sink.protocol.metadata import TRANSACTION
from spark_kafka_sink.protocol.produce import ProduceRequest
from spark_kafka_sink.protocol.transactions import AddPartitionsToTxnRequest
from spark_kafka_sink.protocol.versions import Message, Request
from spark_kafka_sink.record.batch import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, seal
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.encoder import encode_rows

_ALL_REPLICAS: Final = -1
_REPLICAS_MS: Final = 30_000
"""How long a leader waits for its replicas before it answers."""
_ALONE_MS: Final = 5_000
"""The same for a record that may be written again. A broker that does not lead any more would wait in vain."""
_NOT_ATTEMPTED: Final = 55
"""OPERATION_NOT_ATTEMPTED"""
_CODEC: Final = codec_for("gzip")
"""A decision lists many similar tasks, and must stay below the topic's max.message.bytes."""


class RecordWriter:
    """Writes on `calls`' client. A record is sent again, under the same sequence, until it is known to be written."""

    def __init__(self, calls: CoordinatorCalls, clock: Clock, retry_backoff: ExponentialBackoff) -> None:
        self._calls = calls
        self._client: RequestClient = calls.client
        self._clock = clock
        self._retry_backoff = retry_backoff

    def write(
        self,
        transaction: OpenTransaction,
        topic_partition: TopicPartition,
        key: bytes,
        value: bytes | None,
        sequence: int,
        timer: Timer,
    ) -> int:
        """Write one record in the transaction, and begin the transaction if necessary. Return its offset; -1 if the
        leader does not tell it, because an earlier attempt has succeeded. `sequence` is the number of
        records that the producer's epoch has written to the partition. Metadata must already include the topic.

        Raises KafkaTimeoutError, after which the record may or may not be in the transaction, and the errors of
        coordinator and leader: ProducerFencedError, TopicAuthorizationError, and UnknownTopicOrPartitionError if the
        topic was deleted.
        """
        if transaction.transaction_version < 2:
            self.add_partitions({transaction: [topic_partition]}, timer)
        request = self._request(transaction, topic_partition, key, value, sequence)
        try:
            return self._send(request, topic_partition, timer)
        except InvalidProducerEpochError as error:  # the error code that leaders use for it
            raise ProducerFencedError(
                f"{transaction}, writing to {topic_partition}: {ProducerFencedError.sentence}",
                topic_partition=topic_partition,
            ) from error

    def add_partitions(self, added: Mapping[OpenTransaction, Iterable[TopicPartition]], timer: Timer) -> None:
        """Begin transactions, each by adding partitions to it. Nothing is written yet, so no reader waits for them.

        Raises KafkaTimeoutError, and ProducerFencedError or InvalidProducerEpochError if another producer has the id.
        """
        items = [_Added(transaction, tuple(places)) for transaction, places in added.items()]
        outcomes = self._calls.run(_AddPartitions(), items, timer)
        for item in items:
            outcomes[item].get()

    def write_alone(self, topic_partition: TopicPartition, key: bytes, value: bytes | None, timer: Timer) -> int:
        """Write one record without a transaction: once, or several times if a response is lost. Return its offset.
        Metadata must already include the topic. Raises the errors of `write`.
        """
        request = self._request(None, topic_partition, key, value, NO_SEQUENCE, _ALONE_MS)
        return self._send(request, topic_partition, timer)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _send(self, request: Request, topic_partition: TopicPartition, timer: Timer) -> int:
        attempts, last = 0, "No answer came."
        absence = TopicAbsence(self._calls.metadata, self._clock)
        while not timer.is_expired:
            error = self._try(request, topic_partition, timer)
            if isinstance(error, int):
                return error
            if isinstance(error, DuplicateSequenceError):  # an earlier attempt succeeded
                return -1
            if not error.retriable:
                raise error.at(topic_partition=topic_partition)
            last = str(error)
            if error.invalid_metadata or isinstance(error, RequestTimedOutError):  # replicas may have another leader
                self._client.await_metadata_update(timer)
                absence.check_partitions([topic_partition])
            self._clock.sleep_ms(min(self._retry_backoff.backoff_ms(attempts), timer.remaining_ms))
            attempts += 1
            timer.update()
        late = KafkaTimeoutError(f"No record was written within {timer.timeout_ms} ms. {last}")
        raise late.at(topic_partition=topic_partition)

    def _request(
        self,
        transaction: OpenTransaction | None,
        place: TopicPartition,
        key: bytes,
        value: bytes | None,
        sequence: int,
        replicas_ms: int = _REPLICAS_MS,
    ) -> ProduceRequest:
        name, producer_id, epoch, version = transaction or (None, NO_PRODUCER_ID, NO_PRODUCER_EPOCH, 2)
        now_ms = self._clock.wall_ms()
        run = encode_rows([key], [value], None, [now_ms], 0, now_ms)
        sealed = seal(
            [run.chunk],
            run.count,
            now_ms,
            run.max_timestamp_ms,
            _CODEC,
            producer_id,
            epoch,
            sequence,
            is_transactional=transaction is not None,
        )
        batches = {place.topic: [(place.partition, RecordChunks(sealed.buffers))]}
        return ProduceRequest(_ALL_REPLICAS, replicas_ms, batches, name, version)

    def _try(self, request: Request, place: TopicPartition, timer: Timer) -> KafkaError | int:
        """Return the offset, or why the record is not known to be written."""
        leader = self._calls.metadata.current_leader(place).leader
        if leader is None:
            return UnknownTopicOrPartitionError("It has no leader now.")
        future = self._client.send(leader, request)
        try:
            if not self._client.poll_until(future, timer):
                return KafkaTimeoutError(f"Node {leader} did not answer.", node=leader.id_string)
        finally:
            if not future.is_done():
                self._client.disconnect_async(leader)  # a later poll must not send it
        if future.failed():
            return future.error
        topics = (topic for topic in future.value().body.responses if topic.name == place.topic)
        answers = (each for topic in topics for each in topic.partition_responses)
        found = {(int(each.error_code), int(each.base_offset)) for each in answers if each.index == place.partition}
        if len(found) != 1:
            fault = "different answers for" if found else "a response without"
            return KafkaTimeoutError(f"Node {leader} sent {fault} the partition.", node=leader.id_string)
        ((code, offset),) = found
        return error_for_code(code, api="Produce") if code else offset


class _Added(NamedTuple):
    """Partitions that are being added to a transaction."""

    transaction: OpenTransaction
    topic_partitions: tuple[TopicPartition, ...]


class _AddPartitions(CoordinatorApi[_Added, bool]):
    key_type = TRANSACTION

    def key(self, item: _Added) -> str:
        return item.transaction.transactional_id

    def describe(self, item: _Added) -> str:
        return f"AddPartitionsToTxn of {', '.join(map(str, item.topic_partitions))} to {item.transaction}"

    def requests(self, items: Sequence[_Added]) -> Iterable[tuple[Request, Sequence[_Added]]]:
        for item in items:
            topics: dict[str, list[int]] = {}
            for topic, partition in item.topic_partitions:
                topics.setdefault(topic, []).append(partition)
            name, producer = item.transaction.transactional_id, item.transaction.producer
            yield AddPartitionsToTxnRequest(name, *producer, topics), [item]

    def answers(self, items: Sequence[_Added], body: Message) -> Mapping[_Added, bool | KafkaError]:
        codes: dict[TopicPartition, int] = {}
        for topic in body.results_by_topic_v3_and_below:
            for result in topic.results_by_partition:
                place = TopicPartition(str(topic.name), int(result.partition_index))
                codes[place] = codes.get(place) or int(result.partition_error_code)
        return {item: _outcome(item, codes) for item in items}


def _outcome(item: _Added, codes: Mapping[TopicPartition, int]) -> bool | KafkaError:
    """Return the error that counts. The coordinator refuses the other partitions because of one, without saying why;
    and it may not have acted on a partition that its answer does not mention.
    """
    refused = {place: codes.get(place, _NOT_ATTEMPTED) for place in item.topic_partitions if codes.get(place) != 0}
    if not refused:
        return True
    place = min(refused, key=lambda each: refused[each] == _NOT_ATTEMPTED)
    if refused[place] == _NOT_ATTEMPTED:
        return CoordinatorNotAvailableError("It did not say why it has not added it.").at(topic_partition=place)
    return error_for_code(refused[place], api="AddPartitionsToTxn").at(topic_partition=place)
