"""The cells of benchmarks/benchmark.py, their rows, and the assignment of one contender's process."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

if TYPE_CHECKING:
    import pyarrow as pa

CODECS = ("none", "gzip", "lz4", "zstd", "snappy")
KEYS = 100_003
CHUNK_ROWS = 1_000_000
"""Rows of a chunk of an Arrow table."""
ID_START, AMOUNT_START, KEY_START = 1_000_000_000, 100_000, 10_000_000_000
"""Every number has as many digits as this one."""
BYTES_OF_A_VALUE = {"json": 326, "avro": 175, "text": 118}
"""The format of a flight → about the bytes of its value."""
MOST_FLIGHTS = 2_000_000
"""The most rows of a run with flights, whose values are larger and take longer to make."""
START_BYTES = len(f'{{"id":{ID_START},"amount":{AMOUNT_START}')
FILLING = (
    ',"customer":{"name":"Ada Example","street":"12 Some Street","town":"Elsewhere"},"items":[{"sku":"A-1000",'
    '"count":2,"price":19.95},{"sku":"B-2000","count":1,"price":4.5}],"note":"leave it with the neighbours"}'
)


_CELL = re.compile(
    r"(?P<key>keyed|unkeyed)-(?P<codec>[a-z0-9]+)-(?P<partitions>\d+)-(?P<size>\d+)"
    r"(-(?P<tasks>\d+)x(?P<task_rows>\d+))?(-(?P<slots>\d+)slots)?"
)


@dataclass(frozen=True)
class Cell:
    """One combination to measure. As text: keyed-lz4-4-100 (keys, codec, partitions, bytes of a value). More may
    follow: -200x50 (200 tasks of 50 rows) and -8slots (an executor that runs eight tasks at once).
    """

    is_keyed: bool
    codec: str
    partitions: int
    value_bytes: int
    tasks: int = 0
    """0: as many as the executor runs at once, with the records of `--records`."""
    task_rows: int = 0
    slots: int = 0
    """0: those of `--cores`."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        found = _CELL.fullmatch(text)
        if found is not None and found["codec"] in CODECS:
            numbers = {name: int(found[name] or 0) for name in ("tasks", "task_rows", "slots")}
            cell = cls(found["key"] == "keyed", found["codec"], int(found["partitions"]), int(found["size"]), **numbers)
            given = [number for name, number in numbers.items() if found[name]]
            if all(number > 0 for number in (cell.partitions, *given)) and cell.value_bytes >= 40:
                return cell
        raise ValueError(
            f"{text!r} must be keyed or unkeyed, one of {', '.join(CODECS)}, partitions, and 40 or more bytes; then, if"
            " you like, TASKSxROWS and Nslots"
        )

    @property
    def title(self) -> str:
        keys = "keyed" if self.is_keyed else "unkeyed"
        tasks = f", {self.tasks} tasks of {self.task_rows} rows" if self.tasks else ""
        slots = f", {self.slots} slots" if self.slots else ""
        return f"{keys}, {self.codec}, {self.partitions} partitions, {self.value_bytes:,} B{tasks}{slots}"

    def __str__(self) -> str:
        keys = "keyed" if self.is_keyed else "unkeyed"
        tasks = f"-{self.tasks}x{self.task_rows}" if self.tasks else ""
        slots = f"-{self.slots}slots" if self.slots else ""
        return f"{keys}-{self.codec}-{self.partitions}-{self.value_bytes}{tasks}{slots}"


@dataclass(frozen=True)
class FlightsCell:
    """One combination to measure. As text: flights-json-lz4-50 (format, codec, partitions)."""

    format: str
    codec: str
    partitions: int
    tasks: ClassVar[int] = 0
    slots: ClassVar[int] = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        match text.split("-"):
            case ["flights", format_, codec, partitions] if format_ in BYTES_OF_A_VALUE and codec in CODECS:
                if int(partitions) > 0:
                    return cls(format_, codec, int(partitions))
        raise ValueError(f"{text!r} must be flights, json, avro or text, one of {', '.join(CODECS)}, and partitions")

    def __str__(self) -> str:
        return f"flights-{self.format}-{self.codec}-{self.partitions}"

    @property
    def is_keyed(self) -> bool:
        return False

    @property
    def value_bytes(self) -> int:
        return BYTES_OF_A_VALUE[self.format]

    @property
    def title(self) -> str:
        return f"flights, {self.format}, {self.codec}, {self.partitions} partitions, about {self.value_bytes} B"


AnyCell: TypeAlias = Cell | FlightsCell


