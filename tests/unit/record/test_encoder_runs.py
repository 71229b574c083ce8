"""The compiled kernel compared with its numpy twin, and with input that must never reach it. Without a C compiler there
is no kernel, and these tests check nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import runpy
import shutil
import sys
import sysconfig
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record import kernel
from spark_kafka_sink.record.arrow import Int64Array
from spark_kafka_sink.record.batch import seal
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.decoder import decode_batches
from spark_kafka_sink.record.encoder import RunInput, encode_by_kernel, encode_by_numpy
from spark_kafka_sink.record.kernel import KERNEL, has_kernel

NOW = 1_700_000_000_000
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]


def test_kernel_is_there_if_a_compiler_is() -> None:
    assert has_kernel() or shutil.which(COMPILER) is None


@pytest.mark.parametrize(
    ("cause", "level"),
    [(ModuleNotFoundError("No module named '_kernel'"), "INFO"), (ImportError("GLIBC_2.38 not found"), "WARNING")],
)
def test_reason_for_a_missing_kernel_is_logged(
    cause: ImportError, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(name: str) -> None:
        raise cause

    monkeypatch.setattr(kernel, "import_module", fails)
    with caplog.at_level("INFO"):
        assert kernel._load_kernel() is None
    (record,) = caplog.records
    assert record.levelname == level
    assert "numpy encodes the records" in record.getMessage()
    if level == "WARNING":  # bug: the cause and what it means stood in each other's place
        assert record.getMessage().startswith("The compiled kernel does not load: GLIBC_2.38 not found. Install")


def test_big_endian_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: the compiler made a kernel there, and the kernel would have written wrong numbers without an error."""
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ImportError, match=r"^spark_kafka_sink does not run on this processor \(.+\): it is big-endian"):
        runpy.run_path(str(kernel.__file__))


def some(rng: random.Random, rows: int, longest: int, nulls: float) -> list[bytes | None]:
    return [None if rng.random() < nulls else rng.randbytes(rng.randint(0, longest)) for _ in range(rows)]


def table_of(rng: random.Random, rows: int) -> Int64Array:
    """Return runs with gaps, of any base offset and time."""
    bounds = sorted(rng.sample(range(rows + 1), min(rows + 1, 2 * rng.randint(1, 4))))
    pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
    return np.array(
        [(start, end, rng.choice([0, 63, 8_190, 2**20]), NOW - rng.choice([-70, 0, 5, 2**40])) for start, end in pairs],
        np.int64,
    ).reshape(-1, 4)


@pytest.mark.parametrize("seed", range(60))
def test_kernel_and_twin_give_the_same_bytes(seed: int) -> None:
    if not has_kernel():
        return
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 7, 40, 300])
    before = rng.randint(0, 3)  # the columns are slices
    headers = [
        [("h" * rng.randint(1, 70), rng.choice([None, b"", b"v" * 200]))] * rng.randint(0, 3) for _ in range(rows)
    ]
    first: list[bytes | None] = [b"before"] * before
    no_key: list[bytes | None] = [None] * before
    columns = RecordColumns.from_rows(
        first + some(rng, rows, rng.choice([0, 60, 70_000]), rng.choice([0, 0.3, 1])),
        rng.choice([None, no_key + some(rng, rows, 20, rng.choice([0, 0.5, 1]))]),
        rng.choice([None, [[]] * before + headers]),
    ).slice(before, rows)
    order: Any = rng.choice([None, np.array(rng.sample(range(rows), rows), np.intp)])
    times: Any = rng.choice([None, np.array([NOW + rng.randint(-(2**33), 2**33) for _ in range(rows)], np.int64)])
    table = table_of(rng, rows)
    given = RunInput(columns, order, times, NOW, 70_000 * rows + 900 * rows)

    def chunks(encode: Any) -> list[bytes]:
        made = encode(given, table, None)
        assert list(map(len, made)) == [len(bytes(chunk)) for chunk in made]
        return list(map(bytes, made))

    assert chunks(encode_by_kernel) == chunks(encode_by_numpy)


def values(*contents: bytes) -> RecordColumns:
    return RecordColumns.from_rows(list(contents))


def runs(*rows: tuple[int, int, int, int]) -> Int64Array:
    return np.array(rows, np.int64)


