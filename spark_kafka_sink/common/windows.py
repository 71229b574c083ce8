"""Counts over time: totals since the start, and sums and peaks over two windows of 30 s, as by default in Kafka.

One thread writes a `Windows`, or several under one lock. Any thread reads it without that lock. A reader may see one
count of an event before another; each count by itself is right. Reference:
org.apache.kafka.common.metrics.stats.SampledStat, Rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final, Generic, TypeVar

from spark_kafka_sink.common.clock import NEVER_MS

WINDOW_MS: Final = 30_000
"""metrics.sample.window.ms of the Java client."""
_KEPT_MS: Final = 3 * WINDOW_MS
"""A sample counts until all of it is older than metrics.num.samples = 2 windows."""
EXPIRY_MS: Final = 3_600_000
"""The time that metrics of an idle topic or node are kept (INACTIVE_SENSOR_EXPIRATION_TIME_SECONDS)."""


@dataclass(slots=True)
class Sample:
    """The counts of one window from `start_ms` on.

    A subclass adds its counts, which begin at 0: sums, and peaks with names `max_...`.
    """

    start_ms: int


S = TypeVar("S", bound=Sample)


@dataclass(frozen=True, slots=True)
class Reading(Generic[S]):
    """`total` since the start, whose peaks have no meaning; `recent` over the windows that count.

    These windows took `window_s` seconds.
    """

    total: S
    recent: S
    window_s: float


class Windows(Generic[S]):
    """Consecutive samples. Old ones are added up."""

    def __init__(self, sample_class: type[S]) -> None:
        self._sample_class = sample_class
        self._names = [field.name for field in fields(sample_class) if field.name != "start_ms"]
        self._newest = sample_class(NEVER_MS)
        self._past_and_kept: tuple[S, tuple[S, ...]] = (sample_class(NEVER_MS), (self._newest,))

    def at(self, now_ms: int) -> S:
        """Return the sample to count in. Only for the writer, and only for one event."""
        newest = self._newest
        if now_ms - newest.start_ms < WINDOW_MS:
            return newest
        return self._begin_sample(now_ms)

    def _begin_sample(self, now_ms: int) -> S:
        past, kept = self._past_and_kept
        over = [sample for sample in kept if not _counts(sample, now_ms)]
        self._newest = self._sample_class(now_ms)
        self._past_and_kept = (self._merged([past, *over]), (*kept[len(over) :], self._newest))
        return self._newest

    def read(self, now_ms: int) -> Reading[S]:
        """Return the current counts. Any thread.

        As in Kafka, a rate is over the time since the oldest sample began, plus one window if that is less than one.
        """
        past, kept = self._past_and_kept
        recent = [sample for sample in kept if _counts(sample, now_ms)]
        window_ms = now_ms - recent[0].start_ms if recent else 0
        if window_ms < WINDOW_MS:
            window_ms += WINDOW_MS
        return Reading(self._merged([past, *kept]), self._merged(recent), window_ms / 1000)

    def total(self, name: str) -> int:
        """Return the total of one count since the start. Any thread."""
        past, kept = self._past_and_kept
        return sum(getattr(sample, name) for sample in (past, *kept))

    def is_idle(self, now_ms: int) -> bool:
        """Return whether nothing was counted for EXPIRY_MS. Any thread."""
        return now_ms - self._newest.start_ms - WINDOW_MS >= EXPIRY_MS

    def _merged(self, samples: Iterable[S]) -> S:
        merged = self._sample_class(NEVER_MS)
        for sample in samples:
            for name in self._names:
                one, other = getattr(merged, name), getattr(sample, name)
                setattr(merged, name, max(one, other) if name.startswith("max_") else one + other)
        return merged


class WindowsByKey(Generic[S]):
    """A `Windows` for each key, such as a topic.

    A key without counts for EXPIRY_MS is forgotten with its totals, so that the number of keys is limited. Threads as
    for `Windows`: a reader sees the keys of one moment.
    """

    def __init__(self, sample_class: type[S]) -> None:
        self._sample_class = sample_class
        self._by_key: dict[str, Windows[S]] = {}

    def at(self, key: str, now_ms: int) -> S:
        """Return the sample of `key` to count in, as `Windows.at`."""
        windows = self._by_key.get(key)
        if windows is None:
            windows = Windows(self._sample_class)
            # A new dict, because a reader may be iterating over the old one.
            self._by_key = {**self._in_use(now_ms), key: windows}
        return windows.at(now_ms)

    def read(self, now_ms: int) -> dict[str, Reading[S]]:
        """Return the current counts of each key in use. Any thread."""
        return {key: windows.read(now_ms) for key, windows in self._in_use(now_ms).items()}

    def _in_use(self, now_ms: int) -> dict[str, Windows[S]]:
        return {key: windows for key, windows in self._by_key.items() if not windows.is_idle(now_ms)}


def average(amount: float, count: int) -> float:
    """Return the mean, or NaN for no events."""
    return amount / count if count else math.nan


def peak(highest: float, count: int) -> float:
    """Return the maximum, or NaN for no events."""
    return float(highest) if count else math.nan


def _counts(sample: Sample, now_ms: int) -> bool:
    return now_ms - sample.start_ms < _KEPT_MS
