"""A session's batches on scripted nodes: the state that it keeps between them, and its behaviour after a failure."""

from __future__ import annotations

import gc
import hashlib
import io
import logging
import pickle
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from support.certificates import Authority
from support.fake_clock import FakeClock
from support.session_bench import CONFIG, OPTIONS, PREFIX, SessionBench

from spark_kafka_sink.admin.transaction_values import EndTxnOutcome, EndTxnStatus
from spark_kafka_sink.common.errors import (
    ConfigError,
    IllegalStateError,
    KafkaTimeoutError,
    ProducerFencedError,
    SslAuthenticationError,
    TopicAuthorizationError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module
from spark_kafka_sink.sink.exactly_once import session as session_module
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchChangedError,
    BatchStart,
    TaskOutcome,
)
from spark_kafka_sink.sink.exactly_once.operator import Operator
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver
from spark_kafka_sink.sink.exactly_once.session import (
    DriverSession,
    RunTasks,
    StreamBatch,
    batch_prefix,
    is_named_by_query,
    session,
    stream_batch,
    stream_prefix,
)
from spark_kafka_sink.sink.kafka_sink import KafkaSink
from spark_kafka_sink.sink.options import SinkConfig


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SessionBench:
    return SessionBench(request.param, monkeypatch)


@pytest.mark.parametrize("prefix", [None, PREFIX])
def test_session_without_prefix_reads_no_decision(bench: SessionBench, prefix: str | None) -> None:
    """Bug: it read all decisions of other prefixes in its partition, which took seconds beside a stream of some
    hours.
    """
    place = KafkaDriverCluster(bench.coordinator, CONFIG, PREFIX).place
    others = bench.raw.begin("others/driver")
    bench.raw.write(others, place, "a decision of others")
    bench.commit(others)
    DriverSession(prefix).run(CONFIG, None, bench.tasks)
    assert bench.values() == ["row 0"]
    assert (bench.asked(ApiKey.FETCH) == []) is (prefix is None)


def test_batches_count_one_after_the_other(bench: SessionBench) -> None:
    for batch_id in range(4):
        bench.run(batch_id)
    assert bench.values() == [f"row {batch_id}" for batch_id in range(4)]


def test_first_batch_without_any_task_leaves_a_decision(bench: SessionBench) -> None:
    """Its DataFrame has no partition. Without the decision the next batch would be refused, as one without a first
    batch.
    """
    session(PREFIX).run(CONFIG, StreamBatch("q", "run 1", 0), lambda *_: [])
    bench.run(1, "run 2")
    assert bench.values() == ["row 1"]
    for run_id in ("run 3", "run 4"):
        session(PREFIX).run(CONFIG, StreamBatch("q", run_id, 2), lambda *_: [])
    with pytest.raises(IllegalStateError, match="Batch 0 comes after batch 1"):
        session(PREFIX).run(CONFIG, StreamBatch("q", "run 5", 0), lambda *_: [])
    DriverSession(PREFIX).run(CONFIG, StreamBatch("q", "run 6", 2), bench.tasks)
    assert bench.values() == ["row 1", "row 2"]


def test_batch_write_without_any_task_leaves_no_decision(bench: SessionBench) -> None:
    session(PREFIX).run(CONFIG, None, lambda *_: [])
    assert KafkaDriverCluster(bench.coordinator, CONFIG, PREFIX).last_decision() is None