def cell_of(text: str) -> AnyCell:
    """Return the cell that is written so. Raises ValueError."""
    return FlightsCell.parse(text) if text.startswith("flights-") else Cell.parse(text)


@dataclass(frozen=True)
class Assignment:
    """The work of one process."""

    contender: str
    cell: str
    servers: str
    topic: str
    records: int
    """Records of each run; for latency, of each micro-batch."""
    runs: int
    """Timed runs; for latency, timed micro-batches."""
    warm_up_s: float
    """Seconds of writing before the timed runs, in whole runs, at least one."""
    cores: int
    jars: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    """Producer settings by Kafka's names, which replace each client's own defaults."""
    is_latency: bool = False
    authority_file: str = ""
    """A PEM file with the certificates to trust. Empty: without TLS."""
    data: str = ""
    """The folder with the files of a job's rows. Empty: Spark makes the rows of the cell."""
    all_records: int = 0
    """The rows of these files."""
    takes_turns: bool = False
    """Whether stdin tells the process what to run (`contenders.take_turns`), instead of `runs` and `warm_up_s`."""

    def settings(self, authority: str) -> dict[str, str]:
        """Return the settings of a client. `authority` is the client's name for the file of certificates to trust."""
        tls = {"security.protocol": "SSL", authority: self.authority_file} if self.authority_file else {}
        codec = cell_of(self.cell).codec
        return {"bootstrap.servers": self.servers, "compression.type": codec, **tls, **self.options}

    def sink_options(self) -> dict[str, str]:
        """Return the options of Spark's sink and of this one."""
        store = {"ssl.truststore.type": "PEM"} if self.authority_file else {}
        settings = store | self.settings("ssl.truststore.location")
        return {"topic": self.topic} | {f"kafka.{name}": value for name, value in settings.items()}

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def columns(cell: Cell, number: str) -> list[str]:
    """Return SQL for the records' columns from a row number. A key has 20 characters. A value is `value_bytes` of JSON
    text, which compresses as such text does. All numbers have one width, because padding would cost more than a sink.
    """
    start = f"""'{{"id":', {ID_START} + {number}, ',"amount":', {AMOUNT_START} + {number} * 7919 % 99991"""
    key = [f"concat('customer-', {KEY_START} + {number} * 31 % {KEYS}) AS key"] if cell.is_keyed else []
    return [*key, f"concat({start}, '{_filling(cell)}') AS value"]


def table(cell: Cell, records: int) -> pa.Table:
    """Return the rows of `columns` as an Arrow table, with chunks of up to a million rows. After a million rows they
    come again, in the same memory.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    number = np.arange(min(records, CHUNK_ROWS), dtype=np.int64)
    identity, amount, key = (
        pc.cast(pa.array(numbers), pa.string())
        for numbers in (ID_START + number, AMOUNT_START + number * 7919 % 99991, KEY_START + number * 31 % KEYS)
    )
    parts = ['{"id":', identity, ',"amount":', amount, _filling(cell)]
    chunk = {"value": pc.binary_join_element_wise(*parts, "")}
    if cell.is_keyed:
        chunk = {"key": pc.binary_join_element_wise("customer-", key, ""), **chunk}
    whole = pa.concat_tables([pa.table(chunk)] * -(-records // CHUNK_ROWS))
    return whole.slice(0, records)


def _filling(cell: Cell) -> str:
    """Return the end of each value."""
    return (FILLING * (cell.value_bytes // len(FILLING) + 1))[: cell.value_bytes - START_BYTES]


JOBS = (
    "flights-text-lz4-50",
    "flights-json-lz4-50",
    "flights-avro-lz4-50",
    "keyed-none-16-100-200x50",
    "keyed-lz4-4-100-8slots",
)
"""What users run, beside the combinations: parquet in, a micro-batch of many small tasks, a large executor."""
COMMON = ("keyed-none-4-100", "keyed-lz4-4-100", "unkeyed-none-4-100", "keyed-zstd-4-100", "keyed-lz4-200-100")
CELLS = (*COMMON, *JOBS)
COMBINATIONS = tuple(
    "-".join(parts)
    for parts in itertools.product(
        ("keyed", "unkeyed"), ("none", "lz4", "zstd", "snappy"), ("4", "200"), ("100", "1000")
    )
)
ALL_CELLS = (*COMBINATIONS, *JOBS)
SECURITY: Mapping[str, str] = {"PLAINTEXT": "without TLS", "SSL": "TLS"}
"""Kafka's security.protocol → its name in tables."""
