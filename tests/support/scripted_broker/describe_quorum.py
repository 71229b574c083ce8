"""DescribeQuorum: one voter, which leads, with its time of day."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    if cluster.quorum_ahead_ms is None:
        return Answer(refuse(cluster, exchange, ErrorCode.cluster_authorization_failed))
    time_ms = time.time_ns() // 1_000_000 + cluster.quorum_ahead_ms
    voter = {"replica_id": 0, "log_end_offset": 1, "last_caught_up_timestamp": time_ms}
    partition = {"partition_index": 0, "leader_id": 0, "current_voters": (voter,)}
    return Answer({"error_code": 0, "topics": ({"topic_name": "__cluster_metadata", "partitions": (partition,)},)})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"error_code": error_code, "topics": ()}
