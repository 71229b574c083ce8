"""The requests of a transaction, from the call that begins an operation to the answer of its coordinator.

- `OperationResult` and `PendingOperation`: the one operation that a producer has under way, and its outcome.
- The makers (`init_producer_id`, `add_partitions`, ...): what each request says, and how its answer is read.
- `action_for`: what each error code leads to.
- `TransactionQueue`: which request goes next, and to which node.

Nothing here decides what an answer does to the transaction: `TransactionManager` does. Its lock guards all of this but
`OperationResult`, which any thread may wait for. Reference:
org.apache.kafka.clients.producer.internals.TransactionManager's TxnRequestHandler classes (KIP-98, KIP-447, KIP-890).
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from spark_kafka_sink.client.backoff import COORDINATOR_BACKOFF_MS, FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    CommitFailedError,
    IllegalStateError,
    InvalidPidMappingError,
    InvalidProducerEpochError,
    KafkaError,
    ProducerFencedError,
    TopicAuthorizationError,
    UnknownServerError,
    error_for_code,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.producer.idempotence import OutgoingRequest
from spark_kafka_sink.protocol.metadata import GROUP, TRANSACTION, FindCoordinatorRequest, coordinator_of
from spark_kafka_sink.protocol.transactions import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    OffsetToCommit,
    TxnOffsetCommitRequest,
)
from spark_kafka_sink.protocol.versions import Message, Request

log = logging.getLogger(__name__)

COORDINATOR_NOT_AVAILABLE: Final = 15
INVALID_TXN_STATE: Final = 48
CONCURRENT_TRANSACTIONS: Final = 51
NOTHING_ADDED: Final = frozenset({3, 55})
"""A partition of the request does not exist (UNKNOWN_TOPIC_OR_PARTITION), so the broker added none of the others."""
_COMMIT_FAILED: Final = frozenset({22, 25})
"""ILLEGAL_GENERATION and UNKNOWN_MEMBER_ID. Of the requests here only TxnOffsetCommit gets these answers."""
_LEFT_OUT: Final = "The answer does not mention it."
_NO_ID: Final = "The answer has no producer id."
_OFFSET_NOT_GRANTED: Final = "Not authorized for the topic that the offset is of: grant READ on it."
_MOST_COORDINATORS: Final = 10_000
"""Tasks of batch writes without a prefix have new transactional ids and groups each time."""
_OVERTAKES: Final = frozenset({("abort_transaction", "send_offsets_to_transaction")})


# ---- operations ------------------------------------------------------------------------------------------------------


class OperationResult:
    """How an operation ended, such as `commit_transaction`. The first outcome counts. Any thread may wait.

    `what` holds the arguments of the call that began the operation.
    """

    def __init__(self, operation: str, what: object = None) -> None:
        self.operation = operation
        self.what = what
        self.error: KafkaError | None = None
        self.is_reported = False
        """The caller knows the outcome."""
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._is_done = False

    @property
    def is_done(self) -> bool:
        return self._is_done

    def finish(self, error: KafkaError | None = None) -> None:
        with self._lock:
            if not self._is_done:
                self.error = error
                self._is_done = True
                self._condition.notify_all()

    def wait(self, clock: Clock, timeout_ms: int) -> bool:
        """Wait for the outcome. Return False if it has not come in time."""
        deadline_ms = clock.now_ms() + timeout_ms
        with self._lock:
            while not self._is_done and (left_ms := deadline_ms - clock.now_ms()) > 0:
                clock.wait(self._condition, left_ms)
            self.is_reported = self._is_done
            return self._is_done


class PendingOperation:
    """The one operation that may be under way.

    An operation goes on when its caller stops waiting. Its outcome is kept until the same operation is called again
    with the same arguments. No other operation may begin before that. `undo` gets the error of an operation that was
    interrupted as it began: the state may be that of the operation, without a request that ends it.
    """

    def __init__(self, undo: Callable[[KafkaError], None]) -> None:
        self._undo = undo
        self._result: OperationResult | None = None
        self.last_refusal: KafkaError | None = None
        """Why the operation takes so long: the last error after which a request of it was sent again."""
        self.last_loss: str | None = None
        """The last request of the operation without an answer, in words."""
        self.unreachable_node = ""
        """The id of the last node that could not be reached."""
        self._closed_by: KafkaError | None = None

    def begin(self, operation: str, enqueue: Callable[[OperationResult], None], what: object = None) -> OperationResult:
        """Begin an operation, whose request `enqueue` puts into the queue. If that raises, perhaps because of Ctrl-C,
        the operation is not under way.
        """
        result = OperationResult(operation, what)
        try:
            enqueue(result)
        except IllegalStateError:  # misuse, refused before anything changed
            raise
        except BaseException as cause:
            self._undo(interrupted(cause, operation))
            raise
        self._result = result
        self.last_refusal = self.last_loss = None
        self.unreachable_node = ""
        return result

    def joined(self, operation: str, what: object = None) -> OperationResult | None:
        """Return the result of the same operation with the same arguments, if its caller has not got the outcome.

        An abort may begin while offsets are on their way, because it makes them pointless. After a failure any
        operation may begin that the state allows. Raises IllegalStateError if the outcome of another operation is open.
        """
        result = self._result
        if result is not None and (result.operation, result.what) == (operation, what) and not result.is_reported:
            return result
        if self._closed_by is not None or (operation, "" if result is None else result.operation) not in _OVERTAKES:
            self.ensure_none(operation)
        return None

    def ensure_none(self, operation: str) -> None:
        if self._closed_by is not None:
            raise self._closed_by.copied()
        result = self._result
        if result is None or result.is_reported or (result.is_done and result.error is not None):
            return
        earlier, again = result.operation, "that again"
        if earlier == operation:
            earlier, again = f"an earlier {operation}", "it again with the arguments that it had then"
        raise IllegalStateError(f"{operation} was called while the outcome of {earlier} is open: call {again}.")

    def give_up(self, error: KafkaError | None) -> None:
        """End the operation, if one is under way."""
        if self._result is not None:
            self._result.finish(error)

    def close(self, error: KafkaError) -> None:
        """The Sender has ended: fail the operation that is under way, and each later one as it begins."""
        self._closed_by = error
        self.give_up(error)

    @property
    def reason_for_delay(self) -> str:
        """Return a clause for error texts: the answers that explain the delay of the operation."""
        refusal = "" if self.last_refusal is None else f" The last answer was: {self.last_refusal}"
        return refusal + ("" if self.last_loss is None else f" {self.last_loss}")

    def is_under_way(self, operation: str) -> bool:
        return self._result is not None and self._result.operation == operation and not self._result.is_done


def interrupted(cause: BaseException, call: str) -> KafkaError:
    """Return the error of a transaction in which a call was interrupted, by Ctrl-C for example."""
    return KafkaError(f"{call} was interrupted by {type(cause).__name__}: {cause}")


# ---- what an error code leads to -------------------------------------------------------------------------------------


class Action(enum.IntEnum):
    """The reaction to an error. If an answer has several errors, the most severe reaction counts."""

    RETRY = 1
    FIND_COORDINATOR = 2
    """Look up the coordinator, then send again."""
    ABORT = 3
    """The transaction can only be aborted."""
    FAIL = 4
    """The producer can do no more."""


_ACTIONS: Final[Mapping[int, Action]] = {
    -1: Action.RETRY,  # UNKNOWN_SERVER_ERROR: whether it took effect is unknown, and sending again does no harm
    3: Action.RETRY,  # UNKNOWN_TOPIC_OR_PARTITION: not known to this broker yet
    12: Action.ABORT,  # OFFSET_METADATA_TOO_LARGE
    14: Action.RETRY,  # COORDINATOR_LOAD_IN_PROGRESS
    15: Action.FIND_COORDINATOR,  # COORDINATOR_NOT_AVAILABLE
    16: Action.FIND_COORDINATOR,  # NOT_COORDINATOR
    22: Action.ABORT,  # ILLEGAL_GENERATION
    25: Action.ABORT,  # UNKNOWN_MEMBER_ID
    28: Action.ABORT,  # INVALID_COMMIT_OFFSET_SIZE
    29: Action.ABORT,  # TOPIC_AUTHORIZATION_FAILED
    30: Action.ABORT,  # GROUP_AUTHORIZATION_FAILED
    47: Action.FAIL,  # INVALID_PRODUCER_EPOCH: from a coordinator it means fenced
    48: Action.FAIL,  # INVALID_TXN_STATE
    49: Action.FAIL,  # INVALID_PRODUCER_ID_MAPPING: another producer may have had the id meanwhile (KAFKA-18019)
    51: Action.RETRY,  # CONCURRENT_TRANSACTIONS
    55: Action.RETRY,  # OPERATION_NOT_ATTEMPTED: another partition of the request was at fault
    59: Action.ABORT,  # UNKNOWN_PRODUCER_ID
    82: Action.ABORT,  # FENCED_INSTANCE_ID
    120: Action.ABORT,  # TRANSACTION_ABORTABLE
}


def action_for(error_code: int) -> Action:
    """Return the table's action. After a code that is not in the table, the request is sent again if Kafka calls the
    code retriable. A code that this client does not know counts as UNKNOWN_SERVER_ERROR.
    """
    known = _ACTIONS.get(error_code)
    if known is not None:
        return known
    error = error_for_code(error_code)
    if isinstance(error, UnknownServerError):
        return _ACTIONS[-1]
    return Action.RETRY if error.retriable else Action.FAIL


class Refusal(NamedTuple):
    """An error code in an answer, and what it is about. `text` is the broker's own message."""

    error_code: int
    place: str
    text: str | None = None

    @property
    def action(self) -> Action:
        return action_for(self.error_code)

    def error(self, api: str, node_id: str) -> KafkaError:
        """Return the error of the node's answer to `api` ("EndTxn")."""
        said = error_for_code(self.error_code, self.text or "", api, node_id)
        text = f"{self.place}: {said}"
        if isinstance(said, InvalidProducerEpochError | ProducerFencedError):  # a coordinator means the same by both
            return ProducerFencedError(
                f"{self.place}: {ProducerFencedError.sentence} Or its transaction was open longer than"
                " transaction.timeout.ms, and the broker aborted it."
            )
        if isinstance(said, InvalidPidMappingError):
            return said.reworded(
                f"{text} Another producer has taken the transactional id; or the brokers have forgotten it, as they do"
                " after transactional.id.expiration.ms without a transaction. Make another producer."
            )
        if self.error_code not in _COMMIT_FAILED:
            return said.reworded(text)
        failed = CommitFailedError(text)
        failed.error_code = self.error_code
        return failed


