from __future__ import annotations

import logging

import pytest
from kio.schema.errors import ErrorCode
from support.client_rig import METADATA_EXPIRE_MS, REBOOTSTRAP_TRIGGER_MS, REQUEST_TIMEOUT_MS, ClientRig
from support.scripted_broker import faults

from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import RebootstrapRequiredError
from spark_kafka_sink.protocol.metadata import MetadataRequest
from spark_kafka_sink.protocol.versions import ApiKey

BOOTSTRAP = Node(-1, "broker-0", 9092)


def updates(rig: ClientRig) -> int:
    return len(rig.cluster.requests_of(ApiKey.METADATA))


def test_first_poll_connects_and_asks_for_the_topics() -> None:
    rig = ClientRig(3, ["t"])
    rig.await_metadata()
    assert set(rig.metadata.fetch().nodes) == {rig.node(node_id) for node_id in range(3)}
    assert rig.metadata.fetch().partition_count_for_topic("t") == 3
    assert updates(rig) == 1
    assert len(rig.selector.connection_ids) == 1, "a second connection begins only after the first one ended"


def test_only_one_update_is_in_flight() -> None:
    rig = ClientRig(1)
    rig.await_metadata()
    rig.connect(0)
    rig.network.held.add(0)
    rig.clock.advance(500)
    rig.metadata.request_update()
    for _ in range(20):
        rig.poll(10)
    assert updates(rig) == 2
    assert rig.metadata.time_to_next_update(rig.now_ms) == 0
    assert not rig.updater.is_update_due(rig.now_ms)


def test_answer_counts_though_another_node_was_lost_meanwhile() -> None:
    rig = ClientRig(2)
    rig.await_metadata()
    for node_id in (0, 1):
        rig.connect(node_id)
    rig.cluster.on(ApiKey.METADATA, faults.delay(500))
    rig.clock.advance(500)
    rig.metadata.request_update()
    rig.poll_until(lambda: updates(rig) == 2)
    version = rig.metadata.update_version
    rig.network.cut(1 - rig.cluster.requests_of(ApiKey.METADATA)[-1].node_id)
    rig.poll_until(lambda: rig.metadata.update_version > version, limit_ms=550)
    assert updates(rig) == 2


