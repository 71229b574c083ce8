"""Calls that timed out and are repeated: with the same arguments they wait on, with others they are refused."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from support.fake_selector import FakeNetwork
from support.producer_harness import TOPIC
from support.scripted_broker import faults
from support.transaction_harness import GROUP, PLACE, TransactionHarness
from support.transaction_steps import both_versions

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import BootstrapResolutionError, IllegalStateError, KafkaTimeoutError
from spark_kafka_sink.network.transport import Address
from spark_kafka_sink.producer.transaction_requests import GroupMetadata
from spark_kafka_sink.protocol.versions import ApiKey

OTHER = {TopicPartition(TOPIC, 1): (9, None)}
either_end = pytest.mark.parametrize("has_ended", [True, False])


@both_versions
@either_end
def test_other_offsets_do_not_repeat_the_timed_out_call(version: int, has_ended: bool) -> None:
    harness = TransactionHarness(version, {"max.block.ms": "50"}).started()
    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, faults.delay(100))
    mine = {PLACE: (7, None)}
    with pytest.raises(KafkaTimeoutError):
        harness.producer.send_offsets_to_transaction(mine, GROUP)
    if has_ended:
        harness.run_for(500)
    mine[PLACE] = (8, None)  # the caller's own mapping, which may change
    for offsets, group in ((OTHER, GROUP), (mine, GROUP), ({PLACE: (7, None)}, GroupMetadata(GROUP, 3, "me"))):
        with pytest.raises(IllegalStateError, match="the outcome of an earlier send_offsets_to_transaction is open"):
            harness.producer.send_offsets_to_transaction(offsets, group)
    harness.run_for(500)
    harness.producer.send_offsets_to_transaction({PLACE: (7, None)}, GroupMetadata(GROUP))
    harness.producer.send_offsets_to_transaction(OTHER, GROUP)
    harness.producer.commit_transaction()
    assert harness.offsets() == {(TOPIC, 0): (7, None, -1), (TOPIC, 1): (9, None, -1)}


@both_versions
@either_end
def test_other_transactional_id_is_not_the_timed_out_one(version: int, has_ended: bool) -> None:
    harness = TransactionHarness(version, {"max.block.ms": "50"})
    harness.producer.partitions_for(TOPIC)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.delay(100))
    with pytest.raises(KafkaTimeoutError):
        harness.producer.init_transactions("first-id")
    if has_ended:
        harness.run_for(500)
    with pytest.raises(IllegalStateError, match="the outcome of an earlier init_transactions is open"):
        harness.producer.init_transactions("second-id")
    harness.run_for(500)
    harness.producer.init_transactions()  # its own id, which is the first
    assert harness.manager.transactional_id == "first-id"
    harness.producer.begin_transaction()
    harness.producer.abort_transaction()


# ---- why a call timed out --------------------------------------------------------------------------------------------


def test_init_that_reaches_no_broker_says_why_as_send_does() -> None:
    harness = TransactionHarness(2)
    harness.network.refusing.add(0)
    with pytest.raises(KafkaTimeoutError) as late:
        harness.producer.init_transactions()
    text = str(late.value)
    assert text.startswith(
        "init_transactions of transactional.id orders-7 did not end within max.block.ms=5000; call it"
    )
    assert "No broker of bootstrap.servers=" in text
    assert "Connection refused" in text


def test_init_at_a_server_that_is_not_kafka_says_so() -> None:
    harness = TransactionHarness(2)
    harness.cluster.on(ApiKey.API_VERSIONS, faults.truncate(3), times=None)
    with pytest.raises(
        KafkaTimeoutError, match="The server at broker-0:9092 does not answer as Kafka does: ApiVersions"
    ):
        harness.producer.init_transactions()


@pytest.mark.parametrize("call", ["commit", "abort", "send_offsets"])
def test_call_whose_coordinator_is_away_names_it(call: str) -> None:
    """Bug: the error did not say why, as soon as another broker had given metadata."""
    harness = TransactionHarness(2, {"max.block.ms": "2000"}, node_count=2).started()
    harness.send(b"x", partition=1)
    harness.settle()
    coordinator = 0
    harness.network.cut(coordinator)
    harness.network.refusing.add(coordinator)
    calls: dict[str, Callable[[], None]] = {
        "commit": harness.producer.commit_transaction,
        "abort": harness.producer.abort_transaction,
        "send_offsets": lambda: harness.producer.send_offsets_to_transaction({PLACE: (7, None)}, GROUP),
    }
    with pytest.raises(KafkaTimeoutError, match=r"broker-0.* cannot be reached\..*Connection refused"):
        calls[call]()


def test_call_without_brokers_names_the_lost_connection() -> None:
    harness = TransactionHarness(2, {"max.block.ms": "2000", "metadata.recovery.strategy": "none"}).started()
    harness.send(b"x")
    harness.settle()
    harness.network.cut(0)
    harness.network.refusing.add(0)
    with pytest.raises(KafkaTimeoutError, match=r"The last lost connection: .*Connection refused"):
        harness.producer.commit_transaction()


def test_init_at_a_broker_that_throttles_names_the_quota() -> None:
    """Bug: the error named no reason, because the answers of a broker that throttles are no errors."""
    harness = TransactionHarness(2)
    harness.producer.partitions_for(TOPIC)
    harness.cluster.throttle_ms = 12_000
    with pytest.raises(KafkaTimeoutError, match=r"did not end within max.block.ms=5000.* broker-0:9092 \(id 0\) throt"):
        harness.producer.init_transactions()


def test_commit_behind_throttled_records_names_the_quota() -> None:
    """Bug: the error named no reason while records waited for the end of a throttle."""
    harness = TransactionHarness(2).started()
    harness.cluster.throttle_ms = 20_000
    harness.send(b"a")
    harness.settle()
    with pytest.raises(KafkaTimeoutError, match=r"broker-0:9092 \(id 0\) throttles this client for \d+ ms more"):
        harness.producer.commit_transaction()
    harness.cluster.throttle_ms = 0
    harness.run_for(20_000)
    harness.producer.commit_transaction()
    assert harness.committed() + harness.committed(1) == [b"a"]


@pytest.mark.parametrize("why", ["Connection refused", "cannot be resolved"])
def test_init_where_only_the_advertised_listener_is_away_says_why(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the error said that a broker cannot be reached, or that none answered, and no reason. The server of
    bootstrap.servers answers here, so the client starts again from it each second.
    """

    def resolve(network: FakeNetwork, host: str, port: int) -> list[Address]:
        if host == "broker-1" and why == "cannot be resolved":
            raise BootstrapResolutionError(f"{host}:{port} {why}")
        return [Address(socket.AF_INET, (host, port))]

    monkeypatch.setattr(FakeNetwork, "resolve", resolve)
    for max_block_ms in range(2_000, 3_000, 70):
        settings = {"max.block.ms": str(max_block_ms), "bootstrap.servers": "broker-0:9092"}
        harness = TransactionHarness(2, settings, node_count=2)
        harness.metadata.bootstrap([("broker-0", 9092)])
        harness.cluster.live_node_ids = {1}
        harness.network.refusing.add(1)
        with pytest.raises(KafkaTimeoutError, match=rf"broker-1:9092 .*{why}"):
            harness.producer.init_transactions()