# ---- the requests ----------------------------------------------------------------------------------------------------


class Priority(enum.IntEnum):
    """The order of the queue: a coordinator is found before it is asked, and a transaction ends after all its parts."""

    FIND_COORDINATOR = 0
    INIT_PRODUCER_ID = 1
    ADD_PARTITIONS_OR_OFFSETS = 2
    TXN_OFFSET_COMMIT = 3
    END_TXN = 4


@dataclass(slots=True, eq=False)
class TransactionRequest:
    """One request in the queue. `coordinator` is (type, key) of the node it goes to, None for any node."""

    priority: Priority
    request: Request
    coordinator: tuple[int, str] | None
    refusals: Callable[[Message], Iterable[Refusal]]
    """The errors of an answer. An answer without any is a success."""
    succeeded: Callable[[Message], None]
    result: OperationResult
    attempts: int = field(default=0)
    not_before_ms: int = field(default=0)
    was_lost: bool = field(default=False)
    """An earlier attempt was not answered, and may have taken effect."""

    @property
    def api(self) -> str:
        """Kafka's name of the request."""
        return type(self.request).__name__.removesuffix("Request")

    def error_of(self, refusal: Refusal, node_id: str) -> KafkaError:
        error = refusal.error(self.api, node_id)
        if self.priority is not Priority.END_TXN or not self.was_lost:
            return error
        return error.reworded(
            f"{error} An earlier request was not answered, and the transaction may have ended as it asked: look whether"
            " its records can be read before you write them again."
        )

    @property
    def adds_to_transaction(self) -> bool:
        """The request adds a partition or a group, which begins the transaction at its coordinator."""
        return self.priority is Priority.ADD_PARTITIONS_OR_OFFSETS

    @property
    def may_be_late(self) -> bool:
        """A copy that arrives late could be taken for a request of the next transaction, in the same epoch."""
        return self.priority >= Priority.ADD_PARTITIONS_OR_OFFSETS

    def most_severe_refusal(self, body: Message) -> Refusal | None:
        """Return the error of an answer that counts, None for a success."""
        return max(self.refusals(body), key=lambda refusal: refusal.action, default=None)


