"""Declarative Pipelines into `create_sink(format="kafka_sink")`: both guarantees, two flows, kills, full refreshes."""

from __future__ import annotations

import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.pipelines.conftest import FLOWS, ROOT, Pipeline, Run
from support.exactly_once_streams import check_nothing_open, open_transactions, read_visible, visible_values
from support.killed_spark import DIES_AT
from support.librdkafka import text_of

from spark_kafka_sink.admin.transaction_values import TransactionState
from spark_kafka_sink.local import Admin
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster, connect
from spark_kafka_sink.sink.exactly_once.messages import Decision
from spark_kafka_sink.sink.options import SinkConfig

MakePipeline = Callable[[dict[str, str]], Pipeline]


@pytest.fixture
def options(kafka_broker: Admin, new_topic: Callable[..., str]) -> dict[str, str]:
    """Of a sink into a new topic of three partitions."""
    return {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": new_topic(partitions=3)}


@pytest.fixture
def exactly_once(options: dict[str, str]) -> dict[str, str]:
    return options | {"delivery.guarantee": "exactly-once"}


def visible(pipeline: Pipeline) -> list[int]:
    return visible_values(pipeline.options["kafka.bootstrap.servers"], pipeline.options["topic"])


def last_decision(pipeline: Pipeline, flow: str, version: int = 0) -> Decision | None:
    config = SinkConfig.from_options(pipeline.options)
    with connect(config.producer) as coordinator:
        return KafkaDriverCluster(coordinator, config, pipeline.prefix(flow, version)).last_decision()


def check_all_is_committed(pipeline: Pipeline, version: int = 0) -> None:
    for flow in FLOWS:
        assert last_decision(pipeline, flow, version).is_finished
        check_nothing_open(pipeline.options["kafka.bootstrap.servers"], pipeline.prefix(flow, version))


def test_example_writes_each_order_once(
    kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, run: Run
) -> None:
    topic = new_topic(partitions=3)
    example = shutil.copytree(ROOT / "examples" / "pipelines", tmp_path / "example")
    spec = example / "spark-pipeline.yml"
    text, changes = re.subn(
        "^storage: .*$", f"storage: file://{tmp_path}/storage", spec.read_text(), flags=re.MULTILINE
    )
    assert changes == 1
    spec.write_text(text)
    code, said = run(example, KAFKA_BOOTSTRAP_SERVERS=kafka_broker.bootstrap_servers, ORDERS_TOPIC=topic)
    assert code == 0, said
    written = Counter(text_of(message) for message in read_visible(kafka_broker.bootstrap_servers, topic))
    assert len(written) == 20
    assert set(written.values()) == {1}
    assert '{"number":0,"customer":"ada","amount":4.5}' in written


@pytest.mark.slow
def test_two_flows_write_each_row_once_over_two_runs(make_pipeline: MakePipeline, exactly_once: dict[str, str]) -> None:
    """Two checkpoints make two prefixes, so neither flow fences the other. The second run goes on after the first."""
    pipeline = make_pipeline(exactly_once)
    rows = [row for number in range(6) for row in pipeline.write_file(FLOWS[number % 2], number)]
    pipeline.run()
    assert visible(pipeline) == rows
    assert [last_decision(pipeline, flow).batch_id for flow in FLOWS] == [2, 2]
    rows += pipeline.write_file("second", 6)
    pipeline.run()
    assert visible(pipeline) == rows
    assert [last_decision(pipeline, flow).batch_id for flow in FLOWS] == [2, 3]
    check_all_is_committed(pipeline)


def kill_between_decision_and_commit(pipeline: Pipeline, folder: Path) -> str:
    """Run the pipeline, and kill all of its processes when a flow has decided its first batch and committed nothing.
    Return the flow.

    Spark finds another module of the name `pyspark_kafka_sink` first, which has the source that kills.
    """
    folder.mkdir()
    (folder / "pyspark_kafka_sink.py").write_text(
        "from support.killed_source import KilledSource\n"
        "class DefaultSource(KilledSource):\n"
        "    name = classmethod(lambda cls: 'kafka_sink')\n"
    )
    path = ":".join(map(str, (folder, ROOT, ROOT / "tests")))
    code, said = pipeline.finish(PYTHONPATH=path, **{DIES_AT: "commit 0"})
    assert code == -signal.SIGKILL, said
    config = SinkConfig.from_options(pipeline.options)
    undone = []
    for flow in FLOWS:
        decision = last_decision(pipeline, flow)
        if decision is not None and not decision.is_finished:
            ids = [transaction.transactional_id for transaction in decision.transactions]
            with connect(config.producer) as coordinator:
                found = KafkaDriverCluster(coordinator, config, pipeline.prefix(flow)).describe(ids)
            assert {each.state for each in found.values()} == {TransactionState.ONGOING}
            undone.append(flow)
    assert undone, "no flow has decided a batch"
    return undone[0]


@pytest.mark.slow
def test_run_after_a_kill_commits_the_decided_batch_once(
    make_pipeline: MakePipeline, exactly_once: dict[str, str], tmp_path: Path
) -> None:
    pipeline = make_pipeline(exactly_once)
    rows = [row for number in range(4) for row in pipeline.write_file(FLOWS[number % 2], number)]
    kill_between_decision_and_commit(pipeline, tmp_path / "killer")
    pipeline.run()
    assert visible(pipeline) == rows
    check_all_is_committed(pipeline)


@pytest.mark.slow
def test_full_refresh_writes_each_row_a_second_time(make_pipeline: MakePipeline, exactly_once: dict[str, str]) -> None:
    """Each flow gets a new checkpoint, and so another prefix: nothing is fenced, and nothing is skipped."""
    pipeline = make_pipeline(exactly_once)
    rows = pipeline.write_file("first", 0) + pipeline.write_file("second", 1)
    pipeline.run()
    pipeline.run("--full-refresh-all")
    assert visible(pipeline) == sorted(rows * 2)
    check_all_is_committed(pipeline, version=1)
    more = pipeline.write_file("first", 2)
    pipeline.run()
    assert visible(pipeline) == sorted(rows * 2 + more)


@pytest.mark.slow
def test_full_refresh_after_a_kill_leaves_the_decided_batch_open(
    make_pipeline: MakePipeline, exactly_once: dict[str, str], tmp_path: Path
) -> None:
    """The new prefixes do not know of the old ones. So readers wait for the timeout, or for an operator: `finish` for
    the flow that had decided a batch, `abort` for the other one.
    """
    pipeline = make_pipeline(exactly_once)
    rows = [row for number in range(2) for row in pipeline.write_file(FLOWS[number % 2], number)]
    killed = kill_between_decision_and_commit(pipeline, tmp_path / "killer")
    pipeline.run("--full-refresh-all")
    check_all_is_committed(pipeline, version=1)
    servers, prefix = pipeline.options["kafka.bootstrap.servers"], pipeline.prefix(killed)
    assert open_transactions(servers, prefix)
    pipeline.operate("finish", prefix)
    for flow in FLOWS:
        if flow != killed:
            pipeline.operate("abort", pipeline.prefix(flow))
        assert open_transactions(servers, pipeline.prefix(flow)) == []
    found = Counter(visible(pipeline))
    assert set(found) == set(rows)
    assert set(found.values()) <= {1, 2}


@pytest.mark.slow
def test_two_flows_at_least_once_leave_out_no_row(make_pipeline: MakePipeline, options: dict[str, str]) -> None:
    pipeline = make_pipeline(options)
    rows = pipeline.write_file("first", 0) + pipeline.write_file("second", 1) + pipeline.write_file("second", 2)
    said = pipeline.run()
    assert set(visible(pipeline)) == set(rows)
    assert "Batch 0: 40 records" in said


@pytest.mark.slow
def test_one_prefix_for_two_flows_is_refused(make_pipeline: MakePipeline, exactly_once: dict[str, str]) -> None:
    prefix = f"one-of-{exactly_once['topic']}"
    pipeline = make_pipeline(exactly_once | {"transactional.id.prefix": prefix})
    rows = [row for number in range(6) for row in pipeline.write_file(FLOWS[number % 2], number)]
    code, said = pipeline.finish()
    assert code == 1, said
    assert prefix in said
    found = visible(pipeline)
    assert len(found) == len(set(found)), "rows are doubled"
    assert len(found) < len(rows)
