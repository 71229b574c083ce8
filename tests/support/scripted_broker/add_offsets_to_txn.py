"""AddOffsetsToTxn: a group's offsets become part of the transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    request = exchange.request
    key = request.transactional_id
    if cluster.coordinator_id(key) != exchange.node_id:
        return Answer(refuse(cluster, exchange, ErrorCode.not_coordinator))
    error_code = cluster.transactions.check(key, request.producer_id, request.producer_epoch)
    if not error_code:
        cluster.transactions.begin(key, exchange.now_ms, 1).groups.add(str(request.group_id))
    return Answer(refuse(cluster, exchange, error_code))


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"error_code": error_code}
