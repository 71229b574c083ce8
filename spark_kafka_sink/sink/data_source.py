"""The PySpark data source `kafka_sink`: `df.writeStream.format("kafka_sink")`, `df.write.format("kafka_sink")`.

Who runs what. In a planning worker of the driver Spark makes the source and its writer, once for each batch and before
any task: there the options and the schema are checked. The writer, pickled, goes to the tasks, whose `write` gets Arrow
batches. What `write` returns goes to `commit`, or to `abort`, in a worker of the driver again: in a stream on another
writer, freshly made, so that nothing but the tasks' messages comes from one side to the other.

Those workers' stderr is the driver's, and nobody sets up logging there: the report of each batch is shown at INFO by a
handler of ours, unless there is one already (spark.sql.pyspark.worker.logging.enabled).

Delivery is at least once: a task's rows are acknowledged when its `write` returns, so `commit` has nothing left to do
but to say so, and `abort` nothing to take back. Every method is called by one thread of its worker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType, TimestampNTZType

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.sink.columnar_writer import deliver_arrow
from spark_kafka_sink.sink.frame import TIMESTAMP, check_columns
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import process_pool
from spark_kafka_sink.sink.write_report import WriteReport, report_rows

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
_package_log = logging.getLogger("spark_kafka_sink")

_SPARKS_OWN: Final = frozenset({"checkpointlocation", "path"})
"""Options that Spark itself reads, or puts in, and hands on to the writer; lower-case."""


@dataclass(frozen=True, slots=True)
class TaskWritten(WriterCommitMessage):
    """What a task wrote; travels from `write` to `commit`."""

    rows: tuple[Mapping[str, Any], ...]
    """Of `write_report.REPORT_DDL`."""
    started_ms: int
    ended_ms: int


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
        """Asked for by a read alone. Raises ConfigError."""
        raise ConfigError('kafka_sink writes only. Topics are read by Spark\'s own source: format("kafka").')

    def writer(self, schema: StructType, overwrite: bool) -> KafkaBatchWriter:
        """Raises ConfigError or SchemaError; Spark then starts no task."""
        if overwrite:
            raise ConfigError(
                "Save mode Overwrite not allowed for Kafka. Allowed save modes are Append and ErrorIfExists (default):"
                ' a topic is only ever appended to; set mode("append").'
            )
        return KafkaBatchWriter(self._checked(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> KafkaStreamWriter:  # noqa: ARG002, N802 - Spark's
        """Raises ConfigError or SchemaError; Spark then starts no task. Output mode `complete` comes as `overwrite`:
        the whole result is appended anew with every batch, as by Spark's own sink.
        """
        return KafkaStreamWriter(self._checked(schema))

    def _checked(self, schema: StructType) -> SinkConfig:
        config = SinkConfig.from_options({key: v for key, v in self.options.items() if key.lower() not in _SPARKS_OWN})
        if isinstance(check_columns(schema, config.topic).get(TIMESTAMP), TimestampNTZType):
            # its hour depends on the session's time zone, which Spark does not tell a data source
            raise SchemaError(
                f"{TIMESTAMP} attribute unsupported type timestamp_ntz. {TIMESTAMP} must be a(n) timestamp or bigint:"
                f" CAST({TIMESTAMP} AS TIMESTAMP) reads it in the session's time zone"
            )
        return config


class _ArrowWriter:
    """What both writers do in a task."""

    def __init__(self, config: SinkConfig) -> None:
        self._config = config

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:
        """In a task: returns once every row is acknowledged. Raises KafkaError if one is not, SchemaError for a row
        that cannot be written.
        """
        clock = SystemClock()
        started_ms = clock.now_ms()
        delivery = deliver_arrow(self._config, process_pool(), iterator)
        rows = report_rows(delivery.tally.delivered, delivery.batches, delivery.retries)
        return TaskWritten(tuple(rows), started_ms, clock.now_ms())


class KafkaBatchWriter(_ArrowWriter, DataSourceArrowWriter):
    """Of a batch write."""

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Shows the report."""
        show_reports()
        log.info("Write: %s", report_of(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Says what stays."""
        show_reports()
        log.warning("Write failed: %s", _left(messages))


class KafkaStreamWriter(_ArrowWriter, DataSourceStreamArrowWriter):
    """Of a streaming query."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """Shows the report."""
        show_reports()
        log.info("Batch %d: %s", batchId, report_of(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """Says what stays."""
        show_reports()
        log.warning("Batch %d failed or was stopped: %s", batchId, _left(messages))


def report_of(messages: Sequence[WriterCommitMessage | None]) -> WriteReport:
    """The summary of a batch from what its tasks sent, None for those that did not finish. Its duration is from the
    first task's start to the last acknowledgement, by the clocks of their machines.
    """
    written = [message for message in messages if isinstance(message, TaskWritten)]
    rows = [row for message in written for row in message.rows]
    started_ms = min((message.started_ms for message in written), default=0)
    ended_ms = max((message.ended_ms for message in written), default=0)
    return WriteReport.of(rows, (ended_ms - started_ms) / 1000)


def _left(messages: Sequence[WriterCommitMessage | None]) -> str:
    finished = sum(message is not None for message in messages)
    stays = f"; what those wrote stays in Kafka ({report_of(messages)})" if finished else ""
    return (
        f"{finished} of {len(messages)} tasks had finished{stays}. Nothing is lost: every row is written again when"
        " this is run again. If nobody stopped it, the error that Spark shows says why, and what to change."
    )


def show_reports() -> None:
    """Let this worker show what the sink logs from INFO on: on stderr, where nothing is set up to show it otherwise."""
    if _package_log.level == logging.NOTSET:
        _package_log.setLevel(logging.INFO)
    if not _package_log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s kafka_sink: %(message)s", "%y/%m/%d %H:%M:%S")
        )
        _package_log.addHandler(handler)
