"""The names of a query: a batch that it wrote under one prefix is not written again under an earlier one."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.faults import Proceed
from support.session_bench import CONFIG, SessionBench

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, ProtocolError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.partitioning import partition_for_key
from spark_kafka_sink.sink.exactly_once import query_names
from spark_kafka_sink.sink.exactly_once.cluster import DECISION_PARTITIONS, KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, Decision, TaskOutcome, first_use_key, to_record
from spark_kafka_sink.sink.exactly_once.operator import Operator
from spark_kafka_sink.sink.exactly_once.query_names import (
    QueryBatch,
    QueryNames,
    check_name,
    is_names_key,
    names_key,
)
from spark_kafka_sink.sink.exactly_once.session import StreamBatch, session


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SessionBench:
    return SessionBench(request.param, monkeypatch)


def operator(bench: SessionBench) -> Operator:
    return Operator(bench.coordinator, CONFIG, io.StringIO(), lambda: 0)


def adopt(bench: SessionBench, prefix: str) -> None:
    operator(bench).adopt(prefix)


def names(bench: SessionBench) -> Mapping[str, int]:
    return KafkaDriverCluster(bench.coordinator, CONFIG, "any").query_names("q").began


def test_batch_written_under_a_later_prefix_is_refused_under_the_earlier_one(bench: SessionBench) -> None:
    """Bug: a query that came back to an earlier prefix wrote the batch that Spark had not logged twice."""
    bench.run(0, prefix="P")
    adopt(bench, "Q")
    bench.run(1, "run 2", prefix="Q")
    text = "Batch 1 of query q was written under transactional.id.prefix='Q', and under 'P' it would be written twice."
    for run_id in ("run 3", "run 4"):
        with pytest.raises(IllegalStateError, match=re.escape(text)) as refused:
            bench.run(1, run_id, prefix="P")
    assert "transactions forget --prefix=P" in str(refused.value)
    assert bench.values() == ["row 0", "row 1"]
    bench.run(1, "run 5", prefix="Q")
    bench.run(2, "run 5", prefix="Q")
    assert bench.values() == ["row 0", "row 1", "row 2"]


def test_later_prefix_is_found_if_an_older_leader_does_not_know_it(bench: SessionBench) -> None:
    """Bug: a leader that was frozen, or cut off from its controllers, answered with its own older end."""
    bench.run(0, prefix="P")
    place = TopicPartition(CONFIG.decision_topic, partition_for_key(names_key("q"), DECISION_PARTITIONS))
    end = bench.cluster.log(*place).next_offset
    adopt(bench, "Q")
    bench.run(1, "run 2", prefix="Q")
    assert bench.cluster.log(*place).next_offset > end

    def older(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        (topic,) = exchange.request.topics
        is_asked = [each.partition_index for each in topic.partitions] == [place.partition]
        hook = faults.older_end(place.topic, end if is_asked and next(answers, False) else 10**9)
        return hook(cluster, exchange, proceed)

    answers = iter([True] * 3)
    bench.cluster.on(ApiKey.LIST_OFFSETS, older, times=None)
    with pytest.raises(IllegalStateError, match=r"Batch 1 of query q was written under .*'Q'"):
        bench.run(1, "run 3", prefix="P")
    assert next(answers, None) is None
    assert bench.values() == ["row 0", "row 1"]


def test_query_stopped_between_two_batches_goes_back_to_a_prefix(bench: SessionBench) -> None:
    bench.run(0, prefix="P")
    adopt(bench, "Q")
    bench.run(1, "run 2", prefix="Q")
    bench.run(2, "run 3", prefix="P")
    bench.run(3, "run 3", prefix="P")
    assert names(bench) == {"P": 2, "Q": 1}
    with pytest.raises(IllegalStateError, match=r"Batch 3 of query q was written under .*='P'"):
        bench.run(3, "run 4", prefix="Q")
    bench.run(4, "run 5", prefix="Q")
    assert bench.values() == [f"row {batch_id}" for batch_id in range(5)]


def test_batch_that_failed_under_the_earlier_prefix_is_refused_there_after_the_later_one(bench: SessionBench) -> None:
    """Bug: the query seemed to have begun under both prefixes with this batch, as two sinks of a foreachBatch do. So it
    wrote the batch again under the earlier one.
    """
    bench.run(0, prefix="P")
    adopt(bench, "Q")
    bench.run(1, "run 2", prefix="Q")
    with pytest.raises(RuntimeError, match="a task died"):
        session("P").run(CONFIG, StreamBatch("q", "run 3", 2), died)
    bench.run(2, "run 4", prefix="Q")
    with pytest.raises(IllegalStateError, match=r"Batch 2 of query q was written under .*='Q'"):
        bench.run(2, "run 5", prefix="P")
    assert bench.values() == ["row 0", "row 1", "row 2"]


def test_adopted_prefix_does_not_write_a_batch_that_spark_has_not_logged(bench: SessionBench) -> None:
    """Bug: `adopt` let a query write the batch again that it had written under the earlier prefix, if it was killed
    before Spark logged it. The same happened if the first batch under the new prefix failed.
    """
    bench.run(0, prefix="P")
    bench.run(1, prefix="P")  # and Spark dies
    adopt(bench, "Q")
    with pytest.raises(IllegalStateError, match=r"Batch 1 of query q was written under .*='P'") as refused:
        bench.run(1, "run 2", prefix="Q")
    assert "transactions forget --prefix=Q" in str(refused.value)
    bench.run(1, "run 3", prefix="P")
    with pytest.raises(RuntimeError, match="a task died"):
        session("Q").run(CONFIG, StreamBatch("q", "run 4", 2), died)
    bench.run(2, "run 5", prefix="P")
    with pytest.raises(IllegalStateError, match=r"Batch 2 of query q was written under .*='P'"):
        bench.run(2, "run 6", prefix="Q")
    bench.run(3, "run 7", prefix="Q")
    assert bench.values() == [f"row {batch_id}" for batch_id in range(4)]


def test_freed_prefix_writes_a_batch_that_was_written_under_another(bench: SessionBench) -> None:
    """The operator has seen that this sink's topics do not have it: another sink of the foreachBatch wrote it."""
    bench.run(0, prefix="P")
    bench.run(1, prefix="P")
    adopt(bench, "Q")
    with pytest.raises(IllegalStateError, match="was written under"):
        bench.run(1, "run 2", prefix="Q")
    operator(bench).forget("Q")
    bench.run(1, "run 3", prefix="Q")
    bench.run(2, "run 3", prefix="Q")
    assert bench.values() == ["row 0", "row 1", "row 1", "row 2"]


