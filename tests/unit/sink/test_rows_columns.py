from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.types import TimestampType

from spark_kafka_sink.common.errors import KafkaError, SchemaError
from spark_kafka_sink.record.arrow import int_array
from spark_kafka_sink.record.columns import RecordColumns, epoch_ms
from spark_kafka_sink.sink.rows import MOST_LAYOUTS, RowBlock, RowLayouts, taken
from spark_kafka_sink.sink.schema import CAST_TIMESTAMP, SET_FORMAT, _warn_once


def block_of(*rows: Row, topic: str | None = "orders") -> RowBlock:
    block = RowBlock(RowLayouts(topic))
    block.extend(taken(rows, 0))
    return block


def columns_of(*rows: Row) -> RecordColumns:
    ((topic, columns),) = block_of(*rows).by_topic()
    assert topic == "orders"
    return columns


def test_columns_are_found_by_name_and_others_are_ignored() -> None:
    columns = columns_of(Row(extra=1, value="v1", key=b"k1"), Row(extra=2, value="v2", key=None))
    assert columns.value.to_pylist() == [b"v1", b"v2"]
    assert columns.key is not None
    assert columns.key.to_pylist() == [b"k1", None]
    assert (columns.headers, columns.partition, columns.timestamp_ms) == (None, None, None)


def test_the_name_of_a_column_counts_with_its_case() -> None:
    with pytest.raises(
        SchemaError, match=r"Required attribute 'value' not found\. The columns of row 0 are: Value, key\."
    ):
        block_of(Row(Value="v", key="k"))


def test_column_in_another_case_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    assert columns_of(Row(value="v", Key="k")).key is None
    assert caplog.messages == [
        "The column Key is ignored, because names are case-sensitive. Rename it to key, or drop it"
    ]


def test_missing_topic_is_refused_in_sparks_words() -> None:
    with pytest.raises(SchemaError, match=r"topic option required when no 'topic' attribute is present\. Use"):
        block_of(Row(value="v"), topic=None)


def test_rows_without_column_names_are_refused() -> None:
    with pytest.raises(SchemaError, match="Row 0 is a tuple without names of columns"):
        block_of(("k", "v"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            Row(value=5),
            "value attribute unsupported type int. value must be a(n) string or binary"
            + SET_FORMAT.format(column="value"),
        ),
        (
            Row(value="v", key=1.5),
            "key attribute unsupported type double. key must be a(n) string or binary"
            + SET_FORMAT.format(column="key"),
        ),
        (
            Row(value="v", key=Decimal(1)),
            "key attribute unsupported type decimal. key must be a(n) string or binary"
            + SET_FORMAT.format(column="key"),
        ),
        (Row(value="v", partition="1"), "partition attribute unsupported type string. partition must be a(n) int"),
        (Row(value="v", partition=True), "partition attribute unsupported type boolean. partition must be a(n) int"),
        (
            Row(value="v", headers={"a": b"b"}),
            "headers attribute unsupported type map. headers must be a(n) array<struct<key:string,value:binary>>",
        ),
        (
            Row(value="v", timestamp=datetime.date(2013, 1, 1)),
            "timestamp attribute unsupported type date. timestamp must be a(n) timestamp or bigint" + CAST_TIMESTAMP,
        ),
        (
            Row(value=Row(a=1)),
            "value attribute unsupported type Row. value must be a(n) string or binary"
            + SET_FORMAT.format(column="value"),
        ),
    ],
)
def test_a_wrong_type_is_refused_in_sparks_words(row: Row, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        block_of(row)
    assert str(caught.value) == text


def test_a_wrong_type_in_a_later_row_is_refused_too() -> None:
    block = block_of(Row(value="v"))
    with pytest.raises(SchemaError, match="value attribute unsupported type int"):
        block.extend(taken([Row(value="w"), Row(value=7)], 1))


def test_rows_with_different_fields_count_by_their_own_names() -> None:
    columns = columns_of(Row(value="a"), Row(key="k", value="b"), Row(value="c", key="l"), {"value": "d"})  # type: ignore[arg-type]
    assert columns.key is not None
    assert columns.value.to_pylist() == [b"a", b"b", b"c", b"d"]
    assert columns.key.to_pylist() == [None, b"k", b"l", None]


def test_columns_that_come_and_go_have_nulls_between() -> None:
    headers = [("h", b"1")]
    columns = columns_of(
        Row(value="a", headers=headers),
        Row(value="b", key="k"),
        Row(value="c", partition=3),
        Row(value="d", headers=headers, partition=4),
        Row(value="e", timestamp=1_500_000_000_000),
    )
    every = (columns.key, columns.headers, columns.partition, columns.timestamp_ms)
    assert [None if column is None else column.to_pylist() for column in every] == [
        [None, b"k", None, None, None],
        [[{"key": b"h", "value": b"1"}], [], [], [{"key": b"h", "value": b"1"}], []],
        [None, None, 3, 4, None],
        [None, None, None, None, 1_500_000_000_000],
    ]


def test_layouts_are_forgotten_when_rows_keep_bringing_new_columns() -> None:
    """Bug: each row of a dict with other keys left one in memory."""
    layouts = RowLayouts("orders")
    block = RowBlock(layouts)
    for number in range(3 * MOST_LAYOUTS):
        block.extend(taken([{f"c{number}": 1, "value": str(number)}], number))
    assert len(layouts._known) <= MOST_LAYOUTS
    ((_, columns),) = block.by_topic()
    assert columns.value.to_pylist() == [b"%d" % number for number in range(3 * MOST_LAYOUTS)]


def test_row_with_more_or_fewer_values_is_refused() -> None:
    row = Row("v", "k")
    row.__fields__ = ["value"]
    with pytest.raises(SchemaError, match="Row 1 has 2 values for 1 columns: value"):
        block_of(Row(value="v"), row)


def test_row_without_value_is_refused_with_its_columns() -> None:
    with pytest.raises(SchemaError, match=r"'value' not found\. The columns of row 1 are: key"):
        block_of(Row(value="v"), Row(key="k"))


def test_minus_one_is_a_null_timestamp() -> None:
    assert written_ms(-1) is None
    assert written_ms(datetime.datetime(1969, 12, 31, 23, 59, 59, 999_000, datetime.UTC)) is None


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1_764_000_000, "looks like seconds: multiply it by 1000"),
        (1_764_000_000_000_000, "looks like microseconds: divide it by 1000"),
        (1_764_000_000_000_000_000, "looks like nanoseconds: divide it by 1000000"),
    ],
)
def test_a_timestamp_in_another_unit_is_refused_by_rows(number: int, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        written_ms(number)
    assert written_ms(datetime.datetime(1975, 1, 1, tzinfo=datetime.UTC)) == 157_766_400_000


def test_an_option_lets_early_numbers_pass() -> None:
    block = RowBlock(RowLayouts("orders"), allows_early=True)
    block.extend(taken([Row(value="v", timestamp=5)], 0))
    ((_, columns),) = block.by_topic()
    assert columns.timestamp_ms is not None
    assert columns.timestamp_ms.to_pylist() == [5]


def test_a_topic_of_a_wrong_type_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"topic attribute unsupported type int\. topic must be a"):
        block_of(Row(value="v", topic=3), topic=None)


