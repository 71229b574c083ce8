"""Rows 6 to 11, 34 and 35: the network between producer and broker is cut, narrow, slow, silent or late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import psutil
import pytest
from integration.producer.test_transactions import Cluster, Stage
from support.fault_stage import FaultStage
from support.lateness import Stopwatch
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer
from support.tcp_proxy import TcpProxy, Way
from support.threaded_producer import sender_thread
from support.workload import Ledger, Workload, assert_kept, draw_settings, finish, history_of

from spark_kafka_sink.common.errors import IllegalStateError, KafkaError, KafkaTimeoutError, OutOfOrderSequenceError
from spark_kafka_sink.local import Admin
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

StartProducer = Callable[..., KafkaProducer]
CONNECTING = {
    "reconnect.backoff.max.ms": 200,
    "socket.connection.setup.timeout.ms": 400,
    "socket.connection.setup.timeout.max.ms": 1_000,
}


@pytest.mark.parametrize("how", ["refused", "black_hole"])
def test_row_06_one_broker_cut_off(three_nodes: FaultStage, start_producer: StartProducer, seed: int, how: str) -> None:
    rng = random.Random(seed)
    places = three_nodes.new_topic(partitions=6)
    producer = start_producer(three_nodes.proxied, **draw_settings(rng) | CONNECTING)
    with Workload(producer, places, rng) as work:
        work.await_acknowledged(30)
        lost = three_nodes.leader(rng.choice(places))
        far = [place for place in places if three_nodes.leader(place) == lost]
        near = [place for place in places if place not in far]
        proxy = three_nodes.proxies[lost]
        three_nodes.note(f"node {lost}, which leads {len(far)} of 6 partitions, is behind: {how}")
        proxy.refuse() if how == "refused" else proxy.black_hole()
        for _ in range(3):
            work.await_acknowledged(30, near)
            time.sleep(rng.uniform(0.3, 1.5))
        before = work.acknowledged(*far)
        work.await_acknowledged(10, near)
        assert work.acknowledged(*far) == before, "acknowledged by a broker that cannot be reached"
        proxy.heal()
        three_nodes.note("healed")
        work.await_acknowledged(30)
    three_nodes.note(finish(three_nodes.direct, work))


def test_row_07_slow_and_narrow_then_reset(one_node: FaultStage, start_producer: StartProducer, seed: int) -> None:
    """100 ms round trip at 3 Mbit/s; then the connection is reset in the middle of a request, several times."""
    rng = random.Random(seed)
    places = one_node.new_topic(partitions=2)
    proxy = one_node.proxies[1]
    proxy.shape(delay_s=0.05, bytes_per_s=3e6 / 8)
    settings = draw_settings(rng) | {"request.timeout.ms": 5_000, "delivery.timeout.ms": 30_000}
    settings["batch.size"] = max(16_384, settings["batch.size"])  # otherwise ten requests a second would not be enough
    before = proxy.accepted
    producer = start_producer(one_node.proxied, **settings)
    with Workload(producer, places, rng, records_a_second=1_000) as work:
        work.await_acknowledged(300)
        assert proxy.accepted <= before + 3, "reconnected, though all was well"
        for _ in range(4):
            count = rng.randrange(1, 20_000)
            one_node.note(f"reset after {count} more bytes of requests")
            proxy.cut_after(count, Way.UP)
            work.await_acknowledged(100)
    one_node.note(finish(one_node.direct, work))


def test_row_08_half_open(one_node: FaultStage, start_producer: StartProducer, seed: int) -> None:
    """No peer reports the lost connection: request.timeout.ms detects it, under load and after a pause."""
    rng = random.Random(seed)
    places = one_node.new_topic(partitions=2)
    proxy = one_node.proxies[1]
    settings = draw_settings(rng) | CONNECTING | {"request.timeout.ms": 1_000}
    producer = start_producer(one_node.proxied, **settings)
    with Workload(producer, places, rng) as work:
        for _ in range(3):
            work.await_acknowledged(50)
            one_node.note("half open")
            proxy.half_open()
            work.await_acknowledged(50)
    one_node.note(finish(one_node.direct, work))
    assert 0.8 < work.longest_silence_s() < 1.9, "one request.timeout.ms, and not another one on the way back"
    topic = places[0][0]
    proxy.half_open()
    with Stopwatch() as watch:
        producer.send(topic, b"after a pause").result(10)
    one_node.note(f"after a pause, a record took {watch.took_s:.2f} s")
    assert watch.took_s > 0.9
    assert watch.own_s < 1.9


def test_row_08_idle_connections_are_closed(one_node: FaultStage, start_producer: StartProducer, seed: int) -> None:
    """The producer closes idle connections before a firewall could drop them. A closed connection makes it refresh the
    metadata over another one, so one connection is always there, and none is older than connections.max.idle.ms and a
    little.
    """
    places = one_node.new_topic()
    proxy = one_node.proxies[1]
    producer = start_producer(one_node.proxied, **{"connections.max.idle.ms": 700, "linger.ms": 0})
    for number in range(3):
        assert producer.send(places[0][0], f"{number}", partition=0).result(10).offset == number
        accepted = proxy.accepted
        until(lambda accepted=accepted: proxy.accepted >= accepted + 2, "idle connections stay open")  # type: ignore[misc]
        assert proxy.open_connections <= 2
    one_node.note(f"{proxy.accepted} connections")


def sender_seconds(producer: KafkaProducer) -> float:
    """The processor time of the Sender's thread."""
    native_id = sender_thread(producer).native_id
    (thread,) = (each for each in psutil.Process().threads() if each.id == native_id)
    return float(thread.user_time + thread.system_time)


