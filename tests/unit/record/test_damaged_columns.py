"""Columns whose offsets or views lead out of their buffers, as in a damaged stream of Arrow, which pyarrow reads."""

from __future__ import annotations

import io
import struct
from array import array as array_of
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.headers import HEADERS
from spark_kafka_sink.record.tables import BY_NAME, Table


def view(length: int, buffer: int, offset: int) -> bytes:
    return struct.pack("<i4sii", length, b"xxxx", buffer, offset)


def views(*each: bytes) -> pa.Array:
    whole = view(20, 0, 0)
    return pa.Array.from_buffers(
        pa.binary_view(), 1 + len(each), [None, pa.py_buffer(whole + b"".join(each)), pa.py_buffer(b"x" * 30)]
    )


def texts(data_type: pa.DataType, *offsets: int) -> pa.Array:
    width = np.int64 if pa.types.is_large_string(data_type) else np.int32
    buffers = [None, pa.py_buffer(np.array(offsets, width)), pa.py_buffer(b"hello world")]
    return pa.Array.from_buffers(data_type, len(offsets) - 1, buffers)


DAMAGED: Mapping[str, Callable[[], pa.Array]] = {
    "a view of no buffer": lambda: views(view(20, 7, 0)),
    "a view of a buffer before the first": lambda: views(view(20, -1, 0)),
    "a view beyond its buffer": lambda: views(view(20, 0, 1 << 28)),
    "a view that ends beyond its buffer": lambda: views(view(20, 0, 11)),
    "a view of less than nothing": lambda: views(view(-5, 0, 0)),
    "a large offset beyond the data": lambda: texts(pa.large_string(), 0, 1 << 40, 11),
    "a large offset that is another one in 32 bits": lambda: texts(pa.large_string(), 0, (1 << 32) + 3, 11),
    "a large offset before the data": lambda: texts(pa.large_string(), 0, -3, 11),
    "an index beyond the dictionary": lambda: pa.DictionaryArray.from_arrays(
        pa.array([0, 77], pa.int8()), pa.array(["a", "b"]), safe=False
    ),
    "a dictionary of damaged texts": lambda: pa.DictionaryArray.from_arrays(
        pa.array([0, 1], pa.int8()), texts(pa.string(), 0, 4_000, 11), safe=False
    ),
    "chunks of which one is damaged": lambda: pa.chunked_array(
        [pa.array(["whole"]), texts(pa.string(), 0, 4_000, 11).slice(0, 1)]
    ),
}


@pytest.mark.parametrize("column", ["value", "key", "headers.key", "headers.value"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_column_is_refused(damage: str, column: str) -> None:
    """Bug: Arrow's functions do not look where offsets and views lead. Records had bytes of other memory of the
    process, without an error, or the process ended.
    """
    array = DAMAGED[damage]()
    if column == "key":
        columns = {"value": pa.nulls(len(array), pa.binary()), "key": array}
    elif column == "value":
        columns = {"value": array}
    else:
        array = DAMAGED["a large offset beyond the data"]() if isinstance(array, pa.ChunkedArray) else array
        good = pa.array([b"h"] * len(array), pa.binary())
        fields = {"key": good, "value": good, column.removeprefix("headers."): array}
        structs = pa.StructArray.from_arrays([*fields.values()], [*fields])
        lists = pa.ListArray.from_arrays(pa.array(range(len(array) + 1), pa.int32()), structs)
        columns = {"value": pa.nulls(len(array), pa.binary()), "headers": lists}
    with pytest.raises(SerializationError, match=rf"^The column '{column}' is damaged where its values are found: "):
        RecordColumns(**columns)


@pytest.mark.parametrize("damaged", ["key", "value"])
@pytest.mark.parametrize("key_type", [pa.string(), pa.binary()], ids=["strings", "the final layout"])
def test_headers_with_damaged_texts_are_refused(key_type: pa.DataType, damaged: str) -> None:
    types = {"key": key_type, "value": pa.binary()}
    fields = {name: pa.array([b"h", b"h"], data_type) for name, data_type in types.items()}
    fields[damaged] = texts(types[damaged], 0, 4_000, 11)
    structs = pa.StructArray.from_arrays([*fields.values()], [*fields])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), structs)
    assert (lists.type == HEADERS) == (key_type == pa.binary())
    with pytest.raises(SerializationError, match=rf"^The column 'headers\.{damaged}' is damaged"):
        RecordColumns(pa.array([b"v", b"v"]), headers=lists)


