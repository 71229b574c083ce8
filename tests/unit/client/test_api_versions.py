"""What a node says of its versions, and of its cluster if it is connected to again."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.client_rig import ClientRig
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.faults import Hook

from spark_kafka_sink.client.api_versions import ApiVersions, VersionDiscovery
from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.client.metadata_updater import DefaultMetadataUpdater
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, NodeApiVersions, VersionRange

LATEST = SUPPORTED_VERSIONS[ApiKey.API_VERSIONS].latest


def response(error_code: int = 0, ranges: Sequence[tuple[int, int, int]] = ()) -> Any:
    api_keys = [SimpleNamespace(api_key=key, min_version=low, max_version=high) for key, low, high in ranges]
    return SimpleNamespace(error_code=error_code, api_keys=api_keys)


def discovery_for(registry: ApiVersions | None = None) -> VersionDiscovery:
    metadata = Metadata(100, 1_000, 300_000, random.Random(1))
    updater = DefaultMetadataUpdater(metadata, 1_000, 50, "rebootstrap", 300_000)
    return VersionDiscovery(registry or ApiVersions(), updater)


def versions(features: Mapping[str, int], epoch: int) -> NodeApiVersions:
    return NodeApiVersions({3: VersionRange(0, 12)}, features, epoch)


def test_first_request_has_our_latest_version_and_goes_once() -> None:
    discovery = discovery_for()
    discovery.begin("1")
    assert discovery.due() == ["1"]
    assert discovery.take("1")[1] == LATEST
    assert discovery.due() == []


def test_answer_makes_the_versions_of_the_node_known() -> None:
    registry = ApiVersions()
    discovery = discovery_for(registry)
    assert discovery.on_versions("1", LATEST, response(ranges=[(3, 0, 9)]))
    known = registry.get("1")
    assert known is not None
    assert known.ranges[3] == (0, 9)
    assert discovery.due() == []


def test_next_versions_request_uses_the_version_that_the_node_names() -> None:
    discovery = discovery_for()
    assert not discovery.on_versions("1", LATEST, response(ErrorCode.unsupported_version, [(18, 0, 2)]))
    assert discovery.take("1")[1] == 2


def test_node_that_names_no_version_is_asked_in_version_0() -> None:
    discovery = discovery_for()
    assert not discovery.on_versions("1", LATEST, response(ErrorCode.unsupported_version))
    assert discovery.take("1")[1] == 0


def test_refused_versions_get_lower_until_none_is_left() -> None:
    discovery = discovery_for()
    asked = [LATEST]
    while asked[-1] > 0:
        assert not discovery.on_versions("1", asked[-1], response(ErrorCode.unsupported_version, [(18, 0, LATEST)]))
        asked.append(discovery.take("1")[1])
    assert asked == list(range(LATEST, -1, -1))
    with pytest.raises(KafkaError):
        discovery.on_versions("1", 0, response(ErrorCode.unsupported_version, [(18, 0, LATEST)]))
    assert discovery.due() == []


def test_negative_claim_is_version_0() -> None:
    discovery = discovery_for()
    discovery.on_versions("1", LATEST, response(ErrorCode.unsupported_version, [(18, 0, -5)]))
    assert discovery.take("1")[1] == 0


def test_other_error_of_api_versions_raises() -> None:
    with pytest.raises(KafkaError) as caught:
        discovery_for().on_versions("1", LATEST, response(42))
    assert caught.value.error_code == ErrorCode.invalid_request


def test_inverted_range_keeps_the_node_known() -> None:
    registry = ApiVersions()
    assert discovery_for(registry).on_versions("1", LATEST, response(ranges=[(3, 0, 9), (23, 3, 0)]))
    known = registry.get("1")
    assert known is not None
    assert known.ranges[3] == (0, 9)


def test_lost_node_is_forgotten_and_not_due() -> None:
    registry = ApiVersions()
    discovery = discovery_for(registry)
    discovery.on_versions("1", LATEST, response(ranges=[(3, 0, 9)]))
    discovery.begin("1")
    discovery.forget("1")
    assert registry.get("1") is None
    assert discovery.due() == []


def test_features_of_the_highest_epoch_outlive_the_node() -> None:
    registry = ApiVersions()
    assert registry.finalized_feature("transaction.version") == 0
    registry.update("1", versions({"transaction.version": 2}, 7))
    registry.update("2", versions({"transaction.version": 1}, 6))
    assert registry.finalized_feature("transaction.version") == 2
    registry.remove("1")
    assert registry.finalized_feature("transaction.version") == 2
    registry.update("2", versions({"transaction.version": 1}, 8))
    assert registry.finalized_feature("transaction.version") == 1


def test_offered_api_is_known_while_a_node_is_connected_and_that_it_was_for_ever() -> None:
    registry = ApiVersions()
    registry.update("1", versions({}, 0))
    assert not registry.was_offered(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS)
    registry.update("2", NodeApiVersions({71: VersionRange(0, 0)}))
    assert registry.was_offered(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS)
    assert registry.is_offered(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS)
    registry.remove("2")
    assert registry.was_offered(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS)
    assert not registry.is_offered(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS)


# ---- the cluster of a node that is connected to again ----------------------------------------------------------------


@pytest.fixture(params=["rebootstrap", "none"])
def rig(request: pytest.FixtureRequest) -> ClientRig:
    """A client with a connection to node 0 of two, which metadata has named."""
    made = ClientRig(2, ["t"], recovery_strategy=request.param, addresses=[("broker-1", 9092)])
    made.await_metadata()
    made.connect(0)
    return made


def questions(rig: ClientRig) -> int:
    return sum(exchange.request.topics == () for exchange in rig.cluster.requests_of(ApiKey.METADATA))


def answer_with(cluster_id: str | None, meanwhile: Callable[[], object] = lambda: None) -> Hook:
    """Name this cluster where only that is asked for."""

    def hook(_: ScriptedCluster, exchange: Exchange, proceed: Callable[[], Answer]) -> Answer:
        answer = proceed()
        assert answer.values is not None
        if exchange.request.topics:
            return answer
        meanwhile()
        return Answer({**answer.values, "cluster_id": cluster_id})

    return hook


def test_first_connection_to_a_node_costs_no_question(rig: ClientRig) -> None:
    assert questions(rig) == 0


def test_node_names_its_cluster_before_it_gets_requests_again(rig: ClientRig) -> None:
    were_ready: list[bool] = []
    hook = answer_with("scripted-cluster", lambda: were_ready.append(rig.client.is_ready(rig.node(0), rig.now_ms)))
    rig.cluster.on(ApiKey.METADATA, hook, times=None, node_id=0)
    rig.network.cut(0)
    rig.connect(0)
    assert were_ready == [False]


def test_node_of_another_cluster_gets_no_requests(rig: ClientRig, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: Produce went to it before metadata showed the other cluster, under a producer id that may be another
    producer's there.
    """
    rig.connect(1)
    rig.cluster.finalized_features["transaction.version"] = 2
    script = rig.cluster.on(ApiKey.METADATA, answer_with("another-cluster"), times=None, node_id=0)
    rig.network.cut(0)
    rig.poll_until(lambda: rig.client.ready(rig.node(0), rig.now_ms) or questions(rig) >= 3)
    assert not rig.client.is_ready(rig.node(0), rig.now_ms)
    said = "Node 0 belongs to another cluster now: another-cluster instead of scripted-cluster."
    assert any(said in line for line in caplog.messages)
    assert {node.id for node in rig.metadata.fetch().nodes} == {0, 1}, "the other nodes are still used"
    assert rig.api_versions.finalized_feature("transaction.version") == 0, "that of the other cluster does not count"
    rig.cluster.scripts.remove(script)
    rig.connect(0)


