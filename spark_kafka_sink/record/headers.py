"""Record headers as Arrow columns: checked, and encoded for all records of a block at once.

Holds no state; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record.arrow import (
    BINARY,
    MAX_COLUMN_BYTES,
    BoolArray,
    Int64Array,
    as_binary,
    binary_array,
    binary_from_numpy,
    binary_scalar,
    bool_values,
    byte_lengths,
    checked,
    damaged,
    data_bytes,
    index_array,
    int_values,
    is_bytes_like,
    null_mask,
    too_large,
    value_bytes,
    value_offsets,
    value_size,
)
from spark_kafka_sink.record.varints import length_widths, to_binary, varint_fields, zigzag

Header = tuple[str, bytes | None]
"""A record header: its name, and its value or None."""

HEADERS = pa.list_(pa.struct([pa.field("key", BINARY), pa.field("value", BINARY)]))
"""The type that normalise_headers returns. The key is UTF-8."""

_TOO_MANY: Final = "The column 'headers' holds more than 2^31 headers; hand over fewer rows at a time."
_STRING = pa.string()
_EMPTY = binary_scalar(b"")


class EncodedHeaders(NamedTuple):
    """The headers of each row: `counts` (int64), `encoded` (binary, all headers) and `lengths` (int64, bytes)."""

    counts: Int64Array
    encoded: pa.BinaryArray
    lengths: Int64Array


def is_list_of_headers(data_type: pa.DataType) -> bool:
    """Return whether a column of this type can be headers."""
    return (pat.is_list(data_type) or pat.is_large_list(data_type)) and _is_header(data_type.value_type)


def decoded_chunks(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return `column`, without dictionaries if it has several chunks of headers.

    Arrow unites dictionaries only if none has a null and the indices have room for all entries. Raises
    SerializationError above 2 GiB.
    """
    if not isinstance(column, pa.ChunkedArray) or column.num_chunks == 1 or not is_list_of_headers(column.type):
        return column
    if not any(pat.is_dictionary(each.type) for each in column.type.value_type):
        return column
    return pa.chunked_array([_as_headers(chunk) for chunk in column.iterchunks()], HEADERS)


def normalise_headers(array: pa.Array) -> pa.Array:
    """Return headers of any list, string and binary layout as HEADERS. Null lists become empty.

    Raises SchemaError for another type, and SerializationError with the row for a header without a name or with a name
    that is not UTF-8.
    """
    data_type = array.type
    if data_type == HEADERS and array.null_count == 0:
        structs = array.values
        if structs.null_count == 0 and structs.field(0).null_count == 0:
            bounds = _list_bounds(array)
            first, last = int(bounds[0]), int(bounds[-1])
            _check_lists(array, bounds[1:] - bounds[:-1])
            names, values = (column.slice(first, last - first) for column in structs.flatten())
            checked(names, "headers.key")
            checked(values, "headers.value")
            _check_names(names, bounds[1:] - first)
            return array
    if not is_list_of_headers(data_type):
        raise SchemaError(
            f"The column 'headers' has the Arrow type {data_type}; it must be list<struct<key: string, value: binary>>."
        )
    headers = _as_headers(array)
    names, ends = headers.values.flatten()[0], _list_bounds(headers)[1:]
    unnamed = null_mask(names)  # by `names`, because in `array` the null may be in a dictionary
    if unnamed is not None:
        nameless = int(unnamed.argmax())
        row = int(np.searchsorted(ends, nameless, side="right"))
        raise SerializationError(
            f"Row {row} has a header without a key in the column 'headers'; give every header one."
        )
    _check_names(names, ends)
    return headers


