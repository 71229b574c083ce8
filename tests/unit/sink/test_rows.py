from __future__ import annotations

import datetime
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from unittest.mock import Mock

import pytest
from kio.schema.errors import ErrorCode
from pyspark.sql import Row
from support.scripted_producer import ScriptedPool, ScriptedProducer, Sent

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    BrokerError,
    KafkaError,
    KafkaTimeoutError,
    RecordTooLargeError,
    SchemaError,
    error_for_code,
)
from spark_kafka_sink.producer.writes import RowCounts
from spark_kafka_sink.record.kernel import has_kernel
from spark_kafka_sink.sink import rows as rows_module
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.rows import BLOCK_BYTES, BLOCK_ROWS, CHUNK_BYTES, CHUNK_ROWS, PartitionWriter, Taken

NAMES = ["key", "value", "headers", "partition", "timestamp"]


@pytest.fixture(params=[True, False], ids=["kernel", "python"])
def by_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Take rows by the kernel if the parameter is true, otherwise only in Python."""
    if not request.param:
        monkeypatch.setattr(rows_module, "RowTaker", None)
    elif not has_kernel():
        pytest.skip("the kernel was not compiled")
    return bool(request.param)


class Bench:
    """A writer on a pool of one scripted producer."""

    def __init__(self, producer: ScriptedProducer | None = None, /, **options: str) -> None:
        self.producer = producer or ScriptedProducer()
        self.made = 0
        self.pool = ScriptedPool(self._create)
        self.config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "orders", **options})
        self.writer = PartitionWriter(TaskDelivery(self.config, self.pool))

    def _create(self, config: object) -> ScriptedProducer:
        self.made += 1
        return self.producer

    @property
    def released(self) -> bool:
        return self.pool.lent == 0

    def values(self) -> list[bytes]:
        return [value for sent in self.producer.sent for value in sent.columns.value.to_pylist()]

    def write(self, source: Iterable[object], *, one_by_one: bool) -> None:
        """Write the rows and finish."""
        if one_by_one:
            for row in source:
                self.writer.add(row)
        else:
            self.writer.write(source)
        self.writer.finish()

    def records(self) -> list[tuple[object, ...]]:
        """All sent records: value, key, headers, timestamp and partition of each row."""
        found: list[tuple[object, ...]] = []
        for sent in self.producer.sent:
            columns = sent.columns
            parts = (columns.value, columns.key, columns.headers, columns.timestamp_ms, columns.partition)
            lists = [[None] * columns.num_rows if part is None else part.to_pylist() for part in parts]
            found += [(sent.topic, *record) for record in zip(*lists, strict=True)]
        return found


def rows(count: int, size: int = 10) -> list[Row]:
    return [Row(key=str(n), value=f"{n:0{size}}") for n in range(count)]


def values(count: int, size: int = 10) -> list[bytes]:
    return [f"{n:0{size}}".encode() for n in range(count)]


@pytest.mark.parametrize("count", [1, 63, 64, 65, BLOCK_ROWS, BLOCK_ROWS + 1, 20_000])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_every_row_is_sent_once_and_in_order(count: int, one_by_one: bool) -> None:
    bench = Bench()
    if one_by_one:
        for row in rows(count):
            bench.writer.add(row)
    else:
        bench.writer.write(iter(rows(count)))
    bench.writer.finish()
    assert bench.values() == values(count)
    assert bench.producer.flushes == 1
    assert bench.released


def row_of(names: Sequence[str], *cells: object) -> Row:
    made: Row = Row(*cells)
    made.__fields__ = names
    return made


ALIKE = {
    "str": lambda n: row_of(NAMES[:2], f"k{n}", f"v{n}"),
    "binary": lambda n: row_of(NAMES[:2], bytearray(b"k"), bytearray(b"v")),
    "other names": lambda n: Row(key=None, value=b"v"),
    "headers as Rows": lambda n: row_of(NAMES[:3], "k", "v", [row_of(["key", "value"], "h", bytearray(b"1"))] * 3),
    "headers as pairs": lambda n: row_of(NAMES[:3], "k", "v", (("h", b"1"),)),
    "headers as dicts": lambda n: row_of(NAMES[:3], "k", "v", [{"key": "h", "value": None}]),
    "all columns": lambda n: row_of(NAMES, "k", "v", None, n % 3, datetime.datetime(2013, 1, 1)),
    "dict": lambda n: {"value": "v", "key": "k", "partition": None, "timestamp": 1_500_000_000_000},
}


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("shape", ALIKE)
def test_rows_like_the_first_one_are_taken_by_the_kernel(
    shape: str, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel():
        pytest.skip("the kernel was not compiled")
    in_python: list[object] = []
    own_taken = rows_module.taken

    def taken(source: Iterable[object], first: int, **named: bool) -> list[Taken]:
        found = own_taken(source, first, **named)
        in_python.extend(found)
        return found

    monkeypatch.setattr(rows_module, "taken", taken)
    bench = Bench()
    bench.write(map(ALIKE[shape], range(BLOCK_ROWS + 100)), one_by_one=one_by_one)
    assert len(bench.values()) == BLOCK_ROWS + 100
    assert len(in_python) == 1


CELLS: dict[str, list[object]] = {
    "key": [None, "k", "ü" * 30, b"\xff", "", bytearray(b"kk")],
    "value": [None, "v" * 100, b"", "", bytearray(b"vv"), b"v"],
    "headers": [
        *(None, [], (), [("a", b"1")], [["b", "ü"]], ({"key": "c", "value": None}, {"value": b"4", "key": "d"})),
        *([row_of(["key", "value"], "e", bytearray(b"5"))] * 2, [row_of(["VALUE", "key"], memoryview(b"6"), "f")]),
    ],
    "partition": [None, 0, 2**31 - 1],
    "timestamp": [None, -1, 1_500_000_000_123, datetime.datetime(2013, 5, 6, 7, 8, 9, 999_999)],
    "other": [None, 1, [2]],
    "topic": ["a", "b", "a"],
}
ODD: dict[str, list[object]] = {
    "key": [5, "\ud800", memoryview(b"1")],
    "value": [True, "v\udfff", ["v"]],
    "headers": [{"a": b"1"}, [("a", 5)], [("a",)], [("\ud800", b"1")], [(b"\xff", b"1")], [("a", "\ud800")]],
    "partition": [True, 1.5, 2**31, "1"],
    "timestamp": [-5, 1.5, 10, datetime.date(2013, 1, 1)],
    "topic": [None, 5, "\ud800"],
}


def mixed(chance: random.Random) -> list[object]:
    """Rows with columns that change now and then and with cells of every kind; some lists have one odd cell."""
    found: list[object] = []
    count = chance.choice([1, 5, 70, 400])
    odd_at = chance.choice([None, chance.randrange(count)])
    names, shape = ["value", "topic"], 0
    for number in range(count):
        if chance.random() < 0.1:
            names = ["value", "topic", *chance.sample(["key", "headers", "partition", "timestamp", "other"], 3)]
            chance.shuffle(names)
            shape = chance.randrange(5)
        cells = [chance.choice(CELLS[name]) for name in names]
        if number == odd_at:
            at = chance.choice([index for index, name in enumerate(names) if name in ODD])
            cells[at] = chance.choice(ODD[names[at]])
        own = names if shape else list(names)
        found.append(dict(zip(names, cells, strict=True)) if shape == 4 else row_of(own, *cells))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_kernel_and_python_send_the_same_or_raise_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = mixed(random.Random(seed))

    def outcome() -> tuple[str, list[tuple[object, ...]]]:
        bench = Bench(topic=None)  # type: ignore[arg-type]
        try:
            bench.write(iter(source), one_by_one=seed % 2 == 0)
        except KafkaError as error:
            return f"{type(error).__name__}: {error}", []
        return "", bench.records()

    by_kernel = outcome()
    monkeypatch.setattr(rows_module, "RowTaker", None)
    assert by_kernel == outcome()


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.usefixtures("by_kernel")
def test_an_iterator_may_use_its_objects_again(one_by_one: bool) -> None:
    """Bug: 64 records had the bytes of the last one."""
    value, header = bytearray(6), bytearray(6)
    names, fields, headers = ["value", "headers"], ["key", "value"], []  # type: ignore[var-annotated]
    as_dict: dict[str, object] = {}

    def source() -> Iterator[object]:
        for n in range(300):
            value[:] = header[:] = b"%06d" % n
            headers[:] = [row_of(fields, "h", header)]
            as_dict.update(value=value, headers=headers)
            yield as_dict if n % 100 > 50 else row_of(names, value, headers)
        value[:] = header[:] = b"______"

    bench = Bench()
    bench.write(source(), one_by_one=one_by_one)
    numbers = [b"%06d" % n for n in range(300)]
    assert [(record[1], record[3]) for record in bench.records()] == [
        (number, [{"key": b"h", "value": number}]) for number in numbers
    ]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.usefixtures("by_kernel")
def test_names_that_change_after_their_row_change_nothing(one_by_one: bool) -> None:
    """Bug: a row waited in a chunk, and was read by the names of that later time."""
    names = ["key", "value"]

    def source() -> Iterator[Row]:
        for n in range(200):
            yield row_of(names, f"k{n}", f"v{n}")
        for n in range(200, 400):
            names.reverse()
            yield row_of(names, *([f"k{n}", f"v{n}"] if n % 2 else [f"v{n}", f"k{n}"]))
        names[:] = ["other", "value"]

    bench = Bench()
    bench.write(source(), one_by_one=one_by_one)
    assert [record[1:3] for record in bench.records()] == [(b"v%d" % n, b"k%d" % n) for n in range(400)]


def test_an_empty_partition_makes_no_producer() -> None:
    bench = Bench()
    bench.writer.write(iter([]))
    bench.writer.finish()
    assert bench.made == 0


@pytest.mark.parametrize("size", [10, 1_000, 30_000, 900_000])
def test_blocks_are_bounded_in_rows_and_bytes(size: int) -> None:
    bench = Bench()
    bench.writer.write(iter(rows(min(30_000, 60_000_000 // size), size)))
    bench.writer.finish()
    for sent in bench.producer.sent:
        assert sent.columns.num_rows < BLOCK_ROWS + 64
        assert sent.columns.value.nbytes < BLOCK_BYTES + CHUNK_BYTES + 3 * size


@pytest.mark.parametrize("headers", [10, 50, 200])
def test_blocks_are_bounded_in_headers_however_small_they_are(headers: int) -> None:
    """Each header is 500 bytes of Python objects: blocks of 50 took a worker 70 MB."""
    bench = Bench()
    some = [Row(key="h", value=b"1")] * headers
    bench.writer.write(Row(value="v", headers=some) for _ in range(100_000 // headers))
    bench.writer.finish()
    assert max(sent.columns.num_rows for sent in bench.producer.sent) * headers < 40_000


def test_large_rows_are_taken_a_few_at_a_time() -> None:
    taken = given = 0

    def source() -> Iterator[Row]:
        nonlocal taken
        yield from rows(1_000)
        for row in rows(200, size=900_000):
            taken += 1
            yield row

    held: list[int] = []

    def note(sent: Sent) -> None:
        nonlocal given
        held.append(taken - given)
        given += sum(len(value) > 100_000 for value in sent.columns.value.to_pylist())

    bench = Bench(ScriptedProducer(on_send=note))
    bench.writer.write(source())
    bench.writer.finish()
    assert max(held[2:]) <= 64
    assert max(held[-50:]) <= 3


def test_rows_of_several_topics_go_to_their_topics_in_order() -> None:
    bench = Bench(topic=None)  # type: ignore[arg-type]
    bench.writer.write(Row(value=str(n), topic=f"t{n % 3}") for n in range(30))
    bench.writer.finish()
    found = {sent.topic: [int(v) for v in sent.columns.value.to_pylist()] for sent in bench.producer.sent}
    assert found == {f"t{k}": list(range(k, 30, 3)) for k in range(3)}
    assert bench.producer.looked_up == ["t1", "t2"]


def test_a_row_that_the_broker_refused_fails_the_task() -> None:
    def refuse(unreported: Sequence[Sent]) -> None:
        for sent in unreported:
            sent.report(RecordTooLargeError("too large: raise max.message.bytes"), partition=3)

    bench = Bench(ScriptedProducer(on_flush=refuse))
    bench.writer.write(rows(100))
    with pytest.raises(RecordTooLargeError, match=r"^orders-3: too large: raise max\.message\.bytes$"):
        bench.writer.finish()
    assert bench.released


def test_error_without_class_keeps_its_code() -> None:
    bench = Bench(
        ScriptedProducer(
            on_flush=lambda all_sent: all_sent[0].report(error_for_code(ErrorCode.throttling_quota_exceeded))
        )
    )
    bench.writer.write(rows(1))
    with pytest.raises(BrokerError, match="quota") as caught:
        bench.writer.finish()
    assert caught.value.error_code == ErrorCode.throttling_quota_exceeded


def test_error_with_topic_partition_keeps_its_text() -> None:
    text = "3 records for orders-0: delivery.timeout.ms has passed"
    error = KafkaTimeoutError(text, topic_partition=TopicPartition("orders", 0))
    bench = Bench(ScriptedProducer(on_flush=lambda all_sent: all_sent[0].report(error)))
    bench.writer.write(rows(1))
    with pytest.raises(KafkaTimeoutError) as caught:
        bench.writer.finish()
    assert str(caught.value) == str(error)


@pytest.mark.parametrize("reported", [0, 5])
def test_row_without_an_outcome_fails_the_task(reported: int) -> None:
    def lose(unreported: Sequence[Sent]) -> None:
        if reported:
            unreported[0].report(count=reported)

    bench = Bench(ScriptedProducer(on_flush=lose))
    bench.writer.write(rows(20))
    with pytest.raises(KafkaError, match=f"{20 - reported} of 20 rows were sent and neither acknowledged nor refused"):
        bench.writer.finish()
    assert bench.released


def test_an_error_is_raised_at_the_next_row() -> None:
    bench = Bench(ScriptedProducer(on_send=lambda sent: sent.report(KafkaError("no"))))
    for row in rows(BLOCK_ROWS):
        bench.writer.add(row)
    for _ in range(CHUNK_ROWS):
        if not bench.producer.sent:
            bench.writer.add(rows(1)[0])
    with pytest.raises(KafkaError, match="orders-0: no"):
        bench.writer.add(rows(1)[0])


def test_an_error_stops_the_partition_before_its_end() -> None:
    taken = 0

    def source() -> Iterator[Row]:
        nonlocal taken
        for row in rows(100_000):
            taken += 1
            yield row

    bench = Bench(ScriptedProducer(on_send=lambda sent: sent.report(KafkaError("no"))))
    with pytest.raises(KafkaError, match="orders-0: no"):
        bench.writer.write(source())
    assert taken <= BLOCK_ROWS + 128


@pytest.mark.parametrize("call", ["on_send", "on_flush"])
def test_error_of_a_call_passes_through_and_returns_the_producer(call: str) -> None:
    bench = Bench(ScriptedProducer(**{call: Mock(side_effect=KafkaTimeoutError("it took too long"))}))
    bench.writer.write(rows(3))
    with pytest.raises(KafkaTimeoutError, match="it took too long"):
        bench.writer.finish()
    assert bench.released


def test_an_abandoned_writer_waits_for_nothing() -> None:
    bench = Bench()
    bench.writer.write(rows(BLOCK_ROWS + 64))
    bench.writer.abandon()
    assert bench.producer.sent
    assert bench.producer.flushes == 0
    assert bench.released


def test_abandoned_writer_sends_nothing_later() -> None:
    bench = Bench()
    for row in rows(2):  # the first is in the block, the second waits in a chunk
        bench.writer.add(row)
    bench.writer.abandon()
    bench.writer.finish()
    assert bench.values() == []


def test_the_schema_is_checked_at_the_first_row() -> None:
    bench = Bench()
    with pytest.raises(SchemaError, match="Required attribute 'value' not found"):
        bench.writer.add(Row(key="k"))
    assert bench.made == 0


@pytest.mark.parametrize(
    ("good", "bad", "options"),
    [
        (Row(key="k", value="v"), Row(key=1, value="v"), {}),
        (Row(topic="orders", value="v"), Row(topic=None, value="v"), {"topic": None}),
        (Row(value="v", timestamp=None), Row(value="v", timestamp=-2), {}),
    ],
    ids=["in a chunk", "in a block", "as columns"],
)
def test_finish_fails_after_a_refused_row(good: Row, bad: Row, options: dict[str, str]) -> None:
    """The other rows of its chunk are lost with it."""
    bench = Bench(**options)
    refused = 0
    for row in [good] * 100 + [bad] + [good] * BLOCK_ROWS:
        try:
            bench.writer.add(row)
        except SchemaError:
            refused += 1
    with pytest.raises(SchemaError):
        bench.writer.finish()
    assert refused > 1, "every later row says so"
    assert bench.released


def test_finish_fails_after_a_failed_send() -> None:
    def refuse_first(sent: Sent) -> None:
        if not bench.producer.sent and sent.columns.num_rows >= BLOCK_ROWS:
            raise KafkaTimeoutError("Topic orders not present in metadata after 60000 ms.")

    bench = Bench(ScriptedProducer(on_send=refuse_first))
    for row in rows(BLOCK_ROWS + 100):
        with suppress(KafkaTimeoutError):
            bench.writer.add(row)
    with pytest.raises(KafkaTimeoutError):
        bench.writer.finish()


@pytest.mark.usefixtures("by_kernel")
def test_finish_raises_the_first_error_again() -> None:
    """Its block holds another row that cannot be written."""
    bench = Bench()
    names = ["key", "value", "timestamp"]
    source = [row_of(names, "k", "v", None)] * 100 + [row_of(names, "k", "v", -5), row_of(names, 1, "v", None)]
    with pytest.raises(SchemaError, match="key attribute unsupported type int"):
        bench.writer.write(iter(source))
    with pytest.raises(SchemaError, match="key attribute unsupported type int"):
        bench.writer.finish()
    assert bench.values() == []


class HarmfulKey:
    """A key of a dict that takes the place of `key` and cannot be compared."""

    def __hash__(self) -> int:
        return hash("key")

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError


@pytest.mark.usefixtures("by_kernel")
def test_finish_fails_after_a_row_whose_error_was_caught() -> None:
    """Bug: `close` of foreach did not raise the error again, and the row was lost without an error."""
    bench = Bench()
    names = ["value", "headers"]
    for _ in range(100):
        bench.writer.add(row_of(names, "v", []))
    with pytest.raises(ZeroDivisionError):
        bench.writer.add(row_of(names, "v", [{HarmfulKey(): "h", "value": b"1"}]))
    with pytest.raises(ZeroDivisionError):
        bench.writer.finish()
    assert bench.values() == []


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("count", [0, 1, 100, BLOCK_ROWS, BLOCK_ROWS + 100])
@pytest.mark.usefixtures("by_kernel")
def test_error_has_row_number_in_the_partition(count: int, one_by_one: bool) -> None:
    source = [*rows(count), ("k", "v")]
    with pytest.raises(SchemaError, match=f"Row {count} is a tuple without names"):
        Bench().write(iter(source), one_by_one=one_by_one)
    source = [*rows(count), Row(value="v", timestamp=-5)]
    with pytest.raises(SchemaError, match=f"timestamp of row {count} is -5"):
        Bench().write(iter(source), one_by_one=one_by_one)


@pytest.mark.usefixtures("by_kernel")
def test_small_rows_are_taken_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1

    monkeypatch.setattr(RowCounts, "check", lambda counts: check())
    bench.write(iter(rows(6_400)), one_by_one=False)
    assert 100 <= checks <= 120


def test_finish_fails_after_an_error_of_the_iterator() -> None:
    """The rows before the error in its chunk are lost with it."""

    def failing() -> Iterator[Row]:
        yield from rows(100)
        raise ValueError("no more rows")

    bench = Bench()
    with pytest.raises(ValueError, match="no more rows"):
        bench.writer.write(failing())
    with pytest.raises(ValueError, match="no more rows"):
        bench.writer.finish()
    assert bench.released


def test_the_option_lets_early_numbers_pass_by_rows() -> None:
    row = Row(value="a", timestamp=1_764_000_000)
    with pytest.raises(SchemaError, match=r"set timestamp\.allow\.before\.1980=true"):
        Bench().write([row], one_by_one=False)
    bench = Bench(**{"timestamp.allow.before.1980": "true"})
    bench.write([row], one_by_one=False)
    assert [sent.columns.timestamp_ms.to_pylist() for sent in bench.producer.sent] == [[1_764_000_000]]
