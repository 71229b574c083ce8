"""Samples over two windows of 30 s: which samples count, for how long, and the time of a rate."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest

from spark_kafka_sink.common.windows import EXPIRY_MS, WINDOW_MS, Sample, Windows, WindowsByKey


@dataclass(slots=True, weakref_slot=True)
class Counts(Sample):
    things: int = 0
    max_size: int = 0


def count(windows: Windows[Counts], now_ms: int, things: int, size: int = 0) -> None:
    sample = windows.at(now_ms)
    sample.things += things
    sample.max_size = max(sample.max_size, size)


def seen(windows: Windows[Counts], now_ms: int) -> tuple[int, int, int]:
    """Return (total, recent, recent peak)."""
    reading = windows.read(now_ms)
    assert windows.total("things") == reading.total.things
    return reading.total.things, reading.recent.things, reading.recent.max_size


def test_reading_before_the_first_event_is_zero() -> None:
    windows = Windows(Counts)
    assert seen(windows, 5_000) == (0, 0, 0)
    assert windows.read(5_000).window_s == 30


def test_counts_within_a_window_go_into_one_sample() -> None:
    windows = Windows(Counts)
    count(windows, 1_000, 2, 7)
    first = windows.at(1_000)
    count(windows, 1_000 + WINDOW_MS - 1, 3, 5)
    assert windows.at(1_000 + WINDOW_MS - 1) is first
    assert seen(windows, 31_000) == (5, 5, 7)
    assert windows.at(1_000 + WINDOW_MS) is not first


def test_peak_expires_after_two_windows_and_a_total_does_not() -> None:
    windows = Windows(Counts)
    count(windows, 0, 1, 100)
    count(windows, 30_000, 10, 20)
    count(windows, 60_000, 100, 30)
    assert seen(windows, 89_999) == (111, 111, 100)
    assert seen(windows, 90_000) == (111, 110, 30)
    count(windows, 90_000, 1_000, 1)
    assert seen(windows, 90_000) == (1_111, 1_110, 30)
    assert seen(windows, 120_000) == (1_111, 1_100, 30)
    assert seen(windows, 150_000) == (1_111, 1_000, 1)
    assert seen(windows, 180_000) == (1_111, 0, 0)


def test_expired_samples_are_summed_up_for_any_time() -> None:
    windows = Windows(Counts)
    samples = {}
    for now_ms in range(0, 3_600_000, 10_000):
        count(windows, now_ms, 1)
        samples[windows.at(now_ms).start_ms] = weakref.ref(windows.at(now_ms))
    assert seen(windows, 3_599_999)[0] == 360
    assert len(samples) == 120
    assert sum(sample() is not None for sample in samples.values()) == 3


def test_sample_begins_with_its_first_event() -> None:
    windows = Windows(Counts)
    count(windows, 0, 1)
    count(windows, 80_000, 2)
    count(windows, 109_999, 3)
    assert seen(windows, 110_000) == (6, 5, 0)


@pytest.mark.parametrize(
    ("now_ms", "window_s"), [(0, 30), (10_000, 40), (29_999, 59.999), (30_000, 30), (59_000, 59), (89_999, 89.999)]
)
def test_rate_is_over_the_time_since_the_oldest_sample(now_ms: int, window_s: float) -> None:
    windows = Windows(Counts)
    count(windows, 0, 1)
    count(windows, 30_000, 1)
    assert windows.read(now_ms).window_s == window_s


def test_time_of_a_rate_moves_on_with_the_samples() -> None:
    windows = Windows(Counts)
    for now_ms in (0, 30_000, 60_000):
        count(windows, now_ms, 1)
    assert windows.read(90_000).window_s == 60
    assert windows.read(300_000).window_s == 30


def test_keys_are_counted_separately_and_idle_ones_are_forgotten() -> None:
    by_key = WindowsByKey(Counts)
    samples = []
    for now_ms in range(0, 3 * EXPIRY_MS, WINDOW_MS):
        by_key.at("busy", now_ms).things += 1
        by_key.at(f"once at {now_ms}", now_ms).things += 1
        samples.append(weakref.ref(by_key.at(f"once at {now_ms}", now_ms)))
    end_ms = 3 * EXPIRY_MS - WINDOW_MS
    read = by_key.read(end_ms)
    assert read["busy"].total.things == 3 * EXPIRY_MS // WINDOW_MS
    assert sum(sample() is not None for sample in samples) <= EXPIRY_MS // WINDOW_MS + 1
    assert set(by_key.read(end_ms + EXPIRY_MS + WINDOW_MS)) == set()
