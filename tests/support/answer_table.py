"""Rows 12 to 17, 23, 27 and 28 of the fault matrix: a broker sends a wrong or an old response, or refuses a batch for a
while. The producer delivers every record, once and in order.

One table for two stages: a producer in one thread on a fake clock (tests/unit/producer/test_answer_table.py), and one
over real sockets (tests/faults/test_answers.py).
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from kio.schema.errors import ErrorCode
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.versions import KAFKA_2_1, KAFKA_4_1, VersionRanges

from spark_kafka_sink.common.errors import CorruptMessageError, NotEnoughReplicasError, TopicAuthorizationError
from spark_kafka_sink.protocol.versions import ApiKey

MEGABYTE = 1024 * 1024
ONE_EACH = {"batch.size": 1}
SLOW_RETRY = {"retry.backoff.ms": 1_000, "retry.backoff.max.ms": 1_000}


class Watch(Protocol):
    """`own_s`: how long a block took, without the lateness of the machine."""

    own_s: float


class Stage(Protocol):
    """A producer and the scripted cluster that it writes to: one topic with two partitions. With two nodes, each leads
    one partition.
    """

    topic: str

    def send(self, number: int = 1, partition: int = 0) -> None:
        """Send that many records."""
        ...

    def deliver(self, number: int = 1, partition: int = 0) -> list[int]:
        """Send that many records, check that all so far are acknowledged, and return the offsets of the new ones."""
        ...

    def wait(self, duration_ms: int) -> None: ...

    def watch(self) -> AbstractContextManager[Watch]: ...

    def on(self, api_key: int, hook: faults.Hook, times: int | None = 1) -> faults.Script:
        """As `ScriptedCluster.on`."""
        ...

    def requests(self, api_key: int) -> int:
        """Return how many requests of this kind the cluster has received."""
        ...

    def cluster(self) -> AbstractContextManager[ScriptedCluster]:
        """Return the cluster, which answers no request inside the block."""
        ...


@dataclass(frozen=True)
class Case:
    """A row of the fault matrix, a name, and the fault between the first record and the last."""

    row: int
    name: str
    run: Callable[[Stage, random.Random], None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: VersionRanges = field(default_factory=lambda: KAFKA_4_1)
    nodes: int = 1

    def __str__(self) -> str:
        return f"row_{self.row}-{self.name}"


# ---- responses -------------------------------------------------------------------------------------------------------


def cut_short(rng: random.Random) -> faults.Hook:
    """Cut the response at any place; its length is right."""

    def cut(frame: bytes) -> bytes:
        left = rng.randrange(8, len(frame))
        return struct.pack(">i", left - 4) + frame[4:left]

    return faults.corrupt(cut)


def without_partition(rng: random.Random) -> faults.Hook:
    return faults.change(lambda values: values | {"responses": ()})


def partition_twice(rng: random.Random) -> faults.Hook:
    def twice(values: dict[str, Any]) -> dict[str, Any]:
        topics = [
            {**topic, "partition_responses": [*topic["partition_responses"]] * 2} for topic in values["responses"]
        ]
        return values | {"responses": topics}

    return faults.change(twice)


def partition_of_another(rng: random.Random) -> faults.Hook:
    """Add a partition that was not in the request."""
    refused = {"index": 7, "error_code": ErrorCode.topic_authorization_failed, "base_offset": -1}
    extra = {"name": "u", "partition_responses": [refused]}
    return faults.change(lambda values: values | {"responses": [extra, *values["responses"]]})


# ---- faults --------------------------------------------------------------------------------------------------------


def wrong_correlation_id(stage: Stage, rng: random.Random, api_key: int, shift: int) -> None:
    if api_key == ApiKey.PRODUCE:
        stage.deliver()
    stage.on(api_key, faults.wrong_correlation_id(shift), times=3)
    stage.deliver(10)


def swapped_correlation_ids(stage: Stage, rng: random.Random) -> None:
    """The first request fails and the second succeeds, and each response has the other's correlation id."""
    for partition in (0, 1):
        stage.deliver(1, partition)
    refuse = faults.fail_with(TopicAuthorizationError)

    def first(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        values = refuse(cluster, exchange, proceed).values
        return faults.wrong_correlation_id(1)(cluster, exchange, lambda: Answer(values, delay_ms=50))

    stage.on(ApiKey.PRODUCE, first)
    stage.on(ApiKey.PRODUCE, faults.wrong_correlation_id(-1))
    stage.send(1, 0)
    stage.deliver(1, 1)


def frame_length(stage: Stage, rng: random.Random, api_key: int, length: int) -> None:
    stage.on(api_key, faults.frame_length(length), times=2)
    stage.deliver(10)


def invalid_responses(stage: Stage, rng: random.Random, spoil: Callable[[random.Random], faults.Hook]) -> None:
    """The producer closes the connection and sends the batch again, or uses the rest of the response."""
    stage.deliver()
    for _ in range(10):
        stage.on(ApiKey.PRODUCE, spoil(rng))
        stage.deliver(3)


def api_versions_of_old_broker(stage: Stage, rng: random.Random) -> None:
    stage.deliver(5)
    assert 1 <= stage.requests(ApiKey.API_VERSIONS) <= 5


def leader_moved(stage: Stage, rng: random.Random, is_named: bool) -> None:
    """The refusal names the new leader (KIP-951), which gets the batch at once; or the producer asks for metadata
    first.
    """
    for partition in (0, 1):
        stage.deliver(1, partition)
    with stage.cluster() as cluster:
        cluster.has_leader_hints = is_named
        for leader in (1, 0, 1):  # the epoch is not the leader's id
            cluster.move_leader(stage.topic, 0, leader)
        cluster.requests.clear()
    with stage.watch() as watch:
        stage.deliver()
    with stage.cluster() as cluster:
        asked = [(each.api_key, each.node_id) for each in cluster.requests]
    first, last = asked.index((ApiKey.PRODUCE, 0)), asked.index((ApiKey.PRODUCE, 1))
    assert first < last
    if is_named:
        assert len([api_key for api_key, _ in asked if api_key == ApiKey.PRODUCE]) == 2
        assert watch.own_s < 0.6, "less than the backoff"
    else:
        assert ApiKey.METADATA in [api_key for api_key, _ in asked[first:last]]


def older_leader_epoch(stage: Stage, rng: random.Random) -> None:
    """A node with old metadata names the previous leader four times. The producer stays with the leader that it knows;
    it would believe the fifth answer in a row.
    """
    stage.deliver(3)
    with stage.cluster() as cluster:
        cluster.move_leader(stage.topic, 0, 1)
    stage.deliver(3)

    def lag(values: dict[str, Any]) -> dict[str, Any]:
        for topic in values["topics"]:
            topic["partitions"] = [
                {**each, "leader_id": 0, "leader_epoch": 0} if each["partition_index"] == 0 else each
                for each in topic["partitions"]
            ]
        return values

    with stage.cluster() as cluster:
        cluster.requests.clear()
    lagging = stage.on(ApiKey.METADATA, faults.change(lag), times=4)
    for _ in range(500):
        stage.deliver()
        stage.wait(20)
        if lagging.used >= 4:
            break
    assert lagging.used >= 4
    with stage.cluster() as cluster:
        assert {each.node_id for each in cluster.requests_of(ApiKey.PRODUCE)} == {1}


def duplicate_sequence(stage: Stage, rng: random.Random) -> None:
    """The batch is in the log, and the leader no longer knows where: the offset is -1."""

    def unknown_offset(values: dict[str, Any]) -> dict[str, Any]:
        duplicate = {"error_code": ErrorCode.duplicate_sequence_number, "base_offset": -1}
        topics = [
            {**topic, "partition_responses": [{**each, **duplicate} for each in topic["partition_responses"]]}
            for topic in values["responses"]
        ]
        return values | {"responses": topics}

    stage.deliver()
    stage.on(ApiKey.PRODUCE, faults.change(unknown_offset))
    assert stage.deliver() == [-1]


def corrupt_message_once(stage: Stage, rng: random.Random) -> None:
    stage.deliver()
    sent = stage.requests(ApiKey.PRODUCE)
    stage.on(ApiKey.PRODUCE, faults.fail_with(CorruptMessageError))
    stage.deliver()
    assert stage.requests(ApiKey.PRODUCE) - sent == 2


def out_of_order_behind_the_head(stage: Stage, rng: random.Random) -> None:
    """The leader refuses the first of five batches once; the later ones are out of order until it succeeds."""
    stage.deliver()
    stage.on(ApiKey.PRODUCE, faults.fail_with(NotEnoughReplicasError))
    stage.deliver(5)
    assert epochs(stage) == {0}


def out_of_order_at_the_head(stage: Stage, rng: random.Random, error_code: int) -> None:
    """The producer takes a new epoch and new sequences."""
    stage.deliver(3)
    stage.on(ApiKey.PRODUCE, faults.fail_with(error_code))
    stage.deliver(1)
    stage.deliver(3)
    assert len(epochs(stage)) == 2 or error_code == ErrorCode.unknown_producer_id, epochs(stage)


def epochs(stage: Stage) -> set[int]:
    with stage.cluster() as cluster:
        return {batch.header.producer_epoch for batch in cluster.log(stage.topic, 0).batches}


CASES = (
    *(
        Case(12, f"{api_key.name}, {shift:+}", partial(wrong_correlation_id, api_key=api_key, shift=shift))
        for api_key in (ApiKey.PRODUCE, ApiKey.METADATA)
        for shift in (1, -1, 2**30)
    ),
    Case(12, "swapped", swapped_correlation_ids),
    *(
        Case(13, f"{api_key.name}, {length}", partial(frame_length, api_key=api_key, length=length))
        for api_key in (ApiKey.PRODUCE, ApiKey.METADATA, ApiKey.API_VERSIONS)
        for length in (-1, 0, 3, 2**31 - 1, 101 * MEGABYTE)
    ),
    *(
        Case(14, spoil.__name__, partial(invalid_responses, spoil=spoil))
        for spoil in (cut_short, without_partition, partition_twice, partition_of_another)
    ),
    Case(15, "ApiVersions 0", api_versions_of_old_broker, versions={**KAFKA_2_1, ApiKey.API_VERSIONS: (0, 0)}),
    *(
        Case(16, name, partial(leader_moved, is_named=is_named), SLOW_RETRY, nodes=2)
        for name, is_named in (("new leader named", True), ("not named", False))
    ),
    Case(17, "older leader epoch", older_leader_epoch, {"metadata.max.age.ms": 100}, nodes=2),
    Case(23, "once", corrupt_message_once),
    Case(27, "behind the head", out_of_order_behind_the_head, ONE_EACH),
    *(
        Case(27, error_code.name, partial(out_of_order_at_the_head, error_code=error_code), ONE_EACH)
        for error_code in (ErrorCode.out_of_order_sequence_number, ErrorCode.unknown_producer_id)
    ),
    Case(28, "duplicate sequence", duplicate_sequence),
)
