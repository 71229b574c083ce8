"""Stream a folder of files, or Spark's rate source, into Kafka.

    python jobs/stream_to_kafka.py --properties conf/files.properties --path /data/in --checkpoint /data/checkpoint
    spark-submit jobs/stream_to_kafka.py --source rate --trigger "1 second" --topic ticks \\
        --bootstrap-servers h1:9092 --checkpoint ... --delivery-guarantee exactly-once

Each setting is a property in the file of --properties, or a flag. Flags win. `--help` lists the settings. The options
of the sink (`topic`, `kafka.<producer setting>`) and of Spark (`spark.<setting>`) go into the same file.

The job writes by columns: by `format("kafka_sink")` if this PySpark can, else by `foreachBatch`, and by `foreachBatch`
if rows are sorted (`order.by`). `interface` sets another way. With --delivery-guarantee exactly-once each row is in
Kafka once for readers with isolation.level=read_committed, also if the job is killed and started again.

The job prints a line for each micro-batch: id, rows, seconds, and records per second. After SIGTERM or Ctrl-C it waits
for the end of the current batch, at most --grace seconds, stops the query and exits with 0. A batch that did not end is
written again by the next start. Under spark-submit the JVM gets SIGTERM and ends at once. The next start goes on from
the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import pyspark
from py4j.protocol import Py4JError
from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    PySparkException,
    PySparkValueError,
    StreamingQueryException,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name in PySpark programs
from pyspark.sql.types import StructType

from spark_kafka_sink import ConfigError, KafkaError, KafkaSink
from spark_kafka_sink.common.options import nearest
from spark_kafka_sink.common.texts import exit_code_of, without_logins
from spark_kafka_sink.serialization import format_options
from spark_kafka_sink.sink.options import AT_LEAST_ONCE, EXACTLY_ONCE, PASSED_OVER
from spark_kafka_sink.sink.properties_file import PropertiesFile, read_properties
from spark_kafka_sink.sink.requested_topic import CONFIG_PREFIX

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery
    from pyspark.sql.streaming.listener import StreamingQueryProgress

BY_COLUMNS = ("format", "foreachBatch")
"""Each of them can deliver exactly once."""
BY_ROWS = ("foreach", "foreachPartition")
SORTING = ("foreachBatch", "foreachPartition")
SINK_OPTIONS = (
    "topic",
    "topic.create",
    "topic.partitions",
    "topic.replication.factor",
    "delivery.guarantee",
    "metrics.port",
    "metrics.host",
    "report.log",
    "lineage.openlineage",
    "telemetry.opentelemetry",
    "telemetry.headers.traceparent",
    "write.max.records.per.second",
    "write.max.bytes.per.second",
    "timestamp.allow.before.1980",
    "transactional.id.prefix",
    "decision.topic",
    "errors.tolerance",
    "errors.deadletterqueue.topic.name",
    "errors.deadletterqueue.max.rows",
)
FORMATS = ("value.format", "key.format")
STRUCT = "struct(*)"
"""The default of record.value with value.format."""
POLL_SECONDS = 0.2

STRICT = {"csv": {"mode": "FAILFAST", "enforceSchema": "false"}, "json": {"mode": "FAILFAST"}}
"""Options with which Spark refuses what it would lose or change without an error: a malformed row, a cell of another
type, and with header=true columns in another order than in source.schema.
"""
ANY_AGE = {"maxFileAge": "3650d"}
"""Spark leaves out a file that is seven days older than the newest one, such as a copy that kept its time."""


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
    Setting(
        "record.value",
        "--value",
        "to_json(struct(*))",
        "SQL expression of the value; with value.format the default is struct(*)",
    ),
    Setting("record.headers", "--headers", None, "SQL expression, array<struct<key:string,value:binary>>"),
    Setting("record.topic", "--topic-expression", None, "SQL expression of each row's topic, if no topic is set"),
    Setting("record.partition", "--partition", None, "SQL expression of the partition, an int"),
    Setting("record.timestamp", "--timestamp", None, "SQL expression of the timestamp"),
    Setting("order.by", "--order-by", None, "SQL expression: the rows of a key are written in this order"),
    Setting(
        "interface",
        "--interface",
        None,
        "format or foreachBatch (by columns), foreach or foreachPartition (by rows); default: format, or foreachBatch"
        " with order.by and with a PySpark that cannot do format",
    ),
    Setting("trigger", "--trigger", "availableNow", "availableNow, or the time between batches, such as '5 seconds'"),
    Setting("checkpoint.location", "--checkpoint", None, "folder of the checkpoint"),
    Setting("topic", "--topic", None, "topic of every row"),
    Setting(
        "delivery.guarantee", "--delivery-guarantee", None, f"{AT_LEAST_ONCE} (the sink's default) or {EXACTLY_ONCE}"
    ),
    Setting("kafka.bootstrap.servers", "--bootstrap-servers", None, "host:port,... of the brokers"),
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
    verbose: bool = False
    grace_s: float = 60.0
    file: PropertiesFile | None = None
    """The file of --properties. `of` has its settings too."""
    flagged: frozenset[str] = frozenset()
    """The settings that flags set."""

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

    def has_format(self) -> bool:
        """Return whether the sink makes Avro, Protobuf or JSON of a column."""
        return any(name.lower() in FORMATS for name in self.of)

    def place(self, name: str | None) -> str:
        """Return where the file sets a setting, for an error text. Empty if a flag sets it."""
        return "" if self.file is None or name in self.flagged else self.file.place(name)

    def interface(self) -> str:
        """Return the way to write: that of the setting, or the best one."""
        given = self.get("interface")
        if given is not None:
            return given
        return "format" if "order.by" not in self.of and data_source() is not None else "foreachBatch"


def data_source() -> type | None:
    """Return the class of `format("kafka_sink")`, or None if this PySpark has no data sources that can write."""
    try:
        from spark_kafka_sink import KafkaSinkDataSource
    except ImportError:
        return None
    return KafkaSinkDataSource


def is_sink_option(name: str) -> bool:
    """Whether the job passes this setting to the sink, which ignores options of Spark's source with a warning."""
    lower = name.lower()
    is_of_sink = name in SINK_OPTIONS or name.startswith(("kafka.", CONFIG_PREFIX)) or lower in PASSED_OVER
    return is_of_sink or format_options.is_option(lower)


