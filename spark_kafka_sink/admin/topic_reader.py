"""Reads topics: `TopicReader` reads whole topics or partitions, `TopicTail` the newest records of a partition.

A read ends at the end that the partition had when the read began. It survives leader changes and broker failures, and
fails after a limit of time without progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from spark_kafka_sink.admin.request_client import RequestClient, RequestFuture, Timer
from spark_kafka_sink.admin.topics import TopicAbsence, TopicsMetadata, lacks_partition
from spark_kafka_sink.admin.transaction_values import OpenByProducer, OpenRecords, PartitionEnds
from spark_kafka_sink.client.backoff import COORDINATOR_BACKOFF_MS
from spark_kafka_sink.client.seams import ClientResponse
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import NO_LEADER_EPOCH, Node, TopicPartition
from spark_kafka_sink.common.errors import (
    CorruptBatchError,
    DisconnectError,
    KafkaError,
    KafkaTimeoutError,
    OffsetOutOfRangeError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
    error_for_code,
)
from spark_kafka_sink.protocol.fetch import (
    EARLIEST_TIMESTAMP,
    LATEST_TIMESTAMP,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    FetchPartition,
    FetchRequest,
    ListOffsetsPartition,
    ListOffsetsRequest,
)
from spark_kafka_sink.protocol.transactions import DescribeProducersRequest
from spark_kafka_sink.protocol.versions import Message, Request
from spark_kafka_sink.record.decoder import DEFAULT_LIMITS, BatchLimits, DecodedBatch, DecodedRecord, decode_batches

_ABORT_KEY_TYPE: Final = 0
"""Type in the key of a control record: 0 abort, 1 commit (org.apache.kafka.common.record.ControlRecordType)."""
_MAX_WAIT_MS: Final = 500
_CONTRADICTION: Final = "The answer names the partition more than once, with different offsets."
_NO_OFFSET: Final = "The answer has neither an offset nor an error."
_NOT_GRANTED: Final = {
    "ListOffsets": "Not authorized for the topic: grant DESCRIBE on it, which READ includes.",
    "Fetch": "Not authorized for the topic: grant READ on it.",
}
_Sent = tuple[RequestFuture[ClientResponse], list[TopicPartition]]
_FIRST_TAIL: Final = 32
_STALE_MS: Final = 2_000
_FIRST_PAUSE_MS: Final = 2
"""Coordinators need some ms for end markers."""
_TAIL_LIMITS: Final = BatchLimits(decompressed_size=24 * 8 * 1024 * 1024, objects=100_000)
"""The decision topic takes batches of 8 MiB, enough for 500,000 tasks. Decompressed, a batch has 5 times as many bytes
with a transactional.id.prefix of 40 letters, and 16 times with the longest one, of 200. A decision is one record.
"""


class PartitionRecords(NamedTuple):
    """Records of one partition, in order. Compaction, control records and aborts leave gaps."""

    topic_partition: TopicPartition
    records: list[DecodedRecord]


class _Patience:
    """The limit of time without progress, and the last error."""

    def __init__(self, clock: Clock, limit_ms: int) -> None:
        self._clock = clock
        self._limit_ms = limit_ms
        self._last_error: KafkaError | None = None
        self.timer = Timer(clock, limit_ms)

    def progress(self) -> None:
        self.timer = Timer(self._clock, self._limit_ms)
        self._last_error = None

    def endure(self, error: KafkaError) -> None:
        """Keep a retriable error for the text of the timeout. Raise any other error."""
        if not error.retriable:
            raise error
        self._last_error = error

    def check(self, partitions: Iterable[TopicPartition]) -> None:
        """Raise KafkaTimeoutError if the limit is reached."""
        self.timer.update()
        if self.timer.is_expired:
            names = ", ".join(sorted(map(str, partitions)))
            why = f" Last error: {self._last_error}" if self._last_error is not None else ""
            raise KafkaTimeoutError(f"Nothing could be read of {names} for {self._limit_ms} ms.{why}")


class _Question(NamedTuple):
    """What is asked of the leaders of partitions."""

    found: Mapping[TopicPartition, object]
    request: Callable[[Iterable[TopicPartition]], Request]
    take: Callable[[Iterable[tuple[TopicPartition, Message]], _Patience], None]
    """Puts the answers into `found`."""

    def missing(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        return [place for place in partitions if place not in self.found]


@dataclass(slots=True)
class _Reading:
    """The progress of a read. `resume_ms`: the times before which partitions must not be fetched."""

    isolation_level: int
    positions: dict[TopicPartition, int]
    ends: Mapping[TopicPartition, int]
    aborted: set[tuple[int, int]]
    resume_ms: dict[TopicPartition, int] = field(default_factory=dict)
    in_flight: dict[str, _Sent] = field(default_factory=dict)

    def unfinished(self) -> list[TopicPartition]:
        return [known for known, position in self.positions.items() if position < self.ends[known]]

    def due(self, now_ms: int) -> list[TopicPartition]:
        """Return the partitions to fetch now."""
        asked = {known for _, partitions in self.in_flight.values() for known in partitions}
        return [
            known for known in self.unfinished() if known not in asked and self.resume_ms.get(known, now_ms) <= now_ms
        ]

    def should_block(self) -> bool:
        return not any(future.is_done() for future, _ in self.in_flight.values())


class TopicReader:
    """Reads on `client`, which must share `metadata`. Sizes in bytes, times in ms."""

    def __init__(
        self,
        client: RequestClient,
        metadata: TopicsMetadata,
        clock: Clock,
        retry_backoff_ms: int = 100,
        timeout_ms: int = 60_000,
        max_partition_bytes: int = 1024 * 1024,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        self._client = client
        self._metadata = metadata
        self._clock = clock
        self._retry_backoff_ms = retry_backoff_ms
        self._timeout_ms = timeout_ms
        self._max_partition_bytes = max_partition_bytes
        self._limits = limits
        self.aborted: set[tuple[int, int]] = set()
        """(producer id, epoch) of each aborted transaction whose marker was read, at any isolation level."""

    def partitions(self, topic: str) -> list[TopicPartition]:
        """Return the topic's partitions. If it does not appear within the limit, or brokers do not name it for 10 s,
        this raises UnknownTopicOrPartitionError, or KafkaTimeoutError if no broker was reached.
        """
        self._metadata.add_topics([topic])
        patience = _Patience(self._clock, self._timeout_ms)
        absence = TopicAbsence(self._metadata, self._clock)
        while not (infos := self._metadata.fetch().partitions_for_topic(topic)):
            if patience.timer.is_expired:
                raise self._not_found(topic)
            if self._client.await_metadata_update(patience.timer):
                absence.check([topic])
        return [TopicPartition(topic, info.partition) for info in infos]

    def offsets(
        self, partitions: Sequence[TopicPartition], timestamp: int, isolation_level: int = READ_UNCOMMITTED
    ) -> dict[TopicPartition, int]:
        """Return the partitions' offsets at `timestamp`: EARLIEST_TIMESTAMP, LATEST_TIMESTAMP or ms since the epoch.
        For those, -1 means that no record is that late. Raises the error of a partition, naming it, or
        KafkaTimeoutError.
        """
        found: dict[TopicPartition, int] = {}
        self._ask_leaders(partitions, self._question(timestamp, isolation_level, found))
        return found

    def ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, PartitionEnds]:
        """Return where the partitions end, for both kinds of readers. It takes one round trip. Raises as `offsets`."""
        stable: dict[TopicPartition, int] = {}
        log_ends: dict[TopicPartition, int] = {}
        self._ask_leaders(
            partitions,
            self._question(LATEST_TIMESTAMP, READ_COMMITTED, stable),
            self._question(LATEST_TIMESTAMP, READ_UNCOMMITTED, log_ends),
        )
        return {place: PartitionEnds(stable[place], log_ends[place]) for place in partitions}

    def open_transactions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, OpenByProducer]:
        """Return the open transactions of each partition by producer id (KIP-664). Partitions of topics that may not be
        read are left out. Raises the error of a partition, naming it, or KafkaTimeoutError.
        """
        found: dict[TopicPartition, OpenByProducer] = {}

        def take(answers: Iterable[tuple[TopicPartition, Message]], patience: _Patience) -> None:
            for topic_partition, answer in answers:
                code = int(answer.error_code)
                if code and code != TopicAuthorizationError.error_code:
                    error = error_for_code(code, api="DescribeProducers")
                    patience.endure(error.at(topic_partition=topic_partition))
                    continue
                found[topic_partition] = {
                    int(each.producer_id): OpenRecords(int(each.current_txn_start_offset), int(each.producer_epoch))
                    for each in answer.active_producers
                    if each.current_txn_start_offset >= 0
                }
                if code:
                    refused.add(topic_partition)

        def request(asked: Iterable[TopicPartition]) -> DescribeProducersRequest:
            topics: dict[str, list[int]] = {}
            for topic, partition in asked:
                topics.setdefault(topic, []).append(partition)
            return DescribeProducersRequest(topics)

        refused: set[TopicPartition] = set()
        self._ask_leaders(partitions, _Question(found, request, take))
        return {place: open_ for place, open_ in found.items() if place not in refused}

    def read(
        self,
        topics: Sequence[str],
        isolation_level: int = READ_UNCOMMITTED,
        start: Mapping[TopicPartition, int] | None = None,
    ) -> Iterator[PartitionRecords]:
        """Yield the topics' records as they come. Records of one partition are in order; partitions are not.

        A partition is read from its offset in `start`, or else from the earliest one, to its current end: the last
        stable offset for READ_COMMITTED. Raises UnknownTopicOrPartitionError if a topic is missing, CorruptBatchError,
        KafkaTimeoutError, and the error of a partition, naming it.
        """
        partitions = [partition for topic in topics for partition in self.partitions(topic)]
        yield from self.read_partitions(partitions, isolation_level, start)

    def read_partitions(
        self,
        partitions: Sequence[TopicPartition],
        isolation_level: int = READ_UNCOMMITTED,
        start: Mapping[TopicPartition, int] | None = None,
        ends: Mapping[TopicPartition, int] | None = None,
    ) -> Iterator[PartitionRecords]:
        """Read only these partitions, to their offsets in `ends` or else to their current ends. Metadata must already
        include their topics.
        """
        if ends is None:
            ends = self.offsets(partitions, LATEST_TIMESTAMP, isolation_level)
        positions = {known: offset for known, offset in (start or {}).items() if known in ends}
        positions |= self.offsets([known for known in partitions if known not in positions], EARLIEST_TIMESTAMP)
        reading = _Reading(isolation_level, positions, ends, self.aborted)
        patience = _Patience(self._clock, self._timeout_ms)
        absence = TopicAbsence(self._metadata, self._clock)
        while unfinished := reading.unfinished():
            self._send_fetches(reading)
            self._client.poll(patience.timer, reading)
            for node_id in [node_id for node_id, (future, _) in reading.in_flight.items() if future.is_done()]:
                future, asked = reading.in_flight.pop(node_id)
                before = [reading.positions[known] for known in asked]
                found = list(self._take(reading, future, asked, patience))
                has_moved = before != [reading.positions[known] for known in asked]
                self._send_fetches(reading)  # the broker prepares the next response while the caller uses these
                yield from found
                if has_moved:
                    patience.progress()
            patience.check(unfinished)
            absence.check_partitions(unfinished)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _not_found(self, topic: str) -> KafkaError:
        within = f"within {self._timeout_ms} ms."
        if self._metadata.fetch().is_bootstrap_configured:
            why = self._client.why_unanswered()
            return KafkaTimeoutError(f"Topic {topic!r} was not looked up {within} {why}", topic=topic)
        why = self._metadata.connection_failure or "Create it, or correct the name."
        return UnknownTopicOrPartitionError(f"Topic {topic!r} was not found in the cluster {within} {why}", topic=topic)

    def _question(self, timestamp: int, isolation_level: int, found: dict[TopicPartition, int]) -> _Question:
        """A ListOffsets, whose answers go into `found`."""

        def take(answers: Iterable[tuple[TopicPartition, Message]], patience: _Patience) -> None:
            said: dict[TopicPartition, set[tuple[int, int]]] = {}
            for topic_partition, answer in answers:
                said.setdefault(topic_partition, set()).add((int(answer.error_code), int(answer.offset)))
            for topic_partition, outcomes in said.items():
                code, offset = outcomes.pop()
                if outcomes:
                    patience.endure(DisconnectError(_CONTRADICTION, topic_partition=topic_partition))
                elif code:
                    patience.endure(_refusal(code, "ListOffsets", topic_partition))
                elif offset < 0 and timestamp < 0:  # taken for an end, it would hide all records
                    patience.endure(DisconnectError(_NO_OFFSET, topic_partition=topic_partition))
                else:
                    found[topic_partition] = offset

        def request(asked: Iterable[TopicPartition]) -> ListOffsetsRequest:
            return self._list_offsets(asked, timestamp, isolation_level)

        return _Question(found, request, take)

    def _ask_leaders(self, partitions: Sequence[TopicPartition], *questions: _Question) -> None:
        """Ask the leaders of the partitions, all questions at the same time, until each question has all answers."""
        patience = _Patience(self._clock, self._timeout_ms)
        absence = TopicAbsence(self._metadata, self._clock)
        while any(question.missing(partitions) for question in questions):
            sent = [
                (question, self._client.send(node, question.request(asked)))
                for question in questions
                for node, asked in self._by_leader(question.missing(partitions))
            ]
            for question, future in sent:
                self._client.poll_until(future, patience.timer)
                question.take(_answers(future, patience, "topics", "name"), patience)
            still_missing = {place for question in questions for place in question.missing(partitions)}
            if still_missing:
                patience.check(still_missing)
                absence.check_partitions(still_missing)
                self._client.await_metadata_update(patience.timer)

    def _by_leader(self, partitions: Iterable[TopicPartition]) -> list[tuple[Node, list[TopicPartition]]]:
        """Return the partitions by leader. Those without a leader are left out, and an update is requested."""
        found: dict[Node, list[TopicPartition]] = {}
        for topic_partition in partitions:
            leader = self._metadata.current_leader(topic_partition).leader
            if leader is None:
                self._metadata.request_update(reset_equivalent_backoff=False)
            else:
                found.setdefault(leader, []).append(topic_partition)
        return list(found.items())

    def _epoch(self, topic_partition: TopicPartition) -> int:
        epoch = self._metadata.current_leader(topic_partition).epoch
        return NO_LEADER_EPOCH if epoch is None else epoch

    def _list_offsets(
        self, partitions: Iterable[TopicPartition], timestamp: int, isolation_level: int
    ) -> ListOffsetsRequest:
        topics: dict[str, list[ListOffsetsPartition]] = {}
        for requested in partitions:
            entry = ListOffsetsPartition(requested.partition, timestamp, self._epoch(requested))
            topics.setdefault(requested.topic, []).append(entry)
        return ListOffsetsRequest(topics, isolation_level)

    def _send_fetches(self, reading: _Reading) -> None:
        """Send a fetch to every leader without one in flight, for all of its partitions that are due."""
        for node, partitions in self._by_leader(reading.due(self._clock.now_ms())):
            if node.id_string in reading.in_flight:
                continue
            topics: dict[str, list[FetchPartition]] = {}
            for requested in partitions:
                position = reading.positions[requested]
                entry = FetchPartition(requested.partition, position, self._max_partition_bytes, self._epoch(requested))
                topics.setdefault(requested.topic, []).append(entry)
            request = FetchRequest(topics, _MAX_WAIT_MS, isolation_level=reading.isolation_level)
            reading.in_flight[node.id_string] = (self._client.send(node, request), partitions)

    def _take(
        self,
        reading: _Reading,
        future: RequestFuture[ClientResponse],
        asked: Sequence[TopicPartition],
        patience: _Patience,
    ) -> Iterator[PartitionRecords]:
        """Return the records of an answer. Partitions that failed wait before the next request."""
        unanswered = set(asked)
        for topic_partition, answer in _answers(future, patience, "responses", "topic"):
            if topic_partition not in unanswered:
                continue
            if answer.error_code != 0:
                patience.endure(_refusal(int(answer.error_code), "Fetch", topic_partition))
                continue
            unanswered.discard(topic_partition)
            records = _records(reading, topic_partition, answer, self._limits)
            if records:
                yield PartitionRecords(topic_partition, records)
        if unanswered:
            self._metadata.request_update(reset_equivalent_backoff=False)
        resume_ms = self._clock.now_ms() + self._retry_backoff_ms
        reading.resume_ms.update(dict.fromkeys(unanswered, resume_ms))


def _answers(
    future: RequestFuture[ClientResponse], patience: _Patience, topics_field: str, name_field: str
) -> Iterator[tuple[TopicPartition, Message]]:
    """Yield each partition's part of a response. If the request failed, `patience` keeps or raises its error."""
    if not future.is_done():
        return
    if not future.succeeded():
        patience.endure(future.error)
        return
    body = future.value().body
    code = int(getattr(body, "error_code", 0))
    if code:
        # only the answer to a Fetch has its own code
        patience.endure(error_for_code(code, api="Fetch").at(node=future.value().destination))
    for topic in getattr(body, topics_field):
        for partition in topic.partitions:
            yield TopicPartition(str(getattr(topic, name_field)), int(partition.partition_index)), partition