def find_coordinator(
    key_type: int, key: str, succeeded: Callable[[Message], None], result: OperationResult
) -> TransactionRequest:
    place = f"transactional.id {key}" if key_type == TRANSACTION else f"group {key}"

    def refusals(body: Message) -> Iterable[Refusal]:
        found = coordinator_of(body, key)
        if found is None:
            return [Refusal(COORDINATOR_NOT_AVAILABLE, place)]
        return [Refusal(found.error_code, place, found.error_message)] if found.error_code else []

    request = FindCoordinatorRequest(key, key_type)
    return TransactionRequest(Priority.FIND_COORDINATOR, request, None, refusals, succeeded, result)


def init_producer_id(
    transactional_id: str,
    transaction_timeout_ms: int,
    producer: ProducerIdAndEpoch,
    succeeded: Callable[[Message], None],
    result: OperationResult,
) -> TransactionRequest:
    """Ask for a producer id. With a valid `producer` ask for its next epoch instead (KIP-360)."""
    request = InitProducerIdRequest(transactional_id, transaction_timeout_ms, *producer)
    place = f"transactional.id {transactional_id}"
    own_error = _own_error(place)

    def refusals(body: Message) -> Iterable[Refusal]:
        lacks_id = not body.error_code and body.producer_id < 0
        return [Refusal(COORDINATOR_NOT_AVAILABLE, place, _NO_ID)] if lacks_id else own_error(body)

    coordinator = (TRANSACTION, transactional_id)
    return TransactionRequest(Priority.INIT_PRODUCER_ID, request, coordinator, refusals, succeeded, result)