def parser_of_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--properties", type=Path, metavar="FILE", help="file of settings; flags win")
    for name, flag, default, meaning in SETTINGS:
        shown = f"{meaning} [{name}{'' if default is None else f', default: {default}'}]"
        parser.add_argument(flag, dest=name, metavar="", help=shown.replace("%", "%%"))
    for name, flag, _, meaning in REPEATED:
        parser.add_argument(flag, dest=flag, metavar="", action="append", default=[], help=f"{meaning} [{name}NAME]")
    parser.add_argument(
        "--grace", type=_seconds, default=60, metavar="", help="seconds that a stop waits for the current batch [60]"
    )
    parser.add_argument("--verbose", action="store_true", help="show Spark's log and whole stack traces")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, 0 or more")
    return seconds


def parse_arguments(arguments: Sequence[str]) -> Settings:
    given = vars(parser_of_arguments().parse_args(arguments))
    file = None if given["properties"] is None else properties_of(given["properties"])
    flags = {s.name: given[s.name] for s in SETTINGS if given[s.name] is not None}
    for prefix, flag, _, _ in REPEATED:
        for item in given[flag]:
            name, equals, value = item.partition("=")
            if not equals:
                raise UsageError(f"{flag} {item.split()[0] if item.split() else ''} … must be NAME=VALUE.")
            flags[prefix + name] = value
    own = ({} if file is None else file.values) | flags
    defaults = {s.name: s.default for s in SETTINGS if s.default is not None}
    if any(name.lower() == FORMATS[0] for name in own):
        defaults["record.value"] = STRUCT
    values = defaults | own
    settings = Settings(values, given["verbose"], given["grace"], file, frozenset(flags))
    check(settings)
    return settings


def properties_of(path: Path) -> PropertiesFile:
    try:
        return read_properties(path)
    except OSError as error:
        raise UsageError(f"--properties {path} cannot be read: {error.strerror}.") from error


def check(settings: Settings) -> None:
    """Raise UsageError for a setting that is unknown or cannot work."""
    known = [*(s.name for s in SETTINGS), *SINK_OPTIONS, *format_options.OPTIONS]
    for name in settings.of:
        if name not in known and not is_sink_option(name) and not name.startswith(("source.option.", "spark.")):
            meant = nearest(name, known)
            advice = f"The nearest one is {meant}." if meant else "No setting has a similar name: leave it out."
            raise UsageError(f"There is no setting {name}{settings.place(name)}. {advice}")
    check_interface(settings)


