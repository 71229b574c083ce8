"""A run of the model: a query with its checkpoint, drivers and tasks over one cluster, and a plan of faults by request
number. The same plan gives the same run.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from support.exactly_once_model.actors import PLACE, PREFIX, ModelDriverCluster, ModelPool, write
from support.exactly_once_model.logs import ModelCluster, ModelLog
from support.scripted_broker.transaction_coordinator import Transaction

from spark_kafka_sink.admin.transaction_values import TransactionDescription
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError, KafkaTimeoutError
from spark_kafka_sink.common.open_transaction import ProducerIdAndEpoch
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.exactly_once.advice import missing_topic
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchChangedError,
    BatchStart,
    Decision,
    TaskOutcome,
    TransactionLostError,
)
from spark_kafka_sink.sink.exactly_once.protocol import Committed, ExactlyOnceDriver
from spark_kafka_sink.sink.exactly_once.task import ExactlyOnceTask, TaskIdentity
from spark_kafka_sink.sink.options import SinkConfig

TOPIC = "t"
TIMEOUT_MS = 10_000
T = TypeVar("T")
KEYS = 2
MOST_RUNS = 7
CONFIG = SinkConfig.from_options({"kafka.bootstrap.servers": "h:9092", "topic": TOPIC})


class Fault(enum.Enum):
    """What happens to a request."""

    CRASH_BEFORE = "the driver dies before it"
    CRASH_AFTER = "the driver dies after it"
    TASK_CRASH_BEFORE = "the task dies before it"
    TASK_CRASH_AFTER = "the task dies after it"
    LOST_REPLY = "its answer is lost, and it is sent again"
    TIMEOUT_BEFORE = "it never arrives"
    TIMEOUT_AFTER = "it arrives, and its answer never does"
    LATE = "it arrives after others, when no caller waits for it any more"
    EXPIRE = "transactions time out before it"
    OTHER_DRIVER = "another driver of the query does all it can before it"
    LONG_REST = "as OTHER_DRIVER, and then nothing happens until coordinators have forgotten all ids"
    SPECULATE = "another attempt of a task runs before it"
    ZOMBIE = "a late attempt of a task, of the same number, runs before it"
    RESET = "the query is stopped after it has logged a batch, and another one starts without a checkpoint"
    RESTORE = "the query is stopped after it has logged a batch, and starts with an older copy of its checkpoint"
    FORGET = "as RESET, and the operator has freed the prefix for the other one"
    OTHER_ROWS = "the driver dies after it, and the batch that Spark runs again has as many rows, but other ones"
    FEWER_ROWS = "the driver dies after it, and the batch that Spark runs again has fewer rows"
    OTHER_TOPIC = "the driver dies after it, and the query is started again with another topic"
    STALLED = (
        "a late attempt of a task, which checked its driver long before, takes its id, and dies in its transaction"
    )
    TOPIC_GONE = "the decision topic is deleted before it"
    TOPIC_EMPTIED = "the decision topic is deleted and made again before it"
    ALL_FORGOTTEN = (
        "the driver dies before Spark logs a batch that is not the first, the decision topic is made again, and"
        " coordinators have forgotten all ids"
    )

    SET_BACK = "the coordinator of the id that has changed last loses its last record, and is where it was before"
    EPOCH_BACK = "as SET_BACK, and all its records since it gave out the epoch before are lost"
    LEFT_OUT = "the coordinator leaves out the end markers that it asks for, because no partition has a leader"


TASK_FAULTS = frozenset({Fault.TASK_CRASH_BEFORE, Fault.TASK_CRASH_AFTER})
CHECKPOINT_FAULTS = frozenset({Fault.RESET, Fault.RESTORE, Fault.FORGET})
CHANGE_FAULTS = frozenset({Fault.OTHER_ROWS, Fault.FEWER_ROWS, Fault.OTHER_TOPIC})
"""Each must end in an error if the batch was decided, and may be no error if it was not."""
SET_BACKS = frozenset({Fault.SET_BACK, Fault.EPOCH_BACK})
NETWORK_FAULTS = frozenset({Fault.LOST_REPLY, Fault.TIMEOUT_BEFORE, Fault.TIMEOUT_AFTER, Fault.LATE})
TOPIC_FAULTS = frozenset({Fault.TOPIC_GONE, Fault.TOPIC_EMPTIED, Fault.ALL_FORGOTTEN})
_REFUSALS: tuple[tuple[type[KafkaError], tuple[str, ...], frozenset[Fault]], ...] = (
    (BatchChangedError, ("",), CHANGE_FAULTS),
    (IllegalStateError, ("knows nothing of", "is not in the cluster", "is the first one under"), TOPIC_FAULTS),
    (IllegalStateError, ("comes after", "belongs to"), CHECKPOINT_FAULTS),
)
"""Errors that stop the query: class, words of its text, and the faults that explain it."""
COMMIT_LOG = "commit log"
"""Spark's own step, which is no request to Kafka."""
MAY_STAY_OPEN = NETWORK_FAULTS | {
    *(Fault.SPECULATE, Fault.ZOMBIE, Fault.STALLED, Fault.OTHER_DRIVER, Fault.LONG_REST),
    *SET_BACKS,
}
"""Another driver has begun, or a late attempt; or the abort of a failed batch does not arrive, or is forgotten."""
Plan = Mapping[int, Fault]


