"""`KafkaSink`: the sink as a value, made on the driver, pickled to the tasks, and called by Spark there.

On the driver it checks its options and opens nothing. In a task it is Spark's ForeachWriter (open, process, close), a
function of a partition's rows, or a function of its Arrow batches. All write through a `TaskDelivery` and the process's
pooled producer. Delivery is at least once by default: Spark runs a failed task again, which writes its rows again.
"""

from __future__ import annotations

import spark_kafka_sink.sink.pyspark_versions  # noqa: F401 - raises if PySpark is missing or too old

# isort: split

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import ConfigError, IllegalStateError, SchemaError
from spark_kafka_sink.producer.writes import WriteReport
from spark_kafka_sink.sink.arrow_batches import LastWrites, batch_limits, without_padding
from spark_kafka_sink.sink.arrow_writer import write_arrow
from spark_kafka_sink.sink.batch_run import BatchRun, Stopwatch
from spark_kafka_sink.sink.column_formats import with_column_formats, with_given_types
from spark_kafka_sink.sink.dead_letters import check_limit, log_letters
from spark_kafka_sink.sink.delivery import EXACTLY_ONCE_DDL, REPORT_DDL, TaskDelivery
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome, skipped_records
from spark_kafka_sink.sink.exactly_once.session import (
    DriverSession,
    RunTasks,
    StreamBatch,
    batch_prefix,
    session,
    stream_batch,
)
from spark_kafka_sink.sink.exactly_once.task import write_in_transaction
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import process_pool
from spark_kafka_sink.sink.pyspark_versions import map_in_arrow, refuse_doubled_rows_in_task
from spark_kafka_sink.sink.rows import PartitionWriter
from spark_kafka_sink.sink.running_query import (
    cancelled_by_interrupt,
    is_connect_task,
    refuse_in_query,
    run_id,
    session_time_zone,
)
from spark_kafka_sink.sink.schema import (
    by_position,
    check_columns,
    needs_projection,
    projection,
    refuse_without_zone,
)
from spark_kafka_sink.sink.small_tasks import RanTasks, SmallTasks, may_follow_tasks, source_of, with_fewer_tasks
from spark_kafka_sink.sink.topic_creation import create_missing_topic

# isort: split

from pyspark import TaskContext
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, Row

    from spark_kafka_sink.sink.exactly_once.protocol import Committed
    from spark_kafka_sink.sink.formatted_rows import FormattedWriter
    from spark_kafka_sink.sink.reports import OnReport

    WriteTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

log = logging.getLogger(__name__)

_last_writes: Final = LastWrites()
_small_tasks: Final = SmallTasks()
"""On the driver, shared by all sinks, so that a new sink for every batch of a stream knows them."""

_NO_DRIVER: Final = (
    "delivery.guarantee=exactly-once cannot be kept on foreach and foreachPartition: Spark calls nothing on the driver"
    ' for them that could commit. Use writeStream.format("kafka_sink") or writeStream.foreachBatch(sink.write_batch)'
    " (not on Spark Connect) for a stream, sink.write(df) for a batch; or leave the option out."
)
_NO_REPORT: Final = (
    "{0} has no effect on foreach and foreachPartition: Spark calls nothing on the driver for them that could report a"
    ' batch. Leave it out. Or use writeStream.format("kafka_sink") or writeStream.foreachBatch(sink.write_batch) for a'
    " stream, sink.write(df) for a batch."
)
_NO_CREATION: Final = (
    "topic.create=if-missing has no effect on foreach and foreachPartition: Spark calls nothing on the driver for them"
    " that could create the topic before its tasks. Create it by hand and leave topic.create out. Or use"
    ' writeStream.format("kafka_sink") or writeStream.foreachBatch(sink.write_batch) for a stream, sink.write(df) for a'
    " batch."
)