def check_interface(settings: Settings) -> None:
    given, place = settings.get("interface"), settings.place("interface")
    if given is not None and given not in BY_COLUMNS + BY_ROWS:
        raise UsageError(f"interface={given}{place} must be one of {', '.join(BY_COLUMNS + BY_ROWS)}.")
    if given in BY_ROWS and (settings.get("delivery.guarantee") or "").strip().lower() == EXACTLY_ONCE:
        raise UsageError(
            f"interface={given}{place} cannot deliver {EXACTLY_ONCE}, because Spark calls nothing on the driver that"
            f" could commit. Set interface to {' or '.join(BY_COLUMNS)}, or leave it out."
        )
    if "order.by" not in settings.of:
        return
    if given is not None and given not in SORTING:
        raise UsageError(
            f"order.by{settings.place('order.by')} cannot be used with interface={given}, because the job can sort only"
            f" whole micro-batches. Set interface to {' or '.join(SORTING)}, or leave it out."
        )
    if "record.key" not in settings.of:
        raise UsageError(f"order.by{settings.place('order.by')} needs record.key: it sorts the rows of each key.")


# ---- from the source to the sink -----------------------------------------------------------------------------------


@contextlib.contextmanager
def named(settings: Settings, name: str) -> Iterator[None]:
    """Name the setting in the error with which Spark refuses its value. Raises UsageError."""
    try:
        yield
    except (AnalysisException, IllegalArgumentException, PySparkValueError) as error:
        raise UsageError(f"{name}{settings.place(name)}: {of_spark(error)}") from error


def source_schema(text: str) -> StructType | str:
    if os.path.isfile(text):  # a Path refuses a text as long as some schemas
        try:
            text = Path(text).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"source.schema names {text}, which is not UTF-8: {error}.") from None
    elif not re.search(r"[\s:]", text.strip()):
        raise UsageError(
            f"source.schema={text.strip()} is no file that exists, and no DDL, such as id INT, name STRING."
        )
    if not text.lstrip().startswith("{"):
        return text
    try:
        return StructType.fromJson(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"source.schema is not a schema in Spark's JSON ({why}): df.schema.json() returns one."
        ) from error


def source_options(settings: Settings) -> dict[str, str]:
    """Return the options of the source: those that are set, and STRICT ones. Spark's names have no case."""
    given = settings.below("source.option.")
    of = {name.lower(): value.lower() for name, value in given.items()}
    source = settings.need("source.format").lower()
    strict = STRICT.get(source, {}) | ({} if source == "rate" else ANY_AGE)
    if of.get("header") != "true":
        strict.pop("enforceSchema", None)
    return {name: value for name, value in strict.items() if name.lower() not in of} | given


def read_source(session: SparkSession, settings: Settings) -> DataFrame:
    reader = session.readStream.format(settings.need("source.format")).options(**source_options(settings))
    if settings.need("source.format") == "rate":
        return reader.load()
    with named(settings, "source.schema"):
        reader = reader.schema(source_schema(settings.need("source.schema")))
    return reader.load(settings.need("source.path"))


def as_records(frame: DataFrame, settings: Settings) -> DataFrame:
    """Return the columns of the records, and `order` with order.by. Raises UsageError."""
    columns = []
    for setting in (*(f"record.{name}" for name in RECORD_COLUMNS), "order.by"):
        if (sql := settings.get(setting)) is not None:
            with named(settings, setting):
                columns.append(F.expr(sql).alias(re.sub(r"record\.|\.by", "", setting)))
                frame.select(columns[-1])  # Spark looks for its columns at once
    return frame.select(*columns)


def start(records: DataFrame, sink: KafkaSink, settings: Settings) -> StreamingQuery:
    interface = settings.interface()
    if interface in BY_ROWS and settings.has_format():
        sink = KafkaSink(settings.sink_options(), schema=records.schema)  # rows do not tell their types

    def write_batch(batch: DataFrame, batch_id: int) -> None:
        if settings.get("order.by") is not None:
            batch = batch.repartition("key").sortWithinPartitions("order")
        if interface == "foreachBatch":
            sink.write_batch(batch, batch_id)
        else:
            batch.foreachPartition(sink.write_partition)

    writer = records.writeStream.option("checkpointLocation", settings.need("checkpoint.location"))
    trigger = settings.need("trigger")
    with named(settings, "trigger"):
        is_once = trigger.lower() == "availablenow"
        writer = writer.trigger(availableNow=True) if is_once else writer.trigger(processingTime=trigger)
    if interface == "format":
        register(records.sparkSession, writing_format())
        return writer.format("kafka_sink").options(**settings.sink_options()).start()
    if interface == "foreach":
        return writer.foreach(sink).start()
    return writer.foreachBatch(write_batch).start()


