from __future__ import annotations

import gc
import multiprocessing
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.certificates import Authority
from support.producer_harness import TOPIC, ProducerHarness
from support.scripted_broker import faults
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ClusterAuthorizationError, ConfigError, SslAuthenticationError
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink import producer_pool
from spark_kafka_sink.sink.producer_pool import CLOSE_TIMEOUT_S, IDLE_MS, ProducerPool, process_pool


class HandClock:
    def __init__(self) -> None:
        self.time_ms = 1_000

    def now_ms(self) -> int:
        return self.time_ms

    def wall_ms(self) -> int:
        return self.time_ms

    def sleep_ms(self, duration_ms: int) -> None:
        self.time_ms += duration_ms

    def wait(self, condition: threading.Condition, timeout_ms: int) -> None:
        raise AssertionError("the pool waits for nothing")


class Bench:
    def __init__(self) -> None:
        self.clock = HandClock()
        self.made: list[ScriptedProducer] = []
        self.pool = ScriptedPool(self._make, self.clock)

    def _make(self, config: ProducerConfig) -> ScriptedProducer:
        self.made.append(ScriptedProducer(client_id=config.client_id))
        return self.made[-1]


def config(**settings: object) -> ProducerConfig:
    named = {key.replace("_", "."): value for key, value in settings.items()}
    return ProducerConfig.from_mapping({"bootstrap.servers": "h:9092", **named})


def test_consecutive_tasks_share_one_producer() -> None:
    bench = Bench()
    for _ in range(3):
        producer = bench.pool.acquire(config())
        bench.pool.release(producer)
    assert len(bench.made) == 1
    assert bench.made[0].closed_with == []


def test_equal_settings_share_and_different_ones_do_not() -> None:
    bench = Bench()
    first = bench.pool.acquire(config(linger_ms="5"))
    assert bench.pool.acquire(config(linger_ms=5)) is first
    assert bench.pool.acquire(config(linger_ms=6)) is not first


def test_idle_producer_is_closed_at_the_next_task() -> None:
    bench = Bench()
    bench.pool.release(bench.pool.acquire(config()))
    bench.clock.time_ms += IDLE_MS - 1
    bench.pool.release(bench.pool.acquire(config(acks="1")))
    assert bench.made[0].closed_with == []
    bench.clock.time_ms += 1
    bench.pool.acquire(config(acks="1"))
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]
    assert bench.made[1].closed_with == []
    assert bench.pool.acquire(config()) is bench.made[2]


def test_release_also_closes_idle_producers() -> None:
    bench = Bench()
    bench.pool.release(bench.pool.acquire(config()))
    busy = bench.pool.acquire(config(acks="1"))
    bench.clock.time_ms += IDLE_MS
    bench.pool.release(busy)
    assert [producer.closed_with for producer in bench.made] == [[CLOSE_TIMEOUT_S], []]


def test_producer_in_use_is_never_closed() -> None:
    bench = Bench()
    producer = bench.pool.acquire(config())
    bench.clock.time_ms += 10 * IDLE_MS
    assert bench.pool.acquire(config()) is producer
    bench.pool.release(producer)
    bench.clock.time_ms += 10 * IDLE_MS
    bench.pool.acquire(config(acks="1"))
    assert bench.made[0].closed_with == []


def test_failed_producer_is_closed_at_release() -> None:
    bench = Bench()
    producer = bench.pool.acquire(config())
    bench.made[0].has_failed = True
    bench.pool.release(producer)
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]
    assert bench.pool.acquire(config()) is bench.made[1]


def test_producer_with_refused_login_is_not_used_again() -> None:
    """Bug: the producer kept the expired certificate in memory, and the worker could not log in any more."""
    made = [ProducerHarness(), ProducerHarness()]
    pool = ProducerPool(Mock(side_effect=[harness.producer for harness in made]), HandClock())
    producer = pool.acquire(config())
    made[0].metadata.fatal_error(SslAuthenticationError("Node 0 refuses this client's certificate (expired)."))
    with pytest.raises(SslAuthenticationError):
        producer.partitions_for(TOPIC)
    pool.release(producer)
    assert pool.acquire(config()) is made[1].producer