def add_partitions(
    transaction: OpenTransaction,
    partitions: Iterable[TopicPartition],
    succeeded: Callable[[Message], None],
    result: OperationResult,
) -> TransactionRequest:
    topics: dict[str, list[int]] = {}
    asked = sorted(partitions)
    for topic, partition in asked:
        topics.setdefault(topic, []).append(partition)
    request = AddPartitionsToTxnRequest(transaction.transactional_id, *transaction.producer, topics)

    def refusals(body: Message) -> Iterable[Refusal]:
        codes = _by_place(
            (TopicPartition(str(topic.name), int(partition.partition_index)), int(partition.partition_error_code))
            for topic in body.results_by_topic_v3_and_below
            for partition in topic.results_by_partition
        )
        refused = [Refusal(code, str(place)) for place, code in codes.items() if code]
        return refused + _left_out(asked, codes)

    coordinator = (TRANSACTION, transaction.transactional_id)
    priority = Priority.ADD_PARTITIONS_OR_OFFSETS
    return TransactionRequest(priority, request, coordinator, refusals, succeeded, result)


def add_offsets(
    transaction: OpenTransaction, group_id: str, succeeded: Callable[[Message], None], result: OperationResult
) -> TransactionRequest:
    request = AddOffsetsToTxnRequest(transaction.transactional_id, *transaction.producer, group_id)
    return TransactionRequest(
        Priority.ADD_PARTITIONS_OR_OFFSETS,
        request,
        (TRANSACTION, transaction.transactional_id),
        _own_error(f"group {group_id}"),
        succeeded,
        result,
    )


Offsets = Mapping[TopicPartition, tuple[int, str | None]]
"""Topic-partition → (next offset to read, a text that goes with it)."""


class GroupMetadata(NamedTuple):
    """The group whose offsets are committed (KIP-447). Generation -1 and member "" fit a group without members."""

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


def txn_offset_commit(
    transaction: OpenTransaction, group: GroupMetadata, offsets: Offsets, result: OperationResult
) -> TransactionRequest:
    """The last request of its operation: `result` is finished by its success."""
    topics: dict[str, Sequence[OffsetToCommit]] = {}
    for (topic, partition), (offset, text) in sorted(offsets.items(), key=lambda item: item[0]):
        topics[topic] = [*topics.get(topic, ()), OffsetToCommit(partition, offset, text)]
    request = TxnOffsetCommitRequest(
        transaction.transactional_id,
        *transaction.producer,
        group.group_id,
        topics,
        group.generation_id,
        group.member_id,
        group.group_instance_id,
        transaction.transaction_version,
    )

    def refusals(body: Message) -> Iterable[Refusal]:
        codes = _by_place(
            (TopicPartition(str(topic.name), int(partition.partition_index)), int(partition.error_code))
            for topic in body.topics
            for partition in topic.partitions
        )
        refused = [
            Refusal(
                code,
                f"group {group.group_id}, {place}",
                _OFFSET_NOT_GRANTED if code == TopicAuthorizationError.error_code else None,
            )
            for place, code in codes.items()
            if code
        ]
        return refused + _left_out(offsets, codes)

    def succeeded(_: Message) -> None:
        result.finish()

    coordinator = (GROUP, group.group_id)
    return TransactionRequest(Priority.TXN_OFFSET_COMMIT, request, coordinator, refusals, succeeded, result)


