"""The requests of a transaction, and the answers of its coordinator.

- The makers (`init_producer_id`, `add_partitions`, ...): what each request says, and how its answer is read.
- `action_for`: what each error code leads to.
- `Coordinators`: those that are known.
- `TransactionQueue`: which request goes next, and to which node.

A broker that is cut off from its controllers answers as the coordinator that it was before. It cannot write, so it
takes no part of a transaction in. But under transaction.version 1 all transactions of a producer have the same epoch:
such a broker takes the end of the current one for a repetition of an earlier end, and answers with success. Java's
producer trusts it; `TransactionQueue.before` does not.

Nothing here decides what an answer does to the transaction: `TransactionManager` does. Its lock guards all of this.
Reference: org.apache.kafka.clients.producer.internals.TransactionManager's TxnRequestHandler classes (KIP-98, KIP-447,
KIP-890).
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from spark_kafka_sink.client.backoff import COORDINATOR_BACKOFF_MS, FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    CommitFailedError,
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
from spark_kafka_sink.producer.operations import OperationResult, PendingOperation
from spark_kafka_sink.producer.transaction_content import CurrentTransaction
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
_DISPUTED: Final = (
    "Broker {broker} names node {named} as the coordinator, another one named node {other}. One of the brokers may be"
    " cut off from its controllers."
)
_MOST_COORDINATORS: Final = 10_000
"""Tasks of batch writes without a prefix have new transactional ids and groups each time."""
_LEFT_OUT: Final = "The answer does not mention it."
_NO_ID: Final = "The answer has no producer id."
_OFFSET_NOT_GRANTED: Final = "Not authorized for the topic that the offset is of: grant READ on it."


CoordinatorKey = tuple[int, str]
"""A type (TRANSACTION or GROUP), and the name of a transactional id or group."""


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
    coordinator: CoordinatorKey | None
    refusals: Callable[[Message], Iterable[Refusal]]
    """The errors of an answer. An answer without any is a success."""
    succeeded: Callable[[Message], None]
    result: OperationResult
    attempts: int = field(default=0)
    not_before_ms: int = field(default=0)
    was_lost: bool = field(default=False)
    """An earlier attempt was not answered, and may have taken effect."""
    adds: Collection[TopicPartition | str] = ()
    """The partitions or the group that it adds to the transaction."""
    asks: Node | None = None
    """It goes to this broker, and asks which coordinator that one knows."""
    asked_for: TransactionRequest | None = None
    """The request that waits for the answer. What delays this one delays that one."""
    is_doubted: bool = False
    """It was refused by a coordinator that may be cut off: all brokers are asked whether they name that one."""

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
    place = _place(key_type, key)

    def refusals(body: Message) -> Iterable[Refusal]:
        found = coordinator_of(body, key)
        if found is None:
            return [Refusal(COORDINATOR_NOT_AVAILABLE, place)]
        return [Refusal(found.error_code, place, found.error_message)] if found.error_code else []

    request = FindCoordinatorRequest(key, key_type)
    return TransactionRequest(Priority.FIND_COORDINATOR, request, None, refusals, succeeded, result)


def _place(key_type: int, key: str) -> str:
    return f"transactional.id {key}" if key_type == TRANSACTION else f"group {key}"


def confirm_coordinator(
    waiting: TransactionRequest, broker: Node, coordinator: Node, succeeded: Callable[[Message], None]
) -> TransactionRequest:
    """Ask `broker` whether it names the same coordinator, where `waiting` is about to go."""
    assert waiting.coordinator is not None
    request = find_coordinator(*waiting.coordinator, succeeded, waiting.result)
    (key_type, key), own_refusals = waiting.coordinator, request.refusals

    def refusals(body: Message) -> Iterable[Refusal]:
        named = coordinator_of(body, key)
        if named is None or named.error_code or named.node_id == coordinator.id:
            return own_refusals(body)
        text = _DISPUTED.format(broker=broker.id_string, named=named.node_id, other=coordinator.id_string)
        return [Refusal(COORDINATOR_NOT_AVAILABLE, _place(key_type, key), text)]

    return replace(request, coordinator=waiting.coordinator, refusals=refusals, asks=broker, asked_for=waiting)


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
    return TransactionRequest(priority, request, coordinator, refusals, succeeded, result, adds=asked)


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
        adds=[group_id],
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


def _ignore(_: Message) -> None:
    """What was added again is in the transaction already."""


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


# ---- coordinators ----------------------------------------------------------------------------------------------------


class Coordinators:
    """The known coordinators. `brokers` returns those that the metadata names, nothing before there is metadata."""

    def __init__(self, brokers: Callable[[], Sequence[Node]]) -> None:
        self.brokers = brokers
        self._known: dict[CoordinatorKey, Node] = {}
        self._named_by: dict[CoordinatorKey, set[int]] = {}
        """The ids of the brokers that were asked, and named the known coordinator."""

    def get(self, key: CoordinatorKey) -> Node | None:
        return self._known.get(key)

    def use(self, found: Mapping[CoordinatorKey, Node]) -> None:
        """Take over coordinators that are not known yet."""
        for key, node in found.items():
            self._known.setdefault(key, node)
            if len(self._known) > _MOST_COORDINATORS:
                self.forget(next(iter(self._known)))

    def forget(self, key: CoordinatorKey) -> None:
        """The node is no longer the coordinator, cannot be reached, or other brokers name another one."""
        self._known.pop(key, None)
        self._named_by.pop(key, None)

    def broker_to_ask(self, key: CoordinatorKey) -> Node | None:
        """Return a broker that has not been asked yet for the known coordinator. None: all of them name it."""
        asked = self._named_by.get(key, set())
        return next((broker for broker in self.brokers() if broker.id not in asked), None)

    def confirm(self, key: CoordinatorKey, broker: Node) -> None:
        """`broker` has named the known coordinator."""
        self._named_by.setdefault(key, set()).add(broker.id)


# ---- the queue -------------------------------------------------------------------------------------------------------


class TransactionQueue:
    """Requests by priority, and in order within a priority. One is in flight at a time.

    The Sender calls the result of `outgoing`, which takes the `lock` of the manager. `pending` gets the causes of
    delay.
    """

    def __init__(
        self,
        transactional_id: str,
        retry_backoff: ExponentialBackoff,
        lock: threading.RLock,
        pending: PendingOperation,
        brokers: Callable[[], Sequence[Node]],
    ) -> None:
        self.transactional_id = transactional_id
        """That of the manager, which may change; log lines begin with it."""
        self.in_flight: TransactionRequest | None = None
        self._retry_backoff = retry_backoff
        self._lock = lock
        self._pending = pending
        self._waiting: list[TransactionRequest] = []
        self._coordinators = Coordinators(brokers)
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

    def use_coordinators(self, found: Mapping[CoordinatorKey, Node]) -> None:
        """Take over coordinators that are not known yet. Any thread."""
        with self._lock:
            self._coordinators.use(found)

    def with_coordinator(self, request: TransactionRequest) -> tuple[TransactionRequest, Node | None]:
        """Return `request` and its node (None: any), or the request that finds this node first."""
        place = request.coordinator
        if request.asks is not None or place is None:
            return request, request.asks
        if (node := self._coordinators.get(place)) is not None:
            return request, node
        key_type, key = place

        def found(body: Message) -> None:
            coordinator = coordinator_of(body, key)
            assert coordinator is not None
            self._coordinators.use({place: Node(coordinator.node_id, coordinator.host, coordinator.port)})

        lookup = find_coordinator(key_type, key, found, request.result)
        lookup.attempts, lookup.not_before_ms = request.attempts, request.not_before_ms
        self.add(lookup)
        return lookup, None

    def doubts(self, request: TransactionRequest, error: KafkaError) -> bool:
        """Return whether a coordinator may refuse a group's offsets only because it is cut off: it may ask itself about
        the transaction, and know an older epoch. It may not if all brokers have named it.
        """
        key = request.coordinator
        is_of_offsets = request.priority is Priority.TXN_OFFSET_COMMIT
        if key is None or not is_of_offsets or not isinstance(error, ProducerFencedError):
            return False
        is_confirmed = request.is_doubted and self._coordinators.broker_to_ask(key) is None
        request.is_doubted = True
        return not is_confirmed

    def before(
        self, request: TransactionRequest, transaction: OpenTransaction, current: CurrentTransaction, now_ms: int
    ) -> TransactionRequest | None:
        """Return what must be sent before `request`; `request` itself if nothing is left; None if it must wait."""
        key = request.coordinator
        node = None if key is None else self._coordinators.get(key)
        if node is None or request.not_before_ms > now_ms:
            return request
        if request.priority is Priority.END_TXN and transaction.transaction_version < 2:
            return self._before_end(request, node, transaction, current, now_ms)
        return self._confirmation(request, node, now_ms) if request.is_doubted else request

    def _before_end(
        self,
        end: TransactionRequest,
        node: Node,
        transaction: OpenTransaction,
        current: CurrentTransaction,
        now_ms: int,
    ) -> TransactionRequest | None:
        """Do as `before` for the end of a transaction of version 1, which is about to go to `node`.

        The coordinator may be cut off from its controllers, and answer for an earlier transaction. It is the right one
        if it has taken all parts of the transaction in, which it writes down. For a commit, those that another node has
        taken in are added again; this changes nothing at the right one. Otherwise all brokers must name the
        coordinator: an abort must not need the partitions, those of a resumed transaction are not known here, and a
        prepared one may have been aborted by another producer, so that adding would begin another transaction.
        """
        partitions, groups = current.added_elsewhere(node.id_string)
        is_commit = isinstance(end.request, EndTxnRequest) and end.request.committed
        may_add = is_commit and not current.is_prepared
        if current.is_resumed or ((partitions or groups) and not may_add):
            return self._confirmation(end, node, now_ms)
        if partitions:
            self.add(add_partitions(transaction, partitions, _ignore, OperationResult("add partitions")))
        for group in groups:
            self.add(add_offsets(transaction, group, _ignore, OperationResult("add offsets")))
        return self.first()

    def _confirmation(self, request: TransactionRequest, coordinator: Node, now_ms: int) -> TransactionRequest | None:
        """Do as `before` for a request that may go only where all brokers say."""
        key = request.coordinator
        assert key is not None
        if not self._coordinators.brokers():
            self.again(request, 0, now_ms)
            return None
        if (broker := self._coordinators.broker_to_ask(key)) is None:
            return request
        lookup = confirm_coordinator(request, broker, coordinator, lambda _: self._coordinators.confirm(key, broker))
        self.add(lookup)
        return lookup

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

    def again(self, request: TransactionRequest, error_code: int, now_ms: int) -> int:
        """Queue `request` once more, after its backoff. Code 0: there was no answer. Return the number of attempts."""
        if request.asked_for is not None:  # another broker may be asked next
            self._waiting = [each for each in self._waiting if each is not request]
            request = request.asked_for
            request.is_doubted = False
        backoff_ms = self._retry_backoff.backoff_ms(request.attempts)
        if error_code == CONCURRENT_TRANSACTIONS:
            backoff_ms = min(backoff_ms, COORDINATOR_BACKOFF_MS << min(request.attempts, 10))
        request.attempts += 1
        request.not_before_ms = now_ms + backoff_ms
        self.say(logging.DEBUG, f"sending {request.request!r} again in {backoff_ms} ms (error code {error_code})")
        if request not in self._waiting:
            self.add(request)
        return request.attempts

    def forget_coordinator(self, request: TransactionRequest) -> None:
        """The node that `request` went to is no longer its coordinator, or cannot be reached."""
        if request.coordinator is not None:
            self._coordinators.forget(request.coordinator)
