from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record import arrow
from spark_kafka_sink.record.arrow import value_offsets, value_size
from spark_kafka_sink.record.columns import RecordColumns, epoch_ms
from spark_kafka_sink.record.encoder import columns_size_upper_bound, record_size_upper_bounds
from spark_kafka_sink.record.headers import with_header, with_missing_header

HEADER_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
STRING_TYPES = [pa.string(), pa.large_string(), pa.string_view()]
BINARY_TYPES = [pa.binary(), pa.large_binary(), pa.binary_view()]


def columns(**given: Any) -> RecordColumns:
    return RecordColumns(**{"value": pa.array([b"v"] * 3, pa.binary())} | given)


@pytest.mark.parametrize("data_type", STRING_TYPES + BINARY_TYPES, ids=str)
def test_values_and_keys_of_any_layout_become_binary(data_type: pa.DataType) -> None:
    texts = ["größe", None, ""]
    array = (
        pa.array(texts).cast(pa.binary()).cast(data_type) if data_type in BINARY_TYPES else pa.array(texts, data_type)
    )
    made = RecordColumns(array, array)
    assert made.value.type == pa.binary()
    assert made.value.to_pylist() == made.key.to_pylist() == ["größe".encode(), None, b""]


@pytest.mark.parametrize("missing", [None, b"bb"])
@pytest.mark.parametrize("width", [0, 2])
def test_slice_of_bytes_of_one_size_begins_at_its_first_row(width: int, missing: bytes | None) -> None:
    """Bug: with pyarrow 14 and 15 the cast of such a slice without nulls ended the process (SIGSEGV)."""
    cells = [None if each == missing else each[:width] for each in (b"aa", b"bb", b"cc", b"dd")]
    column = pa.array(cells, pa.binary(width)).slice(1, 2)
    assert RecordColumns(column, column).key.to_pylist() == cells[1:3]
    assert (arrow._from_first_row(column).offset == 0) == (missing is None)


@pytest.mark.parametrize("value_type", STRING_TYPES + BINARY_TYPES, ids=str)
def test_dictionary_column_is_decoded_once(value_type: pa.DataType) -> None:
    dictionary = pa.array([b"one", b"two"], pa.binary()).cast(value_type)
    array = pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.int8()), dictionary)
    assert RecordColumns(array).value.to_pylist() == [b"two", None, b"one"]


def test_chunks_with_dictionaries_too_large_together_are_decoded() -> None:
    chunks = [
        pa.DictionaryArray.from_arrays(
            pa.array(range(100), pa.int8()), pa.array([f"{name}{row}" for row in range(100)])
        )
        for name in "ab"
    ]
    assert RecordColumns(pa.chunked_array(chunks)).value.to_pylist()[98:102] == [b"a98", b"a99", b"b0", b"b1"]
    with_null = pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.int8()), pa.array([None, "c"]))
    made = RecordColumns(pa.chunked_array([chunks[0].slice(7, 1), with_null])).value
    assert made.to_pylist() == [b"a7", b"c", None, None]