def _as_headers(array: pa.Array) -> pa.Array:
    """Return the column as HEADERS. Null lists become empty. Names are not checked, and may be null."""
    counts = int_values(pc.list_value_length(array)).astype(np.int64)
    ends = np.cumsum(counts)
    if len(ends) and int(ends[-1]) > np.iinfo(np.int32).max:
        raise SerializationError(_TOO_MANY)
    _check_lists(array, counts)
    keys, values = array.flatten().flatten()
    children = [checked(as_binary(keys, "headers.key"), "headers.key")]
    children.append(checked(as_binary(values, "headers.value"), "headers.value"))
    offsets = np.zeros(len(counts) + 1, np.int32)
    offsets[1:] = ends
    structs = pa.StructArray.from_arrays(children, ["key", "value"])
    return pa.ListArray.from_arrays(index_array(offsets), structs)


def _check_lists(array: pa.Array, counts: Int64Array) -> None:
    """Raise SerializationError if the lists, which have `counts` headers, do not lie one after the other within the
    headers.
    """
    try:
        array.validate()  # the first and the last bound
    except (pa.ArrowInvalid, pa.ArrowIndexError) as error:
        raise damaged("headers", error) from error
    if len(counts) and int(counts.min()) < 0:
        raise damaged("headers", f"row {int(counts.argmin())} has {int(counts.min())} headers")


def _check_names(names: pa.BinaryArray, ends: Int64Array) -> None:
    """Raise SerializationError with its row for the first of `names` that is not UTF-8.

    `ends`: the end of the names of each row. Strings are checked too, because those of Spark may hold any bytes.
    """
    offsets = value_offsets(names)
    data = value_bytes(names)[offsets[0] : offsets[-1]]
    if not len(data) or data.max() < 0x80:  # ASCII: cheap to check
        return
    if _are_utf_8(names):
        return
    index = next(index for index, name in enumerate(names) if not _is_utf_8(name.as_py()))
    row = int(np.searchsorted(ends, index, side="right"))
    raise SerializationError(
        f"Row {row} has the header key {names[index].as_py()!r} in the column 'headers', which is not UTF-8; the"
        " names of headers are text."
    )


def header_lists(array: pa.Array) -> list[list[dict[str, bytes | None]]]:
    """Return the headers of each row of a column in any layout: `key` and `value` as bytes, None for what is missing.
    One Python object for each header. Strings may hold any bytes.
    """
    headers: list[list[dict[str, bytes | None]]] = _as_headers(array).to_pylist()
    return headers


def misnamed_rows(array: pa.Array) -> tuple[BoolArray, BoolArray]:
    """Return which rows of a column in any layout of headers have a header without a name, and which have one whose
    name is not UTF-8.
    """
    headers = _as_headers(array)
    names, ends = headers.values.flatten()[0], _list_bounds(headers)[1:]
    nulls = null_mask(names)
    unnamed = np.zeros(0, np.intp) if nulls is None else np.flatnonzero(nulls)
    faulty = np.zeros((2, len(array)), np.bool_)
    faulty[0, np.searchsorted(ends, unnamed, side="right")] = True
    data = value_bytes(names)
    if len(data) and data.max() >= 0x80 and not _are_utf_8(names):
        wrong = [at for at, name in enumerate(names) if name.is_valid and not _is_utf_8(name.as_py())]
        faulty[1, np.searchsorted(ends, wrong, side="right").astype(np.intp)] = True
    return faulty[0], faulty[1]


def _are_utf_8(names: pa.BinaryArray) -> bool:
    """Return whether all names that are not null are UTF-8."""
    try:
        names.cast(_STRING)
    except pa.ArrowInvalid:
        return False
    return True


def _is_utf_8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def with_header(headers: pa.Array | None, name: str, value: bytes, records: pa.Array) -> pa.Array:
    """Return `headers` with one more at the end of each row that is not null in `records`: HEADERS.

    `headers`: any layout that `normalise_headers` takes, None for no headers; of the length of `records`. Raises as
    `normalise_headers`.
    """
    nulls = null_mask(records)
    if headers is None and nulls is None:
        return _same_header(name, value, len(records))
    given = normalise_headers(pa.nulls(len(records), HEADERS) if headers is None else headers)
    return _with_header(given, name, value, np.ones(len(records), np.bool_) if nulls is None else ~nulls)


