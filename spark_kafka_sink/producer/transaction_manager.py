"""The producer's identity towards brokers, and what it makes of errors: producer id, epoch, and when to begin again
under a new epoch.

Sender thread. `must_wait`, `on_drain` and `on_split_part` run under the accumulator's lock, on the same thread.
Reference: org.apache.kafka.clients.producer.internals.TransactionManager (KIP-98, KIP-360).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    IllegalStateError,
    KafkaError,
    OutOfOrderSequenceError,
    UnknownProducerIdError,
    UnsupportedVersionError,
    error_for_code,
)
from spark_kafka_sink.common.open_transaction import NO_PRODUCER, ProducerIdAndEpoch
from spark_kafka_sink.producer.partition_sequences import SequenceTable
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.protocol.building import Request
from spark_kafka_sink.protocol.messages import Message
from spark_kafka_sink.protocol.requests import InitProducerIdRequest

log = logging.getLogger(__name__)

MAX_EPOCH: Final = 2**15 - 1
ATTEMPTS_BEFORE_A_WARNING: Final = 5
"""That a coordinator asks for a little patience is everyday business."""


class State(enum.Enum):
    """What the producer may do."""

    UNINITIALIZED = "has no producer id"
    INITIALIZING = "waits for a producer id"
    READY = "has a producer id"
    IN_TRANSACTION = "is in a transaction"
    PREPARED = "has a prepared transaction"
    COMMITTING = "is committing a transaction"
    ABORTING = "is aborting a transaction"
    ABORTABLE_ERROR = "is in a transaction that can only be aborted"
    FATAL_ERROR = "met an error that it cannot recover from"


_MOVES: Final[Mapping[State, frozenset[State]]] = {
    State.UNINITIALIZED: frozenset({State.INITIALIZING, State.PREPARED, State.FATAL_ERROR}),
    State.INITIALIZING: frozenset({State.READY, State.UNINITIALIZED, State.ABORTABLE_ERROR, State.FATAL_ERROR}),
    State.READY: frozenset({State.UNINITIALIZED, State.INITIALIZING, State.IN_TRANSACTION, State.FATAL_ERROR}),
    State.IN_TRANSACTION: frozenset(
        {State.PREPARED, State.COMMITTING, State.ABORTING, State.ABORTABLE_ERROR, State.FATAL_ERROR}
    ),
    State.PREPARED: frozenset(
        {State.INITIALIZING, State.COMMITTING, State.ABORTING, State.ABORTABLE_ERROR, State.FATAL_ERROR}
    ),
    State.COMMITTING: frozenset(
        {State.UNINITIALIZED, State.INITIALIZING, State.READY, State.ABORTABLE_ERROR, State.FATAL_ERROR}
    ),
    State.ABORTING: frozenset({State.UNINITIALIZED, State.INITIALIZING, State.READY, State.FATAL_ERROR}),
    State.ABORTABLE_ERROR: frozenset({State.ABORTABLE_ERROR, State.ABORTING, State.FATAL_ERROR}),
    State.FATAL_ERROR: frozenset({State.FATAL_ERROR}),
}


class OutgoingRequest(NamedTuple):
    """A request for the Sender, and whom to tell what became of it. It stays the next one until `take`."""

    request: Request
    node: Node | None
    """Where it goes; None: to any node."""
    take: Callable[[], bool]
    """It is about to be sent; False: not any more, because another thread has taken it back."""
    answered: Callable[[Message, int], None]
    """With the response and the time; None for the response where the connection went before it came."""
    refused: Callable[[KafkaError], None]
    """The node speaks no version of the request, or refuses to speak to us."""
    unreachable: Callable[[], None]
    """The node cannot be connected to."""


class TransactionManager:
    """Producer id, epoch, sequences. `retry_backoff` paces InitProducerId."""

    is_transactional = False
    recovers_by_itself = True
    """Gaps in the sequences are mended by a new epoch; in a transaction it takes an abort."""
    transaction_version = 2

    def __init__(self, retry_backoff: ExponentialBackoff) -> None:
        self.state = State.UNINITIALIZED
        self.producer = NO_PRODUCER
        self.last_error: KafkaError | None = None
        self.sequences = SequenceTable()
        self.sends: set[object] = set()
        """Those that have joined a transaction and whose records are not incomplete yet. Each takes itself out, without
        a lock and by a call that Ctrl-C does not divide.
        """
        self._retry_backoff = retry_backoff
        self._unresolved: set[TopicPartition] = set()
        self._to_restart: set[TopicPartition] = set()
        self._init_attempts = 0
        self._init_not_before_ms = 0
        self._init_in_flight = False
        self._refusal: KafkaError | None = None
        """The last answer to what records wait for, where that was no."""
        self._untold: KafkaError | None = None
        """A refusal that the records waiting for a producer id have not been failed with yet."""

    def __repr__(self) -> str:
        producer_id, epoch = self.producer
        return f"TransactionManager({self.state.name}, producer id {producer_id}, epoch {epoch})"

    @property
    def name_of_transactions(self) -> str | None:
        """The transactional id that records are sent under, None for a producer without one."""
        return None

    @property
    def lost_transaction(self) -> KafkaError | None:
        """Why what has not been sent of the transaction need not be: it is being aborted, or can only be."""
        return None

    def reason_to_wait(self, topic_partition: TopicPartition) -> str | None:  # noqa: ARG002
        """Why records of the partition may not go yet, where a broker has refused what they wait for."""
        if self.producer.is_valid or self._refusal is None:
            return None
        return f"the producer has no producer id; the last answer was: {self._refusal}"

    def abort_what_is_open(self) -> None:
        """The producer closes. Without transactions there is nothing to abort."""

    def give_up(self, error: KafkaError) -> None:
        """The Sender has ended: whoever waits for an operation is told."""

    @property
    def has_fatal_error(self) -> bool:
        return self.state is State.FATAL_ERROR

    def _move_to(self, state: State, error: KafkaError | None = None) -> None:
        if state not in _MOVES[self.state]:
            raise IllegalStateError(f"A producer that {self.state.value} cannot become one that {state.value}.")
        self.state = state
        self.last_error = error
        if state is State.FATAL_ERROR and error is not None:
            error.fatal = True  # whatever it is elsewhere

    # ---- the accumulator's questions -------------------------------------------------------------------------------

    @property
    def is_completing(self) -> bool:
        return False

    def must_wait(self, batch: ProducerBatch) -> bool:
        """Whether to hold `batch` back: there is no producer id; what was numbered before is not settled; or, for a
        retry, it is not the oldest.

        Nothing follows a partition's first batch until that is acknowledged: a leader that knows nothing of the
        producer takes any sequence to begin with, so it could take a second batch after it refused the first, and
        would refuse the first ever after. The same goes for one that comes back: its topic may have been deleted and
        made again. Nor does a batch go that is more than four after the oldest in flight: the leader would take a retry
        of that one for out of order, and under a new number it would be doubled.
        """
        if not self.producer.is_valid or self.has_fatal_error:
            return True
        entry = self.sequences[batch.topic_partition]
        if not entry.in_flight:
            return False
        if batch.has_sequence:
            return entry.in_flight[0] is not batch
        is_stale = entry.producer != self.producer
        is_unsettled = is_stale or not entry.has_acknowledged or batch.topic_partition in self._unresolved
        return is_unsettled or entry.in_flight[0].attempts > 0 or entry.is_window_full

    def on_drain(self, batch: ProducerBatch) -> None:
        if batch.has_sequence:
            if batch.base_sequence:  # what is said of it from now on is of its new number; a 0 cannot be a gap
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

    def handle_completed_batch(self, batch: ProducerBatch) -> None:
        entry = self.sequences[batch.topic_partition]
        entry.remove(batch)
        current = entry.producer
        # else the batch was given up, and the partition has begun a new epoch since
        if batch.producer_id == current.producer_id and batch.producer_epoch == current.epoch:
            entry.acknowledge(batch.last_sequence)

    def handle_split_batch(self, batch: ProducerBatch) -> None:
        """Its parts take its place among those in flight."""
        self.sequences[batch.topic_partition].remove(batch)

    def handle_failed_batch(self, batch: ProducerBatch, error: KafkaError) -> None:
        """The records are given up; the broker may have them all the same. Nothing new goes to the partition until what
        is in flight there has ended.

        Batches that were sent after this one may be in the log with their answers lost; under new numbers they would be
        doubled. So they end under their old ones first: a leader that has them says so, and one that refuses them for
        the gap proves that it has none.
        """
        entry = self.sequences[batch.topic_partition]
        entry.remove(batch)
        if error.fatal or isinstance(error, UnsupportedVersionError):
            self._move_to(State.FATAL_ERROR, error)
            return
        if not batch.has_sequence:
            return
        if entry.in_flight:
            self._unresolved.add(batch.topic_partition)
            return
        log.info("Beginning a new epoch for %s after: %s", batch.topic_partition, error)
        self._to_restart.add(batch.topic_partition)

    def handle_fault(self, batches: Iterable[ProducerBatch], error: KafkaError) -> None:
        """Give up `batches`, which a fault of the producer's own met: the cause of `error`.

        Where the fault is in the manager's own state, nothing that follows from that state may reach a broker: the
        producer fails (KAFKA-14831).
        """
        try:
            if isinstance(error.__cause__, IllegalStateError):
                raise error.__cause__
            for batch in batches:
                self.handle_failed_batch(batch, error)
        except Exception:
            self.fail(error)
            raise

    def can_retry(self, batch: ProducerBatch, error: KafkaError, log_start_offset: int) -> bool:
        """Whether to send `batch` again after `error` from its leader, whose log begins at `log_start_offset` (-1:
        not told).

        A gap before the oldest batch in flight takes a new epoch: the leader has neither that batch nor any after it.
        Before a later batch it says nothing of the older ones, which may be in the log with their answers lost; the
        batch waits until it is the oldest. A part of a split batch that was sent before may be out of order because the
        whole is in the log: what became of its records is not known, and under new numbers they would be doubled.
        """
        if not isinstance(error, (OutOfOrderSequenceError, UnknownProducerIdError)):
            return error.retriable
        in_flight = self.sequences[batch.topic_partition].in_flight
        is_oldest = bool(in_flight) and in_flight[0] is batch
        if is_oldest and batch.was_sent_in_larger:
            return False
        is_told = log_start_offset != -1 or not isinstance(error, UnknownProducerIdError)
        is_new_gap = is_told and not batch.sequence_has_been_reset
        if is_oldest and (is_new_gap or batch.topic_partition in self._unresolved):
            self._to_restart.add(batch.topic_partition)
        return True

    def maybe_resolve_sequences(self) -> None:
        """Where everything in flight has ended, new batches may go: the last one was acknowledged and with it every
        number before, or it was given up too and the partition begins again.
        """
        if self._unresolved:
            self._unresolved = {place for place in self._unresolved if self.sequences[place].in_flight}

    def take_refusal(self) -> KafkaError | None:
        """Return the error that every record waiting for a producer id is to fail with, once."""
        refusal, self._untold = self._untold, None
        return refusal

    def bump_epoch_if_needed(self, has_undrained: Callable[[], bool]) -> None:
        """Begin a new epoch when a partition has to start again, and ask for a producer id when there is none: after a
        refusal only where records wait for it, as `has_undrained` tells.
        """
        if self._to_restart and self.producer.is_valid and not self.has_fatal_error:
            if self.producer.epoch >= MAX_EPOCH:
                self.producer = NO_PRODUCER
                self._move_to(State.UNINITIALIZED)
            else:
                self.producer = ProducerIdAndEpoch(self.producer.producer_id, self.producer.epoch + 1)
                self._restart_partitions()
        if self.state is State.UNINITIALIZED and (self._refusal is None or has_undrained()):
            self._move_to(State.INITIALIZING)

    def _restart_partitions(self) -> None:
        for topic_partition in self._to_restart:
            self.sequences[topic_partition].start_at_beginning(self.producer, self.is_transactional)
            self._unresolved.discard(topic_partition)
        self._to_restart.clear()

    # ---- InitProducerId --------------------------------------------------------------------------------------------

    def next_request(self, now_ms: int, has_incomplete: Callable[[], bool]) -> OutgoingRequest | None:  # noqa: ARG002
        """The request for a producer id, when one is wanted and it is time. `has_incomplete` tells whether any batch
        has not ended.
        """
        if self.state is not State.INITIALIZING or self._init_in_flight or now_ms < self._init_not_before_ms:
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
        """How long until a request that waits out its backoff may go."""
        is_waiting = self.state is State.INITIALIZING and not self._init_in_flight
        return max(0, self._init_not_before_ms - now_ms) if is_waiting else FOREVER_MS

    def _take_init(self) -> bool:
        self._init_in_flight = True
        return True

    def _handle_init_response(self, body: Message, now_ms: int) -> None:
        """`body` is the response, None when there was none (the connection went)."""
        self._init_in_flight = False
        if self.has_fatal_error:  # another node has refused us meanwhile
            return
        error_code = 0 if body is None else int(body.error_code)
        error = error_for_code(error_code) if error_code else None
        if body is not None and error is None:
            self._init_attempts = 0
            self._refusal = None
            self.producer = ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))
            self._move_to(State.READY)
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
        """Ask again: at once for what passes by itself; for a right, which somebody has to grant, with later records.
        Those that wait now fail.
        """
        self._refusal = error
        if isinstance(error, ClusterAuthorizationError):
            error.fatal = False  # unlike in the answer to a batch
            self._untold = error
            self._move_to(State.UNINITIALIZED)
        elif self._init_attempts % ATTEMPTS_BEFORE_A_WARNING == 0:
            log.warning("No producer id: attempt %d was refused: %s", self._init_attempts, error)

    def fail(self, error: KafkaError) -> None:
        """No producer id is to be had, or none that would do: every send fails with `error` from now on."""
        self._move_to(State.FATAL_ERROR, error)
