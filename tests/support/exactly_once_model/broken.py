"""The protocol with one rule removed, as an earlier design had it. The model must find a fault in every one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from support.exactly_once_model.actors import PLACE, ModelDriverCluster, ModelPool
from support.exactly_once_model.interleaved import InterleavedWorld
from support.exactly_once_model.world import CONFIG, Input, World

from spark_kafka_sink.admin.transaction_values import TransactionDescription
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.sink.exactly_once.end_markers import EndMarkers, SeenPartitions
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchStart,
    Decision,
    PartitionOffsets,
    TaskOutcome,
    TaskTransaction,
    task_id,
)
from spark_kafka_sink.sink.exactly_once.protocol import Committed, Descriptions, ExactlyOnceDriver, PrefixRecords
from spark_kafka_sink.sink.exactly_once.task import Describe, ExactlyOnceTask, TaskIdentity


def decision_of(outcomes: Sequence[TaskOutcome], now_ms: int) -> Decision:
    tasks = tuple(outcome.written for outcome in outcomes if outcome.written is not None)
    return Decision(outcomes[0].batch_id, outcomes[0].query_id, now_ms, len(outcomes), 0, tasks)


# ---- H1: no decision; a partition with a marker is skipped ----------------------------------------------------------


class CommitsWithoutDecision(ExactlyOnceDriver):
    def commit(self, outcomes: Sequence[TaskOutcome]) -> Committed:
        decision = decision_of(outcomes, 0)
        self.finish(outcomes[0].batch_start.driver, decision)
        return Committed(decision, False, None)


class SkipsByMarker(World):
    driver_class = CommitsWithoutDecision
    has_decisions = False

    def _attempt(self, batch_start: BatchStart, task: TaskIdentity, rows: list[tuple[int, str]]) -> TaskOutcome:
        batch_start = replace(batch_start, is_adopted=True)  # there is no decision on an earlier batch
        cluster = ModelDriverCluster(self)
        (marker,) = cluster.markers([task_id(batch_start.prefix, task.partition, 0)]).values()
        if marker is not None and marker.offset >= task.batch_id + 1:
            return TaskOutcome(batch_start, task.batch_id, task.query_id, task.partition, 0, None)
        return super()._attempt(batch_start, task, rows)


# ---- H4: nothing fences an older driver, or the task ids that the new layout does not use ---------------------------


class DecidesUnfenced(ExactlyOnceDriver):
    def begin(self, held: ProducerIdAndEpoch | None = None, known: Decision | None = None) -> BatchStart:
        last = self._cluster.last_records().decision
        if last is not None and not last.is_finished:
            self.finish(OpenTransaction(f"{self.prefix}/driver", 0, 0, 2), last)
        driver = OpenTransaction(f"{self.prefix}/driver", 0, 0, 2)
        return BatchStart(self.prefix, driver, PLACE, last.batch_id if last else None, last.query_id if last else "")

    def commit(self, outcomes: Sequence[TaskOutcome]) -> Committed:
        if outcomes[0].was_skipped:
            return Committed(None, True, None)
        decision = decision_of(outcomes, 0)
        assert isinstance(self._cluster, ModelDriverCluster)
        world = self._cluster.world

        def write() -> None:
            log = world.cluster.log(*PLACE)
            log.append(-1, 0, len(log.entries), [decision])
            log.entries[-1].is_committed = True

        world.request("write the decision in no transaction", write)
        self.finish(outcomes[0].batch_start.driver, decision)
        return Committed(decision, False, None)

    def abort(self, batch_start: BatchStart, outcomes: Iterable[TaskOutcome | None]) -> bool:
        return False


class TakesWhatIsOpen(ExactlyOnceTask):
    def _is_taken(self, found: TransactionDescription | None) -> bool:
        return False


class NeverTooLate(TakesWhatIsOpen):
    def _ensure_current(self, found: TransactionDescription | None) -> None:
        pass


class Unfenced(World):
    driver_class = DecidesUnfenced
    task_class = NeverTooLate


# ---- H5: abort ends the tasks' transactions whatever was decided -----------------------------------------------------


class AbortsWhatIsDecided(ExactlyOnceDriver):
    def abort(self, batch_start: BatchStart, outcomes: Iterable[TaskOutcome | None]) -> bool:
        named = [outcome.written for outcome in outcomes if outcome is not None and outcome.written is not None]
        self._abort_all([task.transaction for task in named])
        return True


class AbortsAfterDecision(World):
    driver_class = AbortsWhatIsDecided


# ---- H7: every batch up to the last decided one is skipped, of any query ---------------------------------------------


class SkipsOlder(ExactlyOnceTask):
    def __init__(self, batch_start: BatchStart, identity: TaskIdentity, describe: Describe) -> None:
        is_old = batch_start.last_batch_id is not None and identity.batch_id <= batch_start.last_batch_id
        known = BatchStart(batch_start.prefix, batch_start.driver, batch_start.place, is_adopted=True)
        super().__init__(known, identity, describe)
        self._batch_start = batch_start
        self._is_written_already = is_old


class SkipsOlderBatches(World):
    task_class = SkipsOlder


# ---- H9: a task without rows decides an empty transaction; or leaves its old one open --------------------------------


class DecidesEmptyTransactions(World):
    def _outcome(self, transaction: ExactlyOnceTask) -> TaskOutcome:
        outcome = transaction.outcome
        if outcome.written is not None or outcome.was_skipped:
            return outcome
        producer = transaction.begin(ModelPool(self), CONFIG.producer)  # type: ignore[arg-type]
        return replace(outcome, written=TaskTransaction(producer.current_transaction, outcome.partition, 0))

    def layout(self, batch: int, run: int) -> list[list[tuple[int, str]]]:
        return super().layout(batch, 0)


class SweepsNothing(ExactlyOnceDriver):
    def _others_open(self, driver: OpenTransaction, kept: Iterable[TaskTransaction]) -> list[OpenTransaction]:
        return []


class LeavesOldOnesOpen(World):
    driver_class = SweepsNothing


# ---- more ------------------------------------------------------------------------------------------------------------


class TrustsEveryAnswer(ExactlyOnceDriver):
    def _check_markers(self, driver: OpenTransaction, decision: Decision, tasks: Sequence[TaskTransaction]) -> None:
        pass


class TakesUnknownForCommitted(World):
    driver_class = TrustsEveryAnswer


class TrustsAnyLaterMarker(ExactlyOnceDriver):
    """Accepts a later marker from before the prefix was freed."""

    def _check_markers(self, driver: OpenTransaction, decision: Decision, tasks: Sequence[TaskTransaction]) -> None:
        found = self._cluster.markers([task.transaction.transactional_id for task in tasks])
        later = {name for name, marker in found.items() if marker is not None and marker.offset > decision.batch_id + 1}
        rest = [task for task in tasks if task.transaction.transactional_id not in later]
        super()._check_markers(driver, decision, rest)


class RemembersWhatIsForgotten(World):
    driver_class = TrustsAnyLaterMarker


class Unverifying(ExactlyOnceDriver):
    def _verify(self, driver: OpenTransaction, decision: Decision) -> Descriptions:
        return {}


class DecidesUnseen(World):
    driver_class = Unverifying


class DecidesWhatWasTaken(DecidesUnseen):
    task_class = TakesWhatIsOpen


class SweepsLast(ExactlyOnceDriver):
    """Lists transactions after the last proof that no other driver has taken over."""

    def _note_finished(self, driver: OpenTransaction, decision: Decision, sequence: int) -> OpenTransaction:
        noted = super()._note_finished(driver, decision, sequence)
        self._abort_all(self._others_open(noted, ()))
        return noted


class SweepsUnproven(World):
    driver_class = SweepsLast


class SkipsAnyQuery(ExactlyOnceTask):
    def __init__(self, batch_start: BatchStart, identity: TaskIdentity, describe: Describe) -> None:
        super().__init__(batch_start, identity._replace(query_id=batch_start.last_query_id), describe)
        self._identity = identity


class IgnoresTheQueryId(World):
    task_class = SkipsAnyQuery


class ComparesCountsOnly(ExactlyOnceDriver):
    """Compares only counts, as decisions of version 1 do."""

    def begin(self, held: ProducerIdAndEpoch | None = None, known: Decision | None = None) -> BatchStart:
        return replace(super().begin(held, known), last_fingerprint=None)


class IgnoresTheContent(World):
    driver_class = ComparesCountsOnly


class ComparesNothing(ExactlyOnceDriver):
    def begin(self, held: ProducerIdAndEpoch | None = None, known: Decision | None = None) -> BatchStart:
        return replace(super().begin(held, known), last_is_accepted=True)


class IgnoresTheRows(World):
    driver_class = ComparesNothing


class BeginsHoweverLate(World):
    task_class = NeverTooLate


# ---- the decision topic is trusted -----------------------------------------------------------------------------------


class AsksNoCoordinator(ExactlyOnceDriver):
    def ensure_first_use(self) -> None:
        if self._cluster.last_records() == PrefixRecords(None, None):
            self._cluster.write_first_use(is_adopted=False)


class TakesAnyTopicForNew(World):
    driver_class = AsksNoCoordinator


class MissesNoRecord(ExactlyOnceDriver):
    def _read_records(self) -> PrefixRecords:
        return self._cluster.last_records()


class TakesNothingForNoDecision(World):
    driver_class = MissesNoRecord


class BeginsAtAnyBatch(ExactlyOnceTask):
    def __init__(self, batch_start: BatchStart, identity: TaskIdentity, describe: Describe) -> None:
        super().__init__(replace(batch_start, is_adopted=True), identity, describe)
        self._batch_start = batch_start


class TrustsTheCheckpoint(World):
    task_class = BeginsAtAnyBatch


class BeginsEmpty(World):
    """Not broken: the first batch has no rows."""

    @staticmethod
    def rows(input_: Input, batch: int) -> list[tuple[int, str]]:
        return World.rows(input_, batch) if batch else []


class LeavesNoTrace(ExactlyOnceDriver):
    def commit(self, outcomes: Sequence[TaskOutcome]) -> Committed:
        has_rows = any(outcome.written for outcome in outcomes) or outcomes[0].was_skipped
        return super().commit(outcomes) if has_rows else Committed(None, False, None)


class ForgetsEmptyBatches(BeginsEmpty):
    driver_class = LeavesNoTrace


# ---- a late attempt's marker is pending under the id of a decided transaction ------------------------------------


class WaitsForLateAttempts(ExactlyOnceDriver):
    def _abort_late_attempts(self, *given: Any) -> None:
        pass


class WaitsForTimeouts(World):
    driver_class = WaitsForLateAttempts


# ---- end markers: what a coordinator says is taken for what is in the partitions -------------------------------------


class _OnlyAfterwards(EndMarkers):
    def check_rows(
        self, outcomes: Sequence[TaskOutcome], offsets: Mapping[TopicPartition, PartitionOffsets]
    ) -> SeenPartitions:
        return SeenPartitions()


class _NoMarkers(_OnlyAfterwards):
    def complete_decision(self, driver: OpenTransaction, offset: int) -> OpenTransaction:
        return driver

    def complete(self, decision: Decision, driver: OpenTransaction) -> None:
        pass


class DecidesOverOlder(ExactlyOnceDriver):
    markers_class: type[EndMarkers] = _OnlyAfterwards

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._end_markers = self.markers_class(self.prefix, self._cluster)


class LooksForNoMarkers(DecidesOverOlder):
    markers_class = _NoMarkers


class BelievesCoordinators(World):
    """The driver does not look for end markers that were left out."""

    driver_class = LooksForNoMarkers


class DecidesOverOlderRecords(World):
    """The driver does not look for records that an abort has left open."""

    driver_class = DecidesOverOlder


class _TrustsRecords(EndMarkers):
    def check_added(self, *given: Any) -> None:
        pass


class TrustsRecords(DecidesOverOlder):
    markers_class = _TrustsRecords


class TrustsRecordsOfCoordinators(World):
    """The driver does not compare what is open in partitions with what coordinators know."""

    driver_class = TrustsRecords


class _TrustsReaders(EndMarkers):
    def refuse_successor(self, *given: Any) -> None:
        pass


class TrustsReaders(DecidesOverOlder):
    markers_class = _TrustsReaders


class TrustsWhatCanBeRead(InterleavedWorld):
    driver_class = TrustsReaders
