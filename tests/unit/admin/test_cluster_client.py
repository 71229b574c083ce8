from __future__ import annotations

import random
import re
from typing import Any

import pytest
from support.coordinator_bench import CoordinatorBench
from support.fake_clock import FakeClock
from support.scripted_broker import faults

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import BootstrapResolutionError, DisconnectError, KafkaTimeoutError
from spark_kafka_sink.protocol.fetch import READ_COMMITTED, READ_UNCOMMITTED
from spark_kafka_sink.protocol.versions import ApiKey

PLACE = TopicPartition("t", 0)


@pytest.mark.parametrize("version", [1, 2])
def test_cluster_has_the_transaction_version_of_its_brokers(version: int) -> None:
    bench = CoordinatorBench(version=version)
    assert bench.coordinator.transaction_version(bench.timer()) == version


def test_brokers_without_the_feature_have_version_0() -> None:
    bench = CoordinatorBench()
    bench.cluster.finalized_features.clear()
    assert bench.coordinator.transaction_version(bench.timer()) == 0


def test_without_any_broker_the_version_is_not_guessed() -> None:
    bench = CoordinatorBench()
    bench.rig.network.refusing.update({0, 1, 2})
    with pytest.raises(KafkaTimeoutError, match=r"2000 ms.*Connection refused"):
        bench.coordinator.transaction_version(bench.timer(2_000))
    assert bench.rig.now_ms <= 1_002_200


def test_leaving_the_context_closes_connections() -> None:
    bench = CoordinatorBench()
    with bench.coordinator as entered:
        assert entered is bench.coordinator
        bench.coordinator.transaction_version(bench.timer())
        assert bench.rig.selector.connection_ids
    assert bench.rig.selector.connection_ids == []
    with pytest.raises(DisconnectError, match="closed"):
        bench.coordinator.transactions.init_producer_id("id", 1_000, bench.timer())


def test_bootstrap_address_that_does_not_resolve_is_named() -> None:
    config = ProducerConfig.from_mapping({"bootstrap.servers": "nowhere.invalid:9092"})
    with pytest.raises(BootstrapResolutionError, match=re.escape("nowhere.invalid")):
        ClusterClient.connect(config, FakeClock(), random.Random(1))


# ---- the newest record of a key, of the leader that still leads ------------------------------------------------------


def write(bench: CoordinatorBench, *values: bytes) -> int:
    """Write records of the key b"mine". Return the end of the partition."""
    bench.coordinator.creation.count("t", bench.timer())
    for value in values:
        bench.coordinator.writer.write_alone(PLACE, b"mine", value, bench.timer())
    return bench.cluster.log(*PLACE).next_offset


def newest(bench: CoordinatorBench, isolation_level: int, timeout_ms: int = 60_000) -> bytes | None:
    client = bench.another_client()
    client.creation.count("t", bench.timer())
    found = client.last_of_keys(PLACE, [b"mine"], client.timer(timeout_ms), isolation_level)[b"mine"]
    return None if found is None else found.value


@pytest.mark.parametrize("isolation_level", [READ_COMMITTED, READ_UNCOMMITTED])
def test_newest_record_is_not_missed_because_of_an_older_leader(isolation_level: int) -> None:
    """Bug: a leader that was frozen, or cut off from its controllers, answered with its own older end."""
    bench = CoordinatorBench()
    end = write(bench, b"older")
    write(bench, b"newer")
    bench.cluster.on(ApiKey.LIST_OFFSETS, faults.older_end("t", end), times=4)
    assert newest(bench, isolation_level) == b"newer"


def test_leader_that_stays_older_is_an_error_at_the_limit() -> None:
    bench = CoordinatorBench()
    end = write(bench, b"older")
    write(bench, b"newer")
    bench.cluster.on(ApiKey.LIST_OFFSETS, faults.older_end("t", end), times=None)
    text = r"^t-0: Its leader says that it ends at offset 1, and record 2 was .*No newer leader .* within 2000 ms"
    began_ms = bench.rig.now_ms
    with pytest.raises(KafkaTimeoutError, match=text):
        newest(bench, READ_COMMITTED, 2_000)
    assert bench.rig.now_ms - began_ms <= 2_500
    assert len(bench.asked(ApiKey.LIST_OFFSETS)) < 250


def test_search_reads_to_the_end_that_was_found_first() -> None:
    """Else an older leader, of which the client hears between two requests, would hide the newest record."""
    bench = CoordinatorBench()
    write(bench, b"older")
    end = write(bench, b"newer")

    def nothing(values: dict[str, Any]) -> dict[str, Any]:
        (topic,) = values["responses"]
        return values | {"responses": [topic | {"partitions": [topic["partitions"][0] | {"records": b""}]}]}

    bench.cluster.on(ApiKey.LIST_OFFSETS, faults.older_end("t", end - 1), times=None, skip=2)
    bench.cluster.on(ApiKey.FETCH, faults.change(nothing), times=3)
    assert newest(bench, READ_COMMITTED) == b"newer"
    assert len(bench.asked(ApiKey.FETCH)) == 4


def test_answer_to_a_write_without_an_offset_is_an_error() -> None:
    bench = CoordinatorBench()
    write(bench, b"older")

    def without(values: dict[str, Any]) -> dict[str, Any]:
        (topic,) = values["responses"]
        parts = [each | {"base_offset": -1} for each in topic["partition_responses"]]
        return values | {"responses": [topic | {"partition_responses": parts}]}

    bench.cluster.on(ApiKey.PRODUCE, faults.change(without))
    with pytest.raises(KafkaTimeoutError, match="t-0: The answer to a write has no offset"):
        newest(bench, READ_COMMITTED)
