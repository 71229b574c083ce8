"""The memory bound: bytes counted, waiters served in their order, limits kept."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from support.buffer_memory import give_back
from support.fake_clock import FakeClock

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import BufferExhaustedError, ProducerClosedError, RecordTooLargeError
from spark_kafka_sink.producer.buffer_pool import BufferPool, Grant, SharedAllocation

JOIN_S = 5


def until(condition: Callable[[], bool]) -> None:
    """Spin until other threads have made the condition true."""
    deadline = time.monotonic() + JOIN_S
    while not condition():
        assert time.monotonic() < deadline


def waiting_thread(
    pool: BufferPool, size: int, name: str, served: list[str], max_block_ms: int = 60_000
) -> threading.Thread:
    def run() -> None:
        try:
            pool.allocate(size, max_block_ms, Grant())
            served.append(name)
        except ProducerClosedError:
            served.append(f"{name} closed")

    queued = pool.queued
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: pool.queued == queued + 1)
    return thread


def test_memory_is_counted_out_and_back() -> None:
    pool = BufferPool(100, FakeClock())
    pool.allocate(60, 0, Grant())
    assert pool.available_memory == 40
    pool.allocate(40, 0, Grant())
    assert pool.available_memory == 0
    give_back(pool, 100)
    assert pool.available_memory == 100
    assert repr(pool) == "BufferPool(100 of 100 bytes free, 0 waiting)"


def test_exchange_for_more_succeeds_without_free_memory() -> None:
    pool = BufferPool(100, FakeClock())
    pool.allocate(70, 0, Grant())
    grant = Grant()
    pool.allocate(20, 0, grant)
    pool.exchange(grant, 50)
    assert grant.size == 50
    assert pool.available_memory == 0
    give_back(pool, 20)
    assert pool.available_memory == 0
    with pytest.raises(BufferExhaustedError):
        pool.allocate(1, 0, Grant())
    with pytest.raises(BufferExhaustedError):  # a send that waits and gives up takes no memory
        pool.allocate(1, 10, Grant())
    give_back(pool, 50)
    pool.take_back(grant)
    pool.take_back(grant)  # once only
    assert pool.available_memory == 100
    assert repr(pool) == "BufferPool(100 of 100 bytes free, 0 waiting)"


def test_exchange_for_less_wakes_a_waiting_send() -> None:
    clock = FakeClock()
    pool = BufferPool(100, clock)
    grant = Grant()
    pool.allocate(100, 0, grant)
    clock.on_wait = lambda _: pool.exchange(grant, 30)
    assert pool.allocate(70, 1_000, Grant()) == 0


def test_more_than_the_whole_pool_is_refused_with_the_option() -> None:
    pool = BufferPool(100, FakeClock())
    pool.allocate(100, 0, Grant())  # the last byte may be taken
    with pytest.raises(RecordTooLargeError, match=r"101 bytes .* buffer\.memory=100"):
        pool.allocate(101, 1_000, Grant())


def test_wait_ends_at_max_block_ms_and_takes_no_memory() -> None:
    clock = FakeClock()
    pool = BufferPool(100, clock)
    pool.allocate(70, 0, Grant())
    before_ms = clock.now_ms()
    with pytest.raises(BufferExhaustedError, match=r"buffer\.memory=100 .* max\.block\.ms=250"):
        pool.allocate(50, 250, Grant())
    assert clock.now_ms() - before_ms == 250
    assert pool.available_memory == 30  # the memory collected meanwhile came back
    assert pool.queued == 0
    assert pool.waits.read(clock.now_ms()).total.wait_ms == 250


def test_waiting_caller_is_reported_once() -> None:
    clock = FakeClock()
    waits: list[int] = []
    pool = BufferPool(100, clock, lambda: waits.append(pool.queued))
    pool.allocate(70, 1_000, Grant())
    assert waits == []

    def after_a_while(_: int) -> None:
        clock.advance(1)
        give_back(pool, 10)

    clock.on_wait = after_a_while
    pool.allocate(60, 1_000, Grant())
    assert waits == [1]


def test_a_wait_of_no_length_fails_at_once() -> None:
    clock = FakeClock()
    pool = BufferPool(10, clock)
    pool.allocate(10, 0, Grant())
    with pytest.raises(BufferExhaustedError):
        pool.allocate(1, 0, Grant())
    assert clock.now_ms() == FakeClock().now_ms()


def test_memory_is_collected_in_pieces() -> None:
    clock = FakeClock()
    pool = BufferPool(100, clock)
    pool.allocate(100, 0, Grant())
    pieces = iter([30, 30, 40])

    def after_a_while(timeout_ms: int) -> None:
        clock.advance(10)
        give_back(pool, next(pieces))

    clock.on_wait = after_a_while
    assert pool.allocate(90, 1_000, Grant()) == 30  # ms waited
    assert pool.available_memory == 10
    assert pool.waits.read(clock.now_ms()).total.wait_ms == 30


def test_allocation_without_a_wait_returns_0_ms() -> None:
    assert BufferPool(10, FakeClock()).allocate(10, 1_000, Grant()) == 0


def test_callers_are_served_in_order() -> None:
    pool = BufferPool(100, SystemClock())
    pool.allocate(100, 0, Grant())
    served: list[str] = []
    first = waiting_thread(pool, 80, "first", served)
    second = waiting_thread(pool, 10, "second", served)
    give_back(pool, 50)  # enough for the second caller, which must wait for the first
    until(lambda: pool.available_memory == 0)
    assert served == []
    give_back(pool, 40)
    first.join(JOIN_S)
    second.join(JOIN_S)
    assert served == ["first", "second"]
    assert pool.available_memory == 0


def test_no_caller_overtakes_before_the_first_wakes() -> None:
    clock = FakeClock()
    pool = BufferPool(100, clock)
    pool.allocate(100, 0, Grant())

    def come_between(timeout_ms: int) -> None:
        clock.on_wait = None
        give_back(pool, 60)
        with pytest.raises(BufferExhaustedError):
            pool.allocate(10, 0, Grant())
        with pytest.raises(BufferExhaustedError):
            pool.allocate(10, 50, Grant())  # waits behind the first, and takes no memory that becomes free meanwhile
        give_back(pool, 20)

    clock.on_wait = come_between
    assert pool.allocate(80, 1_000, Grant()) == 50
    assert pool.available_memory == 0


def test_small_request_does_not_overtake_a_waiting_one() -> None:
    pool = BufferPool(100, SystemClock())
    pool.allocate(95, 0, Grant())
    served: list[str] = []
    thread = waiting_thread(pool, 50, "first", served)
    until(lambda: pool.available_memory == 0)
    with pytest.raises(BufferExhaustedError):
        pool.allocate(1, 0, Grant())
    give_back(pool, 95)
    thread.join(JOIN_S)
    assert served == ["first"]
    assert pool.available_memory == 50


def test_next_caller_gets_the_memory_of_one_that_gives_up() -> None:
    # With 40 bytes collected the first waits for 50 and gives up; the second then gets its 30 of them.
    pool = BufferPool(100, SystemClock())
    pool.allocate(60, 0, Grant())
    served: list[str] = []
    failed: list[str] = []

    def first() -> None:
        try:
            pool.allocate(50, 50, Grant())
        except BufferExhaustedError as error:
            failed.append(str(error))

    first_thread = threading.Thread(target=first, daemon=True)
    first_thread.start()
    until(lambda: pool.queued == 1 or bool(failed))
    second = threading.Thread(target=lambda: (pool.allocate(30, 60_000, Grant()), served.append("second")), daemon=True)
    second.start()
    first_thread.join(JOIN_S)
    second.join(JOIN_S)
    assert failed
    assert served == ["second"]
    assert pool.available_memory == 10


def test_memory_in_parts_does_not_extend_the_wait() -> None:
    clock = FakeClock()
    pool = BufferPool(100, clock)
    pool.allocate(100, 0, Grant())
    timeouts: list[int] = []

    def some_comes_free(timeout_ms: int) -> None:
        timeouts.append(timeout_ms)
        clock.advance(min(60, timeout_ms))
        give_back(pool, 10)

    clock.on_wait = some_comes_free
    with pytest.raises(BufferExhaustedError):
        pool.allocate(90, 100, Grant())
    assert timeouts == [100, 40]
    assert pool.available_memory == 20


def test_many_threads_are_all_served_and_give_everything_back() -> None:
    """BufferPoolTest.testStressfulSituation: ten threads need twice the memory of the pool, in pieces of all sizes."""
    waits: list[None] = []
    pool = BufferPool(5 * 1_024, SystemClock(), lambda: waits.append(None))
    failures: list[BaseException] = []
    most = [0]

    def run(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                size, grant = rng.randrange(1, 2 * 1_024), Grant()
                pool.allocate(size, JOIN_S * 1_000, grant)
                most[0] = max(most[0], pool.total_memory - pool.available_memory)
                assert grant.size == size
                time.sleep(0)  # lets the other threads run
                give_back(pool, size)
        except BaseException as error:  # memory of this thread would be lost
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)
    assert len(waits) > 100, "memory was short"
    assert 0 < most[0] <= pool.total_memory
    assert pool.available_memory == pool.total_memory
    assert pool.queued == 0


def test_close_wakes_every_waiter_and_refuses_later_callers() -> None:
    pool = BufferPool(10, SystemClock())
    pool.allocate(10, 0, Grant())
    served: list[str] = []
    threads = [waiting_thread(pool, 5, name, served) for name in ("a", "b")]
    pool.close()
    for thread in threads:
        thread.join(JOIN_S)
    assert sorted(served) == ["a closed", "b closed"]
    assert pool.queued == 0
    give_back(pool, 10)
    with pytest.raises(ProducerClosedError):
        pool.allocate(1, 1_000, Grant())


def test_shared_memory_goes_back_with_its_last_holder() -> None:
    given_back: list[bool] = []
    allocation = SharedAllocation(lambda: given_back.append(True), holder="a")
    for holder in ("b", "b", "c"):
        allocation.hold(holder)
    allocation.release("a")
    allocation.release("a")  # as after an internal error
    allocation.release("b")
    assert given_back == []
    allocation.release("c")
    assert given_back == [True]
