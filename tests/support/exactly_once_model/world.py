"""A run of the model: a query with its checkpoint, drivers and tasks over one cluster, and a plan of faults by the
number of the request that they hit. The same plan gives the same run.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from support.exactly_once_model.actors import PLACE, ModelDriverCluster, ModelPool, write
from support.exactly_once_model.logs import ModelCluster

from spark_kafka_sink.client.transaction_values import ProducerIdAndEpoch
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError, KafkaTimeoutError
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.decision import BatchChangedError, Decision, TransactionLostError
from spark_kafka_sink.sink.exactly_once import Committed, ExactlyOnceDriver
from spark_kafka_sink.sink.mandate import Mandate, TaskOutcome
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.transactional_task import TaskIdentity, TransactionalDelivery

PREFIX = "P"
TOPIC = "t"
TIMEOUT_MS = 10_000
KEYS = 2
MOST_RUNS = 7
OTHER_TOPIC = "u"
CONFIGS = {
    topic: SinkConfig.from_options({"kafka.bootstrap.servers": "h:9092", "topic": topic})
    for topic in (TOPIC, OTHER_TOPIC)
}


class Fault(enum.Enum):
    """What happens to a request."""

    CRASH_BEFORE = "the driver dies before it"
    CRASH_AFTER = "the driver dies after it"
    TASK_CRASH_BEFORE = "the task dies before it"
    TASK_CRASH_AFTER = "the task dies after it"
    LOST_REPLY = "its answer is lost, and it is sent again"
    TIMEOUT_BEFORE = "it never arrives"
    TIMEOUT_AFTER = "it arrives, and its answer never does"
    LATE = "it arrives after others, when nobody waits for it any more"
    EXPIRE = "transactions time out before it"
    OTHER_DRIVER = "another driver of the query does all it can before it"
    LONG_REST = "as OTHER_DRIVER, and then nothing happens until coordinators have forgotten all ids"
    SPECULATE = "another attempt of a task runs before it"
    ZOMBIE = "a late attempt of a task, of the same number, runs before it"
    RESET = "the query is stopped after it has logged a batch, and another one starts without a checkpoint"
    RESTORE = "the query is stopped after it has logged a batch, and starts with an older copy of its checkpoint"
    FORGET = "as RESET, and the operator has freed the prefix for the other one"
    OTHER_ROWS = "the driver dies before it, or loses the batch that it logs, whose rows are as many others from now on"
    OTHER_COUNT = "as OTHER_ROWS, with another number of rows"
    OTHER_TOPIC = "as OTHER_ROWS, with the same rows and another option topic"


TASK_FAULTS = frozenset({Fault.TASK_CRASH_BEFORE, Fault.TASK_CRASH_AFTER})
CHECKPOINT_FAULTS = frozenset({Fault.RESET, Fault.RESTORE, Fault.FORGET})
CHANGES = frozenset({Fault.OTHER_ROWS, Fault.OTHER_COUNT, Fault.OTHER_TOPIC})
NETWORK_FAULTS = frozenset({Fault.LOST_REPLY, Fault.TIMEOUT_BEFORE, Fault.TIMEOUT_AFTER, Fault.LATE})
COMMIT_LOG = "commit log"
"""Spark's own step, which is no request to Kafka."""
MAY_STAY_OPEN = NETWORK_FAULTS | {Fault.SPECULATE, Fault.ZOMBIE, Fault.OTHER_DRIVER, Fault.LONG_REST}
"""Another driver has begun, or a late attempt; or the abort of a loser does not arrive."""
Plan = Mapping[int, Fault]


class Crash(BaseException):
    """A process is gone; nothing of it runs any more."""


class TaskCrash(Crash):
    """A Python worker is gone."""


class QueryFailedError(Exception):
    """Spark stops the query."""


class ViolationError(AssertionError):
    """An invariant does not hold."""


class ModelColumns(RecordColumns):
    """A task's columns, and their (key, row) pairs. A key is a partition, too."""

    rows: list[tuple[int, str]]


@functools.cache
def columns_of(key: int, row: str) -> ModelColumns:
    """Of one row; made once for all runs."""
    columns = ModelColumns.from_rows([row], [str(key)])
    object.__setattr__(columns, "rows", [(key, row)])
    return columns