def test_new_prefix_does_not_write_batch_0_again(bench: SessionBench) -> None:
    """Bug: batch 0 needs no `adopt`, so a query whose prefix was changed wrote it twice."""
    bench.run(0, prefix="P")
    with pytest.raises(IllegalStateError, match=r"Batch 0 of query q was written under .*='P'"):
        bench.run(0, "run 2", prefix="Q")
    assert bench.values() == ["row 0"]


def test_freed_prefix_begins_anew(bench: SessionBench) -> None:
    """An operator has seen that the batch is not in the topics of this sink."""
    bench.run(0, prefix="P")
    adopt(bench, "Q")
    bench.run(1, "run 2", prefix="Q")
    operator(bench).forget("P")
    bench.run(1, "run 3", prefix="P")
    assert names(bench) == {"P": 1, "Q": 1}
    assert bench.values() == ["row 0", "row 1", "row 1"]
    bench.run(2, "run 3", prefix="P")
    bench.run(2, "run 4", prefix="P")
    assert bench.values()[3:] == ["row 2"]


@pytest.mark.parametrize("silent_until", [1, 4])
def test_two_sinks_of_a_foreach_batch_do_not_hinder_each_other(bench: SessionBench, silent_until: int) -> None:
    """The second one may have no rows for long, and Spark may die between the two."""
    bench.run(0, prefix="P")
    bench.run(0, prefix="rare")
    for batch_id in range(1, silent_until):
        bench.run(batch_id, f"run {batch_id}", prefix="P")
    bench.run(silent_until, "dies after P", prefix="P")
    bench.run(silent_until, "again", prefix="P")
    bench.run(silent_until, "again", prefix="rare")
    bench.run(silent_until + 1, "again", prefix="P")
    assert names(bench) == {"P": 0, "rare": 0}
    assert len(bench.values()) == silent_until + 4


