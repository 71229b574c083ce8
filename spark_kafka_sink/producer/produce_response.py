"""The outcome of a batch that was sent: completed, sent again, split, or failed. Sender thread.

Reference: org.apache.kafka.clients.producer.internals.Sender (handleProduceResponse, completeBatch, canRetry,
failBatch).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import datetime
from types import MappingProxyType
from typing import Final, NamedTuple

from spark_kafka_sink.client.metadata import LeaderIdAndEpoch
from spark_kafka_sink.client.seams import ClientResponse
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    AuthorizationError,
    CorruptMessageError,
    DisconnectError,
    DuplicateSequenceError,
    InvalidRecordError,
    KafkaError,
    KafkaTimeoutError,
    NotEnoughReplicasError,
    OutOfOrderSequenceError,
    RecordTooLargeError,
    RequestTimedOutError,
    TransactionalIdAuthorizationError,
    UnknownProducerIdError,
    UnknownTopicOrPartitionError,
    error_for_code,
)
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.producer.idempotence import ProducerIdentity
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata
from spark_kafka_sink.producer.record_accumulator import RecordAccumulator
from spark_kafka_sink.producer.transactions import Idempotence, TransactionManager, give_up_after_fault
from spark_kafka_sink.protocol.versions import Message, to_ms

log = logging.getLogger(__name__)

_NOT_KNOWN: Final = (
    "they may or may not be in the log. The broker may have appended them, or a larger batch that they were part of,"
    " without an acknowledgement. Asked again it cannot tell: it was restarted, or refuses what it has taken before."
)
_NOTHING_TAKEN: Final = (
    CorruptMessageError,
    NotEnoughReplicasError,
    OutOfOrderSequenceError,
    UnknownProducerIdError,
)
"""Refusals before any record is appended.

