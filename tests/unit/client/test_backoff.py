from __future__ import annotations

import random

from spark_kafka_sink.client.backoff import ExponentialBackoff


def test_doubles_with_each_attempt_up_to_the_maximum() -> None:
    backoff = ExponentialBackoff(100, 2, 1_000, 0.0, random.Random(1))
    assert [backoff.backoff_ms(attempts) for attempts in range(6)] == [100, 200, 400, 800, 1_000, 1_000]


def test_jitter_spreads_by_its_share_and_never_beyond_the_maximum() -> None:
    backoff = ExponentialBackoff(100, 2, 1_000, 0.2, random.Random(1))
    first = {backoff.backoff_ms(0) for _ in range(500)}
    assert min(first) in range(80, 85)
    assert max(first) in range(115, 121)
    late = {backoff.backoff_ms(50) for _ in range(500)}
    assert min(late) in range(800, 810)
    assert max(late) == 1_000


def test_maximum_below_the_initial_wait_is_constant() -> None:
    backoff = ExponentialBackoff(500, 2, 300, 0.2, random.Random(1))
    assert {backoff.backoff_ms(attempts) for attempts in range(20)} == {300}


def test_start_of_zero_never_waits() -> None:
    backoff = ExponentialBackoff(0, 2, 1_000, 0.2, random.Random(1))
    assert {backoff.backoff_ms(attempts) for attempts in (0, 1, 10**9)} == {0}