class KafkaSink:
    """Writes the rows of a DataFrame to Kafka.

        sink = KafkaSink({"kafka.bootstrap.servers": "h1:9092,h2:9092", "topic": "orders"})
        df.writeStream.foreach(sink)
        df.foreachPartition(sink.write_partition)
        df.writeStream.foreachBatch(sink.write_batch)
        report = sink.write(df)

    The last two write columns, several times as fast as rows. Columns of the DataFrame, of which others are ignored:

    - `value`: string or binary, required. Null is a tombstone.
    - `key`: string or binary.
    - `topic`: string. The option `topic` wins.
    - `partition`: int.
    - `headers`: `array<struct<key: string, value: binary>>`.
    - `timestamp`: timestamp, or bigint in ms since 1970.

    With the options `value.format` and `key.format` these columns are structs, and become Avro or JSON
    (docs/serialization.md). `foreach` and `foreachPartition` then need the DataFrame's `schema`, unless the types are
    those of an Avro `value.schema`. It is checked at once, and if there is a schema registry, the schema's id is looked
    up there.

    `on_report` is called with the `BatchReport` of each `write` and `write_batch`, also of one that failed, when it has
    ended (docs/reports.md). What it raises is logged, and changes nothing. With Spark Connect it travels to the server.

    Options (docs/options.md) may be given as a mapping, by keyword, or both. Raises ConfigError at once for an option
    that is unknown, malformed or cannot work here. Logs a warning for options of Spark's Kafka source and of consumers,
    and ignores them. Raises SchemaError for a `schema` that cannot be written.
    """

    def __init__(
        self,
        options: Mapping[str, object] | None = None,
        /,
        *,
        schema: object = None,
        on_report: object = None,
        **more: object,
    ) -> None:
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"KafkaSink takes a mapping of options, not {type(options).__name__}.")
        given = dict(options or {})
        if twice := given.keys() & more.keys():
            raise ConfigError(f"The option {min(twice)} is given twice: in the mapping and by keyword.")
        if on_report is not None and not callable(on_report):
            raise ConfigError(f"on_report takes a function of one report, not {type(on_report).__name__}.")
        self._config = SinkConfig.from_options({**given, **more})
        self._on_report: OnReport | None = on_report
        self._row_config = self._config if schema is None else _for_rows(self._config, schema)
        """For tasks that get rows."""
        self._writer: PartitionWriter | FormattedWriter | None = None
        self._thread: int | None = None
        """Of `open`: the only one that may use the writer."""
        self._attempt_id: int | None = None
        """Of the task that called `open`. A sink in a broadcast is one object for several tasks."""

    def open(self, partition_id: int, epoch_id: int) -> bool:  # noqa: ARG002 - Spark's signature
        """Called by Spark before the rows of a partition. Always True: at-least-once skips no epoch."""
        refuse_doubled_rows_in_task()
        context = TaskContext.get()
        attempt_id = None if context is None else context.taskAttemptId()
        if self._writer is not None:
            self._writer.abandon()
            if attempt_id is not None and attempt_id == self._attempt_id:
                self._writer = None
                raise IllegalStateError(
                    "open was called twice in one task, without close: the rows of the first one are not acknowledged."
                    " Make a sink for each use, or call write_partition."
                )
        self._writer = self._new_writer()
        self._thread, self._attempt_id = threading.get_ident(), attempt_id
        return True

    def process(self, row: Row) -> None:
        """Send one row. Raises KafkaError once this row or an earlier one is known to have failed, and SchemaError for
        a row that cannot be written. Later calls raise the same error.
        """
        if self._writer is None:
            raise IllegalStateError(
                "process was called before open. For a stream give Spark the sink itself: writeStream.foreach(sink)."
                " For a batch use df.foreachPartition(sink.write_partition)."
            )
        if self._thread != threading.get_ident():
            raise IllegalStateError(
                "process was called in another thread than open. Rows would be lost or mixed up. In threads of your own"
                " call write_partition, which has a writer for each call."
            )
        self._writer.add(row)

    def close(self, error: Exception | None) -> None:
        """Called by Spark after the last row. Waits until every row is acknowledged, and raises KafkaError if one is
        not. After an `error` it does not wait, so that this error fails the task.
        """
        writer = self._writer
        if writer is None:
            return
        if error is None:
            writer.finish()  # after its error a second call raises it again: the rows are not written
            writer.log_letters()
        else:
            writer.abandon()
        self._writer = None

    def write_partition(self, rows: Iterable[Row]) -> None:
        """Write the rows of one partition of a DataFrame: `df.foreachPartition(sink.write_partition)`. Returns when
        every row is acknowledged; raises KafkaError if one is not, SchemaError for a row that cannot be written.
        """
        writer = self._new_writer()
        try:
            writer.write(_with_certain_times(rows, writer.config))
            writer.finish()
            writer.log_letters()
        finally:
            writer.abandon()

    def write(self, df: DataFrame, *, is_outside_queries: bool = False) -> WriteReport:
        """Write a batch DataFrame by columns, and wait until every row is acknowledged.

        Raises SchemaError before any task if a column is missing or has a wrong type. Spark runs a failed task again;
        after the last attempt Spark's own error has the KafkaError's text.

        With delivery.guarantee=exactly-once all rows count, or none. A failed write that is called again is another
        write: only a streaming query knows what it has written. So this raises ConfigError inside foreachBatch. It also
        raises it while a streaming query is active, in a thread that is not the main one and does not say which query
        it belongs to. `is_outside_queries=True` says that such a thread is not inside foreachBatch.
        """
        _refuse_other_frames(df)
        if self._config.is_exactly_once:
            refuse_in_query(df.sparkSession, is_outside_queries=is_outside_queries)
        report = self._write(df, None, None)
        log_letters(self._config, report, "Write")
        return report

    def write_batch(self, df: DataFrame, batch_id: int) -> WriteReport:
        """Write one micro-batch by columns: `df.writeStream.foreachBatch(sink.write_batch)`. Raises as `write` does."""
        batch = stream_batch(df, batch_id) if self._config.is_exactly_once else None
        report = self._write(df, batch, batch_id)
        log.info("Batch %d: %s", batch_id, report)
        log_letters(self._config, report, f"Batch {batch_id}")
        return report

    def _write(self, df: DataFrame, batch: StreamBatch | None, batch_id: int | None) -> WriteReport:
        """Raises as `write`, and KafkaError if an exactly-once batch could not be committed."""
        watch = Stopwatch(SystemClock())
        run = BatchRun(self._config.is_exactly_once, watch.began_ms)
        self._note_query(df, run, batch_id)
        self._begin_lineage(df, run, batch_id)
        self._begin_trace(run)
        try:
            if self._config.is_exactly_once:
                self._write_exactly_once(df, batch, run, watch)
            else:
                self._write_at_least_once(df, run, watch)
        except Exception as error:
            run.fail(watch.now_ms())
            self._hand_over(run, error)
            raise
        self._hand_over(run, None)
        return WriteReport.of(run.rows, run.duration)

    def _note_query(self, df: DataFrame, run: BatchRun, batch_id: int | None) -> None:
        """Note the query of the batch, if somebody wants a report: when the batch has failed, Spark may be gone. Raises
        nothing.
        """
        config = self._config
        if config.logs_reports or config.sends_lineage or config.sends_telemetry or self._on_report is not None:
            from spark_kafka_sink.sink.reports import ids_of

            run.ids = ids_of(df, batch_id)

    def _begin_lineage(self, df: DataFrame, run: BatchRun, batch_id: int | None) -> None:
        """Send the begin of the batch, and let its end be sent. Raises nothing."""
        if not self._config.sends_lineage:
            return
        from spark_kafka_sink.sink.lineage import begin_write

        lineage = begin_write(self._config, df, batch_id, run.began_ms, run.ids)
        if lineage is not None:
            run.on_end.append(lineage.end)

    def _begin_trace(self, run: BatchRun) -> None:
        """Begin the span of the batch, and let it be ended. Raises nothing."""
        if not self._config.sends_telemetry:
            return
        from spark_kafka_sink.sink.telemetry.batches import BatchTrace

        trace = BatchTrace.begin(self._config, run.began_ms)
        if trace is not None:
            run.traceparent = trace.traceparent
            run.on_end.append(trace.end)

    def _hand_over(self, run: BatchRun, error: BaseException | None) -> None:
        """Hand the report to those who want it. Raises nothing but Ctrl-C."""
        is_logged = self._config.logs_reports
        if not is_logged and self._on_report is None and not run.on_end:
            return
        from spark_kafka_sink.sink.reports import hand_over, report_of

        hand_over(lambda: report_of(run, error), is_logged=is_logged, on_report=self._on_report, on_end=run.on_end)

    def _write_at_least_once(self, df: DataFrame, run: BatchRun, watch: Stopwatch) -> None:
        """Raises as `write`."""
        chosen = self._chosen(df)
        config = self._for_tasks(df, run)

        def write_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return write_arrow(config, process_pool(), map(without_padding, batches))

        create_missing_topic(config)
        run.end("plan", watch.now_ms())
        run.rows = self._run_tasks(chosen, write_task, REPORT_DDL)
        run.end("tasks", watch.now_ms())
        if config.dead_letter_topic is not None:
            check_limit(config, WriteReport.of(run.rows, run.duration))

    def _write_exactly_once(self, df: DataFrame, batch: StreamBatch | None, run: BatchRun, watch: Stopwatch) -> None:
        """Raises as `write`, and KafkaError if the batch could not be committed."""
        chosen = self._chosen(df)
        config = self._for_tasks(df, run)

        def run_tasks(batch_start: BatchStart, batch_id: int) -> list[TaskOutcome]:
            query_id = "" if batch is None else batch.query_id

            def write_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                records = map(without_padding, batches)
                return write_in_transaction(config, process_pool(), batch_start, batch_id, query_id, records)

            run.end("plan", watch.now_ms())
            rows = run.rows = self._run_tasks(chosen, write_task, EXACTLY_ONCE_DDL)
            run.end("tasks", watch.now_ms())
            if config.dead_letter_topic is not None:
                check_limit(config, WriteReport.of(rows, 0))
            outcomes = [TaskOutcome.from_json(row["outcome"]) for row in rows if row["outcome"] is not None]
            run.skipped_records = skipped_records(outcomes)
            return outcomes

        create_missing_topic(config)
        run.end_commit(self._in_session(config, batch, run_tasks).decided_ms, watch.now_ms())

    def _in_session(self, config: SinkConfig, batch: StreamBatch | None, run_tasks: RunTasks) -> Committed:
        """Run the batch in its driver's session. Raises as `DriverSession.run`."""
        if config.transactional_id_prefix is None and batch is None:
            once = DriverSession(None)
            try:
                return once.run(config, None, run_tasks)
            finally:
                once.close()
        prefix = config.transactional_id_prefix if batch is None else batch_prefix(config, batch)
        assert prefix is not None
        return session(prefix).run(config, batch, run_tasks)

    def _chosen(self, df: DataFrame) -> DataFrame:
        """Return the columns of `df` that the tasks need. Raises SchemaError."""
        schema, topic, formatted = df.schema, self._config.topic, self._formatted
        if not needs_projection(schema, topic, formatted):  # to plan one takes the driver 5 to 15 ms
            return df
        return df.toDF(*by_position(schema)).selectExpr(*projection(schema, topic, formatted))

    @property
    def _formatted(self) -> tuple[str, ...]:
        """The columns that have a format."""
        return () if self._config.formats is None else self._config.formats.fields

    def _for_tasks(self, df: DataFrame, run: BatchRun) -> SinkConfig:
        """Return the configuration for the tasks. Raises SchemaError, and KafkaError of the registry and of limits."""
        config = self._config if run.traceparent is None else replace(self._config, batch_trace=run.traceparent)
        if config.formats is not None:
            time_zone = df.sparkSession.conf.get("spark.sql.session.timeZone")
            config = with_column_formats(config, df.schema, time_zone, stream=run_id(df))
        return _with_limit_server(config)

    def _run_tasks(self, df: DataFrame, write_task: WriteTask, report_ddl: str) -> list[dict[str, Any]]:
        topic, clock = self._config.topic, SystemClock()
        source, began_ms = source_of(df, topic), clock.now_ms()
        are_fewer = _small_tasks.has(source) and not may_follow_tasks(df)
        with batch_limits(df, _last_writes.of(topic), self._formatted) as given:
            chosen = given
            if are_fewer:
                chosen = with_fewer_tasks(given, df, source, _small_tasks.most_tasks(source))
            try:
                with cancelled_by_interrupt(df.sparkSession):
                    rows = _by_name(map_in_arrow(chosen, write_task, report_ddl).collect())
            except Exception:
                _small_tasks.forget(source)  # the same write may be tried again
                raise
        ran = RanTasks.of(rows, clock.now_ms() - began_ms, are_fewer=are_fewer)
        _last_writes.learn(topic, ran.records, sum(row["bytes"] for row in rows))
        _small_tasks.learn(source, ran)
        return rows

    def _new_writer(self) -> PartitionWriter | FormattedWriter:
        if self._config.is_exactly_once:
            raise ConfigError(_NO_DRIVER)
        if self._config.requested_topic is not None:
            raise ConfigError(_NO_CREATION)
        wanted = {
            "on_report": self._on_report is not None,
            "report.log=true": self._config.logs_reports,
            "lineage.openlineage=true": self._config.sends_lineage,
        }
        for name, is_wanted in wanted.items():
            if is_wanted:
                raise ConfigError(_NO_REPORT.format(name))
        delivery = TaskDelivery(with_given_types(_with_limit_server(self._row_config)), process_pool())
        if delivery.config.column_formats is None:
            return PartitionWriter(delivery)
        from spark_kafka_sink.sink.formatted_rows import row_writer  # imports the encoders

        return row_writer(delivery)

    def __getstate__(self) -> Any:
        """Return all attributes, also of a subclass, except the writer: a copy in a task opens its own. With limits the
        copy knows where it must ask.
        """
        state: Any = super().__getstate__()
        own, *slots = state if isinstance(state, tuple) else (state,)
        own = {**own, "_writer": None, "_row_config": _with_limit_server(self._row_config)}
        return (own, *slots) if slots else own

    def __repr__(self) -> str:
        return f"KafkaSink({self._config.describe()})"


