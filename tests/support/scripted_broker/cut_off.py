"""A broker that is cut off from its controllers: it answers as the coordinator that it was, and cannot write."""

from __future__ import annotations

import copy

from kio.schema.errors import ErrorCode
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.faults import Hook, Proceed

from spark_kafka_sink.protocol.versions import ApiKey

_ASKED = (
    ApiKey.FIND_COORDINATOR,
    ApiKey.ADD_PARTITIONS_TO_TXN,
    ApiKey.ADD_OFFSETS_TO_TXN,
    ApiKey.END_TXN,
    ApiKey.INIT_PRODUCER_ID,
)


def names(transactional_id: str, node_id: int) -> Hook:
    """FindCoordinator is answered as by a broker for which this node is the coordinator."""

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        right = dict(cluster.coordinators)
        cluster.coordinators[transactional_id] = node_id
        try:
            return proceed()
        finally:
            cluster.coordinators = right

    return hook


def cut_off(cluster: ScriptedCluster, transactional_id: str, node_id: int) -> None:
    """From now on this node knows the transaction as it is now, and believes that it coordinates it."""
    as_known = copy.deepcopy(cluster.transactions.transactions.get(transactional_id))
    as_coordinator = names(transactional_id, node_id)
    refuse = faults.fail_with(int(ErrorCode.coordinator_not_available))

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        if exchange.api_key == ApiKey.FIND_COORDINATOR:
            return as_coordinator(cluster, exchange, proceed)
        ends = exchange.api_key == ApiKey.END_TXN and as_known is not None and as_known.state == "Ongoing"
        if as_known is None or ends or exchange.api_key == ApiKey.INIT_PRODUCER_ID:  # it would have to write
            return refuse(cluster, exchange, proceed)
        transactions = cluster.transactions.transactions
        right = transactions[transactional_id]
        transactions[transactional_id] = answering = copy.deepcopy(as_known)
        try:
            answer = as_coordinator(cluster, exchange, proceed)
        finally:
            transactions[transactional_id] = right
        return answer if answering == as_known else refuse(cluster, exchange, proceed)

    for api_key in _ASKED:
        cluster.on(api_key, hook, times=None, node_id=node_id)
