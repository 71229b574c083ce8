"""This sink refuses the same rows as Spark's own Kafka sink, in the same words, and on the driver if Spark does so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from integration.parity.cases import REFUSALS, Refusal
from integration.parity.conftest import Topics
from integration.parity.ways import BATCH_WAYS, Write, through_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def sparks_sentence(text: str) -> str:
    """`text` without the names of the error's class and state."""
    return re.sub(r"^\[_LEGACY_ERROR_TEMP_\d+\] | SQLSTATE: \w+$", "", text)


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_both_sinks_refuse_in_the_same_words(
    spark: SparkSession, frame_of: Callable[..., DataFrame], new_topics: Callable[..., Topics], case: Refusal
) -> None:
    topics = new_topics(case.query, 4)
    words = topics.fill_in(case.words)

    def refused(way: str, write: Write) -> tuple[str, bool]:
        """The text of the refusal, and whether a task had begun."""
        frame, options = frame_of(topics.fill_in(case.query)), topics.options(case.options)
        group = f"{case.name} {way}"
        spark.sparkContext.setJobGroup(group, group)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is what is compared
            write(frame, options)
        return str(caught.value), bool(spark.sparkContext.statusTracker().getJobIdsForGroup(group))

    text, is_late = refused("spark", through_spark)
    assert words in text
    assert is_late != case.is_early
    assert not case.is_early or sparks_sentence(text) == words
    for way, write in BATCH_WAYS.items():
        by_rows = way == "foreachPartition"
        if by_rows and not case.by_rows:
            continue
        text, is_late = refused(way, write)
        assert topics.fill_in(case.ours or words) in text
        # only the tasks read the rows
        assert is_late != (case.is_early and not (by_rows and case.is_about_rows)), way
    assert not case.is_early or not topics.contents()
