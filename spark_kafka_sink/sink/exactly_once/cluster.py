"""The requests of exactly-once delivery to a real cluster, over one set of connections.

A client belongs to one thread at a time: `process_client` lends the one that a process keeps. Only the process that
made the connections may use them, not its children.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.group_offsets import CommittedOffset
from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.admin.topics import ABSENCE_LIMIT_MS, TopicCreation, lacks_partition
from spark_kafka_sink.admin.transaction_values import (
    EndTxnOutcome,
    OpenByProducer,
    PartitionEnds,
    TransactionDescription,
    TransactionState,
)
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    AuthorizationError,
    IllegalStateError,
    InvalidPidMappingError,
    KafkaError,
    KafkaTimeoutError,
    RecordTooLargeError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
    UnsupportedVersionError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.network.tls_context import FileStates, are_renewed, file_states
from spark_kafka_sink.protocol.fetch import LATEST_TIMESTAMP, READ_UNCOMMITTED
from spark_kafka_sink.record.decoder import DecodedRecord
from spark_kafka_sink.record.partitioning import partition_for_key
from spark_kafka_sink.sink.exactly_once.advice import copied_topic, lost_decisions, missing_topic
from spark_kafka_sink.sink.exactly_once.messages import Decision, FirstUse, driver_id, first_use_key, task_id
from spark_kafka_sink.sink.exactly_once.protocol import USABLE_SHARE, ExactlyOnceDriver, PrefixRecords
from spark_kafka_sink.sink.exactly_once.query_names import QueryNames, names_key
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import IDLE_MS

log = logging.getLogger(__name__)

Coordinators = Mapping[tuple[int, str], Node]
"""By kind (as in FindCoordinator) and name."""
DECISION_PARTITIONS: Final = 16
"""More than one, so that a decision that is being written does not keep all other queries from reading theirs."""
MOST_REPLICAS: Final = 3
DECISION_TOPIC_CONFIGS: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 << 20),
    "max.message.bytes": str(8 << 20),
}
"""A compressed decision takes about 16 bytes for each task, so max.message.bytes is enough for 500,000 tasks."""
_SEGMENT_BYTES: Final = "segment.bytes"
"""Only makes Kafka compact sooner. Some managed clusters refuse so small a value, or the setting."""
_INVALID_CONFIG: Final = 40
_POLICY_VIOLATION: Final = 44
_OLDEST_RELEASE: Final = "3.0"
_NEEDS_RELEASE: Final = f"delivery.guarantee=exactly-once needs Kafka {_OLDEST_RELEASE} or newer."
_RETRY_BACKOFF_MS: Final = 10
_OWN_TRANSACTION_MS: Final = 60_000
"""Timeout of the driver's own transaction, which takes milliseconds. Decisions behind it cannot be read while it is
open.
"""
_LEAST_OWN_MS: Final = 5_000
_LOOKED_UP_TOGETHER: Final = 64
"""Tasks. A request with their names takes 3 KB."""
_MOST_APART_MS: Final = 1_000
"""Answers of several coordinators that are further apart are not taken for those of one moment."""
_CHECKED: Final[WeakSet[ClusterClient]] = WeakSet()
"""Clients whose cluster allows the transaction.timeout.ms of their configuration."""
_KNOWN: Final[WeakKeyDictionary[ClusterClient, set[tuple[TopicPartition, bytes]]]] = WeakKeyDictionary()
"""By client: partitions and keys of prefixes whose records were read. A later read must find a record, too."""
_POLICY: Final = "cleanup.policy"
_UNCLEAN: Final = "unclean.leader.election.enable"
_FEW_REPLICAS_MATTER_FROM: Final = 3
"""Brokers. A smaller cluster is for tests, or has no room for more replicas."""
_COMMITTING: Final = TransactionState.PREPARE_COMMIT
Answer = TypeVar("Answer")
_warned: Final[set[str]] = set()
"""Warnings that this process has logged: each session and each worker's client checks the topic again."""


