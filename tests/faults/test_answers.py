"""Rows 12 to 17, 19, 23, 27 to 30 and the scripted halves of 21, 32 and 34: a broker that says the wrong thing, over
real sockets.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from support.fault_stage import Timeline
from support.history import History, Outcome, Read, Sent
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.versions import KAFKA_2_1, KAFKA_3_0, KAFKA_4_1
from support.scripted_server import ScriptedServer
from support.workload import Ledger, assert_kept

from spark_kafka_sink.common.errors import KafkaError, KafkaTimeoutError, OutOfOrderSequenceError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

pytestmark = pytest.mark.quick

StartProducer = Callable[..., KafkaProducer]
PRODUCE, METADATA, API_VERSIONS, INIT_PRODUCER_ID, ADD_PARTITIONS, END_TXN = 0, 3, 18, 22, 24, 26
MEGABYTE = 1024 * 1024
FAST = {
    "linger.ms": 0,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 100,
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 100,
    "request.timeout.ms": 500,
    "delivery.timeout.ms": 20_000,
}


class Scripted:
    """A scripted cluster on sockets with a topic of two partitions, a producer, and what it sent."""

    def __init__(self, start_producer: StartProducer, timeline: Timeline, nodes: int = 1, **options: Any) -> None:
        self.cluster = ScriptedCluster(nodes, **options)
        self.cluster.create_topic("t", 2)
        self.server = ScriptedServer(self.cluster)
        self.note = timeline.note
        self.ledger = Ledger("scripted")
        self._start = start_producer

    def producer(self, **settings: object) -> KafkaProducer:
        return self._start(",".join(self.server.bootstrap_servers), **FAST | settings)

    def send(self, producer: KafkaProducer, number: int = 1, partition: int = 0) -> list[Sent]:
        """Send so many records, one a batch where batch.size says so; the outcome comes to the ledger."""
        records = [self.ledger.add(("t", partition)) for _ in range(number)]
        for record in records:
            producer.send("t", record.value, partition=partition, on_completion=self.ledger.of_row(record))
        return records

    def deliver(self, producer: KafkaProducer, number: int = 1, partition: int = 0) -> None:
        """Send, and see every record acknowledged."""
        records = self.send(producer, number, partition)
        producer.flush(30_000)
        assert [record.outcome for record in records] == [Outcome.YES] * number, self.ledger.errors[:3]

    def check(self) -> None:
        """What lies in the logs is what was acknowledged."""
        assert all(record.outcome is not Outcome.UNKNOWN for record in self.ledger.sent), "a record without outcome"
        with self.server.lock:
            reads = [
                Read("t", partition, record.offset, record.value.decode())
                for partition, records in enumerate(self.cluster.records("t"))
                for record in records
            ]
        assert_kept(History(self.ledger.sent, reads))
        self.note(f"{len(self.ledger.sent)} records, {len(self.ledger.errors)} failed, no anomaly")

    def requests(self, api_key: int) -> int:
        with self.server.lock:
            return len(self.cluster.requests_of(api_key))

    def on(self, api_key: int, hook: faults.Hook, **when: Any) -> faults.Script:
        with self.server.lock:
            return self.cluster.on(api_key, hook, **when)


@pytest.fixture
def scripted(start_producer: StartProducer, timeline: Timeline) -> Iterator[Callable[..., Scripted]]:
    """`scripted(nodes=1, ...)` starts a cluster; it is stopped when the row is over."""
    with contextlib.ExitStack() as stack:

        def start(nodes: int = 1, **options: Any) -> Scripted:
            made = Scripted(start_producer, timeline, nodes, **options)
            stack.enter_context(made.server)
            return made

        yield start


Start = Callable[..., Scripted]


def outcome_by(deadline_s: float, producer: KafkaProducer, records: list[Sent]) -> None:
    """Every record has its outcome within this time, whatever it is."""
    began = time.monotonic()
    producer.flush(int(deadline_s * 1000))
    assert time.monotonic() - began <= deadline_s
    assert all(record.outcome is not Outcome.UNKNOWN for record in records)


@pytest.mark.parametrize("api_key", [PRODUCE, METADATA])
@pytest.mark.parametrize("shift", [1, -1, 2**30])
def test_row_12_wrong_correlation_id(scripted: Start, seed: int, api_key: int, shift: int) -> None:
    stage = scripted()
    producer = stage.producer()
    stage.deliver(producer) if api_key == PRODUCE else None
    stage.on(api_key, faults.wrong_correlation_id(shift), times=3)
    stage.deliver(producer, 10)
    stage.check()


def test_row_12_answers_that_changed_places(scripted: Start, seed: int) -> None:
    """The first request fails, the second succeeds, and each answer claims to be the other's."""
    stage = scripted()
    producer = stage.producer()
    for partition in (0, 1):
        stage.deliver(producer, 1, partition)
    swapped = (faults.wrong_correlation_id(1), faults.wrong_correlation_id(-1))
    refuse = faults.fail_with(29)

    def first(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        values = refuse(cluster, exchange, proceed).values
        return swapped[0](cluster, exchange, lambda: Answer(values, delay_ms=50))

    stage.on(PRODUCE, first)
    stage.on(PRODUCE, swapped[1])
    stage.send(producer, 1, 0)
    stage.send(producer, 1, 1)
    producer.flush(20_000)
    assert [str(error) for error in stage.ledger.errors] == []
    stage.check()


@pytest.mark.parametrize("length", [-1, 0, 3, 2**31 - 1, 101 * MEGABYTE], ids=str)
@pytest.mark.parametrize("api_key", [PRODUCE, METADATA, API_VERSIONS])
def test_row_13_length_of_a_frame(scripted: Start, seed: int, api_key: int, length: int) -> None:
    stage = scripted()
    stage.on(api_key, faults.frame_length(length), times=2)
    before = psutil.Process().memory_info().rss
    producer = stage.producer()
    stage.deliver(producer, 10)
    grown = psutil.Process().memory_info().rss - before
    stage.note(f"{grown / MEGABYTE:.1f} MiB more memory")
    assert grown < 50 * MEGABYTE
    stage.check()


def flipped(rng: random.Random) -> faults.Hook:
    """A few bytes of the answer are others; its length and correlation id are right."""

    def flip(frame: bytes) -> bytes:
        spoiled = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            spoiled[rng.randrange(8, len(frame))] ^= 1 << rng.randrange(8)
        return bytes(spoiled)

    return faults.corrupt(flip)


def huge_counts(rng: random.Random) -> faults.Hook:
    """Five bytes in a row say 2^31 - 1 or more: wherever a count or a length is, it is a bomb."""

    def bomb(frame: bytes) -> bytes:
        at = rng.randrange(8, len(frame))
        return frame[:at] + b"\xff\xff\xff\xff\x07" + frame[at + 5 :] + b"\0" * max(0, at + 5 - len(frame))

    def whole(frame: bytes) -> bytes:
        spoiled = bomb(frame)[: len(frame)]
        return struct.pack(">i", len(spoiled) - 4) + spoiled[4:]

    return faults.corrupt(whole)


def cut_short(rng: random.Random) -> faults.Hook:
    return faults.corrupt(
        lambda frame: (lambda left: struct.pack(">i", left - 4) + frame[4:left])(rng.randrange(8, len(frame)))
    )


def without_partition(rng: random.Random) -> faults.Hook:
    return faults.change(lambda values: values | {"responses": ()})


def partition_twice(rng: random.Random) -> faults.Hook:
    def twice(values: dict[str, Any]) -> dict[str, Any]:
        topics = [dict(topic) for topic in values["responses"]]
        for topic in topics:
            topic["partition_responses"] = [*topic["partition_responses"], *topic["partition_responses"]]
        return values | {"responses": topics}

    return faults.change(twice)


def partition_of_another(rng: random.Random) -> faults.Hook:
    """The answer tells of a partition that was not asked for, besides."""

    def more(values: dict[str, Any]) -> dict[str, Any]:
        extra = {"name": "u", "partition_responses": [{"index": 7, "error_code": 29, "base_offset": -1}]}
        return values | {"responses": [extra, *values["responses"]]}

    return faults.change(more)


@pytest.mark.parametrize("spoil", [cut_short, without_partition, partition_twice, partition_of_another])
def test_row_14_answers_that_make_no_sense(
    scripted: Start, seed: int, spoil: Callable[[random.Random], faults.Hook]
) -> None:
    """Each is seen through: the connection is closed and the batch sent again, or the rest of the answer counts."""
    stage, rng = scripted(), random.Random(seed)
    producer = stage.producer()
    stage.deliver(producer)
    for _ in range(10):
        stage.on(PRODUCE, spoil(rng))
        stage.deliver(producer, 3)
    stage.check()


@pytest.mark.parametrize("spoil", [flipped, huge_counts], ids=["flipped", "huge_counts"])
@pytest.mark.parametrize("api_key", [PRODUCE, API_VERSIONS, INIT_PRODUCER_ID])
def test_row_14_answers_with_spoiled_bytes(
    scripted: Start, seed: int, api_key: int, spoil: Callable[[random.Random], faults.Hook]
) -> None:
    """They may seem to say anything: no crash, no hang, one outcome for each record, and the next producer is well."""
    rng = random.Random(seed)
    before = psutil.Process().memory_info().rss
    for _ in range(12):
        stage = scripted()
        producer = stage.producer(**{"delivery.timeout.ms": 1_500, "max.block.ms": 1_500})
        stage.on(api_key, spoil(rng), times=2)
        outcome_by(4, producer, stage.send(producer, 5))
        producer.close(0)
        assert psutil.Process().memory_info().rss - before < 80 * MEGABYTE
    healthy = scripted()
    healthy.deliver(healthy.producer(), 5)
    healthy.check()


def test_row_15_api_versions_only_version_0(scripted: Start, seed: int) -> None:
    stage = scripted(versions={**KAFKA_2_1, API_VERSIONS: (0, 0)})
    stage.deliver(stage.producer(), 5)
    assert 2 <= stage.requests(API_VERSIONS) + 1 <= 6
    stage.check()


@pytest.mark.parametrize("error_code", [35, 42, -1])
def test_row_15_api_versions_refused_for_ever(scripted: Start, seed: int, error_code: int) -> None:
    stage = scripted()
    stage.on(API_VERSIONS, faults.fail_with(error_code), times=None)
    producer = stage.producer(**{"max.block.ms": 1_500})
    began = time.monotonic()
    with pytest.raises(KafkaError) as caught:
        producer.send("t", b"v").result(5)
    took = time.monotonic() - began
    asked = stage.requests(API_VERSIONS)
    stage.note(f"after {took:.2f} s and {asked} requests: {caught.value}")
    assert took <= 1.5 * 1.1
    assert asked < 100, "a storm"


def test_row_15_api_versions_that_flap(scripted: Start, seed: int) -> None:
    stage, rng = scripted(), random.Random(seed)
    producer = stage.producer()
    for _ in range(12):
        with stage.server.lock:
            stage.cluster.versions = rng.choice((KAFKA_2_1, KAFKA_3_0, KAFKA_4_1))
            stage.server.cut(0, reset=rng.random() < 0.5)
        stage.deliver(producer, 5)
    stage.check()


@pytest.mark.parametrize("is_named", [True, False], ids=["with_new_leader", "without"])
def test_row_16_not_leader(scripted: Start, seed: int, is_named: bool) -> None:
    stage = scripted(2)
    stage.cluster.has_leader_hints = is_named
    producer = stage.producer(**{"retry.backoff.ms": 1_000, "retry.backoff.max.ms": 1_000})
    stage.deliver(producer, 1, 0)
    stage.deliver(producer, 1, 1)  # connected to both
    with stage.server.lock:
        stage.cluster.move_leader("t", 0, 1)
        asked = len(stage.cluster.requests_of(METADATA))
    began = time.monotonic()
    stage.deliver(producer, 1, 0)
    took = time.monotonic() - began
    stage.note(f"{took:.3f} s, {stage.requests(METADATA) - asked} metadata requests")
    assert took < 0.6 if is_named else took >= 0.75
    assert is_named or stage.requests(METADATA) > asked
    stage.check()


def test_row_17_older_leader_epoch(scripted: Start, seed: int) -> None:
    """A node that lags behind says who led before; the producer stays with the leader that it knows."""
    stage = scripted(2)
    producer = stage.producer(**{"metadata.max.age.ms": 100})
    stage.deliver(producer, 3, 0)
    with stage.server.lock:
        stage.cluster.move_leader("t", 0, 1)
    stage.deliver(producer, 3, 0)

    def lag(values: dict[str, Any]) -> dict[str, Any]:
        topics = [dict(topic) for topic in values["topics"]]
        for topic in topics:
            topic["partitions"] = [
                dict(each) | {"leader_id": 0, "leader_epoch": 0} if each["partition_index"] == 0 else each
                for each in topic["partitions"]
            ]
        return values | {"topics": topics}

    lagging = stage.on(METADATA, faults.change(lag), times=None)
    seen = lagging.used
    deadline = time.monotonic() + 10
    while lagging.used < seen + 5:
        assert time.monotonic() < deadline
        stage.deliver(producer, 1, 0)
        time.sleep(0.02)
    with stage.server.lock:
        late = [each for each in stage.cluster.requests_of(PRODUCE)[-3:] if each.node_id == 0]
    assert late == []
    stage.check()


def test_row_19_topic_vanishes_and_returns(scripted: Start, seed: int) -> None:
    stage = scripted()
    producer = stage.producer(
        **{"metadata.max.age.ms": 50, "metadata.max.idle.ms": 5_000, "max.block.ms": 10_000, "request.timeout.ms": 200}
    )
    for _ in range(3):
        stage.deliver(producer, 7)
        with stage.server.lock:
            stage.cluster.topics["t"].is_visible = False
            stage.on(PRODUCE, faults.fail_with(3), times=2)
        asked = stage.requests(METADATA)
        waiting = stage.send(producer, 3)
        deadline = time.monotonic() + 10
        while stage.requests(METADATA) < asked + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with stage.server.lock:
            stage.cluster.topics["t"].is_visible = True
        producer.flush(20_000)
        assert all(record.outcome is Outcome.YES for record in waiting)
    assert stage.cluster.log("t", 0).duplicates == 0
    stage.check()


def refused_late(error_code: int, delay_ms: int) -> faults.Hook:
    refuse = faults.fail_with(error_code)
    return lambda *what: Answer(refuse(*what).values, delay_ms=delay_ms)


def test_row_21_too_large_when_it_is_too_late(scripted: Start, seed: int) -> None:
    """A batch whose time is over when the broker finds it too large is not split."""
    stage = scripted()
    producer = stage.producer(**{"linger.ms": 50, "request.timeout.ms": 900, "delivery.timeout.ms": 1_000})
    stage.deliver(producer)
    asked = stage.requests(PRODUCE)
    stage.on(PRODUCE, refused_late(19, 300))
    stage.on(PRODUCE, refused_late(10, 800))  # sent again, and answered when its time is over
    records = stage.send(producer, 5)
    outcome_by(1.1, producer, records)
    assert {type(error) for error in stage.ledger.errors} == {KafkaTimeoutError}
    time.sleep(0.4)
    assert stage.requests(PRODUCE) - asked == 2
    stage.check()


def test_row_23_corrupt_message_once(scripted: Start, seed: int) -> None:
    stage = scripted()
    producer = stage.producer()
    stage.deliver(producer)
    asked = stage.requests(PRODUCE)
    stage.on(PRODUCE, faults.fail_with(2))
    stage.deliver(producer)
    assert stage.requests(PRODUCE) - asked == 2
    stage.check()


def test_row_23_corrupt_message_always(scripted: Start, seed: int) -> None:
    stage = scripted()
    producer = stage.producer(**{"delivery.timeout.ms": 1_500})
    stage.deliver(producer)
    stage.on(PRODUCE, faults.fail_with(2), times=None)
    began = time.monotonic()
    with pytest.raises(KafkaTimeoutError) as caught:
        producer.send("t", b"v", partition=0).result(5)
    took = time.monotonic() - began
    stage.note(f"after {took:.2f} s: {caught.value}")
    assert 1.4 <= took <= 1.65


ONE_A_BATCH = {"batch.size": 1}


def epochs(stage: Scripted) -> set[int]:
    with stage.server.lock:
        return {batch.header.producer_epoch for batch in stage.cluster.log("t", 0).batches}


def test_row_27_out_of_order_behind_the_head(scripted: Start, seed: int) -> None:
    """The first of five is refused for a while; those behind it are out of order until it is in."""
    stage = scripted()
    producer = stage.producer(**ONE_A_BATCH)
    stage.deliver(producer)
    stage.on(PRODUCE, faults.fail_with(19), times=1)
    stage.deliver(producer, 5)
    assert epochs(stage) == {0}
    stage.check()


@pytest.mark.parametrize("error_code", [45, 59], ids=["out_of_order_sequence", "unknown_producer_id"])
def test_row_27_and_29_out_of_order_at_the_head(scripted: Start, seed: int, error_code: int) -> None:
    """A new epoch and new sequences, and the record is there once."""
    stage = scripted()
    producer = stage.producer(**ONE_A_BATCH)
    stage.deliver(producer, 3)
    stage.on(PRODUCE, faults.fail_with(error_code))
    stage.deliver(producer, 1)
    stage.deliver(producer, 3)
    assert len(epochs(stage)) == 2 or error_code == 59, epochs(stage)
    stage.check()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("error_code", [45, 59], ids=["out_of_order_sequence", "unknown_producer_id"])
def test_row_27_and_29_cost_a_transaction(scripted: Start, seed: int, error_code: int, version: int) -> None:
    stage = scripted(finalized_features={"transaction.version": version})
    producer = stage.producer(**{"transactional.id": "id"})
    producer.init_transactions()
    producer.begin_transaction()
    stage.on(PRODUCE, faults.fail_with(error_code))
    lost = producer.send("t", b"lost", partition=0)
    with pytest.raises(OutOfOrderSequenceError):
        producer.commit_transaction()
    with pytest.raises(OutOfOrderSequenceError):
        lost.result(0)
    producer.abort_transaction()
    producer.begin_transaction()
    producer.send("t", b"kept", partition=0)
    producer.commit_transaction()
    with stage.server.lock:
        assert [record.value for record in stage.cluster.log("t", 0).committed_records()] == [b"kept"]


def test_row_28_duplicate_sequence(scripted: Start, seed: int) -> None:
    stage = scripted()
    producer = stage.producer()
    stage.deliver(producer)
    stage.on(PRODUCE, faults.fail_with(46))
    assert producer.send("t", b"v", partition=0).result(5).offset == -1


def test_row_29_producer_id_forgotten(scripted: Start, seed: int) -> None:
    """Retention took the producer's records, and the leader what it knew of it: it goes on in any case."""
    stage = scripted()
    producer = stage.producer(**ONE_A_BATCH)
    stage.deliver(producer, 3)
    with stage.server.lock:
        stage.cluster.log("t", 0).forget_producers()
    stage.deliver(producer, 3)
    stage.check()


def test_row_30_batch_in_flight_expires(scripted: Start, seed: int) -> None:
    """Nobody knows whether it arrived: nothing follows it until its request has ended, then in a new epoch."""
    stage = scripted()
    producer = stage.producer(**ONE_A_BATCH, **{"request.timeout.ms": 600, "delivery.timeout.ms": 700})
    stage.deliver(producer, 2)
    lost = stage.on(PRODUCE, faults.lose_response(), times=None)
    doomed = stage.send(producer, 2)
    producer.flush(5_000)
    with stage.server.lock:
        lost.times = 0
    assert [record.outcome for record in doomed] == [Outcome.NO] * 2
    stage.deliver(producer, 5)
    assert len(epochs(stage)) == 2
    stage.check()


def test_row_30_sequences_wrap(scripted: Start, seed: int) -> None:
    stage = scripted()
    producer = stage.producer(**ONE_A_BATCH)
    stage.deliver(producer)
    manager = producer._transaction_manager
    assert manager is not None
    with stage.server.lock:
        (state,) = stage.cluster.log("t", 0)._producers.values()
        state.last_sequence = 2**31 - 4
        state.batches.clear()
        (sequences,) = manager.sequences
        sequences.next_sequence, sequences.last_acked_sequence = 2**31 - 3, 2**31 - 4
    stage.on(PRODUCE, faults.fail_with(19), skip=2)
    stage.deliver(producer, 8)
    with stage.server.lock:
        bases = [batch.header.base_sequence for batch in stage.cluster.log("t", 0).batches]
    assert bases == [0, *range(2**31 - 3, 2**31), *range(5)]
    stage.check()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("error_code", [15, 14, 16, 51])
@pytest.mark.parametrize("api_key", [INIT_PRODUCER_ID, ADD_PARTITIONS, END_TXN])
def test_row_32_coordinator_in_trouble(scripted: Start, seed: int, api_key: int, error_code: int, version: int) -> None:
    """Not available, loading, not the coordinator, busy: asked again, in bounded time."""
    stage = scripted(2, finalized_features={"transaction.version": version})
    stage.on(api_key, faults.fail_with(error_code), times=3)
    producer = stage.producer(**{"transactional.id": "id"})
    began = time.monotonic()
    producer.init_transactions()
    for number in range(2):
        producer.begin_transaction()
        producer.send("t", f"{number}", partition=0)
        producer.commit_transaction()
    took = time.monotonic() - began
    stage.note(f"{took:.3f} s")
    assert took < 3
    with stage.server.lock:
        assert [record.value for record in stage.cluster.log("t", 0).committed_records()] == [b"0", b"1"]


def test_row_34_end_of_a_transaction_unknown_server_error(scripted: Start, seed: int) -> None:
    """Until it is known how the transaction ended, there is no other."""
    stage = scripted(finalized_features={"transaction.version": 2})
    producer = stage.producer(**{"transactional.id": "id", "max.block.ms": 800})
    producer.init_transactions()
    producer.begin_transaction()
    producer.send("t", b"v", partition=0)
    stage.on(END_TXN, faults.fail_with(-1), times=None)
    with pytest.raises(KafkaError) as caught:
        producer.commit_transaction()
    stage.note(f"{type(caught.value).__name__}: {caught.value}")
    with pytest.raises(KafkaError):
        producer.begin_transaction()
