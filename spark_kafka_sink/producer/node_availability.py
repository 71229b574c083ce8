"""Which brokers keep taking requests (partitioner.availability.timeout.ms, KIP-794). Sender thread."""

from __future__ import annotations

from collections.abc import Set


class NodeAvailability:
    """A node with records to send that has not been ready for `timeout_ms` is not available; 0 turns this off."""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._waiting_since_ms: dict[int, int] = {}

    def update(self, node_id: int, is_ready: bool, now_ms: int) -> None:
        """There are records for the node, which takes a request now, or does not."""
        if is_ready:
            self._waiting_since_ms.pop(node_id, None)
        else:
            self._waiting_since_ms.setdefault(node_id, now_ms)

    def keep(self, waiting: Set[int]) -> None:
        """Forget all other nodes: nothing waits for them any more, so that they may be tried again."""
        if self._waiting_since_ms:
            for node_id in self._waiting_since_ms.keys() - waiting:
                del self._waiting_since_ms[node_id]

    def unavailable(self, now_ms: int) -> Set[int]:
        if self._timeout_ms == 0 or not self._waiting_since_ms:
            return frozenset()
        return {
            node_id for node_id, since_ms in self._waiting_since_ms.items() if now_ms - since_ms >= self._timeout_ms
        }
