"""The parts of a run that a seed decides first: the producer's settings, the cluster, and the share of faults."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from support.scripted_broker.versions import KAFKA_2_1, KAFKA_3_0, KAFKA_4_1, VersionRanges


@dataclass(frozen=True, slots=True)
class Plan:
    """`roughness`: share of the driver's actions that are faults.

    `is_hostile`: response bytes are changed, so that brokers may seem to say anything. Then only time, the number of
    outcomes and memory are checked.
    """

    settings: Mapping[str, object]
    node_count: int
    partitions: tuple[int, ...]
    max_message_bytes: int
    versions: VersionRanges
    has_leader_hints: bool
    latency_ms: tuple[int, ...]
    actions: int
    roughness: float
    is_hostile: bool
    ending: str

    @property
    def is_idempotent(self) -> bool:
        return bool(self.settings["enable.idempotence"])

    @property
    def acks(self) -> str:
        return str(self.settings["acks"])

    @property
    def in_flight(self) -> int:
        return int(str(self.settings["max.in.flight.requests.per.connection"]))

    @property
    def delivery_timeout_ms(self) -> int:
        return int(str(self.settings["delivery.timeout.ms"]))

    @property
    def max_block_ms(self) -> int:
        return int(str(self.settings["max.block.ms"]))


def draw_plan(rng: random.Random) -> Plan:
    roughness = rng.choice((0.0, 0.15, 0.25, 0.35, 0.45))
    return Plan(
        settings=_settings(rng),
        node_count=rng.choice((1, 2, 3, 3)),
        partitions=rng.choice(((1,), (3,), (2, 1), (3, 2))),
        max_message_bytes=rng.choice((1_048_588, 1_048_588, 400, 900)),
        versions=rng.choice((KAFKA_4_1, KAFKA_4_1, KAFKA_3_0, KAFKA_2_1)),
        has_leader_hints=rng.random() < 0.7,
        latency_ms=rng.choice(((0,), (1,), (1, 1, 2, 5), (5, 20), (1, 3, 20, 60))),
        actions=rng.randrange(20, 65),
        roughness=roughness,
        is_hostile=roughness > 0 and rng.random() < 0.1,
        ending=rng.choice(("heal",) * 7 + ("close", "force close", "close in a send")),
    )


def _settings(rng: random.Random) -> dict[str, object]:
    linger_ms = rng.choice((0, 0, 5, 50))
    request_timeout_ms = rng.choice((300, 1_000, 5_000, 30_000))
    is_idempotent = rng.random() < 0.75
    settings: dict[str, object] = {
        "acks": "all" if is_idempotent else rng.choice(("all", "1", "0")),
        "enable.idempotence": is_idempotent,
        "max.in.flight.requests.per.connection": rng.choice((1, 2, 5, 5) if is_idempotent else (1, 1, 5)),
        "linger.ms": linger_ms,
        "request.timeout.ms": request_timeout_ms,
        "delivery.timeout.ms": linger_ms + request_timeout_ms + rng.choice((0, 700, 5_000, 30_000)),
        "batch.size": rng.choice((1, 100, 300, 1_000, 16_384)),
        "buffer.memory": rng.choice((3_000, 12_000, 33_554_432)),
        "max.request.size": rng.choice((1_200, 1_048_576, 1_048_576)),
        "max.block.ms": rng.choice((400, 10_000)),
        "compression.type": rng.choice(("none", "none", "none", "gzip", "snappy", "lz4", "zstd")),
        "retry.backoff.ms": rng.choice((10, 100)),
        "reconnect.backoff.ms": rng.choice((10, 50)),
        "metadata.max.age.ms": rng.choice((5_000, 300_000)),
        "socket.connection.setup.timeout.ms": rng.choice((200, 5_000)),
        "socket.connection.setup.timeout.max.ms": 10_000,
        "partitioner.availability.timeout.ms": rng.choice((0, 0, 100)),
        "partitioner.ignore.keys": rng.random() < 0.1,
        "metadata.recovery.strategy": rng.choice(("rebootstrap", "none")),
        "metadata.recovery.rebootstrap.trigger.ms": rng.choice((2_000, 300_000)),
    }
    if rng.random() < 0.15:
        settings["retries"] = rng.choice((1, 2, 4))
    return settings
