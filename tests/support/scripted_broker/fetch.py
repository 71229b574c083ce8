"""Fetch without sessions: whole batches from an offset on, by topic name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster
    from support.scripted_broker.partition_log import PartitionLog


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    request = exchange.request
    left = request.max_bytes
    responses = []
    is_empty, has_error = True, False
    for topic in request.topics:
        partitions = []
        for part in topic.partitions:
            values = _read(cluster, exchange, topic.topic, part, left)
            left -= len(values["records"])
            is_empty = is_empty and not values["records"]
            has_error = has_error or bool(values["error_code"])
            partitions.append(values)
        responses.append({"topic": topic.topic, "partitions": partitions})
    wait_ms = request.max_wait.total_seconds() * 1000 if is_empty and not has_error else 0
    return Answer({"throttle_time": cluster.throttle_ms, "responses": responses}, delay_ms=int(wait_ms))


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {
        "responses": [
            {"topic": topic.topic, "partitions": [_values(part.partition, error_code) for part in topic.partitions]}
            for topic in exchange.request.topics
        ]
    }


def _values(index: int, error_code: int) -> dict[str, Any]:
    return {
        "partition_index": index,
        "error_code": error_code,
        "high_watermark": -1,
        "aborted_transactions": (),
        "records": b"",
    }


def leader_error(cluster: ScriptedCluster, node_id: int, topic: str, partition_index: int, epoch: int) -> int:
    """Return the error code for a partition that this node does not serve at this leader epoch (-1: no epoch), or 0."""
    partition = cluster.partition(topic, partition_index)
    if partition is None:
        return ErrorCode.unknown_topic_or_partition
    if partition.leader_id != node_id:
        return ErrorCode.not_leader_or_follower
    if epoch < 0 or epoch == partition.leader_epoch:
        return 0
    return ErrorCode.fenced_leader_epoch if epoch < partition.leader_epoch else ErrorCode.unknown_leader_epoch


def _read(cluster: ScriptedCluster, exchange: Exchange, topic: str, requested: Any, room: int) -> dict[str, Any]:
    index, offset = requested.partition, requested.fetch_offset
    epoch = getattr(requested, "current_leader_epoch", -1)
    error_code = leader_error(cluster, exchange.node_id, topic, index, epoch)
    if error_code:
        return _values(index, error_code)
    log = cluster.log(topic, index)
    if not log.log_start_offset <= offset <= log.next_offset:
        return _values(index, ErrorCode.offset_out_of_range)
    found: list[bytes] = []
    size = 0
    limit = min(room, requested.partition_max_bytes)
    end = log.last_stable_offset if exchange.request.isolation_level else log.next_offset
    for batch in log.batches:
        if batch.next_offset <= offset:
            continue
        if batch.base_offset >= end:
            break
        if found and size + len(batch.data) > limit:  # one batch is returned whole, whatever its size
            break
        found.append(batch.data)
        size += len(batch.data)
    return _values(index, 0) | {
        "high_watermark": log.next_offset,
        "last_stable_offset": log.last_stable_offset,
        "log_start_offset": log.log_start_offset,
        "records": b"".join(found),
        "aborted_transactions": _aborted(log, offset, end) if exchange.request.isolation_level else (),
    }


def _aborted(log: PartitionLog, start: int, end: int) -> list[Mapping[str, int]]:
    return [
        {"producer_id": each.producer_id, "first_offset": each.first_offset}
        for each in log.aborted
        if each.last_offset >= start and each.first_offset < end
    ]
