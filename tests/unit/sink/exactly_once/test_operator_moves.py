"""`adopt`, which moves a query to another decision topic of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from support.operator_bench import CONFIG, PREFIX, OperatorBench, other_topic
from support.scripted_broker.transaction_coordinator import Commit

from spark_kafka_sink.common.errors import IllegalStateError, ProducerFencedError
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import Decision
from spark_kafka_sink.sink.exactly_once.operator import _newest

FIRST = CONFIG.decision_topic
SECOND = "second"
REFUSED = (
    f"decision.topic={FIRST} has no longer the decisions of transactional.id.prefix='orders': adopt has moved them"
)


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest) -> OperatorBench:
    return OperatorBench(request.param)


def test_adopted_query_goes_on_after_the_decision_in_its_topic_before(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    bench.driver.commit(bench.batch(1))
    bench.operator_of(SECOND).adopt(PREFIX)
    assert bench.said() == (
        f"decision.topic={FIRST} is refused for orders from now on.\n"
        f"orders is adopted: its query goes on after batch 1, the last one decided in decision.topic={FIRST}.\n"
    )
    bench.move_to(SECOND)
    batch_start = bench.driver.begin()
    assert batch_start.is_written_already(1, "q")  # Spark has not logged it, and runs it again
    with pytest.raises(IllegalStateError, match="Batch 0 comes after batch 1"):
        batch_start.is_written_already(0, "q")
    bench.driver.commit([bench.task(batch_start, 2, 0)])
    assert bench.driver.begin().last_batch_id == 2


def test_query_that_goes_back_to_its_topic_before_is_refused(bench: OperatorBench) -> None:
    """Bug: it wrote a batch twice that was decided in the other topic and that Spark had not logged. `finish` with that
    topic aborted what the other one had decided.
    """
    bench.driver.commit(bench.batch(0))
    in_first = bench.driver
    bench.operator_of(SECOND).adopt(PREFIX)
    bench.move_to(SECOND)
    bench.driver.commit(bench.batch(1))
    bench.decide(2)
    commands: list[Callable[[], object]] = [in_first.begin]
    commands += [partial(getattr(bench.operator, name), PREFIX) for name in ("finish", "abort", "accept", "forget")]
    for refused in commands:
        with pytest.raises(IllegalStateError, match=REFUSED) as error:
            refused()
        assert f"moved them to decision.topic={SECOND}. " in str(error.value)
    assert bench.driver.begin().last_batch_id == 2
    assert sorted(bench.values()) == ["row 0.0", "row 0.1", "row 1.0", "row 1.1", "row 2.0", "row 2.1"]
    bench.said()
    bench.operator.show(PREFIX)
    shown = bench.said().splitlines()
    assert shown[0].startswith("orders: batch 0 of query q, ")
    assert shown[1].startswith("orders: moved 20")
    assert shown[1].endswith(f" to decision.topic={SECOND}.")


def test_query_is_moved_back_after_the_decision_in_the_other_topic(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    bench.operator_of(SECOND).adopt(PREFIX)
    bench.move_to(SECOND)
    bench.driver.commit(bench.batch(1))
    bench.operator.adopt(PREFIX)
    in_second = bench.driver
    bench.move_to(FIRST)
    assert bench.driver.begin().is_written_already(1, "q")
    with pytest.raises(IllegalStateError, match=f"topic={SECOND} has no longer the decisions of"):
        in_second.begin()
    bench.operator.show(PREFIX)
    assert "moved" not in bench.said().splitlines()[-2]


@pytest.mark.parametrize("topic", [FIRST, "third"])
def test_move_is_refused_while_a_decision_is_not_finished(bench: OperatorBench, topic: str) -> None:
    bench.driver.commit(bench.batch(0))
    bench.operator_of(SECOND).adopt(PREFIX)
    bench.move_to(SECOND)
    decided = bench.decide(1)
    KafkaDriverCluster(bench.coordinator, other_topic(topic), "another prefix")
    operator = bench.operator_of(topic)
    for _ in range(2):
        with pytest.raises(
            IllegalStateError, match=f"Batch 1 of orders is decided in decision.topic={SECOND}, "
        ) as error:
            operator.adopt(PREFIX)
        assert f"finish --prefix=orders --decision-topic={SECOND} " in str(error.value)
        bench.end([outcome.written.transaction for outcome in decided if outcome.written is not None])
    bench.operator_of(SECOND).finish(PREFIX)
    operator.adopt(PREFIX)
    assert "goes on after batch 1, " in bench.said()


def test_adopt_that_stopped_halfway_is_repeated(bench: OperatorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither topic takes the query until it is."""

    class StoppedError(Exception):
        pass

    def stop(*_: object) -> None:
        raise StoppedError

    bench.driver.commit(bench.batch(3))
    operator = bench.operator_of(SECOND)
    monkeypatch.setattr(operator, "_write", stop)
    with pytest.raises(StoppedError):
        operator.adopt(PREFIX)
    with pytest.raises(IllegalStateError, match=REFUSED):
        bench.driver.begin()
    monkeypatch.undo()
    operator.adopt(PREFIX)
    bench.move_to(SECOND)
    assert bench.driver.begin().last_batch_id == 3