def test_a_producer_that_fails_while_idle_is_not_given_again() -> None:
    bench = Bench()
    bench.pool.release(bench.pool.acquire(config()))
    bench.made[0].has_failed = True
    assert bench.pool.acquire(config()) is bench.made[1]
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]


def test_a_failed_producer_is_closed_by_its_last_user_only() -> None:
    bench = Bench()
    first, second = bench.pool.acquire(config()), bench.pool.acquire(config())
    bench.made[0].has_failed = True
    bench.pool.release(first)
    assert bench.made[0].closed_with == []
    replacement = bench.pool.acquire(config())
    assert replacement is bench.made[1]
    bench.pool.release(second)
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]
    bench.pool.release(replacement)
    assert bench.made[1].closed_with == []


@pytest.mark.parametrize("take", ["acquire", "borrow"])
def test_producer_is_not_lent_again_once_its_truststore_was_renewed(take: str, tmp_path: Path) -> None:
    """Bug: each worker's producer was refused once after the brokers had got certificates of another authority."""
    bench, path = Bench(), Authority().write(tmp_path / "ca.pem")
    secured = config(security_protocol="SSL", ssl_truststore_location=str(path))
    for _ in range(2):
        bench.pool.release(getattr(bench.pool, take)(secured))
    assert len(bench.made) == 1
    Authority("another authority").renew(path)
    renewed = getattr(bench.pool, take)(secured)
    assert renewed is bench.made[1]
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]
    bench.pool.release(renewed)
    path.unlink()
    assert getattr(bench.pool, take)(secured) is renewed


def test_producer_in_use_is_kept_by_its_users_after_a_renewal(tmp_path: Path) -> None:
    bench, path = Bench(), Authority().write(tmp_path / "ca.pem")
    secured = config(security_protocol="SSL", ssl_truststore_location=str(path))
    shared, borrowed = bench.pool.acquire(secured), bench.pool.borrow(secured)
    Authority("another authority").renew(path)
    newer, newer_borrowed = bench.pool.acquire(secured), bench.pool.borrow(secured)
    assert [newer, newer_borrowed] == bench.made[2:]
    assert [each.closed_with for each in bench.made] == [[]] * 4
    bench.pool.release(shared)
    bench.pool.release(borrowed)
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]
    bench.pool.release(newer)
    assert bench.pool.borrow(secured) is bench.made[4]
    assert bench.made[1].closed_with == [CLOSE_TIMEOUT_S]


def test_failed_creation_leaves_nothing_behind() -> None:
    def refuse(config: ProducerConfig) -> ScriptedProducer:
        raise ConfigError("no")

    pool = ScriptedPool(refuse, HandClock())
    for _ in range(2):
        with pytest.raises(ConfigError):
            pool.acquire(config())


@pytest.mark.parametrize("take", ["acquire", "borrow"])
@pytest.mark.parametrize("why", ["idle", "failed"])
def test_idle_producer_is_closed_if_creation_fails(take: str, why: str) -> None:
    bench = Bench()
    bench.pool.release(getattr(bench.pool, take)(config()))
    if why == "idle":
        bench.clock.time_ms += IDLE_MS
    bench.made[0].has_failed = why == "failed"

    def refuse(config: ProducerConfig) -> ScriptedProducer:
        raise ConfigError("no such truststore")

    bench.pool.create = refuse
    with pytest.raises(ConfigError):
        getattr(bench.pool, take)(config(acks="1"))
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]