@pytest.mark.parametrize(
    ("given", "table"),
    [
        pytest.param(RunInput(values(b"a" * 500), None, None, NOW, 30), runs((0, 1, 0, NOW)), id="no room"),
        pytest.param(
            RunInput(values(b"a" * 500), None, None, NOW, 491), runs((0, 1, 0, NOW)), id="no room for a length"
        ),
        pytest.param(
            RunInput(values(b"a" * 500, b""), None, None, NOW, 30),
            runs((0, 1, 0, NOW), (1, 2, 0, NOW)),
            id="no room for the first",
        ),
        pytest.param(RunInput(values(b"a"), None, None, NOW, 300), runs((0, 2, 0, NOW)), id="past the last row"),
        pytest.param(
            RunInput(values(b"a", b"b"), None, None, NOW, 300), runs((1, 2, 0, NOW), (0, 1, 0, NOW)), id="back"
        ),
        pytest.param(
            RunInput(values(b"a", b"b"), None, None, NOW, 300), runs((1, 0, 0, NOW)), id="ends before it begins"
        ),
        pytest.param(
            RunInput(values(b"a", b"b"), np.array([0, 7], np.intp), None, NOW, 300), runs((0, 2, 0, NOW)), id="order"
        ),
        pytest.param(  # a row after the end of the slice
            RunInput(values(b"a", b"b", b"c").slice(0, 2), np.array([0, 2], np.intp), None, NOW, 300),
            runs((0, 2, 0, NOW)),
            id="behind",
        ),
        pytest.param(
            RunInput(values(b"a", b"b"), np.array([-1, 0], np.intp), None, NOW, 300), runs((0, 2, 0, NOW)), id="below"
        ),
        pytest.param(
            RunInput(values(b"a", b"b"), np.array([0], np.intp), None, NOW, 300), runs((0, 2, 0, NOW)), id="short order"
        ),
        *(  # the kernel reads the rows of the next places in advance
            pytest.param(
                RunInput(values(*[b"a"] * 10), np.array([*range(9), far], np.intp), None, NOW, 900),
                runs((0, 10, 0, NOW)),
                id=f"far {far}",
            )
            for far in (1 << 60, -1 << 60)
        ),
        pytest.param(
            RunInput(values(b"a", b"b"), None, np.array([0]), NOW, 300), runs((0, 2, 0, NOW)), id="short times"
        ),
    ],
)
def test_run_beyond_its_room_is_refused_before_the_write(given: RunInput, table: Int64Array) -> None:
    if has_kernel():
        with pytest.raises(SerializationError, match="could not be written"):
            encode_by_kernel(given, table, None)


# pyarrow checks the first and the last row itself. Only this row is wrong, so the error is about it.
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(("offsets", "lying_row"), [([0, 900, 4], 0), ([0, 9, 4], 0), ([0, -3, 4], 1), ([2, 1, 4], 0)])
def test_offsets_that_do_not_fit_the_bytes_are_refused(name: str, offsets: list[int], lying_row: int) -> None:
    if not has_kernel():
        return
    lying = pa.BinaryArray.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(b"abcdefgh")]
    )
    given = RunInput(values(b"a", b"b"), None, None, NOW, 3_000)
    object.__setattr__(given.columns, name, lying)
    with pytest.raises(SerializationError, match="could not be written"):
        encode_by_kernel(given, runs((lying_row, lying_row + 1, 0, NOW)), None)


ROWS = 8
GIVEN: dict[str, Any] = {
    "order": np.arange(ROWS),
    "times": np.full(ROWS, NOW),
    "counts": np.zeros(ROWS, np.int64),
    "key offsets": np.zeros(ROWS + 1, np.int32),
    "key bits": np.zeros(2, np.uint8),
    "value offsets": np.zeros(ROWS + 1, np.int32),
    "value bits": np.zeros(2, np.uint8),
    "header offsets": np.zeros(ROWS + 1, np.int32),
}


def call_kernel(given: dict[str, Any], out: Any) -> Any:
    """Return eight rows. The null bit of the first one stands behind another row's."""
    offsets = [given[f"{column} offsets"] for column in ("key", "value", "header")]
    return KERNEL.encode(
        ROWS,
        NOW,
        *(given[name] for name in ("order", "times", "counts")),
        runs((0, ROWS, 0, NOW)),
        out,
        (offsets[0], b"", given["key bits"], 1),
        (offsets[1], b"", given["value bits"], 1),
        (offsets[2], b""),
    )


@pytest.mark.parametrize("short", GIVEN)
def test_buffer_short_by_one_byte_is_refused_before_a_read(short: str) -> None:
    if not has_kernel():
        return
    assert len(call_kernel(GIVEN, bytearray(500))) == 1
    with pytest.raises(ValueError, match="less than"):
        call_kernel(GIVEN | {short: memoryview(GIVEN[short]).cast("B")[:-1]}, bytearray(500))