def with_missing_header(headers: pa.Array | None, name: str, value: bytes, rows: int) -> pa.Array:
    """Return `headers`, from normalise_headers, with one more at the end of each row that has none of this name:
    HEADERS. `headers` None: none of the `rows` has any.
    """
    if headers is None:
        return _same_header(name, value, rows)
    bounds = _list_bounds(headers)
    first, last = int(bounds[0]), int(bounds[-1])
    if first == last:
        return _same_header(name, value, rows)
    names = headers.values.flatten()[0].slice(first, last - first)
    own = np.flatnonzero(bool_values(pc.equal(names, binary_scalar(name.encode()))))
    is_added = np.ones(rows, np.bool_)
    is_added[np.searchsorted(bounds[1:] - first, own, side="right")] = False
    return _with_header(headers, name, value, is_added)


def without_headers(headers: pa.Array, name: str) -> pa.Array:
    """Return `headers` without those of this name: as they are if there are none, else HEADERS with names that are not
    checked. `headers`: any layout that `normalise_headers` takes; another one is returned as it is.
    """
    if not is_list_of_headers(headers.type):
        return headers
    names, wanted = headers.flatten().flatten()[0], name.encode()
    # nearly always no name is as long: this costs a quarter of the comparison
    if _is_plain(names.type) and not (int_values(pc.binary_length(names)) == len(wanted)).any():
        return headers
    given = _as_headers(headers)
    is_kept = ~bool_values(pc.equal(given.values.field(0), binary_scalar(wanted)).fill_null(False))
    if is_kept.all():
        return headers
    kept_before = np.concatenate(([0], np.cumsum(is_kept)))
    offsets = index_array(kept_before[_list_bounds(given)].astype(np.int32))
    return pa.ListArray.from_arrays(offsets, given.values.filter(pa.array(is_kept)))


def _is_plain(data_type: pa.DataType) -> bool:
    """Return whether Arrow knows the lengths of the cells. It does not for dictionaries and views."""
    return any(kind(data_type) for kind in (pat.is_string, pat.is_binary, pat.is_large_string, pat.is_large_binary))


def is_list_of_pairs(headers: Any) -> bool:
    """Return whether an object can be the headers of one record."""
    return type(headers) is list or _is_list(headers)


def _same_header(name: str, value: bytes, rows: int) -> pa.Array:
    """Return this header for each of `rows` rows: HEADERS."""
    children = []
    for content in (name.encode(), value):
        if len(content) * rows > MAX_COLUMN_BYTES:
            raise SerializationError(_TOO_MANY)
        offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(len(content))
        children.append(binary_from_numpy(offsets, np.frombuffer(content * rows + b"\0", np.uint8)))
    structs = pa.StructArray.from_arrays(children, ["key", "value"])
    return pa.ListArray.from_arrays(index_array(np.arange(rows + 1, dtype=np.int32)), structs)


def _with_header(given: pa.Array, name: str, value: bytes, is_added: BoolArray) -> pa.Array:
    """Return headers, from normalise_headers, with one more at the end of each row of `is_added`."""
    rows, added = len(given), is_added.astype(np.int64)
    bounds = _list_bounds(given)
    first, old = int(bounds[0]), np.diff(bounds)
    ends = np.zeros(rows + 1, np.int64)
    np.cumsum(old + added, out=ends[1:])
    if int(ends[-1]) > np.iinfo(np.int32).max:
        raise SerializationError(_TOO_MANY)
    count = int(bounds[-1]) - first
    order = np.full(int(ends[-1]), count, np.int64)  # the new header comes after the old ones
    moved_by = np.cumsum(added) - added
    order[np.arange(count) + np.repeat(moved_by, old)] = np.arange(count)
    columns = zip(given.values.flatten(), (name.encode(), value), strict=True)
    children = [
        pa.concat_arrays([column.slice(first, count), binary_array([new], "headers")]).take(index_array(order))
        for column, new in columns
    ]
    structs = pa.StructArray.from_arrays(children, ["key", "value"])
    return pa.ListArray.from_arrays(index_array(ends.astype(np.int32)), structs)


