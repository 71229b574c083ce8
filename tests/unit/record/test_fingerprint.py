from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_kafka_sink.record import fingerprint as module
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.fingerprint import MODULUS, add_hashes_by_kernel, add_hashes_by_numpy, fingerprint
from spark_kafka_sink.record.kernel import KERNEL, has_kernel

HASHERS = [add_hashes_by_numpy, *([add_hashes_by_kernel] if has_kernel() else [])]
MASK = MODULUS - 1
STEP = 0x9E3779B97F4A7C15
GOLDEN = 755_382_970_979_313_391


class Record(NamedTuple):
    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None
    partition: int | None = None


texts = st.one_of(st.none(), st.binary(max_size=40))
records = st.builds(
    Record,
    st.sampled_from(["orders", "order", ""]),
    texts,
    texts,
    st.lists(st.tuples(st.text(max_size=3), texts), max_size=3).map(tuple),
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    st.one_of(st.none(), st.integers(0, 2**31 - 1)),
)


def columns_of(rows: list[Record]) -> RecordColumns:
    return RecordColumns.from_rows(
        [row.value for row in rows],
        [row.key for row in rows],
        [list(row.headers) for row in rows],
        [row.timestamp_ms for row in rows],
        [row.partition for row in rows],
    )


def total(rows: list[Record]) -> int:
    """As the tasks of a batch make it: topic by topic."""
    by_topic: dict[str, list[Record]] = {}
    for row in rows:
        by_topic.setdefault(row.topic, []).append(row)
    return sum(fingerprint(topic, columns_of(each)) for topic, each in by_topic.items()) % MODULUS


def mixed(word: int) -> int:
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & MASK
    return word ^ word >> 31


def hash_of(data: bytes | None, salt: int) -> int:
    if data is None:
        return mixed(salt ^ STEP)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    keyed = sum(mixed((word + salt + STEP * number) & MASK) for number, word in enumerate(words, 1))
    return mixed((salt + len(data) + keyed) & MASK)


@pytest.fixture(params=HASHERS, ids=lambda each: each.__name__)
def hasher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(module, "add_hashes", request.param)
    module._hash_of_one.cache_clear()
    return request.param  # type: ignore[no-any-return]


def test_compiled_kernel_hashes_if_it_is_loaded() -> None:
    assert module.add_hashes is HASHERS[-1]


@settings(derandomize=True, max_examples=200, deadline=None, database=None)
@given(st.lists(texts, max_size=30), st.integers(0, 5), st.integers(0, MASK))
def test_kernel_and_twin_hash_as_defined(values: list[bytes | None], skipped: int, salt: int) -> None:
    column = pa.array(values, pa.binary()).slice(skipped)
    for add in HASHERS:
        sums = np.arange(len(column), dtype=np.uint64)
        if column.null_count < len(column):
            add(column, salt, sums)
            expected = [(n + hash_of(value, salt)) & MASK for n, value in enumerate(values[skipped:])]
            assert sums.tolist() == expected


def test_twin_hashes_long_rows_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TWIN_BYTES", 100)
    rng = random.Random(5)
    values = [rng.randbytes(rng.choice([0, 3, 99, 100, 101, 500])) for _ in range(60)]
    sums = np.zeros(len(values), np.uint64)
    add_hashes_by_numpy(pa.array(values, pa.binary()), 9, sums)
    assert sums.tolist() == [hash_of(value, 9) for value in values]


@settings(derandomize=True, max_examples=150, deadline=None, database=None)
@given(st.lists(records, max_size=20), st.randoms(use_true_random=False), st.integers(0, 20))
def test_order_and_layout_change_no_fingerprint(rows: list[Record], rng: random.Random, cut: int) -> None:
    shuffled = rng.sample(rows, len(rows))
    assert (total(shuffled[:cut]) + total(shuffled[cut:])) % MODULUS == total(rows)
    assert sum(total([row]) for row in rows) % MODULUS == total(rows)


@settings(derandomize=True, max_examples=150, deadline=None, database=None)
@given(st.lists(records, min_size=1, max_size=8), records, st.data())
def test_any_other_row_changes_the_fingerprint(rows: list[Record], other: Record, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(rows) - 1))
    name = data.draw(st.sampled_from(Record._fields))
    changed = [*rows]
    changed[at] = rows[at]._replace(**{name: getattr(other, name)})
    assert (total(changed) == total(rows)) == (changed[at] == rows[at])
    assert total([*rows, other]) != total(rows)
    assert total(rows[:at] + rows[at + 1 :]) != total(rows)


