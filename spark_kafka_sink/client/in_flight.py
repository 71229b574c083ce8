"""The requests on the wire, by node, in the order sent: a node answers in that order. The I/O thread owns it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.client.seams import ClientRequest, ClientResponse
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError
from spark_kafka_sink.network.channel import NetworkSend
from spark_kafka_sink.protocol.versions import ApiKey, Message, MessageType

_TELEMETRY: Final = frozenset({ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY})


@dataclass(slots=True)
class InFlightRequest:
    """A request that the selector got. `is_internal`: the client sent it for itself and handles its response."""

    request: ClientRequest
    version: int
    request_type: MessageType
    send: NetworkSend
    sent_ms: int
    is_internal: bool
    times_out_ms: int = field(init=False)
    """The time after which the request has timed out. A throttle moves it."""

    def __post_init__(self) -> None:
        self.times_out_ms = self.sent_ms + self.request.request_timeout_ms

    def completed(self, body: Message, now_ms: int) -> ClientResponse:
        return ClientResponse(self.request, received_ms=now_ms, version=self.version, body=body)

    def disconnected(
        self,
        now_ms: int,
        timed_out: bool = False,
        authentication_error: KafkaError | None = None,
        protocol_error: KafkaError | None = None,
    ) -> ClientResponse:
        return ClientResponse(
            self.request,
            received_ms=now_ms,
            version=self.version,
            disconnected=True,
            timed_out=timed_out,
            authentication_error=authentication_error,
            protocol_error=protocol_error,
        )


class InFlightRequests:
    """At most `max_per_connection` requests for each node (org.apache.kafka.clients.InFlightRequests)."""

    def __init__(self, max_per_connection: int) -> None:
        self._max_per_connection = max_per_connection
        self._queues: dict[str, deque[InFlightRequest]] = {}

    def add(self, request: InFlightRequest) -> None:
        self._queues.setdefault(request.request.destination, deque()).append(request)

    def oldest(self, node_id: str) -> InFlightRequest | None:
        """Return the request that the node answers next."""
        queue = self._queues.get(node_id)
        return queue[0] if queue else None

    def newest(self, node_id: str) -> InFlightRequest | None:
        """Return the request that was sent last."""
        queue = self._queues.get(node_id)
        return queue[-1] if queue else None

    def complete_oldest(self, node_id: str) -> InFlightRequest:
        return self._queue(node_id).popleft()

    def complete_newest(self, node_id: str) -> InFlightRequest:
        return self._queue(node_id).pop()

    def can_send_more(self, node_id: str) -> bool:
        """Return whether the newest request was written completely, and the limit allows one more.

        Telemetry does not count: records must not wait for it.
        """
        queue = self._queues.get(node_id)
        if not queue:
            return True
        limit = self._max_per_connection
        return queue[-1].send.remaining == 0 and (len(queue) < limit or self._counted(queue) < limit)

    @staticmethod
    def _counted(queue: Iterable[InFlightRequest]) -> int:
        return sum(each.request.request.api_key not in _TELEMETRY for each in queue)

    def count(self, node_id: str | None = None) -> int:
        """Return the number of requests in flight to the node, or to all nodes."""
        if node_id is not None:
            return len(self._queues.get(node_id, ()))
        return sum(map(len, self._queues.values()))

    def clear(self, node_id: str) -> list[InFlightRequest]:
        """Remove and return the node's requests, in the order sent."""
        return list(self._queues.pop(node_id, ()))

    def add_throttle(self, node_id: str, throttle_ms: int) -> None:
        """The node delays its answers. That time does not count against the timeout of requests in flight."""
        for request in self._queues.get(node_id, ()):
            request.times_out_ms += throttle_ms

    def nodes_with_timed_out_requests(self, now_ms: int) -> list[str]:
        if now_ms <= self._first_timeout_ms():
            return []
        return [
            node_id
            for node_id, queue in self._queues.items()
            if any(now_ms > request.times_out_ms for request in queue)
        ]

    def next_timeout_ms(self, now_ms: int) -> int:
        """Return the ms until the first request times out."""
        first_ms = self._first_timeout_ms()
        return FOREVER_MS if first_ms == FOREVER_MS else max(first_ms + 1 - now_ms, 0)

    def _first_timeout_ms(self) -> int:
        """Each loop turn calls it twice, so it allocates nothing."""
        first_ms = FOREVER_MS
        for queue in self._queues.values():
            for request in queue:
                if request.times_out_ms < first_ms:
                    first_ms = request.times_out_ms
        return first_ms

    def _queue(self, node_id: str) -> deque[InFlightRequest]:
        queue = self._queues.get(node_id)
        if not queue:
            raise IllegalStateError(f"Nothing is in flight to node {node_id}.")
        return queue