class Crash(BaseException):
    """A process has ended; none of its code runs any more."""


class TaskCrash(Crash):
    """A Python worker has ended."""


class QueryFailedError(Exception):
    """Spark stops the query."""


class ViolationError(AssertionError):
    """An invariant does not hold."""


class ModelColumns(RecordColumns):
    """A task's columns, also as (key, row) pairs."""

    rows: tuple[tuple[int, str], ...]


@functools.cache
def columns_of(key: int, row: str) -> ModelColumns:
    """Return the columns of one record."""
    made = ModelColumns(pa.array([row]), key=pa.array([str(key)]))
    object.__setattr__(made, "rows", ((key, row),))
    return made


class Input(NamedTuple):
    """The content that a checkpoint and its query determine: the rows of every batch, and their topic."""

    name: str = "a"
    """Another name belongs to another query."""
    variant: str = ""
    """Each x makes other rows, each - one row less."""
    topic: str = TOPIC

    def rows(self, batch: int) -> list[tuple[int, str]]:
        """Return four rows of two keys in even batches, two of one key in odd ones."""
        numbers = range(0, 4 - self.variant.count("-"), 1 + batch % 2)
        return [(number % KEYS, f"{self.name}{batch}.{number}{self.variant}") for number in numbers]

    def after(self, fault: Fault) -> Input:
        if fault is Fault.OTHER_TOPIC:
            return self._replace(topic=f"{self.topic}t")
        return self._replace(variant=self.variant + ("x" if fault is Fault.OTHER_ROWS else "-"))


class StalledTask(ExactlyOnceTask):
    """An attempt that has checked its driver, and was stopped before its InitProducerId."""

    def _is_taken(self, found: TransactionDescription | None) -> bool:
        return False

    def _ensure_current(self, found: TransactionDescription | None) -> None:
        pass

    def prepare(self, producer: Any, delivered: Any) -> None:
        super().prepare(producer, delivered)
        raise TaskCrash


