"""Spark's processes at chosen points: a driver that ends its whole Spark between two ends of transactions, and tasks
that stop and wait until the test kills their executor.

The package has no code for this: subclasses replace the source (killed_source.py) and the sink. They read environment
variables, which every process of a local Spark inherits from its driver.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, Decision, TaskOutcome
from spark_kafka_sink.sink.exactly_once.protocol import Committed, ExactlyOnceDriver
from spark_kafka_sink.sink.kafka_sink import KafkaSink

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

DIES_AT: Final = "KILLED_SPARK_DIES_AT"
"""Such as "commit 1": in a batch's commit, after the commit of one transaction. Or "begin 0": at the next start, before
it commits any transaction of the last decided batch.
"""
HOLDS: Final = "KILLED_SPARK_HOLDS"
"""A folder. A file with the name of a point stops the next task that comes to that point."""
POINTS: Final = ("rows", "prepared")
"""Points of a task: half a batch of rows is sent; all rows are acknowledged, and the driver has no report yet."""
_HOLD_S: Final = 120


def kill_session(leader: int) -> None:
    """Kill every process of a session; the caller last, if it belongs to the session."""
    own, session = os.getpid(), os.getsid(leader)
    for process in psutil.process_iter():
        try:
            if process.pid != own and os.getsid(process.pid) == session:
                os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended
            continue
    if os.getsid(0) == session:
        os.kill(own, signal.SIGKILL)


# ---- the driver ----------------------------------------------------------------------------------------------------


class KilledDriver(ExactlyOnceDriver):
    """Ends its Spark at the point of DIES_AT, in the first batch with more transactions than end before that."""

    _place = ""

    def begin(self, held: ProducerIdAndEpoch | None = None, known: Decision | None = None) -> BatchStart:
        self._place = "begin"
        return super().begin(held, known)

    def commit(self, outcomes: Sequence[TaskOutcome]) -> Committed:
        self._place = "commit"
        return super().commit(outcomes)

    def finish(self, driver: OpenTransaction, decision: Decision) -> list[OpenTransaction]:
        place, number = os.environ.get(DIES_AT, "nowhere 0").split()
        if self._place == place and len(decision.tasks) > int(number):
            for transaction in decision.transactions[: int(number)]:
                self._cluster.end([transaction], committed=True)
            kill_session(0)
        return super().finish(driver, decision)


# ---- tasks ---------------------------------------------------------------------------------------------------------


def hold(point: str) -> None:
    """Stop here if the test requests it. The file's new name has the process id. Raises TimeoutError without a kill."""
    if HOLDS not in os.environ:
        return
    point_file = Path(os.environ[HOLDS]) / point
    try:
        point_file.rename(point_file.with_name(f"{point}.{os.getpid()}"))
    except FileNotFoundError:
        return
    time.sleep(_HOLD_S)
    raise TimeoutError(f"held at {point!r} for {_HOLD_S} s, and no test killed this process")


def by_halves(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        half = batch.num_rows // 2
        if half:
            yield batch.slice(0, half)
            hold("rows")
        yield batch.slice(half)


class KilledSink(KafkaSink):
    """`KafkaSink` with tasks that stop. `session` makes its driver."""

    def _run_tasks(self, df: DataFrame, write_task: Any, report_ddl: str) -> list[dict[str, Any]]:
        def held_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            report = list(write_task(by_halves(batches)))
            hold("prepared")
            return iter(report)

        return super()._run_tasks(df, held_task, report_ddl)
