"""Output modes, and the differences between this sink and Spark's own, as docs/migrating-from-spark-kafka.md lists
them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from integration.parity.cases import KEYED, TO_THE_TOPIC, UNKEYED
from integration.parity.conftest import Topics
from integration.parity.ways import BATCH_WAYS, Write, stream_through, through_spark
from pyspark.errors import IllegalArgumentException, StreamingQueryException
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from support.librdkafka import read_topic

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.common.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNTS = "SELECT CAST(id % 5 AS STRING) AS key, CAST(count(*) AS STRING) AS value FROM rows GROUP BY 1"
Frames = Callable[..., "DataFrame"]


def times_of(topics: Topics) -> list[int]:
    """The times in ms of the records whose values are numbers."""
    found = read_topic(topics.servers, topics.names["topic"], topics.partitions)
    return [record.timestamp()[1] for record in found if record.value().isdigit()]


@pytest.mark.parametrize("way", BATCH_WAYS)
def test_without_timestamp_column_both_use_the_time_of_writing(
    frame_of: Frames, new_topics: Callable[..., Topics], way: str
) -> None:
    topics = new_topics("")
    for write in (through_spark, BATCH_WAYS[way]):
        before_ms, known = time.time_ns() // 1_000_000, len(times_of(topics))
        write(frame_of(UNKEYED), topics.options(TO_THE_TOPIC))
        times = times_of(topics)[known:]
        assert len(times) == 100
        assert before_ms <= min(times) <= max(times) <= time.time_ns() // 1_000_000


@pytest.mark.parametrize("way", BATCH_WAYS)
def test_timestamp_column_sets_record_time_only_in_this_sink(
    frame_of: Frames, new_topics: Callable[..., Topics], way: str
) -> None:
    query = f"SELECT timestamp_millis(1700000000007) AS timestamp, * FROM ({KEYED})"
    ours, sparks = new_topics(""), new_topics("")
    before_ms = time.time_ns() // 1_000_000
    through_spark(frame_of(query), sparks.options(TO_THE_TOPIC))
    BATCH_WAYS[way](frame_of(query), ours.options(TO_THE_TOPIC))
    assert min(times_of(sparks)) >= before_ms
    assert set(times_of(ours)) == {1700000000007}


@pytest.mark.parametrize("form", ["kafka_sink", "foreachBatch", "foreach"])
def test_output_mode_complete_appends_the_whole_result(
    stream_of: Frames, new_topics: Callable[..., Topics], tmp_path: Path, form: str
) -> None:
    ours, sparks = new_topics("", 2), new_topics("", 2)
    for topics, name in ((sparks, "kafka"), (ours, form)):
        stream = stream_of(COUNTS)
        stream_through(name, stream, topics.options(TO_THE_TOPIC), tmp_path / name, "complete")
    counted = {place: Counter(records) for place, records in sparks.contents().items()}
    assert sum(map(len, counted.values())) == 5
    assert {place: Counter(records) for place, records in ours.contents().items()} == counted


@pytest.mark.parametrize("form", ["foreachBatch", "foreach"])
def test_output_mode_update_appends_changed_rows(
    stream_of: Frames, new_topics: Callable[..., Topics], tmp_path: Path, form: str
) -> None:
    ours, sparks = new_topics("", 2), new_topics("", 2)
    for topics, name in ((sparks, "kafka"), (ours, form)):
        stream_through(name, stream_of(COUNTS), topics.options(TO_THE_TOPIC), tmp_path / name, "update")
    counted = {place: Counter(records) for place, records in sparks.contents().items()}
    assert sum(map(len, counted.values())) == 5
    assert {place: Counter(records) for place, records in ours.contents().items()} == counted


def test_spark_refuses_output_mode_update_for_python_data_sources(
    stream_of: Frames, new_topics: Callable[..., Topics], tmp_path: Path
) -> None:
    topics = new_topics("")
    with pytest.raises(Exception, match="kafka_sink does not support Update mode"):
        stream_through("kafka_sink", stream_of(COUNTS), topics.options(TO_THE_TOPIC), tmp_path, "update")


@pytest.mark.parametrize("form", ["kafka_sink", "foreachBatch"])
def test_spark_refuses_python_sinks_in_real_time_mode(
    spark: SparkSession, new_topics: Callable[..., Topics], tmp_path: Path, form: str
) -> None:
    """Bug: the README said that every trigger works except `continuous`."""
    options = new_topics("").options(TO_THE_TOPIC)
    stream = spark.readStream.format("rate").load().selectExpr("CAST(value AS STRING) AS value")
    writer = stream.writeStream.outputMode("update").option("checkpointLocation", str(tmp_path))
    if form == "foreachBatch":
        writer = writer.foreachBatch(KafkaSink(options).write_batch)  # type: ignore[arg-type]
    else:
        writer = writer.format(form).options(**options)
    with pytest.raises(IllegalArgumentException) as caught:
        writer.trigger(realTime="5 seconds").start()  # type: ignore[call-overload]
    assert "STREAMING_REAL_TIME_MODE.OPERATOR_OR_SINK_NOT_IN_ALLOWLIST" in str(caught.value)


@pytest.mark.parametrize("form", ["foreach", "foreach, with a column between", "foreachBatch", "kafka_sink"])
def test_spark_cannot_give_rows_of_pandas_with_state_to_foreach(
    stream_of: Frames, new_topics: Callable[..., Topics], tmp_path: Path, form: str
) -> None:
    def counted(key: tuple[str], frames: Iterator[pd.DataFrame], _state: GroupState) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"key": [key[0]], "value": [str(sum(map(len, frames)))]})

    topics = new_topics("")
    stream = stream_of("SELECT CAST(id % 2 AS STRING) AS key FROM rows").groupBy("key")
    timeout = GroupStateTimeout.NoTimeout
    frame = stream.applyInPandasWithState(counted, "key string, value string", "n int", "append", timeout)
    if form == "foreach":
        with pytest.raises(StreamingQueryException, match=r"ColumnarBatchRow cannot be cast to class .*UnsafeRow"):
            stream_through(form, frame, topics.options(TO_THE_TOPIC), tmp_path)
        return
    if form not in {"foreachBatch", "kafka_sink"}:
        frame = frame.selectExpr("concat(value, '') AS value", "key")
    stream_through(form.partition(",")[0], frame, topics.options(TO_THE_TOPIC), tmp_path)
    (found,) = topics.contents().values()
    assert sorted((record.key, record.value) for record in found) == [(b"0", b"50"), (b"1", b"50")]


def test_overwrite_is_refused_in_the_same_words(frame_of: Frames, new_topics: Callable[..., Topics]) -> None:
    options = new_topics("").options(TO_THE_TOPIC)
    for form in ("kafka", "kafka_sink"):
        with pytest.raises(
            Exception, match=r"(?s)[Ss]ave mode Overwrite not allowed for Kafka\. Allowed save modes are"
        ):
            frame_of(UNKEYED).write.format(form).options(**options).mode("overwrite").save()


@pytest.mark.parametrize(("mode", "sparks"), [("ignore", False), ("error", True), ("errorifexists", True)])
def test_spark_refuses_other_save_modes_for_python_data_sources(
    frame_of: Frames, new_topics: Callable[..., Topics], mode: str, sparks: bool
) -> None:
    topics = new_topics("")
    options = topics.options(TO_THE_TOPIC)
    if sparks:
        frame_of(UNKEYED).write.format("kafka").options(**options).mode(mode).save()
        assert len(times_of(topics)) == 100
    else:
        with pytest.raises(Exception, match=r"(?i)save mode ignore not allowed for Kafka"):
            frame_of(UNKEYED).write.format("kafka").options(**options).mode(mode).save()
    with pytest.raises(Exception, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
        frame_of(UNKEYED).write.format("kafka_sink").options(**options).mode(mode).save()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"kafka.lingr.ms": "5"}, "lingr.ms is not a producer setting. The nearest one is kafka.linger.ms"),
        ({"kafka.schema.registry.url": "x"}, "schema.registry.url is not a producer setting, and no setting has"),
        ({"truncate": "false"}, "There is no option truncate, and no option has a similar name"),
        ({"kafka.interceptor.classes": ""}, "interceptor.classes is a setting of the Java client"),
    ],
)
def test_unknown_options_are_refused_only_by_this_sink(
    frame_of: Frames, new_topics: Callable[..., Topics], option: dict[str, str], text: str
) -> None:
    topics = new_topics("")
    options = topics.options({**TO_THE_TOPIC, **option})
    through_spark(frame_of(UNKEYED), options)
    assert len(times_of(topics)) == 100
    for write in BATCH_WAYS.values():
        with pytest.raises(Exception, match=text.replace(".", r"\.")):
            write(frame_of(UNKEYED), options)


def test_options_of_reading_are_ignored_by_both_sinks(frame_of: Frames, new_topics: Callable[..., Topics]) -> None:
    reading = {"kafka.group.id": "g", "includeHeaders": "true", "failOnDataLoss": "false", "startingOffsets": "latest"}
    topics = new_topics("")
    options = topics.options({**TO_THE_TOPIC, **reading})
    through_spark(frame_of(UNKEYED), options)
    for write in BATCH_WAYS.values():
        write(frame_of(UNKEYED), options)
    assert len(times_of(topics)) == 100 * (1 + len(BATCH_WAYS))


def test_options_of_this_sink_are_ignored_by_sparks_sink(frame_of: Frames, new_topics: Callable[..., Topics]) -> None:
    topics = new_topics("")
    through_spark(frame_of(UNKEYED), topics.options({**TO_THE_TOPIC, "delivery.guarantee": "at-least-once"}))
    assert len(times_of(topics)) == 100


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ("array(struct(CAST(null AS STRING) AS key, X'00' AS value))", "without a key|header key"),
        (
            "array(struct('h' AS key, X'00' AS value), null)",
            "without a key|headers attribute has an element|A header of row 0 is a NoneType",
        ),
    ],
    ids=["a nameless one", "a null"],
)
def test_header_without_name_is_a_null_pointer_in_sparks_sink(
    frame_of: Frames, new_topics: Callable[..., Topics], headers: str, text: str
) -> None:
    options = new_topics("").options(TO_THE_TOPIC)
    query = f"SELECT 'v' AS value, {headers} AS headers FROM rows"
    with pytest.raises(Exception, match="NullPointerException"):
        through_spark(frame_of(query), options)
    for write in BATCH_WAYS.values():
        with pytest.raises(Exception, match=text):
            write(frame_of(query), options)


@pytest.mark.parametrize(
    ("topic", "text"),
    [("  ", "The option topic is empty"), ("two words", "topic='two words': The topic name is not valid")],
)
def test_option_that_names_no_topic_is_refused_before_any_task(
    frame_of: Frames, new_topics: Callable[..., Topics], topic: str, text: str
) -> None:
    """Tasks of Spark's sink fail."""
    options = new_topics("").options({"topic": topic})
    ours: Write = BATCH_WAYS["write"]
    with pytest.raises(ConfigError, match=text):
        ours(frame_of(UNKEYED), options)


