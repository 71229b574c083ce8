"""Requests that wait for their node to be ready, in order per node. Any thread may add; only the poller takes out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from spark_kafka_sink.client.client_request import ClientRequest
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import KafkaError


class UnsentRequest(NamedTuple):
    """A request, and how to tell whoever waits that it will not be sent."""

    request: ClientRequest
    fail: Callable[[KafkaError], None]


class UnsentRequests:
    """A queue a node, behind one lock that is never held while anything else happens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Node, deque[UnsentRequest]] = {}

    def put(self, node: Node, request: UnsentRequest) -> None:
        with self._lock:
            self._queues.setdefault(node, deque()).append(request)

    def nodes(self) -> list[Node]:
        """Nodes with something to send."""
        with self._lock:
            return [node for node, queue in self._queues.items() if queue]

    def first(self, node: Node) -> UnsentRequest | None:
        with self._lock:
            queue = self._queues.get(node)
            return queue[0] if queue else None

    def take_first(self, node: Node) -> None:
        """Take out what `first` gave."""
        with self._lock:
            self._queues[node].popleft()

    def take_all(self, node: Node) -> list[UnsentRequest]:
        with self._lock:
            return list(self._queues.pop(node, ()))

    def take_expired(self, now_ms: int) -> list[UnsentRequest]:
        """Take out those that have waited longer than their time-out."""
        expired: list[UnsentRequest] = []
        with self._lock:
            for node, queue in self._queues.items():
                waiting: deque[UnsentRequest] = deque()
                for each in queue:
                    is_late = now_ms - each.request.created_ms > each.request.request_timeout_ms
                    (expired if is_late else waiting).append(each)
                self._queues[node] = waiting
        return expired

    def clean(self) -> None:
        """Forget nodes with nothing to send."""
        with self._lock:
            self._queues = {node: queue for node, queue in self._queues.items() if queue}

    def count(self, node: Node | None = None) -> int:
        with self._lock:
            queues = self._queues.values() if node is None else [self._queues.get(node, deque())]
            return sum(map(len, queues))
