"""DescribeProducers: the producers of a partition, and where their open transactions begin, from its leader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.fetch import leader_error

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    topics = [
        {
            "name": topic.name,
            "partitions": [_describe(cluster, exchange, topic.name, index) for index in topic.partition_indexes],
        }
        for topic in exchange.request.topics
    ]
    return Answer({"throttle_time": cluster.throttle_ms, "topics": topics})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {
        "topics": [
            {"name": topic.name, "partitions": [_values(index, error_code) for index in topic.partition_indexes]}
            for topic in exchange.request.topics
        ]
    }


def _values(index: int, error_code: int) -> dict[str, Any]:
    return {"partition_index": index, "error_code": error_code, "active_producers": ()}


def _describe(cluster: ScriptedCluster, exchange: Exchange, topic: str, index: int) -> Mapping[str, Any]:
    error_code = leader_error(cluster, exchange.node_id, topic, index, -1)
    if error_code:
        return _values(index, error_code)
    log = cluster.topics[topic].partitions[index].log
    producers = [
        {
            "producer_id": producer_id,
            "producer_epoch": state.epoch,
            "last_sequence": state.last_sequence,
            "coordinator_epoch": 0,
            "current_txn_start_offset": log.open_transactions.get(producer_id, -1),
        }
        for producer_id, state in log.producers.items()
    ]
    return _values(index, 0) | {"active_producers": producers}
