"""A whole producer in one thread: its turns, its clock, its network, and a log of the events.

Time passes only in the selector's poll and in the driver's steps. The application and the Sender share one thread:
while the application waits (for metadata or memory, by the fake clock) the Sender runs its turns.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from kio.index import load_response_schema
from kio.serial import entity_reader
from support.fake_clock import FakeClock
from support.fake_selector import FakeNetwork, FakeSelector
from support.producer_harness import ProducerHarness
from support.scripted_broker.batches import BadBatchError, check_batch, read_records
from support.scripted_broker.cluster import ScriptedCluster, ScriptedTopic
from support.scripted_broker.exchange import Exchange, Reply
from support.scripted_broker.versions import VersionRanges
from support.simulation.plan import Plan

from spark_kafka_sink.protocol.versions import ApiKey

_MAX_POLLS_AT_ONE_TIME = 400
FOREVER_MS = 2**62


class StuckError(BaseException):
    """The Sender spins, or does not end. Not an Exception, because the Sender survives those."""


class Asked:
    """An exchange as text: API, node, and the batches of a Produce. Formatted only when printed."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __str__(self) -> str:
        exchange = self._exchange
        name = type(exchange.request).__name__.removesuffix("Request")
        batches = [
            f"{topic.name}-{data.index} {_describe(data.records)}"
            for topic in getattr(exchange.request, "topic_data", ())
            for data in topic.partition_data
        ]
        return f"node {exchange.node_id} has {name} #{exchange.correlation_id} {'; '.join(batches)}"


class Answered:
    """The replies as text. Formatted only when printed."""

    def __init__(self, exchange: Exchange, replies: list[Reply]) -> None:
        self._exchange = exchange
        self._replies = replies

    def __str__(self) -> str:
        if not self._replies:
            return "silence"
        ((delay_ms, data, close),) = self._replies
        later = f" {delay_ms} ms later" if delay_ms else ""
        return (self._outcomes(data) if data else "") + (" closes the connection" if close else "") + later

    def _outcomes(self, frame: bytes) -> str:
        if self._exchange.api_key != ApiKey.PRODUCE:
            return f"{len(frame)} bytes"
        entity_type: Any = load_response_schema(ApiKey.PRODUCE, self._exchange.version)
        try:
            _, size = entity_reader(entity_type.__header_schema__)(frame, 4)
            body, _ = entity_reader(entity_type)(frame, 4 + size)
        except Exception as error:
            return f"{len(frame)} garbled bytes ({error!r})"
        return "; ".join(
            f"{topic.name}-{each.index} {each.error_code.name} at {each.base_offset}"
            for topic in body.responses
            for each in topic.partition_responses
        )


def _describe(data: bytes | None) -> str:
    try:
        header = check_batch(data or b"")
        numbers = [int((record.value or b"-1").split(b":")[0]) for record in read_records(data or b"")]
    except BadBatchError as error:
        return str(error)
    identity = f"producer {header.producer_id} epoch {header.producer_epoch} sequence {header.base_sequence}"
    return f"records {numbers} ({identity})"


class _Selector(FakeSelector):
    """Returns from poll if the application must act, and notices a Sender that spins."""

    def __init__(self, network: FakeNetwork, clock: FakeClock) -> None:
        super().__init__(network, clock)
        self.clock = clock
        self.horizon_ms = FOREVER_MS
        self.give_up_ms = FOREVER_MS
        self._polled_ms = -1
        self._polls_now = 0

    def poll(self, timeout_ms: int) -> None:
        now_ms = self.clock.now_ms()
        self._polls_now = self._polls_now + 1 if now_ms == self._polled_ms else 0
        self._polled_ms = now_ms
        if self._polls_now > _MAX_POLLS_AT_ONE_TIME:
            raise StuckError(f"{self._polls_now} polls without progress of the clock: the Sender spins")
        if now_ms > self.give_up_ms:
            raise StuckError("the Sender does not end")
        super().poll(min(timeout_ms, self.horizon_ms - now_ms))


class _Cluster(ScriptedCluster):
    """A scripted cluster that notes requests and responses on the timeline, and keeps the leaders of each epoch."""

    timeline: Timeline

    def __init__(self, node_count: int, seed: int, versions: VersionRanges) -> None:
        super().__init__(node_count, seed=seed, versions=versions)
        self.leaders: dict[tuple[str, int], dict[int, int]] = {}
        """Leaders by epoch, for epochs that began since the start."""
        self.deleted: list[ScriptedTopic] = []
        """With their logs. Others of the same names have taken their places."""

    def move_leader(self, topic: str, partition: int, node_id: int) -> None:
        before = self.topics[topic].partitions[partition]
        history = self.leaders.setdefault((topic, partition), {before.leader_epoch: before.leader_id})
        super().move_leader(topic, partition, node_id)
        history[before.leader_epoch] = node_id

    def create_again(self, name: str) -> None:
        """Delete a topic and create it again, with empty logs and without its producers."""
        old = self.topics[name]
        self.deleted.append(old)
        self.delete_topic(name)
        new = self.create_topic(name, len(old.partitions))
        new.max_message_bytes, new.is_visible = old.max_message_bytes, old.is_visible

    def handle_frame(self, node_id: int, payload: bytes, now_ms: int, connection: object = None) -> list[Reply]:
        known = len(self.requests)
        replies = super().handle_frame(node_id, payload, now_ms, connection)
        for exchange in self.requests[known:]:
            self.timeline.note("    %s -> %s", Asked(exchange), Answered(exchange, replies))
        return replies