def test_last_node_of_another_cluster_leads_to_bootstrap_servers(rig: ClientRig) -> None:
    rig.connect(1)
    rig.cluster.cluster_id = "another-cluster"
    for node_id in (0, 1):
        rig.network.cut(node_id)
    rig.poll_until(lambda: rig.metadata.cache.cluster_id == "another-cluster", 5_000)
    rig.connect(0)


def test_node_that_does_not_name_its_cluster_is_used(rig: ClientRig) -> None:
    rig.cluster.on(ApiKey.METADATA, answer_with(None), times=None, node_id=0)
    rig.network.cut(0)
    rig.connect(0)
    assert questions(rig) == 1


def test_lost_question_for_the_cluster_does_not_end_the_update_under_way(rig: ClientRig) -> None:
    rig.connect(1)
    rig.network.held.add(1)
    rig.network.cut(0)  # so node 1 is asked for metadata
    rig.poll_until(rig.client.has_in_flight_requests)
    rig.cluster.on(ApiKey.METADATA, faults.close_before(), node_id=0)
    rig.connect(0)
    assert questions(rig) == 2
    assert rig.client.in_flight_request_count("1") == 1
    rig.poll(1_000)
    assert not rig.updater.is_update_due(rig.now_ms), "the update at node 1 is under way"
