"""Use the compiled kernel of a wheel: `python use_kernel.py WHEEL [ROWS]`.

Each function of the kernel gets a few thousand rows, and its results are compared with those of plain Python, written
here a second time. It needs only Python 3.11 and the wheel, so it also runs on a machine without numpy and pyarrow, or
under emulation. Ends with an error if the kernel does not load or a result differs.
"""

from __future__ import annotations

import importlib.util
import random
import struct
import sys
import zipfile
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from platform import machine, python_version
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

NOW = 1_700_000_000_000
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
Field = bytes | None


def load(path: Path) -> ModuleType:
    """Import a compiled kernel from its file."""
    spec = importlib.util.spec_from_file_location("spark_kafka_sink.record._kernel", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"This Python does not import {path.name}.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- plain Python --------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    zigzag = (number << 1 ^ number >> 63) & MASK
    made = bytearray()
    while zigzag >= 0x80:
        made.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*made, zigzag])


def field(content: Field) -> bytes:
    return varint(-1) if content is None else varint(len(content)) + content


def record(offset: int, time: int, key: Field, value: Field, headers: Sequence[bytes]) -> bytes:
    """Return a record of format v2. `offset` and `time` are differences to those of the batch."""
    body = b"\0" + varint(time) + varint(offset) + field(key) + field(value) + varint(len(headers)) + b"".join(headers)
    return varint(len(body)) + body


def murmur2(key: bytes) -> int:
    """Return Kafka's hash of a key, unsigned."""
    factor, mask = 0x5BD1E995, 0xFFFFFFFF
    hashed = 0x9747B28C ^ len(key)
    whole = len(key) & ~3
    for (word,) in struct.iter_unpack("<I", key[:whole]):
        word = word * factor & mask
        hashed = (hashed * factor ^ (word ^ word >> 24) * factor) & mask
    if whole != len(key):
        hashed = (hashed ^ int.from_bytes(key[whole:], "little")) * factor & mask
    hashed = (hashed ^ hashed >> 13) * factor & mask
    return hashed ^ hashed >> 15


