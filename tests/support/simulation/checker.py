"""Compares the producer's guarantees with the callbacks and the logs. It sees calls, callbacks and the brokers' logs,
read by the brokers' own decoder. It asks the producer only whether its memory is free and nothing is in flight.

The guarantees for an acknowledged record (its callback has no error, acks=all or 1):

- The record is in the log of the reported partition at the reported offset, with the content that was sent. With
  idempotence it is only once in all logs. The logs contain only records that were sent.
- Records of one partition are in the order in which they were sent, with idempotence or one request in flight. Not if
  the topic was created again: batches in flight then may come in another order. A record may be in the deleted logs,
  and once more in the new ones.

And for every record: one callback with one outcome, which its future has too. It comes at most delivery.timeout.ms
(plus pauses of the process) after the return of its send. A record with an error in its callback may be in the log: at
most once with idempotence, at any place in the order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from support.scripted_broker.batches import BrokerRecord
from support.simulation.ledger import Call, Outcome, SentRecord

from spark_kafka_sink.common.errors import KafkaTimeoutError, ProducerClosedError, RecordTooLargeError
from spark_kafka_sink.protocol.versions import ApiKey

if TYPE_CHECKING:
    from support.simulation.driver import Simulation


class Finding(NamedTuple):
    """A violated guarantee."""

    text: str

    def __str__(self) -> str:
        return self.text


class Place(NamedTuple):
    topic: str
    partition: int
    offset: int
    generation: int = 0
    """Counts the topics of this name that were deleted after this one."""


_Acknowledged: TypeAlias = dict[tuple[str, int], list[tuple[int, tuple[int, int, int]]]]
"""By topic and partition: offset, and (call, whether it had no fixed partition, row) of its record."""


def check(run: Simulation) -> list[Finding]:
    findings = [*run.flush_findings, *_outcomes(run), *_returns(run), *_at_rest(run)]
    if not run.plan.is_hostile:
        findings += [*_logs(run), *_arrivals(run), *_in_time(run), *_leaders(run)]
    return findings


# ---- one outcome, in time --------------------------------------------------------------------------------------------


def _outcomes(run: Simulation) -> Iterator[Finding]:
    limit_ms = run.plan.delivery_timeout_ms + run.longest_pause_ms
    for call in run.ledger:
        expected = len(call.records)
        if call.raised is None and call.settled != expected:
            yield Finding(f"{call}: {call.settled} outcomes for {expected} records")
        if call.raised is not None and (call.settled > expected or (call.outcomes and not call.is_block)):
            yield Finding(f"{call} raised {call.raised!r}, and {call.settled} outcomes for {expected} records came")
        if call.future is not None:
            yield from _future(call)
        for outcome in call.outcomes:
            late_ms = outcome.at_ms - call.returned_ms - limit_ms
            if late_ms > 0:
                yield Finding(f"{call} ended {late_ms} ms after delivery.timeout.ms: {outcome}")


def _future(call: Call) -> Iterator[Finding]:
    future = call.future
    assert future is not None
    if not future.done():
        yield Finding(f"{call}: its future is not done")
        return
    for outcome in call.outcomes:
        raised = future.exception()
        if raised is not outcome.error:
            yield Finding(f"{call}: the callback has {outcome.error!r}, the future {raised!r}")
        if future.metadata()[1:3] != (outcome.partition, outcome.base_offset):
            yield Finding(f"{call}: the callback has {outcome}, the future {future.metadata()}")


def _returns(run: Simulation) -> Iterator[Finding]:
    """Check that a send returns within max.block.ms, and raises only after a close."""
    limit_ms = run.plan.max_block_ms + run.longest_pause_ms
    for call in run.ledger:
        took_ms = call.returned_ms - call.began_ms
        if not call.is_block and took_ms > limit_ms:
            yield Finding(f"{call} blocked for {took_ms} ms, max.block.ms={run.plan.max_block_ms}")
        if call.raised is not None and not call.is_block and not isinstance(call.raised, ProducerClosedError):
            yield Finding(f"{call} raised {call.raised!r}")


def _at_rest(run: Simulation) -> Iterator[Finding]:
    metrics, accumulator = run.world.producer.metrics(), run.world.accumulator
    held = metrics["buffer-total-bytes"] - metrics["buffer-available-bytes"]
    if held:
        yield Finding(f"{held:.0f} bytes of buffer.memory were not given back")
    if accumulator.has_incomplete or accumulator.has_undrained:
        yield Finding(f"not empty: {accumulator!r}")
    if run.plan.ending == "heal" and run.world.client.has_in_flight_requests():
        yield Finding("requests stay in flight")
    if run.plan.ending != "heal" and run.world.selector.connection_ids:
        yield Finding("connections are open after the close")


# ---- the logs --------------------------------------------------------------------------------------------------------


class _Logs:
    """The contents of the brokers' logs, by record and by place."""

    def __init__(self, run: Simulation) -> None:
        self.places: dict[int, list[Place]] = defaultdict(list)
        self.records: dict[Place, BrokerRecord] = {}
        cluster, self.generations = run.world.cluster, Counter[str]()
        for topic in (*cluster.topics.values(), *reversed(cluster.deleted)):
            for partition, each in enumerate(topic.partitions):
                for record in each.log.records():
                    place = Place(topic.name, partition, record.offset, self.generations[topic.name])
                    self.records[place] = record
                    self.places[_number(record)].append(place)
            self.generations[topic.name] += 1

    def numbers_at(self, topic: str, partition: int, offset: int) -> list[int]:
        """Return the records that have, or had, this place."""
        places = (Place(topic, partition, offset, each) for each in range(self.generations[topic]))
        return [_number(self.records[place]) for place in places if place in self.records]


