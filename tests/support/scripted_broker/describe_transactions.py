"""DescribeTransactions: the state of each id, from its coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

OFFSETS_TOPIC = "__consumer_offsets"


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    states = [_describe(cluster, exchange, str(each)) for each in exchange.request.transactional_ids]
    return Answer({"throttle_time": cluster.throttle_ms, "transaction_states": states})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    keys = exchange.request.transactional_ids
    return {"transaction_states": [{"transactional_id": key, "error_code": error_code} for key in keys]}


def _describe(cluster: ScriptedCluster, exchange: Exchange, key: str) -> Mapping[str, Any]:
    if cluster.coordinator_id(key) != exchange.node_id:
        return {"transactional_id": key, "error_code": ErrorCode.not_coordinator}
    held = cluster.transactions.transactions.get(key)
    if held is None:
        return {"transactional_id": key, "error_code": ErrorCode.transactional_id_not_found}
    topics: dict[str, list[int]] = {OFFSETS_TOPIC: [0]} if held.groups else {}
    for topic, index in sorted(held.partitions):
        topics.setdefault(topic, []).append(index)
    return {
        "transactional_id": key,
        "error_code": 0,
        "transaction_state": held.state,
        "transaction_timeout": held.timeout_ms,
        "transaction_start_time": held.start_ms,
        "producer_id": held.producer_id,
        "producer_epoch": held.epoch,
        "topics": [{"topic": topic, "partitions": tuple(indexes)} for topic, indexes in topics.items()],
    }
