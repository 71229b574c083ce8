"""Events of OpenLineage: valid by its published schemas, with the facts of a batch, and without a secret."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openlineage.client.serde import Serde
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType
from support.lineage_receiver import check_event

from spark_kafka_sink.common.batch_report import BatchReport, WrittenPartition
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.sink.batch_run import NO_QUERY, BatchRun, QueryIds
from spark_kafka_sink.sink.lineage import LineageRun, run_of_format
from spark_kafka_sink.sink.lineage_events import run_event
from spark_kafka_sink.sink.lineage_facts import Dataset, LineageEvent, Parent
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.reports import report_of

VALUE = StructType(
    [
        StructField("id", LongType()),
        StructField("tags", ArrayType(StringType())),
        StructField("prices", MapType(StringType(), LongType())),
    ]
)
SCHEMA = StructType(
    [StructField("key", StringType()), StructField("value", VALUE), StructField("partition", LongType())]
)
OPTIONS = {"kafka.bootstrap.servers": "h1:9092,h2:9093", "topic": "orders", "value.format": "json"}
IDS = QueryIds("q-id", "r-id", 7, "totals")
REPORT = BatchReport(
    "complete",
    "exactly-once",
    1_000,
    2_500,
    query_id="q-id",
    run_id="r-id",
    batch_id=7,
    partitions=(WrittenPartition("orders", 0, 3, 30, 0, 2), WrittenPartition("orders", 1, 4, 45, 9, 12)),
    dead_letter_partitions=(WrittenPartition("orders-dead", 0, 1, 11, 5, 5),),
)
PARENT = Parent("air/flow", "dag.task", "7f4f5f0a-6d5c-4b31-8a43-1d2f4e9e5a01")
ROOT = Parent("airflow", "dag", "7f4f5f0a-6d5c-4b31-8a43-1d2f4e9e5a02")


def run_of_options(**options: str) -> LineageRun:
    run = run_of_format(SinkConfig.from_options(OPTIONS | options), SCHEMA, is_stream=True, query_name="totals")
    assert run is not None
    return run


def sent(run: LineageRun, report: BatchReport | None, ids: QueryIds = IDS) -> dict[str, Any]:
    event: dict[str, Any] = Serde.to_dict(run_event(LineageEvent(run, 1_500, ids, report)))
    check_event(event)
    return event


def test_start_names_job_topic_and_columns() -> None:
    run = replace(run_of_options(), inputs=(Dataset("file", "/in"), Dataset("kafka://h:1", "a")))
    event = sent(run, None)
    assert (event["eventType"], event["eventTime"]) == ("START", "1970-01-01T00:00:01.500+00:00")
    assert event["run"]["runId"] == run.run_id
    assert (event["job"]["namespace"], event["job"]["name"]) == ("default", "totals.kafka_sink.orders")
    job_type = event["job"]["facets"]["jobType"]
    assert (job_type["processingType"], job_type["integration"], job_type["jobType"]) == ("STREAMING", "SPARK", "JOB")
    assert [(each["namespace"], each["name"]) for each in event["inputs"]] == [("file", "/in"), ("kafka://h:1", "a")]
    (output,) = event["outputs"]
    assert (output["namespace"], output["name"], output["outputFacets"]) == ("kafka://h1:9092", "orders", {})
    key, value = output["facets"]["schema"]["fields"]  # `partition` is not in the topic
    assert (key["name"], key["type"]) == ("key", "string")
    assert (value["name"], value["type"]) == ("value", "struct")
    tags, prices = value["fields"][1:]
    assert [(each["name"], each["type"]) for each in value["fields"]] == [
        ("id", "bigint"),
        ("tags", "array"),
        ("prices", "map"),
    ]
    assert [(each["name"], each["type"]) for each in tags["fields"]] == [("_element", "string")]
    assert [(each["name"], each["type"]) for each in prices["fields"]] == [("key", "string"), ("value", "bigint")]


def test_complete_has_the_rows_and_bytes_of_each_topic() -> None:
    event = sent(run_of_options(), REPORT)
    assert event["eventType"] == "COMPLETE"
    statistics = {each["name"]: each["outputFacets"]["outputStatistics"] for each in event["outputs"]}
    assert {name: (each["rowCount"], each["size"]) for name, each in statistics.items()} == {
        "orders": (7, 75),
        "orders-dead": (1, 11),
    }
    assert "schema" not in event["outputs"][1]["facets"]  # a dead letter has other columns
    parameters = event["run"]["facets"]["executionParameters"]["parameters"]
    assert {each["key"]: each["value"] for each in parameters} == {
        "spark.streaming.query.id": "q-id",
        "spark.streaming.run.id": "r-id",
        "spark.streaming.batch.id": "7",
        "delivery.guarantee": "exactly-once",
        "outcome": "complete",
    }


def test_topics_of_rows_are_known_at_the_end() -> None:
    run = replace(run_of_options(), topic=None)
    assert sent(run, None)["outputs"] == []
    report = replace(REPORT, partitions=(WrittenPartition("b", 0, 1, 1, 0, 0), WrittenPartition("a", 0, 2, 2, 0, 1)))
    assert [each["name"] for each in sent(run, report)["outputs"]] == ["b", "a", "orders-dead"]


def test_skipped_batch_is_complete_without_rows() -> None:
    event = sent(run_of_options(), replace(REPORT, outcome="skipped", partitions=(), dead_letter_partitions=()))
    assert event["eventType"] == "COMPLETE"
    assert [each["outputFacets"]["outputStatistics"]["rowCount"] for each in event["outputs"]] == [0]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("a.b.OrdersError", "a.b.OrdersError. The log of the driver says more."),
        (None, "A task failed, or the query was stopped. The log of the driver says more."),
    ],
)
def test_failed_batch_names_the_class_of_its_error(error: str | None, message: str) -> None:
    event = sent(run_of_options(), replace(REPORT, outcome="failed", error=error))
    facet = event["run"]["facets"]["errorMessage"]
    assert (event["eventType"], facet["message"], facet["programmingLanguage"]) == ("FAIL", message, "PYTHON")


@pytest.mark.parametrize("root", [None, ROOT])
def test_parent_is_the_root_if_none_is_given(root: Parent | None) -> None:
    facet = sent(replace(run_of_options(), parent=PARENT, root=root), None, NO_QUERY)["run"]["facets"]["parent"]
    assert (facet["job"]["namespace"], facet["job"]["name"], facet["run"]["runId"]) == PARENT
    found = facet["root"]["job"]["namespace"], facet["root"]["job"]["name"], facet["root"]["run"]["runId"]
    assert found == (root or PARENT)


def test_no_event_has_a_secret() -> None:
    secret = "canary-Zx9"
    run = run_of_options(
        **{
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "PLAIN",
            "kafka.sasl.jaas.config": f'x.PlainLoginModule required username="u" password="{secret}";',
            "kafka.client.id": secret,
        }
    )
    failed = report_of(BatchRun(True, 1_000, IDS), KafkaTimeoutError(f"password={secret}"))
    for report in (None, REPORT, failed):
        assert secret not in str(sent(run, report))


def test_wrong_event_is_found_by_the_published_schemas() -> None:
    """The check itself: it refuses a facet and an event that are not as published."""
    event = Serde.to_dict(run_event(LineageEvent(run_of_options(), 1_500, IDS, REPORT)))
    event["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] = "7"
    with pytest.raises(Exception, match="is not of type 'integer'"):
        check_event(event)
    event = Serde.to_dict(run_event(LineageEvent(run_of_options(), 1_500, IDS, None)))
    event["run"]["runId"] = "no-uuid"
    with pytest.raises(Exception, match="is not a 'uuid'"):
        check_event(event)
