"""Which connections have been idle too long (connections.max.idle.ms), in order of last use."""

from __future__ import annotations

from collections import OrderedDict


class IdleConnections:
    """Times of last use by connection id, least recently used first."""

    def __init__(self, max_idle_ms: int) -> None:
        """Below 0 nothing is ever idle too long."""
        self._max_idle_ms = max_idle_ms
        self._last_active_ms: OrderedDict[str, int] = OrderedDict()

    def touch(self, connection_id: str, now_ms: int) -> None:
        self._last_active_ms[connection_id] = now_ms
        self._last_active_ms.move_to_end(connection_id)

    def forget(self, connection_id: str) -> None:
        self._last_active_ms.pop(connection_id, None)

    def time_to_next(self, now_ms: int, at_most_ms: int) -> int:
        """How long until a connection has been idle too long, in ms, `at_most_ms`, never below 0."""
        if self._max_idle_ms >= 0 and self._last_active_ms:
            oldest_ms = next(iter(self._last_active_ms.values()))
            at_most_ms = min(at_most_ms, oldest_ms + self._max_idle_ms - now_ms)
        return max(at_most_ms, 0)

    def expired(self, now_ms: int) -> list[tuple[str, int]]:
        """Those idle too long, with how long in ms."""
        found: list[tuple[str, int]] = []
        if self._max_idle_ms < 0:
            return found
        for connection_id, active_ms in self._last_active_ms.items():
            if now_ms - active_ms < self._max_idle_ms:
                break
            found.append((connection_id, now_ms - active_ms))
        return found
