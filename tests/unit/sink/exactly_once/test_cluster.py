"""The driver's requests to its cluster and their timeouts, on scripted nodes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
from kio.schema.errors import ErrorCode
from support.certificates import Authority
from support.coordinator_bench import CoordinatorBench
from support.driver_steps import task_outcome
from support.fake_clock import FakeClock
from support.scripted_broker import faults

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.admin.transaction_values import EndTxnOutcome, EndTxnStatus, TransactionState
from spark_kafka_sink.admin.transactions import Transactions
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    CoordinatorLoadInProgressError,
    InvalidTransactionTimeoutError,
    KafkaError,
    KafkaTimeoutError,
    SslAuthenticationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.protocol.metadata import GROUP, TRANSACTION
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module
from spark_kafka_sink.sink.exactly_once.cluster import (
    KafkaDriverCluster,
    connect,
    coordinators_in_process,
    describe_in_process,
    process_client,
    process_driver,
)
from spark_kafka_sink.sink.exactly_once.messages import TaskOutcome, TaskTransaction, task_id
from spark_kafka_sink.sink.options import SinkConfig

T = TypeVar("T")

DRIVER = OpenTransaction("P/driver", 0, 0, 2)
CONFIG = SinkConfig.from_options(
    {
        "kafka.bootstrap.servers": "broker-0:9092",
        "topic": "t",
        "delivery.guarantee": "exactly-once",
        "kafka.transaction.timeout.ms": "600000",
        "kafka.max.block.ms": "1000",
    }
)


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no client of another test."""
    monkeypatch.setattr(cluster_module, "_CLIENTS", {})


