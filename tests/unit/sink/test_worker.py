"""The sink's effects on Spark's Python worker. Real sockets show whether the system delays acknowledgements, not by how
much.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import socket
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from spark_kafka_sink.network import acknowledgements
from spark_kafka_sink.sink import worker as worker_module
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.worker import LoadedModules, acknowledge_now, show_reports

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux delays acknowledgements by 40 ms")


@contextmanager
def pair(family: socket.AddressFamily, address: str) -> Iterator[socket.socket]:
    """A worker's end of a connection that has answered once: from then on its system delays acknowledgements."""
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as spark,
    ):
        worker, _ = server.accept()
        with worker:
            for _ in range(5):  # some Linux versions need one answer, some three
                spark.sendall(b"a task")
                assert worker.recv(100) == b"a task"
                worker.sendall(b"an answer")
                assert spark.recv(100) == b"an answer"
            yield worker


@pytest.fixture
def worker() -> Iterator[socket.socket]:
    with pair(socket.AF_INET, "127.0.0.1") as worker:
        yield worker


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def puts_off(worker: socket.socket) -> bool:
    return worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 0


def open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").exists()}


@on_linux
def test_received_data_is_acknowledged_at_once(worker: socket.socket) -> None:
    assert puts_off(worker)

    assert acknowledge_now() >= 2  # both ends of the connection are in this process

    assert not puts_off(worker)


@on_linux
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6_data_is_acknowledged_at_once() -> None:
    with pair(socket.AF_INET6, "::1") as worker:
        assert puts_off(worker)

        acknowledge_now()

        assert not puts_off(worker)


@on_linux
def test_delivery_acknowledges_received_data(worker: socket.socket) -> None:
    config = SinkConfig.from_options({"kafka.bootstrap.servers": "localhost:9", "topic": "t"})

    TaskDelivery(config, cast(ProducerPool, None))

    assert not puts_off(worker)


@on_linux
def test_descriptors_of_other_owners_do_not_change(worker: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(type=socket.SOCK_DGRAM), socket.socket():  # of kinds that Spark does not use
        before = open_descriptors()

        acknowledge_now()

        assert open_descriptors() == before
        ours.sendall(b"x")
        assert theirs.recv(10) == b"x"
    worker.sendall(b"still open")
    assert os.get_blocking(worker.fileno())


@on_linux
def test_descriptor_that_is_not_a_socket_is_ignored(
    worker: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(worker_module, "_sockets", lambda: iter([10_000, file.fileno(), worker.fileno()]))
        before = open_descriptors()

        assert acknowledge_now() == 1

        assert open_descriptors() == before


@on_linux
def test_default_timeout_is_not_set_on_sparks_connection(
    worker: socket.socket,
) -> None:
    socket.setdefaulttimeout(30)
    try:
        assert acknowledge_now() == 0
    finally:
        socket.setdefaulttimeout(None)

    assert os.get_blocking(worker.fileno())


@on_linux
def test_system_without_quickack_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acknowledgements, "_QUICKACK", None)

    assert acknowledge_now() == 0


@on_linux
def test_process_without_proc_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker_module, "_DESCRIPTORS", tmp_path / "nothing")

    assert acknowledge_now() == 0


class _Knot:
    def __init__(self) -> None:
        self.itself = self


def _freeze_in_child(answers: multiprocessing.SimpleQueue[tuple[list[bool], bool]]) -> None:
    loaded, is_frozen = LoadedModules(), []
    knot = weakref.ref(_Knot())
    for modules in (500, 599, 600, 650):
        gc.unfreeze()
        loaded.freeze(modules)
        is_frozen.append(gc.get_freeze_count() > 10_000)
    answers.put((is_frozen, knot() is None))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_later_imports_are_frozen_and_garbage_collected() -> None:
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_freeze_in_child, args=(answers,))
    child.start()
    assert answers.get() == ([True, False, True, False], True)
    child.join()


@pytest.fixture
def bare_logging(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The package's logger as in Spark's Python worker, where no logging is configured."""
    package = logging.Logger("spark_kafka_sink")
    monkeypatch.setattr(worker_module, "_package_log", package)
    return package


def test_reports_go_to_stderr_without_a_handler(
    bare_logging: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    show_reports()
    show_reports()
    bare_logging.info("Batch %d", 3)
    assert capsys.readouterr().err.endswith(" INFO kafka_sink: Batch 3\n")
    assert len(bare_logging.handlers) == 1


def test_level_and_handler_of_the_application_are_kept(bare_logging: logging.Logger) -> None:
    chosen = logging.NullHandler()
    bare_logging.addHandler(chosen)
    bare_logging.setLevel(logging.ERROR)
    show_reports()
    assert (bare_logging.handlers, bare_logging.level) == ([chosen], logging.ERROR)
