"""Which connections have been idle too long."""

from __future__ import annotations

from spark_kafka_sink.network.selector import IdleConnections


def test_least_recently_used_connection_expires_first() -> None:
    idle = IdleConnections(100)
    for connection_id, now_ms in (("a", 0), ("b", 10), ("a", 20)):
        idle.touch(connection_id, now_ms)
    assert idle.expired(109) == []
    assert idle.expired(110) == [("b", 100)]
    assert idle.expired(200) == [("b", 190), ("a", 180)]


def test_time_to_expiry_is_between_zero_and_the_timeout() -> None:
    idle = IdleConnections(100)
    assert idle.time_to_next(0, at_most_ms=5000) == 5000
    idle.touch("a", 0)
    assert idle.time_to_next(30, at_most_ms=5000) == 70
    assert idle.time_to_next(30, at_most_ms=7) == 7
    assert idle.time_to_next(400, at_most_ms=7) == 0


def test_forgotten_connection_does_not_expire() -> None:
    idle = IdleConnections(100)
    idle.touch("a", 0)
    idle.forget("a")
    idle.forget("never there")
    assert idle.expired(1000) == []
    assert idle.time_to_next(1000, at_most_ms=9) == 9


def test_below_zero_nothing_expires() -> None:
    idle = IdleConnections(-1)
    idle.touch("a", 0)
    assert idle.expired(10**12) == []
    assert idle.time_to_next(10**12, at_most_ms=77) == 77
