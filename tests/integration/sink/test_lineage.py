"""Lineage of real Spark jobs: an HTTP server receives what each way of writing sends, and each event is valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.fresh_process import run_script
from support.lineage_receiver import check_event, receiving
from support.pyspark_capabilities import FORMAT
from support.spark_fixture import SPARK_SINK_LOCK

from spark_kafka_sink.local import Admin, fetch_jars

pytestmark = FORMAT.needed
CANARY = "canary-Zx9Qw7"
PARENT = "air/flow/dag.task/7f4f5f0a-6d5c-4b31-8a43-1d2f4e9e5a01"
JOB = f"""
import json
import sys

from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink

servers, topic, copy, jars = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").appName("nightly").config("spark.ui.enabled", "false")
spark = builder.config("spark.jars", jars).getOrCreate()
options = {{"kafka.bootstrap.servers": servers, "topic": topic, "lineage.openlineage": "true"}}
sink = KafkaSink(options)
spark.range(10).selectExpr("string(id) AS value").coalesce(1).write.text("in")


def run(frame, name, **more):
    writer = frame.writeStream.queryName(name).option("checkpointLocation", name).trigger(availableNow=True)
    if more:
        writer = writer.foreachBatch(more["each"])
    else:
        writer = writer.format("kafka_sink").options(**options)
    writer.start().awaitTermination()


def refused(call):
    try:
        call()
    except Exception as error:
        assert "{CANARY}" in str(error), error
    else:
        raise AssertionError("this must fail")


files = spark.readStream.schema("value STRING").text("in")
broken = files.selectExpr("raise_error('{CANARY}') || value AS value")
run(files, "each", each=sink.write_batch)
run(files, "totals")
sink.write(spark.read.text("in"))
spark.read.text("in").write.format("kafka_sink").options(**options).mode("append").save()
refused(lambda: run(broken, "each-broken", each=sink.write_batch))
refused(lambda: run(broken, "totals-broken"))
kafka = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
kafka = kafka.option("startingOffsets", "earliest").load().select("key", "value")
run(kafka, "copied", each=KafkaSink(options | {{"topic": copy}}).write_batch)
spark.stop()
"""


def facts(event: dict[str, Any]) -> tuple[Any, ...]:
    statistics = [each["outputFacets"].get("outputStatistics", {}).get("rowCount") for each in event["outputs"]]
    inputs = [(each["namespace"], Path(each["name"]).name) for each in event["inputs"]]
    return event["eventType"], inputs, statistics


def test_each_way_of_writing_sends_its_begin_and_its_end(
    kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, copy = new_topic(1), new_topic(1)
    servers = kafka_broker.bootstrap_servers
    jars = ",".join(str(jar) for jar in fetch_jars(SPARK_SINK_LOCK))
    with receiving() as receiver:
        run_script(
            JOB,
            tmp_path,
            servers,
            topic,
            copy,
            jars,
            OPENLINEAGE_URL=receiver.url,
            OPENLINEAGE_API_KEY=CANARY,
            OPENLINEAGE_NAMESPACE="tests",
            OPENLINEAGE_PARENT_ID=PARENT,
        )
        events = receiver.events
    for event in events:
        check_event(event)
        assert event["job"]["namespace"] == "tests"
        assert event["run"]["facets"]["parent"]["run"]["runId"] == PARENT.rpartition("/")[2]
        assert CANARY not in json.dumps(event)
        assert {each["namespace"] for each in event["outputs"]} == {f"kafka://{servers.split(',')[0]}"}
    by_job: dict[str, list[Any]] = {}
    for event in events:
        by_job.setdefault(event["job"]["name"].removesuffix(f".kafka_sink.{topic}"), []).append(event)
    files = [("file", "in")]
    source = [(f"kafka://{servers.split(',')[0]}", topic)]
    assert {job: [facts(each) for each in found] for job, found in by_job.items()} == {
        "each": [("START", files, [None]), ("COMPLETE", files, [10])],
        "totals": [("START", [], [None]), ("COMPLETE", [], [10])],
        "nightly": [("START", files, [None]), ("COMPLETE", files, [10])],
        f"kafka_sink.{topic}": [("START", [], [None]), ("COMPLETE", [], [10])],
        "each-broken": [("START", files, [None]), ("FAIL", files, [0])],
        "totals-broken": [("START", [], [None]), ("FAIL", [], [0])],
        f"copied.kafka_sink.{copy}": [("START", source, [None]), ("COMPLETE", source, [40])],
    }
    for begin, end in by_job.values():
        assert begin["run"]["runId"] == end["run"]["runId"]
    assert len({event["run"]["runId"] for event in events}) == len(by_job)
    error = by_job["totals-broken"][1]["run"]["facets"]["errorMessage"]["message"]
    assert error == "A task failed, or the query was stopped. The log of the driver says more."