def test_the_topic_option_wins_over_the_column() -> None:
    rows = [Row(value="v", topic=None), Row(value="w", topic="other"), Row(value="x", topic=7)]
    ((topic, columns),) = block_of(*rows).by_topic()
    assert (topic, columns.num_rows) == ("orders", 3)


def test_first_of_two_columns_with_one_name_counts() -> None:
    row = Row("first", "k", "second")
    row.__fields__ = ["value", "key", "value"]
    assert columns_of(row).value.to_pylist() == [b"first"]


def test_rows_are_grouped_by_topic_and_keep_their_order() -> None:
    rows = [Row(value=str(n), key=str(n * 10), topic="ab"[n % 2], partition=n) for n in range(6)]
    found = {
        topic: (columns.value.to_pylist(), columns.key.to_pylist(), columns.partition.to_pylist())
        for topic, columns in block_of(*rows, topic=None).by_topic()
    }
    assert found == {
        "a": ([b"0", b"2", b"4"], [b"0", b"20", b"40"], [0, 2, 4]),
        "b": ([b"1", b"3", b"5"], [b"10", b"30", b"50"], [1, 3, 5]),
    }


def test_null_topic_is_refused_before_its_block_is_sent() -> None:
    block = block_of(Row(value="v", topic="a"), Row(value="w", topic=None), topic=None)
    with pytest.raises(SchemaError, match=r"\[KAFKA_NULL_TOPIC_IN_DATA\].*null topic.*Use the `topic`"):
        next(block.by_topic())


def test_nulls_text_and_every_kind_of_bytes_pass() -> None:
    columns = columns_of(
        Row(value=None, key=None), Row(value="ü", key=b"\xff"), Row(value=bytearray(b"x"), key=bytearray(b""))
    )
    assert columns.value.to_pylist() == [None, "ü".encode(), b"x"]
    assert columns.key.to_pylist() == [None, b"\xff", b""]


def test_headers_pass_as_spark_hands_them_over() -> None:
    columns = columns_of(
        Row(value="v", headers=[Row(key="a", value=b"1"), Row(key="a", value=None)]),
        Row(value="w", headers=None),
        Row(value="x", headers=[]),
        Row(value="y", headers=[Row(key="ä", value=bytearray(b"2"))]),
    )
    assert columns.headers is not None
    assert [[tuple(h.values()) for h in row or []] for row in columns.headers.to_pylist()] == [
        [(b"a", b"1"), (b"a", None)],
        [],
        [],
        [("ä".encode(), b"2")],
    ]


