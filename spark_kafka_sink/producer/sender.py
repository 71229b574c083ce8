"""The Sender: sends batches to the brokers. Its thread owns the network client and with it every connection.

`run_once` is one turn: expire late batches, update the identity of the producer, drain ready batches, send, poll. A
test runs it turn by turn. Reference: org.apache.kafka.clients.producer.internals.Sender.
"""

from __future__ import annotations

import enum
import logging
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.client.metadata_view import MetadataCache
from spark_kafka_sink.client.seams import ClientResponse, KafkaClient
from spark_kafka_sink.common.clock import Clock, lock_timeout
from spark_kafka_sink.common.cluster import Node, PartitionInfo, TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    BufferExhaustedError,
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerClosedError,
)
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.producer.idempotence import ClusterWatch, OutgoingRequest, ProducerIdentity, TopicWatch
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.partitioner import NodeAvailability, Partitioners
from spark_kafka_sink.producer.produce_response import BatchOutcomes
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata
from spark_kafka_sink.producer.record_accumulator import ReadyCheck, RecordAccumulator
from spark_kafka_sink.producer.telemetry import ClientTelemetry
from spark_kafka_sink.producer.transactions import Idempotence, TransactionManager, leave_cluster
from spark_kafka_sink.protocol.framing import RecordChunks
from spark_kafka_sink.protocol.produce import ProduceRequest
from spark_kafka_sink.record.codecs import Codec

log = logging.getLogger(__name__)

_NO_WAIT: Final = (
    "A callback, or a log handler on the producer's own thread, cannot wait for {what}: that thread must fetch it. Send"
    " from another thread."
)


class _MetadataWatch:
    """Notices brokers of another cluster, and topics that were created again: neither know the producer."""

    def __init__(self) -> None:
        self._cluster, self._topics = ClusterWatch(), TopicWatch()

    def note(self, cache: MetadataCache, idempotence: Idempotence) -> None:
        """Tell `idempotence` of changes since the last call."""
        if change := self._cluster.change_to(cache.cluster_id):
            leave_cluster(idempotence, change)
        if topics := self._topics.created_again(cache.topic_ids):
            identity = idempotence if isinstance(idempotence, ProducerIdentity) else idempotence.identity
            identity.leaders_are_new(topics)


_LEAST_PAUSE_MS: Final = 5
"""Between two looks at what an answer may have changed, also with retry.backoff.ms=0: without it the thread would spin.
"""


class _Left(enum.Enum):
    """What a close still waits for."""

    RECORDS = "records, requests, or the end of a transaction"
    TELEMETRY = "the last push"
    NOTHING = "nothing"


def _left_to_do(
    client: KafkaClient,
    accumulator: RecordAccumulator,
    transactions: TransactionManager | None,
    telemetry: ClientTelemetry | None,
    clock: Clock,
) -> _Left:
    """Return what a close must wait for. Telemetry counts only once everything else is done."""
    is_ending = transactions is not None and transactions.is_completing
    is_waiting = client.in_flight_request_count() > (0 if telemetry is None else telemetry.in_flight)
    if accumulator.has_undrained or is_waiting or is_ending:
        return _Left.RECORDS
    is_pushing = telemetry is not None and telemetry.is_ending(clock.now_ms())
    return _Left.TELEMETRY if is_pushing else _Left.NOTHING


