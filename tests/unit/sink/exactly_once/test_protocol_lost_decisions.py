"""A driver whose decision topic has no record of its prefix, on scripted nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pytest
from support.coordinator_bench import CoordinatorBench
from support.driver_steps import CONFIG, driver_of, marked_task, task_outcome
from support.scripted_broker import faults

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    TopicAuthorizationError,
    TransactionalIdAuthorizationError,
)
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, Decision, FirstUse, first_use_key
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver, PrefixRecords

TOPIC = CONFIG.decision_topic
COMPACTED = {"cleanup.policy": "compact"}
CREATE, DESCRIBE, FETCH, INIT, PRODUCE = (
    int(key)
    for key in (
        ApiKey.CREATE_TOPICS,
        ApiKey.DESCRIBE_TRANSACTIONS,
        ApiKey.FETCH,
        ApiKey.INIT_PRODUCER_ID,
        ApiKey.PRODUCE,
    )
)


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest) -> CoordinatorBench:
    return CoordinatorBench(version=request.param)


def make_again(bench: CoordinatorBench, partitions: int = 16) -> None:
    bench.cluster.delete_topic(TOPIC)
    bench.cluster.create_topic(TOPIC, partitions, configs=COMPACTED)


def another_process(bench: CoordinatorBench) -> ExactlyOnceDriver:
    return ExactlyOnceDriver("P", KafkaDriverCluster(bench.another_client(), CONFIG, "P"), lambda: 0)


def test_first_driver_leaves_a_first_use_record_before_it_begins(bench: CoordinatorBench) -> None:
    driver_of(bench, "P").begin()
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    decision, first_use = cluster.last_records()
    assert decision is None
    assert first_use is not None
    assert (first_use.partitions, first_use.replicas, first_use.is_adopted) == (16, 3, False)
    assert first_use.topic_id == str(bench.cluster.topics[TOPIC].id)
    written = next(index for index, each in enumerate(bench.cluster.requests) if each.api_key == PRODUCE)
    begun = next(index for index, each in enumerate(bench.cluster.requests) if each.api_key == INIT)
    assert written < begun, "a driver that is known has left a record"


def test_driver_may_follow_one_that_died_before_init(bench: CoordinatorBench) -> None:
    bench.cluster.on(INIT, faults.fail_with(TransactionalIdAuthorizationError))
    with pytest.raises(KafkaError):
        driver_of(bench, "P").begin()
    assert another_process(bench).begin().last_batch_id is None


@pytest.mark.parametrize("partitions", [16, 20])
def test_topic_made_again_is_an_error_before_anything_is_aborted(bench: CoordinatorBench, partitions: int) -> None:
    driver = driver_of(bench, "P")
    driver.commit([task_outcome(bench, driver.begin())])
    task_outcome(bench, driver.begin())
    make_again(bench, partitions)
    for _ in range(2):
        with pytest.raises(IllegalStateError, match=r"knows nothing of transactional\.id\.prefix='P'") as lost:
            another_process(bench).begin()
    assert f"(it has {partitions} now)" in str(lost.value)
    assert bench.state("P/0") == "Ongoing"


def test_missing_topic_is_not_created_for_used_prefix(bench: CoordinatorBench) -> None:
    driver_of(bench, "P").begin()
    bench.cluster.delete_topic(TOPIC)
    made = len(bench.asked(CREATE))
    started_ms = bench.rig.now_ms
    with pytest.raises(IllegalStateError, match=r"is not in the cluster.*adopt --prefix=P --boot"):
        another_process(bench)
    assert 10_000 <= bench.rig.now_ms - started_ms < 15_000
    assert len(bench.asked(CREATE)) == made
    another = KafkaDriverCluster(bench.another_client(), CONFIG, "Q")
    assert len(bench.asked(CREATE)) == made + 1, "for another one it is"
    assert another.place.topic == TOPIC


@pytest.mark.parametrize("is_held", [True, False])
def test_topic_deleted_between_batches_is_an_error(bench: CoordinatorBench, is_held: bool) -> None:
    """Bug: the driver was silent for two minutes, and its error did not mention the deletion."""
    driver = driver_of(bench, "P")
    committed = driver.commit([task_outcome(bench, driver.begin())])
    assert committed.driver is not None
    bench.cluster.delete_topic(TOPIC)
    started_ms = bench.rig.now_ms
    held = committed.driver.producer if is_held else None
    with pytest.raises(IllegalStateError, match="is not in the cluster"):
        driver.begin(held, committed.decision if is_held else None)
    assert bench.rig.now_ms - started_ms < 15_000


def test_topic_that_a_metadata_update_no_longer_has_is_an_error(bench: CoordinatorBench) -> None:
    """Bug: after its cluster was made again, a process waited for two minutes for the topic. An earlier request had
    updated its metadata.
    """
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    bench.cluster.delete_topic(TOPIC)
    assert bench.coordinator.creation.count(TOPIC, bench.timer()) == 0
    started_ms = bench.rig.now_ms
    with pytest.raises(IllegalStateError, match="is not in the cluster"):
        cluster.last_records()
    assert 10_000 <= bench.rig.now_ms - started_ms < 15_000


def test_topic_deleted_during_a_batch_is_an_error(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    outcome = task_outcome(bench, driver.begin(), timeout_ms=900_000)
    bench.cluster.delete_topic(TOPIC)
    started_ms = bench.rig.now_ms
    with pytest.raises(IllegalStateError, match="is not in the cluster"):
        driver.commit([outcome])
    # Version 1 asks the coordinator first.
    limit_ms = 15_000 if bench.raw.version >= 2 else CONFIG.producer.max_block_ms + 5_000
    assert bench.rig.now_ms - started_ms < limit_ms
    assert bench.state("P/0") == "Ongoing", "nothing was decided"


def test_partitions_added_during_a_batch_decide_nothing(bench: CoordinatorBench) -> None:
    """Bug: with `format`, two processes begin and commit a batch. If only the second one knew of the added partitions,
    the first one did not find its decision, and the batch was written twice when Spark ran it again.
    """
    begins = driver_of(bench, "P")
    begins.commit([task_outcome(bench, begins.begin())])
    batch_start = begins.begin()
    outcome = task_outcome(bench, batch_start)
    bench.cluster.add_partitions(TOPIC, 5)  # another partition for P
    with pytest.raises(
        IllegalStateError, match=r"partitions were added to it \(it has 21 now\).*adopt --prefix=P --boot"
    ):
        another_process(bench).commit([outcome])
    assert bench.state("P/0") == "Ongoing"
    assert begins.abort(batch_start, [outcome])
    assert bench.state("P/0") == "CompleteAbort"


def test_driver_waits_for_a_topic_unknown_for_a_moment(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    driver.begin()
    topic = bench.cluster.topics[TOPIC]
    topic.visible_from_ms = bench.rig.now_ms + 5_000
    assert another_process(bench).begin().last_batch_id is None


def test_prefix_forgotten_by_coordinators_goes_on_after_its_decision(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    driver.commit([task_outcome(bench, driver.begin())])
    bench.cluster.transactions.transactions.clear()
    place = KafkaDriverCluster(bench.coordinator, CONFIG, "P").place
    written = [record.offset for record in bench.cluster.log(*place).records() if record.key == first_use_key(b"P")]
    assert another_process(bench).begin().last_batch_id == 4
    now = [record.offset for record in bench.cluster.log(*place).records() if record.key == first_use_key(b"P")]
    assert now == written, "it is no first start"


def test_prefix_of_older_release_needs_no_first_use(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    driver.commit([task_outcome(bench, driver.begin())])
    place = KafkaDriverCluster(bench.coordinator, CONFIG, "P").place
    log = bench.cluster.log(*place)
    (first_use,) = [record.offset for record in log.records() if record.key == first_use_key(b"P")]
    log.batches[:] = [each for each in log.batches if each.base_offset != first_use]
    records = KafkaDriverCluster(bench.coordinator, CONFIG, "P").last_records()
    assert (records.decision is not None, records.first_use) == (True, None)
    assert another_process(bench).begin().last_batch_id == 4


def test_first_batch_that_is_not_the_checkpoints_first_is_refused(bench: CoordinatorBench) -> None:
    batch_start = driver_of(bench, "P").begin()
    assert batch_start.is_written_already(0, "q") is False
    with pytest.raises(IllegalStateError, match=r"Batch 1 of query q is the first one under.*adopt --prefix=P --boot"):
        batch_start.is_written_already(1, "q")
    assert batch_start.is_written_already(1, "") is False, "a batch write has no checkpoint"


def test_refusal_of_a_first_batch_names_skipped_empty_batches(bench: CoordinatorBench) -> None:
    """Bug: a query whose function began with `if df.isEmpty(): return` was refused at its first rows, and the error
    named only causes that it did not have.
    """
    batch_start = driver_of(bench, "P").begin()
    with pytest.raises(IllegalStateError, match=r"did not call write_batch for batch 0 \(if df\.isEmpty\(\): return\)"):
        batch_start.is_written_already(1, "q")


def test_late_first_use_record_hides_no_decision(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    driver.commit([task_outcome(bench, driver.begin())])
    for _ in range(100):
        KafkaDriverCluster(bench.coordinator, CONFIG, "P").write_first_use(is_adopted=False)
    assert another_process(bench).begin().last_batch_id == 4


def test_later_batches_make_no_more_requests(bench: CoordinatorBench) -> None:
    """A driver that keeps its client reads the first-use record and the configuration only once."""
    driver = driver_of(bench, "P")
    driver.commit([task_outcome(bench, driver.begin())])
    bench.cluster.requests.clear()
    driver_of(bench, "P").begin()
    assert bench.asked(DESCRIBE) == []
    assert bench.asked(ApiKey.DESCRIBE_CONFIGS) == []
    assert len(bench.asked(FETCH)) == 1


def test_abort_leaves_batch_open_if_its_decision_may_be_lost() -> None:
    """Under version 1 only the decision topic shows whether another process has decided the batch."""
    bench = CoordinatorBench(version=1)
    driver = driver_of(bench, "P")
    outcome = task_outcome(bench, driver.begin())
    make_again(bench)
    assert driver.abort(outcome.batch_start, [outcome]) is False
    assert bench.state("P/0") == "Ongoing"


def test_pending_marker_of_late_attempt_does_not_delay_start(bench: CoordinatorBench) -> None:
    """Bug: the driver waited for the marker of a decided batch until the late attempt timed out."""

    def die(*_: object) -> None:
        raise KafkaTimeoutError("The driver is gone.")

    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcome = task_outcome(bench, batch_start)
    assert outcome.written is not None
    bench.raw.mark(outcome.written.transaction, "P/0", batch_start.place, 5, outcome.written.marker_text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, "_note_finished", die)
        with pytest.raises(KafkaTimeoutError):
            driver.commit([outcome])
    late = bench.raw.begin("P/0", timeout_ms=900_000)
    bench.raw.write(late, TopicPartition("t", 0), "row")
    bench.raw.mark(late, "P/0", batch_start.place, 5, "another's")
    started_ms = bench.rig.now_ms
    assert driver.begin().last_batch_id == 4
    assert bench.rig.now_ms - started_ms < 5_000
    assert bench.state("P/0") == "CompleteAbort"


def copy_of_topic(bench: CoordinatorBench) -> list[tuple[bytes, bytes]]:
    """Return what a tool that copies topics reads from the partition of P, under read_committed."""
    log = bench.cluster.log(*KafkaDriverCluster(bench.coordinator, CONFIG, "P").place)
    return [(record.key or b"", record.value or b"") for record in log.committed_records()]


def restore(bench: CoordinatorBench, copy: list[tuple[bytes, bytes]]) -> None:
    make_again(bench)
    client = bench.another_client()
    place = KafkaDriverCluster(client, CONFIG, "P").place
    for key, value in copy:
        client.writer.write_alone(place, key, value, bench.timer())


@pytest.mark.parametrize("is_new_process", [True, False])
def test_topic_restored_from_an_older_copy_is_an_error(bench: CoordinatorBench, is_new_process: bool) -> None:
    """Bug: a batch that was decided after the copy was made, and that Spark had not logged, was written again."""
    driver = driver_of(bench, "P")
    driver.commit([marked_task(bench, driver.begin(), batch_id=3)])
    copy = copy_of_topic(bench)
    driver.commit([marked_task(bench, driver.begin(), batch_id=4)])
    restore(bench, copy)
    task_outcome(bench, BatchStart("P", bench.raw.begin("nobody"), TopicPartition(TOPIC, 0)))
    starting = another_process(bench) if is_new_process else driver_of(bench, "P")
    with pytest.raises(
        IllegalStateError,
        match=r"is a copy.*on batch 3\. .*If no batch after batch 3 is there.*adopt --prefix=P --boot",
    ) as refused:
        starting.begin()
    assert str(bench.cluster.topics[TOPIC].id) in str(refused.value)
    assert bench.state("P/0") == "Ongoing", "nothing was aborted"


def test_copy_with_a_first_use_and_no_decision_is_an_error(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    copy = copy_of_topic(bench)
    driver.commit([marked_task(bench, batch_start)])
    restore(bench, copy)
    with pytest.raises(IllegalStateError, match=r"For this prefix it has no decision\..*If no batch is there"):
        another_process(bench).begin()


def test_decision_of_a_release_without_topic_ids_is_followed(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    driver.commit([marked_task(bench, driver.begin(), batch_id=3)])
    decision = KafkaDriverCluster(bench.coordinator, CONFIG, "P").last_decision()
    assert decision is not None
    restore(bench, [(b"P", replace(decision, topic_id="").to_bytes())])
    assert another_process(bench).begin().last_batch_id == 3


def test_other_record_under_first_use_key_is_an_error(bench: CoordinatorBench) -> None:
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    bench.coordinator.writer.write_alone(cluster.place, first_use_key(b"P"), b"{}", bench.timer())
    with pytest.raises(KafkaError, match=f"{cluster.place}, offset 0, 'P': this is not a first-use record"):
        driver_of(bench, "P").begin()


def test_tombstones_count_as_no_records(bench: CoordinatorBench) -> None:
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    open_ = bench.raw.begin("somebody")
    for number, key in enumerate((b"P", first_use_key(b"P"))):
        bench.coordinator.writer.write(open_, cluster.place, key, None, number, bench.timer())
    bench.commit(open_)
    assert cluster.last_records() == PrefixRecords(None, None)
    cluster.write_first_use(is_adopted=True)
    assert isinstance(cluster.last_records().first_use, FirstUse)


def test_first_use_before_a_tombstone_is_found_however_far_back(bench: CoordinatorBench) -> None:
    """forget writes the records in this order."""
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    cluster.write_first_use(is_adopted=True)
    for _ in range(100):
        bench.coordinator.writer.write_alone(cluster.place, b"another", b"value", bench.timer())
    open_ = bench.raw.begin("somebody")
    bench.coordinator.writer.write(open_, cluster.place, b"P", None, 0, bench.timer())
    bench.commit(open_)
    decision, first_use = cluster.last_records()
    assert decision is None
    assert first_use is not None
    assert first_use.is_adopted


def test_transaction_of_successors_task_is_not_aborted(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcome = task_outcome(bench, batch_start)
    assert outcome.written is not None
    bench.raw.mark(outcome.written.transaction, "P/0", batch_start.place, 5, outcome.written.marker_text)
    committed = driver.commit([outcome])
    assert committed.driver is not None
    driver_of(bench, "P").begin()
    bench.raw.write(bench.raw.begin("P/0"), TopicPartition("t", 0), "row of the successor")
    driver.finish(committed.driver, Decision(4, "q", 0, 1, 1, (outcome.written,)))
    assert bench.state("P/0") == "Ongoing"


def test_topic_without_describe_right_names_the_grant(bench: CoordinatorBench) -> None:
    """Brokers do not say whether it is missing."""
    bench.cluster.on(ApiKey.METADATA, faults.refuse_topic(TOPIC, TopicAuthorizationError), times=None)
    with pytest.raises(
        TopicAuthorizationError, match=rf"Create decision\.topic={TOPIC} by hand.*or grant CREATE on it"
    ):
        driver_of(bench, "P")


# ---- a leader that does not know yet that it leads no more -----------------------------------------------------------


def test_driver_does_not_believe_an_older_leader_of_the_decisions(bench: CoordinatorBench) -> None:
    """Bug: the last decision was not found, and a batch that Spark had not logged was written twice."""
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    driver.commit([marked_task(bench, batch_start, batch_id=0, query_id="q", value="a")])
    end = bench.cluster.log(*batch_start.place).next_offset
    driver.commit([marked_task(bench, driver.begin(), batch_id=1, query_id="q", value="b")])
    bench.cluster.on(ApiKey.LIST_OFFSETS, faults.older_end(TOPIC, end), times=4)
    again = another_process(bench).begin()
    assert again.is_written_already(1, "q")


def test_decided_batch_is_not_aborted_because_of_an_older_leader(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the next driver did not find the decision, and aborted the decided transactions."""
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    driver.commit([marked_task(bench, batch_start, batch_id=0, value="a")])
    end = bench.cluster.log(*batch_start.place).next_offset

    def die(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "finish", die)
    with pytest.raises(KeyboardInterrupt):
        driver.commit([marked_task(bench, driver.begin(), batch_id=1, value="b")])
    bench.cluster.on(ApiKey.LIST_OFFSETS, faults.older_end(TOPIC, end), times=4)
    assert another_process(bench).begin().last_batch_id == 1
    assert bench.values() == ["a", "b"]


def test_moved_prefix_is_not_begun_here_because_of_an_older_leader(bench: CoordinatorBench) -> None:
    """The coordinators have forgotten the prefix. A first-use record that is not found would be written again, over the
    one that names the other topic.
    """
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    end = bench.cluster.log(*cluster.place).next_offset
    cluster.write_first_use(is_adopted=False, moved_to="elsewhere")
    bench.cluster.on(ApiKey.LIST_OFFSETS, faults.older_end(TOPIC, end), times=2)
    for _ in range(2):
        with pytest.raises(IllegalStateError, match="elsewhere"):
            another_process(bench).begin()
