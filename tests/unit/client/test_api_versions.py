from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from spark_kafka_sink.client.api_versions import ApiVersions, VersionDiscovery
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, NodeApiVersions, VersionRange

LATEST = SUPPORTED_VERSIONS[ApiKey.API_VERSIONS].latest


def response(error_code: int = 0, ranges: Sequence[tuple[int, int, int]] = ()) -> Any:
    api_keys = [SimpleNamespace(api_key=key, min_version=low, max_version=high) for key, low, high in ranges]
    return SimpleNamespace(error_code=error_code, api_keys=api_keys)


def versions(features: Mapping[str, int], epoch: int) -> NodeApiVersions:
    return NodeApiVersions({3: VersionRange(0, 12)}, features, epoch)


def test_first_request_has_our_latest_version_and_goes_once() -> None:
    discovery = VersionDiscovery(ApiVersions())
    discovery.begin("1")
    assert discovery.due() == ["1"]
    assert discovery.take_version("1") == LATEST
    assert discovery.due() == []


def test_answer_makes_the_versions_of_the_node_known() -> None:
    registry = ApiVersions()
    discovery = VersionDiscovery(registry)
    assert discovery.on_response("1", LATEST, response(ranges=[(3, 0, 9)]))
    known = registry.get("1")
    assert known is not None
    assert known.ranges[3] == (0, 9)
    assert discovery.due() == []


def test_next_versions_request_uses_the_version_that_the_node_names() -> None:
    discovery = VersionDiscovery(ApiVersions())
    assert not discovery.on_response("1", LATEST, response(ErrorCode.unsupported_version, [(18, 0, 2)]))
    assert discovery.take_version("1") == 2


def test_node_that_names_no_version_is_asked_in_version_0() -> None:
    discovery = VersionDiscovery(ApiVersions())
    assert not discovery.on_response("1", LATEST, response(ErrorCode.unsupported_version))
    assert discovery.take_version("1") == 0


def test_refused_versions_get_lower_until_none_is_left() -> None:
    discovery = VersionDiscovery(ApiVersions())
    asked = [LATEST]
    while asked[-1] > 0:
        assert not discovery.on_response("1", asked[-1], response(ErrorCode.unsupported_version, [(18, 0, LATEST)]))
        asked.append(discovery.take_version("1"))
    assert asked == list(range(LATEST, -1, -1))
    with pytest.raises(KafkaError):
        discovery.on_response("1", 0, response(ErrorCode.unsupported_version, [(18, 0, LATEST)]))
    assert discovery.due() == []


def test_negative_claim_is_version_0() -> None:
    discovery = VersionDiscovery(ApiVersions())
    discovery.on_response("1", LATEST, response(ErrorCode.unsupported_version, [(18, 0, -5)]))
    assert discovery.take_version("1") == 0


def test_other_error_of_api_versions_raises() -> None:
    with pytest.raises(KafkaError) as caught:
        VersionDiscovery(ApiVersions()).on_response("1", LATEST, response(42))
    assert caught.value.error_code == ErrorCode.invalid_request


def test_inverted_range_keeps_the_node_known() -> None:
    registry = ApiVersions()
    assert VersionDiscovery(registry).on_response("1", LATEST, response(ranges=[(3, 0, 9), (23, 3, 0)]))
    known = registry.get("1")
    assert known is not None
    assert known.ranges[3] == (0, 9)


def test_lost_node_is_forgotten_and_not_due() -> None:
    registry = ApiVersions()
    discovery = VersionDiscovery(registry)
    discovery.on_response("1", LATEST, response(ranges=[(3, 0, 9)]))
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
