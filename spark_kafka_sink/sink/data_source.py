"""The PySpark data source `kafka_sink`: `df.writeStream.format("kafka_sink")`, `df.write.format("kafka_sink")`.

Processes: in a planning worker of the driver Spark makes the source and its writer, once for each batch and before any
task. There the options and the schema are checked. Spark pickles the writer for the tasks, whose `write` gets Arrow
batches. The messages that `write` returns go to `commit` or `abort`, in a worker of the driver again. In a stream these
are called on a new writer, so only the tasks' messages get from one side to the other.

The stderr of those workers is the driver's, and they have no logging: a handler of this package shows the report of
each batch at INFO, unless there is a handler already (spark.sql.pyspark.worker.logging.enabled).

At least once, a task's rows are acknowledged when its `write` returns: `commit` only logs the report, and `abort` has
nothing to undo. Exactly once, the driver begins the batch when Spark pickles the writer, the tasks leave transactions
open, and `commit` decides (exactly_once/protocol.py). Each method is called by one thread of its worker.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from spark_kafka_sink.sink.pyspark_versions import has_arrow_writer, no_data_sources, refuse_doubled_rows_in_task

try:
    from pyspark.sql.datasource import DataSource, WriterCommitMessage
except ImportError as error:
    raise no_data_sources(error) from error

if TYPE_CHECKING or has_arrow_writer(is_stream=False):
    from pyspark.sql.datasource import DataSourceArrowWriter as BatchInterface
else:
    from pyspark.sql.datasource import DataSourceWriter as BatchInterface
if TYPE_CHECKING or has_arrow_writer(is_stream=True):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamInterface
else:  # PySpark 4.0
    from pyspark.sql.datasource import DataSourceStreamWriter as StreamInterface

from pyspark.sql.types import StructType

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import ConfigError, IllegalStateError, KafkaError
from spark_kafka_sink.producer.writes import WriteReport
from spark_kafka_sink.sink.arrow_writer import write_all
from spark_kafka_sink.sink.batch_run import NO_QUERY, BatchRun, QueryIds, Stopwatch
from spark_kafka_sink.sink.column_formats import check_formats, nullable_struct, with_column_formats
from spark_kafka_sink.sink.dead_letters import check_limit, log_letters
from spark_kafka_sink.sink.delivery import ReportColumns, TaskDelivery, report_rows
from spark_kafka_sink.sink.exactly_once.advice import operator_command
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster, process_client, process_driver
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchStart,
    TaskOutcome,
    remember_start,
    remembered_start,
    skipped_records,
)
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver
from spark_kafka_sink.sink.exactly_once.query_names import QueryBatch, check_name
from spark_kafka_sink.sink.exactly_once.session import QUERY_NAME, is_named_by_query, stream_prefix
from spark_kafka_sink.sink.exactly_once.task import (
    ExactlyOnceTask,
    TaskIdentity,
    batch_task,
    check_default_location,
    streaming_task,
)
from spark_kafka_sink.sink.exactly_once.write_names import Claim, claim_name, release_name
from spark_kafka_sink.sink.options import KAFKA_PREFIX, SinkConfig
from spark_kafka_sink.sink.producer_pool import process_pool
from spark_kafka_sink.sink.running_query import has_query_thread, refuse_beside_queries
from spark_kafka_sink.sink.schema import check_columns, refuse_without_zone
from spark_kafka_sink.sink.topic_creation import create_missing_topic
from spark_kafka_sink.sink.worker import digest, of_pickling, remember, remembered, report_folder, show_reports

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_kafka_sink.sink.lineage import LineageRun

log = logging.getLogger(__name__)

_SPARKS_OWN: Final = frozenset({"checkpointlocation", "path", "queryname"})
"""Options that Spark itself reads or adds, and hands on to the writer; lower-case."""
TRACEPARENT_KIND: Final = "traceparent"
_CHECKED: Final[dict[str, tuple[str, str | None]]] = {}
"""By query id: the prefix and the run that this process has checked last."""


@dataclass(frozen=True, slots=True)
class TaskWritten(WriterCommitMessage):
    """The commit message of a task, from `write` to `commit`."""

    columns: ReportColumns
    """Made by `report_columns`. The driver holds those of all tasks, and rows would take seven times as much."""
    started_ms: int
    """Time of day, as `ended_ms`: compared with tasks of other machines."""
    ended_ms: int
    outcome: TaskOutcome | None = None
    """Only of an exactly-once batch."""
    began_ms: int | None = None
    """The time of day at which the driver began the batch, by its own clock."""
    ids: QueryIds = NO_QUERY
    """The driver's part of a data source is not told them."""
    lineage_run: str | None = None
    """The id of the batch's run in its lineage, if it has one."""
    traceparent: str | None = None
    """Of the batch's span, if it has one."""


