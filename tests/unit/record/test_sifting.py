"""Rows that can never be written are found among good ones, each with its reason; the others are not changed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import (
    InvalidTopicError,
    KafkaError,
    RecordTooLargeError,
    SchemaError,
    SerializationError,
)
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.encoder import record_size_upper_bound
from spark_kafka_sink.record.sifting import (
    Columns,
    LimitsOf,
    RowContent,
    SiftRules,
    TopicLimits,
    Unwritable,
    contents,
    lone_batch_size,
    sendable_size,
    unwritable_rows,
    without_rows,
)

HEADER_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
RAW_HEADERS: Final = pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))
MICROS: Final = pa.timestamp("us", "UTC")
NOON: Final = 1_700_000_000_000
ADVICE: Final = " Allow it."


def rules(**changes: Any) -> SiftRules:
    usual: dict[str, Any] = {
        "topic": "orders",
        "early_advice": ADVICE,
        "max_bytes": 1_000,
        "size_setting": "kafka.max.request.size",
        "codec": codec_for("none"),
    }
    return SiftRules(**(usual | changes))


def limits(**given: Any) -> LimitsOf:
    return lambda _topic, _highest, _largest=None: TopicLimits(**given)


def names(*cells: str | bytes | None) -> pa.Array:
    return pa.array(cells, pa.string())


def headers(*rows: Sequence[tuple[str | None, bytes | None]] | None) -> pa.Array:
    return pa.array(
        [None if row is None else [{"key": key, "value": value} for key, value in row] for row in rows], HEADER_TYPE
    )


# (name, a column with a good cell, a bad one and a good one, changes of the rules, limits, error, text)
FAULTS: Final = [
    ("null topic", {"topic": names("a", None, "b")}, {"topic": None}, {}, SchemaError, "the topic is null"),
    ("topic with a space", {"topic": names("a", "b c", "b")}, {"topic": None}, {}, InvalidTopicError, "not valid"),
    ("empty topic", {"topic": names("a", "", "b")}, {"topic": None}, {}, InvalidTopicError, "not valid"),
    ("topic of dots", {"topic": names("a", "..", "b")}, {"topic": None}, {}, InvalidTopicError, "not valid"),
    ("long topic", {"topic": names("a", "t" * 250, "b")}, {"topic": None}, {}, InvalidTopicError, "not valid"),
    (
        "internal topic",
        {"topic": names("a", "__consumer_offsets", "b")},
        {"topic": None},
        {},
        InvalidTopicError,
        "Kafka's own",
    ),
    (
        "negative partition",
        {"partition": pa.array([0, -1, None], pa.int32())},
        {},
        {},
        SerializationError,
        "partition -1 is negative",
    ),
    (
        "partition that the topic does not have",
        {"partition": pa.array([2, 3, None], pa.int32())},
        {},
        {"partitions": 3},
        SerializationError,
        "partition 3: the topic has 0 to 2",
    ),
    ("before 1970", {"timestamp": pa.array([NOON, -2, -1])}, {}, {}, SchemaError, "-2 ms, which lies before 1970"),
    (
        "date before 1970",
        {"timestamp": pa.array([NOON * 1000, -1, -1000], MICROS)},
        {},
        {},
        SchemaError,
        "-1 us, which lies before 1970",
    ),
    ("microseconds", {"timestamp": pa.array([NOON, NOON * 1000, None])}, {}, {}, SchemaError, "looks like microseco"),
    ("late", {"timestamp": pa.array([1, 2**62, 2], pa.timestamp("s", "UTC"))}, {}, {}, SchemaError, "after the year"),
    ("seconds", {"timestamp": pa.array([NOON, 1_700_000_000, NOON])}, {}, {}, SchemaError, "looks like seconds"),
    (
        "header without a name",
        {"headers": headers([("a", b"1")], [("b", None), (None, b"2")], None)},
        {},
        {},
        SerializationError,
        "a header has no name",
    ),
    (
        "header name that is not UTF-8",
        {
            "headers": pa.array(
                [None, [{"key": b"\xff", "value": b""}], [{"key": "ö".encode(), "value": None}]], RAW_HEADERS
            )
        },
        {},
        {},
        SerializationError,
        "not UTF-8",
    ),
    (
        "above max.request.size",
        {"value": pa.array([b"v", b"x" * 1_000, b"w"])},
        {},
        {},
        RecordTooLargeError,
        r"takes 1086 bytes, more than kafka\.max\.request\.size=1000",
    ),
    (
        "above max.message.bytes",
        {"value": pa.array([b"v", b"x" * 500, b"w"])},
        {},
        {"max_message_bytes": 500},
        RecordTooLargeError,
        r"takes \d+ bytes, more than max\.message\.bytes=500 of the topic",
    ),
]


def columns(given: Columns) -> Columns:
    return {"value": pa.array([b"v", None, b"w"]), "key": names("k", "", None), **given}


@pytest.mark.parametrize(("given", "changes", "said", "error", "text"), [each[1:] for each in FAULTS])
class TestEachFault:
    def test_is_found_between_good_rows(
        self, given: Columns, changes: dict[str, Any], said: dict[str, Any], error: type[KafkaError], text: str
    ) -> None:
        (found,) = unwritable_rows(columns(given), rules(**changes), limits(**said))
        assert (found.row, found.error) == (1, error)
        with pytest.raises(error, match=text):
            raise found.error(found.reason)

    def test_is_found_in_slices_and_in_every_row(
        self, given: Columns, changes: dict[str, Any], said: dict[str, Any], error: type[KafkaError], text: str
    ) -> None:
        whole = columns(given)
        for first, length, expected in ((1, 2, [0]), (0, 2, [1]), (1, 1, [0]), (2, 1, []), (0, 0, [])):
            part = {name: column.slice(first, length) for name, column in whole.items()}
            assert [each.row for each in unwritable_rows(part, rules(**changes), limits(**said))] == expected
        every = {name: column.take(pa.array([1] * 5)) for name, column in whole.items()}
        found = unwritable_rows(every, rules(**changes), limits(**said))
        assert [(each.row, each.error) for each in found] == [(row, error) for row in range(5)]
        assert len(without_rows(every, found)["value"]) == 0

    def test_other_rows_stay_in_order(
        self, given: Columns, changes: dict[str, Any], said: dict[str, Any], error: type[KafkaError], text: str
    ) -> None:
        whole = columns(given)
        good = without_rows(whole, unwritable_rows(whole, rules(**changes), limits(**said)))
        assert {name: column.to_pylist() for name, column in good.items()} == {
            name: [column[0].as_py(), column[2].as_py()] for name, column in whole.items()
        }


def test_good_rows_are_not_copied() -> None:
    whole = columns({"topic": names("a", "b", "a"), "timestamp": pa.array([NOON, None, -1])})
    assert unwritable_rows(whole, rules(topic=None), limits(partitions=1, max_message_bytes=200)) == []
    assert without_rows(whole, []) is whole


def test_first_fault_of_a_row_counts() -> None:
    whole = columns({"partition": pa.array([0, -5, 9], pa.int32()), "timestamp": pa.array([-7, -7, NOON])})
    found = unwritable_rows(whole, rules(), limits(partitions=1))
    assert [(each.row, each.reason.partition(",")[0]) for each in found] == [
        (0, "The timestamp is -7 ms"),
        (1, "partition -5 is negative"),
        (2, "partition 9: the topic has 0 to 0"),
    ]


def test_rows_that_the_caller_found_are_not_checked_again() -> None:
    known = Unwritable(1, SerializationError, "value.a: does not fit")
    whole = columns({"partition": pa.array([0, -5, -6], pa.int32())})
    found = unwritable_rows(whole, rules(), None, [known])
    assert [(each.row, each.reason) for each in found] == [
        (1, "value.a: does not fit"),
        (2, "partition -6 is negative"),
    ]


def test_limits_are_those_of_each_topic() -> None:
    asked: list[tuple[str, int | None, bool]] = []

    def of(topic: str, highest: int | None, largest: int | None = None) -> TopicLimits:
        asked.append((topic, highest, largest is not None))
        return {
            "small": TopicLimits(partitions=1, max_message_bytes=150),
            "gone": TopicLimits(),
            "refused": TopicLimits(is_invalid=True),
        }[topic]

    whole = {
        "value": pa.array([b"x" * 200] * 5 + [b"y"]),
        "topic": names("small", "gone", "bad name", "refused", "small", "small"),
        "partition": pa.array([None, 7, 3, None, -1, 1], pa.int32()),
    }
    found = unwritable_rows(whole, rules(topic=None), of)
    assert [(each.row, each.error) for each in found] == [
        (0, RecordTooLargeError),
        (2, InvalidTopicError),
        (3, InvalidTopicError),
        (4, SerializationError),
        (5, SerializationError),
    ]
    assert sorted(asked, key=str) == [
        ("gone", 7, False),
        ("refused", None, False),
        ("small", 1, False),
        ("small", None, True),
    ]


def test_newest_limit_counts_for_a_record_that_is_too_large() -> None:
    """Bug: a record was refused by an answer of minutes ago, although the topic took it by then."""
    newest: list[int | None] = [700, 600, None]
    asked: list[int] = []

    def of(topic: str, highest: int | None, largest: int | None = None) -> TopicLimits:
        if largest is None:
            return TopicLimits(1, 500)
        asked.append(largest)
        return TopicLimits(1, newest.pop(0))

    whole = {"value": pa.array([b"x" * 550, b"y" * 450, b"z" * 300])}
    found = [unwritable_rows(whole, rules(), of) for _ in range(3)]
    assert [[(each.row, each.error) for each in rows] for rows in found] == [[], [(0, RecordTooLargeError)], []]
    assert "more than max.message.bytes=600 of the topic" in found[1][0].reason
    assert min(asked) == max(asked) > 600


def test_without_brokers_their_limits_are_left_out() -> None:
    whole = columns({"partition": pa.array([999, 0, 0], pa.int32())})
    assert unwritable_rows(whole, rules(), None) == []


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_size_of_a_lone_batch_is_compared_with_max_message_bytes(codec: str) -> None:
    """The bytes that go to the broker: a record that compression makes small enough is good."""
    used = rules(max_bytes=100_000, codec=codec_for(codec))
    own: list[tuple[str, bytes | None]] = [("h", b"1"), ("i", None)]
    for value in (b"x" * 5_000, random.Random(7).randbytes(5_000)):
        exact = lone_batch_size(b"k", value, own, used.codec)
        whole = {"value": pa.array([b"v", value]), "key": names("k", "k"), "headers": headers([], own)}
        assert unwritable_rows(whole, used, limits(max_message_bytes=exact)) == []
        (found,) = unwritable_rows(whole, used, limits(max_message_bytes=exact - 1))
        assert found.reason == f"the record takes {exact} bytes, more than max.message.bytes={exact - 1} of the topic"


def test_limit_of_the_producer_is_the_same_as_that_of_send_columns() -> None:
    """The tight bound counts, not the quick one."""
    whole = {"value": pa.array([b"x" * 100])}
    exact = record_size_upper_bound(None, b"x" * 100) + HEADER_SIZE
    for most, expected in ((exact - 1, 1), (exact, 0)):
        assert len(unwritable_rows(whole, rules(max_bytes=most), None)) == expected


def test_numbers_before_1980_are_good_if_the_option_allows_them() -> None:
    whole = columns({"timestamp": pa.array([NOON, 5, NOON])})
    assert unwritable_rows(whole, rules(early_advice=None), None) == []
    assert unwritable_rows(columns({"timestamp": pa.array([5, 5, 5], MICROS)}), rules(), None) == []


def test_contents_are_kept_as_far_as_they_exist() -> None:
    whole = {
        "value": pa.array([b"v", None], pa.large_binary()),
        "key": names("k", None),
        "topic": names("no topic", None),
        "partition": pa.array([5, None], pa.int32()),
        "timestamp": pa.array([NOON, -7]),
        "headers": headers([("a", b"1"), (None, None)], None),
    }
    used = rules(topic=None)
    found = unwritable_rows(whole, used, None)
    first, second = contents(whole, found, used)
    assert first == RowContent(found[0], "no topic", 5, NOON, True, b"k", b"v", [("a", b"1"), ("", None)])
    assert second == RowContent(found[1], None, None, -7, False, None, None, [])


def test_headers_of_text_that_is_not_utf_8_are_kept() -> None:
    """Bug: strings of Spark may hold any bytes. Such a header's name ended the task, although dead letters were on."""
    raw = pa.array([[{"key": b"a\xff", "value": b"\xfe"}], [{"key": b"b", "value": None}], None], RAW_HEADERS)
    texts = [each.cast(pa.binary()).view(pa.string()) for each in raw.values.flatten()]
    column = pa.ListArray.from_arrays(raw.offsets, pa.StructArray.from_arrays(texts, ["key", "value"]))
    whole = {"value": names("v", "w", "x"), "headers": column}
    (found,) = unwritable_rows(whole, rules(), None)
    assert (found.row, found.reason) == (0, "the name of a header is not UTF-8")
    (content,) = contents(whole, [found], rules())
    assert content.headers == [("a\ufffd", b"\xfe")]


def test_good_names_of_headers_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: one letter beyond ASCII cost a Python object for each header of the batch."""
    monkeypatch.setattr("spark_kafka_sink.record.headers._is_utf_8", None)
    whole = {"value": names("v", "w"), "headers": headers([("ö", b"1"), ("b", None)], None)}
    assert unwritable_rows(whole, rules(), None) == []


@pytest.mark.parametrize("as_type", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_topics_may_have_any_layout(as_type: pa.DataType) -> None:
    whole = {"value": names("a", "b", "c"), "topic": names("t", None, "ü").cast(as_type)}
    assert [each.row for each in unwritable_rows(whole, rules(topic=None), None)] == [1, 2]


def test_size_of_a_dead_letter_is_that_of_its_lone_batch() -> None:
    content = RowContent(Unwritable(0, KafkaError, ""), None, None, None, True, b"k", b"v" * 100, [])
    size = lone_batch_size(b"k", b"v" * 100, [], codec_for("none"))
    assert sendable_size(content, [], rules(max_bytes=1_000)) == size
    assert sendable_size(content, [], rules(max_bytes=HEADER_SIZE + 100)) is None  # the producer refuses it