def _with_certain_times(rows: Iterable[Any], config: SinkConfig) -> Iterable[Any]:
    """Return the rows of a task, which on Spark Connect raise SchemaError for a time that may be one of two."""
    context = TaskContext.get()
    if context is None or not is_connect_task(context.getLocalProperty):
        return rows
    from spark_kafka_sink.sink.row_interface import rows_of_connect  # few tasks need it

    return rows_of_connect(rows, config)


def _refuse_other_frames(df: object) -> None:
    """Raise SchemaError unless `df` is a DataFrame of Spark, classic or of Spark Connect."""
    if not isinstance(getattr(df, "schema", None), StructType):
        kind = f"{type(df).__module__.partition('.')[0]}.{type(df).__qualname__}"
        raise SchemaError(
            f"KafkaSink.write takes a DataFrame of Spark, not {kind}. Make one by spark.createDataFrame(...), or write"
            " the table without Spark by KafkaProducer.write. In foreachPartition call sink.write_partition."
        )


def _by_name(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows as dicts. A Row looks through its names for each cell, which takes five times as long; and there
    are as many as tasks times partitions of topics.
    """
    names: Sequence[str] = rows[0].__fields__ if rows else ()
    return [dict(zip(names, row, strict=True)) for row in rows]


def _with_limit_server(config: SinkConfig) -> SinkConfig:
    """Return the configuration for tasks, which ask this process's server of limits if there is a limit."""
    if not config.is_limited or config.limit_server is not None:
        return config
    from spark_kafka_sink.sink.limits.driver import with_server_of_process  # only if there is a limit

    return with_server_of_process(config)


def _for_rows(config: SinkConfig, schema: object) -> SinkConfig:
    """Return the configuration for tasks that get the rows of a DataFrame of this schema. Raises SchemaError, and
    KafkaError of the registry.
    """
    if not isinstance(schema, StructType):
        raise ConfigError(f"schema takes the schema of a DataFrame, df.schema, not {type(schema).__name__}.")
    formatted = () if config.formats is None else config.formats.fields
    refuse_without_zone(check_columns(schema, config.topic, formatted))  # rows have a worker's time, not the session's
    if config.formats is None:
        return config
    resolved = with_column_formats(config, schema, session_time_zone())
    from spark_kafka_sink.sink.formatted_rows import stored_form  # imports the encoders

    types = {field: schema[field].dataType for field in formatted}
    return replace(resolved, user_types=tuple((name, of) for name, of in types.items() if stored_form(of) is not None))
