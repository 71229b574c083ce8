"""Tables of time zones say what Python's zoneinfo says, and offsets have the forms of Java and Arrow."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.serialization.time_zones import FOUR_CENTURIES, zone_table

FIRST, LAST = -62_135_510_400, 253_402_214_400
"""Seconds of 0001-01-02 and 9999-12-31."""


def offset_at(name: str, seconds: int) -> int:
    zone = zone_table(name)
    flat = array("q", zone.changes)
    if seconds >= zone.repeats_from:
        seconds = zone.repeats_from - FOUR_CENTURIES + (seconds - zone.repeats_from) % FOUR_CENTURIES
    return flat[2 * bisect_right(flat[::2], seconds) - 1]


@pytest.mark.parametrize("name", ["Europe/Berlin", "America/New_York", "Africa/Casablanca", "Asia/Tokyo"])
def test_offsets_are_those_of_zoneinfo(name: str) -> None:
    rng, zone = random.Random(7), ZoneInfo(name)
    times = [rng.randint(FIRST, LAST) for _ in range(500)] + [rng.randint(-(10**9) * 5, 5 * 10**9) for _ in range(2000)]
    changes = array("q", zone_table(name).changes)[2::2]
    times += [change + step for change in changes for step in (-1, 0)]
    for seconds in times:
        expected = datetime.fromtimestamp(seconds, zone).utcoffset()
        assert expected is not None
        assert offset_at(name, seconds) == expected.total_seconds(), seconds


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("UTC", 0),
        ("Z", 0),
        ("GMT", 0),
        ("+05:30", 19_800),
        ("-5", -18_000),
        ("+0530", 19_800),
        ("UTC+1", 3600),
        ("GMT-08:00", -28_800),
        ("-04:56:02", -17_762),
    ],
)
def test_offsets_may_be_written_as_numbers(name: str, offset: int) -> None:
    assert offset_at(name, 0) == offset_at(name, LAST) == offset


@pytest.mark.parametrize("name", ["", "Europe", "Europe/Nowhere", "+18:01", "+05:60", "/etc/passwd", "CET+1x"])
def test_zone_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="time zone"):
        zone_table(name)