def encode_headers(headers: pa.Array) -> EncodedHeaders | None:
    """Encode the headers of every row, from normalise_headers or slices of its result. None if no row has headers."""
    rows = len(headers)
    bounds = _list_bounds(headers)
    first, last = int(bounds[0]), int(bounds[-1])
    if first == last:
        return None
    keys, values = (column.slice(first, last - first) for column in headers.values.flatten())
    if _is_one_for_all(bounds, keys, values):
        return _encoded_for_all(headers)
    key_sizes = to_binary(varint_fields(zigzag(byte_lengths(keys))), last - first)
    value_sizes = to_binary(varint_fields(zigzag(byte_lengths(values))), last - first)
    joined = pc.binary_join_element_wise(key_sizes, keys, value_sizes, values, _EMPTY, null_handling="skip")
    offsets = value_offsets(joined)[bounds - first]
    encoded = pa.BinaryArray.from_buffers(BINARY, rows, [None, pa.py_buffer(offsets), joined.buffers()[2]])
    return EncodedHeaders(bounds[1:] - bounds[:-1], encoded, (offsets[1:] - offsets[:-1]).astype(np.int64))


def _is_one_for_all(bounds: Int64Array, keys: pa.BinaryArray, values: pa.BinaryArray) -> bool:
    """Return whether each of several rows has one header, and all have the same one, with a value."""
    rows = len(bounds) - 1
    if rows < 2 or len(keys) != rows or not (bounds[1:] - bounds[:-1] == 1).all():
        return False
    return not values.null_count and _is_repeated(keys) and _is_repeated(values)


def _is_repeated(column: pa.BinaryArray) -> bool:
    """Return whether all cells are equal. Two looks are enough for most columns whose cells are not."""
    offsets = value_offsets(column)
    size = int(offsets[1] - offsets[0])
    if size * len(column) != offsets[-1] - offsets[0] or not (offsets[1:] - offsets[:-1] == size).all():
        return False
    data = value_bytes(column)[offsets[0] : offsets[-1]]
    return bool((data[:size] == data[len(data) - size :]).all()) and np.array_equal(
        data[size:], data[: len(data) - size]
    )


def _encoded_for_all(headers: pa.Array) -> EncodedHeaders:
    """Encode the header that each row has: telemetry.headers.traceparent writes one for all records of a task."""
    rows = len(headers)
    one = encode_headers(headers.slice(0, 1))
    assert one is not None
    content, size = one.encoded[0].as_py(), int(one.lengths[0])
    if size * rows > MAX_COLUMN_BYTES:
        raise too_large("headers")
    encoded = binary_from_numpy(
        np.arange(rows + 1, dtype=np.int32) * np.int32(size), np.frombuffer(content * rows, np.uint8)
    )
    return EncodedHeaders(np.ones(rows, np.int64), encoded, np.full(rows, size, np.int64))


def headers_size(array: pa.Array) -> int:
    """Return the bytes of all names and values of headers in any layout."""
    return sum(map(value_size, array.flatten().flatten()))


def headers_upper_bounds(headers: pa.Array) -> Int64Array:
    """Return the most bytes of the headers of each row, without their count: int64."""
    bounds, keys, values = _lengths(headers)
    # Each of the two lengths takes at most five bytes.
    return _by_row(keys + np.maximum(values, 0) + 10, bounds)


