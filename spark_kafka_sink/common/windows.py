"""Counts with a memory of the last while: totals since the start, and sums and peaks over two windows of 30 s, Kafka's
default.

One thread writes a `Windows`, or several under one lock; any thread reads it without that lock. A reader may find one
count of an event and not yet another: every count by itself is right. Reference:
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
"""How long the metrics of an idle topic or node are kept (INACTIVE_SENSOR_EXPIRATION_TIME_SECONDS)."""


@dataclass(slots=True)
class Sample:
    """What was counted from `start_ms` on, for one window. A subclass adds its counts, which begin at 0: sums, and
    peaks, which are named `max_...`.
    """

    start_ms: int


S = TypeVar("S", bound=Sample)


@dataclass(frozen=True, slots=True)
class Reading(Generic[S]):
    """`total` since the start, its peaks without meaning; `recent` in the windows that count, which took
    `window_s` seconds.
    """

    total: S
    recent: S
    window_s: float


class Windows(Generic[S]):
    """Samples one after the other; those that no longer count are summed up."""

    def __init__(self, sample_class: type[S]) -> None:
        self._sample_class = sample_class
        self._names = [field.name for field in fields(sample_class) if field.name != "start_ms"]
        self._newest = sample_class(NEVER_MS)
        self._past_and_kept: tuple[S, tuple[S, ...]] = (sample_class(NEVER_MS), (self._newest,))

    def at(self, now_ms: int) -> S:
        """The sample to count in. For the writer alone; keep it no longer than for one event."""
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
        """What there is now. Any thread.

        As in Kafka, a rate is over the time since the oldest sample began, and over one window more where that is less
        than one.
        """
        past, kept = self._past_and_kept
        recent = [sample for sample in kept if _counts(sample, now_ms)]
        window_ms = now_ms - recent[0].start_ms if recent else 0
        if window_ms < WINDOW_MS:
            window_ms += WINDOW_MS
        return Reading(self._merged([past, *kept]), self._merged(recent), window_ms / 1000)

    def is_idle(self, now_ms: int) -> bool:
        """Nothing was counted for EXPIRY_MS. Any thread."""
        return now_ms - self._newest.start_ms - WINDOW_MS >= EXPIRY_MS

    def _merged(self, samples: Iterable[S]) -> S:
        merged = self._sample_class(NEVER_MS)
        for sample in samples:
            for name in self._names:
                one, other = getattr(merged, name), getattr(sample, name)
                setattr(merged, name, max(one, other) if name.startswith("max_") else one + other)
        return merged


class WindowsByKey(Generic[S]):
    """A `Windows` for each key, such as a topic. A key that was not counted for EXPIRY_MS is forgotten, and its totals
    with it, so that not more keys are kept than are in use.

    Threads as for `Windows`: a reader sees the keys of one moment.
    """

    def __init__(self, sample_class: type[S]) -> None:
        self._sample_class = sample_class
        self._by_key: dict[str, Windows[S]] = {}

    def at(self, key: str, now_ms: int) -> S:
        """The sample of `key` to count in, as `Windows.at`."""
        windows = self._by_key.get(key)
        if windows is None:
            windows = Windows(self._sample_class)
            # Another dict each time: a reader may be going over the old one.
            self._by_key = {**self._in_use(now_ms), key: windows}
        return windows.at(now_ms)

    def read(self, now_ms: int) -> dict[str, Reading[S]]:
        """What there is now of each key in use. Any thread."""
        return {key: windows.read(now_ms) for key, windows in self._in_use(now_ms).items()}

    def _in_use(self, now_ms: int) -> dict[str, Windows[S]]:
        return {key: windows for key, windows in self._by_key.items() if not windows.is_idle(now_ms)}


def average(amount: float, count: int) -> float:
    """The mean, NaN where there was nothing."""
    return amount / count if count else math.nan


def peak(highest: float, count: int) -> float:
    """The maximum, NaN where there was nothing."""
    return float(highest) if count else math.nan


def _counts(sample: Sample, now_ms: int) -> bool:
    return now_ms - sample.start_ms < _KEPT_MS
