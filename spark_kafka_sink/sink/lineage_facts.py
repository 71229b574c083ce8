"""The facts in an event of OpenLineage, as plain values without objects of Spark or OpenLineage.

Below the modules that find the facts (lineage.py), make events of them (lineage_events.py) and send these
(lineage_sender.py). Nothing here is a secret, so an event cannot have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spark_kafka_sink.common.batch_report import BatchReport, WrittenPartition
from spark_kafka_sink.sink.batch_run import QueryIds


class Dataset(NamedTuple):
    """By OpenLineage's rules of names."""

    namespace: str
    name: str


class Parent(NamedTuple):
    """The run that started this one, as a scheduler gives it."""

    namespace: str
    name: str
    run_id: str


class Field(NamedTuple):
    """A column, or a field of a struct."""

    name: str
    type: str
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What events say of one batch, which is a run of a job."""

    run_id: str
    namespace: str
    job: str
    is_stream: bool
    cluster: str
    """The namespace of topics: `kafka://host:port` of the first bootstrap server."""
    topic: str | None
    """The option `topic`."""
    fields: tuple[Field, ...]
    inputs: tuple[Dataset, ...] = ()
    parent: Parent | None = None
    root: Parent | None = None


def sums_by_topic(places: Iterable[WrittenPartition]) -> Mapping[str, tuple[int, int]]:
    """Return the records and bytes of each topic."""
    sums: dict[str, tuple[int, int]] = {}
    for each in places:
        records, size = sums.get(each.topic, (0, 0))
        sums[each.topic] = (records + each.records, size + each.bytes)
    return sums


class LineageEvent(NamedTuple):
    """A START, or with the `report` of the batch its end."""

    run: RunFacts
    time_ms: int
    """Milliseconds since 1970."""
    ids: QueryIds
    report: BatchReport | None
