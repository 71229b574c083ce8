"""FindCoordinator: one key up to version 3, several from 4 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

_FIRST_BATCHED = 4


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    return Answer(_answer(exchange, {key: _found(cluster, key) for key in _keys(exchange)}))


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    refused = {"error_code": error_code, "error_message": None, "node_id": -1, "host": "", "port": -1}
    return _answer(exchange, dict.fromkeys(_keys(exchange), refused))


def _keys(exchange: Exchange) -> tuple[str, ...]:
    request = exchange.request
    return request.coordinator_keys if exchange.version >= _FIRST_BATCHED else (request.key,)


def _found(cluster: ScriptedCluster, key: str) -> dict[str, Any]:
    node = cluster.nodes[cluster.coordinator_id(key)]
    return {"error_code": 0, "error_message": None, "node_id": node.id, "host": node.host, "port": node.port}


def _answer(exchange: Exchange, found: dict[str, dict[str, Any]]) -> Mapping[str, Any]:
    if exchange.version < _FIRST_BATCHED:
        return next(iter(found.values()))
    return {"coordinators": [{"key": key, **values} for key, values in found.items()]}