@pytest.mark.parametrize(("finalized", "spoken"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_both_transaction_versions_are_supported(finalized: int, spoken: int) -> None:
    bench = CoordinatorBench(version=finalized)
    assert KafkaDriverCluster(bench.coordinator, CONFIG, "P").transaction_version() == spoken


def test_dead_driver_blocks_other_readers_at_most_a_minute() -> None:
    bench = CoordinatorBench()
    KafkaDriverCluster(bench.coordinator, CONFIG, "P").init_producer_id("P/driver", None)
    assert bench.cluster.transactions.transactions["P/driver"].timeout_ms == 60_000


@pytest.mark.parametrize(
    ("task_timeout_ms", "own_ms"),
    [(900_000, 60_000), (300_000, 30_000), (60_000, 6_000), (20_000, 5_000), (3_000, 3_000)],
)
def test_a_decision_times_out_before_the_transactions_that_it_decides(task_timeout_ms: int, own_ms: int) -> None:
    """Bug: the decision's transaction had the tasks' timeout of a minute. A coordinator that was away committed it
    after the tasks' transactions had been aborted: their rows were lost. A new run of the batch would have written
    them.
    """
    config = replace(CONFIG, producer=replace(CONFIG.producer, transaction_timeout_ms=task_timeout_ms))
    bench = CoordinatorBench()
    KafkaDriverCluster(bench.coordinator, config, "P").init_producer_id("P/driver", None)
    assert bench.cluster.transactions.transactions["P/driver"].timeout_ms == own_ms


def test_decision_of_a_dead_driver_outlasts_max_block_ms() -> None:
    bench = CoordinatorBench()
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    bench.raw.write(bench.raw.begin("Q/driver", timeout_ms=30_000), cluster.place, "half a decision")
    started_ms = bench.rig.now_ms
    assert cluster.last_decision() is None
    assert bench.rig.now_ms - started_ms >= 29_000


def test_end_of_transactions_is_retried_until_delivery_timeout_ms() -> None:
    bench = CoordinatorBench()
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    opened = bench.open("P/0")
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(CoordinatorLoadInProgressError), times=None)
    started_ms = bench.rig.now_ms
    (ended,) = cluster.end(opened, committed=True)
    assert ended.status is EndTxnStatus.UNRESOLVED
    assert bench.rig.now_ms - started_ms >= CONFIG.producer.delivery_timeout_ms


def test_clients_of_unused_settings_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: each client kept its sockets open for the life of a worker."""

    def connect(config: ProducerConfig) -> SimpleNamespace:
        seen.append(f"{config.client_id} made")
        return SimpleNamespace(close=lambda: seen.append(f"{config.client_id} closed"), timer=Mock())

    def ask(client_id: str) -> object:
        with process_client(replace(CONFIG.producer, client_id=client_id)) as (client, _):
            return client

    seen: list[str] = []
    clock = FakeClock()
    monkeypatch.setattr(cluster_module, "SystemClock", lambda: clock)
    monkeypatch.setattr(cluster_module, "connect", connect)
    one = ask("one")
    clock.sleep_ms(599_000)
    ask("two")
    assert ask("one") is one
    clock.sleep_ms(599_999)
    ask("two")
    clock.sleep_ms(1)
    ask("two")
    assert seen == ["one made", "two made", "one closed"]
    clock.sleep_ms(600_000)
    ask("two")  # a client that is asked for is not closed
    monkeypatch.setattr("os.getpid", lambda: 0)
    ask("three")  # of a child process, which must not use its parent's connections
    assert seen == ["one made", "two made", "one closed", "three made"]
    clock.sleep_ms(600_000)
    ask("one")
    assert seen[4:] == ["three closed", "one made"]


def test_worker_looks_up_the_coordinators_of_64_tasks_with_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CoordinatorBench()
    monkeypatch.setattr(cluster_module, "connect", lambda config: bench.coordinator)
    for partition in (70, 64, 127):
        name = task_id("P", partition, 0)
        assert set(coordinators_in_process(CONFIG, "P", partition, name)) == {(TRANSACTION, name), (GROUP, name)}
    assert len(coordinators_in_process(CONFIG, "P", 64, "P/64.1")) == 2  # a later attempt
    first, second, *later = bench.asked(ApiKey.FIND_COORDINATOR)
    around = {task_id("P", partition, 0) for partition in range(64, 128)}
    assert set(first.request.coordinator_keys) == set(second.request.coordinator_keys) == around
    assert [each.request.coordinator_keys for each in later] == [("P/64.1",), ("P/64.1",)]


@pytest.mark.parametrize(
    ("slow_answers", "asked"),
    [(0, [["P/0", "P/driver"]]), (8, [["P/0", "P/driver"], ["P/driver"]])],
    ids=["at once", "more than a second apart"],
)
def test_last_id_is_asked_for_again_if_the_answers_are_far_apart(
    monkeypatch: pytest.MonkeyPatch, slow_answers: int, asked: list[list[str]]
) -> None:
    """A task's look at its driver must not be older than its look at its own id by the time of a whole batch."""
    bench = CoordinatorBench()
    bench.open("P/driver", "P/0")  # on two nodes
    calls: list[list[str]] = []
    describe = Transactions.describe_transactions

    def counted(self: Transactions, ids: Iterable[str], timer: Timer, *given: Any) -> object:
        calls.append([*ids])
        return describe(self, calls[-1], timer, *given)

    monkeypatch.setattr(Transactions, "describe_transactions", counted)
    monkeypatch.setattr(cluster_module, "connect", lambda config: bench.coordinator)
    bench.cluster.on(
        ApiKey.DESCRIBE_TRANSACTIONS,
        faults.fail_with(CoordinatorLoadInProgressError),
        times=slow_answers,
        node_id=1,
    )
    config = replace(CONFIG, producer=replace(CONFIG.producer, max_block_ms=60_000))
    found = describe_in_process(config, DRIVER, asked[0])
    assert {name: each.state for name, each in found.items() if each} == dict.fromkeys(
        asked[0], TransactionState.ONGOING
    )
    assert calls == asked


@pytest.mark.parametrize("who", ["task", "driver"])
def test_client_is_made_again_after_a_refused_login(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """Bug: once a certificate had expired, the brokers refused a worker's exactly-once tasks, and the driver of format,
    for the life of the worker, although the file had been renewed.
    """

    def ask() -> object:
        if who == "task":
            return describe_in_process(CONFIG, DRIVER, ["P/driver"])
        with process_driver(CONFIG, "P") as driver:
            return driver.begin()

    def fail(error: KafkaError) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Transactions, "describe_transactions", Mock(side_effect=error))
            patch.setattr(Transactions, "list_transactions", Mock(side_effect=error))
            with pytest.raises(type(error)):
                ask()
        seen.append(type(error).__name__)

    def made(_: ProducerConfig) -> ClusterClient:
        coordinator = CoordinatorBench().coordinator
        monkeypatch.setattr(coordinator, "close", lambda: seen.append("closed"))
        seen.append("made")
        return coordinator

    seen: list[str] = []
    monkeypatch.setattr(cluster_module, "connect", made)
    fail(KafkaTimeoutError("Not described within 1000 ms."))
    fail(SslAuthenticationError("Node 0 refuses this client's certificate (certificate expired)."))
    fail(KafkaTimeoutError("Not described within 1000 ms."))
    assert seen == ["made", "KafkaTimeoutError", "closed", "SslAuthenticationError", "made", "KafkaTimeoutError"]


@pytest.mark.parametrize("whose", ["P/driver", "P/0"])
def test_client_is_made_again_after_a_refused_abort(monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    """Bug: an abort by format did not report the refusal, and the client was kept. The next batch's commit was refused
    too, although the certificate had been renewed.
    """
    refusal = SslAuthenticationError("Node 0 refuses this client's certificate (certificate expired).")
    bench = CoordinatorBench()
    connected = Mock(return_value=bench.coordinator)
    monkeypatch.setattr(cluster_module, "connect", connected)
    monkeypatch.setattr(bench.coordinator, "close", Mock())
    with process_driver(CONFIG, "P") as driver:
        batch_start = driver.begin()
    (left,) = bench.open("P/0")
    end = KafkaDriverCluster.end

    def refused(
        of: KafkaDriverCluster, transactions: Sequence[OpenTransaction], *, committed: bool
    ) -> list[EndTxnOutcome]:
        if transactions[0].transactional_id != whose:
            return end(of, transactions, committed=committed)
        return [EndTxnOutcome(each, EndTxnStatus.UNRESOLVED, each.producer, refusal) for each in transactions]

    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "end", refused)
        with pytest.raises(SslAuthenticationError, match="expired"), process_driver(CONFIG, "P") as driver:
            driver.abort(batch_start, [TaskOutcome(batch_start, 0, "", 0, 1, TaskTransaction(left, 0, 1))])
    assert connected.call_count == 1
    with process_driver(CONFIG, "P") as driver:
        driver.begin()
    assert connected.call_count == 2


def test_disallowed_timeout_is_refused_before_the_tasks() -> None:
    bench = CoordinatorBench()
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    bench.cluster.transactions.max_timeout_ms = 599_999
    for _ in range(2):
        with pytest.raises(InvalidTransactionTimeoutError):
            cluster.init_producer_id("P/driver", None)
    bench.cluster.transactions.max_timeout_ms = 600_000
    held = cluster.init_producer_id("P/driver", None)
    bench.cluster.transactions.max_timeout_ms = 60_000
    assert cluster.init_producer_id("P/driver", held).epoch == held.epoch + 1, "asked once a client"


def test_only_transactions_in_the_given_states_are_listed() -> None:
    bench = CoordinatorBench()
    opened, ended = bench.open("P/0", "P/1")
    bench.commit(ended)
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    assert cluster.list_ids([TransactionState.ONGOING]) == [opened.transactional_id]


def test_timeout_of_topic_creation_names_the_option() -> None:
    bench = CoordinatorBench()
    bench.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(ErrorCode.not_controller), times=None)
    with pytest.raises(KafkaTimeoutError, match=r"^decision\.topic=__\w+ of exactly-once delivery: .* within 1000 ms"):
        KafkaDriverCluster(bench.coordinator, CONFIG, "P")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ProducerConfig]:
    """The configurations for which clients were made."""
    configs: list[ProducerConfig] = []

    def connect(config: ProducerConfig, *_: object) -> object:
        configs.append(config)
        return Mock()

    monkeypatch.setattr(ClusterClient, "connect", connect)
    return configs