def test_batch_repeated_after_restart_is_skipped(bench: SessionBench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_kafka_sink")
    bench.run(0)
    assert "skipped" not in caplog.text
    bench.run(0, "run 2")
    assert "Batch 0 of orders was committed before: skipped" in caplog.text
    bench.run(1, "run 2")
    assert bench.values() == ["row 0", "row 1"]


def test_data_frame_without_partitions_is_no_batch_that_had_rows(bench: SessionBench) -> None:
    """It has no task that could report that its rows are missing."""
    bench.run(0)
    with pytest.raises(BatchChangedError, match="with 1 rows, and now it comes with 0"):
        session(PREFIX).run(CONFIG, StreamBatch("q", "run 2", 0), lambda batch_start, batch_id: [])
    session(PREFIX).run(CONFIG, StreamBatch("q", "run 2", 1), lambda batch_start, batch_id: [])
    assert bench.values() == ["row 0"]


def test_sink_of_another_topic_does_not_skip_the_batch(bench: SessionBench) -> None:
    bench.run(0)
    other = SinkConfig.from_options({**OPTIONS, "topic": "u"})
    with pytest.raises(BatchChangedError, match="for topic='t', and now it comes for topic='u'"):
        bench.run(0, "run 2", other)
    bench.run(0, "run 3")
    bench.run(1, "run 3", other)
    assert bench.values() == ["row 0", "row 1"]


SECOND = (
    r"Batch 0 .*'orders' in this run already\. Two sinks .* give the second one a transactional\.id\.prefix of its "
    r"own\. Leave the first one as it is"
)


def test_refusal_of_a_retry_says_to_leave_out_what_has_returned(bench: SessionBench) -> None:
    """Bug: for a loop around write_batch and other code the error only advised a second prefix, which doubles rows."""
    bench.run(0)
    with pytest.raises(IllegalStateError, match=r"A retry in your own code must leave out a write_batch that has retu"):
        bench.run(0)


def test_second_call_for_a_batch_is_refused(bench: SessionBench) -> None:
    """Bug: the text asked for a prefix for each of two sinks. With a new one the first wrote its batch again."""
    bench.run(0)
    with pytest.raises(IllegalStateError, match=SECOND):
        bench.run(0)
    bench.run(1)
    assert bench.values() == ["row 0", "row 1"]


OTHERS = {
    "compression": SinkConfig.from_options({**OPTIONS, "kafka.compression.type": "lz4"}),
    "topic": SinkConfig.from_options({**OPTIONS, "topic": "u"}),
    "decision topic": SinkConfig.from_options({**OPTIONS, "decision.topic": "mine"}),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=list(OTHERS))
def test_second_sink_of_a_batch_is_refused(bench: SessionBench, other: SinkConfig) -> None:
    bench.run(0)
    with pytest.raises(IllegalStateError, match=SECOND):
        bench.run(0, config=other)
    assert bench.values() == ["row 0"]


@pytest.mark.parametrize("other", OTHERS.values(), ids=list(OTHERS))
def test_second_sink_is_refused_after_first_failed(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch, other: SinkConfig
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, "finish", fail)  # decided; the next try finishes it
        with pytest.raises(ZeroDivisionError):
            bench.run(0)
    with pytest.raises(IllegalStateError, match=SECOND):
        bench.run(0, config=other)
    bench.run(0)
    assert bench.values() == ["row 0"]


def test_new_sinks_go_on_under_the_prefix(bench: SessionBench) -> None:
    bench.run(0, config=SinkConfig.from_options(OPTIONS))
    bench.run(1, config=SinkConfig.from_options(OPTIONS))
    bench.run(2, config=OTHERS["compression"])
    bench.run(2, "run 2")
    bench.run(3, "run 2")
    assert bench.values() == [f"row {batch_id}" for batch_id in range(4)]


def test_sink_with_other_settings_makes_new_connections(bench: SessionBench) -> None:
    for batch_id in range(2):
        bench.run(batch_id)
    assert bench.connections == ["made"]
    bench.run(2, config=OTHERS["compression"])
    assert bench.connections == ["made", "closed", "made"]
    init = next(
        each
        for each in reversed(bench.asked(ApiKey.INIT_PRODUCER_ID))
        if each.request.transactional_id == "orders/driver"
    )
    assert init.request.producer_id == -1  # its epoch may belong to another cluster


def test_sink_uses_the_decision_topic_it_names(bench: SessionBench) -> None:
    bench.run(0, config=OTHERS["decision topic"])
    bench.run(1, config=OTHERS["decision topic"])
    with pytest.raises(IllegalStateError, match=r"decision\.topic=__spark_kafka_sink_decisions is not in the cluster"):
        bench.run(2)
    bench.run(2, "run 2", config=OTHERS["decision topic"])
    written = KafkaDriverCluster(bench.coordinator, OTHERS["decision topic"], PREFIX).last_decision()
    assert written is not None
    assert written.batch_id == 2


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_failed_batch_is_aborted_and_retry_counts(bench: SessionBench, error: type[BaseException]) -> None:
    def fail(batch_start: BatchStart, batch_id: int) -> list[TaskOutcome]:
        bench.tasks(batch_start, batch_id)
        raise error

    bench.run(0)
    with pytest.raises(error):
        session(PREFIX).run(CONFIG, StreamBatch("q", "run 1", 1), fail)
    assert bench.state("orders/0") == "CompleteAbort"
    bench.run(1)
    assert bench.values() == ["row 0", "row 1"]


@pytest.mark.parametrize("step", ["begin", "commit"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, KafkaTimeoutError])
def test_interrupted_client_is_not_used_again(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    """It may wait forever for an answer that it has had. Signal handlers may raise any exception."""

    def interrupted(*_: object) -> None:
        raise error

    bench.run(0)
    with monkeypatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, step, interrupted)
        with pytest.raises(error):
            bench.run(1)
    bench.run(1)
    gave_up_anew = step == "commit" and error is not KafkaTimeoutError
    assert bench.connections == ["made", "closed", *(["made", "closed"] if gave_up_anew else []), "made"]
    assert bench.values() == ["row 0", "row 1"]


@pytest.mark.parametrize("step", ["begin", "commit"])
def test_client_is_made_again_after_a_refused_login(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The client holds the certificates that it has read, and their files may have been renewed since."""

    def refused(*_: object) -> None:
        raise SslAuthenticationError("Node 0 refuses this client's certificate (certificate expired).")

    bench.run(0)
    with monkeypatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, step, refused)
        with pytest.raises(SslAuthenticationError):
            bench.run(1)
    bench.run(1, "run 2")
    assert bench.connections == ["made", "closed", *(["made", "closed"] if step == "commit" else []), "made"]
    assert bench.values() == ["row 0", "row 1"]


def test_client_is_made_again_once_its_truststore_was_renewed(bench: SessionBench, tmp_path: Path) -> None:
    """The session goes on with the epoch that it holds: it is the same driver."""
    path = Authority().write(tmp_path / "ca.pem")
    files = {"kafka.security.protocol": "SSL", "kafka.ssl.truststore.location": str(path)}
    config = SinkConfig.from_options(OPTIONS | files)
    bench.run(0, config=config)
    bench.run(1, config=config)
    assert bench.connections == ["made"]
    reads = len(bench.asked(ApiKey.FETCH))
    Authority("another authority").renew(path)
    bench.run(2, config=config)
    bench.run(3, config=config)
    path.unlink()
    bench.run(4, config=config)
    assert bench.connections == ["made", "closed", "made"]
    assert len(bench.asked(ApiKey.FETCH)) == reads
    assert bench.values() == [f"row {number}" for number in range(5)]


@pytest.mark.parametrize("is_decided", [True, False])
def test_client_is_made_again_after_refused_end(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch, is_decided: bool
) -> None:
    """Bug: the batch failed with a different error, so the client was kept. The next batch was refused too, although
    the certificate had been renewed.
    """
    refusal = SslAuthenticationError("Node 0 refuses this client's certificate (certificate expired).")

    def refused(_: object, transactions: Sequence[OpenTransaction], **__: object) -> list[EndTxnOutcome]:
        return [EndTxnOutcome(each, EndTxnStatus.UNRESOLVED, each.producer, refusal) for each in transactions]

    def fail(*_: object) -> NoReturn:
        raise KafkaTimeoutError

    bench.run(0)
    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "end", refused)
        tasks: Callable[[BatchStart, int], list[TaskOutcome]] = bench.tasks if is_decided else fail  # type: ignore[assignment]
        with pytest.raises(KafkaTimeoutError):
            session(PREFIX).run(CONFIG, StreamBatch("q", "run 1", 1), tasks)
    bench.run(1, "run 2")
    assert bench.connections == ["made", "closed", "made"]
    assert bench.values() == ["row 0", "row 1"]


def test_session_does_not_read_its_own_decision_again(bench: SessionBench) -> None:
    bench.run(0)
    reads = len(bench.asked(ApiKey.FETCH))
    bench.run(1)
    session(PREFIX).run(CONFIG, StreamBatch("q", "run 1", 2), lambda *_: [])
    bench.run(3)
    assert len(bench.asked(ApiKey.FETCH)) == reads
    assert bench.values() == ["row 0", "row 1", "row 3"]


def test_session_is_not_idle_during_a_long_batch(bench: SessionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_long(batch_start: BatchStart, batch_id: int) -> list[TaskOutcome]:
        clock.sleep_ms(700_000)
        return []

    clock = FakeClock()
    monkeypatch.setattr(session_module, "SystemClock", lambda: clock)
    session(PREFIX).run(CONFIG, StreamBatch("q", "run 1", 0), take_long)
    session("payments")
    assert bench.connections == ["made"]
    clock.sleep_ms(600_001)
    session("payments")
    assert bench.connections == ["made", "closed"]


def test_client_is_closed_after_a_refused_login(bench: SessionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the metadata of each refused prefix's client stayed in memory permanently."""
    drivers = []

    def refuse(driver: ExactlyOnceDriver, *_: object) -> NoReturn:
        drivers.append(weakref.ref(driver))
        raise SslAuthenticationError

    monkeypatch.setattr(ExactlyOnceDriver, "begin", refuse)
    with pytest.raises(SslAuthenticationError):
        session(PREFIX).run(CONFIG, None, bench.tasks)
    gc.collect()
    assert [driver() for driver in drivers] == [None]
    assert bench.connections == ["made", "closed"]


def test_prefixes_of_one_batch_write_each_keep_no_connections(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: each kept five descriptors for ten minutes, of which a process may have a thousand, and its client's
    metadata permanently.
    """
    clock = FakeClock()
    monkeypatch.setattr(session_module, "SystemClock", lambda: clock)
    drivers, begin = [], ExactlyOnceDriver.begin

    def note(driver: ExactlyOnceDriver, *arguments: Any) -> BatchStart:
        drivers.append(weakref.ref(driver))
        return begin(driver, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, "begin", note)
        session(PREFIX).run(CONFIG, None, lambda *_: [])
    clock.sleep_ms(2_000)
    session("payments")
    assert bench.connections == ["made"]
    clock.sleep_ms(1)
    session("payments")
    assert bench.connections == ["made", "closed"]
    gc.collect()
    assert [driver() for driver in drivers] == [None]
    session(PREFIX).run(CONFIG, None, bench.tasks)
    assert bench.values() == ["row 0"]


@pytest.mark.parametrize("batch", [None, StreamBatch("q", "run 1", 0)], ids=["write", "stream"])
def test_idle_prefix_keeps_no_settings(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch, batch: StreamBatch | None
) -> None:
    """Bug: 20 KB for each stream stayed in a driver whose new checkpoints make new prefixes all the time."""
    monkeypatch.setattr(session_module, "IDLE_MS", -1)
    monkeypatch.setattr(session_module, "_SOON_IDLE_MS", -1)
    session(PREFIX).run(CONFIG, batch, lambda *_: [])
    session("payments")
    kept = session(PREFIX)
    assert bench.connections == ["made", "closed"]
    assert len(pickle.dumps({name: value for name, value in vars(kept).items() if name != "_lock"})) < 1_000


def test_only_most_recent_streams_keep_connections(bench: SessionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: each stream kept five descriptors for ten minutes, of which a process may have a thousand. After two hundred
    queries with availableNow, one for each table, the process could open no more files.
    """
    clock = FakeClock()
    monkeypatch.setattr(session_module, "SystemClock", lambda: clock)
    for number in range(40):
        session(f"table-{number}").run(CONFIG, StreamBatch(str(number), "run", 0), lambda *_: [])
        clock.sleep_ms(2_001)
    session("payments")
    assert bench.connections.count("made") - bench.connections.count("closed") == 32
    session("table-0").run(CONFIG, StreamBatch("0", "run", 1), lambda *_: [])
    session("payments")
    assert bench.connections.count("made") - bench.connections.count("closed") == 32, "those used last"
    made = bench.connections.count("made")
    session("table-0").run(CONFIG, StreamBatch("0", "run", 2), lambda *_: [])
    assert bench.connections.count("made") == made
    session("table-8").run(CONFIG, StreamBatch("8", "run", 1), lambda *_: [])
    assert bench.connections.count("made") == made + 1


def test_batch_writes_close_no_connections_of_a_stream(bench: SessionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: after 32 batch writes with a prefix each, a stream connected and logged in again for every batch."""
    clock = FakeClock()
    monkeypatch.setattr(session_module, "SystemClock", lambda: clock)
    bench.run(0)
    for number in range(33):
        session(f"table-{number}").run(CONFIG, None, lambda *_: [])
        clock.sleep_ms(2_001)
    bench.run(1)
    assert bench.connections == ["made"] + ["made", "closed"] * 33


def test_client_interrupted_during_abort_is_not_used_again(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, "abort", interrupted)
        runs: list[RunTasks] = [interrupted, failing_tasks]
        for tasks in runs:
            with pytest.raises(KeyboardInterrupt):
                session(PREFIX).run(CONFIG, StreamBatch("q", "run 1", 0), tasks)
    bench.run(0)
    assert bench.connections == [*["made", "closed"] * 4, "made"]
    assert bench.values() == ["row 0"]


def test_failed_abort_is_logged_and_first_error_raised(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*_: object) -> None:
        raise KafkaTimeoutError("node 0 has not answered.")

    monkeypatch.setattr(ExactlyOnceDriver, "abort", unreachable)
    with pytest.raises(IndexError, match="of the tasks"):
        session(PREFIX).run(CONFIG, StreamBatch("q", "run 1", 0), failing_tasks)
    assert (
        "Open transactions of the batch end when the query is started again, or by timeout: node 0 has" in caplog.text
    )


@pytest.mark.parametrize("batch", [None, StreamBatch("q", "run 1", 0)], ids=["write", "stream"])
def test_log_of_undecided_batch_says_what_ends_it(
    bench: SessionBench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    batch: StreamBatch | None,
) -> None:
    """Bug: no log said that the transactions were still open. For a batch write the log said that a start of the query
    ends them, but that start writes all rows again.
    """

    def fail(*_: object) -> None:
        raise KafkaTimeoutError("orders/0 is not there.")

    monkeypatch.setattr(ExactlyOnceDriver, "finish", fail)
    with pytest.raises(KafkaTimeoutError, match="orders/0"):
        DriverSession(None if batch is None else PREFIX).run(CONFIG, batch, bench.tasks)
    (line,) = (each.getMessage() for each in caplog.records if "Open transactions of the" in each.getMessage())
    assert "it may be decided, or not all of it could be aborted." in line
    assert ("started again" in line) is (batch is not None)
    finish = re.search(r"transactions finish --prefix=spark-kafka-sink-write-\d+ --bootstrap-servers HOST:PORT: ", line)
    assert (finish is not None) is (batch is None)


def failing_tasks(*_: object) -> list[TaskOutcome]:
    raise IndexError("of the tasks")


def test_policy_that_deletes_decisions_is_refused_at_each_start(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the look at the last decision's owner made the prefix known, so only its first start checked the topic."""
    bench.run(0)
    monkeypatch.setattr(session_module, "_SESSIONS", {})
    cluster_module._KNOWN.clear()  # as in a new process
    bench.cluster.topics[CONFIG.decision_topic].configs["cleanup.policy"] = "compact,delete"
    with pytest.raises(IllegalStateError, match=r"has cleanup\.policy=compact,delete"):
        bench.run(1, "run 2")
    assert bench.values() == ["row 0"]


def test_missing_decision_topic_is_an_error_and_closes_client(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise TopicAuthorizationError("not allowed")

    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "_find_topic", refuse)
        with pytest.raises(TopicAuthorizationError, match="not allowed"):
            bench.run(0)
    assert bench.connections == ["made", "closed"]
    bench.run(0)
    assert bench.values() == ["row 0"]


def test_child_does_not_close_connections_of_its_parent(bench: SessionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "IDLE_MS", -1)
    bench.run(0)
    monkeypatch.setattr(session_module, "os", SimpleNamespace(getpid=lambda: 2**22 + 1))
    bench.run(1, "run 2")
    assert bench.connections == ["made", "made"]


def test_fenced_driver_fails_before_its_tasks(bench: SessionBench) -> None:
    bench.run(0)
    other = DriverSession(PREFIX)
    other.run(CONFIG, StreamBatch("q", "run 2", 1), bench.tasks)
    with pytest.raises(ProducerFencedError):
        bench.run(1)
    assert bench.values() == ["row 0", "row 1"]


def test_driver_with_forgotten_id_reads_the_decision(bench: SessionBench) -> None:
    bench.run(0)
    other = DriverSession(PREFIX)
    other.run(CONFIG, StreamBatch("q", "run 2", 1), bench.tasks)
    bench.cluster.transactions.transactions.clear()  # as after transactional.id.expiration.ms
    bench.run(1)
    bench.run(2)
    assert bench.values() == ["row 0", "row 1", "row 2"]


def test_new_run_takes_over_from_other_drivers(bench: SessionBench) -> None:
    bench.run(0)
    Operator(bench.coordinator, CONFIG, io.StringIO(), lambda: 0).finish(PREFIX)
    bench.run(1, "run 2")
    assert bench.values() == ["row 0", "row 1"]


@pytest.mark.parametrize("ids", ["kept", "forgotten"])
def test_batch_of_another_driver_is_skipped_each_time(bench: SessionBench, ids: str) -> None:
    bench.run(0)
    DriverSession(PREFIX).run(CONFIG, StreamBatch("q", "run 2", 1), bench.tasks)
    if ids == "forgotten":
        bench.cluster.transactions.transactions.clear()
        bench.run(1)
    else:
        with pytest.raises(ProducerFencedError):
            bench.run(1)
    for run in ("run 4", "run 5"):  # later code in foreachBatch failed
        asked = len(bench.asked(ApiKey.FETCH))
        bench.run(1, run)
        assert len(bench.asked(ApiKey.FETCH)) > asked, "the last decision is another driver's, and is read"
    assert bench.values() == ["row 0", "row 1"]


def test_unused_session_keeps_no_connections(bench: SessionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_on(*_: object) -> list[TaskOutcome]:
        session("refunds")  # a batch runs, so its session is not idle
        return []

    bench.run(0)
    session("payments")
    assert bench.connections == ["made"]
    monkeypatch.setattr(session_module, "IDLE_MS", -1)
    monkeypatch.setattr(session_module, "_SOON_IDLE_MS", -1)
    session("payments").run(CONFIG, None, look_on)
    assert bench.connections == ["made", "closed", "made"]  # the last one belongs to payments
    bench.run(1)
    assert bench.connections[3:] == ["closed", "made"]  # the closed ones are of no use
    assert bench.values() == ["row 0", "row 1"]
    session("refunds")
    DriverSession(PREFIX).run(CONFIG, StreamBatch("q", "run 2", 2), bench.tasks)
    with pytest.raises(ProducerFencedError):  # also after a rest
        bench.run(2)


@pytest.mark.parametrize("prefix", [None, PREFIX])
def test_one_off_write_leaves_no_decision(bench: SessionBench, prefix: str | None) -> None:
    names: list[str] = []

    def tasks(batch_start: BatchStart, batch_id: int) -> list[TaskOutcome]:
        names.append(batch_start.prefix)
        return bench.tasks(batch_start, batch_id, "")

    DriverSession(prefix).run(CONFIG, None, tasks)
    assert bench.values() == ["row 0"]
    last = KafkaDriverCluster(bench.coordinator, CONFIG, names[0]).last_decision()
    assert (last is None) is (prefix is None)


def test_batch_writes_of_one_prefix_come_one_after_the_other(bench: SessionBench) -> None:
    for _ in range(2):
        session(PREFIX).run(CONFIG, None, lambda batch_start, batch_id: bench.tasks(batch_start, batch_id, ""))
    assert bench.values() == ["row 0", "row 1"]
    with pytest.raises(IllegalStateError, match="belongs to a batch write"):
        bench.run(2)


def test_a_batch_write_comes_after_one_of_another_process(bench: SessionBench) -> None:
    for writer in (session(PREFIX), DriverSession(PREFIX), session(PREFIX)):
        writer.run(CONFIG, None, lambda batch_start, batch_id: bench.tasks(batch_start, batch_id, ""))
    assert bench.values() == ["row 0", "row 1", "row 2"]


def test_batch_writes_of_one_process_begin_with_two_requests(bench: SessionBench) -> None:
    def begun(batch_start: BatchStart, batch_id: int) -> list[TaskOutcome]:
        requests.append([int(request.api_key) for request in bench.cluster.requests[before:]])
        return bench.tasks(batch_start, batch_id, "")

    requests: list[list[int]] = []
    for _ in range(2):
        before = len(bench.cluster.requests)
        session(PREFIX).run(CONFIG, None, begun)
    assert bench.values() == ["row 0", "row 1"]
    assert requests[1] == [ApiKey.INIT_PRODUCER_ID, ApiKey.LIST_OFFSETS]


def test_write_after_an_empty_one_follows_the_last_decision(bench: SessionBench) -> None:
    def write(batch_start: BatchStart, batch_id: int) -> list[TaskOutcome]:
        batch_ids.append(batch_id)
        return bench.tasks(batch_start, batch_id, "")

    batch_ids: list[int] = []
    session(PREFIX).run(CONFIG, None, write)
    DriverSession(PREFIX).run(CONFIG, None, write)
    session(PREFIX).run(CONFIG, None, lambda *_: [])
    session(PREFIX).run(CONFIG, None, write)
    assert batch_ids == [0, 1, 2]


def test_write_without_rows_restores_no_forgotten_decision(bench: SessionBench) -> None:
    bench.run(0)
    Operator(bench.coordinator, CONFIG, io.StringIO(), lambda: 0).forget(PREFIX)
    session(PREFIX).run(CONFIG, None, lambda *_: [])
    bench.run(0, "run 2")
    assert bench.values() == ["row 0", "row 0"]


def test_stream_prefix_comes_from_option_or_checkpoint() -> None:
    made = stream_prefix(CONFIG, {"checkpointLocation": "/a/b"})
    assert made == stream_prefix(CONFIG, {"checkpointlocation": "/a/b/"})
    assert made != stream_prefix(CONFIG, {"checkpointlocation": "/a/c"})
    named = SinkConfig.from_options({**OPTIONS, "transactional.id.prefix": "mine"})
    assert stream_prefix(named, {}) == "mine"
    with pytest.raises(ConfigError, match=r"checkpointLocation.*transactional\.id\.prefix"):
        stream_prefix(CONFIG, {})


def test_query_name_names_a_stream_without_a_location_option() -> None:
    """Spark's setting spark.sql.streaming.checkpointLocation keeps the checkpoint under the query's name."""
    made = stream_prefix(CONFIG, {"queryName": "orders"})
    assert made == stream_prefix(CONFIG, {"queryname": "orders", "checkpointLocation": ""})
    assert made != stream_prefix(CONFIG, {"queryname": "others"})
    assert made != stream_prefix(CONFIG, {"checkpointLocation": "orders"})
    located = {"queryname": "orders", "checkpointLocation": "/a"}
    assert stream_prefix(CONFIG, located) == stream_prefix(CONFIG, {"checkpointLocation": "/a"})
    found = [
        is_named_by_query(CONFIG, each) for each in ({"queryName": "orders"}, located, {"checkpointLocation": "/a"})
    ]
    assert found == [True, False, False]


@pytest.mark.parametrize(
    ("location", "spellings"),
    [
        ("/a/b", ["/a/b/", "/a//b", "///a/b", "/a/./b", "/a/c/../b"]),
        ("file:///a/b", ["file:/a/b", "file:///a/b/", "file:////a//b", "file:/a/./c/../b/"]),
        ("hdfs://node:8020/a", ["hdfs://node:8020//a/", "hdfs://node:8020/b/../a"]),
        ("s3a://bucket", ["s3a://bucket/"]),
        ("a/b", ["./a/b", "a//b/", "c/../a/b"]),
    ],
)
def test_checkpoint_in_another_spelling_has_the_same_prefix(location: str, spellings: list[str]) -> None:
    made = stream_prefix(CONFIG, {"checkpointLocation": location})
    assert made == f"spark-kafka-sink-{hashlib.sha256(location.encode()).hexdigest()[:24]}", "queries have it open"
    assert {stream_prefix(CONFIG, {"checkpointLocation": each}) for each in spellings} == {made}


def test_possibly_different_checkpoints_have_a_prefix_each() -> None:
    locations = [
        "/a",
        "/A",
        "a",
        "file:///a",
        "hdfs:///a",
        "hdfs:a",
        "hdfs://a",
        "hdfs://b/a",
        "//b/a",
        "/a?",
        "/a%20",
        "/a ",
        "../a",
    ]
    assert len({stream_prefix(CONFIG, {"checkpointLocation": each}) for each in locations}) == len(locations)


@pytest.mark.parametrize("run_id", ["run 7", None], ids=["active", "stopped"])
def test_stream_batch_has_query_run_and_checkpoint(monkeypatch: pytest.MonkeyPatch, run_id: str | None) -> None:
    query = run_id and SimpleNamespace(
        runId=lambda: SimpleNamespace(toString=lambda: run_id), resolvedCheckpointRoot=lambda: "file:/c"
    )
    context = SimpleNamespace(getLocalProperty={"sql.streaming.queryId": "q"}.get)
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context))
    monkeypatch.setattr(session_module, "running_query", lambda *given: query if given == (frame, context) else 1 / 0)
    assert stream_batch(frame, 4) == StreamBatch("q", run_id, 4, "file:/c" if run_id else None)


@pytest.mark.parametrize("batch_id", [0, 5, "4 "])
def test_batch_id_that_is_not_sparks_is_refused(monkeypatch: pytest.MonkeyPatch, batch_id: Any) -> None:
    """Bug: a counter of the user gave a batch that Spark ran again a new number, and its rows were written twice."""
    context = SimpleNamespace(getLocalProperty={"sql.streaming.queryId": "q", "streaming.sql.batchId": "4"}.get)
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context))
    monkeypatch.setattr(session_module, "running_query", lambda df, context: None)
    assert stream_batch(frame, 4).batch_id == 4
    with pytest.raises(ConfigError, match=r"write_batch got the batch id .*Spark runs batch 4 .*foreachBatch gives"):
        stream_batch(frame, batch_id)


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        ("4.0.5", r"Use format\(\"kafka_sink\"\)\.$"),
        (
            "3.5.9",
            r"Use PySpark 4\.0 or newer, with format\(\"kafka_sink\"\), or run the query without Spark Connect\.$",
        ),
    ],
)
def test_unknown_query_on_spark_connect_names_what_this_pyspark_has(
    monkeypatch: pytest.MonkeyPatch, version: str, advice: str
) -> None:
    """Bug: PySpark 3.5 has no `format`, and the error named it."""
    monkeypatch.setattr(session_module, "PYSPARK", version)

    class Remote:
        @property
        def sparkContext(self) -> object:  # noqa: N802
            raise NotImplementedError("[NOT_IMPLEMENTED] sparkContext() is not implemented.")

    frame: Any = SimpleNamespace(sparkSession=Remote())
    with pytest.raises(ConfigError, match=rf"Spark Connect does not give it.*{advice}"):
        stream_batch(frame, 0)


