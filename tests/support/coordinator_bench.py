"""A driver's client over scripted nodes, in one thread, on a fake clock."""

from __future__ import annotations

import random

from support.client_rig import ClientRig
from support.raw_transactions import RawTransactions
from support.scripted_broker.exchange import Exchange

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.request_client import RequestClient, Timer
from spark_kafka_sink.admin.transaction_values import EndTxnOutcome
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.open_transaction import OpenTransaction

PLACE = TopicPartition("t", 0)


class CoordinatorBench:
    """Topic `t` has one partition, on node 0."""

    def __init__(self, node_count: int = 3, version: int = 2, *, max_in_flight: int = 5) -> None:
        self.rig = ClientRig(node_count, max_in_flight=max_in_flight)
        self.cluster = self.rig.cluster
        self.cluster.finalized_features["transaction.version"] = version
        self.cluster.create_topic("t", 1)
        self.client = self.rig.consumer()
        self.coordinator = _coordinator(self.rig, self.client)
        self.raw = RawTransactions(self.coordinator, version)

    def timer(self, timeout_ms: int = 60_000) -> Timer:
        return self.coordinator.timer(timeout_ms)

    def another_client(self) -> ClusterClient:
        """Return the client of another process, which has no metadata yet."""
        rig = ClientRig(len(self.cluster.nodes), beside=self.rig)
        return _coordinator(rig, rig.consumer())

    def open(self, *ids: str) -> list[OpenTransaction]:
        """Open transactions with a record in each. The nodes coordinate their ids in turn."""
        made = []
        for index, transactional_id in enumerate(ids):
            self.cluster.coordinators[transactional_id] = index % len(self.cluster.nodes)
            made.append(self.raw.begin(transactional_id))
            self.raw.write(made[-1], PLACE, transactional_id)
        self.cluster.requests.clear()
        return made

    def end(
        self, transactions: list[OpenTransaction], timeout_ms: int = 60_000, *, committed: bool = True
    ) -> list[EndTxnOutcome]:
        return self.coordinator.transactions.end_txns(transactions, self.timer(timeout_ms), committed=committed)

    def commit(self, transaction: OpenTransaction, timeout_ms: int = 60_000) -> EndTxnOutcome:
        (outcome,) = self.end([transaction], timeout_ms)
        return outcome

    def poll_for(self, duration_ms: int) -> None:
        """Poll for a while: a request that was left in a queue would be sent now."""
        deadline_ms = self.rig.now_ms + duration_ms
        while self.rig.now_ms < deadline_ms:
            self.client.poll(self.timer(10))

    def asked(self, api_key: int) -> list[Exchange]:
        return self.cluster.requests_of(api_key)

    def values(self) -> list[str]:
        """The committed values of topic `t`."""
        return [(record.value or b"").decode() for record in self.cluster.log("t", 0).committed_records()]

    def state(self, transactional_id: str) -> str:
        return self.cluster.transactions.transactions[transactional_id].state


def _coordinator(rig: ClientRig, client: RequestClient) -> ClusterClient:
    return ClusterClient(client, rig.metadata, rig.api_versions, rig.clock, random.Random(7), 100)
