from __future__ import annotations

import random

import pytest

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.options import _edits, nearest
from spark_kafka_sink.sink.options import _OPTIONS

KNOWN = [*_OPTIONS, *sorted(ProducerConfig.keys())]
LETTERS = "abcdefghijklmnopqrstuvwxyz."


@pytest.mark.parametrize(
    "given",
    [
        "auto.offset.reset",
        "basic.auth.credentials.source",
        "brokers",
        "checkpointlocation",
        "client.rack",
        "enable.auto.commit",
        "failondataloss",
        "fetch.min.bytes",
        "group.id",
        "isolation.level",
        "key.deserializer",
        "max.message.bytes",
        "max.poll.records",
        "mode",
        "schema.registry.basic.auth.user.info",
        "schema.registry.url",
        "session.timeout.ms",
        "startingoffsets",
        "subscribe",
        "truncate",
    ],
)
def test_unrelated_name_has_no_near_name(given: str) -> None:
    assert nearest(given, KNOWN) is None


def misspelt(name: str, letters: int, rng: random.Random) -> str:
    for _ in range(letters):
        at = rng.randrange(len(name))
        before, after = name[:at], name[at + 1 :]
        letter = rng.choice(LETTERS)
        name = rng.choice([before + after, before + letter + name[at:], before + letter + after])
    return name


@pytest.mark.parametrize("letters", [1, 2])
@pytest.mark.parametrize("name", KNOWN)
def test_name_with_one_or_two_wrong_letters_is_found(name: str, letters: int) -> None:
    rng = random.Random(f"{name} {letters}")
    for _ in range(4):
        given = misspelt(name, letters, rng)
        found = nearest(given, KNOWN)
        assert found is not None
        assert found == name or _edits(given, found) <= _edits(given, name), given


@pytest.mark.parametrize(("given", "meant"), [("akcs", "acks"), ("tpoic", "topic"), ("lnigre.ms", "linger.ms")])
def test_name_with_swapped_neighbours_is_found(given: str, meant: str) -> None:
    assert nearest(given, KNOWN) == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [("linger", "linger.ms"), ("compression", "compression.type"), ("compression.codec", "compression.type")],
)
def test_name_that_is_mostly_right_is_found(given: str, meant: str) -> None:
    assert nearest(given, KNOWN) == meant
