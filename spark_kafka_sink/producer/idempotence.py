"""Idempotence: the producer's id and epoch, and the sequence numbers that its batches get.

Without transactions a `ProducerIdentity` also asks for its producer id, and begins a new epoch after a gap in the
numbers. In a transactional producer `transactions.TransactionManager` holds the identity and does both.

Sender thread. `must_wait`, `on_drain` and `on_split_part` run under the accumulator's lock, on the same thread.
Reference: org.apache.kafka.clients.producer.internals.{TransactionManager, TxnPartitionMap, TxnPartitionEntry} (KIP-98,
KIP-360).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    InvalidPidMappingError,
    KafkaError,
    OutOfOrderSequenceError,
    UnknownProducerIdError,
    UnsupportedVersionError,
    error_for_code,
)
from spark_kafka_sink.common.open_transaction import NO_PRODUCER, ProducerIdAndEpoch
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.protocol.transactions import InitProducerIdRequest
from spark_kafka_sink.protocol.versions import Message, Request
from spark_kafka_sink.record.batch import MAX_SEQUENCE, increment_sequence

log = logging.getLogger(__name__)

MAX_EPOCH: Final = 2**15 - 1
ATTEMPTS_BEFORE_A_WARNING: Final = 5
"""Coordinators often ask for a few retries."""
NO_LAST_ACKED_SEQUENCE: Final = -1
REMEMBERED_BATCHES: Final = 5
"""A leader detects a duplicate of any of the last five batches (ProducerStateEntry.NUM_BATCHES_TO_RETAIN)."""


MEMORY_OF_LEADERS_MS: Final = 600_000
"""Brokers look for producers to forget every ten minutes, and forget those whose last record is older than
producer.id.expiration.ms by its own timestamp.
"""


class OutgoingRequest(NamedTuple):
    """A request for the Sender to send, and the calls for its outcome. It stays the next one until `take`."""

    request: Request
    node: Node | None
    """Its node; None: any node."""
    take: Callable[[], bool]
    """The Sender is about to send it. Returns False if another thread has withdrawn it."""
    answered: Callable[[Message, str, int], None]
    """Takes the response, the node's id and the time. The response is None if the connection was lost before it."""
    refused: Callable[[KafkaError], None]
    """The node supports no version of the request, or refuses this client."""
    unreachable: Callable[[], None]
    """The node cannot be connected to."""


# ---- sequence numbers ------------------------------------------------------------------------------------------------