def test_tasks_share_a_client_and_forked_children_do_not(
    made: list[ProducerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(config: ProducerConfig) -> ClusterClient:
        with process_client(config) as (client, _):
            return client

    first = kept(CONFIG.producer)
    assert kept(replace(CONFIG.producer)) is first
    assert kept(replace(CONFIG.producer, linger_ms=7)) is not first
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert kept(CONFIG.producer) is not first
    assert len(made) == 3


def in_thread(call: Callable[[], T]) -> T:
    """Return what another thread's call returns, or raise its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@contextmanager
def held_by_another_thread(config: ProducerConfig) -> Iterator[Callable[[], None]]:
    """Another thread uses the client inside the `with`, until the call that this yields."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with process_client(config):
            is_held.set()
            assert is_over.wait(10)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        try:
            assert is_held.wait(10)
            yield is_over.set
        finally:
            is_over.set()
        held.result()


@pytest.mark.usefixtures("made")
def test_process_client_is_lent_to_one_thread_at_a_time() -> None:
    """Bug: two threads polled and sent on the same connections. Their calls failed with "The request is done already",
    or blamed a broker.
    """
    users: list[int] = []
    most: list[int] = []

    def use(_number: int) -> ClusterClient:
        with process_client(CONFIG.producer) as (client, _), process_client(CONFIG.producer) as (again, _):
            users.append(1)
            most.append(len(users))
            os.sched_yield()
            users.pop()
            assert again is client  # a thread that has it is not kept from it
            return client

    with ThreadPoolExecutor(4) as pool:
        assert len({id(client) for client in pool.map(use, range(200))}) == 1
    assert set(most) == {1}


@pytest.mark.usefixtures("made")
def test_thread_waits_for_the_client_at_most_max_block_ms() -> None:
    impatient = replace(CONFIG.producer, max_block_ms=20)
    with held_by_another_thread(impatient), pytest.raises(KafkaTimeoutError) as refused, process_client(impatient):
        pass
    assert "Another thread of this process used the connections to broker-0:9092 for 20 ms (max.block.ms)." in str(
        refused.value
    )
    with process_client(impatient):
        pass


def test_time_of_waiting_is_part_of_max_block_ms(made: list[ProducerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(cluster_module, "SystemClock", lambda: clock)
    with held_by_another_thread(CONFIG.producer) as release:

        class Waiting:
            """The lock, which is free after 300 ms."""

            def __init__(self, lock: threading.RLock) -> None:
                self.lock = lock

            def acquire(self, *, blocking: bool = True, timeout: float = -1) -> bool:
                if blocking:
                    assert timeout == 1.0
                    clock.sleep_ms(300)
                    release()
                return self.lock.acquire(blocking, timeout if blocking else -1)

            def release(self) -> None:
                self.lock.release()

        (kept,) = cluster_module._CLIENTS.values()
        kept.lock = Waiting(kept.lock)  # type: ignore[assignment]
        with process_client(CONFIG.producer) as (client, _):
            pass
    assert [call.args for call in client.timer.call_args_list] == [(1000,), (700,)]  # type: ignore[attr-defined]
    assert len(made) == 1


def test_fork_does_not_inherit_a_held_client(made: list[ProducerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    with held_by_another_thread(CONFIG.producer):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: own + 1)
            with process_client(replace(CONFIG.producer)):
                pass
        assert len(made) == 2


def test_client_in_use_is_not_closed_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, closed = FakeClock(), Mock()
    monkeypatch.setattr(cluster_module, "SystemClock", lambda: clock)
    monkeypatch.setattr(cluster_module, "connect", lambda config: Mock(close=lambda: closed(config.client_id)))
    one, two, three = (replace(CONFIG.producer, client_id=name) for name in ("one", "two", "three"))
    with held_by_another_thread(one), process_client(two):
        clock.sleep_ms(600_000)
        with process_client(three):  # one is another thread's, two is this thread's
            pass
        closed.assert_not_called()
    clock.sleep_ms(600_000)
    with process_client(three):
        pass
    assert sorted(call.args for call in closed.call_args_list) == [("one",), ("two",)]


def test_thread_that_waited_for_an_idle_client_gets_a_new_one(
    made: list[ProducerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may close the client as idle after this one has found it, and before this one has its lock."""
    found = cluster_module._Kept()
    closed = Mock()
    found.client = closed

    class TakenOut(dict[Any, Any]):
        def setdefault(self, key: Any, default: Any = None) -> Any:
            monkeypatch.setattr(cluster_module, "_CLIENTS", {})
            return found

    monkeypatch.setattr(cluster_module, "_CLIENTS", TakenOut())
    with process_client(CONFIG.producer) as (client, _):
        assert client is not closed
    assert len(made) == 1
    assert in_thread(lambda: found.lock.acquire(blocking=False))


def test_client_is_not_used_again_after_an_interrupt(made: list[ProducerConfig]) -> None:
    with pytest.raises(KeyboardInterrupt), process_client(CONFIG.producer) as (first, _):
        raise KeyboardInterrupt
    assert first.close.call_count == 1  # type: ignore[attr-defined]
    with process_client(CONFIG.producer):
        pass
    assert len(made) == 2


@pytest.mark.parametrize(("given_ms", "used_ms"), [(100, 10), (3, 3)])
def test_retry_backoff_of_the_driver_does_not_grow(made: list[ProducerConfig], given_ms: int, used_ms: int) -> None:
    connect(replace(CONFIG.producer, retry_backoff_ms=given_ms))
    assert [(config.retry_backoff_ms, config.retry_backoff_max_ms) for config in made] == [(used_ms, used_ms)]


@pytest.mark.parametrize("missing", [ApiKey.LIST_TRANSACTIONS, ApiKey.CREATE_TOPICS])
def test_too_old_broker_is_refused_with_the_needed_release(monkeypatch: pytest.MonkeyPatch, missing: ApiKey) -> None:
    bench = CoordinatorBench()
    bench.cluster.topics.clear()
    bench.cluster.versions = {key: value for key, value in bench.cluster.versions.items() if key != missing}
    monkeypatch.setattr(cluster_module, "connect", Mock(return_value=bench.coordinator))
    monkeypatch.setattr(bench.coordinator, "close", Mock())
    with pytest.raises(UnsupportedVersionError) as refused, process_driver(CONFIG, "P") as driver:
        driver.abort(driver.begin(), ())
    assert str(refused.value).count("delivery.guarantee=exactly-once needs Kafka 3.0 or newer.") == 1
    assert missing.name in str(refused.value)


def test_lowered_transaction_version_is_not_called_an_old_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: transaction.version was lowered to 0 during a batch, and the error said that Kafka 3.0 is needed."""
    bench = CoordinatorBench()
    monkeypatch.setattr(cluster_module, "connect", Mock(return_value=bench.coordinator))
    monkeypatch.setattr(bench.coordinator, "close", Mock())
    with process_driver(CONFIG, "P") as driver:
        outcome = task_outcome(bench, driver.begin())
    bench.cluster.on(ApiKey.PRODUCE, faults.fail_with(ErrorCode.unsupported_version))
    with pytest.raises(UnsupportedVersionError) as refused, process_driver(CONFIG, "P") as driver:
        driver.commit([outcome])
    assert "If its transaction.version or metadata.version was lowered, raise it again" in str(refused.value)
    assert "Kafka 3.0" not in str(refused.value)


def test_client_is_made_again_once_its_truststore_was_renewed(made: list[ProducerConfig], tmp_path: Path) -> None:
    """Bug: after the brokers had got certificates of another authority, each process died once although its truststore
    was right: it kept what its client had read.
    """
    path = Authority().write(tmp_path / "ca.pem")
    config = replace(CONFIG.producer, security_protocol="SSL", ssl_truststore_location=str(path))
    with process_client(config) as (first, _):
        Authority("another authority").renew(path)
        with process_client(config) as (again, _):
            assert again is first  # this thread is using it
    with process_client(config) as (second, _):
        assert second is not first
    assert first.close.call_count == 1  # type: ignore[attr-defined]
    with process_client(config) as (again, _):
        assert again is second
    path.unlink()
    with process_client(config) as (again, _):
        assert again is second
    assert len(made) == 2


def test_truststore_renewed_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def made(_: ProducerConfig) -> Mock:
        if not clients:
            Authority("another authority").renew(path)
        clients.append(Mock())
        return clients[-1]

    clients: list[Mock] = []
    path = Authority().write(tmp_path / "ca.pem")
    config = replace(CONFIG.producer, security_protocol="SSL", ssl_truststore_location=str(path))
    monkeypatch.setattr(cluster_module, "connect", made)
    for _ in range(3):
        with process_client(config):
            pass
    assert len(clients) == 2
