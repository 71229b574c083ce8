"""The system clock takes every time that a setting allows."""

from __future__ import annotations

import math
import threading

import pytest

from spark_kafka_sink.common.clock import SystemClock, lock_timeout
from spark_kafka_sink.common.options import LONG_MAX


def test_wait_may_be_as_long_as_any_setting() -> None:
    condition, is_done = threading.Condition(), False

    def end() -> None:
        nonlocal is_done
        with condition:
            is_done = True
            condition.notify_all()

    with condition:
        other = threading.Thread(target=end)
        other.start()
        while not is_done:
            SystemClock().wait(condition, LONG_MAX)
    other.join(10)


@pytest.mark.parametrize("limit_s", [None, -1.0, 0, 2.5, 1e12, math.inf])
def test_lock_takes_every_limit(limit_s: float | None) -> None:
    """Bug: flush, close and result raised OverflowError for a limit of many years."""
    assert threading.Lock().acquire(timeout=lock_timeout(limit_s))
    assert lock_timeout(-1.0) == 0
    assert lock_timeout(2.5) == 2.5
