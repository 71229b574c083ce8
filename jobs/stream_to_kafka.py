"""Stream a folder of files, or Spark's rate source, into Kafka.

    python jobs/stream_to_kafka.py --properties conf/files.properties --path /data/in --checkpoint /data/checkpoint
    spark-submit jobs/stream_to_kafka.py --source rate --trigger "1 second" --topic ticks \\
        --bootstrap-servers h1:9092 --checkpoint ...

Each setting is a property in the file of --properties, or a flag. Flags win. `--help` lists the settings. The options
of the sink (`topic`, `kafka.<producer setting>`) and of Spark (`spark.<setting>`) go into the same file.

The job prints a line for each micro-batch: id, rows, seconds, and records per second. After SIGTERM or Ctrl-C it waits
for the end of the current batch, at most --grace seconds, stops the query and exits with 0. A batch that did not end is
written again by the next start. Under spark-submit the JVM gets SIGTERM and ends at once. The next start goes on from
the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name in PySpark programs
from pyspark.sql.types import StructType

from spark_kafka_sink import ConfigError, KafkaError, KafkaSink
from spark_kafka_sink.common.options import nearest, read_properties
from spark_kafka_sink.sink.options import PASSED_OVER

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery
    from pyspark.sql.streaming.listener import StreamingQueryProgress

INTERFACES = ("foreach", "foreachPartition")
SINK_OPTIONS = ("topic", "delivery.guarantee", "metrics.port", "metrics.host")
AT_LEAST_ONCE = "at-least-once"
POLL_SECONDS = 0.2


class Setting(NamedTuple):
    name: str
    flag: str
    default: str | None
    meaning: str


SETTINGS = (
    Setting("source.format", "--source", "csv", "csv, json, parquet, another file source of Spark, or rate"),
    Setting("source.path", "--path", None, "folder in which Spark looks for new files"),
    Setting("source.schema", "--schema", None, "columns of the source: DDL, or a file with DDL or Spark's JSON"),
    Setting("record.key", "--key", None, "SQL expression of the key"),
    Setting("record.value", "--value", "to_json(struct(*))", "SQL expression of the value"),
    Setting("record.headers", "--headers", None, "SQL expression, array<struct<key:string,value:binary>>"),
    Setting("record.topic", "--topic-expression", None, "SQL expression of each row's topic, if no topic is set"),
    Setting("record.partition", "--partition", None, "SQL expression of the partition, an int"),
    Setting("record.timestamp", "--timestamp", None, "SQL expression of the timestamp"),
    Setting("order.by", "--order-by", None, "SQL expression: the rows of a key are written in this order"),
    Setting("interface", "--interface", "foreach", " or ".join(INTERFACES)),
    Setting("trigger", "--trigger", "availableNow", "availableNow, or the time between batches, such as '5 seconds'"),
    Setting("checkpoint.location", "--checkpoint", None, "folder of the checkpoint"),
)
REPEATED = (
    Setting("source.option.", "--source-option", None, "option of the source, NAME=VALUE; may be repeated"),
    Setting("", "--option", None, "option of the sink, such as kafka.linger.ms=20; may be repeated"),
    Setting("spark.", "--spark", None, "setting of the session, such as sql.shuffle.partitions=4; may be repeated"),
)
RECORD_COLUMNS = ("key", "value", "headers", "topic", "partition", "timestamp")


class UsageError(Exception):
    """A setting is missing, unknown, or contradicts another."""


@dataclass
class Settings:
    of: Mapping[str, str]
    verbose: bool
    grace_s: float

    def get(self, name: str) -> str | None:
        return self.of.get(name)

    def need(self, name: str) -> str:
        value = self.of.get(name)
        if value is None:
            flag = next(s.flag for s in SETTINGS if s.name == name)
            raise UsageError(f"{name} is missing: put it into the properties file, or give {flag}.")
        return value

    def below(self, prefix: str) -> dict[str, str]:
        return {name.removeprefix(prefix): value for name, value in self.of.items() if name.startswith(prefix)}

    def sink_options(self) -> dict[str, str]:
        return {name: value for name, value in self.of.items() if is_sink_option(name)}


def is_sink_option(name: str) -> bool:
    """Whether the job passes this setting to the sink, which ignores options of Spark's source with a warning."""
    return name in SINK_OPTIONS or name.startswith("kafka.") or name.lower() in PASSED_OVER