def test_query_that_starts_during_adopt_is_not_moved_away_from(
    bench: OperatorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read that this is its topic, and would decide in it once more."""
    operator = bench.operator_of(SECOND)
    look = operator._other_topics
    bench.driver.begin()

    def too_late(*arguments: str) -> object:
        found = look(*arguments)
        bench.driver.begin()
        return found

    monkeypatch.setattr(operator, "_other_topics", too_late)
    with pytest.raises(ProducerFencedError, match="orders was started meanwhile"):
        operator.adopt(PREFIX)
    assert KafkaDriverCluster(bench.coordinator, other_topic(SECOND), PREFIX).last_decision() is None


def test_decision_of_the_last_query_counts_and_of_it_the_highest_batch(bench: OperatorBench) -> None:
    """The clocks of its drivers may differ. A query that had the prefix before may have come further."""
    topics = {"a": ("old", 9, 100), "b": ("q", 4, 300), "c": ("q", 5, 200), "d": None}
    made = {
        topic: given and Decision(given[1], given[0], given[2], 1, 1, (), is_finished=True)
        for topic, given in topics.items()
    }
    assert _newest(made) == ("c", made["c"])
    assert _newest({"d": None}) == ("", None)


def test_missing_and_copied_topics_are_named_and_not_taken_over(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    last, name = bench.cluster_of_driver.last_decision(), PREFIX.encode()
    bench.operator_of(SECOND).adopt(PREFIX)
    bench.move_to(SECOND)
    bench.driver.commit(bench.batch(1))
    bench.cluster.delete_topic(SECOND)
    bench.said()
    bench.operator.adopt(PREFIX)
    assert bench.said().splitlines() == [
        f"decision.topic={SECOND}, which orders had, is not in the cluster: what was decided there last is not known.",
        "orders is adopted: its query goes on after batch 0, the last one decided here.",
    ]
    assert last is not None
    bench.cluster.delete_topic(FIRST)
    bench.cluster.create_topic(FIRST, 16, configs={"cleanup.policy": "compact"})
    client = bench.another_client()
    client.writer.write_alone(KafkaDriverCluster(client, CONFIG, PREFIX).place, name, last.to_bytes(), bench.timer())
    bench.operator_of("third").adopt(PREFIX)
    assert bench.said().splitlines()[0] == f"decision.topic={FIRST} is a copy: its decisions are not taken over."


def test_offsets_of_other_consumers_name_no_decision_topic(bench: OperatorBench) -> None:
    """A consumer group may have the name of a task."""
    bench.driver.commit(bench.batch(0))
    bench.cluster.transactions.offsets["orders/0"]["t", 0] = Commit(5, "")
    rows = bench.values()
    bench.operator_of(SECOND).adopt(PREFIX)
    assert bench.said().splitlines()[0] == f"decision.topic={FIRST} is refused for orders from now on."
    assert bench.values() == rows


def test_move_is_refused_while_a_batch_is_open(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    bench.operator_of(SECOND).adopt(PREFIX)
    bench.move_to(SECOND)
    bench.batch(1)
    with pytest.raises(IllegalStateError, match="2 transactions of orders are open"):
        bench.operator.adopt(PREFIX)


def test_query_without_a_decision_leaves_its_topic_too(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    bench.operator.forget(PREFIX)
    bench.said()
    bench.operator_of(SECOND).adopt(PREFIX)
    assert bench.said().splitlines() == [
        f"decision.topic={FIRST} is refused for orders from now on.",
        "orders is adopted: its query begins at the next batch of its checkpoint.",
    ]
    with pytest.raises(IllegalStateError, match=REFUSED):
        bench.driver.begin()


def test_moves_lead_to_the_topic_of_the_query_without_markers(bench: OperatorBench) -> None:
    """Brokers forget them after seven days."""
    for batch_id, topic in enumerate([SECOND, "third", FIRST]):
        bench.driver.commit(bench.batch(batch_id))
        if topic == FIRST:
            bench.cluster.transactions.offsets.clear()
            bench.said()
        bench.operator_of(topic).adopt(PREFIX)
        bench.move_to(topic)
        bench.cluster.transactions.offsets.clear()
    assert bench.said().splitlines() == [
        f"decision.topic={SECOND} is refused for orders from now on.",
        "decision.topic=third is refused for orders from now on.",
        "orders is adopted: its query goes on after batch 2, the last one decided in decision.topic=third.",
    ]
