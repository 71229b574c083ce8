"""Rows 12 to 17: a broker sends wrong responses over real sockets."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from kio.schema.errors import ErrorCode
from support.lateness import Stopwatch
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.versions import KAFKA_2_1, KAFKA_3_0, KAFKA_4_1
from support.scripted_stage import Start, outcome_by

from spark_kafka_sink.common.errors import KafkaError, TopicAuthorizationError
from spark_kafka_sink.protocol.versions import ApiKey

pytestmark = pytest.mark.quick

MEGABYTE = 1024 * 1024


@pytest.mark.parametrize("api_key", [ApiKey.PRODUCE, ApiKey.METADATA])
@pytest.mark.parametrize("shift", [1, -1, 2**30])
def test_row_12_wrong_correlation_id(scripted: Start, seed: int, api_key: int, shift: int) -> None:
    stage = scripted()
    producer = stage.producer()
    stage.deliver(producer) if api_key == ApiKey.PRODUCE else None
    stage.on(api_key, faults.wrong_correlation_id(shift), times=3)
    stage.deliver(producer, 10)
    stage.check()


def test_row_12_swapped_correlation_ids(scripted: Start, seed: int) -> None:
    """The first request fails and the second succeeds, and each response has the other's correlation id."""
    stage = scripted()
    producer = stage.producer()
    for partition in (0, 1):
        stage.deliver(producer, 1, partition)
    swapped = (faults.wrong_correlation_id(1), faults.wrong_correlation_id(-1))
    refuse = faults.fail_with(TopicAuthorizationError)

    def first(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        values = refuse(cluster, exchange, proceed).values
        return swapped[0](cluster, exchange, lambda: Answer(values, delay_ms=50))

    stage.on(ApiKey.PRODUCE, first)
    stage.on(ApiKey.PRODUCE, swapped[1])
    stage.send(producer, 1, 0)
    stage.send(producer, 1, 1)
    producer.flush(20)
    assert [str(error) for error in stage.ledger.errors] == []
    stage.check()


@pytest.mark.parametrize("length", [-1, 0, 3, 2**31 - 1, 101 * MEGABYTE], ids=str)
@pytest.mark.parametrize("api_key", [ApiKey.PRODUCE, ApiKey.METADATA, ApiKey.API_VERSIONS])
def test_row_13_length_of_a_frame(scripted: Start, seed: int, api_key: int, length: int) -> None:
    stage = scripted()
    stage.on(api_key, faults.frame_length(length), times=2)
    before = psutil.Process().memory_info().rss
    producer = stage.producer()
    stage.deliver(producer, 10)
    grown = psutil.Process().memory_info().rss - before
    stage.note(f"{grown / MEGABYTE:.1f} MiB more memory")
    assert grown < 50 * MEGABYTE
    stage.check()


def flipped(rng: random.Random) -> faults.Hook:
    """A response with a few changed bytes; its length and correlation id are right."""

    def flip(frame: bytes) -> bytes:
        spoiled = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            spoiled[rng.randrange(8, len(frame))] ^= 1 << rng.randrange(8)
        return bytes(spoiled)

    return faults.corrupt(flip)


def huge_counts(rng: random.Random) -> faults.Hook:
    """Five consecutive bytes mean 2^31 - 1 or more: a huge allocation wherever a count or a length stands."""

    def bomb(frame: bytes) -> bytes:
        at = rng.randrange(8, len(frame))
        return frame[:at] + b"\xff\xff\xff\xff\x07" + frame[at + 5 :] + b"\0" * max(0, at + 5 - len(frame))

    def whole(frame: bytes) -> bytes:
        spoiled = bomb(frame)[: len(frame)]
        return struct.pack(">i", len(spoiled) - 4) + spoiled[4:]

    return faults.corrupt(whole)


def cut_short(rng: random.Random) -> faults.Hook:
    return faults.corrupt(
        lambda frame: (lambda left: struct.pack(">i", left - 4) + frame[4:left])(rng.randrange(8, len(frame)))
    )


def without_partition(rng: random.Random) -> faults.Hook:
    return faults.change(lambda values: values | {"responses": ()})


def partition_twice(rng: random.Random) -> faults.Hook:
    def twice(values: dict[str, Any]) -> dict[str, Any]:
        topics = [dict(topic) for topic in values["responses"]]
        for topic in topics:
            topic["partition_responses"] = [*topic["partition_responses"], *topic["partition_responses"]]
        return values | {"responses": topics}

    return faults.change(twice)


def partition_of_another(rng: random.Random) -> faults.Hook:
    """The response also has a partition that was not in the request."""

    def more(values: dict[str, Any]) -> dict[str, Any]:
        extra = {
            "name": "u",
            "partition_responses": [
                {"index": 7, "error_code": ErrorCode.topic_authorization_failed, "base_offset": -1}
            ],
        }
        return values | {"responses": [extra, *values["responses"]]}

    return faults.change(more)


@pytest.mark.parametrize("spoil", [cut_short, without_partition, partition_twice, partition_of_another])
def test_row_14_invalid_responses(scripted: Start, seed: int, spoil: Callable[[random.Random], faults.Hook]) -> None:
    """The producer detects each one: it closes the connection and sends the batch again, or uses the rest of the
    response.
    """
    stage, rng = scripted(), random.Random(seed)
    producer = stage.producer()
    stage.deliver(producer)
    for _ in range(10):
        stage.on(ApiKey.PRODUCE, spoil(rng))
        stage.deliver(producer, 3)
    stage.check()


@pytest.mark.parametrize("spoil", [flipped, huge_counts], ids=["flipped", "huge_counts"])
@pytest.mark.parametrize("api_key", [ApiKey.PRODUCE, ApiKey.API_VERSIONS, ApiKey.INIT_PRODUCER_ID])
def test_row_14_corrupt_responses(
    scripted: Start, seed: int, api_key: int, spoil: Callable[[random.Random], faults.Hook]
) -> None:
    """The bytes may mean anything. Nothing crashes or hangs, each record has one outcome, and the next producer
    works.
    """
    rng = random.Random(seed)
    before = psutil.Process().memory_info().rss
    for _ in range(12):
        stage = scripted()
        producer = stage.producer(**{"delivery.timeout.ms": 1_500, "max.block.ms": 1_500})
        stage.on(api_key, spoil(rng), times=2)
        outcome_by(4, producer, stage.send(producer, 5))
        producer.close(0)
        assert psutil.Process().memory_info().rss - before < 80 * MEGABYTE
    healthy = scripted()
    healthy.deliver(healthy.producer(), 5)
    healthy.check()


def test_row_15_api_versions_only_version_0(scripted: Start, seed: int) -> None:
    stage = scripted(versions={**KAFKA_2_1, ApiKey.API_VERSIONS: (0, 0)})
    stage.deliver(stage.producer(), 5)
    assert 2 <= stage.requests(ApiKey.API_VERSIONS) + 1 <= 6
    stage.check()


@pytest.mark.parametrize(
    "error_code", [ErrorCode.unsupported_version, ErrorCode.invalid_request, ErrorCode.unknown_server_error]
)
def test_row_15_api_versions_always_refused(scripted: Start, seed: int, error_code: int) -> None:
    stage = scripted()
    stage.on(ApiKey.API_VERSIONS, faults.fail_with(error_code), times=None)
    producer = stage.producer(**{"max.block.ms": 1_500})
    with Stopwatch() as watch, pytest.raises(KafkaError) as caught:
        producer.send("t", b"v").result(5)
    asked = stage.requests(ApiKey.API_VERSIONS)
    stage.note(f"after {watch.took_s:.2f} s and {asked} requests: {caught.value}")
    assert watch.own_s <= 1.5 * 1.1
    assert asked < 100, "a storm"


def test_row_15_changing_api_versions(scripted: Start, seed: int) -> None:
    stage, rng = scripted(), random.Random(seed)
    producer = stage.producer()
    for _ in range(12):
        with stage.server.lock:
            stage.cluster.versions = rng.choice((KAFKA_2_1, KAFKA_3_0, KAFKA_4_1))
            stage.server.cut(0, reset=rng.random() < 0.5)
        stage.deliver(producer, 5)
    stage.check()


@pytest.mark.parametrize("is_named", [True, False], ids=["with_new_leader", "without"])
def test_row_16_not_leader(scripted: Start, seed: int, is_named: bool) -> None:
    stage = scripted(2)
    stage.cluster.has_leader_hints = is_named
    producer = stage.producer(**{"retry.backoff.ms": 1_000, "retry.backoff.max.ms": 1_000})
    stage.deliver(producer, 1, 0)
    stage.deliver(producer, 1, 1)  # connect to both
    with stage.server.lock:
        stage.cluster.move_leader("t", 0, 1)
        asked = len(stage.cluster.requests_of(ApiKey.METADATA))
    with Stopwatch() as watch:
        stage.deliver(producer, 1, 0)
    stage.note(f"{watch.took_s:.3f} s, {stage.requests(ApiKey.METADATA) - asked} metadata requests")
    assert watch.own_s < 0.6 if is_named else watch.took_s >= 0.75
    assert is_named or stage.requests(ApiKey.METADATA) > asked
    stage.check()


def test_row_17_older_leader_epoch(scripted: Start, seed: int) -> None:
    """A node with old metadata names the previous leader; the producer stays with the leader that it knows."""
    stage = scripted(2)
    producer = stage.producer(**{"metadata.max.age.ms": 100})
    stage.deliver(producer, 3, 0)
    with stage.server.lock:
        stage.cluster.move_leader("t", 0, 1)
    stage.deliver(producer, 3, 0)

    def lag(values: dict[str, Any]) -> dict[str, Any]:
        topics = [dict(topic) for topic in values["topics"]]
        for topic in topics:
            topic["partitions"] = [
                dict(each) | {"leader_id": 0, "leader_epoch": 0} if each["partition_index"] == 0 else each
                for each in topic["partitions"]
            ]
        return values | {"topics": topics}

    lagging = stage.on(ApiKey.METADATA, faults.change(lag), times=None)
    seen = lagging.used
    deadline = time.monotonic() + 10
    while lagging.used < seen + 5:
        assert time.monotonic() < deadline
        stage.deliver(producer, 1, 0)
        time.sleep(0.02)
    with stage.server.lock:
        late = [each for each in stage.cluster.requests_of(ApiKey.PRODUCE)[-3:] if each.node_id == 0]
    assert late == []
    stage.check()
