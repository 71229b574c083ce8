"""ListOffsets: the first offset, the next one, or the first at or after a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from support.scripted_broker.exchange import Answer, Exchange, refused_partitions
from support.scripted_broker.fetch import leader_error

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

LATEST = -1
EARLIEST = -2


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    topics = [
        {
            "name": topic.name,
            "partitions": [_find(cluster, exchange, topic.name, requested) for requested in topic.partitions],
        }
        for topic in exchange.request.topics
    ]
    return Answer({"throttle_time": cluster.throttle_ms, "topics": topics})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return refused_partitions(exchange, error_code)


def _find(cluster: ScriptedCluster, exchange: Exchange, topic: str, requested: Any) -> Mapping[str, Any]:
    index = requested.partition_index
    epoch = getattr(requested, "current_leader_epoch", -1)
    error_code = leader_error(cluster, exchange.node_id, topic, index, epoch)
    if error_code:
        return {"partition_index": index, "error_code": error_code}
    partition = cluster.topics[topic].partitions[index]
    log, timestamp, offset = partition.log, -1, -1
    if requested.timestamp == LATEST:
        is_committed = getattr(exchange.request, "isolation_level", 0)
        offset = log.last_stable_offset if is_committed else log.next_offset
    elif requested.timestamp == EARLIEST:
        offset = log.log_start_offset
    else:
        found = next((record for record in log.records() if record.timestamp_ms >= requested.timestamp), None)
        if found is not None:
            timestamp, offset = found.timestamp_ms, found.offset
    return {
        "partition_index": index,
        "error_code": 0,
        "timestamp": timestamp,
        "offset": offset,
        "leader_epoch": partition.leader_epoch,
    }
