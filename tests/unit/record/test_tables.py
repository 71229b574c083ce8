"""Tables of any library as record columns: which columns are taken, which are refused, and how a table is cut."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record import tables
from spark_kafka_sink.record.tables import BY_NAME, PART_ROWS, ColumnName, Table

FIELDS = ("value", "key", "headers", "partition", "timestamp", "topic")
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
MOMENT = datetime.datetime(2024, 5, 6, 7, 8, 9, 123_000, datetime.UTC)
MOMENT_MS = 1_714_979_289_123


def opened(
    data: object, topic: str | None = "orders", /, *, formatted: Collection[str] = (), **names: ColumnName
) -> Table:
    return Table(data, topic, {field: names.get(field, BY_NAME) for field in FIELDS}, formatted)


def rows(table: Table) -> list[tuple[Any, ...]]:
    """Return (topic, value, key, headers, partition, timestamp) of each row, in the order of the parts."""
    found = []
    for part in table.parts():
        for topic, columns in part.by_topic():
            arrays = (columns.value, columns.key, columns.headers, columns.partition, columns.timestamp_ms)
            lists = [[None] * columns.num_rows if array is None else array.to_pylist() for array in arrays]
            found += [(topic, *row) for row in zip(*lists, strict=True)]
    return found


def values(table: Table) -> list[Any]:
    return [row[1] for row in rows(table)]


# ---- which columns ---------------------------------------------------------------------------------------------------


def test_columns_are_found_by_the_names_of_the_fields() -> None:
    data = pa.table(
        {
            "extra": [1.5],
            "timestamp": pa.array([MOMENT], pa.timestamp("us", "UTC")),
            "value": ["v"],
            "key": ["k"],
            "partition": pa.array([3], pa.int32()),
            "headers": pa.array([[("h", b"1")]], HEADERS),
        }
    )
    assert rows(opened(data)) == [("orders", b"v", b"k", [{"key": b"h", "value": b"1"}], 3, MOMENT_MS)]


def test_fields_take_the_columns_that_they_name() -> None:
    data = pa.table({"payload": ["v"], "id": ["k"], "at": [MOMENT_MS], "shard": [2], "where": ["t"], "key": ["not"]})
    table = opened(data, None, value="payload", key="id", timestamp="at", partition="shard", topic="where")
    assert rows(table) == [("t", b"v", b"k", None, 2, MOMENT_MS)]


def test_column_named_none_is_left_out() -> None:
    data = pa.table({"value": ["v"], "key": [1.5], "timestamp": [datetime.datetime(2024, 1, 1)]})
    assert rows(opened(data, key=None, timestamp=None)) == [("orders", b"v", None, None, None, None)]


def test_each_row_goes_to_the_topic_of_its_column() -> None:
    data = pa.table({"value": ["1", "2", "3"], "topic": ["b", "a", "b"]})
    assert sorted((row[0], row[1]) for row in rows(opened(data, None))) == [("a", b"2"), ("b", b"1"), ("b", b"3")]


def test_given_topic_wins_over_the_topic_column() -> None:
    data = pa.table({"value": ["1"], "topic": [17]})
    assert [row[0] for row in rows(opened(data, "orders"))] == ["orders"]


@pytest.mark.parametrize(
    ("data", "topic", "names", "complaint"),
    [
        ({"v": ["1"]}, "t", {}, r"No column is the value of the records: name it by value='…'\. The data has .* v\."),
        ({}, "t", {}, r"No column is the value of the records: .* The data has no columns\."),
        ({"value": ["1"]}, "t", {"value": None}, "No column is the value"),
        ({"value": ["1"]}, "t", {"key": "kye"}, r"key='kye': the data has no such column\. .* columns value\."),
        ({"value": ["1"]}, "t", {"key": "key"}, "key='key': the data has no such column"),
        ({"value": ["1"]}, None, {}, r"no topic: give one for all rows by topic='…', or name a column by topic_column"),
        ({"value": ["1"]}, None, {"topic": "to"}, "topic_column='to': the data has no such column"),
        ({"value": ["1"], "to": ["t"]}, "t", {"topic": "to"}, "two sources of topics"),
        ({"value": ["1"]}, "t", {"key": 7}, "key=7: give the name of a column, or None"),
        ({"value": ["1"]}, "", {}, "topic='': give the name of a topic"),
        ({"value": ["1"]}, ["t"], {}, r"topic=\['t'\]: give the name of a topic"),
        ({f"c{n}": ["1"] for n in range(25)}, "t", {}, r"c18, c19 and 5 more\."),
    ],
)
def test_missing_or_unclear_column_is_refused(data: Any, topic: Any, names: Any, complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        opened(pa.table(data), topic, **names)


def test_two_columns_of_one_name_are_refused_only_where_they_are_needed() -> None:
    data = pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"]), pa.array(["3"])], names=["value", "x", "x"])
    assert values(opened(data)) == [b"1"]
    with pytest.raises(SchemaError, match=r"2 columns named 'x' \(key\): rename all but one"):
        opened(data, key="x")


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "column", "complaint"),
    [
        ({}, pa.array([1]), r"The column 'c' \(value\) has the Arrow type int64; it must be string or binary: cast it"),
        ({}, pa.array([{"a": 1}]), "encode it as text, such as JSON"),
        ({"key": "c"}, pa.array([1.5]), r"'c' \(key\) has the Arrow type double; .* leave the column out by key=None"),
        ({"partition": "c"}, pa.array([1.0]), r"type double; it must be an integer: cast it to int32"),
        ({"headers": "c"}, pa.array(["h"]), r"it must be list<struct<key: string, value: binary>>"),
        (
            {"timestamp": "c"},
            pa.array([1], pa.date32()),
            "type date32.*; it must be a timestamp with a time zone, or int",
        ),
        ({"timestamp": "c"}, pa.array([1], pa.int32()), "type int32; it must be a timestamp"),
        (
            {"timestamp": "c"},
            pa.array([1], pa.timestamp("us")),
            r"type timestamp\[us\]; .*: give it the zone .*Polars: dt.replace_time_zone.* by timestamp=None",
        ),
        ({"topic": "c"}, pa.array([b"t"], pa.binary()), "type binary; it must be string: cast it, or give one topic"),
    ],
)
def test_column_of_a_wrong_type_is_refused_before_a_row_is_read(names: Any, column: pa.Array, complaint: str) -> None:
    def unread() -> Iterator[pa.RecordBatch]:
        raise AssertionError("a row was read")
        yield

    schema = pa.schema([("value", pa.string()), ("c", column.type)])
    reader = pa.RecordBatchReader.from_batches(schema, unread())
    with pytest.raises(SchemaError, match=complaint):
        opened(reader, None if "topic" in names else "t", **(names or {"value": "c"}))


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "+05:30"])
def test_timestamp_of_any_unit_and_zone_is_its_moment(unit: str, zone: str) -> None:
    times = pa.array([MOMENT, None], pa.timestamp("ns", "UTC")).cast(pa.timestamp(unit, zone), safe=False)
    expected = MOMENT_MS // 1000 * 1000 if unit == "s" else MOMENT_MS
    assert [row[5] for row in rows(opened(pa.table({"value": ["1", "2"], "timestamp": times})))] == [expected, None]


@pytest.mark.parametrize("integer", [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.int64(), pa.uint64()], ids=str)
def test_partitions_of_any_integer_type_are_taken(integer: pa.DataType) -> None:
    data = pa.table({"value": ["1", "2"], "partition": pa.array([7, None], integer)})
    assert [row[4] for row in rows(opened(data))] == [7, None]


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_partition_beyond_32_bits_is_refused(number: int) -> None:
    table = opened(pa.table({"value": ["1", "2"], "shard": [0, number]}), partition="shard")
    with pytest.raises(SerializationError, match=f"A partition of the column 'shard' is {number}, and .* 32 bits"):
        rows(table)


VIEWS = [pa.string_view(), pa.binary_view()] if hasattr(pa, "string_view") else []
"""From pyarrow 16 on."""
LAYOUTS = [
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3), *VIEWS),
    *(pa.dictionary(pa.int8(), each) for each in (pa.string(), pa.large_string(), pa.large_binary(), *VIEWS[:1])),
]


def in_layout(texts: list[bytes | None], layout: pa.DataType) -> pa.Array:
    plain = pa.array(texts, pa.binary())
    if pa.types.is_fixed_size_binary(layout):
        return pa.array(texts, layout)
    if not pa.types.is_dictionary(layout):
        return plain.cast(pa.string()).cast(layout) if "string" in str(layout) else plain.cast(layout)
    entries = plain.unique().drop_null()
    return pa.DictionaryArray.from_arrays(
        pc.index_in(plain, entries).cast(layout.index_type), in_layout(entries.to_pylist(), layout.value_type)
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_and_keys_of_any_layout_slice_and_chunking_arrive(layout: pa.DataType) -> None:
    texts = [b"abc", None, b"\xc3\xa91", b"abc", b"xyz"]
    whole = in_layout([b"cut", *texts, b"cut"], layout).slice(1, 5)
    chunked = pa.chunked_array([whole.slice(0, 2), whole.slice(2, 0), whole.slice(2)])
    for column in (pa.chunked_array([whole]), chunked):
        table = opened(pa.table({"value": column, "key": column}))
        assert [row[1:3] for row in rows(table)] == [(text, text) for text in texts]


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if "binary" not in str(each)], ids=str)
def test_topics_of_any_text_layout_are_taken(layout: pa.DataType) -> None:
    topics = in_layout([b"b", b"a", b"b"], layout)
    table = opened(pa.table({"value": ["1", "2", "3"], "topic": topics}), None)
    assert sorted(row[:2] for row in rows(table)) == [("a", b"2"), ("b", b"1"), ("b", b"3")]


def test_topic_keeps_the_order_of_its_rows_if_a_dictionary_has_it_twice() -> None:
    topics = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1, 0]), pa.array(["t", "t"]))
    assert values(opened(pa.table({"value": list("abcd"), "topic": topics}), None)) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize(
    "topics",
    [
        pa.array(["t", None]),
        pa.nulls(2),
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["t", None])),
    ],
)
def test_null_topic_is_refused(topics: pa.Array) -> None:
    table = opened(pa.table({"value": ["1", "2"], "to": topics}), None, topic="to")
    with pytest.raises(SchemaError, match="A topic of the column 'to' is null: filter such rows, or give one topic"):
        rows(table)


def test_columns_of_nulls_without_a_type_are_nulls() -> None:
    nulls = {field: pa.nulls(2) for field in ("value", "key", "headers", "partition", "timestamp")}
    assert rows(opened(pa.table(nulls))) == [("orders", None, None, None, None, None)] * 2


def test_headers_of_views_in_large_lists_are_taken() -> None:
    """Polars has them so."""
    key, value = VIEWS or (pa.large_string(), pa.large_binary())
    layout = pa.large_list(pa.struct([("key", key), ("value", value)]))
    headers = pa.array([None, [("h", b"1"), ("i", None)], []], layout).slice(1)
    expected = [[{"key": b"h", "value": b"1"}, {"key": b"i", "value": None}], []]
    assert [row[3] for row in rows(opened(pa.table({"value": ["1", "2"], "headers": headers})))] == expected


@pytest.mark.skipif(not hasattr(pa, "json_"), reason="pyarrow 19 and newer know JSON")
def test_json_column_is_text() -> None:
    texts = pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(['{"a":1}', None]))
    assert values(opened(pa.table({"value": texts}))) == [b'{"a":1}', None]


def test_number_that_is_no_usual_time_is_refused_with_its_column() -> None:
    table = opened(pa.table({"value": ["1"], "at": [1_714_979_289]}), timestamp="at")
    with pytest.raises(
        SchemaError,
        match=r"A timestamp of the column 'at' is 1714979289\. .*looks like seconds.* If the date is right,",
    ):
        rows(table)


# ---- sources ---------------------------------------------------------------------------------------------------------


class Exporter:
    """An object of another library: it has one method of the interface, and nothing else."""

    def __init__(self, data: Any, method: str) -> None:
        setattr(type(self), method, lambda _self, requested_schema=None: getattr(data, method)(requested_schema))


def test_any_object_with_a_stream_or_an_array_is_taken() -> None:
    class Stream(Exporter): ...

    class Array(Exporter): ...

    batch = pa.RecordBatch.from_pydict({"value": ["1", "2"]})
    assert values(opened(Stream(pa.Table.from_batches([batch]), "__arrow_c_stream__"))) == [b"1", b"2"]
    assert values(opened(Array(batch, "__arrow_c_array__"))) == [b"1", b"2"]
    assert values(opened(batch)) == [b"1", b"2"]


class Lazy:
    def collect(self) -> object: ...


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ([{"value": "1"}], r"The data is a list; give a table .* make one, by pyarrow\.table"),
        (None, "The data is a NoneType; give a table"),
        (Lazy(), r"call its method collect\(\) first"),
        (
            pa.chunked_array([["1"]]),
            "a pyarrow ChunkedArray(, and cannot be read as an Arrow table:|; give a table that)",
        ),
        (pa.array(["1"]), "a pyarrow StringArray, and cannot be read as an Arrow table"),
    ],
)
def test_data_that_is_no_table_is_refused(data: object, complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        opened(data)


def test_stream_is_pulled_batch_by_batch() -> None:
    pulled = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            pulled.append(number)
            yield pa.RecordBatch.from_pydict({"value": [str(number)]})

    parts = opened(pa.RecordBatchReader.from_batches(pa.schema([("value", pa.string())]), batches())).parts()
    assert pulled == []
    for number in range(3):
        next(parts)
        assert pulled == list(range(number + 1))


@pytest.mark.parametrize("error", [OSError("it ends early"), ZeroDivisionError("it ends early"), KeyboardInterrupt()])
def test_error_of_the_stream_is_raised_after_the_rows_before_it(error: BaseException) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"value": ["1"]})
        raise error

    parts = opened(pa.RecordBatchReader.from_batches(pa.schema([("value", pa.string())]), batches())).parts()
    next(parts)
    with pytest.raises(type(error)) as raised:
        next(parts)
    assert raised.value is error


PAIRS = pa.schema([("key", pa.string()), ("value", pa.string())])


@pytest.mark.parametrize("read", [1, 2], ids=["in part", "whole"])
@pytest.mark.parametrize("kind", ["reader of batches", "reader of a table"])
def test_reader_that_was_read_is_refused(kind: str, read: int) -> None:
    """Bug: a write that was repeated with the same reader, after an error or in the next transaction, wrote the rest of
    its rows, or none, and reported success.
    """
    table = pa.table({"value": ["1", "2"]})
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=1))
    if kind == "reader of a table":
        reader = table.to_reader(max_chunksize=1)
    parts = opened(reader).parts()
    for _ in range(read):
        next(parts)
    with pytest.raises(SchemaError, match="from which an earlier write has read rows"):
        opened(reader)
    for _ in range(2):
        assert values(opened(table)) == [b"1", b"2"], "a table may be written again"


@pytest.mark.parametrize(
    "second",
    [
        pa.RecordBatch.from_pydict({"value": ["v"], "key": ["k"]}),
        pa.RecordBatch.from_pydict({"id": ["1"], "key": ["k"], "value": ["v"]}),
        pa.RecordBatch.from_pydict({"key": ["k"]}),
        pa.RecordBatch.from_pydict({"key": [b"k"], "value": ["v"]}),
    ],
    ids=["another order", "one more", "one less", "another type"],
)
def test_batch_with_other_columns_than_its_reader_is_refused(second: pa.RecordBatch) -> None:
    """Bug: a column was taken by its place in the reader's schema, so a batch in another order had its keys as values.
    A batch with fewer columns ended in an IndexError.
    """
    first = pa.RecordBatch.from_pydict({"key": ["k"], "value": ["v"]})
    parts = opened(pa.RecordBatchReader.from_batches(PAIRS, (batch for batch in (first, second)))).parts()
    next(parts)
    with pytest.raises(
        SchemaError, match=r"begins with row 1 has the columns .* promises key \(string\), value \(string\)"
    ):
        next(parts)


def test_python_objects_of_polars_are_refused() -> None:
    """Bug: UUIDs in a Polars DataFrame went out as eight bytes: their addresses in memory."""
    frame = polars.DataFrame({"key": [uuid.uuid4()], "value": ["v"]})
    with pytest.raises(SchemaError, match=r"The column 'key' has Python objects \(the Polars type Object\)"):
        opened(frame)
    assert values(opened(frame, key=None)) == [b"v"]


@pytest.mark.parametrize("kind", ["UHUGEINT", "UHUGEINT[]", "STRUCT(x UHUGEINT)"])
def test_large_unsigned_numbers_of_duckdb_are_refused(kind: str) -> None:
    """Bug: a UHUGEINT from 2^127 on was written as a negative number."""
    relation = duckdb.sql(f"SELECT NULL::{kind} AS key, 'v' AS value, NULL::ENUM('UHUGEINT') AS other")
    with pytest.raises(SchemaError, match=r"The column 'key' has the DuckDB type .* cast it to VARCHAR"):
        opened(relation, formatted=["key"])
    assert values(opened(relation, key=None)) == [b"v"]
    assert values(opened(relation, key="other")) == [b"v"]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (lambda: duckdb.sql("SELECT 1::BIGNUM AS key, 'v' AS value"), "bignum"),
        (lambda: duckdb.sql("SELECT [{'x': 1::BIGNUM}] AS key, 'v' AS value"), "bignum"),
        (lambda: duckdb.sql("SELECT MAP {'x': 1::BIGNUM} AS key, 'v' AS value"), "bignum"),
        (
            lambda: pandas.DataFrame({"key": pandas.period_range("2024-01", periods=1, freq="M"), "value": "v"}),
            "period",
        ),
    ],
)
def test_columns_that_only_their_maker_can_read_are_refused(data: Callable[[], Any], named: str) -> None:
    """Bug: they were written as they are stored: a BIGNUM as bytes, the month 2024-01 as 648."""
    with pytest.raises(
        SchemaError, match=rf"The column 'key' has the Arrow type extension<.*{named}.* cast it to text"
    ):
        opened(data(), formatted=["key"])
    assert values(opened(data(), key=None)) == [b"v"]


def test_sparse_columns_of_pandas_are_refused() -> None:
    data = pandas.DataFrame({"value": pandas.arrays.SparseArray([1, 0])})
    with pytest.raises(SchemaError, match=r"cannot be read as an Arrow table: Sparse pandas data"):
        opened(data, formatted=["value"])


def test_table_without_rows_has_no_parts() -> None:
    assert list(opened(pa.schema([("value", pa.string())]).empty_table()).parts()) == []


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_large_batch_is_cut_by_rows() -> None:
    data = pa.RecordBatch.from_pydict({"value": [str(row) for row in range(PART_ROWS + 10)]})
    parts = list(opened(data).parts())
    assert [(part.first_row, part.num_rows) for part in parts] == [(0, PART_ROWS), (PART_ROWS, 10)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_part_is_cut_by_the_bytes_of_its_values(layout: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PART_BYTES", 12)
    texts = [b"abc", b"def", None, b"abc", b"ghi", b"jkl", b"mno", b"pqr"]
    parts = list(opened(pa.RecordBatch.from_pydict({"value": in_layout([b"cut", *texts], layout).slice(1)})).parts())
    assert [part.first_row for part in parts] == [0, 4]
    assert [value for part in parts for _, columns in part.by_topic() for value in columns.value.to_pylist()] == texts


def test_part_is_cut_by_the_bytes_of_keys_and_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PART_BYTES", 10)
    headers = pa.array([[("abc", b"defg")], None, [], [("abc", None)]], HEADERS)
    assert len(list(opened(pa.RecordBatch.from_pydict({"value": list("abcd"), "headers": headers})).parts())) == 2
    assert len(list(opened(pa.RecordBatch.from_pydict({"value": list("abcd"), "key": ["xxxx"] * 4})).parts())) == 2


def test_row_larger_than_a_part_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PART_BYTES", 2)
    parts = list(opened(pa.RecordBatch.from_pydict({"value": ["long", "", "longer"]})).parts())
    assert [part.num_rows for part in parts] == [1, 1, 1]


LONG = [f"a text of the row {row}, too long for a view" for row in range(64)]
SHARED = {
    "views": pa.array(LONG, VIEWS[0] if VIEWS else pa.string()),
    "a dictionary": pa.DictionaryArray.from_arrays(pa.array(range(64), pa.int8()), pa.array(LONG)),
}


@pytest.mark.parametrize("leaf", SHARED)
def test_formatted_rows_are_not_cut_by_bytes_that_all_slices_share(leaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a struct with 16 MiB of long views, as those of Polars, or with such a dictionary was written row by row."""
    column = SHARED[leaf]
    lists = pa.ListArray.from_arrays(pa.array(range(65), pa.int32()), column)
    maps = pa.MapArray.from_arrays(pa.array(range(65), pa.int32()), pa.array(["k"] * 64), column)
    fixed = pa.FixedSizeListArray.from_arrays(column, 1)
    data = pa.RecordBatch.from_arrays([column, lists, maps, fixed], names=["text", "lists", "maps", "fixed"])
    monkeypatch.setattr(tables, "PART_BYTES", 4096)
    table = Table(data, "orders", {"value": data.schema.names}, ["value"])
    found = [part.num_rows for part in table.parts()]
    assert sum(found) == 64
    assert min(found) == max(found) >= 16
    assert sum(found[:-1]) + found[-1] == len(LONG)


def test_reader_that_is_refused_can_still_be_read() -> None:
    reader = pa.table({"payload": ["1", "2"]}).to_reader(max_chunksize=1)
    with pytest.raises(SchemaError):
        opened(reader)
    assert values(opened(reader, value="payload")) == [b"1", b"2"]


def test_error_of_a_later_part_says_where_it_counts_from() -> None:
    data = pa.table({"value": ["1"] * 5, "headers": pa.array([None] * 4 + [[(None, b"1")]], HEADERS)})
    first, second = pa.Table.to_batches(data, max_chunksize=3)
    parts = opened(pa.RecordBatchReader.from_batches(data.schema, [first, second])).parts()
    with next(parts).located():
        pass
    late = next(parts)
    with (
        pytest.raises(SerializationError, match=r"^In the rows of the data from 3 on, which count from 0 here: Row 1 "),
        late.located(),
    ):
        list(late.by_topic())
