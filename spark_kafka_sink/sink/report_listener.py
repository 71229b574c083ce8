"""`ReportListener`: hands the reports of `format("kafka_sink")` to a function in the user's own process.

Spark runs the driver's part of a Python data source in a worker, which has no way to the user's process: its progress
event takes one number from it. But worker, JVM and the user's process are on one machine and have one directory, the
application's own local one, which Spark deletes at the application's end. A listener makes a folder in it. If there is
one, the worker leaves each report there, after the commit, as a file; the listener reads and deletes it when Spark's
event of the batch comes. Without a listener nothing is written.
"""

from __future__ import annotations

from spark_kafka_sink.sink.pyspark_versions import OLDEST_WITH_FORMAT, PYSPARK, is_older

# isort: split

import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from spark_kafka_sink.common.batch_report import BatchReport
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.sink.reports import OnReport, left_reports
from spark_kafka_sink.sink.worker import REPORTS

log = logging.getLogger(__name__)


class ReportListener(StreamingQueryListener):
    """Calls `on_report` with the `BatchReport` of each batch that this application writes by `format("kafka_sink")`:

        spark.streams.addListener(ReportListener(print))

    A stream's report comes with Spark's event of the same micro-batch; that of a failed batch when the query has
    ended. Spark has no event for a batch write, `df.write.format("kafka_sink")`: its report comes with the next event,
    or at once by `deliver`. Each report comes once, and from every session of the application.

    `on_report` runs in the thread of Spark's events, so it delays no batch. What it raises is logged. Raises
    ConfigError where there is no SparkContext: make the SparkSession first. On Spark Connect the driver is another
    machine, so there are no reports; use the option report.log=true there.
    """

    def __init__(self, on_report: OnReport) -> None:
        if is_older(PYSPARK, OLDEST_WITH_FORMAT):
            raise ConfigError(
                f'ReportListener is for format("kafka_sink"), which PySpark {PYSPARK} does not have. Use'
                " KafkaSink(options, on_report=...)."
            )
        self._on_report = on_report
        self._lock = threading.Lock()
        folder = _local_directory() / REPORTS
        folder.mkdir(mode=0o700, exist_ok=True)
        self._box: Path | None = Path(tempfile.mkdtemp(dir=folder))
        """Its name is no other listener's."""

    def deliver(self) -> int:
        """Hand over the reports that wait, and return how many there were. Raises OSError."""
        with self._lock:
            waiting = iter(()) if self._box is None else left_reports(self._box)
        count = 0
        while (report := self._next(waiting)) is not None:
            count += 1
            try:
                self._on_report(report)
            except Exception:
                log.exception("on_report raised; what the batch wrote does not change")
        return count

    def _next(self, waiting: Iterator[BatchReport]) -> BatchReport | None:
        """Return the next report. Only this one is lost if the thread is interrupted; the others still wait."""
        with self._lock:
            return next(waiting, None)

    def close(self) -> None:
        """Deliver what waits, and want no more reports. Call it after `spark.streams.removeListener`. Without it Spark
        deletes the listener's folder at the end of the application.
        """
        self.deliver()
        with self._lock:
            box, self._box = self._box, None
            if box is not None:
                shutil.rmtree(box, ignore_errors=True)  # Spark may have deleted it already

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's
        """Called by Spark."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: ARG002, N802 - Spark's
        """Called by Spark after each micro-batch."""
        self._deliver()

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: ARG002, N802 - Spark's
        """Called by Spark when a query waits for data."""
        self._deliver()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: ARG002, N802 - Spark's
        """Called by Spark when a query has ended."""
        self._deliver()

    def _deliver(self) -> None:
        try:
            self.deliver()
        except OSError:  # the application ends, and its directory is gone
            log.debug("The reports could not be read", exc_info=True)


def _local_directory() -> Path:
    """Return the first local directory of the application, as Spark names it to its Python workers in
    SPARK_LOCAL_DIRS.
    """
    context = SparkContext._active_spark_context
    if context is None or context._jvm is None:
        raise ConfigError(
            "ReportListener needs the SparkContext of this process, and there is none: make the SparkSession first. On"
            " Spark Connect the driver is another machine: use the option report.log=true."
        )
    try:
        # py4j cannot call a method of SparkEnv from Spark 4.3 on: one of them has a type that PySpark does not ship.
        field = context._jvm.java.lang.Class.forName("org.apache.spark.SparkEnv").getDeclaredField("blockManager")
        field.setAccessible(True)
        manager = field.get(context._jsc.sc().env())
        return Path(str(manager.diskBlockManager().localDirs()[0].getPath()))
    except Py4JError as error:
        raise ConfigError(
            "ReportListener cannot ask this release of Spark for its local directory: use the option report.log=true."
        ) from error
