"""Rows of many topics, grouped by topic."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.record.columns import RecordColumns, by_topic


def split(topics: Sequence[str | None]) -> dict[str, list[bytes]]:
    columns = RecordColumns(pa.array([b"%d" % row for row in range(len(topics))], pa.binary()))
    return {topic: part.value.to_pylist() for topic, part in by_topic(columns, pa.array(topics, pa.string()), "null!")}


@settings(derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(["orders", "flights", "ticks", "é"]), max_size=60))
def test_every_topic_gets_its_rows_in_their_order(topics: list[str]) -> None:
    expected: dict[str, list[bytes]] = {}
    for row, topic in enumerate(topics):
        expected.setdefault(topic, []).append(b"%d" % row)
    assert split(topics) == expected


def test_rows_of_one_topic_are_not_copied() -> None:
    columns = RecordColumns(pa.array([b"a", b"b"]))
    ((topic, part),) = by_topic(columns, pa.array(["orders", "orders"]), "null!")
    assert topic == "orders"
    assert part is columns


def test_dictionary_column_and_its_slice_are_accepted() -> None:
    topics = pa.array(["x", "b", "a", "b"]).dictionary_encode()[1:]
    columns = RecordColumns(pa.array([b"0", b"1", b"2"]))
    found = {topic: part.value.to_pylist() for topic, part in by_topic(columns, topics, "null!")}
    assert found == {"b": [b"0", b"2"], "a": [b"1"]}


def test_null_topic_is_refused_with_the_given_text() -> None:
    with pytest.raises(SchemaError, match="null!"):
        split(["orders", None])


@pytest.mark.parametrize("others", [[], [b"orders"]])
def test_topic_that_is_not_utf_8_becomes_an_impossible_name(others: list[bytes]) -> None:
    """Spark accepts any bytes as a string. The producer refuses the name like any other invalid name."""
    names = [b"\xffa", *others]
    topics = pa.array(names, pa.binary()).view(pa.string())
    columns = RecordColumns(pa.array(names, pa.binary()))
    assert {topic for topic, _ in by_topic(columns, topics, "null!")} == {"\ufffda", *map(bytes.decode, others)}