def register(session: SparkSession, source: type) -> None:
    """Register the format, so that it runs in the same Python as the tasks, also where the package comes as a zip."""
    try:
        session.dataSource.register(source)
    except AnalysisException as error:
        # Spark 4.0 refuses the name of a format that it has found by itself, in an installed package
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def writing_format() -> type:
    """Return the class of `format("kafka_sink")`. Raises UsageError if this PySpark cannot do it."""
    found = data_source()
    if found is None:
        raise UsageError(
            f"interface=format needs data sources that can write, and PySpark {pyspark.__version__} has none. Leave"
            " interface out."
        )
    return found


# ---- output --------------------------------------------------------------------------------------------------------


@dataclass
class ProgressTable:
    """A line for each micro-batch that had rows. Progress is read as a dict, which is all that PySpark 3.5 gives."""

    rows: int = 0
    batches: int = 0
    started: float = field(default_factory=time.monotonic)
    _last_batch: int = -1

    def show(self, recent: Sequence[StreamingQueryProgress]) -> None:
        for progress in recent:
            batch_id, rows = progress["batchId"], progress["numInputRows"]
            if batch_id > self._last_batch and rows > 0:
                self._last_batch = batch_id
                self._line(batch_id, rows, progress["durationMs"]["triggerExecution"] / 1000)

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
PY4JS_HEAD = re.compile(r"\AAn error occurred while calling [^\n]*\n: (?:[\w.$]+: )?")
PYTHONS_ERROR = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n|\n)*([A-Za-z_][\w.]*(?:: [^\n]*)?)")
SPARKS_STATE = re.compile(r" ?SQLSTATE: \w{5}.*", re.DOTALL)


def readable(error: Exception) -> str:
    """Return one paragraph: the sink's own error, if there is one, or the first line of Spark's error."""
    if isinstance(error, (KafkaError, UsageError)):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    if ours := OUR_ERROR.findall(text):
        name, sentence = ours[-1]
        return f"{name}: {sentence.strip()}"
    return f"{type(error).__name__}: {of_spark(error)}"


def of_spark(error: Exception) -> str:
    """Return the first line of Spark's error, without a login in a path, such as s3a://key:secret@bucket. If it ends in
    a colon, the error of the last Python traceback in the text follows.
    """
    text = PY4JS_HEAD.sub("", str(error).strip())
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    first = SPARKS_STATE.sub("", first).strip()
    if first.endswith(":") and (causes := PYTHONS_ERROR.findall(text)):
        first = f"{first} {causes[-1].strip()}"
    return f"{without_logins(first)} (--verbose shows more)"


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
        if last is not None and (last["batchId"], last["timestamp"]) != seen:
            seen = last["batchId"], last["timestamp"]
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
        quieten_errors()
    for name, value in settings.below("spark.").items():
        builder = builder.config(f"spark.{name}", value)
    return builder.getOrCreate()


def quieten_errors() -> None:
    """Keep PySpark 4 from logging each wrong column as a line of JSON with a Java stack trace. The job prints it in
    short.
    """
    with contextlib.suppress(ModuleNotFoundError):  # PySpark 3.5
        from pyspark.logger import PySparkLogger

        for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def run(settings: Settings, stop: StopWish) -> None:
    sink = KafkaSink(settings.sink_options())
    source = settings.get("source.path") or settings.need("source.format")
    print(f"{without_logins(source)} -> {sink!r} by {settings.interface()}", flush=True)
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
    except (UsageError, ConfigError) as error:
        return fail(error, 2)
    try:
        run(settings, stop)
    except BrokenPipeError:  # the reader of stdout has gone, and entry() ends the job
        raise
    except (KafkaError, UsageError, PySparkException, Py4JError, OSError) as error:
        if stop.is_there and not isinstance(error, (KafkaError, UsageError, StreamingQueryException)):
            print("Spark ended before the job; the next start writes the current batch again", flush=True)
            return 0
        if settings.verbose:
            raise
        return fail(error, 1, settings.place(getattr(error, "setting", None)))
    return 0


def fail(error: Exception, code: int, place: str = "") -> int:
    print(f"stream_to_kafka: {readable(error)}{place}", file=sys.stderr, flush=True)
    return code


def entry() -> NoReturn:
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))


if __name__ == "__main__":
    entry()
