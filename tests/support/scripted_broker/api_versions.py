"""ApiVersions: the versions that the node supports, and the cluster's finalized features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    features = [
        {"name": name, "max_version_level": level, "min_version_level": level}
        for name, level in cluster.finalized_features.items()
    ]
    return Answer(
        {
            "error_code": 0,
            "api_keys": ranges(cluster, exchange.node_id),
            "throttle_time": cluster.throttle_ms,
            "finalized_features": features,
            "finalized_features_epoch": sum(cluster.finalized_features.values()) if features else -1,
        }
    )


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"error_code": error_code, "api_keys": ()}


def ranges(cluster: ScriptedCluster, node_id: int, only: set[int] | None = None) -> list[Mapping[str, int]]:
    return [
        {"api_key": api_key, "min_version": oldest, "max_version": latest}
        for api_key, (oldest, latest) in sorted(cluster.ranges_of(node_id).items())
        if only is None or api_key in only
    ]
