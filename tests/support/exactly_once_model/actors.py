"""The two seams of the protocol over the model: the requests of a driver to its cluster, and a task's producer."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.transaction_coordinator import Commit

from spark_kafka_sink.admin.coordinator_calls import Outcome
from spark_kafka_sink.admin.group_offsets import CommittedOffset
from spark_kafka_sink.admin.transaction_values import (
    EndTxnOutcome,
    OpenByProducer,
    PartitionEnds,
    TransactionDescription,
    TransactionState,
)
from spark_kafka_sink.admin.transactions import end_txn_outcome
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError, KafkaTimeoutError, error_for_code
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.producer.transactions import PreparedTransaction
from spark_kafka_sink.sink.exactly_once.advice import lost_decisions, missing_topic
from spark_kafka_sink.sink.exactly_once.messages import Decision, FirstUse, driver_id
from spark_kafka_sink.sink.exactly_once.protocol import PrefixRecords

if TYPE_CHECKING:
    from support.exactly_once_model.world import World

PREFIX = "P"
PLACE = TopicPartition("decisions", 0)
TIMEOUT_MS = 10_000
_MOST_TRIES = 4


def init_producer_id(world: World, key: str, held: tuple[int, int]) -> ProducerIdAndEpoch:
    def effect() -> ProducerIdAndEpoch:
        coordinator = world.cluster.transactions
        for _ in range(_MOST_TRIES):
            code = coordinator.init_producer_id(key, TIMEOUT_MS, held, world.now_ms)
            if code != ErrorCode.concurrent_transactions:
                break
            coordinator.advance(world.now_ms)
        else:
            raise KafkaTimeoutError(f"The end of the transaction of {key} was waited for.")
        if code:
            raise error_for_code(code)
        given = coordinator.transactions[key]
        return ProducerIdAndEpoch(given.producer_id, given.epoch)

    return world.request(f"init {key}", effect)


def write(world: World, open_: OpenTransaction, place: TopicPartition, sequence: int, values: list[Any]) -> int:
    """Write records into a partition, and return the offset of the first. The version may require that the partition is
    added to the transaction first.
    """
    coordinator = world.cluster.transactions

    def add() -> None:
        _check(world, open_)
        held = coordinator.begin(open_.transactional_id, world.now_ms, open_.transaction_version)
        held.partitions.add((place.topic, place.partition))

    def verify() -> None:
        _check(world, open_)
        if open_.transaction_version >= 2:
            add()
        elif tuple(place) not in coordinator.transactions[open_.transactional_id].partitions:
            raise error_for_code(ErrorCode.invalid_txn_state)

    def produce() -> int:
        if place == PLACE:
            world.check_topic()
        log = world.cluster.log(place.topic, place.partition)
        if not log.has_ongoing(*open_.producer):
            verify()
        return log.append(open_.producer_id, open_.producer_epoch, sequence, values)

    if open_.transaction_version < 2:
        world.request(f"add {place} to {open_.transactional_id}", add)
    return world.request(f"produce {open_.transactional_id} to {place}", produce)


def end(world: World, open_: OpenTransaction, committed: bool) -> EndTxnOutcome:
    coordinator = world.cluster.transactions

    def effect() -> ProducerIdAndEpoch:
        name, version = open_.transactional_id, open_.transaction_version
        code = coordinator.end(name, *open_.producer, committed, version, world.now_ms)
        if code:
            raise error_for_code(code)
        if open_.transaction_version < 2:
            return open_.producer
        held = coordinator.transactions[open_.transactional_id]
        return ProducerIdAndEpoch(held.producer_id, held.epoch)

    verb = "commit" if committed else "abort"
    try:
        return end_txn_outcome(open_, Outcome(world.request(f"{verb} {open_.transactional_id}", effect)))
    except KafkaError as error:
        return end_txn_outcome(open_, Outcome(None, error, is_in_doubt=True))


def _check(world: World, open_: OpenTransaction) -> None:
    code = world.cluster.transactions.check(open_.transactional_id, *open_.producer)
    if code:
        raise error_for_code(code)


class ModelDriverCluster:
    """`DriverCluster` over the model."""

    place = PLACE

    def __init__(self, world: World) -> None:
        self.world = world
        self.knows_prefix = False
        self._connected_under = world.version

    def find_topic(self) -> None:
        """Look for the decision topic, as the constructor of `KafkaDriverCluster` does."""
        if self.world.request("look for the decision topic", lambda: not self.world.is_topic_gone):
            return
        if self.describe_one(driver_id(PREFIX)) is not None:
            raise missing_topic(PREFIX, PLACE.topic)
        self.world.request("create the decision topic", self._create_topic)

    def _create_topic(self) -> None:
        self.world.is_topic_gone = False

    def check_topic(self) -> None:
        self.world.request("describe the decision topic", lambda: None)

    def transaction_version(self) -> int:
        return self.world.version_of_driver(self._connected_under)

    def init_producer_id(self, transactional_id: str, held: ProducerIdAndEpoch | None) -> ProducerIdAndEpoch:
        return init_producer_id(self.world, transactional_id, held or (-1, -1))

    def check_presence(self) -> None:
        self.world.request("look for the decision topic", self.world.check_topic)

    def last_decision(self) -> Decision | None:
        return self.last_records().decision

    def last_records(self) -> PrefixRecords:
        found: PrefixRecords = self.world.request("read the last records", self._read)
        self.knows_prefix = self.knows_prefix or found != PrefixRecords(None, None)
        return found

    def _read(self) -> PrefixRecords:
        self.world.check_topic()
        self.world.check_readable(PLACE)
        values = list(reversed(self.world.cluster.log(*PLACE).committed()))
        decision = next((value for value in values if not isinstance(value, FirstUse)), None)
        return PrefixRecords(decision, next((value for value in values if isinstance(value, FirstUse)), None))

    def lost_decisions(self) -> KafkaError:
        return lost_decisions(PREFIX, PLACE.topic, 1)

    def copied(self, records: PrefixRecords) -> KafkaError | None:
        return None  # no fault of the model makes a copy

    def write_first_use(self, *, is_adopted: bool, moved_to: str = "", is_free: bool = False) -> None:
        written = FirstUse(self.world.now_ms, 1, 1, is_adopted=is_adopted, moved_to=moved_to, is_free=is_free)
        first_use = FirstUse.from_bytes(written.to_bytes(), "the model")

        def effect() -> None:
            self.world.check_topic()
            self.world.cluster.log(*PLACE).append_alone(first_use)

        self.world.request("write the first-use record", effect)

    def write_decision(self, transaction: OpenTransaction, decision: Decision, sequence: int) -> int:
        stored = Decision.from_bytes(decision.to_bytes(), "the model", "P")
        return write(self.world, transaction, PLACE, sequence, [stored])

    def end(self, transactions: Sequence[OpenTransaction], *, committed: bool) -> list[EndTxnOutcome]:
        return [end(self.world, each, committed) for each in transactions]

    def describe(
        self,
        transactional_ids: Iterable[str],
        given: Mapping[str, ProducerIdAndEpoch] = {},
        *,
        have_begun: bool = False,
    ) -> Mapping[str, TransactionDescription | None]:
        ids = list(transactional_ids)
        described = self.world.request(
            f"describe {' '.join(ids)}", lambda: {each: self._describe(each) for each in ids}
        )
        for name, found in described.items():
            own = given.get(name)
            if (
                found
                and own
                and found.producer_id == own.producer_id
                and (
                    found.producer_epoch < own.epoch
                    or (have_begun and found.producer_epoch == own.epoch and found.state is TransactionState.EMPTY)
                )
            ):
                raise KafkaTimeoutError(f"The coordinator of {name} has an older state.")
        return described

    def describe_one(self, transactional_id: str) -> TransactionDescription | None:
        return self.describe([transactional_id])[transactional_id]

    def _describe(self, transactional_id: str) -> TransactionDescription | None:
        held = self.world.cluster.transactions.transactions.get(transactional_id)
        if held is None:
            return None
        return TransactionDescription(
            transactional_id,
            TransactionState.of(held.state),
            held.producer_id,
            held.epoch,
            held.timeout_ms,
            held.start_ms if held.start_ms >= 0 else None,
            frozenset(TopicPartition(*each) for each in held.partitions),
        )

    def list_ids(self, states: Iterable[TransactionState]) -> list[str]:
        expected = {state.value for state in states}
        held = self.world.cluster.transactions.transactions
        return self.world.request("list", lambda: [name for name, each in held.items() if each.state in expected])

    def markers(self, transactional_ids: Iterable[str]) -> Mapping[str, CommittedOffset | None]:
        ids = list(transactional_ids)
        return self.world.request(f"markers {' '.join(ids)}", lambda: {each: self._marker(each) for each in ids})

    def _marker(self, group: str) -> CommittedOffset | None:
        self.world.check_topic()
        held = self.world.cluster.transactions.transactions.values()
        if any(each.state != "CompleteCommit" and each.pending_offsets.get(group) for each in held):
            raise KafkaTimeoutError("An offset in an open transaction was waited for.")
        commit = self.world.cluster.transactions.offsets.get(group, {}).get((PLACE.topic, PLACE.partition))
        return None if commit is None else CommittedOffset(commit.offset, commit.metadata or "")

    def ends(self, expected: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, PartitionEnds]:
        places = list(expected)
        stable, logs = self._stable_ends(places), self.world.cluster.log
        log_ends = self.world.request("log ends", lambda: {place: len(logs(*place).entries) for place in places})
        return {place: PartitionEnds(stable[place], log_ends[place]) for place in places}

    def _stable_ends(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        logs = self.world.cluster.log
        return self.world.request("stable ends", lambda: {place: logs(*place).stable_end for place in places})

    def vanished(self, places: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        return ()

    def unreadable(
        self, ends: Mapping[TopicPartition, int], transactional_ids: Iterable[str]
    ) -> Sequence[TopicPartition]:
        stable = self._stable_ends(list(ends))
        return [place for place, end in ends.items() if stable[place] < end]

    def open_transactions(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, OpenByProducer]:
        logs = self.world.cluster.log
        return self.world.request("open transactions", lambda: {place: logs(*place).open_ for place in places})

    def ids_of(self, producer_ids: Iterable[int]) -> list[str]:
        expected, held = set(producer_ids), self.world.cluster.transactions.transactions
        return self.world.request("ids", lambda: [name for name, each in held.items() if each.producer_id in expected])

    def add_partitions(self, added: Mapping[OpenTransaction, Sequence[TopicPartition]]) -> None:
        def add(open_: OpenTransaction, places: Sequence[TopicPartition]) -> None:
            _check(self.world, open_)
            coordinator = self.world.cluster.transactions
            held = coordinator.begin(open_.transactional_id, self.world.now_ms, open_.transaction_version)
            held.partitions.update((place.topic, place.partition) for place in places)

        for open_, places in added.items():
            self.world.request(f"add to {open_.transactional_id}", functools.partial(add, open_, places))


class ModelProducer:
    """A task's producer: every send is a request. Nothing is sent after the end of the process."""

    client_id = "model"
    has_failed = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.open_ = OpenTransaction("", -1, -1, world.version_of_task())
        self._sequences: dict[TopicPartition, int] = {}

    def waits_ms(self) -> tuple[int, int]:
        return 0, 0

    def batches_and_retries(self) -> tuple[int, int]:
        return 0, 0

    def init_transactions(self, transactional_id: str | None = None, coordinators: object = None) -> None:
        given = init_producer_id(self.world, str(transactional_id), (-1, -1))
        self.open_ = OpenTransaction.of(str(transactional_id), given, self.world.version_of_task())

    def begin_transaction(self) -> None:
        pass

    @property
    def current_transaction(self) -> OpenTransaction:
        return self.open_

    def prepare_transaction(self) -> PreparedTransaction:
        return PreparedTransaction(self.open_, is_empty=False)

    def look_up(self, topics: Iterable[str]) -> None:
        pass

    def send_columns(self, topic: str, columns: Any, on_completion: Any = None) -> None:
        for key, row in columns.rows:
            place = TopicPartition(topic, key)
            sequence = self._sequences.get(place, 0)
            offset = write(self.world, self.open_, place, sequence, [row])
            self._sequences[place] = sequence + 1
            on_completion(RunMetadata(topic, key, offset, 1, -1, 0), None)

    def flush(self, timeout_ms: int | None = None) -> None:
        pass

    def send_offsets_to_transaction(self, offsets: Mapping[TopicPartition, tuple[int, str | None]], group: str) -> None:
        coordinator = self.world.cluster.transactions

        def effect() -> None:
            _check(self.world, self.open_)
            self.world.check_topic()
            held = coordinator.begin(self.open_.transactional_id, self.world.now_ms, self.open_.transaction_version)
            held.groups.add(group)
            pending = held.pending_offsets.setdefault(group, {})
            pending.update({(place.topic, place.partition): Commit(*offset) for place, offset in offsets.items()})

        self.world.request(f"marker of {group}", effect)


class ModelPool:
    """Gives every task a new producer. A closed producer leaves its transaction open, which is the worst case."""

    def __init__(self, world: World) -> None:
        self.world = world

    def borrow(self, config: object) -> ModelProducer:
        return ModelProducer(self.world)

    def release(self, producer: ModelProducer) -> None:
        pass

    def discard(self, producer: ModelProducer) -> None:
        pass