def test_sinks_in_threads_may_begin_in_another_order_after_a_crash(bench: SessionBench) -> None:
    """One has written batch 0, and the other one had only begun it."""
    bench.run(0, prefix="P")
    with pytest.raises(RuntimeError, match="a task died"):
        session("Q").run(CONFIG, StreamBatch("q", "run 1", 0), died)
    bench.run(0, "run 2", prefix="Q")
    bench.run(0, "run 2", prefix="P")
    assert bench.values() == ["row 0", "row 0"]


def died(_start: BatchStart, _batch_id: int) -> NoReturn:
    raise RuntimeError("a task died")


def test_sink_added_to_a_foreach_batch_does_not_hinder_the_others(bench: SessionBench) -> None:
    bench.run(0, prefix="P")
    adopt(bench, "added")
    for batch_id in (1, 2):
        bench.run(batch_id, "run 2", prefix="added")
        bench.run(batch_id, "run 2", prefix="P")
    bench.run(2, "run 3", prefix="added")
    bench.run(2, "run 3", prefix="P")
    assert bench.values() == ["row 0", "row 1", "row 1", "row 2", "row 2"]


def test_sink_added_beside_one_without_rows_does_not_hinder_it(bench: SessionBench) -> None:
    """Bug: Spark died after the new sink had written its first batch, and the older sink, which had no rows for some
    batches, was refused at the next start: its query seemed to have got another prefix.
    """
    bench.run(0, prefix="rare")
    adopt(bench, "added")
    for run_id in ("run 2", "run 3"):
        session("rare").run(CONFIG, StreamBatch("q", run_id, 1), without_rows)
        bench.run(1, run_id, prefix="added")
    bench.run(2, "run 3", prefix="rare")
    bench.run(2, "run 3", prefix="added")
    assert names(bench) == {"rare": 1, "added": 1}
    assert bench.values() == ["row 0", "row 1", "row 2", "row 2"]


def without_rows(batch_start: BatchStart, batch_id: int) -> list[TaskOutcome]:
    return [TaskOutcome(batch_start, batch_id, "q", 0, 0, None)]


def test_copy_of_a_checkpoint_for_another_topic_does_not_hinder_the_query(bench: SessionBench) -> None:
    """The copy has the query's id and a prefix of its own, and may be ahead."""
    bench.run(0, prefix="P")
    adopt(bench, "copy")
    bench.run(1, "run 2", prefix="copy", config=replace(CONFIG, topic="u"))
    bench.run(1, "run 3", prefix="P")
    assert bench.values() == ["row 0", "row 1", "row 1"]


def test_sink_whose_rows_name_their_topics_may_have_written_to_any(bench: SessionBench) -> None:
    bench.run(0, prefix="P")
    adopt(bench, "Q")
    bench.run(1, "run 2", prefix="Q", config=replace(CONFIG, topic=None))
    with pytest.raises(IllegalStateError, match="Batch 1 of query q was written under"):
        bench.run(1, "run 3", prefix="P")


def test_names_are_asked_for_once_in_each_run(bench: SessionBench) -> None:
    bench.run(0)
    bench.run(1)
    bench.run(2, "run 2")
    before = len(bench.asked(ApiKey.FETCH))
    bench.run(3, "run 2")
    assert len(bench.asked(ApiKey.FETCH)) == before


def test_run_that_begins_with_a_skipped_batch_still_notes_its_prefix(bench: SessionBench) -> None:
    bench.run(0, prefix="P")
    adopt(bench, "Q")
    bench.run(1, "run 2", prefix="Q")
    bench.run(2, "run 3", prefix="P")
    operator(bench).forget("P")
    bench.run(3, "run 4", prefix="P")
    bench.run(3, "run 5", prefix="P")
    bench.run(4, "run 5", prefix="P")
    assert names(bench) == {"P": 3, "Q": 1}


