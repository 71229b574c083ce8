"""The calls to transaction coordinators: what each asks, what its answers mean, and what to change where they refuse.
No state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import ClassVar, Final, NamedTuple

from spark_kafka_sink.client.coordinator_api import CoordinatorApi, Outcome
from spark_kafka_sink.client.transaction_values import (
    EndTxnOutcome,
    EndTxnStatus,
    OpenTransaction,
    ProducerIdAndEpoch,
    TransactionDescription,
    TransactionListing,
    TransactionState,
)
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    InvalidPidMappingError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    TransactionalIdNotFoundError,
    UnknownServerError,
    UnsupportedVersionError,
    error_for_code,
)
from spark_kafka_sink.protocol.building import Request
from spark_kafka_sink.protocol.coordinator_requests import (
    TRANSACTION,
    DescribeTransactionsRequest,
    EndTxnRequest,
    ListTransactionsRequest,
)
from spark_kafka_sink.protocol.messages import Message, to_ms
from spark_kafka_sink.protocol.requests import InitProducerIdRequest

_MAY_NOT_WRITE: Final = "Not authorized for the transactional id: grant WRITE on it."
_MAY_NOT_DESCRIBE: Final = "Not authorized for the transactional id: grant DESCRIBE on it, which WRITE includes."
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


class InitProducerIdApi(CoordinatorApi[InitProducerIdRequest, ProducerIdAndEpoch]):
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
        if code == InvalidProducerEpochError.error_code:  # how versions below 4 say it
            code = ProducerFencedError.error_code or code
        found = ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))
        return dict.fromkeys(items, error_for_code(code, api="InitProducerId") if code else found)


class EndTxnApi(CoordinatorApi[OpenTransaction, ProducerIdAndEpoch]):
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
    """From version 5 on the coordinator tells the next id and epoch."""
    if getattr(body, "producer_id", -1) >= 0:
        return ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))
    return ProducerIdAndEpoch(ended.producer_id, ended.producer_epoch)


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
        return EndTxnOutcome(transaction, EndTxnStatus.DONE, *outcome.get())
    found = next((status for kind, status in _STATUS_BY_ERROR if isinstance(error, kind)), None)
    status = found or (EndTxnStatus.UNRESOLVED if outcome.is_in_doubt else EndTxnStatus.REFUSED)
    return EndTxnOutcome(transaction, status, transaction.producer_id, transaction.producer_epoch, error)


class Described(NamedTuple):
    description: TransactionDescription | None


class DescribeTransactionsApi(CoordinatorApi[str, Described]):
    key_type = TRANSACTION
    advice: ClassVar[Mapping[int, str]] = {53: _MAY_NOT_DESCRIBE}

    def key(self, item: str) -> str:
        return item

    def describe(self, item: str) -> str:
        return f"DescribeTransactions of transactional id {item!r}"

    def requests(self, items: Sequence[str]) -> Iterable[tuple[Request, Sequence[str]]]:
        return [(DescribeTransactionsRequest(tuple(items)), items)]

    def answers(self, items: Sequence[str], body: Message) -> Mapping[str, Described | KafkaError]:
        found = {str(state.transactional_id): state for state in body.transaction_states}
        return {item: _described(found[item]) for item in items if item in found}


def _described(state: Message) -> Described | KafkaError:
    code = int(state.error_code)
    if code == TransactionalIdNotFoundError.error_code:
        return Described(None)
    if code:
        return error_for_code(code, api="DescribeTransactions")
    start_time_ms = (state.transaction_start_time - _EPOCH) // timedelta(milliseconds=1)
    return Described(
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


class ListTransactionsApi(CoordinatorApi[Node, list[TransactionListing]]):
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
            return dict.fromkeys(items, UnsupportedVersionError(f"The broker knows no transaction state {unknown}."))
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