def _refusal(error_code: int, api: str, topic_partition: TopicPartition) -> KafkaError:
    """Return the error of a partition. It names the permission that `api` needs, because its own text names those for
    writing.
    """
    text = _NOT_GRANTED[api] if error_code == TopicAuthorizationError.error_code else ""
    return error_for_code(error_code, text, api).at(topic_partition=topic_partition)


def _records(
    reading: _Reading, topic_partition: TopicPartition, answer: Message, limits: BatchLimits
) -> list[DecodedRecord]:
    """Return the records between position and end, and move the position past them."""
    position, end = reading.positions[topic_partition], reading.ends[topic_partition]
    found: list[DecodedRecord] = []
    aborted: list[AbortedTransaction] = []
    if reading.isolation_level != READ_UNCOMMITTED:
        listed = answer.aborted_transactions or ()
        aborted = [AbortedTransaction(int(each.producer_id), int(each.first_offset)) for each in listed]
    try:
        for batch, is_visible in visible_batches(decode_batches(answer.records or b"", limits), aborted):
            if is_visible:
                found += [record for record in batch.records if position <= record.offset < end]
            elif is_abort_marker(batch) and position <= batch.base_offset < end:
                reading.aborted.add((batch.producer_id, batch.producer_epoch))
            position = max(position, batch.last_offset + 1)
    except CorruptBatchError as error:
        raise error.at(topic_partition=topic_partition) from error
    reading.positions[topic_partition] = position
    return found


