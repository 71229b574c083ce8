"""A time limit and the time within it, read once per step, so that one step sees one time."""

from __future__ import annotations

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.common.clock import Clock


class Timer:
    """Runs out `timeout_ms` after it was made (org.apache.kafka.common.utils.Timer). Belongs to one thread."""

    def __init__(self, clock: Clock, timeout_ms: int) -> None:
        self._clock = clock
        self.timeout_ms = timeout_ms
        self.now_ms = clock.now_ms()
        """The time as of the last `update`."""
        self._deadline_ms = min(self.now_ms + timeout_ms, FOREVER_MS)

    def update(self) -> None:
        """Read the clock."""
        self.now_ms = max(self._clock.now_ms(), self.now_ms)

    @property
    def remaining_ms(self) -> int:
        return max(self._deadline_ms - self.now_ms, 0)

    @property
    def is_expired(self) -> bool:
        return self.now_ms >= self._deadline_ms