@pytest.mark.parametrize("offsets", [(0, 2, 1), (0, 900, 2)])
@pytest.mark.parametrize("key_type", [pa.string(), pa.binary()])
@pytest.mark.parametrize("list_type", [pa.list_, pa.large_list])
def test_damaged_list_of_headers_is_refused(
    list_type: Callable[[pa.DataType], pa.DataType], key_type: pa.DataType, offsets: tuple[int, ...]
) -> None:
    header_type = pa.struct([("key", key_type), ("value", pa.binary())])
    headers = pa.array([{"key": b"a", "value": b"1"}, {"key": b"b", "value": b"2"}], header_type)
    width = np.int64 if list_type is pa.large_list else np.int32
    buffers = [None, pa.py_buffer(np.array(offsets, width))]
    column = pa.Array.from_buffers(list_type(headers.type), 2, buffers, children=[headers])
    with pytest.raises(SerializationError, match=r"^The column 'headers' is damaged where its values are found: "):
        RecordColumns(pa.array([b"v", b"v"]), headers=column)


def test_rows_of_a_damaged_column_are_not_taken() -> None:
    columns = RecordColumns(
        texts(pa.string(), 0, 4_000, 11)
    )  # the kernel checks 32-bit offsets, and nothing is encoded
    with pytest.raises(SerializationError, match=r"^The column 'value' is damaged where its values are found: "):
        columns.take(np.array([1, 0]))


def from_stream(column: pa.Array, whole: bytes, damaged: bytes) -> pa.Table:
    """Return a table of a stream in which `whole` bytes were replaced."""
    batch = pa.record_batch([column, pa.array(["a", "b"])], names=["value", "topic"])
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    assert stream.getvalue().count(whole) == 1
    return pa.ipc.open_stream(stream.getvalue().replace(whole, damaged)).read_all()


@pytest.mark.parametrize("topic", ["one for all", None])
@pytest.mark.parametrize("data_type", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_table_with_text_beyond_its_buffer_is_refused(data_type: pa.DataType, topic: str | None) -> None:
    """Bug: pyarrow gave the table on with a buffer as long as its last offset said, so a record had other memory."""
    column = pa.array(["hello", "world!"])
    column = column.dictionary_encode() if pa.types.is_dictionary(data_type) else column.cast(data_type)
    layout = "<qqq" if data_type == pa.large_string() else "<iii"
    data = from_stream(column, struct.pack(layout, 0, 5, 11), struct.pack(layout, 0, 5, 300))
    names = {"value": "value", "topic": None if topic else BY_NAME}
    with pytest.raises(SerializationError, match=r"is damaged where its values are found|is out of bounds"):
        encode(Table(data, topic, names))


def test_table_with_a_damaged_column_of_topics_is_refused() -> None:
    table = pa.table({"value": ["v", "v"], "topic": texts(pa.string(), 0, 4_000, 11)})
    with pytest.raises(SerializationError, match=r"^The column 'topic' is damaged where its values are found: "):
        encode(Table(table, None, {"value": "value", "topic": BY_NAME}))


def test_table_with_an_index_beyond_its_dictionary_is_refused() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 77], pa.int8()), pa.array(["a", "b"]), safe=False)
    with pytest.raises(SerializationError, match=r"is damaged where its values are found: Index 77 out of bounds"):
        encode(Table(pa.table({"value": column}), "t", {"value": "value", "topic": None}))


def encode(table: Table) -> None:
    for part in table.parts():
        for _, columns in part.by_topic():
            Block(columns, 0, 0).encode(array_of("q", [0, columns.num_rows, 0, 0]))