class PartitionSequences:
    """One partition's sequence numbers: the next one, the last acknowledged one, and the batches between them."""

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self.producer = NO_PRODUCER
        self.next_sequence = 0
        self.last_acked_sequence = NO_LAST_ACKED_SEQUENCE
        self._leader_epoch: int | None = None
        self._drained_ms = 0
        """Of the batch that was acknowledged last: the epoch of its leader, and when it was drained."""
        self.in_flight: list[ProducerBatch] = []
        """Batches with a sequence that have not ended, in the order of their first send. Batches that wait for a retry
        are among them.
        """
        self.turn = 0
        """The place in `in_flight` of the only batch that may be sent again. Nearly always the oldest."""
        self.is_in_doubt = False
        """Whether a batch was given up that the leader may have, while older ones are in flight. A restarted leader may
        know only that batch, and have the older ones all the same.
        """
        self._turn_epoch: int | None = None
        """The epoch of the leader that refused the batches before the turn; None: the brokers give none."""
        self._next_ordinal = 0
        self._ends: dict[tuple[int, ...], int] = {}
        """Of the last acknowledged batches, by ordinal: the offset behind each."""

    def take(self, batch: ProducerBatch, is_transactional: bool) -> None:
        """Give `batch` the next numbers and count it as in flight."""
        batch.set_producer_state(self.producer.producer_id, self.producer.epoch, self.next_sequence, is_transactional)
        batch.ordinal = (self._next_ordinal,)
        self._next_ordinal += 1
        self.next_sequence = increment_sequence(self.next_sequence, batch.record_count)
        self.in_flight.append(batch)

    def insert(self, part: ProducerBatch) -> None:
        """Count a part of a split batch as in flight, in its place."""
        self.in_flight.append(part)
        self.in_flight.sort(key=lambda batch: batch.ordinal)

    def remove(self, batch: ProducerBatch) -> None:
        if self.in_flight and self.in_flight[0] is batch:  # nearly always
            del self.in_flight[0]
        else:
            self.in_flight = [other for other in self.in_flight if other is not batch]
        self.turn = 0
        self.is_in_doubt = self.is_in_doubt and bool(self.in_flight)

    def give_up(self, batch: ProducerBatch) -> None:
        """Remove a batch that has failed."""
        is_later = bool(self.in_flight) and self.in_flight[0] is not batch
        self.is_in_doubt |= is_later and (batch.may_be_in_log or batch.was_sent_in_larger)
        self.remove(batch)

    def pass_turn(self, batch: ProducerBatch) -> bool:
        """The leader has refused `batch`. The next batch in flight is sent again before it. Return False if there is
        no next batch: then the oldest one is sent again first.
        """
        self.turn = (self.turn + 1) % len(self.in_flight)
        self._turn_epoch = batch.leader_epoch
        return self.turn > 0

    def batch_in_turn(self, oldest: ProducerBatch) -> ProducerBatch:
        """Return the batch to send again next. This is `oldest` if the other batch is in flight, or if the leader has
        changed.

        A new leader may not know the producer. It would take a later batch without the earlier ones. Brokers before 2.4
        give no epochs, but they refuse every batch of a producer that they do not know.
        """
        if self.turn and oldest.leader_epoch != self._turn_epoch:
            self.turn = 0
        batch = self.in_flight[self.turn] if self.turn else oldest
        batch.maybe_update_leader_epoch(oldest.leader_epoch)
        return oldest if batch.is_in_flight else batch

    def has_taken(self, batch: ProducerBatch) -> bool:
        """Return whether a leader has acknowledged a later batch. It takes batches only in their order, so it has this
        batch, too.
        """
        last = self.last_acked_sequence
        is_earlier = last != NO_LAST_ACKED_SEQUENCE and batch.has_sequence and _is_after(last, batch.last_sequence)
        return is_earlier and not batch.is_overtaken

    def note_place(self, batch: ProducerBatch, base_offset: int) -> None:
        """Note where an acknowledged batch, in flight until now, is in the log. If there is no room before it for the
        batches in flight that are older, they are not in this log: the topic was deleted and created again after they
        were sent. A leader that does not know the producer takes any batch first.
        """
        older = [each for each in self.in_flight if each.ordinal < batch.ordinal]
        oldest = older[0].ordinal if older else batch.ordinal
        behind_acknowledged = max((end for ordinal, end in self._ends.items() if ordinal < oldest), default=0)
        if base_offset < behind_acknowledged + sum(each.record_count for each in older):
            self._forget_log(older)
        self._ends[batch.ordinal] = base_offset + batch.record_count
        if len(self._ends) > REMEMBERED_BATCHES:
            del self._ends[min(self._ends)]

    def leader_is_new(self) -> None:
        """The topic was created again. Whichever batches the leader takes first, they say nothing about the others."""
        self.last_acked_sequence = NO_LAST_ACKED_SEQUENCE
        self.turn = 0
        self._forget_log(self.in_flight)

    def _forget_log(self, sent: Iterable[ProducerBatch]) -> None:
        for batch in sent:
            batch.is_overtaken = True
        self._ends.clear()

    def acknowledge(self, batch: ProducerBatch) -> None:
        last, last_sequence = self.last_acked_sequence, batch.last_sequence
        if last == NO_LAST_ACKED_SEQUENCE or _is_after(last_sequence, last):
            self.last_acked_sequence = last_sequence
            self._leader_epoch, self._drained_ms = batch.leader_epoch, batch.drained_ms

    @property
    def is_window_full(self) -> bool:
        """Whether the leader might no longer detect a duplicate of the oldest batch in flight after one more batch.

        Every later batch counts, acknowledged or not. A part of a split batch stands for many batches, so none may
        follow it.
        """
        if not self.in_flight:
            return False
        oldest = self.in_flight[0].ordinal
        return len(oldest) > 1 or self._next_ordinal - oldest[0] >= REMEMBERED_BATCHES

    @property
    def has_acknowledged(self) -> bool:
        """A leader has taken records of this producer and epoch."""
        return self.last_acked_sequence != NO_LAST_ACKED_SEQUENCE

    def is_known_to_leader(self, batch: ProducerBatch) -> bool:
        """Return whether the leader of `batch` has taken records of this producer and epoch, not long ago."""
        is_recent = batch.created_ms - self._drained_ms < MEMORY_OF_LEADERS_MS
        return is_recent and self.has_acknowledged and self._leader_epoch == batch.leader_epoch

    def start_at_beginning(self, producer: ProducerIdAndEpoch, is_transactional: bool) -> None:
        """Number what is in flight from 0 under a new producer id or epoch (KIP-360)."""
        sequence = 0
        for batch in self.in_flight:
            batch.reset_producer_state(producer.producer_id, producer.epoch, sequence, is_transactional)
            sequence = increment_sequence(sequence, batch.record_count)
        self.producer = producer
        self.turn = 0
        self.is_in_doubt = False
        self.next_sequence = sequence
        self.last_acked_sequence = NO_LAST_ACKED_SEQUENCE


