"""InitProducerId: a new id for an idempotent producer, the next epoch for a transactional one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

NOT_COORDINATOR = 16
PRODUCER_FENCED = 90
_MAX_EPOCH = 2**15 - 2


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    request = exchange.request
    key = request.transactional_id
    if key is None:
        return Answer(_given(cluster, _new_id(cluster), 0))
    if cluster.coordinator_id(key) != exchange.node_id:
        return Answer(refuse(cluster, exchange, NOT_COORDINATOR))
    held = cluster.producer_epochs.get(key)
    claimed = (getattr(request, "producer_id", -1), getattr(request, "producer_epoch", -1))
    if held is None or held[1] >= _MAX_EPOCH:
        held = (_new_id(cluster), -1)
    elif claimed[0] >= 0 and claimed != held:
        return Answer(refuse(cluster, exchange, PRODUCER_FENCED))
    producer_id, epoch = held[0], held[1] + 1
    cluster.producer_epochs[key] = (producer_id, epoch)
    return Answer(_given(cluster, producer_id, epoch))


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"error_code": error_code, "producer_id": -1, "producer_epoch": -1}


def _new_id(cluster: ScriptedCluster) -> int:
    cluster.next_producer_id += 1
    return cluster.next_producer_id - 1


def _given(cluster: ScriptedCluster, producer_id: int, epoch: int) -> Mapping[str, Any]:
    return {
        "throttle_time": cluster.throttle_ms,
        "error_code": 0,
        "producer_id": producer_id,
        "producer_epoch": epoch,
    }