LAST = 2**61
COLUMN = (np.arange(ROWS + 1, dtype=np.int32), b"abcdefgh")


@pytest.mark.parametrize(
    ("rows", "run", "order", "valid_from"),
    [
        pytest.param(ROWS, (LAST - 1, LAST, 0, NOW), np.zeros(ROWS + 1, np.int64)[1:], 0, id="places"),
        pytest.param(2**62, (0, ROWS, 0, NOW), None, 0, id="rows"),
        pytest.param(ROWS, (0, ROWS, 0, NOW), None, -8, id="bits below"),
        pytest.param(ROWS, (0, ROWS, 0, NOW), None, 2**63 - ROWS, id="bits above"),
    ],
)
@pytest.mark.parametrize("is_key", [True, False])
def test_rows_whose_bytes_overflow_are_refused_before_a_read(
    rows: int, run: tuple[int, int, int, int], order: Any, valid_from: int, is_key: bool
) -> None:
    """Bug: their size in bytes was small or negative, so bytes outside of a buffer were read."""
    if not has_kernel():
        return
    odd = (*COLUMN, np.full(ROWS, 255, np.uint8)[4:], valid_from)
    key, value = (odd, (*COLUMN, None, 0)) if is_key else ((*COLUMN, None, 0), odd)
    with pytest.raises(ValueError, match="out of bounds"):
        KERNEL.encode(rows, NOW, order, None, None, runs(run), bytearray(500), key, value, (None, None))


def test_counts_of_headers_without_offsets_are_refused() -> None:
    """Bug: a null pointer was read."""
    if not has_kernel():
        return
    counts = np.zeros(ROWS, np.int64)
    with pytest.raises(ValueError, match="counts and no offsets"):
        KERNEL.encode(
            ROWS,
            NOW,
            None,
            None,
            counts,
            runs((0, ROWS, 0, NOW)),
            bytearray(500),
            NONE,
            (*COLUMN, None, 0),
            (None, None),
        )


NONE = (None, None, None, 0)


def test_offsets_changed_during_the_call_do_no_harm() -> None:
    """The buffer for the records is also that of the offsets. Bug: they were read again after the check, and bytes
    behind the values were copied.
    """
    if not has_kernel():
        return
    for seed in range(50):
        size = random.Random(seed).randint(60, 400)
        room = bytearray(size)
        room[: 4 * (ROWS + 1)] = np.arange(ROWS + 1, dtype=np.int32).tobytes()
        with contextlib.suppress(ValueError):
            KERNEL.encode(
                ROWS,
                NOW,
                None,
                None,
                None,
                runs((0, ROWS, 0, NOW - seed)),
                room,
                NONE,
                (room, b"abcdefgh", None, 0),
                (None, None),
            )
        hashed = bytearray(np.arange(ROWS + 1, dtype=np.int32).tobytes())
        with contextlib.suppress(ValueError):
            KERNEL.hash(hashed, b"abcdefgh", memoryview(hashed)[: 4 * ROWS])


def test_runs_changed_during_the_call_do_no_harm() -> None:
    """The buffer for the records is also the table of runs. Bug: places behind the last row were read."""
    if not has_kernel():
        return
    room = bytearray(4_000)
    room[:32] = runs((0, ROWS, 0, NOW)).tobytes()
    order = np.arange(ROWS, dtype=np.int64).tobytes()
    offsets = np.array([0, 40, 40, 40, 40, 40, 40, 40, 40], np.int32)
    value = (offsets, b"a" * 40, None, 0)  # the first one ends the table with a number far behind the last row
    table = memoryview(room)[:32]
    (chunk,) = KERNEL.encode(ROWS, NOW, order, None, None, table, room, NONE, value, (None, None))
    assert len(chunk) == 47 + 7 * 7


def test_buffers_at_odd_addresses_give_the_same_bytes() -> None:
    """Bug: numbers were read as if they were aligned, which some processors need."""
    if not has_kernel():
        return

    def odd(numbers: Any) -> memoryview:
        return memoryview(b"x" + numbers.tobytes())[1:]

    offsets, content = COLUMN
    order, table = np.arange(ROWS)[::-1].astype(np.int64), runs((0, ROWS, 0, NOW))
    counts = np.zeros(ROWS, np.int64)
    written = []
    for way in (lambda numbers: numbers, odd):
        column, empty = (way(offsets), content, None, 0), way(np.zeros(ROWS + 1, np.int32))
        given = [way(order), way(order), way(counts), way(table)]
        (chunk,) = KERNEL.encode(ROWS, NOW, *given, bytearray(500), column, column, (empty, b""))
        hashed = bytearray(4 * ROWS + 1)
        KERNEL.hash(way(offsets), content, memoryview(hashed)[1:])
        written.append((bytes(chunk), bytes(hashed)))
    assert written[0] == written[1]


