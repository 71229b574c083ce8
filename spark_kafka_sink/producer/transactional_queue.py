"""The queue of a transactional producer's requests: one on its way at a time, and the coordinators they go to.

Guarded by the manager's lock. What an answer means is the manager's affair.
"""

from __future__ import annotations

import logging
from typing import Final

from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.producer import transactional_requests as requests
from spark_kafka_sink.producer.transactional_requests import TransactionalRequest
from spark_kafka_sink.protocol.coordinator_requests import coordinator_of
from spark_kafka_sink.protocol.messages import Message

log = logging.getLogger(__name__)

FIRST_RETRY_WHILE_CONCURRENT_MS: Final = 20
"""The transaction before this one is being completed, which takes milliseconds."""
_MOST_COORDINATORS: Final = 10_000
"""Tasks of batch writes without a prefix have new names each time, of a transaction and of a group."""


class TransactionalQueue:
    """Requests by priority, those of one priority in the order in which they came."""

    def __init__(self, retry_backoff: ExponentialBackoff) -> None:
        self.in_flight: TransactionalRequest | None = None
        self._retry_backoff = retry_backoff
        self._waiting: list[TransactionalRequest] = []
        self._coordinators: dict[tuple[int, str], Node] = {}

    def __contains__(self, request: TransactionalRequest) -> bool:
        return request in self._waiting

    def add(self, request: TransactionalRequest) -> None:
        self._waiting.append(request)

    def remove(self, request: TransactionalRequest) -> None:
        self._waiting.remove(request)

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def clear_for_abort(self) -> None:
        """Forget what waits and need not be said any more.

        What adds to the transaction and was sent before stays: its answer may have been lost, and only with one is it
        known whether there is a transaction to be ended.
        """
        self._waiting = [each for each in self._waiting if each.adds_to_transaction and each.attempts > 0]

    def first(self) -> TransactionalRequest | None:
        """The request to send next, when its backoff is over."""
        return min(self._waiting, key=lambda request: request.priority, default=None)

    def delay_ms(self, now_ms: int) -> int:
        """How long until one of the requests may go; FOREVER_MS where none waits, or one is on its way."""
        if self.in_flight is not None:
            return FOREVER_MS
        return max(0, min((request.not_before_ms - now_ms for request in self._waiting), default=FOREVER_MS))

    def with_coordinator(self, request: TransactionalRequest) -> tuple[TransactionalRequest, Node | None]:
        """`request` and the node it goes to (None: any), or the request by which to find that node out first."""
        place = request.coordinator
        if place is None or place in self._coordinators:
            return request, None if place is None else self._coordinators[place]
        key_type, key = place

        def found(body: Message) -> None:
            coordinator = coordinator_of(body, key)
            assert coordinator is not None
            self._coordinators[place] = Node(coordinator.node_id, coordinator.host, coordinator.port)
            if len(self._coordinators) > _MOST_COORDINATORS:
                del self._coordinators[next(iter(self._coordinators))]

        lookup = requests.find_coordinator(key_type, key, found, request.result)
        lookup.attempts, lookup.not_before_ms = request.attempts, request.not_before_ms
        self.add(lookup)
        return lookup, None

    def take(self, request: TransactionalRequest) -> bool:
        """`request` goes out now; False where it was taken back meanwhile."""
        if request not in self._waiting:
            return False
        self._waiting.remove(request)
        self.in_flight = request
        return True

    def again(self, request: TransactionalRequest, error_code: int, now_ms: int) -> None:
        """Queue `request` once more, after its backoff; `error_code` is 0 where there was no answer."""
        backoff_ms = self._retry_backoff.backoff_ms(request.attempts)
        if error_code == requests.CONCURRENT_TRANSACTIONS:
            backoff_ms = min(backoff_ms, FIRST_RETRY_WHILE_CONCURRENT_MS << min(request.attempts, 10))
        request.attempts += 1
        request.not_before_ms = now_ms + backoff_ms
        log.debug("Sending %r again in %d ms (error code %d)", request.request, backoff_ms, error_code)
        if request not in self._waiting:
            self.add(request)

    def forget_coordinator(self, request: TransactionalRequest) -> None:
        """The node that `request` went to is not its coordinator any more, or cannot be reached."""
        if request.coordinator is not None:
            self._coordinators.pop(request.coordinator, None)
