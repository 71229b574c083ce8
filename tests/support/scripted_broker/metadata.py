"""Metadata: live nodes, and topics with leaders and epochs. Unknown topics are created if both sides allow it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster, ScriptedPartition, ScriptedTopic

_VALID_NAME = re.compile(r"(?!\.\.?$)[a-zA-Z0-9._-]{1,249}")


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    request, now_ms = exchange.request, exchange.now_ms
    if request.topics is None:
        names = [name for name in cluster.topics if cluster.visible_topic(name, now_ms)]
        topics = [_describe(cluster, name, exchange, may_create=False) for name in names]
    else:
        topics = [_requested(cluster, requested, exchange) for requested in request.topics]
    return Answer(cluster_values(cluster) | {"topics": topics})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    requested = exchange.request.topics or ()
    topics = [{"error_code": error_code, "name": topic.name, "partitions": ()} for topic in requested]
    return cluster_values(cluster) | {"topics": topics, "error_code": error_code}


def cluster_values(cluster: ScriptedCluster) -> dict[str, Any]:
    nodes = [cluster.nodes[node_id] for node_id in sorted(cluster.live_node_ids)]
    return {
        "throttle_time": cluster.throttle_ms,
        "brokers": [{"node_id": node.id, "host": node.host, "port": node.port, "rack": node.rack} for node in nodes],
        "cluster_id": cluster.cluster_id,
        "controller_id": cluster.controller_id,
        "error_code": 0,
    }


def _requested(cluster: ScriptedCluster, requested: Any, exchange: Exchange) -> Mapping[str, Any]:
    if requested.name is not None:
        return _describe(cluster, requested.name, exchange, may_create=exchange.request.allow_auto_topic_creation)
    for topic in cluster.topics.values():
        if topic.id == requested.topic_id:
            return _describe(cluster, topic.name, exchange, may_create=False)
    return {"error_code": ErrorCode.unknown_topic_id, "name": None, "topic_id": requested.topic_id}


def _describe(cluster: ScriptedCluster, name: str, exchange: Exchange, may_create: bool) -> Mapping[str, Any]:
    if not _VALID_NAME.fullmatch(name):
        return {"error_code": ErrorCode.invalid_topic_exception, "name": name}
    topic = cluster.visible_topic(name, exchange.now_ms)
    if topic is None:
        if may_create and cluster.auto_create_topics and name not in cluster.topics:
            visible_from_ms = exchange.now_ms + cluster.topic_creation_ms
            cluster.create_topic(name, cluster.default_partitions, visible_from_ms=visible_from_ms)
        return {"error_code": ErrorCode.unknown_topic_or_partition, "name": name}
    return topic_values(cluster, topic)


def topic_values(cluster: ScriptedCluster, topic: ScriptedTopic) -> Mapping[str, Any]:
    return {
        "error_code": 0,
        "name": topic.name,
        "topic_id": topic.id,
        "is_internal": topic.is_internal,
        "topic_authorized_operations": topic.operations,
        "partitions": [
            _partition_values(cluster, index, partition) for index, partition in enumerate(topic.partitions)
        ],
    }


def _partition_values(cluster: ScriptedCluster, index: int, partition: ScriptedPartition) -> Mapping[str, Any]:
    offline = [node_id for node_id in partition.replica_ids if node_id not in cluster.live_node_ids]
    return {
        "error_code": ErrorCode.leader_not_available if partition.leader_id < 0 else 0,
        "partition_index": index,
        "leader_id": partition.leader_id,
        "leader_epoch": partition.leader_epoch,
        "replica_nodes": tuple(partition.replica_ids),
        "isr_nodes": tuple(node_id for node_id in partition.replica_ids if node_id not in offline),
        "offline_replicas": tuple(offline),
    }
