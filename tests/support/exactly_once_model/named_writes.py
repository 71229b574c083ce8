"""Batch writes without a prefix in the model: each takes the name that the write before it released."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from support.exactly_once_model.actors import PLACE, PREFIX, ModelDriverCluster, write
from support.exactly_once_model.world import (
    COMMIT_LOG,
    TOPIC_FAULTS,
    Crash,
    Fault,
    QueryFailedError,
    ViolationError,
    World,
)

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, Decision, TaskOutcome, TransactionLostError
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver

WRITE_FAULTS = (
    Fault.CRASH_BEFORE,
    Fault.CRASH_AFTER,
    Fault.TASK_CRASH_BEFORE,
    Fault.TASK_CRASH_AFTER,
    Fault.LOST_REPLY,
    Fault.TIMEOUT_BEFORE,
    Fault.TIMEOUT_AFTER,
    Fault.LATE,
    Fault.EXPIRE,
    Fault.OTHER_DRIVER,
    Fault.SPECULATE,
    Fault.ZOMBIE,
    Fault.STALLED,
    Fault.TOPIC_GONE,
    Fault.TOPIC_EMPTIED,
    Fault.LEFT_OUT,
)
"""The faults that batch writes can have. OTHER_DRIVER is the operator's `finish`."""


class OneOffCluster(ModelDriverCluster):
    """`KafkaDriverCluster` with `is_one_off`."""

    def find_topic(self) -> None:
        if not self.world.request("look for the decision topic", lambda: not self.world.is_topic_gone):
            self.world.request("create the decision topic", self._create_topic)

    def write_first_use(self, *, is_adopted: bool, moved_to: str = "", is_free: bool = False) -> None:
        pass

    def write_decision(self, transaction: OpenTransaction, decision: Decision, sequence: int) -> int:
        if decision.is_finished:
            return write(self.world, transaction, PLACE, sequence, [None])
        return super().write_decision(transaction, decision, sequence)


class NamedWrites(World):
    """Consecutive writes under one name. Another process commits each of them.

    A failed write releases the name if all that it left open was aborted. Else it keeps the name, and the operator
    settles it.
    """

    has_decisions = False
    """Each write is batch 0, so a row does not show its decision."""
    gives_back_after_failure = False
    late_task = -1
    """The task of a late attempt, by number."""

    def run(self) -> None:
        self.results: list[tuple[int, KafkaError | None]] = []
        """Writes and the results for their callers; without writes whose process died."""
        begun = 0
        for number in range(self.batches):
            begun += 1
            try:
                gives_back = self._write(number)
            except Crash:
                gives_back = False
            if not gives_back and not self.gives_back_after_failure:
                break
        plan, self.plan = self.plan, {}
        self._settle()
        self.plan = plan
        for _, effect in self._late:
            with contextlib.suppress(KafkaError):
                effect()
        self._pass(2 * 10_000)
        self._check_writes(begun)

    def _write(self, number: int) -> bool:
        """Return whether the name is free again."""
        is_aborted = False
        try:
            batch_start = self._in_process(lambda driver: driver.begin())
            outcomes: list[TaskOutcome] = []
            try:
                for partition, rows in enumerate(self.layout(number, number)):
                    outcomes.append(self.run_task(batch_start, batch_start.next_batch_id, partition, rows))
                self._in_process(lambda driver: driver.commit(outcomes))
            except (KafkaError, QueryFailedError):
                is_aborted = self._abort(batch_start, outcomes)
                raise
        except (KafkaError, QueryFailedError) as error:
            self.results.append((number, error if isinstance(error, KafkaError) else KafkaError()))
            return is_aborted
        self.results.append((number, None))
        self.request(COMMIT_LOG, lambda: None)
        return True

    def _abort(self, batch_start: BatchStart, outcomes: list[TaskOutcome]) -> bool:
        try:
            return bool(self._in_process(lambda driver: driver.abort(batch_start, outcomes)))
        except KafkaError:
            return False

    def _in_process(self, step: Callable[[ExactlyOnceDriver], Any]) -> Any:
        cluster = OneOffCluster(self)
        cluster.find_topic()
        return step(self.driver_class(PREFIX, cluster, lambda: self.now_ms, topic=self.input.topic, is_new=True))

    def _settle(self) -> None:
        """Run the operator's `finish`."""
        try:
            ExactlyOnceDriver(PREFIX, OneOffCluster(self), lambda: self.now_ms, is_operator=True).begin()
        except TransactionLostError as error:
            self.lost = error
        except (Crash, KafkaError):
            pass

    def _run_once(self) -> bool:
        """Run the driver of the fault OTHER_DRIVER."""
        self._settle()
        return True

    def run_other_attempt(self, attempt: int) -> None:
        kept, self._last_tasks = self._last_tasks, self._last_tasks[self.late_task :][:1]
        super().run_other_attempt(attempt)
        self._last_tasks = kept

    @property
    def _query_id(self) -> str:
        return ""

    def _check_writes(self, begun: int) -> None:
        seen = sorted(self.committed_rows())
        losses = [error for _, error in self.results if isinstance(error, TransactionLostError)]
        if self.lost:
            losses.append(self.lost)
        if losses and not self.may_lose():
            raise ViolationError(f"Lost, and nothing happened that could lose rows: {losses[0]}")
        ended = {number for number, error in self.results if error is None}
        for number in range(begun):
            expected = sorted(row for _, row in self.rows(self.input, number))
            found = [row for row in seen if row.startswith(f"a{number}.")]
            if number in ended and found != expected:
                raise ViolationError(f"Write {number} ended well, and readers see {found}")
            is_excused = bool(losses) or bool(TOPIC_FAULTS & set(self.plan.values()))
            if found not in ([], expected) and not is_excused:
                raise ViolationError(f"Write {number} is torn, without an error: {found}")


class NamedWritesWithOldTasks(NamedWrites):
    """The late attempts belong to the first task of the first write."""

    @property
    def late_task(self) -> int:  # type: ignore[override]
        return -len(self._last_tasks)


class GivesBackAfterFailure(NamedWrites):
    """Broken: a failed write also releases its name."""

    gives_back_after_failure = True


class GivesBackBeforeTheEnd(NamedWrites):
    """Broken: the name is free during its write, so another write begins under it at any request."""

    def _run_once(self) -> bool:
        self._in_process(lambda driver: driver.begin())
        return True
