"""A thread that runs transactions during faults of the brokers, and aborts every third one. The outcomes are kept as a
history.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from support.background import Background
from support.history import Outcome
from support.workload import Ledger, Place, assert_kept, history_of, partitions_of

from spark_kafka_sink.common.errors import KafkaError, KafkaTimeoutError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.record.columns import RecordColumns

StartProducer = Callable[[], KafkaProducer]
_COMMIT_S = 60.0


class TransactionalWorkload(Background):
    """A context manager: runs transactions until the block ends.

    `start_producer` makes the producer, and another one with the same transactional.id after a fatal error.
    """

    def __init__(
        self, name: str, start_producer: StartProducer, places: Sequence[Place], rng: random.Random, pause_s: float = 0
    ) -> None:
        self.ledger = Ledger(name)
        self.transactions: dict[str, Outcome] = {}
        self.errors: list[KafkaError] = []
        self._start_producer = start_producer
        self._places = list(places)
        self._rng = random.Random(rng.random())
        self._producer: KafkaProducer | None = None
        super().__init__(f"transactions-{name}", pause_s)

    @property
    def committed(self) -> int:
        return sum(outcome is Outcome.YES for outcome in list(self.transactions.values()))

    def await_committed(self, number: int, within_s: float = 60.0) -> None:
        """Wait for that many more committed transactions."""
        goal, deadline = self.committed + number, time.monotonic() + within_s
        while self.committed < goal:
            assert self._failure is None, self._failure
            late = f"{self.committed} of {goal} transactions after {within_s} s; errors {self.errors[-3:]}"
            assert time.monotonic() < deadline, late
            time.sleep(0.02)

    def _step(self) -> None:
        if self._producer is None:
            self._producer = self._start_producer()
            self._patiently(self._producer.init_transactions)
        if not self._transact(self._producer):
            self._producer = None

    def _transact(self, producer: KafkaProducer) -> bool:
        """Run one transaction. Return False if the producer cannot go on."""
        number = len(self.transactions)
        name = f"{self.ledger.name}-tx{number}"
        self.transactions[name] = Outcome.NO
        try:
            producer.begin_transaction()
            self._send(producer, name)
            if number % 3 == 2:
                self._patiently(producer.abort_transaction)
                return True
            self.transactions[name] = Outcome.UNKNOWN
            self._patiently(producer.commit_transaction)
        except KafkaError as error:
            self.errors.append(error)
            if producer.has_failed:
                return False
            self._patiently(producer.abort_transaction)
            self.transactions[name] = Outcome.NO
        else:
            self.transactions[name] = Outcome.YES
        return True

    def _send(self, producer: KafkaProducer, transaction: str) -> None:
        for _ in range(self._rng.randrange(1, 10)):
            record = self.ledger.add(self._rng.choice(self._places), self._rng.choice((0, 100)), transaction)
            producer.send(
                record.topic, record.value, partition=record.partition, on_completion=self.ledger.of_row(record)
            )
        topic = self._places[0][0]
        places = [place for place in self._places if place[0] == topic]
        records = [self.ledger.add(self._rng.choice(places), 0, transaction) for _ in range(20)]
        columns = RecordColumns.from_rows(
            [record.value for record in records], partitions=[record.partition for record in records]
        )
        producer.send_columns(topic, columns, self.ledger.of_columns(records))

    def _patiently(self, call: Callable[[], None]) -> None:
        """Call again as long as the call only times out."""
        deadline = time.monotonic() + _COMMIT_S
        while True:
            try:
                call()
            except KafkaTimeoutError as error:
                self.errors.append(error)
                if time.monotonic() > deadline:
                    raise
            else:
                return


def finish_transactions(bootstrap_servers: str, work: TransactionalWorkload) -> str:
    """Stop, and compare with the records that consumers read. Return a summary in one line."""
    work.stop()
    work.ledger.check()
    partitions = partitions_of(work.ledger.by_place)
    deadline = time.monotonic() + 15  # end markers are written a little later
    while True:
        history = history_of(bootstrap_servers, partitions, work.ledger.sent, work.transactions)
        if not history.anomalies() or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert_kept(history)
    return f"{len(work.transactions)} transactions, {work.committed} of them committed, no anomaly"
