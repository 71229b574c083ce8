"""Rows that can never be written, among good ones: the topics and the dead letters together have every row once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.exactly_once_streams import await_markers
from support.librdkafka import read_topic
from support.pyspark_capabilities import FAILURES, FORMAT

from spark_kafka_sink.common.errors import TooManyDeadLettersError
from spark_kafka_sink.local import Admin
from spark_kafka_sink.sink.kafka_sink import KafkaSink

ROWS: Final = 1_000
PARTITIONS: Final = 3
GOOD_ROWS: Final = 980
"""Rows 50, 51, ... 69 are bad, two of each kind."""
SMALL: Final = 5_000
"""max.message.bytes of the topic `small`."""
LARGEST: Final = 20_000
NOON: Final = 1_700_000_000_000
REASONS: Final = (
    "the topic is null",
    "The topic name is not valid",
    "partition -7 is negative",
    "partition 99: the topic has 0 to 2",
    "before 1970",
    "looks like microseconds",
    "looks like seconds",
    "a header has no name",
    f"more than kafka.max.request.size={LARGEST}",
    f"more than max.message.bytes={SMALL} of the topic",
)
"""The kinds of bad rows, in the order of `rows`."""
NO_VALUE: Final = 8
"""The kind whose dead letters have no value, because no request could hold them."""
AT_LEAST_ONCE, EXACTLY_ONCE = "at-least-once", "exactly-once"

Write = Callable[[DataFrame, dict[str, str], Path], None]


def rows(spark: SparkSession, topic: str, small: str) -> DataFrame:
    kind = "if(id between 50 and 69, (id - 50) DIV 2, -1)"
    noise = "array_join(transform(sequence(1, 100), each -> sha2(concat(id, '-', each), 512)), '')"
    return (
        spark.range(ROWS)
        .selectExpr("id", f"{kind} AS kind")
        .selectExpr(
            "CAST(id AS STRING) AS key",
            f"CASE kind WHEN 8 THEN repeat('x', {2 * LARGEST}) WHEN 9 THEN {noise}"
            " ELSE concat('value-', id) END AS value",
            f"CASE kind WHEN 0 THEN null WHEN 1 THEN 'no topic' WHEN 9 THEN '{small}' ELSE '{topic}' END AS topic",
            "CAST(CASE kind WHEN 2 THEN -7 WHEN 3 THEN 99 WHEN 9 THEN null"
            " ELSE if(id % 2 = 0, id % 3, null) END AS INT) AS partition",
            f"CASE kind WHEN 4 THEN -5 WHEN 5 THEN {NOON * 1000} WHEN 6 THEN {NOON // 1000} ELSE {NOON} + id END"
            " AS timestamp",
            "array(named_struct('key', if(kind = 7, null, 'h'), 'value', encode(CAST(id AS STRING), 'utf-8')))"
            " AS headers",
        )
        .repartition(4)
    )


def by_stream(frame: DataFrame, folder: Path) -> Any:
    """Return the writer of a stream of the rows, one micro-batch."""
    frame.write.parquet(str(folder / "rows"))
    stream = frame.sparkSession.readStream.schema(frame.schema).parquet(str(folder / "rows")).writeStream
    return stream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)


def run(writer: Any) -> None:
    writer.start().awaitTermination()


def foreach(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    run(by_stream(frame, folder).foreach(KafkaSink(options)))


def foreach_partition(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    frame.foreachPartition(KafkaSink(options).write_partition)


def write(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    report = KafkaSink(options).write(frame)
    assert (report.records, report.dead_letters) == (GOOD_ROWS, ROWS - GOOD_ROWS)


def write_batch(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    run(by_stream(frame, folder).foreachBatch(KafkaSink(options).write_batch))


def format_of_a_batch(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    frame.write.format("kafka_sink").options(**options).mode("append").save()


def format_of_a_stream(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    run(by_stream(frame, folder).format("kafka_sink").options(**options))


BY_ROWS: Final = [foreach, foreach_partition]
BY_COLUMNS: Final = [
    write,
    write_batch,
    pytest.param(format_of_a_batch, marks=FORMAT.needed),
    pytest.param(format_of_a_stream, marks=FORMAT.needed),
]


def options_of(kafka: Admin, dead: str, guarantee: str = AT_LEAST_ONCE, **more: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "kafka.max.request.size": str(LARGEST),
        "kafka.compression.type": "lz4",
        "delivery.guarantee": guarantee,
        "errors.tolerance": "all",
        "errors.deadletterqueue.topic.name": dead,
        **more,
    }


class Topics:
    """The topics of a test, and what they hold."""

    def __init__(self, kafka: Admin, new_topic: Callable[..., str]) -> None:
        self.servers = kafka.bootstrap_servers
        self.topic = new_topic(partitions=PARTITIONS)
        self.small = new_topic(config={"max.message.bytes": SMALL})
        self.dead = new_topic(partitions=2)

    def good(self) -> Counter[bytes]:
        """Count the keys of the records, once the coordinators have written the ends of all transactions."""
        await_markers(self.servers)
        records = read_topic(self.servers, self.topic, PARTITIONS) + read_topic(self.servers, self.small)
        return Counter(record.key() or b"" for record in records)

    def letters(self) -> list[Any]:
        await_markers(self.servers)
        return read_topic(self.servers, self.dead, 2)


@pytest.fixture
def topics(kafka_broker: Admin, new_topic: Callable[..., str]) -> Topics:
    return Topics(kafka_broker, new_topic)


def check_letters(letters: list[Any], *, has_batch_id: bool) -> None:
    """Check that each bad row is there once, with its reason and what it had."""
    by_key = {int(letter.key()): letter for letter in letters}
    assert sorted(by_key) == list(range(50, 70))
    for row, letter in by_key.items():
        headers = dict(letter.headers())
        kind = (row - 50) // 2
        assert REASONS[kind] in headers["__sink.errors.exception.message"].decode(), (row, headers)
        assert (headers.get("__sink.errors.batch.id") == b"0") == has_batch_id
        assert headers["h" if kind != 7 else ""] == str(row).encode()
        assert (letter.value() is None) == (kind == NO_VALUE)
        assert ("__sink.errors.left.out" in headers) == (kind == NO_VALUE)
        _, timestamp_ms = letter.timestamp()
        assert (timestamp_ms == NOON + row) == (kind not in (4, 5, 6))


@pytest.mark.parametrize(
    ("way", "guarantee"),
    [
        *((each, AT_LEAST_ONCE) for each in BY_ROWS),
        *(
            pytest.param(*getattr(each, "values", (each,)), guarantee, marks=getattr(each, "marks", ()))
            for each in BY_COLUMNS
            for guarantee in (AT_LEAST_ONCE, EXACTLY_ONCE)
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_topic_and_dead_letters_have_each_row_once(
    spark: SparkSession, kafka_broker: Admin, topics: Topics, tmp_path: Path, way: Write, guarantee: str
) -> None:
    outside = {"write.outside.queries": "true"} if guarantee == EXACTLY_ONCE else {}
    frame = rows(spark, topics.topic, topics.small)
    way(frame, options_of(kafka_broker, topics.dead, guarantee, **outside), tmp_path)
    good, letters = topics.good(), topics.letters()
    assert good == Counter(str(row).encode() for row in range(ROWS) if not 50 <= row < 70)
    assert len(letters) == ROWS - GOOD_ROWS
    check_letters(letters, has_batch_id=way in (foreach, write_batch, format_of_a_stream))


@pytest.mark.parametrize("way", BY_COLUMNS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("guarantee", [AT_LEAST_ONCE, EXACTLY_ONCE])
def test_more_dead_letters_than_the_limit_fail_the_write(
    spark: SparkSession, kafka_broker: Admin, topics: Topics, tmp_path: Path, way: Write, guarantee: str
) -> None:
    """No task has that many: the driver adds them up. Exactly once, nothing is committed."""
    options = options_of(kafka_broker, topics.dead, guarantee, **{"errors.deadletterqueue.max.rows": "7"})
    if guarantee == EXACTLY_ONCE:
        options["write.outside.queries"] = "true"
    frame = spark.range(0, 40, 1, 4).selectExpr(
        "CAST(id AS STRING) AS key",
        "'v' AS value",
        f"'{topics.topic}' AS topic",
        "CAST(if(id % 5 = 0, -1, 0) AS INT) AS partition",
    )
    with pytest.raises((*FAILURES, TooManyDeadLettersError), match="8 rows cannot be written") as caught:
        way(frame, options, tmp_path)
    assert "At least 8 rows cannot be written, and errors.deadletterqueue.max.rows=7." in str(caught.value)
    left = len(topics.letters()), sum(topics.good().values())
    assert left == ((0, 0) if guarantee == EXACTLY_ONCE else (8, 32))


SCHEMA: Final = json.dumps(
    {
        "type": "record",
        "name": "r",
        "fields": [
            {"name": "a", "type": "long"},
            {"name": "b", "type": {"type": "enum", "name": "e", "symbols": ["RED"]}},
        ],
    }
)


@pytest.mark.parametrize(
    ("way", "guarantee"),
    [
        *((each, AT_LEAST_ONCE) for each in BY_ROWS),
        *(
            pytest.param(*getattr(each, "values", (each,)), AT_LEAST_ONCE, marks=getattr(each, "marks", ()))
            for each in BY_COLUMNS[1:]
        ),
        (write, EXACTLY_ONCE),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_rows_that_do_not_fit_their_schema_are_dead_letters(
    spark: SparkSession, kafka_broker: Admin, topics: Topics, tmp_path: Path, way: Write, guarantee: str
) -> None:
    """Rows 50, 51, ... 69 do not fit, for two reasons."""
    frame = spark.range(0, ROWS, 1, 4).selectExpr(
        "CAST(id AS STRING) AS key",
        "struct(IF(id BETWEEN 50 AND 59, NULL, id) AS a, IF(id BETWEEN 60 AND 69, 'BLUE', 'RED') AS b) AS value",
        f"'{topics.topic}' AS topic",
    )
    formats = {"value.format": "avro", "value.schema": SCHEMA}
    if guarantee == EXACTLY_ONCE:
        formats["write.outside.queries"] = "true"
    way(frame, options_of(kafka_broker, topics.dead, guarantee, **formats), tmp_path)
    assert topics.good() == Counter(str(row).encode() for row in range(ROWS) if not 50 <= row < 70)
    found = {int(letter.key()): (json.loads(letter.value()), dict(letter.headers())) for letter in topics.letters()}
    assert {row: value for row, (value, _) in found.items()} == {
        row: {"a": None, "b": "RED"} if row < 60 else {"a": row, "b": "BLUE"} for row in range(50, 70)
    }
    for row, (_, headers) in found.items():
        path = "value.a: it is null" if row < 60 else "value.b: the enum 'e' has no such symbol"
        assert headers["__sink.errors.exception.message"].decode().startswith(path)
        assert headers["__sink.errors.as.json"] == b"value"
