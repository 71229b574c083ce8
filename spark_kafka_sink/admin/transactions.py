"""Calls to transaction coordinators: begin a new epoch, end open transactions, describe, list.

A broker checks only transactional id, producer id and epoch, so any process may end a transaction (KIP-98, KIP-890).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import ClassVar, Final, NamedTuple

from spark_kafka_sink.admin.coordinator_calls import CONTRADICTION, CoordinatorApi, CoordinatorCalls, Outcome
from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.admin.transaction_values import (
    EndTxnOutcome,
    EndTxnStatus,
    TransactionDescription,
    TransactionListing,
    TransactionState,
)
from spark_kafka_sink.client.metadata_view import MetadataResponse
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    CoordinatorNotAvailableError,
    InvalidPidMappingError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    KafkaError,
    KafkaTimeoutError,
    NotCoordinatorError,
    ProducerFencedError,
    TransactionalIdNotFoundError,
    UnknownServerError,
    UnsupportedVersionError,
    error_for_code,
)
from spark_kafka_sink.common.open_transaction import NO_PRODUCER, OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.protocol.metadata import TRANSACTION, MetadataRequest
from spark_kafka_sink.protocol.transactions import (
    DescribeTransactionsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ListTransactionsRequest,
)
from spark_kafka_sink.protocol.versions import Message, Request, to_ms

_WITHOUT_TOPICS: Final = MetadataRequest((), allow_auto_topic_creation=False)
_LISTING_ROUND_MS: Final = 2_000
"""The limit of the first round, after which the brokers say which of them are still there."""
_LISTING_ROUND_GROWTH: Final = 1.5
"""Each round gives slow brokers more time than the one before."""
_MAY_NOT_WRITE: Final = "Not authorized for the transactional id: grant WRITE on it."
_MAY_NOT_DESCRIBE: Final = "Not authorized for the transactional id: grant DESCRIBE on it, which WRITE includes."
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


class Transactions:
    """The calls. Each returns when all answers have come, or when the timer has expired."""

    def __init__(self, calls: CoordinatorCalls) -> None:
        self._calls = calls

    def init_producer_id(
        self,
        transactional_id: str,
        transaction_timeout_ms: int,
        timer: Timer,
        held: ProducerIdAndEpoch | None = None,
    ) -> ProducerIdAndEpoch:
        """Return the next epoch of the id. This fences the id's producer and aborts its open transaction. With `held`
        it does so only if `held` is the current epoch (KIP-360).

        Raises ProducerFencedError if it is not, InvalidTransactionTimeoutError, TransactionalIdAuthorizationError,
        KafkaTimeoutError.
        """
        fenced = self.init_producer_ids([transactional_id], transaction_timeout_ms, timer, held)
        return fenced[transactional_id].get()

    def init_producer_ids(
        self,
        transactional_ids: Iterable[str],
        transaction_timeout_ms: int,
        timer: Timer,
        held: ProducerIdAndEpoch | None = None,
    ) -> dict[str, Outcome[ProducerIdAndEpoch]]:
        """Call `init_producer_id` for many ids at once, each with its own outcome."""
        claimed = held or NO_PRODUCER
        requests = [InitProducerIdRequest(each, transaction_timeout_ms, *claimed) for each in transactional_ids]
        outcomes = self._calls.run(_InitProducerId(), requests, timer)
        return {str(request.transactional_id): outcome for request, outcome in outcomes.items()}

    def end_txns(
        self, transactions: Sequence[OpenTransaction], timer: Timer, *, committed: bool
    ) -> list[EndTxnOutcome]:
        """Commit or abort all transactions, in parallel over coordinators. Return the outcomes in the same order. Their
        errors are not raised.

        After a lost response the same request is sent again. A response means that the outcome is decided; the markers
        may reach the partitions later. The caller must not ask for both commit and abort of one transaction.
        """
        outcomes = self._calls.run(_EndTxn(committed), transactions, timer)
        return [end_txn_outcome(transaction, outcomes[transaction]) for transaction in transactions]

    def describe_transactions(
        self,
        transactional_ids: Iterable[str],
        timer: Timer,
        given: Mapping[str, ProducerIdAndEpoch] = {},
        *,
        have_begun: bool = False,
    ) -> dict[str, TransactionDescription | None]:
        """Return the transactions' states, None for an id that its coordinator does not know. One request a
        coordinator.

        `given`: what coordinators have given out for ids. Kafka answers this request from memory, also on a broker that
        was frozen and does not know yet that it coordinates nothing any more. An older epoch shows that, or, with
        `have_begun`, the same one without a transaction; then the coordinator is looked for again.

        Raises TransactionalIdAuthorizationError, KafkaTimeoutError.
        """
        outcomes = self._calls.run(_DescribeTransactions(given, have_begun), transactional_ids, timer)
        return {transactional_id: outcome.get().description for transactional_id, outcome in outcomes.items()}

    def without_coordinator(self, transactional_ids: Sequence[str], timer: Timer) -> list[str]:
        """Return the ids whose partition of __transaction_state has no leader, so that their transactions are in no
        list. It needs only DESCRIBE on the ids, whether they are in use or not; others are left out.
        """
        return self._calls.without_coordinator(TRANSACTION, transactional_ids, timer)

    def disputed(self, transactional_ids: Sequence[str], timer: Timer) -> list[str]:
        """Return the ids for which brokers name different coordinators, as `CoordinatorCalls.disputed`."""
        return self._calls.disputed(TRANSACTION, transactional_ids, timer)

    def list_transactions(
        self,
        timer: Timer,
        *,
        states: Iterable[TransactionState] = (),
        producer_ids: Iterable[int] = (),
        longer_than_ms: int = -1,
    ) -> list[TransactionListing]:
        """Return the transactions of all live brokers, by transactional id. The brokers filter them. `longer_than_ms`
        (KIP-994) selects those that began longer ago.

        Transactions without the DESCRIBE permission are left out. Raises KafkaTimeoutError, naming the brokers that did
        not answer, and UnsupportedVersionError if one is too old for a filter.
        """
        request = ListTransactionsRequest(tuple(state.value for state in states), tuple(producer_ids), longer_than_ms)
        round_ms: float = _LISTING_ROUND_MS
        while True:
            nodes = self._brokers(timer)
            round_timer = Timer(self._calls.clock, min(timer.remaining_ms, int(round_ms)))
            round_ms *= _LISTING_ROUND_GROWTH
            outcomes = self._calls.run(_ListTransactions(request), nodes, round_timer)
            timer.update()
            # All in one round: if a broker has gone, its transactions have moved to one that may have answered before.
            listings = [
                outcome.get()
                for outcome in outcomes.values()
                if not isinstance(outcome.error, KafkaTimeoutError) or timer.is_expired
            ]
            if len(listings) == len(nodes):
                break
        found = {listing.transactional_id: listing for each in listings for listing in each}
        return [found[transactional_id] for transactional_id in sorted(found)]

    def _brokers(self, timer: Timer) -> Sequence[Node]:
        """Return the brokers that are live now. One of them names them: a new view of this client's topics takes 5 ms
        with 200 partitions, and 17 ms with 1,000. It comes only if that broker does not answer soon.
        """
        found = self._named_by_one(Timer(self._calls.clock, min(timer.remaining_ms, _LISTING_ROUND_MS)))
        timer.update()
        if found:
            return found
        if not self._calls.client.await_metadata_update(timer):
            why = self._calls.client.why_unanswered()
            raise KafkaTimeoutError(f"The list of brokers could not be fetched within {timer.timeout_ms} ms. {why}")
        return self._calls.metadata.fetch().nodes

    def _named_by_one(self, timer: Timer) -> Sequence[Node]:
        """Return the brokers that one of them names, nothing if it does not answer."""
        client = self._calls.client
        node = client.least_loaded_node()
        if node is None:
            return ()
        future = client.send(node, _WITHOUT_TOPICS)
        if not client.poll_until(future, timer) or future.failed():
            return ()
        answer = MetadataResponse.from_entity(future.value().body)
        return () if answer.error_code else tuple(answer.brokers.values())


# ---- for each call: its requests, its responses, and advice after a refusal ------------------------------------------


class _InitProducerId(CoordinatorApi[InitProducerIdRequest, ProducerIdAndEpoch]):
    key_type = TRANSACTION
    advice: ClassVar[Mapping[int, str]] = {
        50: "transaction.timeout.ms is larger than the broker's transaction.max.timeout.ms: lower the one or raise the"
        " other.",
        53: _MAY_NOT_WRITE,
    }

    def key(self, item: InitProducerIdRequest) -> str:
        return str(item.transactional_id)

    def describe(self, item: InitProducerIdRequest) -> str:
        return f"InitProducerId of transactional id {item.transactional_id!r} ({item.transaction_timeout_ms} ms)"

    def requests(
        self, items: Sequence[InitProducerIdRequest]
    ) -> Iterable[tuple[Request, Sequence[InitProducerIdRequest]]]:
        return [(item, [item]) for item in items]

    def answers(
        self, items: Sequence[InitProducerIdRequest], body: Message
    ) -> Mapping[InitProducerIdRequest, ProducerIdAndEpoch | KafkaError]:
        code = int(body.error_code)
        if code == InvalidProducerEpochError.error_code:  # the error code of versions below 4
            code = ProducerFencedError.error_code or code
        found = ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))
        if not code and found.producer_id < 0:
            return dict.fromkeys(items, CoordinatorNotAvailableError("The answer has no producer id."))
        return dict.fromkeys(items, error_for_code(code, api="InitProducerId") if code else found)


class _EndTxn(CoordinatorApi[OpenTransaction, ProducerIdAndEpoch]):
    key_type = TRANSACTION
    retried = (UnknownServerError,)
    advice: ClassVar[Mapping[int, str]] = {53: _MAY_NOT_WRITE}

    def __init__(self, committed: bool) -> None:
        self._committed = committed

    def key(self, item: OpenTransaction) -> str:
        return item.transactional_id

    def describe(self, item: OpenTransaction) -> str:
        return f"{'Commit' if self._committed else 'Abort'} of {item}"

    def requests(self, items: Sequence[OpenTransaction]) -> Iterable[tuple[Request, Sequence[OpenTransaction]]]:
        for item in items:
            yield (
                EndTxnRequest(
                    item.transactional_id,
                    item.producer_id,
                    item.producer_epoch,
                    self._committed,
                    item.transaction_version,
                ),
                [item],
            )

    def answers(
        self, items: Sequence[OpenTransaction], body: Message
    ) -> Mapping[OpenTransaction, ProducerIdAndEpoch | KafkaError]:
        code = int(body.error_code)
        return {item: error_for_code(code, api="EndTxn") if code else _next_producer(item, body) for item in items}


def _next_producer(ended: OpenTransaction, body: Message) -> ProducerIdAndEpoch:
    """From version 5 on the response has the next id and epoch."""
    if getattr(body, "producer_id", -1) >= 0:
        return ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))
    return ended.producer


_STATUS_BY_ERROR: Final[tuple[tuple[type[KafkaError], EndTxnStatus], ...]] = (
    (InvalidTxnStateError, EndTxnStatus.INVALID_TXN_STATE),
    (ProducerFencedError, EndTxnStatus.PRODUCER_FENCED),
    (InvalidProducerEpochError, EndTxnStatus.PRODUCER_FENCED),
    (InvalidPidMappingError, EndTxnStatus.INVALID_PID_MAPPING),
    (KafkaTimeoutError, EndTxnStatus.UNRESOLVED),
)


def end_txn_outcome(transaction: OpenTransaction, outcome: Outcome[ProducerIdAndEpoch]) -> EndTxnOutcome:
    error = outcome.error
    if error is None:
        return EndTxnOutcome(transaction, EndTxnStatus.DONE, outcome.get())
    found = next((status for kind, status in _STATUS_BY_ERROR if isinstance(error, kind)), None)
    status = found or (EndTxnStatus.UNRESOLVED if outcome.is_in_doubt else EndTxnStatus.REFUSED)
    return EndTxnOutcome(transaction, status, transaction.producer, error, outcome.is_in_doubt)


class _Described(NamedTuple):
    description: TransactionDescription | None

    def is_older_than(self, given: ProducerIdAndEpoch, has_begun: bool) -> bool:
        found = self.description
        if found is None or found.producer_id != given.producer_id:
            return False
        is_before_begin = has_begun and found.state is TransactionState.EMPTY and found.producer_epoch == given.epoch
        return is_before_begin or found.producer_epoch < given.epoch


class _DescribeTransactions(CoordinatorApi[str, _Described]):
    key_type = TRANSACTION
    advice: ClassVar[Mapping[int, str]] = {53: _MAY_NOT_DESCRIBE}

    def __init__(self, given: Mapping[str, ProducerIdAndEpoch], have_begun: bool) -> None:
        self._given = given
        self._have_begun = have_begun

    def key(self, item: str) -> str:
        return item

    def describe(self, item: str) -> str:
        return f"DescribeTransactions of transactional id {item!r}"

    def requests(self, items: Sequence[str]) -> Iterable[tuple[Request, Sequence[str]]]:
        return [(DescribeTransactionsRequest(tuple(items)), items)]

    def answers(self, items: Sequence[str], body: Message) -> Mapping[str, _Described | KafkaError]:
        found: dict[str, Message] = {}
        answers: dict[str, _Described | KafkaError] = {}
        for state in body.transaction_states:
            item = str(state.transactional_id)
            agrees = found.setdefault(item, state) == state
            answers[item] = self._checked(item, state) if agrees else CoordinatorNotAvailableError(CONTRADICTION)
        return {item: answers[item] for item in items if item in answers}

    def _checked(self, item: str, state: Message) -> _Described | KafkaError:
        answer, given = _described(state), self._given.get(item)
        if given is not None and isinstance(answer, _Described) and answer.is_older_than(given, self._have_begun):
            return NotCoordinatorError(f"Its state is older than what was done in epoch {given.epoch}.")
        return answer


def _described(state: Message) -> _Described | KafkaError:
    code = int(state.error_code)
    if code == TransactionalIdNotFoundError.error_code:
        return _Described(None)
    if code:
        return error_for_code(code, api="DescribeTransactions")
    start_time_ms = (state.transaction_start_time - _EPOCH) // timedelta(milliseconds=1)
    return _Described(
        TransactionDescription(
            str(state.transactional_id),
            TransactionState.of(state.transaction_state),
            int(state.producer_id),
            int(state.producer_epoch),
            to_ms(state.transaction_timeout),
            start_time_ms or None,
            frozenset(
                TopicPartition(str(topic.topic), int(partition))
                for topic in state.topics
                for partition in topic.partitions
            ),
        )
    )


class _ListTransactions(CoordinatorApi[Node, list[TransactionListing]]):
    key_type = TRANSACTION

    def __init__(self, request: ListTransactionsRequest) -> None:
        self._request = request

    def key(self, item: Node) -> str:
        return item.id_string

    def node(self, item: Node) -> Node | None:
        return item

    def describe(self, item: Node) -> str:
        return f"ListTransactions of node {item}"

    def requests(self, items: Sequence[Node]) -> Iterable[tuple[Request, Sequence[Node]]]:
        return [(self._request, items)]

    def answers(self, items: Sequence[Node], body: Message) -> Mapping[Node, list[TransactionListing] | KafkaError]:
        code = int(body.error_code)
        if code:
            return dict.fromkeys(items, error_for_code(code, api="ListTransactions"))
        if body.unknown_state_filters:
            unknown = ", ".join(body.unknown_state_filters)
            text = f"The broker does not know the transaction state {unknown}."
            return dict.fromkeys(items, UnsupportedVersionError(text))
        return {
            node: [
                TransactionListing(
                    str(each.transactional_id),
                    TransactionState.of(each.transaction_state),
                    int(each.producer_id),
                    node,
                )
                for each in body.transaction_states
            ]
            for node in items
        }