def test_base_offset_past_the_last_one_wraps() -> None:
    """Bug: the sum was signed, and its overflow is undefined in C."""
    if not has_kernel():
        return
    last = np.iinfo(np.int64).max
    (chunk,) = KERNEL.encode(
        ROWS, NOW, None, None, None, runs((0, ROWS, last, NOW)), bytearray(500), NONE, (*COLUMN, None, 0), (None, None)
    )
    assert len(chunk) > ROWS


def test_call_keeps_no_references() -> None:
    if not has_kernel():
        return
    table = runs(*[(0, 0, 0, NOW)] * 10_000)
    tracemalloc.start()
    try:
        for _ in range(20):
            encode_by_kernel(RunInput(values(b"a"), None, None, NOW, 300), table, None)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200_000


def test_read_only_memory_is_not_written() -> None:
    if has_kernel():
        with pytest.raises(BufferError):
            call_kernel(GIVEN, bytes(500))


def test_descending_offsets_of_headers_are_refused() -> None:
    if not has_kernel():
        return
    columns = RecordColumns.from_rows([b"a", b"b", b"c"], headers=[[("h", b"1")], [], [("h", b"2")]])
    assert columns.headers is not None
    back = pa.py_buffer(np.array([0, 1, 0, 2], np.int32))
    lying = pa.Array.from_buffers(columns.headers.type, 3, [None, back], children=[columns.headers.values])
    object.__setattr__(columns, "headers", lying)
    with pytest.raises(SerializationError, match="could not be written"):
        encode_by_kernel(RunInput(columns, None, None, NOW, 3_000), runs((1, 2, 0, NOW)), None)


ENCODERS = [encode_by_numpy, *([encode_by_kernel] if has_kernel() else [])]


@pytest.mark.parametrize("encode", ENCODERS)
def test_chunk_keeps_its_bytes_alive(encode: Any) -> None:
    pool = pa.system_memory_pool()
    before = pool.bytes_allocated()
    contents = [random.Random(1).randbytes(5_000) for _ in range(4)]
    chunks = encode(RunInput(values(*contents), None, None, NOW, 40_000), runs((0, 1, 0, NOW), (1, 4, 0, NOW)), pool)
    first, second = (memoryview(chunk) for chunk in chunks)
    del chunks
    assert pool.bytes_allocated() > before
    assert bytes(first[-5_001:-1]) == contents[0]
    del first
    assert bytes(second[-5_001:-1]) == contents[3]
    del second
    assert pool.bytes_allocated() == before


@pytest.mark.parametrize("encode", ENCODERS)
def test_chunk_is_read_only(encode: Any) -> None:
    (chunk,) = encode(RunInput(values(b"a"), None, None, NOW, 300), runs((0, 1, 0, NOW)), None)
    with pytest.raises(TypeError):
        memoryview(chunk)[0] = 7
    with pytest.raises(TypeError, match="not writable"):
        (ctypes.c_char * len(chunk)).from_buffer(chunk)


@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("size", [10, 200_000])
@pytest.mark.parametrize("chunks", [1, 2])
def test_chunks_go_into_batches_as_they_are(encode: Any, codec: str, size: int, chunks: int) -> None:
    contents = values(*(bytes([65 + row]) * size for row in range(4)))
    table = runs((0, 1, 0, NOW), (1, 4, 1, NOW))
    given = encode(RunInput(contents, None, None, NOW, 4 * size + 200), table, None)[:chunks]
    rows = int(table[chunks - 1, 1])
    (batch,) = decode_batches(b"".join(seal(given, rows, NOW, NOW, codec_for(codec)).buffers))
    assert [record.value for record in batch.records] == contents.value.to_pylist()[:rows]


def test_chunk_cannot_be_made_from_python() -> None:
    if has_kernel():
        (chunk,) = encode_by_kernel(RunInput(values(b"a"), None, None, NOW, 300), runs((0, 1, 0, NOW)), None)
        with pytest.raises(TypeError, match="cannot create"):
            type(chunk)()