def parse_arguments(arguments: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--properties", type=Path, metavar="FILE", help="file of settings; flags win")
    for name, flag, default, meaning in SETTINGS:
        shown = f"{meaning} [{name}{'' if default is None else f', default: {default}'}]"
        parser.add_argument(flag, dest=name, metavar="", help=shown.replace("%", "%%"))
    parser.add_argument("--topic", metavar="", help="topic of every row [topic]")
    parser.add_argument(
        "--bootstrap-servers", dest="kafka.bootstrap.servers", metavar="", help="host:port,... of the brokers"
    )
    for name, flag, _, meaning in REPEATED:
        parser.add_argument(flag, dest=flag, metavar="", action="append", default=[], help=f"{meaning} [{name}NAME]")
    parser.add_argument(
        "--grace", type=float, default=60, metavar="", help="seconds that a stop waits for the current batch [60]"
    )
    parser.add_argument("--verbose", action="store_true", help="show Spark's log and whole stack traces")
    given = vars(parser.parse_args(arguments))

    settings = {s.name: s.default for s in SETTINGS if s.default is not None}
    if given["properties"] is not None:
        settings |= read_properties(given["properties"])
    names = [*(s.name for s in SETTINGS), "topic", "kafka.bootstrap.servers"]
    settings |= {name: given[name] for name in names if given[name] is not None}
    for prefix, flag, _, _ in REPEATED:
        for item in given[flag]:
            name, equals, value = item.partition("=")
            if not equals:
                raise UsageError(f"{flag} {item.split()[0] if item.split() else ''} … must be NAME=VALUE.")
            settings[prefix + name] = value
    check(settings)
    return Settings(settings, given["verbose"], given["grace"])


def check(settings: Mapping[str, str]) -> None:
    known = [*(s.name for s in SETTINGS), *SINK_OPTIONS]
    for name in settings:
        if name not in known and not is_sink_option(name) and not name.startswith(("source.option.", "spark.")):
            if meant := nearest(name, known):
                raise UsageError(f"There is no setting {name}. The nearest one is {meant}.")
            raise UsageError(f"There is no setting {name}, and no setting has a similar name: leave it out.")
    if settings["interface"] not in INTERFACES:
        raise UsageError(f"interface={settings['interface']} must be {' or '.join(INTERFACES)}.")
    if settings.get("delivery.guarantee", AT_LEAST_ONCE) != AT_LEAST_ONCE:
        raise UsageError(
            f"delivery.guarantee={settings['delivery.guarantee']} is not supported here: {' and '.join(INTERFACES)}"
            f' deliver {AT_LEAST_ONCE}. For exactly once use writeStream.format("kafka_sink").'
        )
    if "order.by" in settings and settings["interface"] != "foreachPartition":
        raise UsageError("order.by needs interface=foreachPartition: only there the job sorts a micro-batch.")
    if "order.by" in settings and "record.key" not in settings:
        raise UsageError("order.by needs record.key: it sorts the rows of each key.")


# ---- from the source to the sink -----------------------------------------------------------------------------------


def source_schema(text: str) -> StructType | str:
    if os.path.isfile(text):  # a Path refuses a text as long as some schemas
        text = Path(text).read_text(encoding="utf-8")
    if not text.lstrip().startswith("{"):
        return text
    try:
        return StructType.fromJson(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"source.schema is not a schema in Spark's JSON ({why}): df.schema.json() returns one."
        ) from error


def read_source(session: SparkSession, settings: Settings) -> DataFrame:
    reader = session.readStream.format(settings.need("source.format")).options(**settings.below("source.option."))
    if settings.need("source.format") == "rate":
        return reader.load()
    return reader.schema(source_schema(settings.need("source.schema"))).load(settings.need("source.path"))


def as_records(frame: DataFrame, settings: Settings) -> DataFrame:
    columns = {name: settings.get(f"record.{name}") for name in RECORD_COLUMNS} | {"order": settings.get("order.by")}
    return frame.select(*(F.expr(sql).alias(name) for name, sql in columns.items() if sql is not None))


def start(records: DataFrame, sink: KafkaSink, settings: Settings) -> StreamingQuery:
    def write_batch(batch: DataFrame, _batch_id: int) -> None:
        if settings.get("order.by") is not None:
            batch = batch.repartition("key").sortWithinPartitions("order")
        batch.foreachPartition(sink.write_partition)

    writer = records.writeStream.option("checkpointLocation", settings.need("checkpoint.location"))
    trigger = settings.need("trigger")
    if trigger.lower() == "availablenow":
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=trigger)
    if settings.need("interface") == "foreach":
        return writer.foreach(sink).start()
    return writer.foreachBatch(write_batch).start()


# ---- output --------------------------------------------------------------------------------------------------------