class World:
    """`holds_epoch`: the driver is one process (foreachBatch); else it takes a new epoch for each batch (format).
    Subclasses break a rule of the protocol.
    """

    driver_class: type[ExactlyOnceDriver] = ExactlyOnceDriver
    task_class: type[ExactlyOnceTask] = ExactlyOnceTask
    has_decisions = True

    def __init__(self, plan: Plan, *, version: int = 2, holds_epoch: bool = False, batches: int = 2) -> None:
        self.plan = plan
        self.version = version
        self.batches = batches
        self.cluster = ModelCluster(version)
        self.now_ms = 0
        self.requests: list[str] = []
        self.commit_log: set[int] = set()
        self.input = Input()
        self.history: list[tuple[Input, int]] = []
        """Inputs and batches that the query finished."""
        self.lost: TransactionLostError | None = None
        self.refused: KafkaError | None = None
        self.is_topic_gone = False
        self._decided_before: set[int] = set()
        """Batches whose decisions were lost with the decision topic."""
        self._holds_epoch = holds_epoch
        self._late: list[tuple[int, Callable[[], Any]]] = []
        self._runs = 0
        self._in_task = 0
        self._checked = 0
        self._drivers = 0
        self._is_tampered = False
        self._last_tasks: list[tuple[BatchStart, int, int, list[tuple[int, str]]]] = []
        self._states: dict[str, Transaction] = {}
        self._records: dict[str, list[Transaction | None]] = {}
        """Of __transaction_state: for each record of an id, what the id was before."""
        self._last_changed = ""

    # ---- the version of transactions -------------------------------------------------------------------------------

    def version_of_driver(self, connected_under: int) -> int:
        """Return what a driver's client knows that has connected under this version."""
        return self.version

    def version_of_task(self) -> int:
        """Return what a task's client knows."""
        return self.version

    # ---- requests --------------------------------------------------------------------------------------------------

    def request(self, name: str, effect: Callable[[], T]) -> T:
        """Make one request of a driver or a task, with its fault. Check the invariants after it."""
        number = len(self.requests)
        self.requests.append(name)
        fault = self.plan.get(number)
        self._pass(1)
        for due in [late for late in self._late if late[0] <= number]:
            self._late.remove(due)
            _quietly(due[1])
        try:
            return effect() if fault is None else self._apply_fault(fault, number, effect)
        finally:
            self._pass(0)
            if SET_BACKS & set(self.plan.values()):
                self._record()
            self.check()

    def _apply_fault(self, fault: Fault, number: int, effect: Callable[[], T]) -> T:
        is_kafkas = self.requests[number] != COMMIT_LOG
        if (fault in TASK_FAULTS and not self._in_task) or (fault in NETWORK_FAULTS and not is_kafkas):
            return effect()
        if fault in CHECKPOINT_FAULTS:
            return self._lose_checkpoint(effect, fault)
        if fault in CHANGE_FAULTS:
            self._change_input(effect, fault)
        if fault in {Fault.ALL_FORGOTTEN, Fault.LEFT_OUT}:
            return self._forget_all(effect) if fault is Fault.ALL_FORGOTTEN else self._without_leaders(effect)
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
        _MEANWHILE.get(fault, _go_on)(self)
        return effect()

    def _record(self) -> None:
        """Note which ids have changed."""
        for name, held in self.cluster.transactions.transactions.items():
            before = self._states.get(name)
            if before != held:
                self._states[name] = _copy(held)
                self._records.setdefault(name, []).append(before)
                self._last_changed = name

    def set_back(self, *, whole_epoch: bool) -> None:
        """Let the coordinator of the id that has changed last lose its last record, or all those of its epoch."""
        self._record()
        name, records = self._last_changed, self._records.get(self._last_changed)
        if not records:
            return
        lost, before = self._states[name].epoch, records.pop()
        while whole_epoch and before is not None and before.epoch == lost:
            before = records.pop()
        held = self.cluster.transactions.transactions
        if before is None:
            del held[name], self._states[name]
        else:
            held[name], self._states[name] = _copy(before), before

    def _without_leaders(self, effect: Callable[[], T]) -> T:
        self.cluster.has_leaders = False
        try:
            return effect()
        finally:
            self.cluster.has_leaders = True

    def expire(self) -> None:
        self._pass(2 * TIMEOUT_MS)

    def run_other_driver(self) -> None:
        """Run another driver. The running one continues afterwards."""
        outer, self._in_task = self._in_task, 0
        self._drivers += 1
        if self._drivers <= 2:
            self._run_once()
        self._in_task = outer

    def rest_for_long(self) -> None:
        """Let more time pass than transactional.id.expiration.ms."""
        self.run_other_driver()
        self.expire()
        self.cluster.transactions.transactions.clear()

    def lose_topic(self, *, is_made_again: bool) -> None:
        """Delete the topic with its committed offsets, as a group's coordinator does."""
        self._decided_before |= {
            entry.value.batch_id
            for entry in self.cluster.log(*PLACE).entries
            if isinstance(entry.value, Decision) and entry.is_committed is not False
        }
        self.cluster.logs[PLACE.topic, PLACE.partition] = ModelLog()
        self._checked = -1
        coordinator = self.cluster.transactions
        held = [each.pending_offsets for each in coordinator.transactions.values()]
        for commits in [*coordinator.offsets.values(), *(group for each in held for group in each.values())]:
            commits.pop((PLACE.topic, PLACE.partition), None)
        self.is_topic_gone = not is_made_again

    def check_topic(self) -> None:
        """Raise as `KafkaDriverCluster` does."""
        if self.is_topic_gone:
            raise missing_topic(PREFIX, PLACE.topic)

    def check_readable(self, place: TopicPartition) -> None:
        """Raise as a reader that has waited in vain for the end of a transaction."""
        log = self.cluster.log(*place)
        if Fault.LEFT_OUT in self.plan.values() and log.stable_end < len(log.entries):
            raise KafkaTimeoutError("A transaction stayed open.")

    def _forget_all(self, effect: Callable[[], T]) -> T:
        """Let coordinators forget all ids. Before the first batch this is then the same as a first start."""
        if self.requests[-1] != COMMIT_LOG or not self.commit_log:
            return effect()
        self.lose_topic(is_made_again=True)
        self.cluster.transactions.transactions.clear()
        raise Crash

    def run_stalled_attempt(self) -> None:
        """Run an attempt that leaves rows and a marker, and no process that would end them."""
        held, self.task_class = self.task_class, StalledTask
        try:
            self.run_other_attempt(0)
        finally:
            self.task_class = held

    def run_other_attempt(self, attempt: int) -> None:
        if self._last_tasks and not self._is_tampered:
            self._is_tampered = True
            batch_start, batch, partition, rows = self._last_tasks[-1]
            _quietly(lambda: self._attempt(batch_start, TaskIdentity(batch, self._query_id, partition, attempt), rows))
            self._is_tampered = False

    def _lose_checkpoint(self, effect: Callable[[], T], fault: Fault) -> T:
        result = effect()
        if self.requests[-1] != COMMIT_LOG:
            return result
        if fault is Fault.FORGET:
            self._forget()
        self.commit_log.clear()
        if fault is not Fault.RESTORE:
            self.input = self.input._replace(name=self.input.name + "a")
        raise Crash

    def _change_input(self, effect: Callable[[], Any], fault: Fault) -> None:
        _quietly(effect)
        if self.requests[-1] == COMMIT_LOG and self.commit_log:
            self.commit_log.remove(max(self.commit_log))  # an older copy of the checkpoint
        self.input = self.input.after(fault)
        raise Crash

    def _forget(self) -> None:
        """Run the operator's `forget`; if an error stops it, the query keeps its checkpoint."""
        cluster = ModelDriverCluster(self)
        driver = self._driver(cluster).begin().driver
        cluster.write_first_use(is_adopted=True)
        write(self, driver, PLACE, 0, [None])
        (ended,) = cluster.end([driver], committed=True)
        if ended.error is not None:
            raise QueryFailedError from ended.error

    def _driver(self, cluster: ModelDriverCluster) -> ExactlyOnceDriver:
        return self.driver_class(PREFIX, cluster, lambda: self.now_ms, topic=self.input.topic)

    def _pass(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self.cluster.transactions.advance(self.now_ms)

    # ---- the query -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start the query again and again, each time with other partitions, until all its batches are done. Raises
        ViolationError.
        """
        for _ in range(MOST_RUNS):
            if self._run_once() or self.lost or self.refused:
                break
        else:
            if SET_BACKS & set(self.plan.values()):
                return  # each run has said so, and no driver can repair it
            raise ViolationError(f"The query does not get through in {MOST_RUNS} runs.")
        for _, effect in self._late:
            _quietly(effect)
        self._pass(2 * TIMEOUT_MS)  # transactions of a dead process end by themselves
        self.check()
        if not self.lost:
            self._check_complete()

    def _run_once(self) -> bool:
        """Return whether the query completed all its batches."""
        try:
            self._run_query()
        except (Crash, QueryFailedError):
            return False
        except KafkaError as error:
            self._judge(error)
            return False
        return True

    def _judge(self, error: KafkaError) -> None:
        """Handle an error that stops the query. Raises ViolationError if no fault of the plan explains it."""
        faults = set(self.plan.values())
        if isinstance(error, TransactionLostError):
            self.lost = error
            if not self.may_lose():
                raise ViolationError(f"Lost, and nothing happened that could lose rows: {error}") from error
            return
        for kind, texts, explaining in _REFUSALS:
            if isinstance(error, kind) and any(text in str(error) for text in texts):
                if explaining & faults:
                    self.refused = error
                elif kind is BatchChangedError or not {Fault.OTHER_DRIVER, Fault.LONG_REST} & faults:
                    # except for a driver with an older checkpoint
                    raise ViolationError(
                        f"The query is refused, or its batch is treated as another one: {error}"
                    ) from error
                return

    def _run_query(self) -> None:
        run, self._runs = self._runs, self._runs + 1
        input_ = self.input
        cluster = ModelDriverCluster(self)
        cluster.find_topic()
        driver = self._driver(cluster)
        held: ProducerIdAndEpoch | None = None
        known: Decision | None = None
        while (batch := len(self.commit_log)) < self.batches:
            if self._holds_epoch and held is None:
                driver.check_owner(batch, self._query_id)
            batch_start = driver.begin(held, known)
            outcomes: list[TaskOutcome] = []
            try:
                for partition, rows in enumerate(self.layout(batch, run)):
                    outcomes.append(self.run_task(batch_start, batch, partition, rows))
                committed = driver.commit(outcomes)
            except KafkaError as error:
                self._give_up(driver, batch_start, outcomes)
                if isinstance(error, (TransactionLostError, BatchChangedError, IllegalStateError)):
                    raise
                raise QueryFailedError from error
            if not MAY_STAY_OPEN & set(self.plan.values()):
                self._check_nothing_open(committed)
            held = (committed.driver or batch_start.driver).producer if self._holds_epoch else None
            known = committed.decision or known
            self.request(COMMIT_LOG, lambda batch=batch: self._log_commit(input_, batch))  # type: ignore[misc]

    def _log_commit(self, input_: Input, batch: int) -> None:
        if batch != len(self.commit_log) or input_ != self.input:
            raise QueryFailedError  # another run wrote it, or the checkpoint is another one: Spark ends this one
        self.commit_log.add(batch)
        if (input_, batch) not in self.history:
            self.history.append((input_, batch))

    def _give_up(self, driver: ExactlyOnceDriver, batch_start: BatchStart, outcomes: list[TaskOutcome]) -> None:
        with contextlib.suppress(KafkaError):  # then the next start must do it
            driver.abort(batch_start, outcomes)

    def layout(self, batch: int, run: int) -> list[list[tuple[int, str]]]:
        """Return the batch's rows by task: 2, 1 or 3 tasks. All rows of a key are in one task, in their order."""
        count = (2, 1, 3)[run % 3]
        tasks: list[list[tuple[int, str]]] = [[] for _ in range(count)]
        for row in self.rows(self.input, batch):
            tasks[(row[0] + run) % count].append(row)
        return tasks

    @property
    def _query_id(self) -> str:
        """Return the query id of the checkpoint: another input has another one."""
        return f"query {self.input.name}"

    @staticmethod
    def rows(input_: Input, batch: int) -> list[tuple[int, str]]:
        """Return the batch's rows, by key."""
        return input_.rows(batch)

    def run_task(self, batch_start: BatchStart, batch: int, partition: int, rows: list[tuple[int, str]]) -> TaskOutcome:
        for attempt in range(4):
            try:
                return self._attempt(batch_start, TaskIdentity(batch, self._query_id, partition, attempt), rows)
            except TaskCrash:
                continue
            except KafkaTimeoutError:
                continue
        raise QueryFailedError

    def _attempt(self, batch_start: BatchStart, task: TaskIdentity, rows: list[tuple[int, str]]) -> TaskOutcome:
        self._last_tasks.append((batch_start, task.batch_id, task.partition, rows))
        self._in_task += 1
        try:
            transaction = self.task_class(batch_start, task, self._describe_apart)
            delivery = TaskDelivery(CONFIG, ModelPool(self), transaction)  # type: ignore[arg-type]
            for row in rows:
                delivery.send(self.input.topic, columns_of(*row))
            delivery.finish()
            return self._outcome(transaction)
        finally:
            self._in_task -= 1

    def _outcome(self, transaction: ExactlyOnceTask) -> TaskOutcome:
        return transaction.outcome

    def _describe_apart(self, transactional_ids: Sequence[str]) -> Mapping[str, TransactionDescription | None]:
        """Each id has its own coordinator."""
        cluster = ModelDriverCluster(self)
        return {each: cluster.describe_one(each) for each in self.in_order_of_answers(transactional_ids)}

    @staticmethod
    def in_order_of_answers(transactional_ids: Sequence[str]) -> Sequence[str]:
        return transactional_ids

    # ---- invariants ------------------------------------------------------------------------------------------------

    def may_lose(self) -> bool:
        """Return whether a fault can have ended a decided transaction:

        a timeout after its batch was verified, a rest that is long enough for one, or a task with an InitProducerId
        later than its check of the driver.
        """
        struck = [(fault, number) for number, fault in self.plan.items() if number < len(self.requests)]
        return any(
            fault is Fault.LONG_REST
            or fault in SET_BACKS | TOPIC_FAULTS  # markers are deleted with the topic
            or (fault in {Fault.EXPIRE, Fault.STALLED} and self._is_verified(number))
            or (fault in {Fault.OTHER_DRIVER, Fault.LATE} and re.fullmatch(r"init P/\d.*", self.requests[number]))
            for fault, number in struck
        )

    def _is_verified(self, number: int) -> bool:
        """Return whether a driver had described every transaction of a batch that was not logged as finished."""
        for name in reversed(self.requests[:number]):
            if name == COMMIT_LOG:
                return False
            if name.startswith(f"describe {PREFIX}/driver {PREFIX}/"):
                return True
        return False

    def decisions(self) -> list[Decision]:
        return [each for each in self.cluster.log(*PLACE).committed() if isinstance(each, Decision)]

    def committed_rows(self) -> list[str]:
        logs = [log for (topic, _), log in self.cluster.logs.items() if topic != PLACE.topic]
        return [row for log in logs for row in log.committed()]

    def check(self) -> None:
        """Check the rules that hold at any time: no row counts twice, and no row of an undecided batch counts."""
        changes = sum(log.changes for log in self.cluster.logs.values())
        if changes == self._checked:
            return
        self._checked = changes
        rows = self.committed_rows()
        if len(set(rows)) < len(rows):
            raise ViolationError(f"Duplicated: {sorted(row for row in rows if rows.count(row) > 1)}")
        if not self.has_decisions or Fault.LEFT_OUT in self.plan.values():
            return  # a decision counts by its coordinator, also if its end marker is not written yet
        decided = {decision.batch_id for decision in self.decisions()} | self._decided_before
        early = [row for row in rows if int(row.strip("a").split(".")[0]) not in decided]
        if early:
            raise ViolationError(f"Committed, and their batch is not decided: {early}")

    def _check_nothing_open(self, committed: Committed) -> None:
        held = self.cluster.transactions.transactions.values()
        open_ = [each.transactional_id for each in held if each.state == "Ongoing"]
        if open_ and committed.decision is not None:
            raise ViolationError(f"Open after commit: {open_}")

    def _check_complete(self) -> None:
        """Check at the end that every row of a finished batch counts once, with the rows of a key in order."""
        expected: dict[tuple[str, int], list[str]] = {(TOPIC, key): [] for key in range(KEYS)}
        for input_, batch in self.history:
            for key, row in self.rows(input_, batch):
                expected.setdefault((input_.topic, key), []).append(row)
        for (topic, key), rows in expected.items():
            log = self.cluster.log(topic, key)
            seen = log.committed() if self._may_stay_hidden() else log.visible()
            if self.refused is None and seen != rows:
                raise ViolationError(f"Of key {key} readers of {topic} see {seen}, and the query has finished {rows}")

    def _may_stay_hidden(self) -> bool:
        """Return whether readers may wait behind open records. The marker of an attempt that counts no more may be
        missing until the next batch. Nothing shows whose records are those of a producer id that was forgotten, and the
        coordinator of an epoch that is too old writes no marker; the driver only says that it waits for one.
        """
        held = self.cluster.transactions.transactions.values()
        known = {each.producer_id for each in held if not each.state.startswith("Prepare")}
        open_ = {producer_id for log in self.cluster.logs.values() for producer_id in log.open_}
        is_forgotten = bool(SET_BACKS & set(self.plan.values()) and open_ - known)
        return is_forgotten or Fault.LEFT_OUT in self.plan.values()


class DriverFirstWorld(World):
    """The coordinator of the driver answers a task before that of the task's own id."""

    @staticmethod
    def in_order_of_answers(transactional_ids: Sequence[str]) -> Sequence[str]:
        return transactional_ids[::-1]


class BegunWorld(World):
    """The first driver of the prefix has begun before, and decided nothing.

    Otherwise a driver may look for the record, find none, and write the first-use record into another topic. The whole
    first batch of another driver and the loss of the topic would have to come between the two requests.
    """

    def run(self) -> None:
        plan, self.plan = self.plan, {}
        ExactlyOnceDriver(PREFIX, ModelDriverCluster(self), lambda: self.now_ms).begin()
        self.plan = plan
        self.requests.clear()
        super().run()


def _copy(held: Transaction) -> Transaction:
    """The offsets that wait for its end are those of another topic."""
    return replace(held, partitions={*held.partitions}, groups={*held.groups})


def _quietly(effect: Callable[[], Any]) -> None:
    with contextlib.suppress(KafkaError, TaskCrash):
        effect()


def _go_on(world: World) -> None:
    """Do nothing."""


_MEANWHILE: Mapping[Fault, Callable[[World], None]] = {
    Fault.EXPIRE: World.expire,
    Fault.SET_BACK: functools.partial(World.set_back, whole_epoch=False),
    Fault.EPOCH_BACK: functools.partial(World.set_back, whole_epoch=True),
    Fault.OTHER_DRIVER: World.run_other_driver,
    Fault.LONG_REST: World.rest_for_long,
    Fault.SPECULATE: lambda world: world.run_other_attempt(9),
    Fault.ZOMBIE: lambda world: world.run_other_attempt(0),
    Fault.STALLED: World.run_stalled_attempt,
    Fault.TOPIC_GONE: lambda world: world.lose_topic(is_made_again=False),
    Fault.TOPIC_EMPTIED: lambda world: world.lose_topic(is_made_again=True),
}
