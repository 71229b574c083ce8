"""A transactional producer under random faults, one transaction after another, from a seed.

The transactions have records, columns, tables and offsets. They are committed, aborted, or prepared and ended by
another producer. While a table is read, "another thread" ends its transaction. A producer that fails is replaced.
At the end the log of each partition is read as by isolation.level=read_committed:

- A committed transaction is there, whole and once. An aborted one is not. One of unknown outcome is whole, or absent.
- The records of a partition are in the order in which they were sent.
- The offsets of the group are those of the last transaction that committed some.
- No memory is in use, and no exception was swallowed. After the end of all faults transactions end as they should.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
from support.history import Outcome
from support.producer_harness import TOPIC
from support.simulation.checker import Finding
from support.simulation.transaction_faults import LARGE, TransactionTroubles
from support.simulation.world import ProductLog
from support.transaction_harness import GROUP, PLACE, TransactionHarness

from spark_kafka_sink.common.errors import KafkaError, KafkaTimeoutError
from spark_kafka_sink.producer.transactions import PreparedTransaction, State
from spark_kafka_sink.record.columns import RecordColumns

_MOST_TRIES = 200
_TRIES_WITH_FAULTS = 20
_MOST_FAILURES = 30
_SCHEMA = pa.schema([("value", pa.binary()), ("partition", pa.int32())])


class ReaderError(Exception):
    """The source of a table fails."""


class Row(NamedTuple):
    partition: int
    name: bytes


@dataclass(slots=True, eq=False)
class Transaction:
    """`outcome` is None while it is open."""

    rows: list[Row] = field(default_factory=list)
    outcome: Outcome | None = None
    offset: int | None = None


class TransactionRun:
    """The run of one seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.version = self._first_version = rng.choice((1, 2))
        self.partitions = rng.choice((1, 2, 3))
        self.settings = _settings(rng)
        self.harness = TransactionHarness(
            self.version, self.settings, partitions=self.partitions, node_count=rng.choice((1, 2, 3))
        )
        self.cluster = self.harness.cluster
        self.cluster.topics[TOPIC].max_message_bytes = rng.choice((LARGE, LARGE, 400))
        self.cluster.transactions.marker_delay_ms = rng.choice((0, 0, 20, 300))
        self.events: list[str] = []
        self.transactions: list[Transaction] = []
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self.troubles = TransactionTroubles(self)
        self._records = self._failures = 0
        self._wire(self.harness)

    @property
    def timeline(self) -> str:
        return "\n".join((f"transaction.version={self._first_version} {self.settings}", *self.events))

    def note(self, text: str) -> None:
        self.events.append(f"{self.harness.now_ms:>10} ms  {text}")

    def run(self) -> list[Finding]:
        """Return the violated guarantees."""
        with ProductLog(None) as product_log:
            try:
                self._initialize()
                for _ in range(self.rng.randrange(2, 9)):
                    self.troubles.maybe()
                    self._transact()
                self._end()
            except (AssertionError, KafkaError):
                return [Finding(traceback.format_exc())]
        swallowed = (Finding(f"swallowed: {text}") for text in product_log.swallowed)
        return [*self.findings, *swallowed, *_check(self)]

    # ---- producers ---------------------------------------------------------------------------------------------------

    def _wire(self, harness: TransactionHarness) -> None:
        harness.on_turn = lambda: self.troubles.deliver_late(harness.now_ms)
        harness.producer.on_flush = harness.flush

    def _close(self, harness: TransactionHarness) -> None:
        """Close as a process that is killed."""
        harness.producer.sender.force_close()
        harness.producer.sender.run()
        if harness.memory_in_use:
            self.findings.append(Finding(f"{harness.memory_in_use} bytes of buffer.memory were not given back"))

    def _replace_producer(self) -> None:
        self.troubles.heal()
        self._failures += 1
        assert self._failures < _MOST_FAILURES, "one producer after the other fails without faults"
        old, self.harness = self.harness, TransactionHarness(self.version, self.settings, beside=self.harness)
        self._wire(self.harness)
        self._close(old)
        self.note("-- another producer")
        self._initialize()

    def _initialize(self) -> None:
        if self._again("init", self.harness.producer.init_transactions) is not None:
            self._replace_producer()

    def _again(self, what: str, call: Callable[[], object]) -> KafkaError | None:
        """Call until the call does not time out. Return its error."""
        for attempt in range(_MOST_TRIES):
            try:
                call()
            except KafkaTimeoutError as error:
                self.note(f"{what} timed out: {error}")
                if attempt > _TRIES_WITH_FAULTS:
                    self.troubles.heal()
            except KafkaError as error:
                self.note(f"{what}: {error!r}")
                self.counts[f"{what} {type(error).__name__}"] += 1
                return error
            else:
                self.note(what)
                self.counts[what] += 1
                return None
        raise AssertionError(f"{what} never ends")

    # ---- a transaction -----------------------------------------------------------------------------------------------

    def _transact(self) -> None:
        try:
            self.harness.producer.begin_transaction()
        except KafkaError as error:
            self.note(f"begin: {error!r}")
            self._replace_producer()
            return
        self.note("begin")
        transaction = Transaction()
        self.transactions.append(transaction)
        is_whole = self._fill(transaction)
        self.troubles.maybe()
        if self.transactions[-1] is not transaction:  # another thread has begun the next one
            transaction, is_whole = self.transactions[-1], True
        if transaction.outcome is not None:
            return
        if self.harness.state is State.COMMITTING or (is_whole and self.rng.random() < 0.6):
            self._commit(transaction)
        elif is_whole and self.rng.random() < 0.6:
            self._prepare(transaction)
        else:
            self._abort(transaction)

    def _fill(self, transaction: Transaction) -> bool:
        """Send until a call raises. Return whether none did."""
        steps = [*self.rng.choices(_STEPS, _WEIGHTS, k=self.rng.randrange(0, 14))]
        if self.rng.random() < 0.4:
            steps.append(TransactionRun._write_while_it_ends)
        try:
            for step in steps:
                self.troubles.maybe()
                step(self, transaction)
        except (KafkaError, ReaderError) as error:
            self.note(f"  raised {error!r}")
            self.counts[f"raised {type(error).__name__}"] += 1
            return False
        return True

    def _rows(self, transaction: Transaction, count: int) -> list[Row]:
        rows = [Row(self.rng.randrange(self.partitions), b"%d" % (self._records + index)) for index in range(count)]
        self._records += count
        transaction.rows += rows
        return rows

    def _send(self, transaction: Transaction) -> None:
        (row,) = self._rows(transaction, 1)
        self.harness.send(row.name + b":" + b"x" * self.rng.choice((0, 0, 30, 120)), partition=row.partition)

    def _send_columns(self, transaction: Transaction) -> None:
        rows = self._rows(transaction, self.rng.randrange(1, 12))
        values = [row.name + b":" + b"y" * 20 for row in rows]
        self.harness.send_columns(RecordColumns.from_rows(values, partitions=[row.partition for row in rows]))

    def _send_offsets(self, transaction: Transaction) -> None:
        offset = len(self.transactions) * 10
        send = self.harness.producer.send_offsets_to_transaction
        if (error := self._again("offsets", lambda: send({PLACE: (offset, None)}, GROUP))) is not None:
            raise error
        transaction.offset = offset

    def _let_time_pass(self, _: Transaction) -> None:
        self.harness.run_for(self.rng.choice((1, 5, 50, 400, 3_000)))

    def _write(self, transaction: Transaction, between: Callable[[], None] = lambda: None) -> None:
        """Write a table in parts, and call `between` in front of one of them."""
        parts = [self._rows(transaction, self.rng.randrange(1, 6)) for _ in range(self.rng.randrange(2, 5))]
        chosen = self.rng.randrange(len(parts))

        def read() -> Iterator[pa.RecordBatch]:
            for number, rows in enumerate(parts):
                if number == chosen:
                    between()
                columns = [[row.name + b":" for row in rows], [row.partition for row in rows]]
                yield pa.record_batch(
                    [pa.array(each, kind.type) for each, kind in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
                )

        self.harness.write(pa.RecordBatchReader.from_batches(_SCHEMA, read()))
        self.note("  a table is written")

    def _write_while_it_ends(self, transaction: Transaction) -> None:
        act = self.rng.choice(_ACTS_OF_ANOTHER_THREAD)

        def between() -> None:
            self.note(f"  while a table is read: {act.__name__}")
            self.counts[act.__name__] += 1
            act(self, transaction)

        self._write(transaction, between)

    # ---- what another thread does between two parts of a table -------------------------------------------------------

    def _another_commits(self, _: Transaction) -> None:
        self.harness.manager.begin_commit()
        self.harness.run_for(self.rng.choice((1, 50, 3_000)))

    def _another_aborts_and_begins(self, transaction: Transaction) -> None:
        self._abort(transaction)
        following = Transaction()
        self.harness.producer.begin_transaction()
        self.transactions.append(following)
        self._send(following)
        self.troubles.maybe()

    def _reader_fails_in_a_commit(self, transaction: Transaction) -> None:
        self._another_commits(transaction)
        raise ReaderError

    def _reader_commits(self, _: Transaction) -> None:
        self.harness.producer.commit_transaction()

    def _reader_prepares(self, _: Transaction) -> None:
        self.harness.producer.prepare_transaction()

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _commit(self, transaction: Transaction) -> None:
        error = self._again("commit", self.harness.producer.commit_transaction)
        if error is None:
            transaction.outcome = Outcome.YES
        elif error.fatal:
            transaction.outcome = Outcome.UNKNOWN
            self._replace_producer()
        else:
            self._abort(transaction, Outcome.UNKNOWN)

    def _abort(self, transaction: Transaction, if_it_fails: Outcome = Outcome.NO) -> None:
        manager = self.harness.manager
        error = manager.last_error if manager.has_fatal_error else None
        if error is None:
            error = self._again("abort", self.harness.producer.abort_transaction)
        transaction.outcome = Outcome.NO if error is None else if_it_fails
        if error is not None:
            self._replace_producer()

    def _prepare(self, transaction: Transaction) -> None:
        try:
            prepared = self.harness.producer.prepare_transaction()
        except KafkaError as error:
            self.note(f"prepare: {error!r}")
            self._abort(transaction)
            return
        if prepared.is_empty and transaction.rows:
            self.findings.append(Finding(f"{len(transaction.rows)} rows in a prepared transaction that is empty"))
        if self._end_by_another(transaction, prepared) is None:
            self._initialize()
        else:
            self._replace_producer()

    def _end_by_another(self, transaction: Transaction, prepared: PreparedTransaction) -> KafkaError | None:
        is_commit = self.rng.random() < 0.7 and not prepared.is_empty
        driver = TransactionHarness(self.version, self.settings, beside=self.harness)
        self._wire(driver)
        driver.producer.resume_transaction(prepared)
        end = driver.producer.commit_transaction if is_commit else driver.producer.abort_transaction
        error = self._again(f"another producer's {'commit' if is_commit else 'abort'}", end)
        self.harness.clock.advance_to(driver.now_ms)
        self._close(driver)
        transaction.outcome = Outcome.UNKNOWN if error is not None else Outcome.YES if is_commit else Outcome.NO
        return error

    def _end(self) -> None:
        """End all faults. Then one producer commits, aborts and commits."""
        self.troubles.heal()
        self.cluster.transactions.marker_delay_ms = 0
        self.cluster.topics[TOPIC].max_message_bytes = LARGE
        for transaction in self.transactions:
            if transaction.outcome is None:  # the next producer aborts it
                transaction.outcome = Outcome.NO
        for _ in range(3):
            self.harness.clock.advance(10_000)
            self.troubles.deliver_late(self.harness.now_ms)
        self._replace_producer()
        for outcome in (Outcome.YES, Outcome.NO, Outcome.YES):
            self._transact_without_faults(outcome)
        self._close(self.harness)

    def _transact_without_faults(self, outcome: Outcome) -> None:
        """Send a record to each partition. Any error violates a guarantee."""
        producer = self.harness.producer
        producer.begin_transaction()
        last = Transaction(outcome=outcome)
        self.transactions.append(last)
        for partition in range(self.partitions):
            last.rows.append(Row(partition, b"%d" % self._records))
            self.harness.send(b"%d:" % self._records, partition=partition)
            self._records += 1
        if outcome is Outcome.YES:
            producer.commit_transaction()
        else:
            self.harness.flush()
            producer.abort_transaction()
        self.note(f"the end: {outcome.value}")


def _settings(rng: random.Random) -> dict[str, object]:
    request_timeout_ms, linger_ms = rng.choice((300, 1_000, 5_000)), rng.choice((0, 0, 5, 50))
    settings: dict[str, object] = {
        "batch.size": rng.choice((1, 1, 100, 300, 16_384)),
        "linger.ms": linger_ms,
        "request.timeout.ms": request_timeout_ms,
        "delivery.timeout.ms": linger_ms + request_timeout_ms + rng.choice((0, 700, 5_000, 30_000)),
        "max.block.ms": rng.choice((400, 3_000, 20_000)),
        "transaction.timeout.ms": 900_000,
        "max.in.flight.requests.per.connection": rng.choice((1, 2, 5, 5)),
        "compression.type": rng.choice(("none", "none", "lz4", "gzip")),
        "buffer.memory": rng.choice((3_000, 33_554_432)),
        "retry.backoff.ms": rng.choice((10, 100)),
    }
    if rng.random() < 0.15:
        settings["retries"] = rng.choice((1, 2, 4))
    return settings


def _check(run: TransactionRun) -> Iterator[Finding]:
    there = [
        [(record.value or b"").split(b":")[0] for record in run.cluster.log(TOPIC, partition).committed_records()]
        for partition in range(run.partitions)
    ]
    for number, transaction in enumerate(run.transactions):
        found = [row for row in transaction.rows if row.name in there[row.partition]]
        expected = {Outcome.YES: transaction.rows, Outcome.NO: []}.get(transaction.outcome or Outcome.NO)
        if expected is None:
            expected = transaction.rows if found else []
        if found != expected:
            missing = [row for row in transaction.rows if row not in found]
            yield Finding(f"transaction {number}, {transaction.outcome}: there {found}, not there {missing}")
    for partition, names in enumerate(there):
        sent = [row.name for each in run.transactions for row in each.rows if row.partition == partition]
        in_order = [name for name in sent if name in names]
        if names != in_order:
            yield Finding(f"partition {partition} has {names}; in the order of sends, and once: {in_order}")
    yield from _check_offsets(run)


def _check_offsets(run: TransactionRun) -> Iterator[Finding]:
    some = [each for each in run.transactions if each.offset is not None and each.outcome is not Outcome.NO]
    committed = run.harness.offsets().get((TOPIC, 0))
    found: Any = None if committed is None else committed.offset
    possible = [each.offset for each in some if each.outcome is Outcome.UNKNOWN]
    sure = [each.offset for each in some if each.outcome is Outcome.YES]
    if found not in (possible or ([] if sure else [None])) and found not in sure[-1:] + ([] if sure else [None]):
        yield Finding(f"the group has offset {found}; committed were {sure}, perhaps {possible}")


_Step = Callable[[TransactionRun, Transaction], None]
_TABLE: dict[_Step, float] = {
    TransactionRun._send: 60,
    TransactionRun._send_columns: 15,
    TransactionRun._write: 3,
    TransactionRun._send_offsets: 5,
    TransactionRun._let_time_pass: 17,
}
_STEPS, _WEIGHTS = list(_TABLE), list(_TABLE.values())
_ACTS_OF_ANOTHER_THREAD: tuple[_Step, ...] = (
    TransactionRun._another_commits,
    TransactionRun._another_commits,
    TransactionRun._another_aborts_and_begins,
    TransactionRun._reader_fails_in_a_commit,
    TransactionRun._reader_commits,
    TransactionRun._reader_prepares,
)
