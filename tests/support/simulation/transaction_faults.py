"""The faults of a simulation of transactions: a table with weights, and requests that take effect late."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from support.producer_harness import TOPIC
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.cut_off import cut_off, names
from support.scripted_broker.dispatch import API_BY_KEY
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.faults import Hook, Proceed
from support.simulation import hooks
from support.transaction_harness import ID

from spark_kafka_sink.protocol.versions import ApiKey

if TYPE_CHECKING:
    from support.simulation.transactions import TransactionRun

Fault = Callable[["TransactionTroubles"], str]
"""Makes the fault, and returns its description."""

_NOT_APPENDED = (2, 3, 5, 6, 7, 19, 56, 74, 75)
"""Retriable codes of Produce."""
_REFUSED = (18, 21, 29, 32, 42, 76, 87)
_PERHAPS_APPENDED = (7, 20, -1)
_COORDINATOR_CODES = (14, 15, 16, 51, 7, -1)
"""Retriable codes of a coordinator."""
_TO_COORDINATORS = (
    ApiKey.END_TXN,
    ApiKey.ADD_PARTITIONS_TO_TXN,
    ApiKey.ADD_OFFSETS_TO_TXN,
    ApiKey.TXN_OFFSET_COMMIT,
    ApiKey.INIT_PRODUCER_ID,
)
_ANY_API = (ApiKey.PRODUCE, ApiKey.PRODUCE, ApiKey.END_TXN, ApiKey.FIND_COORDINATOR, ApiKey.METADATA, *_TO_COORDINATORS)
_MAY_BE_LATE = (ApiKey.PRODUCE, ApiKey.END_TXN, ApiKey.END_TXN, *_TO_COORDINATORS[:4])
LARGE = 1_048_588


class TransactionTroubles:
    """Makes faults in the cluster of a run, and ends them."""

    def __init__(self, run: TransactionRun) -> None:
        self.run, self.rng = run, run.rng
        self.roughness = self.rng.choice((0.1, 0.2, 0.35))
        self.late: list[tuple[int, Exchange]] = []
        """Requests that take effect at a time, after their connection was closed."""
        self._kinds = self.rng.choices(list(_TABLE), list(_TABLE.values()), k=self.rng.choice((2, 4, 6)))

    @property
    def cluster(self) -> ScriptedCluster:
        return self.run.cluster

    def maybe(self) -> None:
        """Make no fault, one, or several."""
        while self.rng.random() < self.roughness:
            self.run.note(f"!! {self.rng.choice(self._kinds)(self)}")

    def heal(self) -> None:
        """End all scripted faults. Late requests stay."""
        self.cluster.scripts.clear()

    def deliver_late(self, now_ms: int) -> None:
        """Let the requests take effect whose time has come."""
        due = [each for each in self.late if each[0] <= now_ms]
        self.late = [each for each in self.late if each[0] > now_ms]
        for _, exchange in due:
            self.cluster.transactions.advance(now_ms)
            answer = API_BY_KEY[exchange.api_key].respond(self.cluster, dataclasses.replace(exchange, now_ms=now_ms))
            self.run.note(f"late {ApiKey(exchange.api_key).name}: {answer.values}")

    def script(self, api_key: ApiKey, hook: Hook, what: str) -> str:
        times, skip = self.rng.choice((1, 1, 2, 3, 6)), self.rng.choice((0, 0, 1, 2))
        self.cluster.on(api_key, hook, times=times, skip=skip)
        return f"{api_key.name}: {what}, {times} times after {skip}"


def _no_answer(troubles: TransactionTroubles) -> str:
    what, hook = hooks.no_answer(troubles.rng)
    return troubles.script(troubles.rng.choice(_ANY_API), hook, what)


def _late_answer(troubles: TransactionTroubles) -> str:
    what, hook = hooks.late_answer(troubles.rng)
    return troubles.script(troubles.rng.choice(_ANY_API), hook, what)


def _late_request(troubles: TransactionTroubles) -> str:
    """Close the connection. The request takes effect later."""
    delay_ms = troubles.rng.choice((0, 5, 50, 300, 2_000, 8_000))

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        troubles.late.append((exchange.now_ms + delay_ms, exchange))
        return Answer(None, close=True)

    return troubles.script(troubles.rng.choice(_MAY_BE_LATE), hook, f"takes effect {delay_ms} ms after a close")


def _not_appended(troubles: TransactionTroubles) -> str:
    code, share = troubles.rng.choice(_NOT_APPENDED), troubles.rng.choice((0.5, 1.0))
    hook = hooks.refuse_some(code, hooks.any_of(troubles.rng, share))
    return troubles.script(ApiKey.PRODUCE, hook, f"{share:.0%} of the batches refused with {code}")


def _refused(troubles: TransactionTroubles) -> str:
    code = troubles.rng.choice(_REFUSED)
    troubles.cluster.on(ApiKey.PRODUCE, hooks.refuse_some(code, hooks.any_of(troubles.rng, 0.5)), times=1)
    return f"PRODUCE refused with {code}"


def _perhaps_appended(troubles: TransactionTroubles) -> str:
    code = troubles.rng.choice(_PERHAPS_APPENDED)
    return troubles.script(ApiKey.PRODUCE, hooks.answer_with(code), f"appended but answered with {code}")


def _refused_by_coordinator(troubles: TransactionTroubles) -> str:
    code = troubles.rng.choice(_COORDINATOR_CODES)
    return troubles.script(troubles.rng.choice(_TO_COORDINATORS), faults.fail_with(code), f"refused with {code}")


def _move_leader(troubles: TransactionTroubles) -> str:
    partition = troubles.rng.randrange(troubles.run.partitions)
    node_id = troubles.rng.choice(sorted(troubles.cluster.nodes))
    troubles.cluster.move_leader(TOPIC, partition, node_id)
    return f"partition {partition} is led by node {node_id}"


def _move_coordinator(troubles: TransactionTroubles) -> str:
    troubles.cluster.coordinators[ID] = node_id = troubles.rng.choice(sorted(troubles.cluster.nodes))
    return f"node {node_id} is the coordinator"


def _cut_coordinator_off(troubles: TransactionTroubles) -> str:
    """Another node becomes the coordinator. The one before does not hear of it. Ends get lost, and the lookups after
    that may go to it.
    """
    before = troubles.cluster.coordinator_id(ID)
    cut_off(troubles.cluster, ID, before)
    troubles.cluster.on(ApiKey.FIND_COORDINATOR, names(ID, before), times=4, skip=troubles.rng.choice((0, 1, 2, 3)))
    troubles.cluster.on(ApiKey.END_TXN, faults.close_before(), skip=troubles.rng.choice((0, 1)))
    return f"node {before} is cut off from its controllers; {_move_coordinator(troubles)}"


def _refuse_metadata(troubles: TransactionTroubles) -> str:
    code = troubles.rng.choice((3, 5))
    return troubles.script(ApiKey.METADATA, hooks.refuse_topics(code), f"topic refused with {code}")


def _change_size(troubles: TransactionTroubles) -> str:
    troubles.cluster.topics[TOPIC].max_message_bytes = size = troubles.rng.choice((LARGE, 250, 400))
    return f"max.message.bytes={size}"


def _upgrade(troubles: TransactionTroubles) -> str:
    """The operator sets transaction.version to 2. Producers know it once they connect again."""
    troubles.run.version = troubles.cluster.finalized_features["transaction.version"] = 2
    for node_id in troubles.cluster.nodes:
        troubles.run.harness.network.cut(node_id)
    return "transaction.version=2, and all connections end"


_TABLE: dict[Fault, float] = {
    _no_answer: 2,
    _late_answer: 1,
    _late_request: 2,
    _not_appended: 1,
    _refused: 1,
    _perhaps_appended: 1,
    _refused_by_coordinator: 1,
    _move_leader: 1,
    _move_coordinator: 1,
    _cut_coordinator_off: 2,
    _refuse_metadata: 1,
    _change_size: 1,
    _upgrade: 1,
}