def all_headers_upper_bound(headers: pa.Array) -> int:
    """Return the most bytes of the headers of all rows, without their counts and without reading each length."""
    bounds = _list_bounds(headers)
    first, last = int(bounds[0]), int(bounds[-1])
    columns = (column.slice(first, last - first) for column in headers.values.flatten())
    return 10 * (last - first) + sum(map(data_bytes, columns))


def tight_headers_sizes(headers: pa.Array) -> tuple[Int64Array, Int64Array]:
    """Return the count of headers of each row, and their bytes without the count: int64."""
    bounds, keys, values = _lengths(headers)
    widths = length_widths(keys) + length_widths(values)
    return bounds[1:] - bounds[:-1], _by_row(keys + np.maximum(values, 0) + widths, bounds)


def _lengths(headers: pa.Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the bounds of the headers of each row, from 0, and the lengths of all keys and values, -1 for a null."""
    bounds = _list_bounds(headers)
    first, last = int(bounds[0]), int(bounds[-1])
    keys, values = (byte_lengths(column.slice(first, last - first)) for column in headers.values.flatten())
    return bounds - first, keys, values


def _by_row(sizes: Int64Array, bounds: Int64Array) -> Int64Array:
    """Return the sum of `sizes` for each row."""
    sums = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=sums[1:])
    ends = sums[bounds]
    return ends[1:] - ends[:-1]


def headers_from_rows(rows: Sequence[Sequence[Header] | None], numbers: Sequence[int] | None = None) -> pa.Array:
    """Return HEADERS of Python lists. `numbers`: the number of each row for errors, its index if None.

    Raises SerializationError with the first row whose headers have no form that `header_pairs` takes.
    """
    numbers = range(len(rows)) if numbers is None else numbers
    counts: list[int] = []
    keys: list[Any] = []
    values: list[Any] = []
    for number, row in zip(numbers, rows, strict=True):
        pairs = () if row is None else header_pairs(row, f"row {number}")
        counts.append(len(pairs))
        for key, value in pairs:
            keys.append(key)
            values.append(value)
    return headers_from_cells(counts, keys, values, numbers)


def headers_from_cells(
    counts: Sequence[int], keys: Sequence[Any], values: Sequence[Any], numbers: Sequence[int] | None = None
) -> pa.Array:
    """Return HEADERS of the keys and values of all rows, `counts[i]` of them for row i, as `header_pairs` returns them.

    `numbers` as for `headers_from_rows`. Raises SerializationError with the row for text that UTF-8 cannot encode.
    """
    if len(keys) > np.iinfo(np.int32).max:
        raise SerializationError(_TOO_MANY)
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(np.fromiter(counts, np.int32, len(counts)), out=offsets[1:])
    columns = (keys, "header key"), (values, "header value")
    children = [binary_array(column, name, numbers, offsets) for column, name in columns]
    structs = pa.StructArray.from_arrays(children, ["key", "value"])
    return pa.ListArray.from_arrays(index_array(offsets), structs)


def header_pairs(headers: Any, whose: str, *, takes_unnamed: bool = False) -> list[tuple[Any, Any]]:
    """Return the headers of one record as pairs of str or bytes and str, bytes or None. With `takes_unnamed` a name may
    be None, and so may a header, which has no name and no value then, as in a column of Arrow.

    Later changes of the given objects do not change the pairs. `headers`: an iterable of pairs (key, value) as tuples
    or lists, or of Rows, named tuples and mappings with the fields key and value in any order. Raises
    SerializationError, with the record in `whose`, for anything else.
    """
    if not is_list_of_pairs(headers):
        raise SerializationError(f"The headers of {whose} are a {_described(headers)}; {_FORMS}.")
    pairs = []
    for header in headers:
        if type(header) is tuple and len(header) == 2 and type(header[0]) is str and type(header[1]) in _FIXED:
            pairs.append(header)  # the usual case, without a call
        else:
            pairs.append(_checked_pair(header, whose, takes_unnamed=takes_unnamed))
    return pairs


def _is_list(headers: Any) -> bool:
    return isinstance(headers, Iterable) and not isinstance(headers, _NOT_A_LIST) and field_names(headers) is None


_NOT_A_LIST: Final = (str, bytes, bytearray, memoryview, Mapping, set, frozenset)
"""Types that Python can iterate over, but that have no headers, or no order."""
_TEXT: Final = (str, bytes)
_BYTES: Final = (bytes, bytearray, memoryview)
_FIXED: Final = (bytes, str, type(None))
_KEY_VALUE: Final = ["key", "value"]
_FORMS: Final = (
    'give a list in which each header is a pair ("name", b"value"), or a Row, named tuple or dict with the fields'
    ' "key" and "value"'
)


def _checked_pair(header: Any, whose: str, *, takes_unnamed: bool) -> tuple[Any, Any]:
    key, value = (None, None) if header is None and takes_unnamed else _pair_of(header, whose)
    if type(key) is not str and not isinstance(key, _TEXT) and not (key is None and takes_unnamed):
        raise SerializationError(f"A header key of {whose} is a {type(key).__name__}; it must be a str.")
    if type(value) is bytes or value is None or isinstance(value, str):  # the column encodes text as UTF-8
        return key, value
    if not isinstance(value, _BYTES):
        raise SerializationError(
            f"The value of header {key!r} in {whose} is a {type(value).__name__}; it must be bytes, str or None."
        )
    return key, bytes(value)


def _pair_of(header: Any, whose: str) -> tuple[Any, Any]:
    """Return key and value of a header, by the names of its fields if it has names."""
    if type(header) is dict:
        if len(header) == 2 and "key" in header and "value" in header:
            return header["key"], header["value"]
    elif isinstance(header, tuple) and len(header) == 2:
        key, value = header
        if type(header) is tuple or getattr(header, "__fields__", None) == _KEY_VALUE:
            return key, value
    return _pair_of_odd(header, whose)


def _pair_of_odd(header: Any, whose: str) -> tuple[Any, Any]:
    names = field_names(header)
    if names is None:
        if type(header) is list and len(header) == 2:
            return header[0], header[1]
    elif len(names) == len(header) == 2:
        key, value = header if isinstance(header, tuple) else header.values()
        fields = str(names[0]).lower(), str(names[1]).lower()
        if fields == ("key", "value"):
            return key, value
        if fields == ("value", "key"):
            return value, key
    raise SerializationError(f"A header of {whose} is a {_described(header)}; {_FORMS}.")


def field_names(value: Any) -> Sequence[Any] | None:
    """Return the names of the fields of a mapping, a Row or a named tuple, or None."""
    if not isinstance(value, tuple):
        return list(value) if isinstance(value, Mapping) else None
    names: Sequence[Any] | None = getattr(value, "__fields__", None)
    # Last, because a Row searches its columns for `_fields` and raises, which is slow.
    return getattr(value, "_fields", None) if names is None else names


def _described(value: Any) -> str:
    """Describe a value without its contents, which may be secret."""
    kind = type(value).__name__
    names = field_names(value)
    if names is not None:
        return f"{kind} with the fields {', '.join(map(str, names)) or '(none)'}"
    return f"{kind} of {len(value)} items" if isinstance(value, (tuple, list, set, frozenset)) else kind


def _list_bounds(headers: pa.Array) -> Int64Array:
    """Return the bounds of the headers of each row in `headers.values`: int64, len(headers) + 1 entries."""
    if len(headers) == 0:
        return np.zeros(1, np.int64)
    return np.frombuffer(headers.buffers()[1], np.int32, len(headers) + 1, headers.offset * 4).astype(np.int64)


def _is_header(data_type: pa.DataType) -> bool:
    return (
        pat.is_struct(data_type)
        and [field.name.lower() for field in data_type] == ["key", "value"]
        and all(is_bytes_like(field.type) for field in data_type)
    )