def test_own_thread_in_foreach_batch_gets_advice() -> None:
    context = SimpleNamespace(getLocalProperty=lambda name: None)
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context))
    with pytest.raises(ConfigError, match=r"not called by foreachBatch.*pyspark\.InheritableThread.*call write"):
        stream_batch(frame, 0)


def test_unpinned_threads_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: foreachBatch had called write_batch, and the error said that it had not."""
    monkeypatch.setenv("PYSPARK_PIN_THREAD", "False")
    context = SimpleNamespace(getLocalProperty=lambda name: None)
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context))
    with pytest.raises(ConfigError, match=r"with PYSPARK_PIN_THREAD=false Spark does not say.*environment"):
        stream_batch(frame, 0)


def test_forms_without_a_driver_refuse_before_any_row() -> None:
    sink = KafkaSink(OPTIONS)
    with pytest.raises(ConfigError, match=r"foreachPartition.*nothing on the driver.*foreachBatch"):
        sink.open(0, 0)
    with pytest.raises(ConfigError, match=r"foreachPartition.*nothing on the driver.*foreachBatch"):
        sink.write_partition(iter(()))


def test_foreach_batch_prefix_comes_from_the_checkpoints_location(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the prefix came from the query's id. A deleted checkpoint was not noticed, and every row was written
    twice.
    """
    monkeypatch.setattr(session_module, "_BATCH_PREFIXES", {})
    named = [batch_prefix(CONFIG, StreamBatch(query, "run", 0, "file:/checkpoint")) for query in ("q1", "q2")]
    assert named[0] == named[1] == stream_prefix(CONFIG, {"checkpointLocation": "file:///checkpoint"})
    assert batch_prefix(CONFIG, StreamBatch("q1", None, 0)) == named[0], "Spark forgets a query that is stopped"
    assert batch_prefix(CONFIG, StreamBatch("q1", "run", 0, "file:/other")) != named[0]
    with pytest.raises(IllegalStateError, match="Query q3 was stopped"):
        batch_prefix(CONFIG, StreamBatch("q3", None, 0))
    given = SinkConfig.from_options(OPTIONS | {"transactional.id.prefix": "mine"})
    assert batch_prefix(given, StreamBatch("q1", "run", 0, "file:/checkpoint")) == "mine"