def _is_after(sequence: int, other: int) -> bool:
    """Return whether `sequence` comes after `other`, less than half a turn on, so that 0 comes after 2**31 - 1."""
    return 0 < (sequence - other) % (MAX_SEQUENCE + 1) < 2**30


class SequenceTable(dict[TopicPartition, PartitionSequences]):
    """By topic-partition. A partition that is asked for is in the table from then on.

    Entries outlive the topic's metadata. A topic that vanishes and comes back goes on with its numbers, because brokers
    would take restarted numbers for duplicates and drop the records.
    """

    def __missing__(self, topic_partition: TopicPartition) -> PartitionSequences:
        entry = self[topic_partition] = PartitionSequences(topic_partition)
        return entry


# ---- the identity ----------------------------------------------------------------------------------------------------


class ProducerIdentity:
    """The identity of a producer at brokers. `retry_backoff` paces InitProducerId. Implements `DrainRules`."""

    is_completing = False

    def __init__(self, retry_backoff: ExponentialBackoff, *, is_transactional: bool = False) -> None:
        self.is_transactional = is_transactional
        self.producer = NO_PRODUCER
        self.sequences = SequenceTable()
        self.last_error: KafkaError | None = None
        """The fatal error after which nothing is sent. A transactional producer keeps its own."""
        self._retry_backoff = retry_backoff
        self._unresolved: set[TopicPartition] = set()
        """Partitions where a batch was given up while later batches are in flight."""
        self._to_restart: set[TopicPartition] = set()
        self.is_initializing = False
        """A producer id is asked for. A transactional producer asks for it by itself."""
        self._init_attempts = 0
        self._init_not_before_ms = 0
        self._init_in_flight = False
        self._is_init_stale = False
        """The cluster before was asked: the answer does not count."""
        self._refusal: KafkaError | None = None
        """The last answer, if it refused a producer id."""
        self._unreported: KafkaError | None = None
        """A refusal that the records waiting for a producer id have not failed with yet."""

    def __repr__(self) -> str:
        return f"ProducerIdentity(producer id {self.producer.producer_id}, epoch {self.producer.epoch})"

    @property
    def has_fatal_error(self) -> bool:
        return self.last_error is not None

    def adopt(self, body: Message) -> None:
        """Take the producer id and epoch of a response."""
        self.producer = ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))

    def fail(self, error: KafkaError) -> None:
        """No usable producer id can be had: from now on every send fails with `error`."""
        self.is_initializing = False
        self.last_error = error
        error.fatal = True  # also if its class says otherwise

    def give_up_id(self) -> None:
        """Ask for another producer id, and number what is in flight from 0 under it."""
        self.producer = NO_PRODUCER
        self._is_init_stale = self._init_in_flight
        self._to_restart.update(self.sequences)

    def leaders_are_new(self, topics: Collection[str]) -> None:
        """These topics were deleted and created again. Their leaders do not know this producer, so the next batch of
        each partition goes alone, as the first one does.

        The whole cluster may have been made again under its old cluster id, and counts producer ids from the beginning.
        So new batches get another id, except in a transaction, which its coordinator protects. Batches in flight keep
        theirs: one of them may be in the new topic, with its answer lost.
        """
        if not self.is_transactional:
            self.producer = NO_PRODUCER
            self._is_init_stale = self._init_in_flight
        for topic_partition, entry in self.sequences.items():
            if topic_partition.topic in topics:
                entry.leader_is_new()

    def reason_to_wait(self, topic_partition: TopicPartition) -> str | None:  # noqa: ARG002
        """Return why records of the partition must wait, if a broker refused something that they wait for."""
        if self.producer.is_valid or self._refusal is None:
            return None
        return f"the producer has no producer id; the last answer was: {self._refusal}"

    # ---- the accumulator's questions -------------------------------------------------------------------------------

    def must_wait(self, batch: ProducerBatch) -> bool:
        """Return whether to hold `batch` back: there is no producer id, earlier batches are not settled, or it is a
        retry and not its turn.

        Nothing follows a partition's first batch until that is acknowledged. A leader that does not know the producer
        accepts any first sequence. It could accept a second batch after it refused the first, and would then refuse the
        first forever. The same holds for the first batch to a new leader, which may have lost records or never had
        them, for the first after a long pause, and for a retry, because its topic may have been deleted and created
        again.

        A batch that is more than four after the oldest in flight must wait too: the leader would report a retry of the
        oldest as out of order, and under a new number its records would be duplicated.
        """
        if not self.producer.is_valid or self.last_error is not None:
            return True
        entry = self.sequences[batch.topic_partition]
        if not entry.in_flight:
            return False
        if batch.has_sequence:
            return entry.in_flight[entry.turn] is not batch
        is_stale = entry.producer != self.producer
        is_known = entry.is_known_to_leader(batch)
        is_unsettled = is_stale or not is_known or batch.topic_partition in self._unresolved
        return is_unsettled or entry.in_flight[0].attempts > 0 or entry.is_window_full

    def batch_in_turn(self, first: ProducerBatch) -> ProducerBatch:
        """Return the batch to send next of those that are sent again; `first` is the first one in its queue."""
        entry = self.sequences.get(first.topic_partition)
        if entry is None or entry.turn == 0:
            return first
        return entry.batch_in_turn(first)

    def on_drain(self, batch: ProducerBatch) -> None:
        if batch.has_sequence:
            if batch.base_sequence:  # later answers are about its new number; a 0 cannot be a gap
                batch.sequence_has_been_reset = False
            return
        entry = self.sequences[batch.topic_partition]
        if entry.producer != self.producer:
            entry.start_at_beginning(self.producer, self.is_transactional)
        entry.take(batch, self.is_transactional)

    def on_split_part(self, part: ProducerBatch) -> None:
        if part.has_sequence:
            self.sequences[part.topic_partition].insert(part)

    # ---- what became of a batch ------------------------------------------------------------------------------------

    def handle_completed_batch(self, batch: ProducerBatch, base_offset: int = -1) -> Sequence[ProducerBatch]:
        """Return the batches before it that the leader has too, in their order. It refused them as out of order, but
        took `batch`, whose turn it was. They are queued to be sent again, which is not needed any more.

        `base_offset`: that of its first record, -1 if it is not known.
        """
        entry = self.sequences[batch.topic_partition]
        # else the batch was given up, and the partition has begun a new epoch since
        is_current = (batch.producer_id, batch.producer_epoch) == entry.producer
        if is_current and base_offset >= 0:
            entry.note_place(batch, base_offset)
        older = entry.in_flight[: entry.turn] if entry.turn and entry.in_flight[entry.turn] is batch else ()
        entry.remove(batch)
        if is_current:
            entry.acknowledge(batch)
        return [each for each in older if not each.is_overtaken]

    def handle_split_batch(self, batch: ProducerBatch) -> None:
        """The parts of `batch` take its place in flight."""
        self.sequences[batch.topic_partition].remove(batch)

    def handle_failed_batch(self, batch: ProducerBatch, error: KafkaError) -> None:
        """Give the records up, though the broker may have them. Nothing new goes to the partition until the batches
        in flight there have ended.

        Batches that were sent after this one may be in the log with their answers lost. Under new numbers their records
        would be duplicated, so they end under their old numbers first. A leader that has them says so. A leader that
        refuses them for the gap has none of them.
        """
        entry = self.sequences[batch.topic_partition]
        entry.give_up(batch)
        if error.fatal or isinstance(error, UnsupportedVersionError):
            self.fail(error)
            return
        if not batch.has_sequence:
            return
        if isinstance(error, InvalidPidMappingError) and batch.producer_id == self.producer.producer_id:
            log.info("Asking for another producer id after: %s", error)  # the next epoch would be refused, too
            self.producer = NO_PRODUCER
        if entry.in_flight:
            self._unresolved.add(batch.topic_partition)
            return
        log.info("Beginning a new epoch for %s after: %s", batch.topic_partition, error)
        self._to_restart.add(batch.topic_partition)

    def has_taken(self, batch: ProducerBatch, error: KafkaError) -> bool:
        """Return whether the leader has the records of `batch`, although it refuses them as out of order.

        A leader knows the last five batches of a producer. One that was restarted knows only the last one, because its
        snapshot of producers has no more (ProducerStateManager), and refuses an older one that it has.
        """
        is_gap = type(error) is OutOfOrderSequenceError and batch.may_be_in_log
        return is_gap and self.sequences[batch.topic_partition].has_taken(batch)

    def can_retry(self, batch: ProducerBatch, error: KafkaError, log_start_offset: int) -> bool:
        """Return whether to send `batch` again after `error` from its leader. The leader's log begins at
        `log_start_offset`, -1 if the answer does not say.

        A gap before the oldest batch in flight needs a new epoch if the leader has none of the batches in flight. If
        answers were lost, it may have them, and under new numbers they would be duplicated. So each later batch is sent
        again in its turn. If the leader acknowledges one, it has all batches before that one. A gap before a later
        batch says nothing of the older ones, so the batch waits for its turn. A part of a split batch that was sent
        before may be out of order because the whole is in the log. So may a batch that was sent before one that has
        failed, if the leader may have both, and was restarted.
        """
        if not isinstance(error, (OutOfOrderSequenceError, UnknownProducerIdError)):
            return error.retriable
        entry = self.sequences[batch.topic_partition]
        is_in_turn = bool(entry.in_flight) and entry.in_flight[entry.turn] is batch
        if is_in_turn and batch.was_sent_in_larger:
            return False
        knows_producer = not isinstance(error, UnknownProducerIdError)
        is_new_gap = (log_start_offset != -1 or knows_producer) and not batch.sequence_has_been_reset
        if not is_in_turn or not (is_new_gap or batch.topic_partition in self._unresolved):
            return True
        may_have_later = knows_producer and batch.may_be_in_log and entry.pass_turn(batch)
        if may_have_later:
            return True
        entry.turn = 0
        if entry.is_in_doubt and any(each.may_be_in_log for each in entry.in_flight):
            return False
        self._to_restart.add(batch.topic_partition)
        return True

    # ---- a new epoch, without transactions -------------------------------------------------------------------------

    def maybe_resolve_sequences(self) -> None:
        """Let new batches go where everything in flight has ended.

        Either the last batch was acknowledged, and with it every number before, or it was given up too and the
        partition begins again.
        """
        if self._unresolved:
            self._unresolved = {place for place in self._unresolved if self.sequences[place].in_flight}

    def take_refusal(self) -> KafkaError | None:
        """Return, once, the error with which every record waiting for a producer id must fail."""
        refusal, self._unreported = self._unreported, None
        return refusal

    def bump_epoch_if_needed(self, has_undrained: Callable[[], bool]) -> None:
        """Begin a new epoch if a partition must start again, and ask for a producer id if none exists.

        After a refusal the producer asks only if records wait for the id (`has_undrained`).
        """
        if self.has_fatal_error:
            return
        if self._to_restart and self.producer.is_valid:
            if self.producer.epoch >= MAX_EPOCH:
                self.producer = NO_PRODUCER
            else:
                self.producer = ProducerIdAndEpoch(self.producer.producer_id, self.producer.epoch + 1)
                self._restart_partitions()
        if not self.producer.is_valid and not self.is_initializing:
            self.is_initializing = self._refusal is None or has_undrained()

    def _restart_partitions(self) -> None:
        for topic_partition in self._to_restart:
            self.sequences[topic_partition].start_at_beginning(self.producer, self.is_transactional)
            self._unresolved.discard(topic_partition)
        self._to_restart.clear()

    # ---- InitProducerId, without transactions ----------------------------------------------------------------------

    def next_request(self, now_ms: int, has_incomplete: Callable[[], bool]) -> OutgoingRequest | None:  # noqa: ARG002
        """Return the request for a producer id, if one is needed and due."""
        if not self.is_initializing or self._init_in_flight or now_ms < self._init_not_before_ms:
            return None
        return OutgoingRequest(
            request=InitProducerIdRequest(),
            node=None,
            take=self._take_init,
            answered=self._handle_init_response,
            refused=self.fail,
            unreachable=lambda: None,
        )

    def request_delay_ms(self, now_ms: int) -> int:
        """Return the ms until the backoff of the next request is over."""
        is_waiting = self.is_initializing and not self._init_in_flight
        return max(0, self._init_not_before_ms - now_ms) if is_waiting else FOREVER_MS

    def _take_init(self) -> bool:
        self._init_in_flight = True
        return True

    def _handle_init_response(self, body: Message, node_id: str, now_ms: int) -> None:
        """Handle a response. `body` is None if the connection was lost before it came."""
        self._init_in_flight = False
        if self._is_init_stale:
            self._is_init_stale, body = False, None
        if self.has_fatal_error:  # another node has refused us meanwhile
            return
        error_code = 0 if body is None else int(body.error_code)
        error = error_for_code(error_code, "", "InitProducerId", node_id) if error_code else None
        if body is not None and error is None and body.producer_id >= 0:
            self._init_attempts = 0
            self._refusal = None
            self.adopt(body)
            self.is_initializing = False
            self._restart_partitions()
            log.info("Producer id %d, epoch %d", *self.producer)
        elif error is None or error.retriable or isinstance(error, ClusterAuthorizationError):
            self._init_not_before_ms = now_ms + self._retry_backoff.backoff_ms(self._init_attempts)
            self._init_attempts += 1
            if error is not None:
                self._on_init_refusal(error)
        else:
            self.fail(error)

    def _on_init_refusal(self, error: KafkaError) -> None:
        """Ask again: at once after an error that passes by itself, and with later records after a missing permission.
        The records that wait for that permission now fail.
        """
        self._refusal = error
        if isinstance(error, ClusterAuthorizationError):
            error.fatal = False  # unlike in the answer to a batch
            self._unreported = error
            self.is_initializing = False
        elif self._init_attempts % ATTEMPTS_BEFORE_A_WARNING == 0:
            log.warning("No producer id: attempt %d was refused: %s", self._init_attempts, error)


