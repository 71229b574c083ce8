"""A whole transactional producer in one thread, against a scripted cluster that coordinates transactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.producer_harness import TOPIC, ProducerHarness
from support.scripted_broker.batches import BatchHeader
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.transaction_coordinator import Commit, Transaction

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.producer.transactions import State, TransactionManager
from spark_kafka_sink.protocol.versions import ApiKey

TRANSACTIONAL_APIS = (
    ApiKey.FIND_COORDINATOR,
    ApiKey.INIT_PRODUCER_ID,
    ApiKey.ADD_PARTITIONS_TO_TXN,
    ApiKey.ADD_OFFSETS_TO_TXN,
    ApiKey.TXN_OFFSET_COMMIT,
    ApiKey.END_TXN,
)
ID = "orders-7"
GROUP = "readers"
PLACE = TopicPartition(TOPIC, 0)


class TransactionHarness(ProducerHarness):
    """`version` is the cluster's transaction.version. Two harnesses share a cluster by `beside`."""

    def __init__(
        self,
        version: int,
        settings: Mapping[str, Any] | None = None,
        *,
        partitions: int = 2,
        node_count: int = 1,
        beside: TransactionHarness | None = None,
    ) -> None:
        cluster = ScriptedCluster(node_count) if beside is None else beside.cluster
        cluster.finalized_features["transaction.version"] = version
        super().__init__(
            {"transactional.id": ID, "linger.ms": "0", "max.block.ms": "5000", **(settings or {})},
            topics={TOPIC: partitions} if beside is None else {},
            cluster=cluster,
        )
        if beside is not None:
            self.clock.advance_to(beside.now_ms)

    @property
    def manager(self) -> TransactionManager:
        manager = self.producer._transactions
        assert manager is not None
        return manager

    @property
    def state(self) -> State:
        return self.manager.machine.state

    @property
    def coordinated(self) -> Transaction:
        """The coordinator's state of the id."""
        return self.cluster.transactions.transactions[ID]

    def started(self) -> TransactionHarness:
        """Return a harness that is initialised and in a transaction, with the topic known. Its cluster has forgotten
        the requests.
        """
        self.producer.partitions_for(TOPIC)
        self.producer.init_transactions()
        self.producer.begin_transaction()
        self.cluster.requests.clear()
        return self

    def commit(self, *values: bytes) -> None:
        """Commit a transaction with these values in partition 0."""
        self.producer.begin_transaction()
        for value in values:
            self.send(value, partition=0)
        self.producer.commit_transaction()

    def committed(self, partition: int = 0) -> list[bytes | None]:
        """Return the records that a reader under read_committed sees."""
        return [record.value for record in self.cluster.log(TOPIC, partition).committed_records()]

    def offsets(self) -> dict[tuple[str, int], Commit]:
        return self.cluster.transactions.offsets.get(GROUP, {})

    def calls(self) -> list[int]:
        """Return the APIs of transactions and records that were requested, in order."""
        apis = {ApiKey.PRODUCE, *TRANSACTIONAL_APIS}
        return [exchange.api_key for exchange in self.cluster.requests if exchange.api_key in apis]

    def stored(self, partition: int = 0) -> list[tuple[int, int]]:
        """Return (epoch, base sequence) of every batch of records in the log."""
        batches = self.cluster.log(TOPIC, partition).batches
        return [_epoch_and_sequence(batch.header) for batch in batches if not batch.header.is_control]


def _epoch_and_sequence(header: BatchHeader) -> tuple[int, int]:
    return header.producer_epoch, header.base_sequence
