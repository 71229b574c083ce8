"""Rows of every shape that Python and Spark have, through the sink and the producer to a scripted broker.

The oracle knows the meaning of each row before the row is built, and uses no code of the package. Either the broker has
the meant records in order, or an error names the row or the column. Any other record is a silent fault.
"""

from __future__ import annotations

import datetime
import re
from collections import ChainMap, Counter, OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from support.producer_harness import ProducerHarness
from support.scripted_broker.batches import BrokerRecord

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.record.partitioning import partition_for_key
from spark_kafka_sink.sink import rows as rows_module
from spark_kafka_sink.sink.kafka_sink import KafkaSink
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.rows import PartitionWriter

TOPICS: Final = {"one": 1, "three": 3}
SEED: Final = settings(derandomize=True, print_blob=True, max_examples=150)
NAMED: Final = re.compile(r"row \d+|value|key|topic|partition|headers?|timestamp", re.IGNORECASE)
"""The text that an error about a row must have: its number, or a column."""


class _Nothing:
    """The meaning of a cell or row without a meaning, which must be an error."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING: Final = _Nothing()


def nothing_changes() -> None:
    """The change by the owner of a value that cannot be changed."""


class Cell(NamedTuple):
    """A value and its meaning. `change` is the owner's later change of the value, after it has handed over the row."""

    given: Any
    meaning: Any
    is_plain: bool = True
    """Whether it must be written; otherwise an error is correct too."""
    change: Callable[[], None] = nothing_changes


# ---- cells: each function makes a new one, so that no two rows share it ------------------------------------------


def plain(given: Any, meaning: Any = None) -> Callable[[], Cell]:
    return lambda: Cell(given, given if meaning is None else meaning)


def odd(given: Any, meaning: Any) -> Callable[[], Cell]:
    return lambda: Cell(given, meaning, is_plain=False)


def wrong(given: Any) -> Callable[[], Cell]:
    return lambda: Cell(given, NOTHING, is_plain=False)


def changing_bytes(data: bytes, *, is_plain: bool = True, view: bool = False) -> Callable[[], Cell]:
    def make() -> Cell:
        owned = bytearray(data)

        def change() -> None:
            owned[:] = b"#" * len(owned)

        return Cell(memoryview(owned) if view else owned, data, is_plain, change)

    return make


