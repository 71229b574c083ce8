"""What jobs/benchmark.py measured of one contender: the runs of all its processes, and the figures made of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple


class Timed(NamedTuple):
    seconds: float
    cpu_s: float


@dataclass
class Rate:
    """A contender in a cell, over all its processes."""

    cell: str
    contender: str
    records: int
    """Of one run."""
    security: str = "PLAINTEXT"
    """Kafka's security.protocol."""
    runs: list[Timed] = field(default_factory=list)
    worker_peak_bytes: int = 0
    records_expected: int = 0
    records_found: int = 0

    @property
    def records_per_s(self) -> float:
        return self.records / median(run.seconds for run in self.runs)

    @property
    def cpu_s_per_million(self) -> float:
        return median(run.cpu_s for run in self.runs) / self.records * 1e6

    def as_dict(self) -> dict[str, Any]:
        derived = {"records_per_s": self.records_per_s, "cpu_s_per_million": self.cpu_s_per_million}
        return {**asdict(self), "runs": [run._asdict() for run in self.runs], **derived}


@dataclass
class Latency:
    contender: str
    cell: str
    security: str = "PLAINTEXT"
    add_batch_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return median(self.add_batch_ms)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "median_ms": self.median_ms}
