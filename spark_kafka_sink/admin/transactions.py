"""Transactions by their coordinators: begin a new epoch, end what others left open, describe, list.

A broker checks no more than transactional id, producer id and epoch, so any process may end a transaction (KIP-98,
KIP-890). One thread, that of the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from spark_kafka_sink.admin.coordinator_api import Outcome
from spark_kafka_sink.admin.coordinator_calls import CoordinatorCalls
from spark_kafka_sink.admin.timer import Timer
from spark_kafka_sink.admin.transaction_apis import (
    DescribeTransactionsApi,
    EndTxnApi,
    InitProducerIdApi,
    ListTransactionsApi,
    end_txn_outcome,
)
from spark_kafka_sink.admin.transaction_values import (
    EndTxnOutcome,
    OpenTransaction,
    ProducerIdAndEpoch,
    TransactionDescription,
    TransactionListing,
    TransactionState,
)
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.protocol.coordinator_requests import ListTransactionsRequest
from spark_kafka_sink.protocol.requests import InitProducerIdRequest

_LISTING_ROUND_MS: Final = 2_000
"""How long brokers are asked at first before metadata is asked which of them are still there."""
_LISTING_ROUND_GROWTH: Final = 1.5
"""A round's end cuts off who is slow: the next one gives it more time."""


class Transactions:
    """The calls. Each returns when everything is known, or when the timer has run out."""

    def __init__(self, calls: CoordinatorCalls) -> None:
        self._calls = calls

    def init_producer_id(
        self,
        transactional_id: str,
        transaction_timeout_ms: int,
        timer: Timer,
        held: ProducerIdAndEpoch | None = None,
    ) -> ProducerIdAndEpoch:
        """The next epoch of the id: fences whoever held it, and aborts what they left open. `held` asks for the next
        epoch only if it is the current one (KIP-360).

        Raises ProducerFencedError where it is not, InvalidTransactionTimeoutError, TransactionalIdAuthorizationError,
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
        """`init_producer_id` of many at once, each with its own outcome."""
        claimed = held or ProducerIdAndEpoch(-1, -1)
        requests = [InitProducerIdRequest(each, transaction_timeout_ms, *claimed) for each in transactional_ids]
        outcomes = self._calls.run(InitProducerIdApi(), requests, timer)
        return {str(request.transactional_id): outcome for request, outcome in outcomes.items()}

    def end_txns(
        self, transactions: Sequence[OpenTransaction], timer: Timer, *, committed: bool
    ) -> list[EndTxnOutcome]:
        """Commit or abort them all, in parallel over coordinators; outcomes in the order given. Raises for none.

        A lost answer is followed by the same request again. An answer means that the outcome is decided; its markers
        may reach the partitions later. Commit and abort of one transaction must not both be asked for.
        """
        outcomes = self._calls.run(EndTxnApi(committed), transactions, timer)
        return [end_txn_outcome(transaction, outcomes[transaction]) for transaction in transactions]

    def describe_transactions(
        self, transactional_ids: Iterable[str], timer: Timer
    ) -> dict[str, TransactionDescription | None]:
        """The transactions' states, None for an id that its coordinator does not know; one request a coordinator.

        Raises TransactionalIdAuthorizationError, KafkaTimeoutError.
        """
        outcomes = self._calls.run(DescribeTransactionsApi(), transactional_ids, timer)
        return {transactional_id: outcome.get().description for transactional_id, outcome in outcomes.items()}

    def list_transactions(
        self,
        timer: Timer,
        *,
        states: Iterable[TransactionState] = (),
        producer_ids: Iterable[int] = (),
        longer_than_ms: int = -1,
    ) -> list[TransactionListing]:
        """The transactions of all live brokers, by transactional id, filtered by the brokers. `longer_than_ms`
        (KIP-994) asks for those begun longer ago.

        Transactions without the DESCRIBE permission are not in it. Raises KafkaTimeoutError naming the brokers that
        did not answer, UnsupportedVersionError where one is too old for a filter.
        """
        request = ListTransactionsRequest(tuple(state.value for state in states), tuple(producer_ids), longer_than_ms)
        round_ms: float = _LISTING_ROUND_MS
        while True:
            nodes = self._brokers(timer)
            round_timer = Timer(self._calls.clock, min(timer.remaining_ms, int(round_ms)))
            round_ms *= _LISTING_ROUND_GROWTH
            outcomes = self._calls.run(ListTransactionsApi(request), nodes, round_timer)
            timer.update()
            # All in one round: what a broker coordinated that has gone meanwhile is with one that may have answered.
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
        """The brokers that are live now."""
        if not self._calls.client.await_metadata_update(timer):
            why = self._calls.metadata.connection_failure or "No answer came."
            raise KafkaTimeoutError(f"The brokers were not told within {timer.timeout_ms} ms. Last: {why}")
        return self._calls.metadata.fetch().nodes