LARGE: Final = b"L" * 300_000
TEXTS: Final = [
    plain(None),
    plain("text", b"text"),
    plain("", b""),
    plain("grün € \U0001f600", "grün € \U0001f600".encode()),
    plain(b"bytes"),
    plain(b""),
    plain(b"\xff\x00\xfe"),
    changing_bytes(b"changing"),
    changing_bytes(b""),
]
ODD_TEXTS: Final = [
    odd(np.str_("numpy"), b"numpy"),
    odd(np.bytes_(b"numpy"), b"numpy"),
    odd(memoryview(b"view"), b"view"),
    changing_bytes(b"changing view", is_plain=False, view=True),
    wrong("half \ud83d"),
    wrong(True),
    wrong(1.5),
    wrong(-7),
    wrong(2**70),
    wrong(np.int64(3)),
    wrong(np.bool_(True)),
    wrong(Decimal("1.50")),
    wrong(datetime.date(2013, 1, 1)),
    wrong(datetime.datetime(2013, 1, 1)),
    wrong(["a"]),
    wrong(("a", "b")),
    wrong({"a": 1}),
    wrong(Row(a="b")),
    wrong(object()),
]
PARTITIONS: Final = [plain(None), plain(0)]
ODD_PARTITIONS: Final = [
    odd(np.int64(0), 0),
    odd(np.array(0), 0),
    *map(wrong, (-1, 3, 2**31, -(2**31), 2**32, 2**63, 2**70, -(2**70), 10**5000)),
    *map(wrong, (True, False, 0.0, 1.5, "0", b"0", Decimal(0), np.bool_(False), np.array(True), np.array(0.5), [0])),
]
EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MS: Final = datetime.timedelta(milliseconds=1)
MOMENTS: Final = [
    datetime.datetime(2013, 5, 6, 7, 8, 9, 123_999, datetime.UTC),
    datetime.datetime(2013, 5, 6, 7, 8, 9, 1, datetime.timezone(datetime.timedelta(hours=-7))),
    datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC),
    datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999, datetime.UTC),
    datetime.datetime(2013, 10, 27, 2, 30),  # naive: in this machine's zone
    datetime.datetime(2013, 10, 27, 2, 30, fold=1),
]
TIMESTAMPS: Final = [plain(None), plain(1_500_000_000_123), lambda: Cell(-1, None)] + [
    plain(moment, (moment.astimezone(datetime.UTC) - EPOCH) // MS) for moment in MOMENTS
]
ODD_TIMESTAMPS: Final = [
    odd(np.int64(1_500_000_000_123), 1_500_000_000_123),
    odd(5, 5),
    odd(1_500_000_000, 1_500_000_000),
    odd(1.5e12, 1_500_000_000_000),
    *map(wrong, (-2, -(2**63), -(2**70), 2**63 - 1, 2**63, 2**70, 10**30, 10**5000, -(10**5000))),
    *map(wrong, (True, np.bool_(True), 1.5, float("nan"), "2013-01-01", b"1", datetime.date(2013, 1, 1))),
    *map(wrong, (datetime.datetime(1960, 1, 1), datetime.datetime.min, np.datetime64("2013-01-01"), [1], Decimal(1))),
]


def _pair(key: Any, value: Any) -> Any:
    return (key, value)


class NamedHeader(NamedTuple):
    value: Any
    key: Any


def _named(names: str) -> Callable[[Any, Any], Any]:
    """A Row whose fields have these names, in this order."""

    def make(key: Any, value: Any) -> Any:
        fields = names.split()
        return Row(**{name: key if name.lower() == "key" else value for name in fields})

    return make


PAIRS: Final[list[Callable[[Any, Any], Any]]] = [
    _pair,
    lambda key, value: [key, value],
    _named("key value"),
    _named("value key"),
    _named("Value KEY"),
    lambda key, value: Row("value", "key")(value, key),
    lambda key, value: NamedHeader(value, key),
    lambda key, value: {"key": key, "value": value},
    lambda key, value: {"value": value, "key": key},
    lambda key, value: MappingProxyType({"value": value, "key": key}),
]


def changing_headers(shape: type, pairs: Sequence[Callable[[Any, Any], Any]]) -> Callable[[], Cell]:
    """Headers in `shape`, each made by one of `pairs`; their owner changes everything that can be changed."""

    def make() -> Cell:
        texts = [plain("v", b"v"), plain(b"\xff"), plain(None), changing_bytes(b"c"), changing_bytes(b"w", view=True)]
        values = [texts[index % len(texts)]() for index in range(len(pairs))]
        names = [("a", "b", "ä", "a")[index % 4] for index in range(len(pairs))]
        headers = [pair(name, value.given) for pair, name, value in zip(pairs, names, values, strict=True)]
        given = shape(headers)

        def change() -> None:
            for value in values:
                value.change()
            for header in headers:
                if isinstance(header, dict):
                    header.update(key="z", value=b"z")
                elif isinstance(header, list):
                    header[:] = ["z", b"z"]
            if isinstance(given, list):
                given[:] = [("z", b"z")]

        meaning = tuple((name.encode(), value.meaning) for name, value in zip(names, values, strict=True))
        return Cell(given, meaning, change=change)

    return make


HEADERS: Final = [
    lambda: Cell(None, ()),
    lambda: Cell([], ()),
    lambda: Cell((), ()),
    changing_headers(list, PAIRS),
    changing_headers(tuple, PAIRS[::-1]),
    *(changing_headers(list, [pair]) for pair in PAIRS),
    *(changing_headers(list, [_pair, pair, pair]) for pair in PAIRS),
]
WRONG_PAIRS: Final = [
    *(None, 5, "ab", b"ab", (), ("a",), ("a", b"1", b"2"), ["a"], ["k", b"v", 1], {"a", "b"}),
    *({}, {"a": b"1"}, {"key": "a"}, {"key": "a", "value": b"1", "more": 1}, {"key": "a", "KEY": "b"}),
    *({b"key": "a", b"value": b"1"}, Row(name="a", data=b"1"), Row(key="a"), Row("key", "value", "more")),
    *((None, b"1"), (5, b"1"), (True, b"1"), ("\ud800", b"1"), (b"\xff", b"1"), NamedHeader("a", 7)),
    *(("a", 5), ("a", True), ("a", 1.5), ("a", ["1"]), ("a", np.int64(1)), ("a", "\ud800")),
]
A1: Final = ((b"a", b"1"),)
ODD_HEADERS: Final = [
    odd([(b"a", b"1")], A1),
    odd([(np.str_("a"), np.bytes_(b"1"))], A1),
    odd([Row("a", b"1")], A1),  # type: ignore[call-overload]
    odd({"a": b"1"}, A1),
    odd({"a": b"1"}.items(), A1),
    lambda: Cell(iter([("a", b"1")]), A1, is_plain=False),
    odd(Row(("a", b"1")), A1),  # type: ignore[call-overload]
    odd(("a", b"1"), A1),
    odd(["a", b"1"], A1),
    odd(Row(key="a", value=b"1"), A1),
    odd({"key": "a", "value": b"1"}, A1),
    *map(wrong, ("ab", b"ab", bytearray(b"ab"), 5, True, {("a", b"1")}, Row(value=[("a", b"1")]))),
    *(wrong([("b", b"2"), header]) for header in WRONG_PAIRS),
]
TOPIC_CELLS: Final = [plain("one"), plain("three")]
ODD_TOPICS: Final = [odd(np.str_("one"), "one"), odd(b"one", "one"), *map(wrong, (None, "", "a b", 5, True, "\ud800"))]

CELLS: Final = {
    "value": (TEXTS, ODD_TEXTS),
    "key": (TEXTS, ODD_TEXTS),
    "topic": (TOPIC_CELLS, ODD_TOPICS),
    "partition": (PARTITIONS, ODD_PARTITIONS),
    "headers": (HEADERS, ODD_HEADERS),
    "timestamp": (TIMESTAMPS, ODD_TIMESTAMPS),
}
"""Column → (makers of cells that are written, makers of odd ones)."""
ABSENT: Final[dict[str, Any]] = {
    "key": None,
    "partition": None,
    "headers": (),
    "timestamp": None,
    "topic": NOTHING,
    "value": NOTHING,
}
EXTRAS: Final = ("extra", "Value", "KEY", "values", "Topic", "count", "index", "header")


# ---- rows ----------------------------------------------------------------------------------------------------------

Columns = list[tuple[Any, Any]]
"""Name and value of each column of a row, in order."""


def _assigned(row: Any, names: Any) -> Any:
    row.__fields__ = names
    return row


class OwnRow(Row):
    """A subclass as an application may define it."""


def _namedtuple(columns: Columns, **more: bool) -> Any:
    names = [str(name) for name, _ in columns]
    return namedtuple("Pandas", names, **more)(*(value for _, value in columns))  # type: ignore[arg-type]


def _values(columns: Columns) -> list[Any]:
    return [value for _, value in columns]


def _names(columns: Columns) -> list[Any]:
    return [name for name, _ in columns]


SHAPES: Final[dict[str, Callable[[Columns], Any]]] = {
    "Row": lambda columns: Row(**dict(columns)),
    "Row of a DataFrame": lambda columns: _assigned(Row(*_values(columns)), _names(columns)),
    "Row of a factory": lambda columns: Row(*_names(columns))(*_values(columns)),
    "Row with a tuple of names": lambda columns: _assigned(Row(*_values(columns)), tuple(_names(columns))),
    "subclass of Row": lambda columns: _assigned(OwnRow(*_values(columns)), _names(columns)),
    "dict": dict,
    "OrderedDict": OrderedDict,
    "UserDict": UserDict,
    "ChainMap": lambda columns: ChainMap(dict(columns)),
    "MappingProxy": lambda columns: MappingProxyType(dict(columns)),
    "namedtuple": _namedtuple,
    "itertuples": lambda columns: _namedtuple([("Index", 0), *columns], rename=True),
}
NAMELESS: Final[dict[str, Callable[[Columns], Any]]] = {
    "tuple": lambda columns: tuple(_values(columns)),
    "list": _values,
    "Row without names": lambda columns: Row(*_values(columns)),
    "factory instead of a Row": lambda columns: Row(*map(str, _names(columns))),
    "items": lambda columns: columns,
    "value": lambda columns: _values(columns)[0],
    "None": lambda columns: None,
    "one value too many": lambda columns: _assigned(Row(*_values(columns), "more"), _names(columns)),
    "one value too few": lambda columns: _assigned(Row(*_values(columns)[1:]), _names(columns)),
    "no names but values": lambda columns: _assigned(Row(*_values(columns)), []),
}
BY_POSITION: Final = frozenset(
    {"Row of a DataFrame", "Row of a factory", "Row with a tuple of names", "subclass of Row"}
)
"""Shapes that can have one name twice."""


class Meant(NamedTuple):
    """The record that a row means. `partition` None means any partition, `timestamp` None the time of the send."""

    topic: Any
    partition: Any
    key: Any
    value: Any
    headers: Any
    timestamp: Any

    def partition_of(self, count: int) -> int:
        """The partition of a record with a key."""
        return partition_for_key(self.key, count) if self.partition is None else self.partition


@dataclass(repr=False)
class OddRow:
    given: Any
    meaning: Meant | _Nothing
    is_plain: bool = True
    change: Callable[[], None] = nothing_changes
    text: str = ""
    """The row before anything was changed."""

    def __repr__(self) -> str:
        return f"{self.text} meaning {self.meaning!r}"


def meaning_of(columns: Sequence[tuple[Any, Cell]], topic: str | None) -> Meant | _Nothing:
    """The oracle. The first of two columns with one name counts, and the option `topic` wins over the column."""
    cells = dict(ABSENT)
    for name, cell in reversed(columns):
        if name in cells:
            cells[name] = cell.meaning
    if topic is not None:
        cells["topic"] = topic
    is_none = any(meaning is NOTHING for meaning in cells.values())
    is_none |= cells["partition"] not in (None, 0) and cells["partition"] is not NOTHING
    return NOTHING if is_none else Meant(**cells)


def built(shape: str, columns: Sequence[tuple[Any, Cell]], topic: str | None) -> OddRow:
    given = {**SHAPES, **NAMELESS}[shape]([(name, cell.given) for name, cell in columns])
    meaning = NOTHING if shape in NAMELESS else meaning_of(columns, topic)
    # the option wins over the column
    counted = [cell for name, cell in columns if name in CELLS and not (name == "topic" and topic is not None)]

    def change() -> None:
        for _, cell in columns:
            cell.change()
        if isinstance(given, dict | UserDict):
            given.update(value="changed", key="changed")
        elif isinstance(given, ChainMap):
            given.maps[0].update(value="changed")
        elif isinstance(given, list):
            given.clear()

    cells = ", ".join(f"{name}={shown(cell.given)}" for name, cell in columns)
    return OddRow(given, meaning, all(cell.is_plain for cell in counted), change, f"{shape}({cells})")


def shown(value: Any) -> str:
    is_huge = isinstance(value, int) and value.bit_length() > 1_000
    return "a huge int" if is_huge else f"{value!r:.100}"


@st.composite
def rows(draw: st.DrawFn, topic: str | None, *, is_odd: bool) -> list[OddRow]:
    """Rows of any shape, alike except for their cells; the last one has one ambiguous cell if `is_odd`. The first one
    has another type than those after it.
    """
    optional = ["key", "partition", "headers", "timestamp"] + (["topic"] if topic is not None else [])
    names: list[Any] = ["value", *draw(st.lists(st.sampled_from(optional), unique=True))]
    names += ["topic"] if topic is None else []
    names += draw(st.lists(st.sampled_from(EXTRAS), unique=True, max_size=2))
    names = draw(st.permutations(names))
    shapes = list(SHAPES)
    fault = draw(st.sampled_from(["cell", "cell", "cell", "shape", "missing", "name"])) if is_odd else ""
    odd_one = draw(st.sampled_from([name for name in names if name in CELLS])) if fault in ("cell", "missing") else ""
    if fault == "missing":
        names.remove(odd_one)
    if fault == "name":
        names.insert(draw(st.integers(0, len(names))), draw(st.sampled_from(["value", "key", "headers", 5, None, ""])))
        shapes = sorted(BY_POSITION)
    if fault == "shape":
        shapes = list(NAMELESS)
    shape = draw(st.sampled_from(shapes))
    made = []
    for left in range(draw(st.sampled_from([0, 0, 1, 2, 3])), -1, -1):
        columns = []
        for name in names:
            ordinary, unusual = CELLS.get(name, (TEXTS + HEADERS, ODD_TEXTS + ODD_PARTITIONS))
            is_unusual = (fault == "cell" and name == odd_one and left == 0) or (name not in CELLS)
            columns.append((name, draw(st.sampled_from(unusual if is_unusual else ordinary))()))
        made.append(built(shape, columns, topic))
    return made


def filler(index: int, topic: str | None, *, is_large: bool) -> OddRow:
    """The plain row between odd ones."""
    value = LARGE + b"%d" % index if is_large else f"filler {index}"
    names = [("key", Cell(f"k{index % 7}", b"k%d" % (index % 7))), ("value", Cell(value, _utf8(value)))]
    if topic is None:
        own = ("one", "three")[index % 3 == 0]
        names.append(("topic", Cell(own, own)))
    return built("Row of a DataFrame", names, topic)


def _utf8(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


@st.composite
def partitions(draw: st.DrawFn) -> tuple[str | None, list[OddRow]]:
    """The option `topic`, and the rows of a partition: any number of plain rows, with other rows at any index."""
    topic = draw(st.sampled_from([None, "one", "three"]))
    count = draw(st.sampled_from([0, 1, 2, 3, 6, 7, 30, 62, 63, 64, 126, 127, 128, 190, 300]))
    large = draw(st.sets(st.integers(0, count), max_size=4)) if draw(st.integers(0, 3)) == 0 else ()
    every = [filler(index, topic, is_large=index in large) for index in range(count)]
    others = draw(st.lists(rows(topic, is_odd=False), min_size=1, max_size=6))
    if draw(st.booleans()):
        others.append(draw(rows(topic, is_odd=True)))
    for alike in others:
        at = draw(st.integers(0, len(every)))
        every[at:at] = alike
    return topic, every


# ---- the sink and the producer -------------------------------------------------------------------------------------


class HarnessProducer:
    """The harness's producer, whose flush runs the Sender's poll loop."""

    def __init__(self, harness: ProducerHarness) -> None:
        self._harness = harness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._harness.producer, name)

    def flush(self, timeout: float | None = None) -> None:
        self._harness.run_until(lambda: not self._harness.accumulator.has_incomplete)


class HarnessSink(KafkaSink):
    def __init__(self, harness: ProducerHarness, topic: str | None) -> None:
        super().__init__({"kafka.bootstrap.servers": "h1:9092", **({} if topic is None else {"topic": topic})})
        producer = HarnessProducer(harness)
        self.pool = ProducerPool(lambda config: producer, SystemClock())

    def _new_writer(self) -> PartitionWriter:
        return PartitionWriter(self._config, self.pool)


def compiled(by_kernel: bool) -> AbstractContextManager[object]:
    """Take rows by the kernel if there is one, or all of them in Python."""
    return nullcontext() if by_kernel else patch.object(rows_module, "RowTaker", None)


def handed_over(every: Iterable[OddRow]) -> Iterator[Any]:
    """The rows; the owner changes each one as soon as the sink asks for the next."""
    for row in every:
        yield row.given
        row.change()


def write(sink: KafkaSink, every: Sequence[OddRow], *, one_by_one: bool) -> KafkaError | None:
    try:
        if one_by_one:
            sink.open(0, 0)
            for row in handed_over(every):
                sink.process(row)
            sink.close(None)
        else:
            sink.write_partition(handed_over(every))
    except KafkaError as error:
        sink.close(error)
        return error
    return None


def arrived(harness: ProducerHarness, start_ms: int) -> dict[str, list[list[Meant]]]:
    """The records of each partition of each topic, as `Meant`; timestamp None means the time of the send."""
    harness.run_until(lambda: not harness.accumulator.has_incomplete)
    end_ms = harness.clock.wall_ms()

    def as_meant(topic: str, partition: int, record: BrokerRecord) -> Meant:
        at_send = start_ms <= record.timestamp_ms <= end_ms
        stamp = None if at_send else record.timestamp_ms
        return Meant(topic, partition, record.key, record.value, record.headers, stamp)

    return {
        topic: [
            [as_meant(topic, at, record) for record in log] for at, log in enumerate(harness.cluster.records(topic))
        ]
        for topic in TOPICS
    }


def check(meant: Sequence[Meant], found: Mapping[str, Sequence[Sequence[Meant]]], *, is_all: bool) -> None:
    """Check that every record is a meant one, in order, and with `is_all` that none is missing."""
    for topic, logs in found.items():
        own = [each for each in meant if each.topic == topic]
        got = Counter(record._replace(partition=None) for log in logs for record in log)
        expected = Counter(each._replace(partition=None) for each in own)
        assert got <= expected, f"records too many for {topic}: {got - expected}"
        if is_all:
            assert got == expected, f"records lost for {topic}: {expected - got}"
        for at, log in enumerate(logs):
            check_order(own, log, at, len(logs))


def check_order(own: Sequence[Meant], log: Sequence[Meant], at: int, count: int) -> None:
    """Check the order in partition `at` of `count`: of all records if there is only one partition, otherwise of those
    with a key. Rows without a key that may go to any partition make up their own batches.
    """
    if count == 1:
        places = [each._replace(partition=0) for each in own]
        assert list(log) == places[: len(log)], "a gap, or another order"
    there = [each for each in own if each.key is not None and at == each.partition_of(count)]
    keyed = [record for record in log if record.key is not None]
    assert keyed == [each._replace(partition=at) for each in there][: len(keyed)], "a gap, or another order"


def assert_as_meant(topic: str | None, every: Sequence[OddRow], *, one_by_one: bool) -> None:
    harness = ProducerHarness({"linger.ms": 0, "max.block.ms": 1_000}, topics=TOPICS)
    start_ms = harness.clock.wall_ms()
    error = write(HarnessSink(harness, topic), every, one_by_one=one_by_one)
    meanings = [row.meaning for row in every]
    meant = [each for each in meanings if isinstance(each, Meant)]
    check(meant, arrived(harness, start_ms), is_all=error is None)
    if error is None:
        assert NOTHING not in meanings, f"written without an error: {[row for row in every if row.meaning is NOTHING]}"
    else:
        assert NAMED.search(str(error)), f"names neither row nor column: {error}"
        assert not all(row.is_plain and row.meaning is not NOTHING for row in every), f"nothing was odd: {error}"


@SEED
@given(partitions(), st.booleans(), st.booleans())
def test_odd_rows_are_written_as_meant_or_refused(
    partition: tuple[str | None, list[OddRow]], one_by_one: bool, by_kernel: bool
) -> None:
    topic, every = partition
    with compiled(by_kernel):
        assert_as_meant(topic, every, one_by_one=one_by_one)


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "python"])
@pytest.mark.parametrize("shape", ["Row of a DataFrame", "dict", None])
@pytest.mark.parametrize("index", [1, 70])
@pytest.mark.parametrize("name", CELLS)
def test_every_cell_after_like_rows_is_written_or_refused(
    name: str, index: int, shape: str | None, by_kernel: bool
) -> None:
    """Shape None stands for all shapes in turn."""
    plain_columns = [("key", CELLS["key"][0][1]), ("value", CELLS["value"][0][1]), ("topic", CELLS["topic"][0][0])]
    for at, make in enumerate(CELLS[name][0] + CELLS[name][1]):
        own = shape or list(SHAPES)[at % len(SHAPES)]
        columns = {**dict(plain_columns), name: make}
        first = {**columns, name: CELLS[name][0][0]}
        every = [
            built(own, [(column, made()) for column, made in (columns if number == index else first).items()], None)
            for number in range(index + 2)
        ]
        with compiled(by_kernel):
            assert_as_meant(None, every, one_by_one=at % 2 == 0)


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "python"])
@pytest.mark.parametrize("shape", ["Row", "Row of a DataFrame", "dict"])
@pytest.mark.parametrize("index", [1, 5, 70])
@pytest.mark.parametrize("names", [("value", "key"), ("value", "other"), ("other", "value")], ids=" ".join)
def test_a_row_with_as_many_other_names_is_written_as_meant(
    names: tuple[str, str], index: int, shape: str, by_kernel: bool
) -> None:
    cells = {"key": Cell("k", b"k"), "value": Cell("v", b"v"), "other": Cell("o", None)}
    for one_by_one in (True, False):
        every = [filler(number, "one", is_large=False) for number in range(index + 2)]
        every.insert(index, built(shape, [(name, cells[name]) for name in names], "one"))
        with compiled(by_kernel):
            assert_as_meant("one", every, one_by_one=one_by_one)


