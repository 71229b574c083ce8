"""Produce: appends batches as a leader does, with its checks and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from support.scripted_broker.batches import BadBatchError
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

UNKNOWN_TOPIC_OR_PARTITION = 3
NOT_LEADER_OR_FOLLOWER = 6
MESSAGE_TOO_LARGE = 10
INVALID_REQUIRED_ACKS = 21
_FIRST_WITH_ZSTD = 7
_UNSUPPORTED_COMPRESSION = 76
_ZSTD = 4


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    hinted: set[int] = set()
    responses = [
        {
            "name": topic.name,
            "partition_responses": [
                _append(cluster, exchange, topic.name, data, hinted) for data in topic.partition_data
            ],
        }
        for topic in exchange.request.topic_data
    ]
    if exchange.request.acks == 0:
        failed = any(each["error_code"] for topic in responses for each in topic["partition_responses"])
        return Answer(None, close=failed)  # without a response, hanging up is the only way to say so
    return Answer(_values(cluster, responses) | {"node_endpoints": [_endpoint(cluster, id_) for id_ in sorted(hinted)]})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    responses = [
        {
            "name": topic.name,
            "partition_responses": [
                {"index": data.index, "error_code": error_code, "base_offset": -1} for data in topic.partition_data
            ],
        }
        for topic in exchange.request.topic_data
    ]
    return _values(cluster, responses)


def _values(cluster: ScriptedCluster, responses: list[dict[str, Any]]) -> dict[str, Any]:
    return {"responses": responses, "throttle_time": cluster.throttle_ms}


def _append(
    cluster: ScriptedCluster, exchange: Exchange, topic_name: str, data: Any, hinted: set[int]
) -> Mapping[str, Any]:
    values: dict[str, Any] = {"index": data.index, "base_offset": -1}
    partition = cluster.partition(topic_name, data.index)
    if exchange.request.acks not in (-1, 0, 1):
        return values | {"error_code": INVALID_REQUIRED_ACKS}
    if partition is None:
        return values | {"error_code": UNKNOWN_TOPIC_OR_PARTITION}
    if partition.leader_id != exchange.node_id:
        if cluster.has_leader_hints and partition.leader_id >= 0:
            hinted.add(partition.leader_id)
            values["current_leader"] = {"leader_id": partition.leader_id, "leader_epoch": partition.leader_epoch}
        return values | {"error_code": NOT_LEADER_OR_FOLLOWER}
    records = data.records or b""
    if len(records) > cluster.topics[topic_name].max_message_bytes:
        return values | {"error_code": MESSAGE_TOO_LARGE}
    if exchange.version < _FIRST_WITH_ZSTD and len(records) > 22 and records[22] & 7 == _ZSTD:
        return values | {"error_code": _UNSUPPORTED_COMPRESSION}
    try:
        result = partition.log.append(records, partition.leader_epoch)
    except BadBatchError as error:
        return values | {"error_code": error.error_code, "error_message": str(error)}
    return values | {
        "error_code": result.error_code,
        "base_offset": result.base_offset,
        "log_start_offset": partition.log.log_start_offset,
    }


def _endpoint(cluster: ScriptedCluster, node_id: int) -> Mapping[str, Any]:
    node = cluster.nodes[node_id]
    return {"node_id": node.id, "host": node.host, "port": node.port, "rack": node.rack}
