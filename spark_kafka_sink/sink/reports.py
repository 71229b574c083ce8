"""Makes the `BatchReport` of a batch, and hands it to those who want it: the log, a function, the listeners.

Imported only on a driver where somebody wants reports. It never makes a batch fail: a batch that is written stays
written, whatever its report meets. Called by the thread that runs the batch, after the batch has ended.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark_kafka_sink.common.batch_report import COMPLETE, FAILED, SKIPPED, BatchReport, WrittenPartition
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.producer.writes import Delivered
from spark_kafka_sink.sink.batch_run import BATCH_ID, BatchRun, QueryIds
from spark_kafka_sink.sink.options import AT_LEAST_ONCE, EXACTLY_ONCE
from spark_kafka_sink.sink.running_query import context_of_thread, query_id_of, running_query
from spark_kafka_sink.sink.worker import write_whole

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OnReport = Callable[[BatchReport], object]

log = logging.getLogger(__name__)
json_log: Final = logging.getLogger("spark_kafka_sink.report")
"""Of report.log: each message is the JSON of one report, and nothing else."""

SUFFIX: Final = ".json"
MOST_FILES: Final = 1_000
"""Reports that may wait for one listener. It reads them after every batch, unless it was removed from Spark."""
_numbers: Final = itertools.count()


# ---- from a run to its report ----------------------------------------------------------------------------------------


def report_of(run: BatchRun, error: BaseException | None = None, *, has_failed: bool = False) -> BatchReport:
    """Return the report of a run that has ended. `has_failed`: also without a known `error`."""
    has_failed = has_failed or error is not None
    is_skipped = run.skipped_records is not None and not has_failed
    rows = () if has_failed and run.is_exactly_once else run.rows
    places: dict[TopicPartition, Delivered] = {}
    letters: dict[TopicPartition, Delivered] = {}
    totals: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for row in rows:
        if row["topic"] is None:
            facts = json.loads(row["task"])
            totals.update(tasks=1, batches=row["batches"], retries=row["retries"])
            kinds.update(facts["kinds"])
            spent.update(facts["durations_ms"])
        elif row["dead_letters"]:
            _add(letters, row, row["dead_letters"], row["dead_letter_bytes"])
        else:
            _add(places, row, row["records"], row["bytes"])
    return BatchReport(
        outcome=FAILED if has_failed else SKIPPED if is_skipped else COMPLETE,
        guarantee=EXACTLY_ONCE if run.is_exactly_once else AT_LEAST_ONCE,
        began_ms=run.began_ms,
        ended_ms=run.ended_ms,
        error=None if error is None else f"{type(error).__module__}.{type(error).__qualname__}",
        query_id=run.ids.query_id,
        query_name=run.ids.query_name,
        run_id=run.ids.run_id,
        batch_id=run.ids.batch_id,
        tasks=totals["tasks"],
        batches=totals["batches"],
        retries=totals["retries"],
        skipped_records=run.skipped_records or 0 if is_skipped else 0,
        partitions=_written(places),
        dead_letter_partitions=_written(letters),
        dead_letter_kinds=dict(sorted(kinds.items())),
        durations_ms=dict(run.durations_ms),
        task_durations_ms=dict(spent),
    )


def _add(sums: dict[TopicPartition, Delivered], row: Mapping[str, Any], records: int, size: int) -> None:
    found = sums.setdefault(TopicPartition(row["topic"], row["partition"]), Delivered())
    found.records += records
    found.size += size
    found.without_offset += row["without_offset"]
    found.last_offset = max(found.last_offset, row["last_offset"])
    first = row["first_offset"]
    if first >= 0 and (first < found.first_offset or found.first_offset < 0):
        found.first_offset = first


def _written(sums: Mapping[TopicPartition, Delivered]) -> tuple[WrittenPartition, ...]:
    return tuple(
        WrittenPartition(*place, each.records, each.size, each.first_offset, each.last_offset, each.without_offset)
        for place, each in sorted(sums.items())
    )


def ids_of(df: DataFrame, batch_id: int | None) -> QueryIds:
    """Return what Spark says of the query that this thread belongs to. `batch_id`: that of foreachBatch, which is all
    that is known if Spark cannot be asked. Raises nothing.
    """
    try:
        return _asked_ids(df, batch_id)
    except Exception:
        log.info("Spark does not say which query this batch belongs to", exc_info=True)
        return QueryIds(batch_id=batch_id)


def _asked_ids(df: DataFrame, batch_id: int | None) -> QueryIds:
    context = context_of_thread(df.sparkSession)
    query_id = None if context is None else query_id_of(context)
    if context is None or not query_id:
        return QueryIds(batch_id=batch_id)
    if batch_id is None and (text := context.getLocalProperty(BATCH_ID)):
        batch_id = int(text)
    query = running_query(df, context)
    if query is None:  # it is being stopped
        return QueryIds(query_id, None, batch_id)
    return QueryIds(query_id, query.runId().toString(), batch_id, query.name())


# ---- to those who want it --------------------------------------------------------------------------------------------


def hand_over(
    make: Callable[[], BatchReport],
    *,
    is_logged: bool,
    on_report: OnReport | None = None,
    folder: Path | None = None,
    on_end: Iterable[OnReport] = (),
) -> None:
    """Make the report and hand it over: to each `on_end` of the run, to the log, to the function, to each listener that
    waits at `folder`. Whatever they raise is logged.
    """
    try:
        report = make()
        for each in on_end:
            each(report)
        if is_logged:
            json_log.info("%s", report.to_json())
        if folder is not None:
            _leave(report, folder)
        if on_report is not None:
            on_report(report)
    except Exception:
        log.exception("The report of a batch was not handed over; what the batch wrote does not change")


def _leave(report: BatchReport, folder: Path) -> None:
    """Leave the report for each listener, in its folder. Raises OSError."""
    name = f"{report.ended_ms:016d}-{os.getpid()}-{next(_numbers):06d}{SUFFIX}"
    for box in sorted(folder.iterdir()):
        try:
            if len(os.listdir(box)) >= MOST_FILES:
                log.warning(
                    "%d reports wait for a listener, which gets no more until it reads them: %s", MOST_FILES, box
                )
                continue
            write_whole(box / name, report.to_json())
        except FileNotFoundError:  # the listener was closed meanwhile
            continue


def left_reports(box: Path) -> Iterator[BatchReport]:
    """Yield each report that waits in a listener's folder, the oldest first. A report is deleted when it is yielded.
    What is no report is logged and deleted. Raises OSError.
    """
    for path in sorted(box.glob(f"*{SUFFIX}")):
        try:
            content = path.read_bytes()
            path.unlink()
        except FileNotFoundError:  # another thread has got it
            continue
        try:
            report = BatchReport.from_json(content.decode())
        except ValueError:
            log.exception("%s", path.name)
            continue
        yield report
