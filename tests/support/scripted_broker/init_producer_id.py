"""InitProducerId: a new id for an idempotent producer, the next epoch for a transactional one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    request, coordinator = exchange.request, cluster.transactions
    key = request.transactional_id
    if key is None:
        return Answer(_given(cluster, coordinator.new_producer_id(), 0))
    if cluster.coordinator_id(key) != exchange.node_id:
        return Answer(refuse(cluster, exchange, ErrorCode.not_coordinator))
    claimed = (getattr(request, "producer_id", -1), getattr(request, "producer_epoch", -1))
    timeout_ms = int(request.transaction_timeout.total_seconds() * 1000)
    error_code = coordinator.init_producer_id(key, timeout_ms, claimed, exchange.now_ms)
    if error_code:
        return Answer(refuse(cluster, exchange, error_code))
    held = coordinator.transactions[key]
    return Answer(_given(cluster, held.producer_id, held.epoch))


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"error_code": error_code, "producer_id": -1, "producer_epoch": -1}


def _given(cluster: ScriptedCluster, producer_id: int, epoch: int) -> Mapping[str, Any]:
    return {
        "throttle_time": cluster.throttle_ms,
        "error_code": 0,
        "producer_id": producer_id,
        "producer_epoch": epoch,
    }