def test_update_that_could_not_be_sent_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the client waited for the answer to a request that a MemoryError had kept from being sent, for good."""
    rig = ClientRig(1)
    rig.await_metadata()
    version = rig.metadata.update_version
    rig.clock.advance(500)
    rig.metadata.request_update()
    with monkeypatch.context() as patch:
        patch.setattr(MetadataRequest, "build", _no_memory)
        with pytest.raises(MemoryError):
            rig.poll_until(lambda: rig.metadata.update_version > version)
    rig.poll_until(lambda: rig.metadata.update_version > version)


def _no_memory(*_: object) -> None:
    raise MemoryError


def test_old_view_is_renewed_without_a_request() -> None:
    rig = ClientRig(1)
    rig.await_metadata()
    version = rig.metadata.update_version
    rig.poll_until(lambda: rig.metadata.update_version > version, limit_ms=METADATA_EXPIRE_MS + 1_000)
    assert rig.now_ms - 1_000_000 >= METADATA_EXPIRE_MS


def test_poll_ends_in_time_for_the_next_update() -> None:
    rig = ClientRig(1)
    rig.await_metadata()
    rig.metadata.request_update()
    wait_ms = rig.metadata.time_to_next_update(rig.now_ms)
    before_ms = rig.now_ms
    rig.client.poll(60_000, rig.now_ms)
    assert rig.now_ms - before_ms == wait_ms


def test_metadata_without_brokers_is_a_failed_update() -> None:
    rig = ClientRig(1, ["t"])
    rig.cluster.on(ApiKey.METADATA, faults.change(lambda values: {**values, "brokers": ()}), times=3)
    rig.poll_until(lambda: updates(rig) == 3)
    rig.poll(5)
    assert rig.metadata.fetch().is_bootstrap_configured
    assert rig.metadata.time_to_next_update(rig.now_ms) > 200, "the pause grows"
    rig.await_metadata()


def test_errors_and_missing_listeners_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = ClientRig(1, ["t"])

    def without_listener(values: dict[str, object]) -> dict[str, object]:
        partition = {
            "error_code": ErrorCode.listener_not_found,
            "partition_index": 0,
            "leader_id": -1,
            "leader_epoch": 0,
        }
        return {
            **values,
            "topics": [
                {"name": "t", "error_code": 0, "partitions": [partition]},
                {"name": "t2", "error_code": ErrorCode.invalid_topic_exception},
            ],
        }

    rig.cluster.on(ApiKey.METADATA, faults.change(without_listener))
    with caplog.at_level(logging.WARNING):
        rig.poll_until(lambda: updates(rig) == 1 and rig.metadata.update_version > 1)
    assert "t-0" in caplog.text
    assert "for topic t2: " in caplog.text


def test_warning_of_a_topic_that_is_being_created_says_that_it_passes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the first write to a new topic logged `Metadata came with errors for 1 topics, as {...}`."""
    rig = ClientRig(1, ["t"])
    ask = MetadataRequest(("t",), allow_auto_topic_creation=True)
    monkeypatch.setattr(rig.metadata, "new_metadata_request_builder", lambda: ask)
    rig.cluster.on(ApiKey.METADATA, faults.refuse_topic("t", ErrorCode.unknown_topic_or_partition))
    with caplog.at_level(logging.WARNING):
        rig.poll_until(lambda: updates(rig) == 1 and rig.metadata.update_version > 1)
    assert caplog.messages[-1] == (
        "No metadata from the brokers for topic t: The server does not host this topic-partition."
        " If the brokers are creating it, this passes."
    )