def end_txn(
    transaction: OpenTransaction, committed: bool, succeeded: Callable[[Message], None], result: OperationResult
) -> TransactionRequest:
    name = transaction.transactional_id
    request = EndTxnRequest(name, *transaction.producer, committed, transaction.transaction_version)
    return TransactionRequest(
        Priority.END_TXN,
        request,
        (TRANSACTION, name),
        _own_error(f"transactional.id {name}"),
        succeeded,
        result,
    )


def _own_error(place: str) -> Callable[[Message], Iterable[Refusal]]:
    def refusals(body: Message) -> Iterable[Refusal]:
        return [Refusal(int(body.error_code), place)] if body.error_code else []

    return refusals


def _by_place(answers: Iterable[tuple[TopicPartition, int]]) -> dict[TopicPartition, int]:
    """Return the code of each partition. Of a partition that is named more than once, an error counts."""
    codes: dict[TopicPartition, int] = {}
    for place, code in answers:
        codes[place] = code or codes.get(place, 0)
    return codes


def _left_out(asked: Iterable[TopicPartition], answered: Container[TopicPartition]) -> list[Refusal]:
    """The broker may not have acted on a partition that its answer does not mention."""
    return [Refusal(COORDINATOR_NOT_AVAILABLE, str(place), _LEFT_OUT) for place in asked if place not in answered]


# ---- the queue -------------------------------------------------------------------------------------------------------