def test_only_used_entries_of_a_large_dictionary_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every chunk and slice of a column has the whole dictionary."""
    binary_length = pc.binary_length
    looked_at: list[int] = []

    def noted(array: pa.Array) -> pa.Array:
        looked_at.append(len(array))
        return binary_length(array)

    monkeypatch.setattr(pc, "binary_length", noted)
    dictionary = pa.array([f"customer-{row}" for row in range(1000)]).slice(100)
    chunk = pa.DictionaryArray.from_arrays(pa.array([7, None, 899, 7], pa.int16()), dictionary)
    made = RecordColumns(pa.chunked_array([chunk, chunk.slice(2)])).value
    assert made.to_pylist() == [b"customer-107", None, *[b"customer-999", b"customer-107"] * 2]
    assert value_size(chunk) == 3 * len("customer-999")
    assert looked_at == []
    empty = pa.DictionaryArray.from_arrays(pa.array([], pa.int8()), dictionary)
    assert RecordColumns(empty).num_rows == 0


def test_fixed_size_column_becomes_binary() -> None:
    assert RecordColumns(pa.array([b"abcd", None], pa.binary(4))).value.to_pylist() == [b"abcd", None]


def test_string_and_binary_columns_are_taken_without_a_copy() -> None:
    array = pa.array(["abc", "def"])
    assert RecordColumns(array).value.buffers()[2].address == array.buffers()[2].address


def test_chunks_and_slices_keep_their_rows() -> None:
    chunked = pa.chunked_array([pa.array(["a", "b"]).slice(1), pa.array(["c", None])])
    assert RecordColumns(chunked).value.to_pylist() == [b"b", b"c", None]
    made = columns(key=pa.array(["x", "y", "z", "z"]).slice(1), timestamp_ms=pa.array([1, 2, 3]))
    assert made.slice(1, 2).key.to_pylist() == [b"z", b"z"]
    assert made.take(np.array([2, 0])).timestamp_ms.to_pylist() == [3, 1]
    assert made.num_rows == 3


@pytest.mark.parametrize("integers", ["i1", "u2", "i4", ">i8"])
def test_rows_are_taken_in_an_order_of_any_integers(integers: str) -> None:
    made = columns(key=pa.array(["x", "y", "z"]))
    assert made.take(np.array([2, 0], integers)).key.to_pylist() == [b"z", b"x"]


@pytest.mark.parametrize(
    ("column", "array", "names"),
    [
        ("value", pa.array([1, 2, 3]), "'value' has the Arrow type int64"),
        ("key", pa.array([1.5, 2, 3]), "'key' has the Arrow type double"),
        ("key", pa.array([[b"a"]] * 3), "'key' has the Arrow type list"),
        ("value", pa.array([1, 1, 1]).dictionary_encode(), "'value' has the Arrow type dictionary"),
        ("value", [b"a"], "'value' is a list"),
        ("timestamp_ms", pa.array([1, 2, 3], pa.int32()), "'timestamp_ms' has the Arrow type int32; it must be int64"),
        ("partition", pa.array([1, 2, 3]), "'partition' has the Arrow type int64; it must be int32"),
        ("headers", pa.array(["a"] * 3), "'headers' has the Arrow type string"),
        ("headers", pa.array([[{"k": "a"}]] * 3), "'headers' has the Arrow type list"),
        ("headers", pa.array([[{"key": 1, "value": b""}]] * 3), "'headers' has the Arrow type list"),
    ],
)
def test_wrong_type_is_refused_with_the_columns_name(column: str, array: Any, names: str) -> None:
    with pytest.raises(SchemaError, match=names):
        columns(**{column: array})


@pytest.mark.parametrize("column", ["key", "timestamp_ms", "partition", "headers"])
def test_column_of_another_length_is_refused_with_its_name(column: str) -> None:
    types = {"key": pa.string(), "timestamp_ms": pa.int64(), "partition": pa.int32(), "headers": HEADER_TYPE}
    with pytest.raises(SchemaError, match=f"'{column}' has 2 rows, the column 'value' has 3"):
        columns(**{column: pa.nulls(2, types[column])})


def large_column(*ends: int) -> pa.LargeBinaryArray:
    """Return rows that end at these bytes of a buffer that is never touched, so it takes only address space."""
    offsets = pa.py_buffer(np.array([0, *ends], np.int64))
    data = pa.py_buffer(np.zeros(ends[-1], np.uint8))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends), [None, offsets, data])


def test_column_above_32_bit_offsets_is_refused_by_name() -> None:
    with pytest.raises(SerializationError, match=r"'value' holds more than 2147483647 bytes; hand over fewer rows"):
        RecordColumns(large_column(2**31))
    dictionary = pa.array([bytes(1 << 20)], pa.binary())
    repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2048, np.int32)), dictionary)
    with pytest.raises(SerializationError, match="'value' holds more than 2147483647 bytes"):
        RecordColumns(repeated)


@pytest.mark.parametrize("data_type", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_are_copied_by_a_pyarrow_that_does_not_cast_them(
    monkeypatch: pytest.MonkeyPatch, data_type: pa.DataType
) -> None:
    """Bug: with pyarrow 16 and 17 each table of Polars with a text failed with an error of pyarrow."""
    cells = [b"left out", "größe und mehr".encode(), None, b"", b"after"]
    column = pa.array(cells, pa.binary_view()).cast(data_type).slice(1, 3)
    dictionary = pa.DictionaryArray.from_arrays(pa.array([2, None, 0], pa.int8()), column)
    monkeypatch.setattr(arrow, "_CASTS_VIEWS", False)
    made = RecordColumns(column, dictionary)
    assert made.value.type == made.key.type == pa.binary()
    assert made.value.to_pylist() == cells[1:4]
    assert made.key.to_pylist() == [b"", None, cells[1]]
    assert RecordColumns(column.slice(0, 0)).value.to_pylist() == []


@pytest.mark.parametrize("casts_views", [True, False])
@pytest.mark.parametrize("data_type", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_above_2_gib_together_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, data_type: pa.DataType, casts_views: bool
) -> None:
    monkeypatch.setattr(arrow, "_CASTS_VIEWS", casts_views)
    _, view, data = pa.array([b"x" * (1 << 20)], pa.binary_view()).buffers()
    views = pa.py_buffer(np.tile(np.frombuffer(view, np.uint8), 2050))
    column = pa.Array.from_buffers(data_type, 2050, [None, views, data])
    with pytest.raises(SerializationError, match="'value' holds more than 2147483647 bytes"):
        RecordColumns(column)
    valid = pa.py_buffer(np.packbits([False] * 2047 + [True] * 3, bitorder="little"))
    column = pa.Array.from_buffers(data_type, 2050, [valid, views, data])  # bytes under nulls do not count
    assert RecordColumns(column.slice(1)).value.null_count == 2046


def test_small_slice_far_into_a_large_column_is_accepted() -> None:
    column = large_column(2**31 + 5, 2**31 + 8, 2**31 + 8)
    assert RecordColumns(column.slice(1)).value.to_pylist() == [bytes(3), b""]


def test_small_slice_far_into_a_fixed_size_column_is_accepted() -> None:
    row = 2**27 - 1
    data = np.zeros(16 * (row + 2), np.uint8)  # only one page of it is touched
    data[-16:] = 7
    column = pa.Array.from_buffers(pa.binary(16), row + 2, [None, pa.py_buffer(data)])
    made = RecordColumns(column.slice(row)).value
    assert value_offsets(made).tolist() == [0, 16, 32]  # checked first, because wrapped offsets are a crash
    assert made.to_pylist() == [bytes(16), b"\7" * 16]


def test_chunks_above_2_gib_together_are_refused_by_name() -> None:
    chunk = large_column(2**30).cast(pa.binary())
    with pytest.raises(SerializationError, match="'value' holds more than 2147483647 bytes"):
        RecordColumns(pa.chunked_array([chunk, chunk]))


def test_headers_of_any_layout_become_lists_without_nulls() -> None:
    rows = [[{"key": "a", "value": b"1"}, {"key": "b", "value": None}], None, []]
    for list_type, key, value in (
        (pa.list_, pa.string(), pa.binary()),
        (pa.large_list, pa.large_string(), pa.large_binary()),
        (pa.list_, pa.string_view(), pa.binary_view()),
        (pa.list_, pa.binary(), pa.string()),
    ):
        array = pa.array(rows, list_type(pa.struct([("key", key), ("value", value)])))
        made = columns(headers=array).headers
        assert made.to_pylist() == [[{"key": b"a", "value": b"1"}, {"key": b"b", "value": None}], [], []]
        assert columns(headers=pa.concat_arrays([array, array]).slice(2, 3)).headers.to_pylist() == [
            [],
            [{"key": b"a", "value": b"1"}, {"key": b"b", "value": None}],
            [],
        ]


@pytest.mark.parametrize("of_lists", [pa.list_, pa.large_list])
def test_chunks_of_headers_need_not_fit_into_one_dictionary(of_lists: Any) -> None:
    """Bug: 200 headers, or two with a null between them, were refused as more than 2147483647 bytes."""

    def chunk(first: int) -> pa.Array:
        indices = pa.array(range(100), pa.int8())
        names = pa.DictionaryArray.from_arrays(indices, pa.array([f"name {first + row}" for row in range(100)]))
        values = pa.DictionaryArray.from_arrays(indices, pa.array([None, *[bytes([row]) for row in range(1, 100)]]))
        structs = pa.StructArray.from_arrays([names, values], ["Key", "value"])
        return pa.ListArray.from_arrays(pa.array(range(101), pa.int32()), structs).cast(of_lists(structs.type))

    headers = pa.chunked_array([chunk(0), chunk(100)])
    taken = RecordColumns(pa.nulls(200, pa.binary()), headers=headers).headers
    assert taken is not None
    assert taken.to_pylist()[:2] == [[{"key": b"name 0", "value": None}], [{"key": b"name 1", "value": b"\1"}]]
    assert taken.to_pylist()[199] == [{"key": b"name 199", "value": b"\x63"}]


@pytest.mark.parametrize("data_type", [*STRING_TYPES, *BINARY_TYPES, pa.binary(2)], ids=str)
def test_dictionaries_of_chunks_of_headers_have_any_layout(data_type: pa.DataType) -> None:
    """Bug: views raised ArrowNotImplementedError, because Arrow has no cast from such a dictionary."""
    entries = pa.array([b"aa", b"bb"], data_type if data_type == pa.binary(2) else pa.binary()).cast(data_type)
    texts = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), entries)
    chunk = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pa.StructArray.from_arrays([texts, texts], ["key", "value"])
    )
    taken = RecordColumns(pa.nulls(3, pa.binary()), headers=pa.chunked_array([chunk, chunk.slice(1)])).headers
    assert taken is not None
    assert taken.to_pylist() == [[{"key": each, "value": each}] for each in (b"bb", b"aa", b"aa")]


@pytest.mark.parametrize("chunks", [1, 2])
def test_dictionary_headers_above_2_gib_are_refused_by_name(chunks: int) -> None:
    """Bug: it was a plain ArrowInvalid, after 2 GiB had been written."""
    indices = pa.array(np.zeros(2048, np.int32))
    texts = pa.DictionaryArray.from_arrays(indices, pa.array([bytes(1 << 20)], pa.binary()))
    chunk = pa.ListArray.from_arrays(
        pa.array(range(2049), pa.int32()), pa.StructArray.from_arrays([texts, texts], ["key", "value"])
    )
    with pytest.raises(SerializationError, match="holds more than 2147483647 bytes"):
        RecordColumns(pa.nulls(2048 * chunks, pa.binary()), headers=pa.chunked_array([chunk] * chunks))


def test_header_without_a_key_is_refused_with_its_row() -> None:
    rows = [[{"key": "a", "value": b""}], None, [{"key": "b", "value": b""}, {"key": None, "value": b"x"}]]
    array = pa.array([[{"key": None, "value": None}], *rows], HEADER_TYPE)
    with pytest.raises(SerializationError, match=r"Row 2 has a header without a key in the column 'headers'"):
        columns(headers=array.slice(1))
    with pytest.raises(SerializationError, match="Row 1 has a header without a key"):
        columns(headers=pa.array([None, [None], None], HEADER_TYPE))


def test_null_header_key_in_a_dictionary_names_its_row() -> None:
    keys = pa.DictionaryArray.from_arrays(pa.array([0, 0, 1], pa.int8()), pa.array(["a", None]))
    structs = pa.StructArray.from_arrays([keys, pa.array([b"1", None, b"3"])], ["key", "value"])
    array = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3], pa.int32()), structs)
    with pytest.raises(SerializationError, match="Row 2 has a header without a key"):
        columns(headers=array)
    assert columns(headers=array.slice(0, 2), value=pa.array([b"v"] * 2)).num_rows == 2


def test_null_list_over_headers_has_none_in_final_layout() -> None:
    structs = pa.StructArray.from_arrays([pa.array([b"a", b"b"]), pa.array([b"1", b"2"])], ["key", "value"])
    array = pa.ListArray.from_arrays(pa.array([0, 1, 2, 2], pa.int32()), structs, mask=pa.array([False, True, False]))
    assert columns(headers=array).headers.to_pylist() == [[{"key": b"a", "value": b"1"}], [], []]


def test_header_without_a_key_is_refused_in_the_final_layout() -> None:
    array = pa.array([[{"key": b"a", "value": b""}], [{"key": None, "value": b""}], []], arrow_header_type())
    with pytest.raises(SerializationError, match="Row 1"):
        columns(headers=array)
    fields = [pa.array([b"a", b"b"]), pa.array([b"1", b"2"])]  # a null header may have a key
    structs = pa.StructArray.from_arrays(fields, ["key", "value"], mask=pa.array([False, True]))
    with pytest.raises(SerializationError, match="Row 2"):
        columns(headers=pa.ListArray.from_arrays(pa.array([0, 1, 1, 2], pa.int32()), structs))


@pytest.mark.parametrize("key_type", [pa.string(), pa.large_binary(), pa.binary_view(), arrow.BINARY], ids=str)
def test_header_key_beyond_utf_8_is_refused_with_its_row(key_type: pa.DataType) -> None:
    names = [b"\xfe", b"b", "größe".encode(), b"a", "ß".encode(), b"\xff", b"\xfe"]
    keys = pa.array(names, pa.binary())
    if pa.types.is_string(key_type):  # as Spark may pass it: its strings are not checked
        keys = pa.StringArray.from_buffers(len(keys), *keys.buffers()[1:])
    else:
        keys = keys.cast(key_type)
    structs = pa.StructArray.from_arrays([keys, pa.array([b"1"] * 7, arrow.BINARY)], ["key", "value"])
    array = pa.ListArray.from_arrays(pa.array([0, 2, 3, 3, 4, 6, 7], pa.int32()), structs)
    with pytest.raises(
        SerializationError, match=r"Row 3 has the header key b'\\xff' in the column 'headers', .* UTF-8"
    ):
        RecordColumns(pa.array([b"v"] * 5), headers=array.slice(1))
    assert columns(headers=array.slice(1, 3)).headers.to_pylist()[0] == [{"key": "größe".encode(), "value": b"1"}]
    with pytest.raises(SerializationError, match="Row 0 "):  # half a character, valid only with its neighbour's half
        columns(
            headers=pa.array(
                [[{"key": b"\xc3", "value": b""}, {"key": b"\x9f", "value": b""}]] * 3, arrow_header_type()
            )
        )


def test_header_keys_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = columns(headers=pa.array([[{"key": "ß", "value": b"1"}]] * 3, HEADER_TYPE))

    def again(array: pa.Array) -> pa.Array:
        raise AssertionError("looked at again")

    monkeypatch.setattr("spark_kafka_sink.record.columns.normalise_headers", again)
    assert made.slice(1, 2).take(np.array([1])).headers.to_pylist() == [[{"key": "ß".encode(), "value": b"1"}]]


def arrow_header_type() -> pa.DataType:
    return pa.list_(pa.struct([("key", arrow.BINARY), ("value", arrow.BINARY)]))


def test_rows_of_python_values_become_columns() -> None:
    made = RecordColumns.from_rows(
        [b"a", "größe", None], ["k", None, b""], [[("h", b"1"), ("i", None)], None, []], [5, None, -1], [0, None, 7]
    )
    assert made.value.to_pylist() == [b"a", "größe".encode(), None]
    assert made.key.to_pylist() == [b"k", None, b""]
    assert made.headers.to_pylist() == [[{"key": b"h", "value": b"1"}, {"key": b"i", "value": None}], [], []]
    assert made.timestamp_ms.to_pylist() == [5, None, -1]
    assert made.partition.to_pylist() == [0, None, 7]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"values": [b"a", 7]}, "The value of row 1 is a int"),
        ({"values": [b"a", b"b"], "keys": [None, object()]}, "The key of row 1 is a object"),
        ({"values": [b"a"], "timestamps_ms": [2**63]}, "The timestamp_ms of row 0 is [0-9]+, and does not fit"),
        ({"values": [b"a"], "partitions": [2**31]}, "The partition of row 0 is [0-9]+, and does not fit"),
        ({"values": [b"a"], "headers": [["x"]]}, "headers? of row 0 (is|are) a"),
        ({"values": [b"a"], "headers": [{"id": b"7"}]}, "headers? of row 0 (is|are) a"),
        ({"values": [b"a", b"b"], "headers": [[], [(None, b"x")]]}, "A header key of row 1 is a NoneType"),
        ({"values": [b"a"], "headers": [[("n", 5)]]}, "The value of header 'n' in row 0 is a int"),
        ({"values": [b"a", b"b"], "headers": [[("ß", b"")], [(b"\xff", b"")]]}, r"Row 1 has the header key b'\\xff'"),
    ],
)
def test_value_of_a_wrong_type_is_refused_with_its_row(rows: dict[str, Any], message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        RecordColumns.from_rows(**rows)


def test_headers_above_32_bit_offsets_are_refused_by_name() -> None:
    headers = pa.array([{"key": "h", "value": b""}], HEADER_TYPE.value_type)
    offsets = pa.py_buffer(np.array([0, 2**31, 1], np.int64))  # Arrow checks only the last one
    column = pa.Array.from_buffers(pa.large_list(headers.type), 2, [None, offsets], children=[headers]).slice(0, 1)
    with pytest.raises(SerializationError, match=r"'headers' holds more than 2\^31 headers; hand over fewer rows"):
        RecordColumns(pa.array([b"v"]), headers=column)


def test_empty_slice_of_fixed_size_values_is_read() -> None:
    """Bug: a slice at the end of a column without values was an ArrowIndexError of pyarrow."""
    column = pa.Array.from_buffers(pa.binary(4), 0, [None, pa.py_buffer(b"")], offset=1)
    assert RecordColumns(column).num_rows == 0


def test_headers_of_no_rows_need_no_offsets() -> None:
    """Other Arrow libraries make empty lists like this."""
    final = RecordColumns(pa.array([b"v"]), headers=pa.array([[]], HEADER_TYPE)).headers.type
    column = pa.Array.from_buffers(final, 0, [None, pa.py_buffer(b"")], children=[pa.array([], final.value_type)])
    made = RecordColumns(pa.array([], pa.binary()), headers=column)
    assert (made.num_rows, record_size_upper_bounds(made).tolist(), columns_size_upper_bound(made)) == (0, [], 0)


@pytest.mark.parametrize(
    ("number", "unit"),
    [(1_764_000_000, "seconds"), (1_764_000_000_000_000, "microseconds"), (1_764_000_000_000_000_000, "nanoseconds")],
)
def test_a_number_in_another_unit_is_refused_by_columns(number: int, unit: str) -> None:
    with pytest.raises(SchemaError, match=f"looks like {unit}"):
        epoch_ms(pa.array([None, number]), "advice")


def test_early_dates_and_minus_one_pass_by_columns() -> None:
    typed = pa.array([157_766_400_000_000, -1_000], pa.timestamp("us", "UTC"))
    assert epoch_ms(typed, "advice").to_pylist() == [157_766_400_000, None]
    assert epoch_ms(pa.array([1_764_000_000, -1]), None).to_pylist() == [1_764_000_000, None]


# ---- one more header -------------------------------------------------------------------------------------------------

NAMED = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.mark.parametrize("given", [None, [[("a", b"1"), ("b", None)], None, [], [("c", b"")], [("d", b"4")]]])
@pytest.mark.parametrize("rows", [slice(0, 5), slice(1, 4), slice(2, 2)])
def test_a_header_is_added_to_each_record_that_is_not_null(given: list[Any] | None, rows: slice) -> None:
    records = pa.array([b"v", b"v", None, b"v", None])
    headers = None if given is None else pa.array(given, NAMED)[rows]
    found = with_header(headers, "id", b"\0\1", records[rows]).to_pylist()
    expected = [
        [*(own or ()), *([] if record is None else [("id", b"\0\1")])]
        for own, record in zip((given or [None] * 5)[rows], records.to_pylist()[rows], strict=True)
    ]
    assert found == [[{"key": key.encode(), "value": value} for key, value in row] for row in expected]


@pytest.mark.parametrize("rows", [slice(0, 7), slice(1, 5), slice(3, 4), slice(4, 7), slice(2, 2)])
def test_a_header_is_added_to_each_record_without_one_of_its_name(rows: slice) -> None:
    given = [[("a", b"1"), ("id", None)], None, [], [("id", b""), ("id", b"x")], [("c", b"")], [("ID", b"4")], None]
    made = RecordColumns(pa.array([b"v"] * 7)[rows], headers=pa.array(given, NAMED)[rows])
    found = made.with_header(("id", b"\0\1")).headers.to_pylist()
    expected = [[*(own or ()), *([] if "id" in dict(own or ()) else [("id", b"\0\1")])] for own in given[rows]]
    assert found == [[{"key": key.encode(), "value": value} for key, value in row] for row in expected]


def test_a_header_of_all_records_leaves_the_other_columns_as_they_are() -> None:
    made = columns(
        key=pa.array([b"k"] * 3), timestamp_ms=pa.array([1, 2, 3]), partition=pa.array([0, 1, 2], pa.int32())
    )
    found = made.with_header(("id", b"7"))
    assert found.headers.to_pylist() == [[{"key": b"id", "value": b"7"}]] * 3
    for name in ("value", "key", "timestamp_ms", "partition"):
        assert getattr(found, name) is getattr(made, name)
    assert made.headers is None


def test_headers_above_two_gib_are_refused() -> None:
    with pytest.raises(SerializationError, match="hand over fewer rows at a time"):
        with_missing_header(None, "id", b"x" * 1024, 2**21)
