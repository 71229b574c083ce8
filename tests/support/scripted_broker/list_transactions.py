"""ListTransactions: the transactions that this node coordinates, filtered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

STATES = frozenset(
    {
        "Empty",
        "Ongoing",
        "PrepareCommit",
        "PrepareAbort",
        "CompleteCommit",
        "CompleteAbort",
        "Dead",
        "PrepareEpochFence",
    }
)


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    request = exchange.request
    unknown = tuple(state for state in request.state_filters if state not in STATES)
    duration_ms = _ms(getattr(request, "duration_filter", -1))
    pattern = getattr(request, "transactional_id_pattern", None)
    found = [
        {
            "transactional_id": key,
            "producer_id": held.producer_id,
            "transaction_state": held.state,
        }
        for key, held in cluster.transactions.transactions.items()
        if cluster.coordinator_id(key) == exchange.node_id
        and (not request.state_filters or held.state in request.state_filters)
        and (not request.producer_id_filters or held.producer_id in request.producer_id_filters)
        and (duration_ms < 0 or exchange.now_ms - held.start_ms > duration_ms)
        and (not pattern or re.fullmatch(pattern, key))
    ]
    return Answer({"error_code": 0, "unknown_state_filters": unknown, "transaction_states": found})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"error_code": error_code, "unknown_state_filters": (), "transaction_states": ()}


def _ms(duration: Any) -> int:
    return int(duration.total_seconds() * 1000) if hasattr(duration, "total_seconds") else int(duration)