class TransactionQueue:
    """Requests by priority, and in order within a priority. One is in flight at a time.

    The Sender calls the result of `outgoing`, which takes the `lock` of the manager. `pending` gets the causes of
    delay.
    """

    def __init__(
        self, transactional_id: str, retry_backoff: ExponentialBackoff, lock: threading.RLock, pending: PendingOperation
    ) -> None:
        self.transactional_id = transactional_id
        """That of the manager, which may change; log lines begin with it."""
        self.in_flight: TransactionRequest | None = None
        self._retry_backoff = retry_backoff
        self._lock = lock
        self._pending = pending
        self._waiting: list[TransactionRequest] = []
        self._coordinators: dict[tuple[int, str], Node] = {}
        self._said: list[tuple[int, str]] = []

    def __contains__(self, request: TransactionRequest) -> bool:
        return request in self._waiting

    def add(self, request: TransactionRequest) -> None:
        self._waiting.append(request)

    def add_offsets(
        self,
        transaction: OpenTransaction,
        group: GroupMetadata,
        offsets: Offsets,
        started: Callable[[], None],
        result: OperationResult,
    ) -> None:
        """Queue the requests that commit `offsets`. `started` is called when the group is in the transaction."""

        def commit(_: Message) -> None:
            started()
            if not result.is_done:  # else an abort was quicker
                self.add(txn_offset_commit(transaction, group, offsets, result))

        if transaction.transaction_version >= 2:
            commit(None)
        else:
            self.add(add_offsets(transaction, group.group_id, commit, OperationResult("add offsets")))

    def remove(self, request: TransactionRequest) -> None:
        self._waiting.remove(request)

    def clear(self) -> None:
        """Forget the requests that wait."""
        self._waiting.clear()

    def clear_for_abort(self) -> None:
        """Forget the requests that an abort makes pointless.

        A request that adds to the transaction stays if it was sent before. Its answer may have been lost, and only an
        answer says whether there is a transaction to end.
        """
        self._waiting = [each for each in self._waiting if each.adds_to_transaction and each.attempts > 0]

    def first(self) -> TransactionRequest | None:
        """Return the request to send next, when its backoff is over."""
        return min(self._waiting, key=lambda request: request.priority, default=None)

    def delay_ms(self, now_ms: int) -> int:
        """Return the ms until a request may go: FOREVER_MS if none waits, or one is in flight."""
        with self._lock:
            if self.in_flight is not None:
                return FOREVER_MS
            return max(0, min((request.not_before_ms - now_ms for request in self._waiting), default=FOREVER_MS))

    def use_coordinators(self, found: Mapping[tuple[int, str], Node]) -> None:
        """Take over coordinators by (type, key) that are not known yet. Any thread."""
        with self._lock:
            for place, node in found.items():
                self._note_coordinator(place, node)

    def _note_coordinator(self, place: tuple[int, str], node: Node) -> None:
        self._coordinators.setdefault(place, node)
        if len(self._coordinators) > _MOST_COORDINATORS:
            del self._coordinators[next(iter(self._coordinators))]

    def with_coordinator(self, request: TransactionRequest) -> tuple[TransactionRequest, Node | None]:
        """Return `request` and its node (None: any), or the request that finds this node first."""
        place = request.coordinator
        if place is None or place in self._coordinators:
            return request, None if place is None else self._coordinators[place]
        key_type, key = place

        def found(body: Message) -> None:
            coordinator = coordinator_of(body, key)
            assert coordinator is not None
            self._note_coordinator(place, Node(coordinator.node_id, coordinator.host, coordinator.port))

        lookup = find_coordinator(key_type, key, found, request.result)
        lookup.attempts, lookup.not_before_ms = request.attempts, request.not_before_ms
        self.add(lookup)
        return lookup, None

    def outgoing(
        self,
        request: TransactionRequest,
        now_ms: int,
        answered: Callable[[TransactionRequest, Message, str, int], None],
        refused: Callable[[KafkaError], None],
    ) -> OutgoingRequest | None:
        """Return `request` for the Sender, or the lookup of its coordinator. None while it waits out its backoff."""
        next_, node = self.with_coordinator(request)
        if next_.not_before_ms > now_ms:
            return None
        return OutgoingRequest(
            request=next_.request,
            node=node,
            take=lambda: self.take(next_),
            answered=lambda *answer: self._then_log(lambda: answered(next_, *answer)),
            refused=refused,
            unreachable=lambda: self._then_log(lambda: self.unreachable(next_, node, now_ms)),
        )

    def say(self, level: int, line: str) -> None:
        """Log a line of the Sender, once it has released the lock. A log handler may send through the producer, and
        need the lock while another thread waits for the handler.
        """
        self._said.append((level, line))

    def _then_log(self, handle: Callable[[], None]) -> None:
        try:
            handle()
        finally:
            said, self._said = self._said, []
            for level, line in said:
                log.log(level, "%s: %s", self.transactional_id, line)

    def take(self, request: TransactionRequest) -> bool:
        """Take `request` out, to send it. Return False if another thread has withdrawn it."""
        with self._lock:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            self.in_flight = request
            return True

    def unreachable(self, request: TransactionRequest, node: Node | None, now_ms: int) -> None:
        """Send `request` again, perhaps to another node, unless another thread has taken it back."""
        with self._lock:
            self._pending.last_loss = f"{node or 'A broker'} cannot be reached."
            self._pending.unreachable_node = "" if node is None else node.id_string
            if request in self._waiting:
                self.lost(request, now_ms)

    def lost(self, request: TransactionRequest, now_ms: int) -> None:
        """No answer came: send `request` again, once its coordinator is found again."""
        self.forget_coordinator(request)
        self.again(request, 0, now_ms)

    def again(self, request: TransactionRequest, error_code: int, now_ms: int) -> None:
        """Queue `request` once more, after its backoff. `error_code` is 0 if there was no answer."""
        backoff_ms = self._retry_backoff.backoff_ms(request.attempts)
        if error_code == CONCURRENT_TRANSACTIONS:
            backoff_ms = min(backoff_ms, COORDINATOR_BACKOFF_MS << min(request.attempts, 10))
        request.attempts += 1
        request.not_before_ms = now_ms + backoff_ms
        self.say(logging.DEBUG, f"sending {request.request!r} again in {backoff_ms} ms (error code {error_code})")
        if request not in self._waiting:
            self.add(request)

    def forget_coordinator(self, request: TransactionRequest) -> None:
        """The node that `request` went to is no longer its coordinator, or cannot be reached."""
        if request.coordinator is not None:
            self._coordinators.pop(request.coordinator, None)