def until(condition: Callable[[], bool], complaint: str, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.01)


class Stuck:
    """Batches of `size` bytes; the first is stuck in the middle of a frame when its time is over."""

    def __init__(self, stage: FaultStage, start_producer: StartProducer, size: int, **settings: object) -> None:
        self.stage, self.size = stage, size
        self.ledger = Ledger("stuck")
        self.proxy = stage.proxies[1]
        limits = {"request.timeout.ms": 2_000, "delivery.timeout.ms": 3_000, "linger.ms": 0}
        self.producer = start_producer(
            stage.proxied,
            **{"send.buffer.bytes": 4_096, "max.request.size": 2_000_000, **limits, **CONNECTING, **settings},
        )

    def send(self, topic: str, size: int) -> None:
        record = self.ledger.add((topic, 0), size)
        self.producer.send(topic, record.value, partition=0, on_completion=self.ledger.of_row(record))

    def begin(self, topic: str, bytes_per_s: float) -> None:
        """The batch's first request times out in the middle of a frame; the second sends slowly until the batch has
        expired.
        """
        self.send(topic, 10)
        self.producer.flush(10)
        self.proxy.shape(Way.UP, bytes_per_s=bytes_per_s)
        self.send(topic, self.size)
        accepted = self.proxy.accepted
        until(lambda: self.proxy.accepted > accepted, "the first request is not given up")
        passed = self.proxy.passed[Way.UP]
        until(lambda: self.proxy.passed[Way.UP] >= passed + 3_000, "the second request is not under way")

    def check(self, *topics: str) -> None:
        self.producer.flush(30)
        self.ledger.check()
        assert_kept(history_of(self.stage.direct, dict.fromkeys(topics, 1), self.ledger.sent))
        failed = [str(error) for error in self.ledger.errors]
        self.stage.note(f"{len(self.ledger.sent)} records, {len(failed)} failed ({failed[:1]}), no anomaly")


@pytest.mark.quick
def test_row_09_batch_expires_in_mid_frame(one_node: FaultStage, start_producer: StartProducer, seed: int) -> None:
    rng = random.Random(seed)
    ((topic, _),) = one_node.new_topic(**{"max.message.bytes": 2_000_000})
    stuck = Stuck(one_node, start_producer, rng.randrange(500_000, 1_500_000))
    stuck.begin(topic, bytes_per_s=rng.choice((20_000.0, 40_000.0)))
    stuck.proxy.shape(Way.UP, bytes_per_s=1.0)
    used, began = sender_seconds(stuck.producer), time.monotonic()
    until(lambda: bool(stuck.ledger.errors), "the batch does not expire")
    share = (sender_seconds(stuck.producer) - used) / (time.monotonic() - began)
    one_node.note(f"the Sender used {share:.1%} of a processor at 1 byte a second")
    assert share < 0.05
    stuck.proxy.heal()
    for _ in range(20):
        stuck.send(topic, rng.randrange(10, 50_000))
    stuck.check(topic)
    assert len(stuck.ledger.errors) == 1