def mixed(word: int) -> int:
    """Return the finalizer of splitmix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def field_hash(content: Field, salt: int) -> int:
    if content is None:
        return mixed(salt ^ STEP)
    words = [int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), 8)]
    hashes = [mixed((word + salt + (index + 1) * STEP) & MASK) for index, word in enumerate(words)]
    return mixed((salt + len(content) + sum(hashes)) & MASK)


# ---- rows as Arrow holds them --------------------------------------------------------------------------------------


def random_fields(rng: random.Random, rows: int, nulls: float) -> list[Field]:
    lengths = (0, 1, 7, 8, 63, 64, 200)
    return [None if rng.random() < nulls else rng.randbytes(rng.choice(lengths)) for _ in range(rows)]


def buffers(fields: Sequence[Field], first_bit: int) -> tuple[Any, Any, Any, int]:
    """Return offsets, data, validity bits, and the bit of the first row."""
    offsets = array("i", [0])
    bits = bytearray((first_bit + len(fields) + 7) // 8)
    for row, content in enumerate(fields):
        offsets.append(offsets[-1] + len(content or b""))
        if content is not None:
            bits[first_bit + row >> 3] |= 1 << (first_bit + row & 7)
    return offsets, b"".join(content or b"" for content in fields), bits, first_bit


# ---- the functions of the kernel -----------------------------------------------------------------------------------


def use_encode(kernel: ModuleType, rng: random.Random, rows: int) -> bool:
    """Encode rows in a random order, in three runs, with timestamps and headers."""
    keys, values = random_fields(rng, rows, 0.3), random_fields(rng, rows, 0.1)
    headers = [[field(rng.randbytes(3)) + field(rng.randbytes(9))] * rng.randrange(3) for _ in range(rows)]
    order, times = rng.sample(range(rows), rows), [NOW + rng.randrange(-9, 100_000) for _ in range(rows)]
    cuts = [0, rows // 3, rows // 2, rows]
    runs = [(first, last, 5, NOW - 3) for first, last in pairwise(cuts)]
    offsets, data, _, _ = buffers([b"".join(of_row) for of_row in headers], 0)
    made = kernel.encode(
        rows,
        NOW,
        array("q", order),
        array("q", times),
        array("q", [len(of_row) for of_row in headers]),
        array("q", [number for run in runs for number in run]),
        bytearray(rows * 600),
        buffers(keys, 3),
        buffers(values, 0),
        (offsets, data),
    )
    expected = [
        b"".join(
            record(base + place - first, times[place] - time, keys[row], values[row], headers[row])
            for place, row in enumerate(order[first:last], first)
        )
        for first, last, base, time in runs
    ]
    return [bytes(chunk) for chunk in made] == expected


def use_hash(kernel: ModuleType, rng: random.Random, rows: int) -> bool:
    keys = [content or b"" for content in random_fields(rng, rows, 0)]
    offsets, data, _, _ = buffers(keys, 0)
    room = array("I", bytes(4 * rows))
    kernel.hash(offsets, data, room)
    return list(room) == [murmur2(key) for key in keys]


def use_fingerprint(kernel: ModuleType, rng: random.Random, rows: int) -> bool:
    fields, salt = random_fields(rng, rows, 0.2), rng.getrandbits(64)
    sums = array("Q", [rng.getrandbits(64) for _ in range(rows)])
    expected = [(before + field_hash(content, salt)) & MASK for before, content in zip(sums, fields, strict=True)]
    kernel.fingerprint(*buffers(fields, 5), salt, sums)
    return list(sums) == expected


def use_row_taker(kernel: ModuleType, rng: random.Random, rows: int) -> bool:
    """Take dicts into columns up to the row that the kernel leaves to Python."""
    keys, values = random_fields(rng, rows, 0.3), random_fields(rng, rows, 0.1)
    taken: tuple[list[Any], list[Any]] = ([], [])
    plan = tuple((0, position, cells, None, None, None) for position, cells in enumerate(taken))
    taker = kernel.RowTaker(tuple, ("key", "value"), plan, 1 << 40, 1 << 40, 32)
    odd = {"key": 1, "value": b""}
    given = [{"key": key, "value": value} for key, value in zip(keys, values, strict=True)]
    rest = taker.take(iter([*given, odd]), 1 << 40, 1 << 40)
    size = sum(len(content or b"") for content in [*keys, *values])
    return rest == (odd,) and taken == (keys, values) and (taker.rows, taker.size) == (rows, size)


def use_encode_rows(kernel: ModuleType, rng: random.Random, rows: int) -> bool:
    """Write a struct of a number and a text as Avro, both in a union with null last."""
    numbers = [None if rng.random() < 0.2 else rng.getrandbits(63) - (1 << 62) for _ in range(rows)]
    texts = random_fields(rng, rows, 0.2)
    plan = array("q", [21, 0, -1, -1, 1, 2, *[0] * 6])
    for op in (5, 13):
        plan.extend([op, 0, 1, 0, 0, 0, *[0] * 6])
    offsets, data, text_bits, first_bit = buffers(texts, 0)
    _, _, number_bits, _ = buffers([None if number is None else b"" for number in numbers], 0)
    given = (None, number_bits, array("q", [number or 0 for number in numbers]), text_bits, offsets, data)
    bound = array("q", [rows, first_bit, 0, 1, rows, first_bit, 1, 2, rows, first_bit, 3, 3])
    out, ends, valid, bad = bytearray(rows * 240 + 256), array("i", bytes(4 * rows + 4)), bytearray(rows), bytearray(24)
    done = kernel.encode_rows(0, plan, b"", bound, given, 0, rows, b"\7", bytes(617 * 16), out, 0, ends, valid, bad)
    expected = [
        b"\7" + (b"\2" if number is None else b"\0" + varint(number)) + (b"\2" if text is None else b"\0" + field(text))
        for number, text in zip(numbers, texts, strict=True)
    ]
    return done == (rows, ends[rows], 0, False) and [bytes(out[a:b]) for a, b in pairwise(ends)] == expected


USES = {
    "encode": use_encode,
    "hash": use_hash,
    "fingerprint": use_fingerprint,
    "RowTaker": use_row_taker,
    "encode_rows": use_encode_rows,
}


def differences(kernel: ModuleType, rows: int) -> list[str]:
    """Return the functions of the kernel whose results are not those of plain Python."""
    return [name for name, use in USES.items() if not use(kernel, random.Random(rows), rows)]


def main(arguments: Sequence[str]) -> int:
    wheel, rows = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 5000
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, zipfile.ZipFile(wheel) as held:
        # Windows keeps the file of a loaded module
        (name,) = (name for name in held.namelist() if name.endswith((".so", ".pyd")))
        different = differences(load(Path(held.extract(name, folder))), rows)
    said = f"{wheel.name}: Python {python_version()} on {sys.platform} {machine()}"
    print(f"{said}: {' and '.join(different)} differ" if different else f"{said}: {', '.join(USES)} agree, {rows} rows")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