def _number(record: BrokerRecord) -> int:
    return int((record.value or b"-1").split(b":")[0])


def _logs(run: Simulation) -> Iterator[Finding]:
    logs = _Logs(run)
    sent = {record.number: (call, record) for call in run.ledger for record in call.records}
    for place, stored in logs.records.items():
        call, record = sent[_number(stored)]
        if not _is_same(call, record, stored, place):
            yield Finding(f"{place}: {stored} differs from the sent {record}")
    if run.plan.is_idempotent:
        for number, copies in logs.places.items():
            if max(Counter(place.generation for place in copies).values()) > 1:
                yield Finding(f"record {number} ({sent[number][0]}) is in the log {len(copies)} times: {copies}")
    if run.plan.acks != "0":
        acked: _Acknowledged = defaultdict(list)
        for call in run.ledger:
            yield from _acknowledged(call, logs, acked, run)
        if run.plan.is_idempotent or run.plan.in_flight == 1:
            remade = {topic.name for topic in run.world.cluster.deleted}
            yield from _order({place: entries for place, entries in acked.items() if place[0] not in remade})


def _is_same(call: Call, record: SentRecord, stored: BrokerRecord, place: Place) -> bool:
    headers = tuple((name.encode(), value) for name, value in record.headers)
    return (
        (stored.key, stored.value, stored.headers) == (record.key, record.value, headers)
        and call.topic == place.topic
        and record.partition in (None, place.partition)
        and record.timestamp_ms in (None, stored.timestamp_ms)
    )


def _acknowledged(call: Call, logs: _Logs, acked: _Acknowledged, run: Simulation) -> Iterator[Finding]:
    """Check that every acknowledged record of the call is at its reported offset. Add its position to `acked`."""
    own = {record.number: index for index, record in enumerate(call.records)}
    unplaced: Counter[int] = Counter()
    for outcome in call.outcomes:
        if outcome.error is not None:
            continue
        if outcome.base_offset < 0:
            unplaced[outcome.partition] += outcome.count
            continue
        for place in _places(call, outcome):
            numbers = logs.numbers_at(*place[:3])
            number = next((each for each in numbers if each in own), None)
            if number is None:
                yield Finding(f"{call} reported {outcome}; at {place} are records {numbers}")
                continue
            index = own[number]
            record = call.records[index]
            is_free = record.partition is None and (record.key is None or _ignores_keys(run))
            acked[place.topic, place.partition].append((place.offset, (call.number, int(is_free), index)))
    for partition, count in unplaced.items():
        there = sum(any(place.partition == partition for place in logs.places[number]) for number in own)
        if there < count:
            yield Finding(f"{call}: {count} records acknowledged for partition {partition}, {there} are in its log")


