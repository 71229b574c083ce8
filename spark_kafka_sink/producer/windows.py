"""Counts with a memory of the last while: totals since the start, and sums and peaks over two windows of 30 s, Kafka's
default.

One thread writes a `Windows`, or several under one lock; any thread reads it without that lock. A reader may find one
count of an event and not yet another: every count by itself is right. Reference:
org.apache.kafka.common.metrics.stats.SampledStat, Rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final, Generic, TypeVar

from spark_kafka_sink.client.backoff import NEVER_MS

WINDOW_MS: Final = 30_000
"""metrics.sample.window.ms of the Java client."""
_KEPT_MS: Final = 3 * WINDOW_MS
"""A sample counts until all of it is older than metrics.num.samples = 2 windows."""


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

    def _merged(self, samples: Iterable[S]) -> S:
        merged = self._sample_class(NEVER_MS)
        for sample in samples:
            for name in self._names:
                one, other = getattr(merged, name), getattr(sample, name)
                setattr(merged, name, max(one, other) if name.startswith("max_") else one + other)
        return merged


def _counts(sample: Sample, now_ms: int) -> bool:
    return now_ms - sample.start_ms < _KEPT_MS
