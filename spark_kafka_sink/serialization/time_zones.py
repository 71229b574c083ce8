"""Time zones as tables of their changes, which the encoders of JSON search without Python's datetime.

The calendar repeats every 400 years, to the day of the week, and so do the rules of every zone after the changes that
are written down. So a table ends 400 years after those. No state but a cache; any thread.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from spark_kafka_sink.common.errors import ConfigError

FOUR_CENTURIES: Final = 146_097 * 86_400
"""Seconds."""
_LEAST: Final = -(1 << 62)
_FIRST, _RULES, _END = datetime(1800, 1, 1), datetime(2090, 1, 1), datetime(2490, 1, 1)
"""Before the first, zones have the mean time of their place. From `_RULES` to `_END` they follow a yearly rule."""
_OFFSET: Final = re.compile(r"(?:UTC|GMT|UT)?(?:([+-])(\d{1,2})(?::?(\d\d)(?::?(\d\d))?)?)?|Z")


class Zone(NamedTuple):
    """When the difference to UTC changes."""

    changes: bytes
    """Pairs of 64 bits: from which second since 1970, and by how many seconds the zone is ahead of UTC then."""
    repeats_from: int
    """From this second on, the last 400 years repeat."""


@lru_cache(maxsize=16)
def zone_table(name: str) -> Zone:
    """Return the table of a zone: a name such as `Europe/Berlin`, or an offset such as `+05:30` or `UTC`.

    Raises ConfigError for a zone that is not known.
    """
    offset = _OFFSET.fullmatch(name) if name else None
    if offset is not None:
        hours, minutes, seconds = (int(part or 0) for part in offset.groups()[1:])
        ahead = hours * 3600 + minutes * 60 + seconds
        if minutes > 59 or seconds > 59 or ahead > 18 * 3600:
            raise ConfigError(f"The time zone '{name}' is not known: an offset is at most 18:00.")
        return _table([(_LEAST, -ahead if offset[1] == "-" else ahead)])
    try:
        zone = ZoneInfo(name)
    except (OSError, ValueError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        raise ConfigError(
            f"The time zone '{name}' is not known here. Use a name such as Europe/Berlin, or an offset such as +05:30."
        ) from None
    return _table(list(_changes(zone)))


def _table(changes: list[tuple[int, int]]) -> Zone:
    flat = array("q")
    for change in changes:
        flat.extend(change)
    return Zone(flat.tobytes(), _seconds(_END))


def _seconds(time: datetime) -> int:
    return int(time.replace(tzinfo=UTC).timestamp())


def _changes(zone: tzinfo) -> Iterator[tuple[int, int]]:
    """Yield when the offset changes, and to what.

    It looks at every third day: no zone has had an offset for less (Freetown in 1939: 4 days), and under a yearly rule
    none for less than 28.
    """
    time = _FIRST.replace(tzinfo=zone)
    known = zone.utcoffset(time)
    yield _LEAST, _whole(known)
    for until, step in ((_RULES, timedelta(days=3)), (_END, timedelta(days=28))):
        while time.replace(tzinfo=None) < until:
            later = time + step
            offset = zone.utcoffset(later)
            if offset != known:
                yield _change_between(zone, time, later, _whole(known)), _whole(offset)
                known = offset
            time = later


def _whole(offset: timedelta | None) -> int:
    assert offset is not None
    return round(offset.total_seconds())


def _change_between(zone: tzinfo, time: datetime, later: datetime, known: int) -> int:
    """Return the first second whose offset is not `known`."""
    before, after = _seconds(time) - 2 * 86_400, _seconds(later) + 2 * 86_400
    while after - before > 1:
        middle = (before + after) // 2
        if _whole(datetime.fromtimestamp(middle, zone).utcoffset()) == known:
            before = middle
        else:
            after = middle
    return after