def test_query_decided_under_its_id_goes_on_under_that_name(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_BATCH_PREFIXES", {})
    old = "spark-kafka-sink-q"
    session(old).run(CONFIG, StreamBatch("q", "run 1", 0), bench.tasks)
    assert batch_prefix(CONFIG, StreamBatch("q", "run 2", 0, "file:/checkpoint")) == old
    asked = len(bench.asked(ApiKey.FETCH))
    assert batch_prefix(CONFIG, StreamBatch("q", "run 2", 1, "file:/checkpoint")) == old
    assert len(bench.asked(ApiKey.FETCH)) == asked, "a process looks once"


def test_query_without_a_prefix_creates_no_other_decision_topic(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the search for a decision under the query's id created the misspelt topic."""
    monkeypatch.setattr(session_module, "_BATCH_PREFIXES", {})
    wrong = SinkConfig.from_options({**OPTIONS, "decision.topic": "misspelt"})

    def run(config: SinkConfig, run_id: str) -> None:
        batch = StreamBatch("q", run_id, 0, "file:///checkpoint")
        session(batch_prefix(config, batch)).run(config, batch, bench.tasks)

    run(CONFIG, "run 1")
    before = set(bench.cluster.topics)
    with pytest.raises(IllegalStateError, match=r"decision\.topic=misspelt .*is not in the cluster"):
        run(wrong, "run 2")
    assert set(bench.cluster.topics) == before


def test_another_query_is_refused_before_it_fences_the_first(bench: SessionBench) -> None:
    """Bug: a second application with the same prefix stopped the first one, which owned the prefix."""
    bench.run(0)
    fences = len(bench.asked(ApiKey.INIT_PRODUCER_ID))
    other = DriverSession(PREFIX)
    with pytest.raises(IllegalStateError, match="belongs to query q,"):
        other.run(CONFIG, StreamBatch("other", "run", 0), bench.tasks)
    assert len(bench.asked(ApiKey.INIT_PRODUCER_ID)) == fences
    bench.run(1)
    assert bench.values() == ["row 0", "row 1"]


def test_owner_is_not_read_while_a_driver_decides(bench: SessionBench) -> None:
    """A read of the last decision would wait until the transaction of a dead driver has timed out."""
    bench.run(0)
    place = KafkaDriverCluster(bench.coordinator, CONFIG, PREFIX).place
    bench.raw.write(bench.raw.begin(f"{PREFIX}/driver"), place, "half a decision")
    started_ms = bench.rig.now_ms
    DriverSession(PREFIX).run(CONFIG, StreamBatch("q", "run 2", 1), bench.tasks)
    assert bench.rig.now_ms - started_ms < 1_000
    assert bench.values() == ["row 0", "row 1"]
