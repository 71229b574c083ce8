"""A committed batch that comes again with other rows, to another topic or under another prefix is an error. The tests
try each remedy.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from support.exactly_once_streams import KEYS, Stream, check_nothing_open, visible_values
from support.pyspark_capabilities import each_form

from spark_kafka_sink.local import Admin
from spark_kafka_sink.sink.exactly_once.operator import main
from spark_kafka_sink.sink.kafka_sink import KafkaSink

EARLIER_S = 1_700_000_000 - 60  # Spark's source ignores files a week older than the newest one


@pytest.fixture
def stream(servers: str, three_partitions: str, tmp_path: Path, request: pytest.FixtureRequest) -> Stream:
    return Stream(servers, three_partitions, tmp_path, request.node.callspec.params.get("form", "foreachBatch"))


class UnderALaterPrefix(Stream):
    @property
    def prefix(self) -> str:
        return f"later-{self.topic}"


def write_file(stream: Stream, number: int, values: range, modified_s: int = EARLIER_S) -> None:
    """Replace the input file of this number."""
    new = stream.folder / f"{number:05}.json"
    new.write_text("\n".join(json.dumps({"key": str(value % KEYS), "value": str(value)}) for value in values))
    os.utime(new, (modified_s,) * 2)
    new.replace(stream.source / new.name)


def operate(command: str, stream: Stream) -> None:
    out = io.StringIO()
    arguments = [command, "--bootstrap-servers", stream.servers, "--prefix", stream.prefix, "--yes"]
    assert main(arguments, out) == 0, out.getvalue()


def restore_one_behind(spark: SparkSession, stream: Stream, rows: int) -> Path:
    """Write two batches, then restore the checkpoint from before the second, with a file that Spark takes first. Return
    the newest checkpoint.
    """
    stream.write_files(0, 1)
    stream.run(spark, 2)
    older, newest = stream.folder / "older", stream.folder / "newest"
    shutil.copytree(stream.checkpoint, older)
    stream.write_files(1, 1)
    stream.run(spark, 2)
    stream.checkpoint.rename(newest)
    older.rename(stream.checkpoint)
    write_file(stream, 2, range(80, 80 + rows))
    return newest


def refuse(spark: SparkSession, stream: Stream, text: str) -> None:
    """Check that every start is refused and writes nothing."""
    before = visible_values(stream.servers, stream.topic)
    for partitions in (1, 3):
        with pytest.raises(
            StreamingQueryException, match=rf"BatchChangedError: Batch 1 .*{text}.*Nothing of it was written"
        ):
            stream.run(spark, partitions)
        assert visible_values(stream.servers, stream.topic) == before
        assert stream.last_batch() == 0
    check_nothing_open(stream.servers, stream.prefix)


@each_form
@pytest.mark.parametrize(
    ("rows", "text"), [(40, "their content differs"), (38, "with 40 rows, and now it comes with 38")]
)
def test_an_older_checkpoint_with_other_rows_is_refused(
    spark: SparkSession, stream: Stream, form: str, rows: int, text: str
) -> None:
    """Bug: the batch was skipped as already committed. Its rows were lost, and those of the next batch came twice."""
    newest = restore_one_behind(spark, stream, rows)
    refuse(spark, stream, text)
    shutil.rmtree(stream.checkpoint)
    newest.rename(stream.checkpoint)
    stream.run(spark, 2)
    assert visible_values(stream.servers, stream.topic) == list(range(80 + rows))


@each_form
def test_after_forget_older_checkpoint_loses_and_duplicates_nothing(
    spark: SparkSession, stream: Stream, form: str
) -> None:
    restore_one_behind(spark, stream, 40)
    refuse(spark, stream, "their content differs")
    operate("forget", stream)
    stream.run(spark, 2)
    assert visible_values(stream.servers, stream.topic) == sorted([*range(120), *range(40, 80)])


@each_form
def test_after_accept_changed_batch_counts_once(spark: SparkSession, stream: Stream, form: str) -> None:
    stream.write_files(0, 2)
    stream.run(spark, 2)
    stream.forget_commit(1)
    # rand() would change the rows like this
    write_file(stream, 1, range(1040, 1080), int((stream.source / "00001.json").stat().st_mtime))
    refuse(spark, stream, "their content differs")
    operate("accept", stream)
    stream.write_files(2, 1)
    stream.run(spark, 3)
    assert visible_values(stream.servers, stream.topic) == list(range(120))
    stream.forget_commit(2)
    stream.run(spark, 1)  # the same rows in another layout
    assert visible_values(stream.servers, stream.topic) == list(range(120))


@each_form
def test_query_that_comes_back_to_a_prefix_does_not_write_a_batch_twice(
    spark: SparkSession, stream: Stream, form: str
) -> None:
    """Bug: Spark had not logged the batch that was written under the other prefix, and its rows came twice."""
    later = UnderALaterPrefix(*stream)
    stream.write_files(0, 1)
    stream.run(spark, 2)
    operate("adopt", later)
    stream.write_files(1, 1)
    later.run(spark, 2)
    stream.forget_commit(1)
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=rf"Batch 1 of query .* was written under .*{later.prefix}"):
            stream.run(spark, 3)
        check_nothing_open(stream.servers, stream.prefix)
    later.run(spark, 3)
    stream.write_files(2, 1)
    stream.run(spark, 3)
    assert visible_values(stream.servers, stream.topic) == list(range(120))


@each_form
def test_adopted_prefix_does_not_write_a_batch_that_spark_has_not_logged(
    spark: SparkSession, stream: Stream, form: str
) -> None:
    """Bug: `adopt` let the query write the batch again under its new prefix."""
    later = UnderALaterPrefix(*stream)
    stream.write_files(0, 2)
    stream.run(spark, 2)
    stream.forget_commit(1)
    operate("adopt", later)
    with pytest.raises(StreamingQueryException, match=rf"Batch 1 of query .* was written under .*{stream.prefix}'"):
        later.run(spark, 3)
    check_nothing_open(stream.servers, later.prefix)
    stream.run(spark, 3)
    stream.write_files(2, 1)
    later.run(spark, 2)
    assert visible_values(stream.servers, stream.topic) == list(range(120))


def test_a_copied_checkpoint_with_another_topic_is_refused(
    spark: SparkSession, stream: Stream, servers: str, three_partitions: str
) -> None:
    """Bug: the copy's batches were skipped as already committed, and its topic lacked them."""
    other = f"{three_partitions}-copy"
    Admin(servers).create_topic(other, 3)

    def run(topic: str, checkpoint: Path) -> None:
        options = {
            "kafka.bootstrap.servers": servers,
            "topic": topic,
            "delivery.guarantee": "exactly-once",
            "transactional.id.prefix": stream.prefix,
        }
        reader = spark.readStream.schema("key STRING, value STRING").option("maxFilesPerTrigger", 1)
        writer = reader.json(str(stream.source)).writeStream.foreachBatch(KafkaSink(options).write_batch)  # type: ignore[arg-type]
        writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()

    stream.write_files(0, 1)
    run(three_partitions, stream.checkpoint)
    copy = stream.folder / "copy"
    shutil.copytree(stream.checkpoint, copy)
    stream.write_files(1, 1)
    run(three_partitions, stream.checkpoint)
    text = f"for topic='{three_partitions}', and now it comes for topic='{other}'"
    with pytest.raises(StreamingQueryException, match=rf"BatchChangedError: Batch 1 .*{text}"):
        run(other, copy)
    assert visible_values(servers, other) == []
    run(three_partitions, stream.checkpoint)
    assert visible_values(servers, three_partitions) == list(range(80))