Other errors may come after that: a leader that loses leadership while it waits for its followers says that it is not
the leader.
"""


_CONTRADICTION: Final = "The answer names the partition more than once, with different outcomes."
_AFTER_FAULT: Final = "The records may or may not be in the log. Close this producer and make another."


class PartitionOutcome(NamedTuple):
    """The answer of a node for one batch."""

    error: KafkaError | None = None
    base_offset: int = -1
    log_append_time_ms: int | None = None
    log_start_offset: int = -1
    record_errors: Mapping[int, str | None] = MappingProxyType({})
    leader: LeaderIdAndEpoch | None = None


class BatchOutcomes:
    """Settles batches."""

    def __init__(
        self,
        *,
        accumulator: RecordAccumulator,
        metadata: ProducerMetadata,
        idempotence: Idempotence | None,
        metrics: ProducerMetrics,
        retries: int,
        delivery_timeout_ms: int,
        guarantees_order: bool,
    ) -> None:
        self._accumulator = accumulator
        self._metadata = metadata
        self._idempotence = idempotence
        self._metrics = metrics
        self._retries = retries
        self._delivery_timeout_ms = delivery_timeout_ms
        self._guarantees_order = guarantees_order
        self._logged_too_large: dict[str, int] = {}
        """By topic, the size of the smallest batch that a warning named as too large."""
        self._throttles: dict[int, tuple[int, int]] = {}
        """By node: the last throttle time, and its end, in ms."""

    def handle_response(self, response: ClientResponse, batches: Mapping[TopicPartition, ProducerBatch]) -> None:
        """Settle every batch of a request, with or without a response.

        An internal error fails only its batch. The first one is raised after all batches are settled.
        """
        now_ms = response.received_ms
        faults: list[Exception] = []
        try:
            outcomes = _answered(response, batches)
        except Exception as fault:
            faults.append(fault)
            outcomes = dict.fromkeys(batches, PartitionOutcome(error=_unread(response, fault)))
        try:
            self._note_answer(response, batches, outcomes, now_ms)
        except Exception as fault:
            faults.append(fault)
        unsettled: dict[TopicPartition, Exception] = {}
        for topic_partition, batch in batches.items():
            try:
                self._settle(batch, outcomes.get(topic_partition) or _left_out(response, topic_partition), now_ms)
            except Exception as fault:
                unsettled[topic_partition] = fault
        for topic_partition, error in unsettled.items():
            faults.append(error)
            outcome = outcomes.get(topic_partition) or _left_out(response, topic_partition)
            self._give_up(batches[topic_partition], outcome, error, now_ms)
        if faults:
            raise faults[0]

    def give_up(self, batches: Iterable[ProducerBatch], fault: Exception, now_ms: int) -> None:
        """End `batches` in flight at once: `fault` prevented their send or their outcome."""
        with ExitStack() as stack:
            for batch in batches:
                stack.callback(self._give_up, batch, None, fault, now_ms)

    def _note_answer(
        self,
        response: ClientResponse,
        batches: Mapping[TopicPartition, ProducerBatch],
        outcomes: Mapping[TopicPartition, PartitionOutcome],
        now_ms: int,
    ) -> None:
        """Use the parts of an answer that are not about batches."""
        if response.body is None:
            return
        throttle_ms = to_ms(response.body.throttle_time)
        if throttle_ms:
            self._throttles[int(response.destination)] = throttle_ms, now_ms + throttle_ms
        self._metrics.response_received(response.latency_ms, throttle_ms, now_ms)
        refused = {tp: outcome for tp, outcome in outcomes.items() if outcome.error is not None}
        leaders = {tp: outcome.leader for tp, outcome in refused.items() if outcome.leader is not None}
        if leaders:
            endpoints = getattr(response.body, "node_endpoints", ())
            nodes = [Node(int(node.node_id), node.host, int(node.port), node.rack) for node in endpoints]
            self._metadata.update_partition_leadership(leaders, nodes)
        unexpected = outcomes.keys() - batches.keys()
        if unexpected:
            log.warning(
                "Node %s answered for %d partitions that were not in the request, such as %s",
                response.destination,
                len(unexpected),
                min(unexpected),
            )
        _log_errors(
            response.destination,
            {
                tp: refused[tp]
                for tp, each in batches.items()
                if tp in refused and not _is_split(each, refused[tp].error)
            },
        )

    def _settle(self, batch: ProducerBatch, outcome: PartitionOutcome, now_ms: int) -> None:
        error = outcome.error
        if error is None or _is_taken(outcome) or self._has_taken(batch, error):
            self._complete(batch, outcome, now_ms)
        elif _is_split(batch, error):
            self._split(batch, now_ms)
        elif self._can_retry(batch, error, outcome.log_start_offset, now_ms):
            log.debug("Sending %d records for %s again: %s", batch.record_count, batch.topic_partition, error)
            self._metrics.records_retried(batch.topic_partition.topic, batch.record_count, now_ms)
            batch.may_be_in_log |= not isinstance(error, _NOTHING_TAKEN)
            self._accumulator.reenqueue(batch, error, now_ms)
        else:
            self._fail_answered(batch, outcome, error, now_ms)
        if error is not None and (error.invalid_metadata or isinstance(error, RequestTimedOutError)):
            # A leader without followers may have been replaced: it is cut off from its controllers, too.
            self._metadata.request_update(reset_equivalent_backoff=False)
        if self._guarantees_order:
            self._accumulator.unmute(batch.topic_partition)

    def _give_up(self, batch: ProducerBatch, outcome: PartitionOutcome | None, fault: Exception, now_ms: int) -> None:
        """End a batch at once after an internal error: acknowledged if its node said so.

        `outcome`: None if no answer was read.
        """
        is_taken = outcome is not None and _is_taken(outcome)
        step = "send them, or to read the answer of their node"
        if outcome is not None:
            step = f"handle the answer of their node ({'acknowledged' if is_taken else outcome.error})"
        error = KafkaError(
            f"{batch.record_count} records for {batch.topic_partition}: the producer failed to {step}:"
            f" {type(fault).__name__}: {one_line(str(fault))}. {_AFTER_FAULT}",
            topic_partition=batch.topic_partition,
        )
        error.__cause__ = fault
        log.error("%s", error)
        with ExitStack() as last_first:
            if self._guarantees_order:
                last_first.callback(self._accumulator.unmute, batch.topic_partition)
            last_first.callback(self._accumulator.give_up, batch, error)
            if outcome is not None and is_taken:
                last_first.callback(self._acknowledge, batch, outcome)
            elif not batch.is_done:
                self._metrics.records_failed(batch.topic_partition.topic, batch.record_count, now_ms)
            if self._idempotence is not None:
                give_up_after_fault(self._idempotence, (batch, *batch.split_parts), error)

    def _complete(self, batch: ProducerBatch, outcome: PartitionOutcome, now_ms: int) -> None:
        if self._idempotence is not None:
            taken = self._idempotence.handle_completed_batch(batch, -1 if outcome.error else outcome.base_offset)
            for earlier in taken:  # callbacks keep the order of the records
                self._accumulator.withdraw(earlier)
                self._complete(earlier, PartitionOutcome(), now_ms)
        if not batch.is_done:
            self._metrics.batch_acknowledged(now_ms)
        self._acknowledge(batch, outcome)
        self._accumulator.deallocate(batch)

    def _acknowledge(self, batch: ProducerBatch, outcome: PartitionOutcome) -> None:
        stamped_ms = outcome.log_append_time_ms
        if batch.attempts and stamped_ms == batch.max_timestamp_ms:  # leaders answer so to a duplicate
            stamped_ms = None
        batch.complete(outcome.base_offset if outcome.error is None else -1, stamped_ms)

    def _split(self, batch: ProducerBatch, now_ms: int) -> None:
        if self._idempotence is not None:
            self._idempotence.handle_split_batch(batch)
        parts = self._accumulator.split_and_reenqueue(batch, now_ms)
        self._metrics.batch_split(now_ms)
        topic = batch.topic_partition.topic
        is_news = batch.wire_size <= self._logged_too_large.get(topic, 2 * batch.wire_size) // 2
        if is_news:  # only once for thousands of batches
            self._logged_too_large[topic] = batch.wire_size
        log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "%s does not accept a batch of %d records in %d bytes: sending it in %d parts. Lower batch.size, or raise"
            " max.message.bytes of the topic.",
            batch.topic_partition,
            batch.record_count,
            batch.wire_size,
            len(parts),
        )

    def _has_taken(self, batch: ProducerBatch, error: KafkaError) -> bool:
        return self._idempotence is not None and self._idempotence.has_taken(batch, error)

    def _is_outcome_unknown(self, batch: ProducerBatch) -> bool:
        """Return whether the leader may have `batch`, although it refuses it as out of order."""
        owner = self._idempotence
        is_in_doubt = isinstance(owner, ProducerIdentity) and owner.sequences[batch.topic_partition].is_in_doubt
        return batch.was_sent_in_larger or is_in_doubt

    def _can_retry(self, batch: ProducerBatch, error: KafkaError, log_start_offset: int, now_ms: int) -> bool:
        if batch.is_done or batch.attempts >= self._retries:
            return False
        if batch.has_reached_delivery_timeout(self._delivery_timeout_ms, now_ms):
            return False
        if self._idempotence is None:
            return error.retriable
        return self._idempotence.can_retry(batch, error, log_start_offset)

    def _fail_answered(self, batch: ProducerBatch, outcome: PartitionOutcome, error: KafkaError, now_ms: int) -> None:
        timed_out = batch.has_reached_delivery_timeout(self._delivery_timeout_ms, now_ms)
        if isinstance(error, OutOfOrderSequenceError) and self._is_outcome_unknown(batch):
            error = OutOfOrderSequenceError(_NOT_KNOWN)
        reported = self.expiry_error(batch) if error.retriable and timed_out else self._located(error, batch)
        own = {index: _record_error(error, text, batch, index) for index, text in outcome.record_errors.items()}
        if own:
            reported = reported.reworded(
                f"Other records of the same batch for {batch.topic_partition} were refused, and with them this one. The"
                f" first of those: {own[min(own)]}"
            )
        self._fail(batch, reported, own, now_ms)
        self._accumulator.deallocate(batch)

    def _located(self, error: KafkaError, batch: ProducerBatch) -> KafkaError:
        """Return the error with its place. A permission is one for the topic, or for the transactional id, so a
        partition would mislead.
        """
        owner = self._idempotence
        if isinstance(error, TransactionalIdAuthorizationError) and isinstance(owner, TransactionManager):
            return error.reworded(f"transactional.id {owner.transactional_id}: {error}")
        if isinstance(error, AuthorizationError):
            return error.at(topic=batch.topic_partition.topic)
        return error.at(topic_partition=batch.topic_partition)

    def _fail(self, batch: ProducerBatch, error: KafkaError, record_errors: dict[int, KafkaError], now_ms: int) -> None:
        """Fail the batch. The state is updated before callbacks run.

        For a batch that has ended, do the steps that an internal error prevented.
        """
        if not batch.is_done:
            if self._idempotence is not None:
                self._idempotence.handle_failed_batch(batch, error)
            self._metrics.records_failed(batch.topic_partition.topic, batch.record_count, now_ms)
        batch.fail(error, record_errors)

    def fail_unsendable(self, batch: ProducerBatch, cause: Exception, now_ms: int) -> None:
        """Fail a drained batch that cannot be encoded. No broker will ever have it."""
        text = f"{batch.record_count} records for {batch.topic_partition} could not be encoded: {cause}"
        log.error("%s", text, exc_info=cause)
        self._fail(batch, KafkaError(text, topic_partition=batch.topic_partition), {}, now_ms)
        self._accumulator.deallocate(batch)

    def expire(self, batch: ProducerBatch, now_ms: int) -> None:
        """Fail a batch after delivery.timeout.ms. In flight, it keeps its memory until its request has ended."""
        error = self.expiry_error(batch)
        self._fail(batch, error, {}, now_ms)
        if not batch.is_in_flight:
            self._accumulator.deallocate(batch)

    def expiry_error(self, batch: ProducerBatch) -> KafkaTimeoutError:
        """Return the error of records that were not acknowledged in time."""
        leader = self._metadata.fetch().leader_for(batch.topic_partition)
        lost = None if leader is None else self._metadata.node_failure(leader.id_string)
        if batch.last_error is not None:
            why = f"the last of {batch.attempts} failed attempts said: {batch.last_error}{self._quota(batch, leader)}"
            why += f" Its leader {leader} is not connected: {lost}" if lost is not None else ""
        elif batch.is_in_flight:
            why = f"they were sent and not answered.{self._quota(batch, leader)}"
        elif leader is None:
            why = self._why_no_leader(batch.topic_partition)
        else:
            idempotence = self._idempotence
            reason = None if idempotence is None else idempotence.reason_to_wait(batch.topic_partition)
            unsent = "; is its broker reachable?" if lost is None else f" to {leader}, which is not connected: {lost}"
            why = reason or f"they could not be sent{unsent}{self._quota(batch, leader)}"
        return KafkaTimeoutError(
            f"{batch.record_count} records for {batch.topic_partition} were not acknowledged within"
            f" delivery.timeout.ms={self._delivery_timeout_ms}: {why}",
            topic_partition=batch.topic_partition,
        )

    def _quota(self, batch: ProducerBatch, leader: Node | None) -> str:
        """Return the sentence about throttling by the leader while the batch waited, or nothing.

        A broker reads nothing from a client that it throttles, so requests in flight get no answer either.
        """
        if leader is None:
            return ""
        throttle_ms, until_ms = self._throttles.get(leader.id, (0, batch.created_ms))
        if until_ms <= batch.created_ms:
            return ""
        return f" It throttles this client for {throttle_ms} ms: is there a quota?"

    def _why_no_leader(self, topic_partition: TopicPartition) -> str:
        cluster = self._metadata.fetch()
        if cluster.is_bootstrap_configured:  # no known node is left
            failure = self._metadata.connection_failure
            return "no broker of bootstrap.servers answered" + (f": {failure}" if failure else "")
        if cluster.partition_info(topic_partition) is not None:
            return "the partition has no leader"
        count = cluster.partition_count_for_topic(topic_partition.topic)
        said = self._metadata.topic_error(topic_partition.topic)
        if not count and said is not None and not isinstance(said, UnknownTopicOrPartitionError):
            return f"the brokers gave no metadata: {said}"
        return f"the topic has {count} partitions now" if count else "the cluster does not show the topic any more"


def _is_taken(outcome: PartitionOutcome) -> bool:
    """Return whether the node has the records."""
    return outcome.error is None or isinstance(outcome.error, DuplicateSequenceError)


def _answered(
    response: ClientResponse, batches: Mapping[TopicPartition, ProducerBatch]
) -> Mapping[TopicPartition, PartitionOutcome]:
    lost = _no_answer(response)
    if lost is not None:
        log.warning("%d batches for node %s were not acknowledged: %s", len(batches), response.destination, lost)
        return dict.fromkeys(batches, PartitionOutcome(error=lost))
    if response.body is None:  # acks=0: done when sent
        return dict.fromkeys(batches, PartitionOutcome())
    return _outcomes(response.body)


def _unread(response: ClientResponse, fault: Exception) -> KafkaError:
    error = KafkaError(
        f"The producer could not read the answer of node {response.destination}: {type(fault).__name__}:"
        f" {one_line(str(fault))}. {_AFTER_FAULT}",
        node=response.destination,
    )
    error.__cause__ = fault
    return error


def _left_out(response: ClientResponse, topic_partition: TopicPartition) -> PartitionOutcome:
    return PartitionOutcome(
        error=DisconnectError(
            f"Node {response.destination} left {topic_partition} out of its answer.",
            topic_partition=topic_partition,
            node=response.destination,
        )
    )


def _no_answer(response: ClientResponse) -> KafkaError | None:
    """Return the error of a request without an answer, or None."""
    node = response.destination
    if response.version_mismatch is not None:
        return response.version_mismatch
    if response.authentication_error is not None:  # the session could not be renewed
        return response.authentication_error
    if response.timed_out:
        limit_ms = response.request.request_timeout_ms
        return RequestTimedOutError(f"Node {node} did not answer within request.timeout.ms={limit_ms}.", node=node)
    if response.protocol_error is not None:
        return DisconnectError(f"Node {node} was disconnected: {response.protocol_error}", node=node)
    if response.disconnected:
        return DisconnectError(f"Node {node} disconnected before it answered.", node=node)
    return None


def _is_split(batch: ProducerBatch | None, error: KafkaError | None) -> bool:
    """Return whether to split: together the records are too large for the broker."""
    is_too_large = isinstance(error, RecordTooLargeError)
    return is_too_large and batch is not None and batch.record_count > 1 and not batch.is_done


def _log_errors(node: str, refused: Mapping[TopicPartition, PartitionOutcome]) -> None:
    """Log one line for each error of a response, for all its partitions."""
    by_text: dict[str, list[TopicPartition]] = {}
    for topic_partition, outcome in refused.items():
        by_text.setdefault(str(outcome.error), []).append(topic_partition)
    for text, places in by_text.items():
        others = f" and {len(places) - 1} more partitions" if len(places) > 1 else ""
        log.warning("Node %s refused the batch for %s%s: %s", node, places[0], others, text)


def _outcomes(body: Message) -> dict[TopicPartition, PartitionOutcome]:
    """Return the outcomes in a ProduceResponse of any version. A partition with two different ones has none of them."""
    outcomes: dict[TopicPartition, PartitionOutcome] = {}
    for topic in body.responses:
        name = str(topic.name)
        for partition in topic.partition_responses:
            if partition.error_code:
                outcome = _refusal(partition)
            else:
                stamped_ms = _to_epoch_ms(partition.log_append_time)
                outcome = PartitionOutcome(None, int(partition.base_offset), stamped_ms)
            place = TopicPartition(name, int(partition.index))
            other = outcomes.get(place)
            if other is not None and not _agree(outcome, other):
                outcome = PartitionOutcome(error=DisconnectError(_CONTRADICTION, topic_partition=place))
            outcomes[place] = outcome
    return outcomes


def _agree(one: PartitionOutcome, other: PartitionOutcome) -> bool:
    """Return whether both say the same: the same error, or the same offset."""
    if one.error is None or other.error is None:
        return one.error is other.error and one.base_offset == other.base_offset
    return one.error.error_code == other.error.error_code


def _refusal(partition: Message) -> PartitionOutcome:
    leader = getattr(partition, "current_leader", None)
    current = None
    if leader is not None and leader.leader_id >= 0:
        current = LeaderIdAndEpoch(
            int(leader.leader_id), int(leader.leader_epoch) if leader.leader_epoch >= 0 else None
        )
    return PartitionOutcome(
        error=error_for_code(int(partition.error_code), getattr(partition, "error_message", None) or "", "Produce"),
        log_start_offset=int(getattr(partition, "log_start_offset", -1)),
        record_errors={
            int(e.batch_index): e.batch_index_error_message for e in getattr(partition, "record_errors", ())
        },
        leader=current,
    )


def _to_epoch_ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def _record_error(error: KafkaError, text: str | None, batch: ProducerBatch, index: int) -> KafkaError:
    reason = error.advised(one_line(text or "")) or error
    message = f"{batch.topic_partition}: record {index} of its batch was refused: {reason}"
    own = InvalidRecordError(message, topic_partition=batch.topic_partition)
    if error.error_code is not None:
        own.error_code = error.error_code
    return own
