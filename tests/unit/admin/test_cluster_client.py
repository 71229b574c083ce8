from __future__ import annotations

import random
import re

import pytest
from support.coordinator_bench import CoordinatorBench
from support.fake_clock import FakeClock

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import BootstrapResolutionError, DisconnectError, KafkaTimeoutError


@pytest.mark.parametrize("version", [1, 2])
def test_cluster_has_the_transaction_version_of_its_brokers(version: int) -> None:
    bench = CoordinatorBench(version=version)
    assert bench.coordinator.transaction_version(bench.timer()) == version


def test_brokers_without_that_feature_have_version_0() -> None:
    bench = CoordinatorBench()
    bench.cluster.finalized_features.clear()
    assert bench.coordinator.transaction_version(bench.timer()) == 0


def test_without_any_broker_the_version_is_not_guessed() -> None:
    bench = CoordinatorBench()
    bench.rig.network.refusing.update({0, 1, 2})
    with pytest.raises(KafkaTimeoutError, match=r"2000 ms.*Connection refused"):
        bench.coordinator.transaction_version(bench.timer(2_000))
    assert bench.rig.now_ms <= 1_002_200


def test_leaving_it_closes_its_connections() -> None:
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