class Sender:
    """The loop of the Sender thread."""

    def __init__(
        self,
        *,
        config: ProducerConfig,
        codec: Codec,
        client: KafkaClient,
        metadata: ProducerMetadata,
        accumulator: RecordAccumulator,
        idempotence: Idempotence | None,
        metrics: ProducerMetrics,
        partitioners: Partitioners,
        clock: Clock,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        self._config = config
        self._pause_ms = max(config.retry_backoff_ms, _LEAST_PAUSE_MS)
        self._client = client
        self._metadata = metadata
        self._accumulator = accumulator
        self._idempotence = idempotence
        self._transactions = idempotence if isinstance(idempotence, TransactionManager) else None
        self._metrics = metrics
        self._partitioners = partitioners
        self._clock = clock
        self._telemetry, self._telemetry_ms = telemetry, FOREVER_MS
        self._codec = codec
        self._has_zstd = codec.name == "zstd"
        self._guarantees_order = config.max_in_flight_requests_per_connection == 1
        self._availability = NodeAvailability(config.partitioner_availability_timeout_ms)
        self._outcomes = BatchOutcomes(
            accumulator=accumulator,
            metadata=metadata,
            idempotence=idempotence,
            metrics=metrics,
            retries=config.retries,
            delivery_timeout_ms=config.delivery_timeout_ms,
            guarantees_order=self._guarantees_order,
        )
        self._metadata_watch = _MetadataWatch()
        self._on_wire: set[ProducerBatch] = set()
        """The batches in requests that the client will end."""
        self.has_ended = False
        """`run` has ended."""
        self._until_end = threading.Lock()
        self._until_end.acquire()
        self._thread_id: int | None = None
        self._is_running, self._is_forced = True, False
        self._left_to_do = partial(_left_to_do, client, accumulator, self._transactions, telemetry, clock)
        self._left: _Left | None = None
        """What a close waited for as this turn began. None before the close."""
        self._failed_turn: tuple[Exception, int] | None = None
        """The error and time of the last failed turn."""

    # ---- the thread ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run turns until closed. Then send queued batches and wait for those in flight, unless the close is forced.

        Turns go on after a turn that failed. At the end no thread waits for this one, however it ends.
        """
        self._thread_id = threading.get_ident()
        how = "was closed"
        try:
            while self._is_running:
                self._run_safely()
            while not self._is_forced:
                if self._transactions is not None:
                    self._transactions.abort_open_transaction()  # also after a commit in progress has failed
                self._left = self._left_to_do()
                if self._left is _Left.NOTHING:
                    break
                self._run_safely()
        except BaseException as cause:  # SystemExit, for example: it ends the thread, not a turn
            how = f"was ended by {type(cause).__name__}"
            log.critical("The producer %s", how, exc_info=True)
            raise
        finally:
            try:
                self._end(how)
            finally:
                self._thread_id = None  # another thread may get the same id
                self.has_ended = True
                if self._until_end.locked():
                    self._until_end.release()

    def _end(self, how: str) -> None:
        """Log that the producer ended, and `how`."""
        with ExitStack() as last_first:
            last_first.callback(self._client.close)
            last_first.callback(self._metadata.close)
            if self._transactions is not None:
                unended = ProducerClosedError(f"The producer {how} before this had ended.")
                last_first.callback(self._transactions.give_up, unended)
            lost = ProducerClosedError(f"The producer {how} before this was acknowledged.")
            last_first.callback(self._accumulator.abort_incomplete, lost)
            last_first.callback(self._accumulator.close)
            if self._telemetry is not None:
                last_first.callback(self._telemetry.close)
            self._metrics.requests_in_flight = 0

    def _run_safely(self) -> None:
        try:
            self.run_once()
        except Exception as error:
            self._on_fault(error, isinstance(error, IllegalStateError))
            log.exception("A turn of the Sender failed; it goes on")
            self._clock.sleep_ms(self._pause_ms)

    def _on_fault(self, fault: Exception, is_of_identity: bool) -> None:
        """Mark the producer as failed, and end the batches of the failed turn.

        After a fault in the state that brokers know (an impossible state, for example) the producer ends: nothing may
        reach a broker after that (KAFKA-14831).
        """
        now_ms = self._clock.now_ms()
        self._failed_turn = fault, now_ms
        idempotence = self._idempotence
        if is_of_identity and idempotence is not None and not idempotence.has_fatal_error:
            error = KafkaError(
                f"The producer had an internal error, {type(fault).__name__}: {one_line(str(fault))}. Requests in"
                " flight may still take effect. Close this producer and make another."
            )
            error.__cause__ = fault
            idempotence.fail(error)
        try:
            self._outcomes.give_up(self._accumulator.batches_in_flight() - self._on_wire, fault, now_ms)
        except Exception:  # the producer has failed already
            log.exception("Records of the failed turn could not be failed; closing the producer fails them")

    @property
    def has_failed_turn(self) -> bool:
        """Whether a turn, or the handling of an answer, failed since the start by an internal error."""
        return self._failed_turn is not None

    def explained(self, error: KafkaError) -> KafkaError:
        """Return `error`. A timeout gets the last failed turn as its cause, if there is one. From any thread."""
        if self._failed_turn is not None and isinstance(error, KafkaTimeoutError):
            cause, at_ms = self._failed_turn
            ago_ms = self._clock.now_ms() - at_ms
            error.hint = (
                f" An internal error may be the cause: {ago_ms} ms ago a turn of its Sender thread failed with"
                f" {type(cause).__name__}: {one_line(str(cause))}"
            )
            error.__cause__ = cause
        return error

    def run_once(self) -> None:
        """Run one turn."""
        now_ms = self._clock.now_ms()
        for batch in self._accumulator.expired_batches(now_ms):  # before the drain: failed batches must not be sent
            self._outcomes.expire(batch, now_ms)
        if self._telemetry is not None:  # before the records, which may fill the connections in each turn
            self._telemetry_ms = self._telemetry.turn(self._client, now_ms)
        idempotence = self._idempotence
        if idempotence is not None:
            self._metadata_watch.note(self._metadata.cache, idempotence)
            if isinstance(idempotence, ProducerIdentity):
                idempotence.maybe_resolve_sequences()
                self._fail_refused_records(idempotence)
                idempotence.bump_epoch_if_needed(lambda: self._accumulator.has_undrained)
            self._maybe_send_request(idempotence, now_ms)
            if idempotence.has_fatal_error:
                self._abort_after(idempotence)
                self._poll(self._pause_ms, now_ms)
                return
            lost = None if self._transactions is None else self._transactions.lost_transaction
            if lost is not None:
                self._accumulator.abort_undrained(lost)
        timeout_ms = self._send_producer_data(now_ms)
        if idempotence is not None:
            timeout_ms = min(timeout_ms, self._request_delay_ms(idempotence, now_ms))
        self._poll(timeout_ms, now_ms)

    def _poll(self, timeout_ms: int, now_ms: int) -> None:
        self._metrics.requests_in_flight = self._client.in_flight_request_count()
        if self._left is not None and self._left_to_do() is not self._left:
            timeout_ms = 0  # this turn ended what the close waited for, so perhaps no answer would end the poll
        self._client.poll(min(timeout_ms, self._telemetry_ms), now_ms)

    def wakeup(self) -> None:
        """End a waiting poll. From any thread."""
        self._client.wakeup()

    def wakeup_for_metadata(self, topic: str) -> None:
        """Wake the Sender for a thread that is about to wait for the topic. Raises KafkaTimeoutError on the thread of
        the Sender (in a callback), which would wait for itself.
        """
        if threading.get_ident() == self._thread_id:
            raise KafkaTimeoutError(_NO_WAIT.format(what=f"the metadata of topic {topic}"))
        self.wakeup()

    def wakeup_for_memory(self) -> None:
        """The same for buffer.memory. Raises BufferExhaustedError."""
        if threading.get_ident() == self._thread_id:
            raise BufferExhaustedError(_NO_WAIT.format(what="buffer.memory"))
        self.wakeup()

    def initiate_close(self) -> None:
        """Take no more records, send the queued ones, then end. From any thread."""
        self._accumulator.close()
        self._is_running = False
        self.wakeup()

    def force_close(self) -> None:
        """End now. Records that are not acknowledged fail. From any thread."""
        self._is_forced = True
        self.initiate_close()

    def wait_for_end(self, timeout_s: float | None) -> bool:
        """Wait up to `timeout_s` seconds (None: as long as it takes) for the end of `run`. Return whether it has ended.
        From any other thread.

        Up to Python 3.12, Ctrl-C in `Thread.join` makes a running thread count as ended, and Ctrl-C in `Event.wait` may
        leave the event's lock taken. So the wait is for a lock, and the answer is the flag.

        There is no wait when the interpreter ends: it has stopped all other threads for ever.
        """
        timeout_s = 0 if sys.is_finalizing() else timeout_s
        if not self.has_ended and self._until_end.acquire(timeout=lock_timeout(timeout_s)):
            self._until_end.release()  # for the next waiting thread
        return self.has_ended

    # ---- the producer's identity -----------------------------------------------------------------------------------

    def _maybe_send_request(self, idempotence: Idempotence, now_ms: int) -> None:
        """Send the next request for the producer id or the transaction. The drain holds back records that must wait."""
        outgoing = idempotence.next_request(now_ms, lambda: self._accumulator.has_incomplete)
        if outgoing is None:
            return
        node = outgoing.node or self._client.least_loaded_node(now_ms)
        if node is None:
            return
        refusal = self._client.authentication_error(node)
        if refusal is not None:
            outgoing.refused(refusal)
        elif self._client.ready(node, now_ms):
            self._send_outgoing(outgoing, node, now_ms)
        elif self._client.connection_failed(node):
            outgoing.unreachable()

    def _request_delay_ms(self, idempotence: Idempotence, now_ms: int) -> int:
        """Return the time until the next request. A request that waits only for its node is tried again soon."""
        delay_ms = idempotence.request_delay_ms(now_ms)
        return delay_ms if delay_ms > 0 else self._pause_ms

    def _send_outgoing(self, outgoing: OutgoingRequest, node: Node, now_ms: int) -> None:
        def settle(response: ClientResponse) -> None:
            try:
                if response.version_mismatch is not None:
                    outgoing.refused(response.version_mismatch)
                else:
                    outgoing.answered(response.body, response.destination, response.received_ms)
            except Exception as fault:
                self._on_fault(fault, is_of_identity=True)
                raise  # the client logs it

        if not outgoing.take():
            return
        request = self._client.new_client_request(node.id_string, outgoing.request, now_ms, True, None, settle)
        self._client.send(request, now_ms)

    def _fail_refused_records(self, identity: ProducerIdentity) -> None:
        """Fail records that wait for a producer id without permission. Sent batches may be in the log and go on."""
        refusal = identity.take_refusal()
        if refusal is not None:
            log.error("Records that wait for a producer id fail: %s", refusal)
            self._accumulator.abort_undrained(refusal)

    def _abort_after(self, idempotence: Idempotence) -> None:
        cause = idempotence.last_error
        error = KafkaError("The producer had a fatal error.") if cause is None else cause
        if self._accumulator.has_incomplete:
            log.error("Every record that is not acknowledged fails: %s", error)
            self._accumulator.abort_incomplete(error)

    # ---- records ---------------------------------------------------------------------------------------------------

    def _send_producer_data(self, now_ms: int) -> int:
        """Drain and send ready batches. Return how long the poll may wait, in ms."""
        cache = self._metadata.cache
        epoch_of = cache.leader_epoch
        check = self._accumulator.ready(cache.cluster, epoch_of, self._partitioners.loaded, now_ms)
        for topic in check.unknown_leader_topics:
            self._metadata.add(topic, now_ms)
            self._metadata.request_update(reset_equivalent_backoff=False)
        if check.unknown_leader_topics and cache.cluster.is_bootstrap_configured:
            self._fail_if_refused(cache.cluster.nodes)
        nodes, not_ready_ms = self._nodes_to_send_to(check, now_ms)
        self._report_loads(check, cache, now_ms)
        drained: Mapping[int, list[ProducerBatch]] = {}
        if nodes:
            limit = self._config.max_request_size
            drained = self._sealed(self._accumulator.drain(cache.cluster, nodes, limit, epoch_of, now_ms), now_ms)
        if self._guarantees_order:
            for batches in drained.values():
                for batch in batches:
                    self._accumulator.mute(batch.topic_partition)
        if drained:
            sent_ms = self._clock.now_ms()  # the latency of the broker does not include compression
            for node_id, batches in drained.items():
                self._send_produce_request(node_id, batches, sent_ms)
            return 0
        timeout_ms = min(check.next_check_delay_ms, not_ready_ms, self._accumulator.next_expiry_ms() - now_ms)
        if nodes:  # ready batches are held back to keep the order: check again soon
            timeout_ms = min(timeout_ms, self._pause_ms)
        return max(0, timeout_ms)

    def _sealed(self, drained: Mapping[int, list[ProducerBatch]], now_ms: int) -> dict[int, list[ProducerBatch]]:
        """Return the sealed batches. A batch that cannot be encoded fails, without the others."""
        sealed: dict[int, list[ProducerBatch]] = {}
        for node_id, batches in drained.items():
            for batch in batches:
                is_first_time = not batch.is_sealed
                try:
                    batch.seal(self._codec)
                except Exception as cause:
                    self._outcomes.fail_unsendable(batch, cause, now_ms)
                    continue
                sealed.setdefault(node_id, []).append(batch)
                if is_first_time:
                    self._accumulator.sizes.learn(batch)
                    batch.keep_compressed(self._accumulator.pool)
        return sealed

    def _nodes_to_send_to(self, check: ReadyCheck, now_ms: int) -> tuple[list[Node], int]:
        """Return the ready nodes that can take a request, and the time until another one may."""
        nodes: list[Node] = []
        not_ready_ms = FOREVER_MS
        for node in check.ready_nodes.values():
            is_ready = self._client.ready(node, now_ms)
            self._availability.update(node.id, is_ready, now_ms)
            refusal = None if is_ready else self._client.authentication_error(node)
            if is_ready:
                nodes.append(node)
            elif refusal is not None:
                self._on_refusal(refusal)
                not_ready_ms = 0
            else:
                not_ready_ms = min(not_ready_ms, self._client.poll_delay_ms(node, now_ms))
        return nodes, not_ready_ms

    def _fail_if_refused(self, nodes: Iterable[Node]) -> None:
        """Fail records whose leader only `nodes` could name, those of bootstrap.servers, if one of these refuses us."""
        refusals = (self._client.authentication_error(node) for node in nodes)
        if refusal := next((each for each in refusals if each is not None), None):
            self._on_refusal(refusal)

    def _on_refusal(self, refusal: KafkaError) -> None:
        """Fail records for a node that refuses our credentials, because the same credentials would be refused again."""
        log.error("Records that are not sent fail: %s", refusal)
        idempotence = self._idempotence
        if idempotence is None:
            self._accumulator.abort_undrained(refusal)
        elif not idempotence.has_fatal_error:
            idempotence.fail(refusal)

    def _report_loads(self, check: ReadyCheck, cache: MetadataCache, now_ms: int) -> None:
        self._availability.keep(check.waiting_nodes)
        unavailable = self._availability.unavailable(now_ms)
        self._partitioners.skips_nodes = bool(unavailable)
        for topic, queue_sizes in check.queue_sizes.items():
            available = cache.cluster.available_partitions_for_topic(topic)
            self._partitioners.update_loads(topic, _usable(queue_sizes, available, unavailable), len(available))

    def _send_produce_request(self, node_id: int, batches: list[ProducerBatch], now_ms: int) -> None:
        by_topic: dict[str, list[tuple[int, RecordChunks]]] = {}
        by_partition: dict[TopicPartition, ProducerBatch] = {}
        for batch in batches:
            topic_partition, sealed = batch.topic_partition, batch.sealed
            topic, partition = topic_partition
            by_topic.setdefault(topic, []).append((partition, RecordChunks(sealed.buffers, sealed.size)))
            by_partition[topic_partition] = batch
        config = self._config
        transactions = self._transactions
        request = ProduceRequest(
            config.acks,
            config.request_timeout_ms,
            by_topic,
            None if transactions is None else transactions.transactional_id,
            2 if transactions is None else transactions.transaction_version,
            self._has_zstd,
        )
        expects_response = config.acks != 0
        self._metrics.batches_sent(batches, now_ms)

        def settle(response: ClientResponse) -> None:
            self._on_wire.difference_update(batches)
            try:
                self._outcomes.handle_response(response, by_partition)
            except Exception as fault:
                self._on_fault(fault, isinstance(fault, IllegalStateError))
                raise  # the client logs it

        self._client.send(
            self._client.new_client_request(str(node_id), request, now_ms, expects_response, None, settle), now_ms
        )
        self._on_wire.update(batches)


def _usable(
    queue_sizes: Mapping[int, int], available: Sequence[PartitionInfo], unavailable: Collection[int]
) -> Mapping[int, int]:
    """Return the queue sizes of partitions whose leaders are not `unavailable`, by partition. Empty if a partition was
    never used: otherwise it would never be chosen.
    """
    if len(queue_sizes) < len(available):
        return {}
    if not unavailable:
        return queue_sizes
    return {
        info.partition: queue_sizes[info.partition]
        for info in available
        if info.leader is not None and info.leader.id not in unavailable
    }
