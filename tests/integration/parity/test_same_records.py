"""The same rows through Spark's own Kafka sink and through this one: the same records, in the same partitions, in the
same order.

Times are compared by their kind; test_differences.py has their values. Each sink puts rows without a key or partition
where its batches need them, so their partitions are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from integration.parity.cases import CASES, Case
from integration.parity.conftest import Contents, Topics
from integration.parity.ways import BATCH_WAYS, stream_through, through_spark
from support.raw_batches import read_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CODECS = [case for case in CASES if case.name.endswith("batches") and "kafka.compression.type" in case.options]
WRITTEN = [
    pytest.param(case, way, id=f"{case.name}-{way}")
    for case in CASES
    for way in BATCH_WAYS
    if (way != "format" or case.by_format) and (way != "foreachPartition" or case.is_about_columns)
]
STREAMS = [case for case in CASES if case.streams]


def name_of(case: Case) -> str:
    return case.name


def comparable(case: Case, contents: Contents) -> object:
    if not case.is_placed:
        return Counter(record for records in contents.values() for record in records)
    if case.tasks > 1:
        return {place: Counter(records) for place, records in contents.items()}
    return contents


def written(case: Case, new_topics: Callable[..., Topics], write: Callable[[str, dict[str, str]], None]) -> Contents:
    """The records of the case's query and options, written by `write` into new topics."""
    topics = new_topics(case.query, case.partitions, case.topic_config)
    write(topics.fill_in(case.query), topics.options(case.options))
    return topics.contents()


@pytest.fixture(scope="module")
def from_spark() -> dict[str, Contents]:
    """Case → the records of Spark's sink, written once."""
    return {}


@pytest.mark.parametrize(("case", "way"), WRITTEN)
def test_a_batch_arrives_as_through_sparks_sink(
    frame_of: Callable[..., DataFrame],
    new_topics: Callable[..., Topics],
    from_spark: dict[str, Contents],
    case: Case,
    way: str,
) -> None:
    def through(write: Callable[[DataFrame, dict[str, str]], None]) -> Contents:
        return written(case, new_topics, lambda query, options: write(frame_of(query, case.rows, case.tasks), options))

    if case.name not in from_spark:
        from_spark[case.name] = through(through_spark)
    expected = from_spark[case.name]
    assert (sum(map(len, expected.values())) > 0) == (case.rows > 0)
    assert comparable(case, through(BATCH_WAYS[way])) == comparable(case, expected)


@pytest.mark.parametrize("case", STREAMS, ids=name_of)
def test_a_stream_arrives_as_through_sparks_sink(
    stream_of: Callable[..., DataFrame], new_topics: Callable[..., Topics], tmp_path: Path, case: Case
) -> None:
    def through(form: str) -> Contents:
        def write(query: str, options: dict[str, str]) -> None:
            stream_through(form, stream_of(query, case.rows, case.tasks), options, tmp_path / form)

        return written(case, new_topics, write)

    expected = through("kafka")
    assert sum(map(len, expected.values())) > 0
    assert comparable(case, through("kafka_sink")) == comparable(case, expected)


@pytest.mark.parametrize("case", CODECS, ids=name_of)
def test_batches_are_compressed_as_by_sparks_sink(
    frame_of: Callable[..., DataFrame], new_topics: Callable[..., Topics], case: Case
) -> None:
    def codec_of(write: Callable[[DataFrame, dict[str, str]], None]) -> set[str]:
        topics = new_topics("", 1)
        write(frame_of(case.query), topics.options(case.options))
        batches = read_batches(topics.servers, topics.names["topic"])
        return {
            batch.codec.name for batch in batches if batch.base_offset > 0
        }  # the first batch comes from the warm-up

    assert codec_of(BATCH_WAYS["format"]) == codec_of(through_spark) == {case.options["kafka.compression.type"]}
