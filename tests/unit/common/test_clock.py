"""The machine's own clock, as far as it takes what the settings allow."""

from __future__ import annotations

import threading

from spark_kafka_sink.common.clock import SystemClock
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
