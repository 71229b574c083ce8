"""AddPartitionsToTxn as producers send it, up to version 3: all partitions are added, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    request = exchange.request
    key = request.v3_and_below_transactional_id
    if cluster.coordinator_id(key) != exchange.node_id:
        return Answer(refuse(cluster, exchange, ErrorCode.not_coordinator))
    requested = _partitions(exchange)
    unknown = {each for each in requested if cluster.partition(*each) is None}
    if unknown:
        codes = {
            each: ErrorCode.unknown_topic_or_partition if each in unknown else ErrorCode.operation_not_attempted
            for each in requested
        }
        return Answer(_values(codes))
    error_code = cluster.transactions.check(key, request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
    if not error_code:
        cluster.transactions.begin(key, exchange.now_ms, 1).partitions.update(requested)
    return Answer(_values(dict.fromkeys(requested, error_code)))


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return _values(dict.fromkeys(_partitions(exchange), error_code))


def _partitions(exchange: Exchange) -> list[tuple[str, int]]:
    topics = exchange.request.v3_and_below_topics
    return [(str(topic.name), int(index)) for topic in topics for index in topic.partitions]


def _values(codes: Mapping[tuple[str, int], int]) -> Mapping[str, Any]:
    topics: dict[str, list[Mapping[str, int]]] = {}
    for (topic, index), error_code in codes.items():
        topics.setdefault(topic, []).append({"partition_index": index, "partition_error_code": error_code})
    return {
        "results_by_topic_v3_and_below": [
            {"name": topic, "results_by_partition": results} for topic, results in topics.items()
        ]
    }
