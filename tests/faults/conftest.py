"""Shared clusters, repaired after each row; the seeds; the evidence that a failing row keeps; and a check that no row
leaves anything else.

FAULT_SEEDS=20 sets the number of seeds for the rows that take several (1 by default), FAULT_SEED=123 the first one.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.producer.conftest import fresh_name, make_topic, new_name
from support.fault_stage import FaultStage, Timeline
from support.lateness import Stopwatch
from support.leftovers import Leftovers
from support.scripted_stage import scripted
from support.threaded_producer import producer_threads

from spark_kafka_sink.local import Admin
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

__all__ = ["fresh_name", "make_topic", "new_name", "scripted"]

_ROWS_WITH_SEEDS = {*range(1, 10), *range(36, 43), 55}
_ROW = re.compile(r"test_row_(\d\d)_")
_EVIDENCE = pytest.StashKey[Callable[[], Path]]()
_CLOSE_S = 5.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" not in metafunc.fixturenames:
        return
    row = _ROW.match(metafunc.function.__name__)
    number = int(os.environ.get("FAULT_SEEDS", "1")) if row and int(row[1]) in _ROWS_WITH_SEEDS else 1
    first = int(os.environ.get("FAULT_SEED", "0"))
    metafunc.parametrize("seed", range(first, first + number))


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a new temporary folder, so that all files in it come from these tests."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    yield
    tempfile.tempdir = before[0]
    if before[1] is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before[1]


@pytest.fixture(scope="session")
def running_three(own_temporary_folder: None) -> Iterator[FaultStage]:
    with FaultStage(3) as stage:
        yield stage


@pytest.fixture(scope="session")
def running_one(own_temporary_folder: None) -> Iterator[FaultStage]:
    with FaultStage(1) as stage:
        yield stage


@pytest.fixture(scope="session")
def running_old(own_temporary_folder: None) -> Iterator[FaultStage]:
    """A node of the first version of the transaction protocol."""
    with FaultStage(1, features={"transaction.version": 1}) as stage:
        yield stage


@pytest.fixture(scope="session")
def broker(running_one: FaultStage) -> Admin:
    """The broker under the name that the reused tests expect."""
    return Admin(running_one.direct)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a row leaves no descriptor, thread, process or temporary file."""
    for name in (
        "running_three",
        "running_one",
        "running_old",
        "secured_broker",
        "spark",
    ):  # before anything else, if the row uses it
        if name in request.fixturenames:
            request.getfixturevalue(name)
    if "spark" in request.fixturenames:  # its daemon and workers remain
        request.getfixturevalue("spark").range(2).foreachPartition(lambda rows: None)
    before = Leftovers()
    yield
    left = before.found()
    assert not left, "\n".join(left)


@pytest.fixture
def timeline(request: pytest.FixtureRequest, nothing_left: None) -> Timeline:
    made = Timeline()
    if "seed" in request.fixturenames:
        print()
        made.note(f"seed {request.getfixturevalue('seed')}: FAULT_SEED={request.getfixturevalue('seed')} replays it")
    return made


@pytest.fixture
def three_nodes(
    request: pytest.FixtureRequest, running_three: FaultStage, timeline: Timeline, tmp_path: Path
) -> Iterator[FaultStage]:
    """The cluster of three nodes; all faults are undone afterwards."""
    yield from _on(running_three, request, timeline, tmp_path)


@pytest.fixture
def one_node(
    request: pytest.FixtureRequest, running_one: FaultStage, timeline: Timeline, tmp_path: Path
) -> Iterator[FaultStage]:
    """The cluster of one node; all faults are undone afterwards."""
    yield from _on(running_one, request, timeline, tmp_path)


@pytest.fixture
def one_node_of_old(
    request: pytest.FixtureRequest, running_old: FaultStage, timeline: Timeline, tmp_path: Path
) -> Iterator[FaultStage]:
    """Like `one_node`, of the first version of the transaction protocol."""
    yield from _on(running_old, request, timeline, tmp_path)


def _on(stage: FaultStage, request: pytest.FixtureRequest, timeline: Timeline, folder: Path) -> Iterator[FaultStage]:
    stage.timeline = timeline

    save_others = request.node.stash.get(_EVIDENCE, lambda: folder)

    def save() -> Path:
        save_others()
        (folder / "timeline.txt").write_text("\n".join(timeline.lines) + "\n", encoding="utf-8")
        stage.save_logs(folder / stage.name)
        return folder

    request.node.stash[_EVIDENCE] = save
    stage.heal()
    yield stage
    stage.heal()


@pytest.fixture
def start_producer(timeline: Timeline) -> Iterator[Callable[..., KafkaProducer]]:
    """`start_producer(bootstrap_servers, **{"linger.ms": 0, ...})`: a producer that the fixture closes within five
    seconds after the row, in any state (row 52).
    """
    made: list[KafkaProducer] = []

    def start(bootstrap_servers: str, **settings: Any) -> KafkaProducer:
        made.append(KafkaProducer({"bootstrap.servers": bootstrap_servers, **settings}))
        return made[-1]

    yield start
    for producer in made:
        with Stopwatch() as watch:
            producer.close(_CLOSE_S)
        assert watch.own_s < _CLOSE_S + 0.5, f"close(5 s) took {watch.took_s:.3f} s"
    assert producer_threads() == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    save = item.stash.get(_EVIDENCE, None)
    if report.failed and call.when == "call" and save is not None:
        report.sections.append(("Timeline and broker logs", str(save())))
    return report