@pytest.mark.usefixtures("hasher")
def test_same_bytes_in_another_field_change_the_fingerprint() -> None:
    variants = [
        Record("t", b"v"),
        Record("t", None),
        Record("t", b""),
        Record("t", b"v", key=b""),
        Record("t", b"", key=b"v"),
        Record("t", None, key=b"v"),
        Record("t", b"v", key=b"v"),
        Record("tv", b""),
        Record("t", b"v", headers=(("", None),)),
        Record("t", b"v", headers=(("", b""),)),
        Record("t", b"v", headers=(("a", b"b"), ("c", b"d"))),
        Record("t", b"v", headers=(("c", b"d"), ("a", b"b"))),
        Record("t", b"v", headers=(("ab", b""), ("c", b"d"))),
        Record("t", b"v", timestamp_ms=0),
        Record("t", b"v", partition=0),
        Record("t", b"v", timestamp_ms=7),
        Record("t", b"v", partition=7),
        Record("t", b"v\0"),
    ]
    assert len({total([each]) for each in variants}) == len(variants)
    assert fingerprint("t", columns_of([])) == 0


@pytest.mark.usefixtures("hasher")
@pytest.mark.parametrize(
    "data_type",
    [pa.string(), pa.large_string(), pa.binary_view(), pa.dictionary(pa.int32(), pa.string()), pa.large_binary()],
    ids=str,
)
def test_arrow_layouts_of_the_same_rows_have_one_fingerprint(data_type: Any) -> None:
    texts = ["one", None, "", "a text of more than eight bytes", "one"]
    plain = RecordColumns(pa.array(texts), key=pa.array(texts))
    other = pa.array([*"xyz", *texts]).cast(pa.string())
    other = other.dictionary_encode() if pa.types.is_dictionary(data_type) else other.cast(data_type)
    chunked = pa.chunked_array([other.slice(3, 2), other.slice(5)])
    assert fingerprint("t", RecordColumns(chunked, key=chunked)) == fingerprint("t", plain)


@pytest.mark.usefixtures("hasher")
def test_headers_that_are_missing_null_or_empty_are_the_same() -> None:
    one = RecordColumns(pa.array(["a", "b"]))
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    for headers in ((None, None), ((), None), ((), ())):
        other = RecordColumns(pa.array(["a", "b"]), headers=pa.array(headers, kind))
        assert fingerprint("t", other) == fingerprint("t", one)


@pytest.mark.skipif(not has_kernel(), reason="no C compiler")
def test_offsets_beyond_the_bytes_are_an_error() -> None:
    offsets = np.array([0, 4, 99], np.int32)
    with pytest.raises(ValueError, match=r"a length is out of bounds"):
        KERNEL.fingerprint(offsets, b"abcd", None, 0, 1, np.zeros(2, np.uint64))
    for wrong in (
        (None, b"", None, 0),
        (b"\0" * 12, b"", None, -1),
        (b"\0" * 4, b"", None, 0),
        (b"\0" * 12, b"", b"", 0),
    ):
        with pytest.raises(ValueError, match=r"missing|out of bounds|less than"):
            KERNEL.fingerprint(*wrong, 1, np.zeros(2, np.uint64))


def test_fingerprint_of_known_rows_never_changes() -> None:
    """Decisions in Kafka hold it: another number would stop every query that was decided by an older release."""
    rows = [
        Record("orders", b"value of more than eight bytes", b"key", (("a", b"1"), ("b", None)), 1_700_000_000_000, 3),
        Record("orders", None),
        Record("orders", b"", b""),
    ]
    assert total(rows) == GOLDEN


OFFSETS = np.array([0, 3, 3, 20], np.int32)
DATA = bytes(range(20))
EXPECTED = [hash_of(DATA[:3], 9), hash_of(b"", 9), hash_of(DATA[3:], 9)]


