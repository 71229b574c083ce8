"""DescribeConfigs: settings of topics and of brokers, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

DEFAULTS: Final[Mapping[str, str]] = {
    "cleanup.policy": "delete",
    "unclean.leader.election.enable": "false",
    "min.insync.replicas": "1",
}


_BROKER: Final = 4


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    results = [_describe(cluster, exchange, resource) for resource in exchange.request.resources]
    return Answer({"throttle_time": cluster.throttle_ms, "results": results})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"results": [_result(resource, error_code) for resource in exchange.request.resources]}


def _describe(cluster: ScriptedCluster, exchange: Exchange, resource: Any) -> Mapping[str, Any]:
    if int(resource.resource_type) == _BROKER:
        known: Mapping[str, str] = cluster.broker_configs
    else:
        topic = cluster.visible_topic(str(resource.resource_name), exchange.now_ms)
        if topic is None:
            return _result(resource, ErrorCode.unknown_topic_or_partition)
        known = {**DEFAULTS, **topic.configs}
    names = known if resource.configuration_keys is None else resource.configuration_keys
    configs = [
        {"name": name, "value": known[name], "read_only": False, "is_sensitive": False, "synonyms": ()}
        for name in names
        if name in known
    ]
    return {**_result(resource, 0), "configs": configs}


def _result(resource: Any, error_code: int) -> Mapping[str, Any]:
    return {
        "error_code": error_code,
        "error_message": None,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
        "configs": (),
    }
