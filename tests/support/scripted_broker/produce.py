"""Produce: appends batches as a leader does, with its checks and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.batches import HEADER, BadBatchError, BatchHeader
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

_FIRST_WITH_ZSTD = 7
_FIRST_OF_TRANSACTION_V2 = 12
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
        return Answer(None, close=failed)  # without a response, the broker can only close the connection
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
        return values | {"error_code": ErrorCode.invalid_required_acks}
    if partition is None:
        return values | {"error_code": ErrorCode.unknown_topic_or_partition}
    if partition.leader_id != exchange.node_id:
        if cluster.has_leader_hints and partition.leader_id >= 0:
            hinted.add(partition.leader_id)
            values["current_leader"] = {"leader_id": partition.leader_id, "leader_epoch": partition.leader_epoch}
        return values | {"error_code": ErrorCode.not_leader_or_follower}
    records = data.records or b""
    if len(records) > cluster.topics[topic_name].max_message_bytes:
        return values | {"error_code": ErrorCode.message_too_large}
    if exchange.version < _FIRST_WITH_ZSTD and len(records) > 22 and records[22] & 7 == _ZSTD:
        return values | {"error_code": ErrorCode.unsupported_compression_type}
    refused = _join_transaction(cluster, exchange, topic_name, data.index, records)
    if refused:
        return values | {"error_code": refused}
    try:
        result = partition.log.append(records, partition.leader_epoch)
    except BadBatchError as error:
        return values | {"error_code": error.error_code, "error_message": str(error)}
    return values | {
        "error_code": result.error_code,
        "base_offset": result.base_offset,
        "log_append_time": result.log_append_time,
        "log_start_offset": partition.log.log_start_offset,
    }


def _join_transaction(cluster: ScriptedCluster, exchange: Exchange, topic: str, index: int, records: bytes) -> int:
    """Return the error code for a transactional batch outside its transaction, or 0. From version 12 on the partition
    is added here (KIP-890), for which a leader asks the coordinator only if it has no open transaction of that epoch.
    """
    key = exchange.request.transactional_id
    if key is None or len(records) < HEADER.size:
        return 0
    header = BatchHeader._make(HEADER.unpack_from(records))
    is_implicit = exchange.version >= _FIRST_OF_TRANSACTION_V2
    log = cluster.topics[topic].partitions[index].log
    if is_implicit and log.has_open(header.producer_id, header.producer_epoch):
        return 0
    refused = cluster.transactions.check(key, header.producer_id, header.producer_epoch)
    if refused:
        return ErrorCode.invalid_producer_epoch if refused == ErrorCode.producer_fenced else refused
    if is_implicit:
        cluster.transactions.begin(key, exchange.now_ms, 2).partitions.add((topic, index))
    elif (topic, index) not in cluster.transactions.transactions[key].partitions:
        return ErrorCode.invalid_txn_state
    return 0


def _endpoint(cluster: ScriptedCluster, node_id: int) -> Mapping[str, Any]:
    node = cluster.nodes[node_id]
    return {"node_id": node.id, "host": node.host, "port": node.port, "rack": node.rack}