class KafkaDriverCluster:
    """`DriverCluster` over a `ClusterClient`. A call waits at most max.block.ms, the end of transactions at most
    delivery.timeout.ms. `is_one_off`: no later write asks for a decision of this prefix once its batch is finished.
    `has_tasks`: batches will be written, so the cluster must allow their timeout.

    The constructor looks for the decision topic. It creates a missing one if the coordinator knows no driver of the
    prefix or the prefix `is_one_off`: then no earlier write left a decision. Raises IllegalStateError if a driver is
    known, and KafkaError.
    """

    def __init__(
        self,
        client: ClusterClient,
        config: SinkConfig,
        prefix: str,
        *,
        is_one_off: bool = False,
        has_tasks: bool = True,
    ) -> None:
        self._client = client
        self._sink = config
        self._config = config.producer
        self._prefix = prefix
        self._key = prefix.encode()
        self._is_one_off = is_one_off
        self._has_tasks = has_tasks
        self._gone: set[str] = set()
        """Topics that were not in the cluster when they were last looked up."""
        self._partitions = self._find_topic(config.decision_topic)
        self.place = TopicPartition(config.decision_topic, partition_for_key(self._key, self._partitions))

    def transaction_version(self) -> int:
        version = self._client.transaction_version(self._timer())
        return 2 if version >= 2 else 1

    def init_producer_id(self, transactional_id: str, held: ProducerIdAndEpoch | None) -> ProducerIdAndEpoch:
        task_timeout_ms = self._config.transaction_timeout_ms
        init = self._client.transactions.init_producer_id
        own_ms = _own_transaction_ms(task_timeout_ms)
        if self._has_tasks and task_timeout_ms > own_ms and self._client not in _CHECKED:
            # a cluster that does not allow the tasks' timeout refuses it here, before any task runs
            held = init(transactional_id, task_timeout_ms, self._timer(), held)
            _CHECKED.add(self._client)
        return init(transactional_id, own_ms, self._timer(), held)

    @property
    def knows_prefix(self) -> bool:
        return (self.place, self._key) in _KNOWN.get(self._client, ())

    def check_topic(self) -> None:
        check_decision_topic(self._client.creation, self.place.topic, self._timer())

    def check_presence(self) -> None:
        self._log_end()  # costs half as much as new metadata

    def last_decision(self) -> Decision | None:
        """Return the newest committed decision."""
        return self.last_records().decision

    def last_records(self, *, may_be_old: bool = False) -> PrefixRecords:
        """`may_be_old`: writes nothing, and may miss what was decided while the partition changed its leader."""
        find = self._client.topics.last_of_keys if may_be_old else self._client.last_of_keys
        timer = self._client.timer(max(self._config.max_block_ms, 2 * _OWN_TRANSACTION_MS))
        born = first_use_key(self._key)
        with self._gone_topic():
            found = find(self.place, [self._key, born], timer)
        decision, first_use = found[self._key], found[born]
        records = PrefixRecords(
            Decision.from_bytes(decision.value, self._where(decision), self._prefix)
            if decision and decision.value
            else None,
            FirstUse.from_bytes(first_use.value, self._where(first_use)) if first_use and first_use.value else None,
        )
        if records != PrefixRecords(None, None):
            _KNOWN.setdefault(self._client, set()).add((self.place, self._key))
        return records

    def decision_of(self, prefix: str) -> Decision | None:
        """Return the newest committed decision under another prefix."""
        return KafkaDriverCluster(self._client, self._sink, prefix, has_tasks=False).last_decision()

    def query_names(self, query_id: str) -> QueryNames:
        key, place = names_key(query_id), self._place_of_names(query_id)
        with self._gone_topic():
            # No transaction writes this record, so an open transaction of another query need not end first.
            found = self._client.last_of_keys(place, [key], self._timer(), READ_UNCOMMITTED)[key]
        if found is None or found.value is None:
            return QueryNames({})
        return QueryNames.from_bytes(found.value, f"{place}, offset {found.offset}, query {query_id}")

    def write_query_names(self, query_id: str, names: QueryNames) -> None:
        """Write the record outside transactions, acknowledged by all in-sync replicas."""
        place = self._place_of_names(query_id)
        with self._gone_topic():
            self._client.writer.write_alone(place, names_key(query_id), names.to_bytes(), self._timer())

    def _place_of_names(self, query_id: str) -> TopicPartition:
        return TopicPartition(self.place.topic, partition_for_key(names_key(query_id), self._partitions))

    def lost_decisions(self) -> KafkaError:
        return lost_decisions(self._prefix, self.place.topic, self._partitions)

    def copied(self, records: PrefixRecords) -> KafkaError | None:
        record = records.decision or records.first_use
        if record is None or not record.topic_id:
            return None
        with self._gone_topic():  # asks, because this process may know the topic from before it was made again
            self._client.creation.count(self.place.topic, self._timer())
        if self._topic_id in {"", record.topic_id}:
            return None
        last = None if records.decision is None else records.decision.batch_id
        return copied_topic(self._prefix, self.place.topic, record.topic_id, self._topic_id, last)

    @property
    def _topic_id(self) -> str:
        """The id of the decision topic, as far as it is known. Brokers that are older than topic ids have none."""
        return str(self._client.creation.cluster.topic_ids.get(self.place.topic, ""))

    def write_first_use(self, *, is_adopted: bool, moved_to: str = "", is_free: bool = False) -> None:
        if self._is_one_off:
            return
        cluster, (topic, partition) = self._client.creation.cluster, self.place
        info = next((each for each in cluster.partitions_for_topic(topic) if each.partition == partition), None)
        first_use = FirstUse(
            SystemClock().wall_ms(),
            self._partitions,
            0 if info is None else len(info.replicas),
            self._topic_id,
            is_adopted,
            moved_to,
            is_free,
        )
        with self._gone_topic():
            writer = self._client.writer
            writer.write_alone(self.place, first_use_key(self._key), first_use.to_bytes(), self._timer())

    def write_decision(self, transaction: OpenTransaction, decision: Decision, sequence: int) -> int:
        is_over = self._is_one_off and decision.is_finished
        value = None if is_over else replace(decision, topic_id=self._topic_id).to_bytes()
        # under version 1 a leader cannot tell this record from one that was written in the same epoch before
        is_sure = transaction.transaction_version >= 2 or sequence > 0
        least = 0 if is_sure else self._log_end()
        try:
            with self._gone_topic():
                writer = self._client.writer
                offset = writer.write(transaction, self.place, self._key, value, sequence, self._timer())
        except RecordTooLargeError as error:
            raise RecordTooLargeError(
                f"Batch {decision.batch_id} under transactional.id.prefix={self._key.decode()!r} is not decided: a"
                f" decision on {len(decision.tasks)} tasks is too large for decision.topic={self.place.topic}. {error}"
                f" Raise max.message.bytes of that topic (a new one has {DECISION_TOPIC_CONFIGS['max.message.bytes']}),"
                " or write fewer partitions (coalesce)."
            ) from error
        except InvalidPidMappingError as error:
            raise error.reworded(
                f"Batch {decision.batch_id} is not decided: the brokers have forgotten {transaction.transactional_id}."
                f" Raise their transactional.id.expiration.ms above the time that a batch takes. {error}"
            ) from error
        if 0 <= offset < least:
            raise IllegalStateError(
                f"Batch {decision.batch_id} under transactional.id.prefix={self._key.decode()!r} is not decided:"
                f" {self.place} has taken its decision for the one at offset {offset}. Records of __transaction_state"
                f" were lost, and {transaction} has written before. The batch must run again."
            )
        return offset

    def end(self, transactions: Sequence[OpenTransaction], *, committed: bool) -> list[EndTxnOutcome]:
        timer = self._client.timer(self._config.delivery_timeout_ms)
        return self._client.transactions.end_txns(transactions, timer, committed=committed)

    def describe(
        self,
        transactional_ids: Iterable[str],
        given: Mapping[str, ProducerIdAndEpoch] = {},
        *,
        have_begun: bool = False,
    ) -> Mapping[str, TransactionDescription | None]:
        describe = self._client.transactions.describe_transactions
        return describe(transactional_ids, self._timer(), given, have_begun=have_begun)

    def list_ids(self, states: Iterable[TransactionState]) -> list[str]:
        listed = self._client.transactions.list_transactions(self._timer(), states=states)
        return [each.transactional_id for each in listed]

    def markers(self, transactional_ids: Iterable[str]) -> Mapping[str, CommittedOffset | None]:
        requested = {each: [self.place] for each in transactional_ids}
        found = self._client.groups.fetch_offsets(requested, self._timer())
        return {group: commits[self.place] for group, commits in found.items()}

    def ends(self, expected: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, PartitionEnds]:
        def ask(seen: Sequence[TopicPartition]) -> Mapping[TopicPartition, PartitionEnds]:
            return self._client.topics.ends({place: expected[place] for place in seen}, self._timer())

        return self._of_seen(list(expected), ask) or {}

    def unreadable(
        self, ends: Mapping[TopicPartition, int], transactional_ids: Iterable[str]
    ) -> Sequence[TopicPartition]:
        names, timer = list(transactional_ids), self._client.timer(self._config.delivery_timeout_ms)

        def have_ended() -> bool:
            described = self._client.transactions.describe_transactions(names, timer)
            return all(found is None or found.state is not _COMMITTING for found in described.values())

        def ask(seen: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
            return self._client.topics.await_stable({place: ends[place] for place in seen}, timer, have_ended)

        return self._of_seen(list(ends), ask) or ()

    def open_transactions(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, OpenByProducer]:
        def ask(seen: Sequence[TopicPartition]) -> Mapping[TopicPartition, OpenByProducer]:
            try:
                return self._client.topics.open_transactions(seen, self._timer())
            except UnsupportedVersionError:  # a proxy in front of the brokers
                return {}

        found = self._of_seen(places, ask)
        if found is not None and (hidden := sorted({place.topic for place in places if place not in found})):
            _warn(
                f"The driver cannot read {', '.join(hidden)}, so that it cannot see whose transactions are open there."
                " If a broker leaves out the end marker of an aborted transaction (KAFKA-20734), its rows are committed"
                " together with a later batch. Grant READ on topics that other producers write, too."
            )
        return found or {}

    def ids_of(self, producer_ids: Iterable[int]) -> list[str]:
        listed = self._client.transactions.list_transactions(self._timer(), producer_ids=producer_ids)
        return [each.transactional_id for each in listed]

    def add_partitions(self, added: Mapping[OpenTransaction, Sequence[TopicPartition]]) -> None:
        self._client.writer.add_partitions(added, self._timer())

    def _log_end(self) -> int:
        def ask(seen: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
            return self._client.topics.list_offsets(seen, LATEST_TIMESTAMP, self._timer())

        return (self._of_seen([self.place], ask) or {}).get(self.place, 0)

    def _of_seen(
        self, places: Sequence[TopicPartition], ask: Callable[[Sequence[TopicPartition]], Answer]
    ) -> Answer | None:
        """Return what `ask` returns for the places that the driver can see, None if it sees none. A warning names the
        topics of the others: they were deleted, and their rows with them; or the driver may not describe them.
        """
        seen, creation = list(places), self._client.creation
        while seen:
            last = {place.topic: place for place in sorted(seen)}
            topics = list(last)
            try:
                creation.look_up(topics, self._timer())
                for place in last.values():
                    self._require_partitions(place)
                return ask(seen)
            except (UnknownTopicOrPartitionError, TopicAuthorizationError) as error:
                if isinstance(error, UnknownTopicOrPartitionError) and error.topic == self.place.topic:
                    raise missing_topic(self._prefix, error.topic) from error
                _warn(
                    "Whether readers under read_committed can read the rows of a batch was not checked"
                    f" (transactional.id.prefix={self._prefix!r}): {error}"
                )
                if error.topic_partition is not None and (gone := self.vanished(seen)):
                    seen = [place for place in seen if place not in gone]
                    continue
                if isinstance(error, UnknownTopicOrPartitionError) and error.topic is not None:
                    self._gone.add(error.topic)
                for topic in topics if error.topic is None else [error.topic]:
                    creation.forget(topic)  # else its error would end later calls
                seen = [place for place in seen if error.topic not in {None, place.topic}]
        return None

    def vanished(self, places: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        known = {topic: self._client.creation.cluster.partitions_for_topic(topic) for topic, _ in places}
        return [
            place for place in places if place.topic in self._gone or 0 < len(known[place.topic]) <= place.partition
        ]

    def _require_partitions(self, last: TopicPartition) -> None:
        """Raise UnknownTopicOrPartitionError if the topic or its partition `last` is missing. The tasks may have learnt
        of new partitions before the driver.
        """
        topic = last.topic
        found = len(self._client.creation.cluster.partitions_for_topic(topic))
        if found <= last.partition:
            found = self._wait_for(topic, last.partition + 1)
        if not found:
            raise UnknownTopicOrPartitionError(f"Topic {topic} is not in the cluster.", topic=topic)
        self._gone.discard(topic)
        if found <= last.partition:
            raise lacks_partition(last, found)

    def _find_topic(self, topic: str) -> int:
        """Return the number of partitions of the decision topic. A missing topic is created if the prefix was never
        used.
        """
        creation = self._client.creation
        if found := len(creation.cluster.partitions_for_topic(topic)):
            return found
        name = driver_id(self._prefix)
        try:
            with advice_on_creation(topic):
                found = creation.count(topic, self._timer())
            if found:
                return found
            if self._is_one_off or self.describe([name])[name] is None:
                return create_decision_topic(self._client, topic, self._timer())
            if found := self._wait_for(topic):
                return found
        except KafkaTimeoutError as error:
            raise KafkaTimeoutError(f"decision.topic={topic} of exactly-once delivery: {error}") from error
        raise missing_topic(self._prefix, topic)

    def _wait_for(self, topic: str, least: int = 1) -> int:
        """Return the number of partitions; 0 if no node has the topic. A node that has just started may not know it
        yet, or not all of its partitions.
        """
        limit_ms = min(self._config.max_block_ms, ABSENCE_LIMIT_MS)
        return self._client.creation.wait_for(topic, self._client.timer(limit_ms), least)

    @contextmanager
    def _gone_topic(self) -> Iterator[None]:
        try:
            yield
        except UnknownTopicOrPartitionError as error:
            raise missing_topic(self._prefix, self.place.topic) from error
        except KafkaTimeoutError as error:  # under version 1 the coordinator answers that the request must be retried
            try:
                is_there = self._client.creation.count(self.place.topic, self._client.timer(ABSENCE_LIMIT_MS))
            except KafkaTimeoutError:
                raise error from None
            if is_there:
                raise
            raise missing_topic(self._prefix, self.place.topic) from error

    def _where(self, record: DecodedRecord) -> str:
        return f"{self.place}, offset {record.offset}, {self._prefix!r}"

    def _timer(self) -> Timer:
        return self._client.timer(self._config.max_block_ms)


def create_decision_topic(client: ClusterClient, topic: str, timer: Timer) -> int:
    """Create the topic if it is missing. Return its number of partitions. Raises KafkaError."""
    ensure = functools.partial(client.creation.ensure, topic, DECISION_PARTITIONS, MOST_REPLICAS)
    with advice_on_creation(topic):
        try:
            return ensure(DECISION_TOPIC_CONFIGS, timer)
        except KafkaError as error:
            if error.error_code not in {_INVALID_CONFIG, _POLICY_VIOLATION}:
                raise
            log.info("decision.topic=%s is created without %s: %s", topic, _SEGMENT_BYTES, error)
            return ensure({key: value for key, value in DECISION_TOPIC_CONFIGS.items() if key != _SEGMENT_BYTES}, timer)


@contextmanager
def advice_on_creation(topic: str) -> Iterator[None]:
    """Add what to do to a refusal: brokers refuse a missing topic as they refuse one that must not be described."""
    try:
        yield
    except AuthorizationError as error:
        raise type(error)(f"{error} {_by_hand(topic)}, or grant CREATE on it.") from error
    except KafkaError as error:
        if error.error_code not in {_INVALID_CONFIG, _POLICY_VIOLATION}:
            raise
        advised = error.copied()
        advised.hint = f" {_by_hand(topic)}."
        raise advised from error


def _by_hand(topic: str) -> str:
    return f"Create decision.topic={topic} by hand ({DECISION_PARTITIONS} partitions, cleanup.policy=compact)"


def _own_transaction_ms(task_timeout_ms: int) -> int:
    """Return half of the time that the tasks' transactions still have when the decision is written, at least.

    With a longer timeout the decision could be committed after the tasks' transactions have timed out, if their
    coordinators were away. A broker looks for timed out transactions every 10 s.
    """
    half_ms = round((1 - USABLE_SHARE) * task_timeout_ms / 2)
    return min(task_timeout_ms, _OWN_TRANSACTION_MS, max(half_ms, _LEAST_OWN_MS))


@dataclass(slots=True)
class _Kept:
    """A client of this process. Only the thread that holds `lock` may use it, or change the other fields."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    client: ClusterClient | None = None
    files: FileStates = ()
    """Of the certificates, when `client` was made."""
    uses: int = 0
    """How often the thread that holds `lock` is inside `process_client`."""
    asked_ms: int = 0


_CLIENTS: Final[dict[tuple[int, object], _Kept]] = {}
"""By process and configuration: after a fork, the child uses none of its parent's locks and connections."""


class Lent(NamedTuple):
    """The process's client, lent to one thread. `timer`: what is left of max.block.ms, for its first call."""

    client: ClusterClient
    timer: Timer


@contextmanager
def process_client(config: ProducerConfig) -> Iterator[Lent]:
    """The process's client for this configuration, for this thread alone. A thread that has it may ask for it again;
    another one waits. A client that was not asked for in ten minutes is closed when another one is asked for.

    A new client is made once the files of the certificates were renewed: several processes have a client each, and the
    brokers would refuse each one once. The client is closed after a refused login, too, and after what is no
    KafkaError, such as Ctrl-C: it may wait for ever for what was interrupted.

    Raises BootstrapResolutionError, and KafkaTimeoutError if another thread has the client for max.block.ms.
    """
    kept, left_ms = _taken(config)
    try:
        kept.uses += 1
        kept.asked_ms = SystemClock().now_ms()
        _close_idle(kept.asked_ms)
        if kept.client is not None and kept.uses == 1 and are_renewed(config, kept.files):
            _close(kept)
        if kept.client is None:
            kept.files = file_states(config)
            kept.client = connect(config)
        yield Lent(kept.client, kept.client.timer(left_ms))
    except BaseException as error:
        if not isinstance(error, KafkaError) or isinstance(error, AuthenticationError):
            _close(kept)
        raise
    finally:
        kept.uses -= 1
        kept.lock.release()


def _taken(config: ProducerConfig) -> tuple[_Kept, int]:
    """Return the entry of this process, with its lock, and what is left of max.block.ms."""
    key = (os.getpid(), config.canonical())
    timer = Timer(SystemClock(), config.max_block_ms)
    while True:
        kept = _CLIENTS.setdefault(key, _Kept())
        if not kept.lock.acquire(blocking=False):
            if not kept.lock.acquire(timeout=min(timer.remaining_ms / 1000, threading.TIMEOUT_MAX)):
                raise _in_use(config)
            timer.update()
        if _CLIENTS.get(key) is kept:
            return kept, timer.remaining_ms
        kept.lock.release()  # another thread has found it idle, and taken it out


def _in_use(config: ProducerConfig) -> KafkaTimeoutError:
    servers = ",".join(f"{host}:{port}" for host, port in config.bootstrap_servers)
    return KafkaTimeoutError(
        f"Another thread of this process used the connections to {servers} for {config.max_block_ms} ms"
        " (max.block.ms). Threads with the same kafka.* options share them, and ask the brokers one after the other."
        " Its own error or log says what it waits for: brokers that answer slowly, or not at all."
    )


def _close_idle(now_ms: int) -> None:
    """Close the clients of this process that no thread uses and that were not asked for in ten minutes."""
    own = os.getpid()
    for key, kept in _CLIENTS.copy().items():
        if key[0] != own or now_ms - kept.asked_ms < IDLE_MS or not kept.lock.acquire(blocking=False):
            continue
        try:
            if not kept.uses and now_ms - kept.asked_ms >= IDLE_MS:
                _CLIENTS.pop(key, None)
                _close(kept)
        finally:
            kept.lock.release()


def _close(kept: _Kept) -> None:
    client, kept.client = kept.client, None
    if client is not None:
        client.close()


def connect(config: ProducerConfig) -> ClusterClient:
    """Make a client with short backoffs, because a batch waits for every answer. It fetches the list of brokers twice
    with the same answer, for which the backoff would otherwise grow to retry.backoff.max.ms.
    """
    backoff_ms = min(config.retry_backoff_ms, _RETRY_BACKOFF_MS)
    quick = replace(config, retry_backoff_ms=backoff_ms, retry_backoff_max_ms=backoff_ms)
    return ClusterClient.connect(quick, SystemClock(), random.Random())


@contextmanager
def process_driver(config: SinkConfig, prefix: str, *, is_one_off: bool = False) -> Iterator[ExactlyOnceDriver]:
    """The protocol for a prefix over the process's client. Raises KafkaError. The error for a broker that is too old
    names the Kafka release that exactly-once delivery needs.
    """
    with process_client(config.producer) as (client, _):
        try:
            cluster = KafkaDriverCluster(client, config, prefix, is_one_off=is_one_off)
            yield ExactlyOnceDriver(prefix, cluster, SystemClock().wall_ms, topic=config.topic, is_new=is_one_off)
        except UnsupportedVersionError as error:
            if error.oldest_release is not None or UnsupportedVersionError.sentence in str(error):
                raise  # it names a release, or a node has refused what it had announced
            refusal = error.reworded(f"{_NEEDS_RELEASE} {error}")
            refusal.oldest_release = _OLDEST_RELEASE
            raise refusal from error


def describe_in_process(
    config: SinkConfig, driver: OpenTransaction, transactional_ids: Sequence[str]
) -> Mapping[str, TransactionDescription | None]:
    """Describe transactional ids, for a task of `driver`. The answer for the last one is at most a second older than
    the others. Raises KafkaError.
    """
    given = {driver.transactional_id: driver.producer}
    with process_client(config.producer) as (client, timer):
        described: dict[str, TransactionDescription | None] = {}
        asked = [*transactional_ids]
        while asked:
            described |= client.transactions.describe_transactions(asked, timer, given)
            is_slow = timer.timeout_ms - timer.remaining_ms > _MOST_APART_MS
            asked = asked[-1:] if is_slow and len(asked) > 1 else []
            timer = client.timer(config.producer.max_block_ms)
        return described


def coordinators_in_process(config: SinkConfig, prefix: str, partition: int, name: str) -> Coordinators:
    """Return the coordinators of a task's transactional id and of its group, both `name`. The first task of a worker
    looks up those of all tasks around it: the worker runs many of them.

    Raises the error of a refused login. Whatever else goes wrong is left to the request that needs the coordinator.
    """
    first = partition - partition % _LOOKED_UP_TOGETHER
    others = (task_id(prefix, each, 0) for each in range(first, first + _LOOKED_UP_TOGETHER))
    with process_client(config.producer) as (client, timer):
        return client.coordinators(name, others, timer)


def check_decision_topic(creation: TopicCreation, topic: str, timer: Timer) -> None:
    """Check that the topic keeps the last record of each key.

    Raises IllegalStateError if cleanup.policy is not only compact, and KafkaTimeoutError. Logs a warning if the
    principal may not read the topic's configuration, if there is one replica in a larger cluster, and for unclean
    leader election.
    """
    _check_replicas(creation, topic)
    try:
        configs = creation.configs(topic, (_POLICY, _UNCLEAN), timer)
    except (AuthenticationError, KafkaTimeoutError):
        raise
    except KafkaError as error:
        _warn(
            f"decision.topic={topic}: its cleanup.policy and unclean.leader.election.enable were not checked:"
            f" {error} A topic that is not compacted only deletes decisions, and a batch may then be written twice."
            " To let this principal check it: kafka-acls.sh --bootstrap-server HOST:PORT --add"
            f" --allow-principal User:NAME --operation DescribeConfigs --topic {shlex.quote(topic)}"
        )
        return
    policy = configs.get(_POLICY)
    if policy is not None and policy.strip() != "compact":
        raise IllegalStateError(
            f"decision.topic={topic} has cleanup.policy={one_line(policy)}: Kafka deletes decisions from it after"
            f" some time, and a batch may then be written twice. Change it: {_alter(topic, f'{_POLICY}=compact')}"
        )
    if (configs.get(_UNCLEAN) or "").strip().lower() == "true":
        _warn(
            f"decision.topic={topic} has unclean.leader.election.enable=true: after the loss of brokers a replica"
            " without the last decisions may lead, and a batch may then be written twice. Change it:"
            f" {_alter(topic, f'{_UNCLEAN}=false')}"
        )


def _check_replicas(creation: TopicCreation, topic: str) -> None:
    cluster = creation.cluster
    replicas = min((len(each.replicas) for each in cluster.partitions_for_topic(topic)), default=0)
    if replicas == 1 and len(cluster.nodes) >= _FEW_REPLICAS_MATTER_FROM:
        _warn(
            f"decision.topic={topic} has one replica, and the cluster has {len(cluster.nodes)} brokers: if that"
            " broker's disk is lost, so are the decisions, and a batch may be written twice. Add replicas:"
            " kafka-reassign-partitions.sh --bootstrap-server HOST:PORT --reassignment-json-file FILE --execute"
        )


def _alter(topic: str, setting: str) -> str:
    return (
        "kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics"
        f" --entity-name {shlex.quote(topic)} --add-config {setting}"
    )


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)