class World:
    """`holds_epoch`: the driver is one process (foreachBatch); else its epoch is taken anew for each batch (format).

    Subclasses break a rule of the protocol.
    """

    driver_class: type[ExactlyOnceDriver] = ExactlyOnceDriver
    delivery_class: type[TransactionalDelivery] = TransactionalDelivery
    has_decisions = True

    def __init__(self, plan: Plan, *, version: int = 2, holds_epoch: bool = False, batches: int = 2) -> None:
        self.plan = plan
        self.version = version
        self.batches = batches
        self.cluster = ModelCluster(version)
        self.now_ms = 0
        self.requests: list[str] = []
        self.commit_log: set[int] = set()
        self.input_name = "a"
        self.topic = TOPIC
        self.history: list[tuple[str, list[tuple[int, str]]]] = []
        """Topic and rows of the batches that the query finished."""
        self.lost: TransactionLostError | None = None
        self.refused: KafkaError | None = None
        self._changes: dict[int, Fault] = {}
        self._holds_epoch = holds_epoch
        self._late: list[tuple[int, Callable[[], Any]]] = []
        self._runs = 0
        self._in_task = 0
        self._checked = 0
        self._drivers = 0
        self._is_tampered = False
        self._last_tasks: list[tuple[Mandate, int, int, str, list[tuple[int, str]]]] = []

    # ---- requests --------------------------------------------------------------------------------------------------

    def request(self, name: str, effect: Callable[[], Any]) -> Any:
        """One request of anybody, with its fault; the invariants are checked after it."""
        number = len(self.requests)
        self.requests.append(name)
        fault = self.plan.get(number)
        self._pass(1)
        for due in [late for late in self._late if late[0] <= number]:
            self._late.remove(due)
            _quietly(due[1])
        try:
            return effect() if fault is None else self._suffer(fault, number, effect)
        finally:
            self._pass(0)
            self.check()

    def _suffer(self, fault: Fault, number: int, effect: Callable[[], Any]) -> Any:
        is_kafkas = self.requests[number] != COMMIT_LOG
        if (fault in TASK_FAULTS and not self._in_task) or (fault in NETWORK_FAULTS and not is_kafkas):
            return effect()
        if fault in CHECKPOINT_FAULTS:
            return self._lose_checkpoint(effect, fault)
        if fault in CHANGES:
            self._change_batch(effect, fault)
        if fault in {Fault.CRASH_AFTER, Fault.TASK_CRASH_AFTER, Fault.TIMEOUT_AFTER, Fault.LOST_REPLY}:
            _quietly(effect)
            self._pass(0)
        if fault in {Fault.CRASH_BEFORE, Fault.CRASH_AFTER}:
            raise Crash
        if fault in TASK_FAULTS:
            raise TaskCrash
        if fault is Fault.LATE:
            self._late.append((number + 3, effect))
        if fault in {Fault.LATE, Fault.TIMEOUT_BEFORE, Fault.TIMEOUT_AFTER}:
            raise KafkaTimeoutError(f"Request {number} was not answered.")
        _MEANWHILE.get(fault, lambda _: None)(self)
        return effect()

    def expire(self) -> None:
        self._pass(2 * TIMEOUT_MS)

    def run_other_driver(self) -> None:
        """Whoever runs then goes on as if nothing had been."""
        outer, self._in_task = self._in_task, 0
        self._drivers += 1
        if self._drivers <= 2:
            self._run_once()
        self._in_task = outer

    def rest_for_long(self) -> None:
        """Longer than transactional.id.expiration.ms."""
        self.run_other_driver()
        self.expire()
        self.cluster.transactions.transactions.clear()

    def run_other_attempt(self, attempt: int) -> None:
        if self._last_tasks and not self._is_tampered:
            self._is_tampered = True
            mandate, batch, partition, topic, rows = self._last_tasks[-1]
            task = TaskIdentity(batch, self._query_id, partition, attempt)
            _quietly(lambda: self._attempt(mandate, task, topic, rows))
            self._is_tampered = False

    def _lose_checkpoint(self, effect: Callable[[], Any], fault: Fault) -> Any:
        result = effect()
        if self.requests[-1] != COMMIT_LOG:
            return result
        if fault is Fault.FORGET:
            self._forget()
        self.commit_log.clear()
        if fault is not Fault.RESTORE:
            self.input_name += "a"
        raise Crash

    def _change_batch(self, effect: Callable[[], Any], fault: Fault) -> None:
        if self.requests[-1] == COMMIT_LOG:
            effect()
            self.commit_log.discard(len(self.commit_log) - 1)  # a copy of the checkpoint that is one batch behind
        if fault is Fault.OTHER_TOPIC:
            self.topic = OTHER_TOPIC
        else:
            self._changes[len(self.commit_log)] = fault
        raise Crash

    def _forget(self) -> None:
        """The operator's command; what keeps it from its end leaves the query with its checkpoint."""
        cluster = ModelDriverCluster(self)
        driver = self.driver_class(PREFIX, cluster, lambda: self.now_ms).begin().driver
        write(self, driver, PLACE, 0, [None])
        (ended,) = cluster.end([driver], committed=True)
        if ended.error is not None:
            raise QueryFailedError from ended.error

    def _pass(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self.cluster.transactions.advance(self.now_ms)

    # ---- the query -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start the query again and again, each time with other partitions, until it is through. Raises
        ViolationError.
        """
        for _ in range(MOST_RUNS):
            if self._run_once() or self.lost or self.refused:
                break
        else:
            raise ViolationError(f"The query does not get through in {MOST_RUNS} runs.")
        for _, effect in self._late:
            _quietly(effect)
        self._pass(2 * TIMEOUT_MS)  # what a dead process has left ends by itself
        self.check()
        if not self.lost:
            self._check_complete()

    def _run_once(self) -> bool:
        """Whether the query got through all its batches."""
        try:
            self._run_query()
        except (Crash, QueryFailedError):
            return False
        except KafkaError as error:
            if isinstance(error, TransactionLostError):
                self.lost = error
                if not self.may_lose():
                    raise ViolationError(f"Lost, and nothing happened that could lose rows: {error}") from error
            elif isinstance(error, BatchChangedError):
                self.refused = error
                if not CHANGES & set(self.plan.values()):
                    raise ViolationError(f"The batch is the same: {error}") from error
            elif isinstance(error, IllegalStateError) and ("comes after" in str(error) or "belongs to" in str(error)):
                if (CHECKPOINT_FAULTS | CHANGES) & set(self.plan.values()):
                    self.refused = error
                elif not {Fault.OTHER_DRIVER, Fault.LONG_REST} & set(
                    self.plan.values()
                ):  # it went by an older view of the checkpoint
                    raise ViolationError(f"The query is refused: {error}") from error
            return False
        return True

    def _run_query(self) -> None:
        run, self._runs = self._runs, self._runs + 1
        input_name, topic = self.input_name, self.topic
        driver = self.driver_class(PREFIX, ModelDriverCluster(self), lambda: self.now_ms)
        held: ProducerIdAndEpoch | None = None
        known: Decision | None = None
        while (batch := len(self.commit_log)) < self.batches:
            mandate = driver.begin(held, known)
            outcomes: list[TaskOutcome] = []
            try:
                rows = self.rows(input_name, batch)
                for partition, each in enumerate(self.layout(rows, run)):
                    outcomes.append(self._run_task(mandate, batch, partition, topic, each))
                committed = driver.commit(outcomes)
            except KafkaError as error:
                self._give_up(driver, mandate, outcomes)
                if isinstance(error, (TransactionLostError, BatchChangedError, IllegalStateError)):
                    raise
                raise QueryFailedError from error
            if not MAY_STAY_OPEN & set(self.plan.values()):
                self._check_nothing_open(committed)
            end = committed.driver or mandate.driver
            held = ProducerIdAndEpoch(end.producer_id, end.producer_epoch) if self._holds_epoch else None
            known = committed.decision or known
            self.request(COMMIT_LOG, lambda batch=batch, rows=rows: self._log_commit(input_name, batch, topic, rows))  # type: ignore[misc]

    def _log_commit(self, input_name: str, batch: int, topic: str, rows: list[tuple[int, str]]) -> None:
        if batch != len(self.commit_log) or input_name != self.input_name:
            raise QueryFailedError  # another run wrote it, or the checkpoint is another: Spark ends this one
        self.commit_log.add(batch)
        if (topic, rows) not in self.history:
            self.history.append((topic, rows))

    def _give_up(self, driver: ExactlyOnceDriver, mandate: Mandate, outcomes: list[TaskOutcome]) -> None:
        with contextlib.suppress(KafkaError):  # then the next start has to do it
            driver.abort(mandate, outcomes)

    def layout(self, rows: list[tuple[int, str]], run: int) -> list[list[tuple[int, str]]]:
        """The batch's rows by task: 2, 1 or 3 tasks; a key's rows are in one task, in their order."""
        count = (2, 1, 3)[run % 3]
        tasks: list[list[tuple[int, str]]] = [[] for _ in range(count)]
        for row in rows:
            tasks[(row[0] + run) % count].append(row)
        return tasks

    @property
    def _query_id(self) -> str:
        """Of the checkpoint: another input has another."""
        return f"query {self.input_name}"

    def rows(self, input_name: str, batch: int) -> list[tuple[int, str]]:
        """Four rows of two keys in even batches, two of one key in odd ones; or what a fault has made of them."""
        change = self._changes.get(batch)
        count = 6 if change is Fault.OTHER_COUNT else 4
        other = "" if change is None else "'"
        return [(number % KEYS, f"{input_name}{batch}.{number}{other}") for number in range(0, count, 1 + batch % 2)]

    def _run_task(
        self, mandate: Mandate, batch: int, partition: int, topic: str, rows: list[tuple[int, str]]
    ) -> TaskOutcome:
        for attempt in range(4):
            try:
                return self._attempt(mandate, TaskIdentity(batch, self._query_id, partition, attempt), topic, rows)
            except TaskCrash:
                continue
            except KafkaTimeoutError:
                continue
        raise QueryFailedError

    def _attempt(self, mandate: Mandate, task: TaskIdentity, topic: str, rows: list[tuple[int, str]]) -> TaskOutcome:
        self._last_tasks.append((mandate, task.batch_id, task.partition, topic, rows))
        self._in_task += 1
        try:
            describe = ModelDriverCluster(self).describe_one
            delivery = self.delivery_class(CONFIGS[topic], ModelPool(self), mandate, task, describe)  # type: ignore[arg-type]
            for row in rows:
                delivery.send(topic, columns_of(*row))
            delivery.finish()
            return delivery.outcome
        finally:
            self._in_task -= 1

    # ---- invariants ------------------------------------------------------------------------------------------------

    def may_lose(self) -> bool:
        """Whether something happened that can take a decided transaction away: a time-out after its batch was
        verified, a rest in which it comes to that, or a task whose InitProducerId came later than its look at its
        driver, by whatever else happened.
        """
        struck = [(fault, number) for number, fault in self.plan.items() if number < len(self.requests)]
        return any(
            fault is Fault.LONG_REST
            or (fault is Fault.EXPIRE and self._is_verified(number))
            or (fault in {Fault.OTHER_DRIVER, Fault.LATE} and re.fullmatch(r"init P/\d.*", self.requests[number]))
            for fault, number in struck
        )

    def _is_verified(self, number: int) -> bool:
        """Whether a driver had looked at every transaction of a batch that was not logged as finished by then."""
        for name in reversed(self.requests[:number]):
            if name == COMMIT_LOG:
                return False
            if name.startswith(f"describe {PREFIX}/driver {PREFIX}/"):
                return True
        return False

    def decisions(self) -> list[Decision]:
        return [decision for decision in self.cluster.log(*PLACE).committed() if decision is not None]

    def committed_rows(self) -> list[str]:
        return [row for topic in CONFIGS for key in range(KEYS) for row in self.cluster.log(topic, key).committed()]

    def check(self) -> None:
        """What holds at any time: no row counts twice, none of a batch that is not decided."""
        changes = sum(log.changes for log in self.cluster.logs.values())
        if changes == self._checked:
            return
        self._checked = changes
        rows = self.committed_rows()
        if len(set(rows)) < len(rows):
            raise ViolationError(f"Doubled: {sorted(row for row in rows if rows.count(row) > 1)}")
        if not self.has_decisions:
            return
        decided = {decision.batch_id for decision in self.decisions()}
        early = [row for row in rows if int(row.strip("a").split(".")[0]) not in decided]
        if early:
            raise ViolationError(f"Committed, and their batch is not decided: {early}")

    def _check_nothing_open(self, committed: Committed) -> None:
        held = self.cluster.transactions.transactions.values()
        open_ = [each.transactional_id for each in held if each.state == "Ongoing"]
        if open_ and committed.decision is not None:
            raise ViolationError(f"Open after commit: {open_}")

    def _check_complete(self) -> None:
        """At the end every row of a finished batch counts once, a key's rows in their order."""
        expected: dict[tuple[str, int], list[str]] = {(topic, key): [] for topic in CONFIGS for key in range(KEYS)}
        for topic, finished in self.history:
            for key, row in finished:
                expected[topic, key].append(row)
        for place, rows in expected.items():
            seen = self.cluster.log(*place).visible()
            if self.refused is None and seen != rows:
                raise ViolationError(f"In {place} readers see {seen}, and the query has finished {rows}")
            if missing := [row for row in rows if row not in seen]:
                raise ViolationError(f"In {place} rows of a finished batch are missing: {missing}")
        self._check_one_life_of_each_batch()

    def _check_one_life_of_each_batch(self) -> None:
        """Of a batch that had other rows before only one of the two counts."""
        lives = [(row.split(".")[0], row.endswith("'")) for row in self.committed_rows()]
        if both := {batch for batch, is_changed in lives if (batch, not is_changed) in lives}:
            raise ViolationError(f"Of batches {both} readers see the rows of two lives")


def _quietly(effect: Callable[[], Any]) -> None:
    with contextlib.suppress(KafkaError, TaskCrash):
        effect()


_MEANWHILE: Mapping[Fault, Callable[[World], None]] = {
    Fault.EXPIRE: World.expire,
    Fault.OTHER_DRIVER: World.run_other_driver,
    Fault.LONG_REST: World.rest_for_long,
    Fault.SPECULATE: lambda world: world.run_other_attempt(9),
    Fault.ZOMBIE: lambda world: world.run_other_attempt(0),
}