@dataclass
class ProgressTable:
    """A line for each micro-batch that had rows."""

    rows: int = 0
    batches: int = 0
    started: float = field(default_factory=time.monotonic)
    _last_batch: int = -1

    def show(self, recent: Sequence[StreamingQueryProgress]) -> None:
        for progress in recent:
            if progress.batchId > self._last_batch and progress.numInputRows > 0:
                self._last_batch = progress.batchId
                self._line(progress.batchId, progress.numInputRows, progress.batchDuration / 1000)

    def _line(self, batch_id: int, rows: int, seconds: float) -> None:
        if self.batches == 0:
            print(f"{'batch':>8} {'rows':>12} {'seconds':>9} {'records/s':>12}", flush=True)
        self.rows += rows
        self.batches += 1
        print(f"{batch_id:>8} {rows:>12,} {seconds:>9.2f} {rows / max(seconds, 0.001):>12,.0f}", flush=True)

    def total(self) -> str:
        seconds = time.monotonic() - self.started
        return (
            f"{self.rows:,} rows in {self.batches} {'batch' if self.batches == 1 else 'batches'}, {seconds:.1f} s,"
            f" {self.rows / max(seconds, 0.001):,.0f} records/s"
        )


OUR_ERROR = re.compile(r"spark_kafka_sink\.common\.errors\.(\w+): (.+)")
SPARKS_STATE = re.compile(r" ?SQLSTATE: \w{5}.*", re.DOTALL)


def readable(error: Exception) -> str:
    """Return one paragraph: the sink's own error, if there is one, or the first line of Spark's error."""
    if isinstance(error, (KafkaError, UsageError)):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    if ours := OUR_ERROR.findall(text):
        name, sentence = ours[-1]
        return f"{name}: {sentence.strip()}"
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"{type(error).__name__}: {SPARKS_STATE.sub('', first).strip()} (--verbose shows more)"


# ---- running -------------------------------------------------------------------------------------------------------


class StopWish:
    """Whether the job was asked to stop, by SIGTERM or Ctrl-C."""

    def __init__(self) -> None:
        self.is_there = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: Any) -> None:  # noqa: ARG002 - a signal handler's signature
        self.is_there = True


def follow(query: StreamingQuery, table: ProgressTable, stop: StopWish, grace_s: float) -> None:
    """Wait until the query ends, or stop it when `stop` is set. Raises StreamingQueryException if the query fails, also
    during the stop, except for a batch that is interrupted after `grace_s` seconds.
    """
    deadline = None
    seen = None
    while not query.awaitTermination(POLL_SECONDS):
        last = query.lastProgress
        if last is not None and (last.batchId, last.timestamp) != seen:
            seen = last.batchId, last.timestamp
            table.show(query.recentProgress)  # up to a hundred, each with a few calls into the JVM
        if not stop.is_there:
            continue
        if deadline is None:
            print("Stopping after the current batch", flush=True)
            deadline = time.monotonic() + grace_s
            batches = table.batches
        is_over = table.batches > batches or not query.status["isTriggerActive"]
        if is_over or time.monotonic() > deadline:
            query.stop()
            if is_over and (error := query.exception()) is not None:  # the batch ended by failing
                raise error
            break
    table.show(query.recentProgress)


def open_session(settings: Settings) -> SparkSession:
    if (
        "PYSPARK_GATEWAY_PORT" not in os.environ
    ):  # not under spark-submit: workers need the interpreter with this package
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("stream_to_kafka")
    if not settings.verbose:
        builder = builder.config("spark.log.level", "FATAL").config("spark.ui.showConsoleProgress", "false")
    for name, value in settings.below("spark.").items():
        builder = builder.config(f"spark.{name}", value)
    return builder.getOrCreate()


def run(settings: Settings, stop: StopWish) -> None:
    sink = KafkaSink(settings.sink_options())
    print(f"{settings.get('source.path') or settings.get('source.format')} -> {sink!r}", flush=True)
    session = open_session(settings)
    stop.listen()  # again, because the session installs its own handler for Ctrl-C
    try:
        if stop.is_there:
            print("Stopped before the query was started", flush=True)
            return
        table = ProgressTable()
        query = start(as_records(read_source(session, settings), settings), sink, settings)
        follow(query, table, stop, settings.grace_s)
        print(table.total(), flush=True)
    finally:
        session.stop()


def main(arguments: Sequence[str]) -> int:
    stop = StopWish()
    stop.listen()
    try:
        settings = parse_arguments(arguments)
    except (UsageError, ConfigError, OSError) as error:
        return fail(error, 2)
    try:
        run(settings, stop)
    except (KafkaError, UsageError, PySparkException, Py4JError, OSError) as error:
        if stop.is_there and not isinstance(error, (KafkaError, UsageError, StreamingQueryException)):
            print("Spark ended before the job; the next start writes the current batch again", flush=True)
            return 0
        if settings.verbose:
            raise
        return fail(error, 1)
    return 0


def fail(error: Exception, code: int) -> int:
    print(f"stream_to_kafka: {readable(error)}", file=sys.stderr, flush=True)
    return code


def entry() -> NoReturn:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