def _pool_in_child(answers: multiprocessing.SimpleQueue[tuple[bool, int, int]], of_parent: int) -> None:
    pool = process_pool()
    answers.put((id(pool) == of_parent, len(producer_pool._POOLS), gc.get_freeze_count()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_forked_child_has_own_pool_and_frozen_modules() -> None:
    parent = process_pool()
    assert process_pool() is parent
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_pool_in_child, args=(answers, id(parent)))
    child.start()
    same, pools, frozen = answers.get()
    child.join()
    assert not same
    assert pools == 2
    assert frozen > 10_000
    assert process_pool() is parent


def test_borrowed_producer_is_not_shared_until_its_return() -> None:
    bench = Bench()
    first, second = bench.pool.borrow(config()), bench.pool.borrow(config())
    assert first is not second
    shared = bench.pool.acquire(config())
    assert shared is not first
    assert shared is not second
    bench.pool.release(first)
    bench.pool.release(second)
    assert bench.pool.borrow(config()) is first
    assert bench.made[1].closed_with == [CLOSE_TIMEOUT_S]  # the pool keeps one


def test_a_discarded_producer_is_closed_and_not_lent_again() -> None:
    bench = Bench()
    producer = bench.pool.borrow(config())
    bench.pool.discard(producer)
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]
    assert bench.pool.borrow(config()) is not producer


def test_failed_borrowed_producer_is_closed_at_release() -> None:
    bench = Bench()
    producer = bench.pool.borrow(config())
    bench.made[0].has_failed = True
    bench.pool.release(producer)
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]


def test_borrowed_producer_idle_for_long_is_closed() -> None:
    bench = Bench()
    bench.pool.release(bench.pool.borrow(config()))
    bench.clock.time_ms += IDLE_MS
    bench.pool.borrow(config())
    assert bench.made[0].closed_with == [CLOSE_TIMEOUT_S]


def test_closed_producers_are_not_listed() -> None:
    bench = Bench()
    bench.pool.discard(bench.pool.borrow(config()))
    failed = bench.pool.acquire(config())
    bench.made[1].has_failed = True
    bench.pool.release(failed)
    shared, borrowed = bench.pool.acquire(config(client_id="a")), bench.pool.borrow(config(client_id="b"))
    found = bench.pool.producers()
    assert [client_id for client_id, *_ in found] == ["a", "b"]
    assert len({number for _, number, _ in found}) == 2
    bench.pool.release(shared)
    bench.pool.release(borrowed)
    assert bench.pool.producers() == found
    assert bench.pool.lent == 0


class WatchedLock:
    def __init__(self) -> None:
        self.taken = 0
        self.is_held = False

    def __enter__(self) -> None:
        self.taken += 1
        self.is_held = True

    def __exit__(self, *_: object) -> None:
        self.is_held = False


def test_producers_are_made_under_lock_and_closed_after() -> None:
    class Watched(ScriptedProducer):
        def close(self, timeout: float | None = None) -> None:
            seen.append(("closed", lock.is_held))

    def create(config: ProducerConfig) -> ScriptedProducer:
        seen.append(("made", lock.is_held))
        return Watched()

    seen: list[tuple[str, bool]] = []
    lock = WatchedLock()
    pool = ScriptedPool(create, HandClock())
    pool._lock = lock  # type: ignore[assignment]
    pool.discard(pool.borrow(config()))
    shared = pool.acquire(config())
    shared.has_failed = True  # type: ignore[misc]
    pool.release(shared)
    pool.producers()
    assert seen == [("made", True), ("closed", False)] * 2
    assert lock.taken == 5


def test_producer_works_after_a_missing_right_is_granted() -> None:
    harness = ProducerHarness({"linger.ms": "0"})
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ClusterAuthorizationError))
    pool = ProducerPool(lambda _: harness.producer, harness.clock)
    outcomes = []
    for _ in ("refused", "granted"):
        producer = pool.acquire(config())
        delivery = harness.send(b"v")
        harness.settle(2_000)
        outcomes.append(type(delivery.error))
        pool.release(producer)
    assert outcomes == [ClusterAuthorizationError, type(None)]


def test_producer_with_an_internal_error_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [ProducerHarness({"linger.ms": "0"}) for _ in range(2)]
    unused = iter(made)
    pool = ProducerPool(lambda _: next(unused).producer, made[0].clock)
    failing = pool.acquire(config())
    made[0].warm_up()
    monkeypatch.setattr(ProducerMetrics, "batch_acknowledged", Mock(side_effect=MemoryError))
    made[0].send(b"v")
    made[0].settle(2_000)
    pool.release(failing)
    assert pool.acquire(config()) is made[1].producer