class Timeline:
    """The events in order. Formatted only when printed."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._started_ms = clock.now_ms()
        self._events: list[tuple[int, str, tuple[Any, ...]]] = []

    def note(self, text: str, *parts: Any) -> None:
        self._events.append((self._clock.now_ms() - self._started_ms, text, parts))

    def __str__(self) -> str:
        return "\n".join(f"{at_ms:>8} ms  {text % parts if parts else text}" for at_ms, text, parts in self._events)


class _Harness(ProducerHarness):
    selector_class = _Selector


class World:
    """Producer, cluster and network of one plan."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan = plan
        self.rng = rng
        self.cluster = _Cluster(plan.node_count, rng.getrandbits(32), plan.versions)
        self.cluster.has_leader_hints = plan.has_leader_hints
        latency = plan.latency_ms
        self.topics = [f"topic-{index}" for index in range(len(plan.partitions))]
        harness = _Harness(
            plan.settings,
            topics=dict(zip(self.topics, plan.partitions, strict=True)),
            cluster=self.cluster,
            latency_ms=(lambda: latency[0]) if len(latency) == 1 else (lambda: rng.choice(latency)),
            seed=rng.getrandbits(32),
        )
        for topic in self.cluster.topics.values():
            topic.max_message_bytes = plan.max_message_bytes
        self.clock, self.network, self.client = harness.clock, harness.network, harness.client
        self.producer, self.config, self.accumulator = harness.producer, harness.config, harness.accumulator
        assert isinstance(harness.selector, _Selector)
        self.selector = harness.selector
        self.timeline = self.cluster.timeline = Timeline(self.clock)
        self.clock.on_wait = self._wait
        self.before_wait: Callable[[], None] | None = None
        """Called when the application's thread must wait inside the producer."""

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    # ---- turns -------------------------------------------------------------------------------------------------------

    def turn(self, limit_ms: int) -> None:
        """Run one turn of the Sender, with a poll that ends at `limit_ms` at the latest."""
        self.selector.horizon_ms = limit_ms
        try:
            self.producer.sender.run_once()
        finally:
            self.selector.horizon_ms = FOREVER_MS

    def run_for(self, duration_ms: int) -> None:
        """Run the Sender's turns for a while."""
        end_ms = self.now_ms + duration_ms
        self.turn(end_ms)
        while self.now_ms < end_ms:
            self.turn(end_ms)

    def run_until(self, condition: Callable[[], bool], limit_ms: int) -> bool:
        """Run turns until the condition holds. Return False if `limit_ms` passed first."""
        end_ms = self.now_ms + limit_ms
        while not condition():
            if self.now_ms >= end_ms:
                return False
            self.turn(end_ms)
        return True

    def run_to_the_end(self, limit_ms: int) -> None:
        """Run the loop that the Sender's thread runs after `close`."""
        self.selector.give_up_ms = self.now_ms + limit_ms
        self.producer.sender.run()

    def _wait(self, timeout_ms: int) -> None:
        """Run the Sender while the application's thread waits up to `timeout_ms`."""
        if self.before_wait is not None:
            self.before_wait()
        self.turn(self.now_ms + timeout_ms)


class ProductLog(logging.Handler):
    """Reads the package's log: an exception that was logged and swallowed violates a guarantee."""

    def __init__(self, timeline: Timeline | None) -> None:
        super().__init__(logging.DEBUG if timeline is not None else logging.ERROR)
        self.swallowed: list[str] = []
        self._timeline = timeline
        self._logger = logging.getLogger("spark_kafka_sink")

    def __enter__(self) -> ProductLog:
        self._was = (self._logger.level, self._logger.propagate)
        self._logger.setLevel(self.level)
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._was
        self._logger.setLevel(level)  # not by assignment, because child loggers cache their level

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            trace = logging.Formatter().formatException(record.exc_info)
            self.swallowed.append(f"{record.getMessage()}\n{trace}")
        if self._timeline is not None:
            self._timeline.note("        %s: %s", record.name.rpartition(".")[2], record.getMessage())