@pytest.mark.skipif(not has_kernel(), reason="no C compiler")
@pytest.mark.parametrize("shift", range(1, 8))
def test_kernel_reads_and_writes_at_any_address(shift: int) -> None:
    offsets, data, sums = bytearray(shift) + OFFSETS.tobytes(), bytes(shift) + DATA, bytearray(shift + 24)
    valid = bytes(shift) + b"\xff"
    KERNEL.fingerprint(
        memoryview(offsets)[shift:], memoryview(data)[shift:], memoryview(valid)[shift:], 5, 9, memoryview(sums)[shift:]
    )
    assert np.frombuffer(sums[shift:], np.uint64).tolist() == EXPECTED
    assert sums[:shift] == bytes(shift)


@pytest.mark.skipif(not has_kernel(), reason="no C compiler")
@pytest.mark.parametrize("length", range(18))
def test_kernel_reads_no_byte_beyond_the_data(length: int) -> None:
    data, sums = np.frombuffer(random.Random(length).randbytes(length), np.uint8).copy(), np.zeros(1, np.uint64)
    KERNEL.fingerprint(np.array([0, length], np.int32), data, None, 0, 9, sums)
    assert sums.tolist() == [hash_of(data.tobytes(), 9)]


@pytest.mark.skipif(not has_kernel(), reason="no C compiler")
def test_kernel_accepts_missing_data_and_validity() -> None:
    sums = np.zeros(3, np.uint64)
    KERNEL.fingerprint(np.zeros(4, np.int32), None, None, 0, 9, sums)
    assert sums.tolist() == [hash_of(b"", 9)] * 3
    KERNEL.fingerprint(np.full(4, 99, np.int32), None, b"\0", 0, 9, sums)
    assert sums.tolist() == [(hash_of(b"", 9) + hash_of(None, 9)) & MASK] * 3, "a null's offsets are not read"
    KERNEL.fingerprint(np.zeros(1, np.int32), None, None, 0, 9, None)


@pytest.mark.skipif(not has_kernel(), reason="no C compiler")
@pytest.mark.parametrize("shared", ["offsets", "data", "valid", "all"])
def test_sums_that_overlap_their_input_change_nothing_else(shared: str) -> None:
    rng = random.Random(shared)
    for _ in range(300):
        room = np.array([rng.choice([0, 1, 2, 8, 24, 2**31 - 1]) for _ in range(8)], np.int32)
        before = room.copy()
        own = {"offsets": OFFSETS, "data": DATA, "valid": b"\xff"}
        given = [room if shared in {name, "all"} else own[name] for name in ("offsets", "data", "valid")]
        rows = rng.randrange(4)
        with contextlib.suppress(ValueError):  # sums may be offsets out of bounds
            KERNEL.fingerprint(*given, rng.randrange(6), 9, room[: 2 * rows])
        assert room[2 * rows :].tolist() == before[2 * rows :].tolist()


@pytest.mark.skipif(not has_kernel(), reason="no C compiler")
@pytest.mark.parametrize("offsets", [[-1, 0], [1, 0], [0, 21], [2**31 - 1, -(2**31)], [-(2**31), 2**31 - 1], [21, 21]])
def test_offsets_that_fit_no_data_are_an_error(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match=r"a length is out of bounds"):
        KERNEL.fingerprint(np.array(offsets, np.int32), DATA, None, 0, 1, np.zeros(1, np.uint64))


@pytest.mark.skipif(not has_kernel(), reason="no C compiler")
@pytest.mark.parametrize("valid_from", [2**59 + 1, 2**63 - 1, 2**70, -(2**63)])
def test_first_row_beyond_all_memory_is_an_error(valid_from: int) -> None:
    with pytest.raises((ValueError, OverflowError), match=r"out of bounds|too (?:large|big)"):
        KERNEL.fingerprint(OFFSETS, DATA, b"\xff", valid_from, 1, np.zeros(3, np.uint64))


@pytest.mark.skipif(not has_kernel(), reason="no C compiler")
@pytest.mark.parametrize("sums", [b"", bytes(8), np.zeros(6, np.uint64)[::2], 5])
def test_sums_that_cannot_be_written_in_place_are_refused(sums: object) -> None:
    with pytest.raises((BufferError, TypeError, ValueError)):
        KERNEL.fingerprint(OFFSETS, DATA, None, 0, 1, sums)
