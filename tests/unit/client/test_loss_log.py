"""Which lost connections are logged, and how often."""

from __future__ import annotations

import logging

import pytest

from spark_kafka_sink.client.loss_log import PAUSE_MS, LossLog

log = logging.getLogger("losses")


def shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def losses(caplog: pytest.LogCaptureFixture) -> LossLog:
    caplog.set_level(logging.DEBUG)
    return LossLog(log)


def test_same_cause_is_logged_again_after_a_minute(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    for now_ms in range(0, PAUSE_MS + 1, PAUSE_MS // 10):
        losses.tell(logging.ERROR, "1", f"answer {now_ms} is not the response", now_ms)
    assert shown(caplog) == [
        "answer 0 is not the response",
        "answer 60000 is not the response (9 more of this node since the last such line)",
    ]
    assert len(caplog.records) == 11  # those between are there at DEBUG


def test_other_cause_and_other_node_are_logged_at_once(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    for node_id, text in (("1", "a"), ("1", "b"), ("2", "a"), ("1", "a")):
        losses.tell(logging.WARNING, node_id, text, 0)
    assert shown(caplog) == ["a", "b", "a"]


def test_server_that_makes_up_causes_fills_no_log(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(500):
        losses.tell(logging.ERROR, "1", "x" * number, 0)
    assert len(shown(caplog)) == 8


def test_lines_below_a_warning_are_left_as_they_are(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        losses.tell(logging.INFO, "1", "closed", 0)
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 3
