"""Steps on a thread beside the loop."""

from __future__ import annotations

import threading

import pytest

from spark_kafka_sink.common.errors import RetriableError
from spark_kafka_sink.network.sasl.aside import run_aside


def test_a_step_gives_what_it_gave_and_says_so() -> None:
    done = threading.Event()
    step = run_aside(threading.current_thread, done.set)
    assert done.wait(10)
    assert step.is_done
    assert step.result().name == "spark-kafka-sink-sasl"
    assert step.result().daemon, "a provider that hangs would keep its process from ending"


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_step_raises_what_it_raised(kind: type[BaseException]) -> None:
    done = threading.Event()

    def fail() -> None:
        raise kind("no")

    step = run_aside(fail, done.set)
    assert done.wait(10)
    with pytest.raises(kind, match="no"):
        step.result()


def test_a_step_without_a_thread_fails_its_login_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: at a limit of threads the RuntimeError was the whole turn's, and other nodes' answers were lost with it."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RetriableError, match="No thread for a slow step of the login: can't start new thread"):
        run_aside(lambda: None, lambda: None)


def test_nobody_waits_for_a_step() -> None:
    release, done = threading.Event(), threading.Event()
    step = run_aside(lambda: release.wait(10), done.set)
    assert not step.is_done
    release.set()
    assert done.wait(10)
    assert step.is_done
