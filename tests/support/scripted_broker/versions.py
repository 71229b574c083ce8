"""The versions that brokers of some releases report, for the APIs that matter here (their `ApiVersions` answers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

VersionRanges: TypeAlias = Mapping[int, tuple[int, int]]
"""(oldest, latest) by api key."""

KAFKA_2_1: Final[VersionRanges] = {
    0: (0, 7), 1: (0, 10), 2: (0, 4), 3: (0, 7), 9: (0, 5), 10: (0, 2), 17: (0, 1), 18: (0, 2), 22: (0, 1),
    24: (0, 1), 25: (0, 1), 26: (0, 1), 28: (0, 2), 32: (0, 2), 36: (0, 0),
}  # fmt: skip

KAFKA_3_0: Final[VersionRanges] = {
    0: (0, 9), 1: (0, 12), 2: (0, 7), 3: (0, 11), 9: (0, 8), 10: (0, 4), 17: (0, 1), 18: (0, 3), 19: (0, 7),
    22: (0, 4), 24: (0, 3), 25: (0, 3), 26: (0, 3), 28: (0, 3), 32: (0, 4), 36: (0, 2), 61: (0, 0), 65: (0, 0),
    66: (0, 0),
}  # fmt: skip

KAFKA_4_1: Final[VersionRanges] = {
    0: (0, 13), 1: (4, 18), 2: (1, 11), 3: (0, 13), 9: (1, 10), 10: (0, 6), 17: (0, 1), 18: (0, 4), 19: (2, 7),
    22: (0, 5), 24: (0, 5), 25: (0, 4), 26: (0, 5), 28: (0, 5), 32: (1, 4), 36: (0, 2), 55: (0, 2), 61: (0, 0),
    65: (0, 0), 66: (0, 2),
}  # fmt: skip

TELEMETRY: Final[VersionRanges] = {71: (0, 0), 72: (0, 0)}
"""What a broker of Kafka 3.7 or newer offers beside these, if it has a plugin for metrics of clients."""
