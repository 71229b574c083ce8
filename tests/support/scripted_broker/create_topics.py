"""CreateTopics: one topic or many, with a number of partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    topics = []
    for topic in exchange.request.topics:
        code = 0
        if topic.name in cluster.topics:
            code = ErrorCode.topic_already_exists
        elif topic.replication_factor > len(cluster.live_node_ids):
            code = ErrorCode.invalid_replication_factor
        elif not exchange.request.validate_only:
            # -1 is the broker's default: num.partitions and default.replication.factor, both 1
            made = cluster.create_topic(str(topic.name), abs(int(topic.num_partitions)))
            made.configs |= {str(config.name): str(config.value) for config in topic.configs}
            for partition in made.partitions:
                partition.replica_ids = partition.replica_ids[: abs(int(topic.replication_factor))]
        topics.append(_answer(str(topic.name), code))
    return Answer({"throttle_time": cluster.throttle_ms, "topics": topics})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"topics": [_answer(str(topic.name), error_code) for topic in exchange.request.topics]}


def _answer(name: str, error_code: int) -> Mapping[str, Any]:
    return {"name": name, "error_code": error_code, "error_message": None, "configs": []}
