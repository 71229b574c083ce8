"""EndTxn: version 5 is transaction version 2, and answers with the next producer id and epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

FIRST_OF_VERSION_2 = 5


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    request = exchange.request
    key = request.transactional_id
    if cluster.coordinator_id(key) != exchange.node_id:
        return Answer(refuse(cluster, exchange, ErrorCode.not_coordinator))
    version = 2 if exchange.version >= FIRST_OF_VERSION_2 else 1
    error_code = cluster.transactions.end(
        key, request.producer_id, request.producer_epoch, request.committed, version, exchange.now_ms
    )
    if error_code:
        return Answer(refuse(cluster, exchange, error_code))
    held = cluster.transactions.transactions[key]
    return Answer(
        {
            "throttle_time": cluster.throttle_ms,
            "error_code": 0,
            "producer_id": held.producer_id,
            "producer_epoch": held.epoch,
        }
    )


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"error_code": error_code, "producer_id": -1, "producer_epoch": -1}