@pytest.mark.parametrize("index", [0, 1, 5, 70])
@pytest.mark.parametrize("name", CELLS)
def test_every_odd_cell_is_written_as_meant_or_refused(name: str, index: int) -> None:
    for at, make in enumerate(CELLS[name][1]):
        shape = list(SHAPES)[at % len(SHAPES)]
        topic = None if name == "topic" else "one"
        own = {} if topic else {"topic": Cell("one", "one")}
        columns = {"key": Cell("k", b"k"), "value": Cell("v", b"v"), **own, name: make()}
        every = [filler(number, topic, is_large=False) for number in range(index + 3)]
        every.insert(index, built(shape, list(columns.items()), topic))
        assert_as_meant(topic, every, one_by_one=at % 2 == 0)


@pytest.mark.parametrize("index", [0, 1, 5, 70])
def test_a_row_without_names_is_refused_at_any_index(index: int) -> None:
    columns = [("value", Cell("v", b"v")), ("key", Cell(None, None))]
    for shape in NAMELESS:
        every = [filler(number, "one", is_large=False) for number in range(index + 3)]
        every.insert(index, built(shape, columns, "one"))
        assert_as_meant("one", every, one_by_one=False)


# ---- KafkaProducer.send --------------------------------------------------------------------------------------------


@st.composite
def records(draw: st.DrawFn) -> OddRow:
    """The arguments of a `send`; most have one odd argument."""
    odd_one = draw(st.sampled_from(["", *CELLS]))
    cells = {}
    for name, (ordinary, unusual) in CELLS.items():
        cell = draw(st.sampled_from(unusual if name == odd_one else ordinary))()
        is_strange = name == "timestamp" and (cell.given == -1 or isinstance(cell.given, datetime.datetime))
        cells[name] = cell._replace(is_plain=cell.is_plain and not is_strange)
    row = built("dict", list(cells.items()), None)
    row.given = {name: cell.given for name, cell in cells.items()}
    return row