@pytest.mark.quick
@pytest.mark.parametrize("is_healed_early", [True, False], ids=["frame_completed", "frame_torn"])
def test_row_10_memory_of_a_batch_in_mid_frame(
    one_node: FaultStage, start_producer: StartProducer, seed: int, is_healed_early: bool
) -> None:
    """The memory of a batch is free only when its request has ended. A record of that size waits, and each record
    arrives in its own topic.
    """
    ((first, _),) = one_node.new_topic(**{"max.message.bytes": 2_000_000})
    ((second, _),) = one_node.new_topic(**{"max.message.bytes": 2_000_000})
    size = 600_000
    stuck = Stuck(one_node, start_producer, size, **{"buffer.memory": 1_000_000, "max.block.ms": 20_000})
    stuck.producer.partitions_for(second)  # otherwise the send would wait for the metadata
    stuck.begin(first, bytes_per_s=20_000.0)
    until(lambda: bool(stuck.ledger.errors), "the batch does not expire")
    expired = time.monotonic()
    if is_healed_early:
        threading.Timer(0.3, stuck.proxy.heal).start()
    stuck.send(second, size)  # it waits for memory
    waited = time.monotonic() - expired
    one_node.note(f"waited {waited:.2f} s for the memory of the batch that had expired")
    assert waited > (0.2 if is_healed_early else 0.5)
    stuck.proxy.heal()
    stuck.send(second, size)
    stuck.check(first, second)


@pytest.mark.quick
def test_row_11_slices_and_ends_in_mid_response(one_node: FaultStage, start_producer: StartProducer, seed: int) -> None:
    rng = random.Random(seed)
    places = one_node.new_topic(partitions=2)
    proxy = one_node.proxies[1]
    proxy.shape(Way.DOWN, slice_bytes=1)
    proxy.shape(Way.UP, slice_bytes=7)
    before = proxy.accepted
    producer = start_producer(one_node.proxied, **draw_settings(rng) | CONNECTING)
    with Workload(producer, places, rng, records_a_second=500) as work:
        work.await_acknowledged(30)
        for _ in range(12):
            count = rng.randrange(1, 120)
            proxy.cut_after(count, Way.DOWN, reset=rng.random() < 0.3)
            work.await_acknowledged(10)
    one_node.note(f"{proxy.accepted - before} connections; {finish(one_node.direct, work)}")
    assert proxy.accepted > before + 8


@pytest.mark.quick
def test_row_27_leader_restarted_while_answers_are_lost(
    one_node: FaultStage, start_producer: StartProducer, seed: int
) -> None:
    """The leader's snapshot of producers has only the last batch of each, so it refuses earlier ones that it has."""
    rng = random.Random(seed)
    places = one_node.new_topic(partitions=2)
    proxy = one_node.proxies[1]
    settings = draw_settings(rng)
    settings |= {"linger.ms": 0, "batch.size": 200, "max.in.flight.requests.per.connection": 5}
    producer = start_producer(one_node.proxied, **settings | CONNECTING)
    with Workload(producer, places, rng, records_a_second=500) as work:
        work.await_acknowledged(30)
        proxy.hold(Way.DOWN)
        time.sleep(1)
        one_node.restart(1)
        proxy.cut(reset=True)
        proxy.heal()
        work.await_acknowledged(30)
    one_node.note(finish(one_node.direct, work))


@pytest.mark.quick
def test_row_05_brokers_have_moved(timeline: object, start_producer: StartProducer, seed: int) -> None:
    """Every broker in the metadata is gone permanently; bootstrap.servers leads to the new ones (KIP-899)."""
    cluster = ScriptedCluster()
    cluster.create_topic("t")
    with ScriptedServer(cluster) as server, TcpProxy(server.bootstrap_servers[0]) as proxy:
        producer = start_producer(proxy.address, **{"reconnect.backoff.max.ms": 100, "request.timeout.ms": 500})
        assert producer.send("t", b"0", partition=0).result(10).offset == 0
        for number in range(1, 3):
            server.stop_node(0)
            with server.lock:
                cluster.nodes[0].host = "moved"
            server.start_node(0)
            proxy.upstream = server.bootstrap_servers[0]
            assert producer.send("t", f"{number}", partition=0).result(10).offset == number


# ---- transactions ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["one_node", "one_node_of_old"], ids=["version 2", "version 1"])
def transacting(request: pytest.FixtureRequest, one_node: FaultStage, one_node_of_old: FaultStage) -> FaultStage:
    """A node of each version of the transaction protocol, with open proxies."""
    return one_node if request.param == "one_node" else one_node_of_old


def stage_on(stage: FaultStage, start_producer: StartProducer, bootstrap_servers: str = "") -> Stage:
    """The stage of the producer's own transaction tests: readers go past the proxy, producers through it."""

    def start(_: str, **settings: object) -> KafkaProducer:
        return start_producer(bootstrap_servers or stage.proxied, **settings)

    return Stage(Cluster(Admin(stage.direct), 2, stage.kafka), start)


