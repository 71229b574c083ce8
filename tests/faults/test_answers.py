"""Rows 12 to 17, 28, and of 23 and 27 what `answer_table` has: a broker sends wrong responses over real sockets."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import psutil
import pytest
from kio.schema.errors import ErrorCode
from support.answer_table import CASES, MEGABYTE, Case
from support.lateness import Stopwatch
from support.scripted_broker import faults
from support.scripted_broker.versions import KAFKA_2_1, KAFKA_3_0, KAFKA_4_1
from support.scripted_stage import Start, TableStage, outcome_by

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.protocol.versions import ApiKey

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("case", CASES, ids=str)
def test_records_arrive_once_after_a_wrong_response(scripted: Start, seed: int, case: Case) -> None:
    stage = scripted(case.nodes, versions=case.versions)
    before = psutil.Process().memory_info().rss
    case.run(TableStage(stage, case.settings), random.Random(seed))
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
