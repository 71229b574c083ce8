"""Find the known name that a misspelt one stands for. No I/O."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

_MOST_EDITS: Final = 2
_LEAST_RATIO: Final = 0.76
"""Similarity of difflib's. At 0.75 the consumer's session.timeout.ms would lead to transaction.timeout.ms."""


def nearest(given: str, known: Collection[str]) -> str | None:
    """Return the name that `given` likely means: at most two letters off, or else very similar. None if none is near.

    Two neighbours that changed places count as one letter.
    """
    as_long = (name for name in known if abs(len(name) - len(given)) <= _MOST_EDITS)
    edits, name = min(((_edits(given, name), name) for name in as_long), default=(_MOST_EDITS + 1, ""))
    if edits <= _MOST_EDITS:
        return name
    return next(iter(difflib.get_close_matches(given, known, n=1, cutoff=_LEAST_RATIO)), None)


def _edits(one: str, other: str) -> int:
    """Distance in letters that are put in, left out, replaced, or swapped with their neighbour."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]