def _places(call: Call, outcome: Outcome) -> Iterator[Place]:
    for offset in range(outcome.base_offset, outcome.base_offset + outcome.count):
        yield Place(call.topic, outcome.partition, offset)


def _ignores_keys(run: Simulation) -> bool:
    return bool(run.plan.settings["partitioner.ignore.keys"])


def _order(acked: _Acknowledged) -> Iterator[Finding]:
    """Check the order of calls, and of the rows of one call; rows without a fixed partition only among themselves."""
    for partition, entries in acked.items():
        newest_call = -1
        newest_row: dict[tuple[int, int], int] = {}
        for offset, (call, is_free, row) in sorted(entries):
            if call < newest_call:
                yield Finding(f"{partition}: call {call}, row {row} at {offset} was sent before call {newest_call}")
            if row <= newest_row.get((call, is_free), -1):
                before = newest_row[call, is_free]
                yield Finding(f"{partition}: call {call}, row {row} at {offset} was sent before row {before}")
            newest_call = max(newest_call, call)
            newest_row[call, is_free] = row


# ---- after the end of all faults
# ----------------------------------------------------------------------------------------


def _arrivals(run: Simulation) -> Iterator[Finding]:
    """Check that records arrive that were sent after the end of all faults, or in a run without faults."""
    if run.world.producer.has_failed:
        if not run.troubles.has_been_fatal:
            yield Finding("the producer failed permanently, without a cause from a broker")
        return
    for call in run.must_arrive:
        if call.raised is not None or any(outcome.error is not None for outcome in call.outcomes):
            yield Finding(f"{call} did not arrive without a fault: {call.raised!r} {call.outcomes}")
    if run.plan.roughness == 0 and run.plan.ending == "heal":
        for call in run.ledger:
            errors = [call.raised, *(outcome.error for outcome in call.outcomes)]
            for error in errors:
                if error is not None and not isinstance(error, (RecordTooLargeError, KafkaTimeoutError)):
                    yield Finding(f"{call} failed without a fault: {error!r}")


def _in_time(run: Simulation) -> Iterator[Finding]:
    """Check that records whose timeout had not expired at the end of all faults do not expire."""
    for call in run.must_not_time_out:
        if any(isinstance(outcome.error, KafkaTimeoutError) for outcome in call.outcomes):
            yield Finding(f"{call} timed out after the end of all faults, with enough time left: {call.outcomes}")


def _leaders(run: Simulation) -> Iterator[Finding]:
    """Check that no batch goes to a leader of an older epoch than the leader before.

    Not guaranteed if brokers are too old for reliable epochs. Also not if a topic, or all metadata, was missing in
    between: then a new topic of that name has a lower epoch.
    """
    if run.plan.versions.get(3, (0, 0))[1] < 9 or run.troubles.has_denied_topics or run.troubles.has_moved_nodes:
        return
    if run.plan.settings["metadata.recovery.strategy"] == "rebootstrap" or run.world.cluster.deleted:
        return
    reached: dict[tuple[str, int], int] = {}
    for exchange in sorted(run.world.cluster.requests_of(ApiKey.PRODUCE), key=lambda each: each.correlation_id):
        for topic in exchange.request.topic_data:
            for data in topic.partition_data:
                partition = (topic.name, data.index)
                history = run.world.cluster.leaders.get(partition, {})
                first = reached.get(partition, 0)
                epochs = [epoch for epoch, leader in history.items() if leader == exchange.node_id and epoch >= first]
                if history and not epochs:
                    yield Finding(
                        f"{partition}: request {exchange.correlation_id} went to node {exchange.node_id}, which led"
                        f" before epoch {first}: {history}"
                    )
                reached[partition] = min(epochs, default=first)