class TopicTail:
    """Reads on `client`, which must share `metadata`. It waits for a missing topic until the timer expires, and then
    raises UnknownTopicOrPartitionError. Without permission it raises TopicAuthorizationError.
    """

    def __init__(self, client: RequestClient, metadata: TopicsMetadata, clock: Clock, retry_backoff_ms: int) -> None:
        self._client = client
        self._metadata = metadata
        self._clock = clock
        self._retry_backoff_ms = retry_backoff_ms

    def list_offsets(
        self,
        topic_partitions: Sequence[TopicPartition],
        timestamp: int,
        timer: Timer,
        isolation_level: int = READ_UNCOMMITTED,
    ) -> dict[TopicPartition, int]:
        """Return the partitions' offsets at `timestamp`: EARLIEST_TIMESTAMP, LATEST_TIMESTAMP (with READ_COMMITTED the
        last stable offset) or ms since the epoch. For those, -1 means that no record is that late.
        """
        with _permission("DESCRIBE"):
            self._find(topic_partitions, timer)
            reader = self._reader(timer, ", ".join(map(str, topic_partitions)))
            return reader.offsets(topic_partitions, timestamp, isolation_level)

    def ends(self, expected: Mapping[TopicPartition, int], timer: Timer) -> dict[TopicPartition, PartitionEnds]:
        """As `TopicReader.ends`. A node that was frozen may not know yet that it leads no partition any more, and give
        an older end. So if a log ends before the offset in `expected`, its leader is looked for again, for 2 s.
        """
        with _permission("DESCRIBE"):
            self._find(list(expected), timer)
            found = self._reader(timer, ", ".join(map(str, expected))).ends(list(expected))
            patience = Timer(self._clock, min(_STALE_MS, timer.remaining_ms))
            while (short := [place for place, end in expected.items() if found[place].log < end]) and (
                self._client.await_metadata_update(patience)
            ):
                found |= self._reader(timer, ", ".join(map(str, short))).ends(short)
                patience.update()
            return found

    def open_transactions(
        self, topic_partitions: Sequence[TopicPartition], timer: Timer
    ) -> dict[TopicPartition, OpenByProducer]:
        """As `TopicReader.open_transactions`. It needs READ."""
        self._find(topic_partitions, timer)
        reader = self._reader(timer, ", ".join(map(str, topic_partitions)))
        return reader.open_transactions(topic_partitions)

    def await_stable(
        self, ends: Mapping[TopicPartition, int], timer: Timer, has_ended: Callable[[], bool]
    ) -> list[TopicPartition]:
        """Wait until readers under read_committed can read each partition up to its offset in `ends`. Return the
        partitions where they cannot although `has_ended`, which says whether the coordinators call the transactions
        complete. It is not asked after the first look, because end markers mostly take a few ms. Before the last look
        the leaders are looked for again: one that was frozen or cut off sees no newer end. Raises KafkaTimeoutError.
        """
        is_over, is_renewed, pause_ms = False, False, _FIRST_PAUSE_MS
        behind = list(ends)
        while True:
            stable = self.list_offsets(behind, LATEST_TIMESTAMP, timer, READ_COMMITTED)
            behind = [place for place in behind if stable[place] < ends[place]]
            if not behind or is_renewed:
                return behind
            if is_over and not self._client.await_metadata_update(timer):
                return behind
            if is_over:
                is_renewed = True
                continue
            is_over = pause_ms > _FIRST_PAUSE_MS and has_ended()
            timer.update()
            if timer.is_expired:
                raise KafkaTimeoutError(
                    f"The end markers of committed transactions were not written within {timer.timeout_ms} ms."
                ).at(topic_partition=behind[0])
            if not is_over:
                self._clock.sleep_ms(min(pause_ms, timer.remaining_ms))
                pause_ms = min(2 * pause_ms, COORDINATOR_BACKOFF_MS)

    def read_from(
        self, topic_partition: TopicPartition, offset: int, timer: Timer, isolation_level: int = READ_COMMITTED
    ) -> list[DecodedRecord]:
        """Return the records from `offset` to the current end, in order. Raises OffsetOutOfRangeError if the partition
        begins later.
        """
        with _permission("READ"):
            self._find([topic_partition], timer)
        return self._read(topic_partition, offset, timer, isolation_level)

    def last_of_keys(
        self,
        topic_partition: TopicPartition,
        keys: Sequence[bytes],
        timer: Timer,
        isolation_level: int = READ_COMMITTED,
        least: int = 0,
    ) -> dict[bytes, DecodedRecord | None]:
        """Return the newest committed record of each key, or None. The search goes backwards from the end. It stops at
        a record of the first key that has a value: for the other keys only later records are found.

        Records behind an open transaction cannot be read yet. The call waits for the transaction's end, up to the
        current end of the partition. With READ_UNCOMMITTED it does not wait: for keys that no transaction writes.

        A node that was frozen or cut off may not know yet that another one leads the partition, and then lacks newer
        records. So if the partition seems to end before `least`, its leader is looked for again. Raises
        KafkaTimeoutError.
        """
        requested = [topic_partition]
        stable = self._current_end(topic_partition, least, timer)
        if isolation_level == READ_COMMITTED:
            self._await_stable(topic_partition, stable, timer)
        first, window = 0, _FIRST_TAIL  # a partition that begins later refuses what is before its begin
        while True:
            start = max(first, stable - window)
            try:
                found = self._read(topic_partition, start, timer, isolation_level, stable)
            except OffsetOutOfRangeError:
                first = self.list_offsets(requested, EARLIEST_TIMESTAMP, timer)[topic_partition]
                continue
            newest = {key: next((each for each in reversed(found) if each.key == key), None) for key in keys}
            chief = newest[keys[0]]
            if start == first or (chief is not None and chief.value is not None) or None not in newest.values():
                return newest
            window *= 8

    def _current_end(self, topic_partition: TopicPartition, least: int, timer: Timer) -> int:
        while (end := self.list_offsets([topic_partition], LATEST_TIMESTAMP, timer)[topic_partition]) < least:
            if not self._client.await_metadata_update(timer):
                late = KafkaTimeoutError(
                    f"Its leader says that it ends at offset {end}, and record {least - 1} was written and"
                    f" acknowledged. No newer leader was found within {timer.timeout_ms} ms."
                )
                raise late.at(topic_partition=topic_partition)
        return end

    def _await_stable(self, topic_partition: TopicPartition, end: int, timer: Timer) -> None:
        """Wait until every transaction before `end` has ended."""
        requested = [topic_partition]
        while (stable := self.list_offsets(requested, LATEST_TIMESTAMP, timer, READ_COMMITTED)[topic_partition]) < end:
            self._clock.sleep_ms(min(COORDINATOR_BACKOFF_MS, timer.remaining_ms))
            timer.update()
            if timer.is_expired:
                late = KafkaTimeoutError(
                    f"A transaction stayed open at offset {stable} for {timer.timeout_ms} ms, and what was committed"
                    " behind it cannot be read. It ends by its own timeout. If it does not, a broker has left out its"
                    " end marker (KAFKA-20734): the query or write whose transaction it is writes it at its next start,"
                    " and `kafka-transactions.sh find-hanging` lists it."
                )
                raise late.at(topic_partition=topic_partition)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _reader(self, timer: Timer, requested: str) -> TopicReader:
        """Return a reader for the time that is left. Raises KafkaTimeoutError if none exists."""
        timer.update()
        if timer.is_expired:
            raise KafkaTimeoutError(f"{requested} was not read within {timer.timeout_ms} ms.")
        return TopicReader(
            self._client, self._metadata, self._clock, self._retry_backoff_ms, timer.remaining_ms, limits=_TAIL_LIMITS
        )

    def _find(self, topic_partitions: Sequence[TopicPartition], timer: Timer) -> None:
        """Add the topics to metadata. Raises UnknownTopicOrPartitionError if a partition does not exist."""
        for topic in sorted({each.topic for each in topic_partitions}):
            requested = {each for each in topic_partitions if each.topic == topic}
            there = self._reader(timer, ", ".join(sorted(map(str, requested)))).partitions(topic)
            for missing in requested.difference(there):
                raise lacks_partition(missing, len(there))

    def _read(
        self, topic_partition: TopicPartition, start: int, timer: Timer, isolation_level: int, end: int | None = None
    ) -> list[DecodedRecord]:
        found: list[DecodedRecord] = []
        ends = None if end is None else {topic_partition: end}
        with _permission("READ"):
            reader = self._reader(timer, str(topic_partition))
            for chunk in reader.read_partitions([topic_partition], isolation_level, {topic_partition: start}, ends):
                found += chunk.records
                timer.update()
                if timer.is_expired:
                    text = f"{topic_partition} was not read to its end within {timer.timeout_ms} ms."
                    raise KafkaTimeoutError(text, topic_partition=topic_partition)
        return found