class KafkaSinkDataSource(DataSource):
    """Spark's name for the sink: `format("kafka_sink")`.

    Options and columns are those of `KafkaSink`; keys in any case. Found by Spark without registration where the
    package is installed; `spark.dataSource.register(KafkaSinkDataSource)` does it by hand.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = options

    @classmethod
    def name(cls) -> str:
        return "kafka_sink"

    def schema(self) -> StructType:
        """Called only by a read. Raises ConfigError."""
        raise ConfigError('kafka_sink writes only. Topics are read by Spark\'s own source: format("kafka").')

    def writer(self, schema: StructType, overwrite: bool) -> KafkaBatchWriter:
        """Raises ConfigError or SchemaError; Spark then starts no task."""
        if overwrite:
            raise ConfigError(
                "Save mode Overwrite not allowed for Kafka. Allowed save modes are Append and ErrorIfExists (default):"
                ' a topic is only ever appended to; set mode("append").'
            )
        config = self._checked(schema)
        writer = KafkaBatchWriter(config, config.transactional_id_prefix if config.is_exactly_once else None)
        writer.schema = schema if config.formats is not None else None
        writer.lineage = self._lineage(config, schema, is_stream=False)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> KafkaStreamWriter:  # noqa: ARG002, N802 - Spark's
        """Raises ConfigError or SchemaError; Spark then starts no task. Output mode `complete` comes as `overwrite`:
        the whole result is appended again with every batch, as by Spark's own sink.
        """
        config = self._checked(schema)
        given = {key.lower(): value for key, value in self.options.items()}
        if config.is_exactly_once:
            writer = KafkaStreamWriter(config, stream_prefix(config, self.options))
            writer.is_named_by_query = is_named_by_query(config, self.options)
        else:
            writer = KafkaStreamWriter(config)
        writer.query_name = given.get(QUERY_NAME) or None
        known = given.get("checkpointlocation") or writer.query_name
        if config.formats is not None:
            writer.schema = nullable_struct(schema)
            writer.stream = known or ""
        writer.lineage = self._lineage(config, schema, is_stream=True)
        writer.key = digest(known) if known else None
        return writer

    def _lineage(self, config: SinkConfig, schema: StructType, *, is_stream: bool) -> LineageRun | None:
        """Return the lineage of one batch; None if it is not wanted."""
        if not config.sends_lineage:
            return None
        from spark_kafka_sink.sink.lineage import run_of_format

        given = {key.lower(): value for key, value in self.options.items()}
        location = given.get("checkpointlocation")
        return run_of_format(config, schema, is_stream=is_stream, query_name=given.get(QUERY_NAME), location=location)

    def _checked(self, schema: StructType) -> SinkConfig:
        options = {key: value for key, value in self.options.items() if key.lower() not in _SPARKS_OWN}
        if not options:
            raise ConfigError(
                "There are no options. Spark does not hand the OPTIONS of a table to a Python data source. Name them"
                f" with the write, INSERT INTO t WITH ('{KAFKA_PREFIX}bootstrap.servers' 'host:port', 'topic' 'orders')"
                ", or make it a TEMPORARY VIEW. Do not put private keys into a view's OPTIONS, because Spark records"
                " them: then write by df.write or KafkaSink."
            )
        show_reports()  # ignored options cause a warning
        config = SinkConfig.from_options(options)
        formatted = () if config.formats is None else config.formats.fields
        refuse_without_zone(check_columns(schema, config.topic, formatted))
        check_formats(config, schema)
        return config


class _Writer(ABC):
    """The common part of both writers."""

    is_stream: ClassVar[bool]
    takes_arrow: ClassVar[bool]
    """Whether PySpark gives Arrow batches to `write`, and not rows."""
    schema: StructType | None = None
    """Of the rows, if columns have formats."""
    stream: str | None = None
    """The checkpoint location of a stream: its batches have the formats of the first one that this process began."""
    query_name: str | None = None
    """The name of a stream, if it has one."""
    key: str | None = None
    """Of a stream: what tells it from others in this application, if anything does."""
    lineage: LineageRun | None = None
    """The lineage of the batch, if it is wanted."""

    def __init__(self, config: SinkConfig, prefix: str | None = None) -> None:
        """`prefix`: that of an exactly-once write, None for a batch write, which claims a name when it begins."""
        self._config = config
        self._prefix = prefix
        self._has_topic = config.requested_topic is None
        """Whether the topic needs no creation any more."""
        self._claim: Claim | None = None
        self._batch_start: BatchStart | None = None
        self._began_ms = SystemClock().wall_ms()
        self._has_lineage_begun = False

    def __getstate__(self) -> Mapping[str, Any]:
        """Prepare the batch: Spark pickles only a writer whose tasks it is about to run, not one that commits. Spark
        pickles it twice, and all this happens once. Raises KafkaError; Spark then starts no task.
        """
        lineage = self.lineage
        if lineage is not None and not self._has_lineage_begun:
            self._has_lineage_begun = True
            lineage.remember()
            lineage.begin(self._began_ms)
        if self._config.sends_telemetry and self._config.batch_trace is None:
            self._plan_trace()
        try:
            self._prepare()
        except Exception as error:
            run = BatchRun(self._config.is_exactly_once, self._began_ms)
            run.fail(SystemClock().wall_ms())
            self._follow(run, None if lineage is None else lineage.run_id, self._config.batch_trace)
            self._hand_over(run, error, has_failed=True, is_begun=False)
            if isinstance(error, KafkaError):
                raise of_pickling(error) from error.__cause__
            raise
        return self.__dict__

    def _plan_trace(self) -> None:
        """Choose the ids of the batch's span. Raises nothing."""
        from spark_kafka_sink.sink.telemetry.batches import planned  # only with telemetry

        traceparent = planned(self._config, self._began_ms)
        self._config = replace(self._config, batch_trace=traceparent)
        if self.key is not None and traceparent is not None:
            try:
                remember(TRACEPARENT_KIND, self.key, traceparent)
            except OSError:
                log.warning("The span of a batch that fails at once will not be in one trace with its tasks")

    def _prepare(self) -> None:
        """Look up the ids of schemas, start the server of limits, create a missing topic, and begin an exactly-once
        batch. Raises KafkaError.
        """
        if self.schema is not None:
            self._config = with_column_formats(self._config, self.schema, stream=self.stream)
        if self._config.is_limited and self._config.limit_server is None:
            from spark_kafka_sink.sink.limits.driver import with_server_of_planners  # only if there is a limit

            self._config = with_server_of_planners(self._config)
        if not self._has_topic:
            create_missing_topic(self._config)
            self._has_topic = True
        if self._config.is_exactly_once and self._batch_start is None:
            if not self.is_stream and not self._config.is_outside_queries:
                refuse_beside_queries(has_query_thread())
            if self._prefix is None:  # not earlier: Spark makes writers that write nothing
                with process_client(self._config.producer) as (client, _):
                    self._claim = claim_name(client, self._config, random.Random())
                self._prefix = self._claim.prefix
            try:
                with self._driver() as driver:
                    self._batch_start = driver.begin()
            except KafkaError:
                self._release_name()
                raise
            if self.is_stream:
                remember_start(self._batch_start)

    def _driver(self) -> AbstractContextManager[ExactlyOnceDriver]:
        assert self._prefix is not None
        return process_driver(self._config, self._prefix, is_one_off=self._claim is not None)

    def _release_name(self) -> None:
        """Release the name of a write that is committed, or of which nothing is open or decided."""
        if self._claim is not None:
            with process_client(self._config.producer) as (client, _):
                release_name(client, self._config, self._claim)

    @abstractmethod
    def _task(self, batch_start: BatchStart) -> TaskIdentity:
        """Return the identity of the running task."""

    def _commit(self, messages: Sequence[WriterCommitMessage | None], whose: str, batch_id: int | None = None) -> None:
        """Commit an exactly-once batch, and log the report; `whose` begins it. Raises TooManyDeadLettersError, and
        KafkaError if the batch could not be committed.
        """
        run = self._run_of(messages, batch_id)
        try:
            report = replace(report_of(messages), duration=run.durations_ms.get("tasks", 0) / 1000)
            check_limit(self._config, report)
            decided_ms = self._commit_batch(messages, run.ids.run_id)
            self._release_name()
        except Exception as error:
            run.fail(SystemClock().wall_ms())
            self._hand_over(run, error, has_failed=True)
            raise
        if self._config.is_exactly_once:
            run.end_commit(decided_ms, SystemClock().wall_ms())
        log.info("%s: %s", whose, report)
        log_letters(self._config, report, whose)
        self._hand_over(run, None, has_failed=False)

    def _run_of(self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None) -> BatchRun:
        """Return what the messages tell of the batch, up to the end of its tasks."""
        written = [message for message in messages if isinstance(message, TaskWritten)]
        starts = [message.started_ms for message in written]
        outcomes = [message.outcome for message in written if message.outcome is not None]
        began_ms = next((message.began_ms for message in written if message.began_ms is not None), self._began_ms)
        run = BatchRun(self._config.is_exactly_once, began_ms)
        ids = next((message.ids for message in written if message.ids.query_id is not None), NO_QUERY)
        run.ids = QueryIds(ids.query_id, ids.run_id, batch_id, self.query_name)
        begun = next((message.lineage_run for message in written if message.lineage_run is not None), None)
        self._follow(run, begun, next((message.traceparent for message in written), self._config.batch_trace))
        run.rows = (row for message in written for row in report_rows(message.columns))
        run.skipped_records = skipped_records(outcomes)
        if written:
            run.end_tasks(min(starts), max(message.ended_ms for message in written), SystemClock().wall_ms())
        return run

    def _follow(self, run: BatchRun, lineage_run: str | None, traceparent: str | None) -> None:
        """Let lineage and telemetry get the end of the batch. Both were begun in another process of the driver, and are
        None if no task tells of them.
        """
        if self.lineage is not None:
            run.on_end.append(self.lineage.found_again(lineage_run).end)
        if self._config.sends_telemetry:
            from spark_kafka_sink.sink.telemetry.batches import WORKER_WAIT_S, BatchTrace  # only with telemetry

            if traceparent is None and self.key is not None:
                traceparent = remembered(TRACEPARENT_KIND, self.key)
            run.on_end.append(BatchTrace(self._config, traceparent, WORKER_WAIT_S).end)

    def _hand_over(self, run: BatchRun, error: Exception | None, *, has_failed: bool, is_begun: bool = True) -> None:
        """Hand the report to the log and the listeners, unless no task has begun, and to lineage and telemetry, if they
        want it. Raises nothing.
        """
        folder = report_folder() if is_begun else None
        is_logged = is_begun and self._config.logs_reports
        if folder is None and not is_logged and not run.on_end:
            return
        from spark_kafka_sink.sink import reports

        reports.hand_over(
            lambda: reports.report_of(run, error, has_failed=has_failed),
            is_logged=is_logged,
            folder=folder,
            on_end=run.on_end,
        )

    def _commit_batch(self, messages: Sequence[WriterCommitMessage | None], run_id: str | None) -> int | None:
        """Return when the batch was decided; None if it needed no decision."""
        outcomes = [message.outcome for message in messages if isinstance(message, TaskWritten)]
        if len(outcomes) != len(messages):
            missing = len(messages) - len(outcomes)
            raise IllegalStateError(f"{missing} of {len(messages)} tasks returned no commit message.")
        if self._prefix is None:
            return None
        reported = [outcome for outcome in outcomes if outcome is not None]
        if reported and reported[0].query_id:
            self._check_name(reported[0], run_id)
        with self._driver() as driver:
            committed = driver.commit(reported)
        if committed.was_skipped:
            log.info("%s: the batch was committed before, and is skipped", self._prefix)
        return committed.decided_ms

    def _check_name(self, outcome: TaskOutcome, run_id: str | None) -> None:
        """Refuse a batch that the query has written under another prefix, once in each run. Raises IllegalStateError
        and KafkaError.
        """
        start, checked = outcome.batch_start, (outcome.batch_start.prefix, run_id)
        if run_id is not None and _CHECKED.get(outcome.query_id) == checked:
            return
        batch = QueryBatch(outcome.query_id, outcome.batch_id, self._config.topic)
        with process_client(self._config.producer) as (client, _):
            cluster = KafkaDriverCluster(client, self._config, start.prefix)
            if check_name(cluster, start, batch, lambda _: False):  # such a query has no other sink
                _CHECKED[outcome.query_id] = checked

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> str:
        """Abort the tasks' transactions, also of tasks without a message if the start of the batch is known. Return
        what happens to them, in words.
        """
        reported = [message.outcome for message in messages if isinstance(message, TaskWritten)]
        outcomes = [outcome for outcome in reported if outcome is not None]
        batch_start = self._batch_start or (outcomes[0].batch_start if outcomes else None)
        if batch_start is None and self._prefix is not None:
            batch_start = remembered_start(
                self._prefix
            )  # of a stream; its exact epoch ends nothing of a driver that came later
        why = ""
        try:
            if batch_start is not None:
                with self._driver() as driver:
                    is_ended = driver.abort(batch_start, outcomes)
                if is_ended:
                    self._release_name()
                    return "were aborted"
        except KafkaError as error:
            why = f" ({error})"
        if self.is_stream:
            return f"are finished or aborted when this is started again{why}"
        assert self._prefix is not None
        command = operator_command("finish", self._prefix, self._config.decision_topic)
        batch = 0 if batch_start is None else batch_start.next_batch_id
        return (  # writing it again would be another write
            f"end with their timeout, or before by {command}{why}. If that says that batch {batch} is committed, do"
            " not write it again"
        )

    def _left(self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None = None) -> str:
        """Abort what can be aborted, report the failed batch, and return what is left, in words."""
        if None in messages:  # else it was `commit` that failed, and that has reported the batch
            run = self._run_of(messages, batch_id)
            run.fail(SystemClock().wall_ms())
            self._hand_over(run, None, has_failed=True)
        finished = sum(message is not None for message in messages)
        again = "If it was not stopped, the error that Spark shows says why, and what to change."
        if self._prefix is not None:
            ended = self._abort(messages)
            return f"{finished} of {len(messages)} tasks had finished; their transactions {ended}. {again}"
        stays = f"; their rows stay in Kafka ({report_of(messages)})" if finished else ""
        return (
            f"{finished} of {len(messages)} tasks had finished{stays}. Nothing is lost: every row is written again when"
            f" this is run again. {again}"
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:
        """Write the rows of a task: Arrow batches, or Rows of a stream in PySpark 4.0. Returns once every row is
        acknowledged. Raises KafkaError if one is not, SchemaError for a row that cannot be written.
        """
        refuse_doubled_rows_in_task()
        watch = Stopwatch(SystemClock())
        task = None
        if self._batch_start is not None:
            task = ExactlyOnceTask.in_process(self._config, self._batch_start, self._task(self._batch_start))
        delivery = TaskDelivery(self._config, process_pool(), task)
        if self.takes_arrow:
            self._write_arrow(delivery, iterator)
        else:
            self._write_rows(delivery, iterator)
        outcome = None if task is None else task.outcome
        lineage_run = None if self.lineage is None else self.lineage.run_id
        ids = QueryIds.of_task()
        return TaskWritten(
            delivery.report,
            watch.began_ms,
            watch.now_ms(),
            outcome,
            self._began_ms,
            ids,
            lineage_run,
            self._config.batch_trace,
        )

    def _write_rows(self, delivery: TaskDelivery, rows: Iterator[Any]) -> None:
        from spark_kafka_sink.sink import row_interface  # only PySpark 4.0's tasks need it

        batches = row_interface.arrow_batches(rows)
        if batches is None:
            row_interface.write_rows(delivery, rows)
        else:
            self._write_arrow(delivery, batches)

    def _write_arrow(self, delivery: TaskDelivery, batches: Iterator[pa.RecordBatch]) -> None:
        write_all(delivery, batches)


class KafkaBatchWriter(_Writer, BatchInterface):
    """The writer of a batch write."""

    is_stream = False
    takes_arrow = has_arrow_writer(is_stream=False)

    def _task(self, batch_start: BatchStart) -> TaskIdentity:
        return batch_task(batch_start)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit, and log the report. Raises KafkaError if an exactly-once batch could not be committed, and
        TooManyDeadLettersError.
        """
        show_reports()
        self._commit(messages, "Write")

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Abort open transactions, and log what stays in Kafka."""
        show_reports()
        log.warning("Write failed: %s", self._left(messages))


class KafkaStreamWriter(_Writer, StreamInterface):
    """The writer of a streaming query."""

    is_stream = True
    takes_arrow = has_arrow_writer(is_stream=True)
    is_named_by_query = False
    """Whether the prefix is made of the query's name. Then Spark must have a default location of checkpoints."""

    def _task(self, batch_start: BatchStart) -> TaskIdentity:  # noqa: ARG002 - a stream's task knows its batch from Spark
        if self.is_named_by_query:
            check_default_location()
        return streaming_task()

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """Commit, and log the report. Raises KafkaError if an exactly-once batch could not be committed, and
        TooManyDeadLettersError.
        """
        show_reports()
        self._commit(messages, f"Batch {batchId}", batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """Abort open transactions, and log what stays in Kafka."""
        show_reports()
        log.warning("Batch %d%s failed or was stopped: %s", batchId, self._owner(), self._left(messages, batchId))

    def _owner(self) -> str:
        """Return what tells this query from others in the driver's log, as far as Spark tells it to a data source."""
        if self.query_name is not None:
            return f" of query {self.query_name!r}"
        if self._prefix is not None:
            return f" of {self._prefix}"
        return "" if self._config.topic is None else f" for topic {self._config.topic}"


def report_of(messages: Sequence[WriterCommitMessage | None]) -> WriteReport:
    """Return the summary of a batch from the messages of its tasks, None for tasks that did not finish. Its duration is
    from the first task's start to the last acknowledgement, by the times of day of their machines.
    """
    written = [message for message in messages if isinstance(message, TaskWritten)]
    rows = (row for message in written for row in report_rows(message.columns))
    started_ms = min((message.started_ms for message in written), default=0)
    ended_ms = max((message.ended_ms for message in written), default=0)
    return WriteReport.of(rows, max(0, ended_ms - started_ms) / 1000)  # a clock may be set back