def send(harness: ProducerHarness, row: OddRow) -> Exception | None:
    """Send a record, change its arguments afterwards, and wait for the outcome."""
    fields = dict(row.given)
    try:
        delivery = harness.send(
            fields["value"],
            fields["topic"],
            fields["partition"],
            key=fields["key"],
            headers=fields["headers"],
            timestamp_ms=fields["timestamp"],
        )
    except KafkaError as error:
        return error
    row.change()
    harness.run_until(lambda: delivery.is_settled)
    return delivery.error


@SEED
@given(st.lists(records(), min_size=1, max_size=10))
def test_odd_records_are_sent_as_meant_or_refused(every: list[OddRow]) -> None:
    harness = ProducerHarness({"linger.ms": 0, "max.block.ms": 1_000}, topics=TOPICS)
    start_ms = harness.clock.wall_ms()
    meant: list[Meant] = []
    for row in every:
        error = send(harness, row)
        if error is None:
            assert isinstance(row.meaning, Meant), f"sent without an error: {row}"
            meant.append(row.meaning)
        else:
            assert NAMED.search(str(error)), f"names no field: {error}"
            assert not row.is_plain or row.meaning is NOTHING, f"nothing was odd in {row}: {error}"
    check(meant, arrived(harness, start_ms), is_all=True)