@contextmanager
def _permission(operation: str) -> Iterator[None]:
    """Return the error with the permission for reading. The text of metadata's error names those for writing."""
    try:
        yield
    except TopicAuthorizationError as error:
        if error.topic_partition is not None:  # the text of a partition's error names the right permission
            raise
        raise error.reworded(f"{error} To read, {operation} is enough.") from error


# ---- which batches a reader may see ----------------------------------------------------------------------------------


class AbortedTransaction(NamedTuple):
    """The producer, and the offset of the transaction's first record in the partition."""

    producer_id: int
    first_offset: int


def is_abort_marker(batch: DecodedBatch) -> bool:
    """Return whether the batch ends an aborted transaction."""
    if not batch.is_control or not batch.records:
        return False
    key = batch.records[0].key
    return key is not None and int.from_bytes(key[2:4], "big") == _ABORT_KEY_TYPE


def visible_batches(
    batches: Iterable[DecodedBatch], aborted: Iterable[AbortedTransaction]
) -> Iterator[tuple[DecodedBatch, bool]]:
    """Return each batch, ordered by offset, and whether a reader sees its records. Control batches and batches of
    aborted transactions are not visible. `aborted` comes from the fetch response; nothing is kept between fetches.
    """
    waiting = sorted(aborted, key=lambda transaction: transaction.first_offset, reverse=True)
    aborting: set[int] = set()
    for batch in batches:
        while waiting and waiting[-1].first_offset <= batch.last_offset:
            aborting.add(waiting.pop().producer_id)
        if is_abort_marker(batch):
            aborting.discard(batch.producer_id)
        is_aborted = batch.is_transactional and batch.producer_id in aborting
        yield batch, not batch.is_control and not is_aborted