@pytest.mark.parametrize(
    ("ignored", "text"),
    [
        ("1 AS other, 2 AS other", "DUPLICATED_FIELD_NAME_IN_ARROW_STRUCT"),
        ("named_struct('a', 1, 'a', 2) AS other", "DUPLICATED_FIELD_NAME_IN_ARROW_STRUCT"),
        ("INTERVAL '1' MONTH AS other", "KeyError: 21"),
        ("make_interval(1) AS other", 'Cannot use "INTERVAL" type in the table schema'),
    ],
)
def test_unsupported_extra_columns_fail_only_by_format(
    frame_of: Frames, new_topics: Callable[..., Topics], ignored: str, text: str
) -> None:
    options = new_topics("").options(TO_THE_TOPIC)
    frame = frame_of(f"SELECT 'v' AS value, {ignored} FROM rows")
    with pytest.raises(Exception, match=text):
        BATCH_WAYS["format"](frame, options)
    BATCH_WAYS["write"](frame, options)


def test_row_interfaces_read_header_fields_by_name(frame_of: Frames, new_topics: Callable[..., Topics]) -> None:
    query = "SELECT 'v' AS value, array(struct(X'00' AS value, 'h' AS key)) AS headers FROM rows"
    topics = new_topics("")
    BATCH_WAYS["foreachPartition"](frame_of(query), topics.options(TO_THE_TOPIC))
    found = {record.headers for records in topics.contents().values() for record in records}
    assert found == {(("h", b"\x00"),)}
    with pytest.raises(Exception, match=r"headers attribute unsupported type|UNSUPPORTED|headers must be"):
        BATCH_WAYS["write"](frame_of(query), topics.options(TO_THE_TOPIC))