@pytest.mark.parametrize("headers", [["a"], [("a", b"1", b"2")], [3], [("a", 5)]])
def test_headers_of_another_shape_are_refused(headers: list[Any]) -> None:
    with pytest.raises(SchemaError, match=r"header .*row 0.*(give a list in which|must be bytes)"):
        block_of(Row(value="v", headers=headers))


def test_headers_are_known_by_the_names_of_their_fields() -> None:
    block_of(Row(value="v", headers=[Row(KEY="a", Value=b"1")]))
    columns = columns_of(Row(value="v", headers=[]), Row(value="w", headers=[Row(value=b"1", key="a")]))
    assert columns.headers is not None
    assert columns.headers.to_pylist() == [[], [{"key": b"a", "value": b"1"}]]
    with pytest.raises(SchemaError, match="A header of row 0 is a Row with the fields name, data"):
        block_of(Row(value="v", headers=[Row(name="a", data=b"1")]))


def test_a_header_without_a_name_is_refused() -> None:
    with pytest.raises(KafkaError, match="header key"):
        columns_of(Row(value="v", headers=[(None, b"1")]))


def test_the_size_counts_keys_values_and_headers() -> None:
    block = block_of(Row(value="12345", key="123"), Row(value=None, key=None))
    assert block.size == 8  # and 32 for the Python objects of a header
    assert block_of(Row(value="1", headers=[("ab", b"345"), ("6", None)])).size == 7 + 2 * 32


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def written_ms(timestamp: object) -> int | None:
    columns = columns_of(Row(value="v", timestamp=timestamp))
    assert columns.timestamp_ms is not None
    found: int | None = columns.timestamp_ms[0].as_py()
    return found


LAST_HOUR_OF_9999 = 253_402_300_799_000 - 3_600_000  # the range of PySpark in Berlin


@given(st.integers(0, LAST_HOUR_OF_9999) | st.integers(LAST_HOUR_OF_9999 - 10**8, LAST_HOUR_OF_9999))
@pytest.mark.usefixtures("berlin")
def test_pyspark_timestamp_is_exact_to_the_millisecond(ms: int) -> None:
    assert written_ms(TimestampType().fromInternal(ms * 1000 + 999)) == ms


@pytest.mark.usefixtures("berlin")
def test_repeated_hour_of_summer_time_is_distinguished() -> None:
    for day in (
        datetime.datetime(2013, 10, 27, tzinfo=datetime.UTC),
        datetime.datetime(9999, 10, 31, tzinfo=datetime.UTC),
    ):
        midnight = (day - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(milliseconds=1)
        passes = [midnight + 2_400_000, midnight + 6_000_000]  # 02:40 in Berlin, twice
        assert [written_ms(TimestampType().fromInternal(ms * 1000)) for ms in passes] == passes


def test_an_aware_datetime_keeps_its_zone() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=5))
    assert written_ms(datetime.datetime(2013, 1, 1, 5, tzinfo=zone)) == 1_356_998_400_000


def test_whole_numbers_are_milliseconds_and_null_stays_null() -> None:
    assert written_ms(1_356_998_400_123) == 1_356_998_400_123
    assert written_ms(None) is None


def test_first_day_of_calendar_is_refused() -> None:
    """Spark can hand over a timestamp_ntz of this day, and it often means that there is no time."""
    with pytest.raises(SchemaError, match=r"timestamp of row 0 is 0001-01-01 00:00:00, which lies before 1970"):
        columns_of(Row(value="v", timestamp=datetime.datetime.min))


def test_a_timestamp_before_1970_is_refused_as_by_columns() -> None:
    """Bug: the error was a bare KafkaError, although `write_partition` promises a SchemaError for a row that cannot be
    written.
    """
    with pytest.raises(SchemaError, match=r"timestamp of row 0 is 1969-12-31.*before 1970"):
        written_ms(datetime.datetime(1969, 12, 31, tzinfo=datetime.UTC))


@pytest.mark.parametrize("microseconds", [-999, -500, -1])
def test_the_last_millisecond_before_1970_is_refused_as_by_columns(microseconds: int) -> None:
    """Bug: it was rounded down to -1, which stands for no timestamp: the record got the time of writing."""
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=microseconds)
    with pytest.raises(SchemaError, match=r"timestamp of row 0 is 1969-12-31 23:59:59\.999.*before 1970"):
        written_ms(moment)
    with pytest.raises(SchemaError, match="before 1970"):
        epoch_ms(int_array([microseconds], pa.int64(), "t").cast(pa.timestamp("us", "UTC")), None)


def test_one_millisecond_before_1970_is_no_timestamp_as_by_columns() -> None:
    assert written_ms(datetime.datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=datetime.UTC)) is None
    assert epoch_ms(int_array([-1000], pa.int64(), "t").cast(pa.timestamp("us", "UTC")), None).to_pylist() == [None]