def test_missing_topic_is_logged_once_until_it_was_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a task that waited for a misspelt topic logged the same warning dozens of times."""
    rig = ClientRig(1, ["t"])
    ask = MetadataRequest(("t",), allow_auto_topic_creation=True)
    monkeypatch.setattr(rig.metadata, "new_metadata_request_builder", lambda: ask)

    def warnings_after(requests: int) -> int:
        for _ in range(requests):
            before = rig.metadata.request_update()
            rig.poll_until(lambda version=before: rig.metadata.update_version > version)  # type: ignore[misc]
        return caplog.text.count("No metadata from the brokers for topic t:")

    refuse = faults.refuse_topic("t", ErrorCode.unknown_topic_or_partition)
    with caplog.at_level(logging.WARNING):
        rig.cluster.on(ApiKey.METADATA, refuse, times=3)
        assert warnings_after(3) == 1
        assert warnings_after(1) == 1
        rig.cluster.on(ApiKey.METADATA, refuse, times=1)
        assert warnings_after(1) == 2


def test_text_of_brokers_stays_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    rig = ClientRig(1, ["t"])
    forged = "x\n2026-01-01 CRITICAL root: forged\x1b[2J"

    def strange(values: dict[str, object]) -> dict[str, object]:
        topics = [
            {"name": f"{forged}{index}", "error_code": ErrorCode.invalid_topic_exception} for index in range(1_000)
        ]
        return {**values, "topics": topics}

    rig.cluster.on(ApiKey.METADATA, faults.change(strange))
    with caplog.at_level(logging.INFO):
        rig.poll_until(lambda: updates(rig) == 1 and rig.metadata.update_version > 1)
    assert "for topic x?2026-01-01" in caplog.text
    assert "and 990 more topics." in caplog.text
    assert all(message.isprintable() and len(message) < 3_000 for message in caplog.messages)


def test_lost_bootstrap_connection_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    rig = ClientRig(1, recovery_strategy="none")
    rig.network.refusing.add(0)
    with caplog.at_level(logging.WARNING):
        rig.poll_until(lambda: rig.client.connection_failed(BOOTSTRAP))
    assert "No metadata yet" in caplog.text
    assert "Connection refused" in str(rig.metadata.connection_failure)


def test_metadata_request_waits_for_the_nodes_backoff() -> None:
    rig = ClientRig(1, recovery_strategy="none")
    rig.network.refusing.add(0)
    attempts = 0
    connecting = rig.states.connecting

    def count(*arguments: object) -> None:
        nonlocal attempts
        attempts += 1
        connecting(*arguments)  # type: ignore[arg-type]

    rig.states.connecting = count  # type: ignore[assignment]
    deadline_ms = rig.now_ms + 10_000
    polls = rig.selector.polls
    while rig.now_ms < deadline_ms:
        rig.client.poll(deadline_ms - rig.now_ms, rig.now_ms)
    assert 10 <= attempts <= 20
    assert rig.selector.polls - polls < 500, "no busy loop"


# ---- starting again from bootstrap.servers ---------------------------------------------------------------------------


def move_cluster(rig: ClientRig) -> None:
    """Let every broker listen elsewhere, except under the name in bootstrap.servers."""
    rig.metadata.bootstrap([("seed", 9092)])
    rig.await_metadata()
    for node in rig.cluster.nodes.values():
        node.host = f"new-{node.host}"
    for node_id in rig.cluster.nodes:
        rig.network.cut(node_id)


class Seeds(ClientRig):
    """Let `seed` lead to the present address of node 0."""

    def __init__(self, recovery_strategy: str, reconnect_backoff_ms: int = 5_000) -> None:
        super().__init__(2, ["t"], recovery_strategy=recovery_strategy, reconnect_backoff_ms=reconnect_backoff_ms)
        node_at = self.network.node_at
        self.network.node_at = lambda sockaddr: 0 if sockaddr[0] == "seed" else node_at(sockaddr)


def test_no_available_node_starts_a_rebootstrap() -> None:
    rig = Seeds("rebootstrap")
    move_cluster(rig)
    rig.poll_until(lambda: rig.node(0) in rig.metadata.fetch().nodes, limit_ms=10_000)
    assert rig.metadata.fetch().partition_count_for_topic("t") == 2


def test_rebootstrap_makes_a_new_connection_to_a_bootstrap_address() -> None:
    """The existing connection may lead to a dead address, which would cost another request.timeout.ms."""
    rig = Seeds("rebootstrap")
    rig.metadata.bootstrap([("seed", 9092)])
    rig.await_metadata()
    assert rig.selector.connection_ids == ["-1"]
    for node_id in (0, 1):
        rig.network.refusing.add(node_id)
        rig.client.ready(rig.node(node_id), rig.now_ms)
    rig.poll_until(lambda: rig.metadata.fetch().is_bootstrap_configured, limit_ms=10_000)
    assert rig.selector.connection_ids == []
    rig.network.refusing.clear()
    rig.await_metadata()


def test_recovery_none_keeps_the_known_nodes() -> None:
    rig = Seeds("none")
    move_cluster(rig)
    started_ms = rig.now_ms
    for _ in range(1_500):
        rig.poll(100)
    assert rig.now_ms - started_ms > REBOOTSTRAP_TRIGGER_MS, "no busy loop"
    assert rig.node(0) not in rig.metadata.fetch().nodes
    assert not rig.metadata.fetch().is_bootstrap_configured


def test_busy_connection_prevents_a_rebootstrap() -> None:
    rig = ClientRig(1, ["t"], max_in_flight=1)
    rig.await_metadata()
    rig.connect(0)
    rig.network.held.add(0)
    rig.send(0, rig.metadata.new_metadata_request_builder())
    rig.clock.advance(500)
    rig.metadata.request_update()
    for _ in range(10):
        rig.poll(50)
    assert not rig.metadata.fetch().is_bootstrap_configured


def test_throttled_nodes_prevent_a_rebootstrap() -> None:
    """A quota throttles all brokers. A rebootstrap would lose their in-flight requests with the connections."""
    rig = ClientRig(1, ["t"])
    rig.await_metadata()
    rig.connect(0)
    rig.cluster.throttle_ms = 1_000
    rig.send(0, rig.metadata.new_metadata_request_builder())
    rig.poll_until(lambda: not rig.client.has_in_flight_requests())
    rig.cluster.throttle_ms = 0
    connections, version, throttled_ms = rig.selector.connection_ids, rig.metadata.update_version, rig.now_ms
    rig.metadata.request_update()
    rig.poll_until(lambda: rig.metadata.update_version > version)
    assert not rig.metadata.fetch().is_bootstrap_configured
    assert rig.selector.connection_ids == connections
    assert 1_000 <= rig.now_ms - throttled_ms <= 1_100


def test_session_renewal_prevents_a_rebootstrap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = ClientRig(1, ["t"])
    rig.await_metadata()
    rig.connect(0)
    connections = rig.selector.connection_ids
    monkeypatch.setattr(rig.selector, "is_channel_ready", lambda _: False)
    rig.clock.advance(500)
    rig.metadata.request_update()
    for _ in range(10):
        rig.poll(50)
    assert not rig.metadata.fetch().is_bootstrap_configured
    assert rig.selector.connection_ids == connections


def test_rebootstrap_does_not_repeat_at_once() -> None:
    rig = ClientRig(1)
    rig.network.refusing.add(0)
    version = rig.metadata.update_version
    for _ in range(100):
        rig.poll(100)
    assert rig.metadata.update_version == version


def test_stale_metadata_triggers_a_rebootstrap() -> None:
    rig = Seeds("rebootstrap")
    rig.metadata.bootstrap([("seed", 9092)])
    rig.await_metadata()
    rig.cluster.on(ApiKey.METADATA, faults.lose_request(), times=None)
    rig.clock.advance(1_000)
    rig.metadata.request_update()
    started_ms = rig.now_ms
    rig.poll_until(
        lambda: rig.metadata.fetch().is_bootstrap_configured, limit_ms=REBOOTSTRAP_TRIGGER_MS + 2 * REQUEST_TIMEOUT_MS
    )
    assert rig.now_ms - started_ms > REBOOTSTRAP_TRIGGER_MS
    assert rig.selector.connection_ids == []
    version = rig.metadata.update_version
    for _ in range(20):
        rig.poll(50)
    assert rig.metadata.update_version == version  # the time begins again: otherwise no request would ever follow


def test_trigger_time_starts_over_with_each_answer() -> None:
    rig = ClientRig(1, ["t"])
    rig.await_metadata()
    for _ in range(4):
        rig.clock.advance(REBOOTSTRAP_TRIGGER_MS // 2)
        rig.metadata.request_update()
        rig.await_metadata()
        assert not rig.updater.needs_rebootstrap(rig.now_ms)
        version = rig.metadata.update_version
    rig.poll(10)
    assert rig.metadata.update_version == version


def test_broker_may_request_a_rebootstrap(caplog: pytest.LogCaptureFixture) -> None:
    rig = ClientRig(1, ["t"])
    rig.await_metadata()
    rig.connect(0)
    rig.clock.advance(500)
    rig.cluster.on(ApiKey.METADATA, faults.fail_with(RebootstrapRequiredError))
    rig.metadata.request_update()
    rig.poll_until(lambda: rig.metadata.fetch().is_bootstrap_configured, limit_ms=2_000)
    assert rig.selector.connection_ids == []
    rig.await_metadata()
    assert rig.metadata.fetch().leader_for(TopicPartition("t", 0)) == rig.node(0)


def test_recovery_none_ignores_a_rebootstrap_request() -> None:
    rig = ClientRig(1, ["t"], recovery_strategy="none")
    rig.await_metadata()
    rig.cluster.on(ApiKey.METADATA, faults.fail_with(RebootstrapRequiredError))
    rig.clock.advance(500)
    rig.metadata.request_update()
    version = rig.metadata.update_version
    rig.poll_until(lambda: rig.metadata.update_version > version)
    assert not rig.metadata.fetch().is_bootstrap_configured
