"""Rows that can never be written, by columns and by rows: their records, their limit, and what is reported."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa
import pytest
from pyspark.sql import Row
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    KafkaTimeoutError,
    SchemaError,
    SerializationError,
    TooManyDeadLettersError,
)
from spark_kafka_sink.producer.writes import Delivered, RowCounts, WriteReport
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.fingerprint import MODULUS, fingerprint
from spark_kafka_sink.record.sifting import TopicLimits, Unwritable
from spark_kafka_sink.sink.arrow_writer import write_all
from spark_kafka_sink.sink.dead_letters import DeadLetters, LetterCounts, TaskPlace, check_limit, log_letters
from spark_kafka_sink.sink.delivery import TaskDelivery, report_columns, report_rows, task_report
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool
from spark_kafka_sink.sink.rows import PartitionWriter

NOON: Final = 1_700_000_000_000
OPTIONS: Final = {
    "kafka.bootstrap.servers": "h:1",
    "errors.tolerance": "all",
    "errors.deadletterqueue.topic.name": "dead",
    "kafka.max.request.size": "2000",
}
HEADER_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def config(topic: str | None = "orders", **more: str) -> SinkConfig:
    return SinkConfig.from_options({**OPTIONS, "topic": topic, **more})


class Bench:
    """A delivery with dead letters on a scripted producer. Topics have four partitions and the given limits."""

    def __init__(
        self,
        used: SinkConfig | None = None,
        limits: dict[str, TopicLimits] | None = None,
        place: TaskPlace = TaskPlace(3, "7"),  # noqa: B008 - a constant
        transaction: Any = None,
    ) -> None:
        self.asked: list[str] = []
        self.limits = limits or {}
        self.newest: dict[str, TopicLimits] = {}
        """What brokers say when they are asked again."""
        self.producer = ScriptedProducer()
        self.pool = ScriptedPool(self.producer)
        self.config = used or config()
        self.letters = DeadLetters(self.config, self._limits_of, place)
        self.delivery = TaskDelivery(self.config, self.pool, transaction, self.letters)

    def _limits_of(self, topic: str, highest: int | None, largest: int | None = None) -> TopicLimits:
        self.asked.append(topic)
        limits = self.limits.get(topic, TopicLimits(partitions=4))
        if largest is not None and limits.max_message_bytes is not None and largest > limits.max_message_bytes:
            return self.newest.get(topic, limits)
        return limits

    def write(self, **columns: pa.Array) -> None:
        self.write_batches(columns)

    def write_batches(self, *batches: dict[str, pa.Array]) -> None:
        write_all(self.delivery, [pa.RecordBatch.from_arrays(list(each.values()), list(each)) for each in batches])

    def write_rows(self, rows: Iterable[Any]) -> None:
        writer = PartitionWriter(self.delivery)
        writer.write(rows)
        writer.finish()

    def values(self, topic: str) -> list[bytes | None]:
        return [value for sent in self.producer.sent if sent.topic == topic for (value,) in sent.rows("value")]

    def dead(self) -> list[dict[str, Any]]:
        """The dead letters: key, value, timestamp and headers."""
        found = []
        for sent in self.producer.sent:
            if sent.topic == "dead":
                for key, value, time, headers in sent.rows("key", "value", "timestamp_ms", "headers"):
                    own = {each["key"].decode(): each["value"] for each in headers}
                    found.append({"key": key, "value": value, "time": time, "headers": own})
        return found

    def report(self) -> WriteReport:
        return WriteReport.of(report_rows(self.delivery.report), 1.0)


def test_a_dead_letter_has_the_record_and_says_why_it_was_not_written() -> None:
    bench = Bench(config(None))
    headers = pa.array([None, [{"key": "h", "value": b"1"}], None], HEADER_TYPE)
    first = {"value": pa.array(["a"]), "topic": pa.array(["t"])}
    second = {
        "value": pa.array(["b", "c", "d"]),
        "key": pa.array(["k", "l", None]),
        "topic": pa.array(["t", "not a topic", "t"]),
        "partition": pa.array([None, 2, None], pa.int32()),
        "timestamp": pa.array([NOON, NOON, NOON]),
        "headers": headers,
    }
    bench.write_batches(first, second)
    assert bench.values("t") == [b"a", b"b", b"d"]
    (letter,) = bench.dead()
    assert (letter["key"], letter["value"], letter["time"]) == (b"l", b"c", NOON)
    assert letter["headers"] == {
        "h": b"1",
        "__sink.errors.topic": b"not a topic",
        "__sink.errors.partition": b"2",
        "__sink.errors.exception.class.name": b"spark_kafka_sink.common.errors.InvalidTopicError",
        "__sink.errors.exception.message": b"The topic name is not valid: up to 249 characters of [a-zA-Z0-9._-],"
        b" not '.' or '..'.",
        "__sink.errors.row": b"2",
        "__sink.errors.batch.id": b"7",
    }


def test_row_number_counts_over_all_batches_of_the_task() -> None:
    bench = Bench()
    large = pa.array([b"v"] * 20_000 + [b"x" * 3_000] + [b"v"] * 20_000)
    bench.write_batches({"value": large}, {"value": large})
    assert [letter["headers"]["__sink.errors.row"] for letter in bench.dead()] == [b"20000", b"60001"]
    assert len(bench.values("orders")) == 80_000


def test_a_batch_write_has_no_batch_id() -> None:
    bench = Bench(place=TaskPlace())
    bench.write(value=pa.array([b"x"]), timestamp=pa.array([-5]))
    (letter,) = bench.dead()
    assert "__sink.errors.batch.id" not in letter["headers"]
    assert (letter["value"], letter["time"]) == (b"x", None)


@pytest.mark.parametrize(
    ("limits", "key", "headers", "left_out"),
    [
        ({}, "k", [], b"value"),
        ({}, "k", [("h", b"y" * 3_000)], b"value, headers"),
        ({}, "k" * 3_000, [("h", b"y" * 3_000)], b"value, headers, key"),
        ({"dead": TopicLimits(4, 600)}, "k", [("h", b"y" * 500)], b"value, headers"),
    ],
)
def test_what_makes_a_dead_letter_too_large_is_left_out(
    limits: dict[str, TopicLimits], key: str, headers: list[tuple[str, bytes]], left_out: bytes
) -> None:
    bench = Bench(limits=limits)
    own = pa.array([[{"key": name, "value": value} for name, value in headers]], HEADER_TYPE)
    bench.write(value=pa.array([b"x" * 3_000]), key=pa.array([key]), headers=own)
    (letter,) = bench.dead()
    parts = left_out.decode().split(", ")
    assert letter["headers"]["__sink.errors.left.out"] == left_out
    assert letter["value"] is None
    assert letter["key"] == (None if "key" in parts else key.encode())
    assert ("h" in letter["headers"]) == (bool(headers) and "headers" not in parts)


def test_what_a_row_does_not_have_is_not_left_out() -> None:
    """Bug: a dead letter said that its value was left out, and its row was a tombstone."""
    bench = Bench()
    bench.write(value=pa.array([None], pa.binary()), key=pa.array(["k" * 3_000]))
    (letter,) = bench.dead()
    assert (letter["value"], letter["key"], letter["headers"]["__sink.errors.left.out"]) == (None, None, b"key")


def test_a_record_too_large_for_its_topic_is_whole_in_a_topic_that_takes_it() -> None:
    bench = Bench(limits={"orders": TopicLimits(4, 500)})
    bench.write(value=pa.array([b"x" * 600, b"y"]))
    assert (bench.values("orders"), bench.values("dead")) == ([b"y"], [b"x" * 600])
    assert "__sink.errors.left.out" not in bench.dead()[0]["headers"]


def test_max_message_bytes_that_was_raised_counts_at_once() -> None:
    """Bug: a row that the topic took was a dead letter, and a dead letter that its topic took had no value."""
    bench = Bench(limits={"orders": TopicLimits(4, 500), "dead": TopicLimits(4, 500)})
    bench.newest["orders"] = TopicLimits(4, 800)
    bench.write(value=pa.array([b"x" * 600, b"y" * 900]))
    assert bench.values("orders") == [b"x" * 600]
    (letter,) = bench.dead()
    assert (letter["value"], letter["headers"]["__sink.errors.left.out"]) == (None, b"value")
    again = Bench(limits=bench.limits)
    again.newest["dead"] = TopicLimits(4, 5_000)
    again.write(value=pa.array([b"y" * 900]))
    (letter,) = again.dead()
    assert letter["value"] == b"y" * 900
    assert "__sink.errors.left.out" not in letter["headers"]


def test_rows_with_good_and_bad_cells_are_parted() -> None:
    bench = Bench(config(None))
    rows = [
        Row(topic="t", value="good", key=None, partition=1, timestamp=NOON, headers=[("h", b"1")]),
        Row(topic=None, value="1", key=None, partition=1, timestamp=NOON, headers=None),
        Row(topic="a b", value="2", key=None, partition=1, timestamp=NOON, headers=None),
        Row(topic="t", value="3", key=None, partition=-1, timestamp=NOON, headers=None),
        Row(topic="t", value="4", key=None, partition=4, timestamp=NOON, headers=None),
        Row(topic="t", value="5", key=None, partition=2**31, timestamp=NOON, headers=None),
        Row(topic="t", value="6", key=None, partition=1, timestamp=NOON // 1000, headers=None),
        Row(topic="t", value="7", key=None, partition=1, timestamp=NOON * 1000, headers=None),
        Row(topic="t", value="8", key=None, partition=1, timestamp=2**70, headers=None),
        Row(topic="t", value="9", key=None, partition=1, timestamp=-2, headers=None),
        Row(topic="t", value="10", key=None, partition=1, timestamp=NOON, headers=[(None, b"1")]),
        Row(topic="t", value="11", key=None, partition=1, timestamp=NOON, headers=[Row(key=None, value=None)]),
        Row(topic="t", value="12" * 2_000, key=None, partition=1, timestamp=NOON, headers=None),
        Row(topic="t", value="13\ud800", key="k", partition=1, timestamp=NOON, headers=None),
        Row(topic="t", value="14", key=None, partition=1, timestamp=NOON, headers=[("\udfff", b"")]),
        Row(topic="t", value="15", key=None, partition=1, timestamp=NOON, headers=[("a", b"1"), ("h", "\udfff")]),
        Row(topic="t", value="last", key="ü", partition=None, timestamp=-1, headers=[("ü", None)]),
    ]
    bench.write_rows(rows)
    assert bench.values("t") == [b"good", b"last"]
    dead = bench.dead()
    assert [letter["headers"]["__sink.errors.row"] for letter in dead] == [str(row).encode() for row in range(1, 16)]
    whole = {letter["value"] for letter in dead}
    assert whole == {None, *(str(row).encode() for row in (*range(1, 12), 14, 15))}
    texts = [letter["headers"]["__sink.errors.exception.message"].decode() for letter in dead]
    for text, expected in zip(
        texts,
        (
            "topic is null",
            "topic name is not valid",
            "-1 is negative",
            "partition 4: the topic has 0 to 3",
            "does not fit into 32 bits",
            "seconds",
            "microseconds",
            "after the year 9999",
            "before 1970",
            "no name",
            "no name",
            "more than kafka.max.request.size=2000",
            "the value is a text that UTF-8 cannot hold",
            "the name of a header is a text",
            "the value of a header is a text",
        ),
        strict=True,
    ):
        assert expected in text
    left_out = [letter["headers"].get("__sink.errors.left.out") for letter in dead]
    assert left_out == [*[None] * 11, b"value", b"value", b"headers", b"headers"]
    assert bench.report().dead_letters == 15


def test_dates_of_rows_may_lie_before_1980() -> None:
    bench = Bench()
    moments = [datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (1969, 1971)]
    bench.write_rows([Row(value="early", timestamp=moment) for moment in moments])
    assert [sent.rows("timestamp_ms") for sent in bench.producer.sent if sent.topic == "orders"] == [
        [(365 * 86_400_000,)]
    ]
    assert len(bench.dead()) == 1


def test_the_last_millisecond_before_1970_is_a_dead_letter_by_rows() -> None:
    """Bug: it was written with the time of writing."""
    bench = Bench()
    bench.write_rows([Row(value="v", timestamp=datetime.datetime(1969, 12, 31, 23, 59, 59, 999_500, datetime.UTC))])
    assert (bench.values("orders"), bench.values("dead")) == ([], [b"v"])


def test_a_null_among_the_headers_is_a_dead_letter_by_rows() -> None:
    """Bug: it stopped the query although dead letters were on. By columns it is a header without a name."""
    bench = Bench()
    bench.write_rows([Row(value="good", headers=[("h", b"1")]), Row(value="bad", headers=[("h", b"1"), None])])
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    headers = pa.array([[{"key": "h", "value": b"1"}, None]], pa.list_(header))
    by_columns = Bench()
    by_columns.write(value=pa.array(["bad"]), headers=headers)
    assert bench.values("orders") == [b"good"]
    (own,), (other,) = bench.dead(), by_columns.dead()
    assert own["headers"].pop("__sink.errors.row") == b"1"
    assert other["headers"].pop("__sink.errors.row") == b"0"
    assert own == other
    assert own["headers"]["__sink.errors.exception.message"] == b"a header has no name"


def test_good_rows_give_the_same_records_with_and_without_dead_letters() -> None:
    rows = [
        Row(value=f"v{row}", key=None if row % 3 else f"k{row}", timestamp=NOON + row, headers=[("h", b"%d" % row)])
        for row in range(500)
    ]
    strict = ScriptedProducer()
    writer = PartitionWriter(
        TaskDelivery(
            SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "orders"}), ScriptedPool(strict)
        )
    )
    writer.write(rows)
    writer.finish()
    bench = Bench()
    bench.write_rows(rows)
    names = ("value", "key", "timestamp_ms", "headers")
    assert [sent.rows(*names) for sent in bench.producer.sent] == [sent.rows(*names) for sent in strict.sent]


def test_a_wrong_type_still_fails_the_task() -> None:
    with pytest.raises(SchemaError, match="value attribute unsupported type int"):
        Bench().write_rows([Row(value=5)])


def test_without_the_option_a_row_fails_its_task() -> None:
    strict = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "orders"})
    delivery = TaskDelivery(strict, ScriptedPool(ScriptedProducer()))
    assert delivery.letters is None
    columns = {"value": pa.array([b"v"])}
    assert delivery.sifted(columns) is columns
    with pytest.raises(SerializationError, match=r"Row 0: value\.a: a null"):
        delivery.sifted(columns, [Unwritable(0, SerializationError, "value.a: a null")])


def test_rows_that_the_caller_found_are_dead_letters() -> None:
    bench = Bench()
    known = [Unwritable(1, SerializationError, "value.a: a null where the schema has none")]
    good = bench.delivery.sifted({"value": pa.array([b"v", None, b"w"]), "key": pa.array(["k", "l", "m"])}, known)
    assert good["key"].to_pylist() == ["k", "m"]
    bench.delivery.finish()
    (letter,) = bench.dead()
    assert (letter["key"], letter["value"]) == (b"l", None)
    assert letter["headers"]["__sink.errors.exception.message"] == b"value.a: a null where the schema has none"


# ---- limit and report ------------------------------------------------------------------------------------------------


def three_by_rows(bench: Bench) -> None:
    bench.write_rows([Row(value="v", partition=-1) for _ in range(3)])


def three_by_columns(bench: Bench) -> None:
    bench.write(value=pa.array(["v"] * 3), partition=pa.array([-1] * 3, pa.int32()))


@pytest.mark.parametrize("write_three", [three_by_rows, three_by_columns])
def test_a_task_stops_at_the_limit_before_it_sends_more(write_three: Callable[[Bench], None]) -> None:
    bench = Bench(config(**{"errors.deadletterqueue.max.rows": "2"}))
    with pytest.raises(
        TooManyDeadLettersError,
        match=r"At least 3 rows cannot be written, and errors\.deadletterqueue\.max\.rows=2\. The first is row 0 of"
        r" partition 3: partition -1 is negative",
    ):
        write_three(bench)
    assert bench.producer.sent == []


def test_dead_letters_up_to_the_limit_pass() -> None:
    bench = Bench(config(**{"errors.deadletterqueue.max.rows": "2"}))
    bench.write(value=pa.array(["v"] * 3), partition=pa.array([-1, 0, -1], pa.int32()))
    check_limit(bench.config, bench.report())
    assert bench.pool.dead_letters() == {"dead": 2}


def of_task(letters: int, first: str | None) -> pa.RecordBatch:
    counts = RowCounts()
    counts.delivered = {TopicPartition("dead", 0): Delivered(letters, 100, letters - 1)} if letters else {}
    delivered = {TopicPartition("orders", 0): Delivered(10, 1_000, 9)}
    return task_report(report_columns(delivered, 1, 0, LetterCounts(counts, first)))


def test_the_driver_adds_up_the_dead_letters_of_all_tasks(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [
        of_task(0, None),
        of_task(600, "row 5 of partition 1: too large"),
        of_task(400, "row 0 of partition 2: no"),
    ]
    report = WriteReport.of([row for task in tasks for row in task.to_pylist()], 1.0)
    assert (report.records, report.bytes, report.dead_letters) == (30, 3_000, 1_000)
    assert report.last_offsets[TopicPartition("dead", 0)] == 599
    assert ", 1,000 dead letters, 1.00 s" in str(report)
    check_limit(config(), report)
    with pytest.raises(TooManyDeadLettersError, match=r"At least 1000 rows.*max\.rows=999\. The first is row 5 of"):
        check_limit(config(**{"errors.deadletterqueue.max.rows": "999"}), report)
    with caplog.at_level(logging.WARNING):
        log_letters(config(), report, "Batch 7")
        log_letters(config(), WriteReport.of(of_task(0, None).to_pylist(), 1.0), "Batch 8")
    assert [record.getMessage() for record in caplog.records] == [
        "Batch 7: 1000 rows cannot be written, and are in topic dead. The first is row 5 of partition 1: too large"
    ]


def test_a_dead_letter_that_is_not_acknowledged_fails_the_task() -> None:
    bench = Bench()

    def refuse(unreported: Any) -> None:
        for sent in unreported:
            sent.report(KafkaTimeoutError("late") if sent.topic == "dead" else None)

    bench.producer.on_flush = refuse
    with pytest.raises(KafkaTimeoutError, match="dead-0: late"):
        bench.write(value=pa.array(["v", "w"]), partition=pa.array([0, -1], pa.int32()))
    assert bench.pool.dead_letters() == {}


def test_dead_letter_that_failed_stops_the_task_before_it_sends_more() -> None:
    """Bug: the task sent the rest of its rows, perhaps for hours, and failed at its end."""
    bench = Bench()
    bench.producer.on_send = lambda sent: sent.report(KafkaTimeoutError("late")) if sent.topic == "dead" else None
    bad = {"value": pa.array(["v"]), "partition": pa.array([-1], pa.int32())}
    with pytest.raises(KafkaTimeoutError, match="dead-0: late"):
        bench.write_batches(bad, {"value": pa.array(["v"]), "partition": pa.array([0], pa.int32())})
    assert bench.values("orders") == []


def test_rows_interface_logs_its_dead_letters(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    writer = PartitionWriter(bench.delivery)
    writer.write([Row(value="v", partition=-1), Row(value="w")])
    writer.finish()
    writer.log_letters()
    assert [record.getMessage() for record in caplog.records] == [
        "Batch 7, partition 3: 1 rows cannot be written, and are in topic dead. The first is row 0 of partition 3:"
        " partition -1 is negative"
    ]


# ---- in a transaction ------------------------------------------------------------------------------------------------


class CountingTransaction:
    """Adds up the fingerprint as a task of exactly-once delivery does."""

    def __init__(self, *, is_written_already: bool = False) -> None:
        self.is_written_already = is_written_already
        self.is_prepared = False
        self.rows = 0
        self.fingerprint = 0
        self.marked: int | None = None

    def takes(self, topic: str, columns: RecordColumns) -> bool:
        self.rows += columns.num_rows
        self.fingerprint = (self.fingerprint + fingerprint(topic, columns)) % MODULUS
        return not self.is_written_already

    def begin(self, pool: ProducerPool, config: Any) -> Producer:
        return pool.borrow(config)

    def add_marker(self, producer: Producer, rows: int) -> None:
        self.marked = rows

    def prepare(self, producer: Producer, delivered: object) -> None:
        self.is_prepared = True


BAD_BATCH: Final[Callable[[], dict[str, pa.Array]]] = lambda: {  # noqa: E731
    "value": pa.array(["a", "b", "c", "d", "e", "x" * 3_000]),
    "topic": pa.array(["t", None, "a b", "u", "t", "t"]),
    "partition": pa.array([0, 1, 2, 9, -1, None], pa.int32()),
    "timestamp": pa.array([NOON, -7, 2**60, NOON, 5, None]),
}


def test_dead_letters_belong_to_the_transaction() -> None:
    transaction = CountingTransaction()
    bench = Bench(config(None), transaction=transaction)
    bench.write(**BAD_BATCH())
    assert (bench.values("t"), len(bench.dead())) == ([b"a"], 5)
    assert (transaction.rows, transaction.marked, transaction.is_prepared) == (6, 6, True)


def test_row_for_the_decision_topic_is_a_dead_letter() -> None:
    used = config(None, **{"delivery.guarantee": "exactly-once", "decision.topic": "decisions"})
    bench = Bench(used, transaction=CountingTransaction())
    bench.write(value=pa.array(["a", "b"]), topic=pa.array(["t", "decisions"]))
    assert [sent.topic for sent in bench.producer.sent] == ["dead", "t"]
    assert b"only its drivers write" in bench.dead()[0]["headers"]["__sink.errors.exception.message"]


def test_a_batch_that_is_written_already_is_counted_and_asks_no_broker() -> None:
    """Its fingerprint is the same, whatever the brokers said about its rows before."""
    first, second = CountingTransaction(), CountingTransaction(is_written_already=True)
    Bench(config(None), transaction=first).write(**BAD_BATCH())
    again = Bench(config(None, **{"errors.deadletterqueue.max.rows": "1"}), transaction=second)
    again.write(**BAD_BATCH())
    assert (second.rows, second.fingerprint) == (first.rows, first.fingerprint)
    assert (again.asked, again.producer.sent, again.report().dead_letters) == ([], [], 0)


@pytest.mark.parametrize(
    ("limits", "letters"), [({"t": TopicLimits(0)}, 6), ({"u": TopicLimits(20)}, 4), ({"t": TopicLimits(4, 60)}, 6)]
)
def test_fingerprint_does_not_depend_on_what_brokers_say(limits: dict[str, TopicLimits], letters: int) -> None:
    usual, other = CountingTransaction(), CountingTransaction()
    Bench(config(None), transaction=usual).write(**BAD_BATCH())
    bench = Bench(config(None), limits, transaction=other)
    bench.write(**BAD_BATCH())
    assert (len(bench.dead()), other.fingerprint) == (letters, usual.fingerprint)
