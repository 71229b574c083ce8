"""Makes the run events of OpenLineage from the facts of lineage_facts.py. Needs the extra `openlineage`; imported only
by lineage_sender.py, in its thread.

An event has names, counts and times: no row, no option but `topic` and the first bootstrap server, and of an error only
its class, because a message may show a row or a setting.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import pyspark
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    error_message_run,
    execution_parameters_run,
    job_type_job,
    output_statistics_output_dataset,
    parent_run,
    processing_engine_run,
    schema_dataset,
)

from spark_kafka_sink.common.batch_report import COMPLETE, FAILED, SKIPPED, BatchReport
from spark_kafka_sink.common.version import SOFTWARE_NAME, VERSION
from spark_kafka_sink.sink.lineage_facts import Field, LineageEvent, RunFacts, sums_by_topic

PRODUCER: Final = f"pkg:pypi/{SOFTWARE_NAME}@{VERSION}"
"""A package URL: it names this release wherever its source is."""
_STATES: Final = {COMPLETE: RunState.COMPLETE, SKIPPED: RunState.COMPLETE, FAILED: RunState.FAIL}
_NO_CLASS: Final = "A task failed, or the query was stopped."
_SEE_LOG: Final = "The log of the driver says more."


def run_event(event: LineageEvent) -> RunEvent:
    """Return the event for OpenLineage's client. Raises ValueError for facts that its classes refuse."""
    run, report = event.run, event.report
    return RunEvent(
        eventType=RunState.START if report is None else _STATES[report.outcome],
        eventTime=datetime.fromtimestamp(event.time_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        producer=PRODUCER,
        run=Run(run.run_id, _run_facets(event)),
        job=Job(run.namespace, run.job, {"jobType": _job_type(run)}),
        inputs=[InputDataset(*each) for each in run.inputs],
        outputs=_outputs(run, report),
    )


def _job_type(run: RunFacts) -> Any:
    kind = "STREAMING" if run.is_stream else "BATCH"
    return job_type_job.JobTypeJobFacet(kind, "SPARK", "JOB", producer=PRODUCER)


def _run_facets(event: LineageEvent) -> dict[str, Any]:
    run, ids, report = event.run, event.ids, event.report
    facets: dict[str, Any] = {
        "processing_engine": processing_engine_run.ProcessingEngineRunFacet(
            pyspark.__version__, "spark", VERSION, producer=PRODUCER
        )
    }
    known = {
        "spark.streaming.query.id": ids.query_id,
        "spark.streaming.run.id": ids.run_id,
        "spark.streaming.batch.id": ids.batch_id,
        "delivery.guarantee": None if report is None else report.guarantee,
        "outcome": None if report is None else report.outcome,
    }
    if given := {key: str(value) for key, value in known.items() if value is not None}:
        facets["executionParameters"] = execution_parameters_run.ExecutionParametersRunFacet(
            [execution_parameters_run.ExecutionParameter(key=key, value=value) for key, value in given.items()],
            producer=PRODUCER,
        )
    if run.parent is not None:
        facets["parent"] = _parent(run)
    if report is not None and report.outcome == FAILED:
        message = f"{report.error}. {_SEE_LOG}" if report.error else f"{_NO_CLASS} {_SEE_LOG}"
        facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(message, "PYTHON", producer=PRODUCER)
    return facets


def _parent(run: RunFacts) -> Any:
    assert run.parent is not None
    root = run.root or run.parent
    return parent_run.ParentRunFacet(
        parent_run.Run(run.parent.run_id),
        parent_run.Job(run.parent.namespace, run.parent.name),
        parent_run.Root(parent_run.RootRun(root.run_id), parent_run.RootJob(root.namespace, root.name)),
        producer=PRODUCER,
    )


def _outputs(run: RunFacts, report: BatchReport | None) -> list[OutputDataset]:
    """Return the topics: that of the option, those that have records, and that of dead letters if it has some."""
    written = {} if run.topic is None else {run.topic: (0, 0)}
    if report is None:
        return [_output(run, topic, None, run.fields) for topic in written]
    written |= sums_by_topic(report.partitions)
    letters = sums_by_topic(report.dead_letter_partitions)
    return [
        *(_output(run, topic, counts, run.fields) for topic, counts in written.items()),
        *(_output(run, topic, counts, ()) for topic, counts in letters.items()),
    ]


def _output(run: RunFacts, topic: str, counts: tuple[int, int] | None, fields: tuple[Field, ...]) -> OutputDataset:
    """`counts`: records and bytes, as far as they are known."""
    facets: dict[str, Any] = {}
    if fields:
        facets["schema"] = schema_dataset.SchemaDatasetFacet([_field(each) for each in fields], producer=PRODUCER)
    statistics: dict[str, Any] = {}
    if counts is not None:
        statistics["outputStatistics"] = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            *counts, producer=PRODUCER
        )
    return OutputDataset(run.cluster, topic, facets=facets, outputFacets=statistics)


def _field(field: Field) -> Any:
    inner = [_field(each) for each in field.fields]
    return schema_dataset.SchemaDatasetFacetFields(name=field.name, type=field.type, fields=inner)