def in_thread(call: Callable[[], None]) -> tuple[threading.Thread, list[KafkaError]]:
    errors: list[KafkaError] = []

    def run() -> None:
        try:
            call()
        except KafkaError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("how", ["request lost", "reply lost", "silence"])
@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
def test_row_34_end_txn_without_response(
    transacting: FaultStage, start_producer: StartProducer, seed: int, how: str, is_commit: bool
) -> None:
    """The producer sends the same EndTxn again until it gets the response."""
    stage, proxy = stage_on(transacting, start_producer), transacting.proxies[1]
    producer = stage.started(**{"request.timeout.ms": 600})
    producer.send(stage.topic, "a", partition=0).result(30)
    proxy.hold(Way.UP if how == "request lost" else Way.DOWN)
    end = producer.commit_transaction if is_commit else producer.abort_transaction
    passed = proxy.passed[Way.UP]
    thread, errors = in_thread(end)
    until(lambda: how == "request lost" or proxy.passed[Way.UP] > passed, "no request")
    time.sleep(0.2)
    transacting.note(how)
    if how == "silence":
        proxy.half_open()
        proxy.shape(is_held=False)  # for new connections
    else:
        proxy.cut(reset=True)
        proxy.heal()
    thread.join(20)
    assert not thread.is_alive()
    assert errors == []
    stage.commit(producer, "b")
    stage.becomes(*(["a", "b"] if is_commit else ["b"]))


def test_row_34_outcome_unknown_until_the_response(
    transacting: FaultStage, start_producer: StartProducer, seed: int
) -> None:
    stage, proxy = stage_on(transacting, start_producer), transacting.proxies[1]
    producer = stage.started(**{"max.block.ms": 1_000, "request.timeout.ms": 400})
    producer.send(stage.topic, "a", partition=0).result(30)
    proxy.hold(Way.DOWN)
    with pytest.raises(KafkaTimeoutError, match="call it again"):
        producer.commit_transaction()
    for other in (producer.begin_transaction, producer.abort_transaction):
        with pytest.raises(IllegalStateError):
            other()
    proxy.heal()
    producer.commit_transaction()
    stage.commit(producer, "b")
    stage.becomes("a", "b")


@pytest.mark.quick
def test_row_35_late_end_txn_arrives_in_the_next_transaction(
    transacting: FaultStage, start_producer: StartProducer, seed: int
) -> None:
    """A delayed commit, which the producer sent again, arrives when the next transaction is open, and does not
    commit it.
    """
    stage, proxy = stage_on(transacting, start_producer), transacting.proxies[1]
    producer = stage.started(**{"request.timeout.ms": 500})
    producer.send(stage.topic, "a", partition=0).result(30)
    passed = proxy.passed[Way.UP]
    proxy.park()
    producer.commit_transaction()
    transacting.note(f"committed by another connection; {proxy.passed[Way.UP] - passed} bytes went that way")
    producer.begin_transaction()
    producer.send(stage.topic, "not committed", partition=0).result(30)
    proxy.heal()
    transacting.note("the first commit arrives")
    time.sleep(1)
    assert stage.committed() == ["a"]
    with_fence = None
    try:
        producer.abort_transaction()
    except KafkaError as error:
        with_fence = error
    transacting.note(f"abort: {with_fence!r}")
    assert with_fence is None
    stage.commit(producer, "b")
    stage.becomes("a", "b")
    assert "not committed" in stage.written()


def test_row_35_late_records_arrive_in_the_next_transaction(
    transacting: FaultStage, one_node_of_old: FaultStage, start_producer: StartProducer, seed: int
) -> None:
    stage, proxy = stage_on(transacting, start_producer), transacting.proxies[1]
    producer = stage.started(**{"request.timeout.ms": 500})
    producer.send(stage.topic, "a", partition=0).result(30)
    proxy.park()
    late = producer.send(stage.topic, "b", partition=0)
    producer.commit_transaction()
    assert late.result(0).partition == 0
    producer.begin_transaction()
    producer.send(stage.topic, "c", partition=1).result(30)
    proxy.heal()
    transacting.note("the first request with b arrives")
    time.sleep(0.5)
    producer.commit_transaction()
    try:
        stage.commit(producer, "d")
    except OutOfOrderSequenceError:
        # Under version 1 the leader refuses the late one, but remembers its sequence, and refuses the following ones.
        assert transacting is one_node_of_old
        producer.abort_transaction()
        stage.commit(producer, "d")
    stage.becomes("a", "b", "d", "c")
    assert sorted(stage.written()) == ["a", "b", "c", "d"]