def test_names_of_an_earlier_release_began_before_the_record(bench: SessionBench) -> None:
    bench.run(0)
    KafkaDriverCluster(bench.coordinator, CONFIG, "orders").write_query_names("q", QueryNames({}))
    bench.run(1, "run 2")
    assert names(bench) == {"orders": 0}


def test_names_are_read_behind_the_dead_driver_of_another_query(bench: SessionBench) -> None:
    """Its open transaction in the same partition would keep a reader of committed records waiting for a minute."""
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    cluster.write_query_names("q", QueryNames({"P": 3}))
    for partition in range(DECISION_PARTITIONS):
        place = TopicPartition(cluster.place.topic, partition)
        bench.raw.write(bench.raw.begin(f"dead-{partition}/driver"), place, "half a decision")
    started_ms = bench.rig.now_ms
    assert cluster.query_names("q") == QueryNames({"P": 3})
    assert bench.rig.now_ms - started_ms < 1_000


class NamesInMemory:
    """Notes whether the lock of query `q` was held at each call."""

    def __init__(self) -> None:
        self.names = QueryNames({})
        self.was_locked: list[bool] = []

    def query_names(self, query_id: str) -> QueryNames:
        self.was_locked.append(query_names._LOCKS[query_id].locked())
        return self.names

    def write_query_names(self, query_id: str, names: QueryNames) -> None:
        self.was_locked.append(query_names._LOCKS[query_id].locked())
        self.names = names

    def decision_of(self, prefix: str) -> Decision | None:
        raise AssertionError(prefix)


def test_two_sinks_in_threads_do_not_miss_the_name_of_each_other() -> None:
    """One thread reads and writes the record at a time."""
    cluster, driver = NamesInMemory(), OpenTransaction("P/driver", 1, 0, 2)
    start = BatchStart("P", driver, TopicPartition("decisions", 0))
    assert check_name(cluster, start, QueryBatch("q", 0, None), lambda _: False)
    assert cluster.names == QueryNames({"P": 0})
    assert cluster.was_locked == [True, True]
    assert not query_names._LOCKS["q"].locked()


def test_names_come_back_as_they_were_written() -> None:
    for each in (QueryNames({}), QueryNames({"P": 0, "ä b": 2**63 - 1})):
        assert QueryNames.from_bytes(each.to_bytes(), "here") == each


def test_key_of_names_is_no_prefix() -> None:
    assert is_names_key(names_key("q"))
    assert not is_names_key(b"q")
    assert not is_names_key(first_use_key(b"q"))
    assert not names_key("q").decode().isprintable()  # as every transactional.id.prefix is


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"version": 2}, "has version 2, and only versions up to 1 are known"),
        ({"began": {"P": -1}}, "out of range"),
        ({"began": {"P": True}}, "out of range"),
        ({"began": [1]}, "this is not a record of a query's names"),
        ({"began": None}, "this is not a record of a query's names"),
        ({"checksum": 1}, "checksum"),
    ],
    ids=str,
)
def test_names_of_other_content_are_refused_by_place(changed: dict[str, Any], text: str) -> None:
    content = json.loads(QueryNames({"P": 0}).to_bytes()) | changed
    data = json.dumps(content).encode() if "checksum" in changed else to_record(without(content, "checksum"))
    with pytest.raises(ProtocolError, match=f"^here: .*{text}"):
        QueryNames.from_bytes(data, "here")


def without(content: dict[str, Any], name: str) -> dict[str, Any]:
    return {own: value for own, value in content.items() if own != name}


def test_list_shows_no_record_of_names(bench: SessionBench) -> None:
    bench.run(0)
    out = io.StringIO()
    Operator(bench.coordinator, CONFIG, out, lambda: 0).show(None)
    assert [line.split(":")[0] for line in out.getvalue().splitlines()] == ["orders", "No transaction is open."]