@pytest.mark.parametrize("way", BATCH_WAYS)
def test_invalid_utf_8_text_arrives_unchanged_except_by_rows(
    frame_of: Frames, new_topics: Callable[..., Topics], way: str
) -> None:
    """Bug: the migration page said that strings arrive alike, and did not mention the rows that Spark hands over."""
    query = "SELECT CAST(X'6BFF' AS STRING) AS key, CAST(X'C328' AS STRING) AS value FROM rows"
    topics = new_topics("", 4), new_topics("", 4)
    for each, write in zip(topics, (through_spark, BATCH_WAYS[way]), strict=True):
        write(frame_of(query), each.options(TO_THE_TOPIC))
    sparks, ours = (each.contents() for each in topics)
    assert {(record.key, record.value) for records in sparks.values() for record in records} == {(b"k\xff", b"\xc3(")}
    if way == "foreachPartition":
        replaced = {("k\ufffd".encode(), "\ufffd(".encode())}
        assert {(record.key, record.value) for records in ours.values() for record in records} == replaced
    else:
        assert ours == sparks


@pytest.mark.parametrize("way", BATCH_WAYS)
def test_invalid_utf_8_header_name_is_refused_except_by_rows(
    frame_of: Frames, new_topics: Callable[..., Topics], way: str
) -> None:
    headers = "array(struct(CAST(X'68FF' AS STRING) AS key, X'00' AS value))"
    query = f"SELECT 'k' AS key, 'v' AS value, {headers} AS headers FROM rows"
    topics = new_topics(""), new_topics("")
    through_spark(frame_of(query), topics[0].options(TO_THE_TOPIC))
    if way != "foreachPartition":
        with pytest.raises(Exception, match="which is not UTF-8; the names of headers are text"):
            BATCH_WAYS[way](frame_of(query), topics[1].options(TO_THE_TOPIC))
        return
    BATCH_WAYS[way](frame_of(query), topics[1].options(TO_THE_TOPIC))
    sparks, ours = (each.contents() for each in topics)
    assert {record.headers for records in ours.values() for record in records} == {(("h\ufffd", b"\x00"),)}
    assert ours == sparks