# ---- the cluster that has given the id -------------------------------------------------------------------------------


class ClusterWatch:
    """Notices that the brokers belong to another cluster: bootstrap.servers may lead to one after a disaster (KIP-899).

    Each cluster counts its producer ids from the same numbers. So the producer's id may be another producer's there,
    and a leader would acknowledge our records as duplicates of that producer's.
    """

    def __init__(self) -> None:
        self._cluster_id: str | None = None

    def change_to(self, cluster_id: str | None) -> str | None:
        """Return a text that names both clusters if `cluster_id` is not that of the last call, or else None. A
        `cluster_id` of None does not count: no broker has given one.
        """
        before = self._cluster_id
        self._cluster_id = cluster_id or before
        if before is None or self._cluster_id == before:
            return None
        return f"{one_line(str(cluster_id))} instead of {one_line(before)}"


class TopicWatch:
    """Notices that a topic was deleted and created again, by its id (KIP-516). Brokers before 2.8 give none."""

    def __init__(self) -> None:
        self._known: dict[str, UUID] = {}
        """Of every topic that was ever written to, as the sequence numbers."""
        self._last: Mapping[str, UUID] = {}

    def created_again(self, ids: Mapping[str, UUID]) -> Collection[str]:
        """Return the topics of `ids` that had another id in an earlier call. Each turn asks, so it is cheap if `ids`
        is the same object as in the last call.
        """
        if ids is self._last:
            return ()
        self._last = ids
        again = [topic for topic, topic_id in ids.items() if self._known.get(topic, topic_id) != topic_id]
        self._known.update(ids)
        return again
