"""The life of one node: when it counts as started, its errors, and how it ends. A shell or a fake is the JVM."""

from __future__ import annotations

import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import node as node_module
from spark_kafka_sink.local.admin import Admin
from spark_kafka_sink.local.jvm import CURRENT, STORAGE_TOOL_CLASS, Java, Jvm
from spark_kafka_sink.local.node import Node, new_cluster_id
from spark_kafka_sink.local.properties import NodeAddress
from spark_kafka_sink.local.watchdog import Watchdog

STARTED = "INFO [KafkaRaftServer nodeId=3] Kafka Server started (kafka.server.KafkaRaftServer)\n"


class Process:
    """Ends when it is killed, or when its exit code is set."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self.signals: list[signal.Signals] = []
        self.waited: list[float | None] = []

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout_s: float | None = None) -> int:
        self.waited.append(timeout_s)
        if self.code is None:
            raise subprocess.TimeoutExpired("java", timeout_s or 0)
        return self.code

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)
        self.code = -9


class Bench:
    """A node that was started once for each process. Time passes only in sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.processes: list[Process] = []
        self.commands: list[list[str]] = []
        self.forgotten: list[int] = []
        self.prints = ""
        self.now_s = 0.0
        self.living: set[int] | OSError = set()
        self.at_sleep: Callable[[], None] = lambda: None
        jvm = Jvm(Java(Path("/java"), "21"), CURRENT, [])
        watchdog: Any = SimpleNamespace(spawn=self._spawn, forget=self.forgotten.append)
        self.node = Node(NodeAddress(3, 9092, 9093), folder, jvm, watchdog)
        monkeypatch.setattr(node_module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep))

    def _spawn(self, command: Sequence[str | Path], *, folder: Path, output: Any) -> Process:
        assert folder == self.node.folder
        self.commands.append(list(map(str, command)))
        self.processes.append(Process(100 + len(self.processes)))
        output.write(self.prints.encode())
        return self.processes[-1]

    def _sleep(self, s: float) -> None:
        self.now_s += s
        self.at_sleep()

    def broker_ids(self, server: str) -> set[int]:
        assert server == "127.0.0.1:9092"
        if isinstance(self.living, OSError):
            raise self.living
        return self.living

    def start(self, prints: str = "") -> Process:
        self.prints = prints
        self.node.begin_start()
        return self.processes[-1]

    def log(self, text: str) -> None:
        with self.node.log_file.open("a") as file:
            file.write(text)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    made = Bench(monkeypatch, tmp_path)
    monkeypatch.setattr(Admin, "broker_ids", lambda _, server: made.broker_ids(server))
    return made


def test_cluster_id_never_begins_with_a_hyphen(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter([uuid.UUID(bytes=b"\xf8" + bytes(15)), uuid.UUID(bytes=b"\xfb" + bytes(15)), uuid.UUID(int=1)])
    monkeypatch.setattr(uuid, "uuid4", lambda: next(ids))
    assert new_cluster_id() == "AAAAAAAAAAAAAAAAAAAAAQ"


def test_cluster_id_is_read_from_the_folder(bench: Bench) -> None:
    assert bench.node.cluster_id is None
    bench.node.data.mkdir()
    (bench.node.data / "meta.properties").write_text("#\nversion=1\ncluster.id=a=b\nnode.id=3\n")
    assert bench.node.cluster_id == "a=b"


def test_started_broker_is_up_once_it_is_a_live_member(bench: Bench) -> None:
    bench.start(STARTED)
    bench.living = {3}
    bench.node.await_start(10)
    bench.node.kill()
    bench.start("starting\n")  # the log of the start before does not count
    steps: Iterator[Callable[[], None]] = iter(
        [
            lambda: setattr(bench, "living", {1}),
            lambda: bench.log(STARTED),
            lambda: setattr(bench, "living", ConnectionRefusedError("refused")),
            lambda: setattr(bench, "living", {1, 3}),
        ]
    )
    bench.at_sleep = lambda: next(steps)()
    bench.node.await_start(10)
    assert next(steps, None) is None


def test_start_waits_for_exactly_the_other_nodes(bench: Bench) -> None:
    bench.start()
    seen = iter([{3}, {1, 2, 3, 4}, {1, 2, 3}])
    bench.at_sleep = lambda: setattr(bench, "living", next(seen))
    bench.node.await_members({1, 2, 3}, 10)
    assert next(seen, None) is None
    bench.at_sleep = lambda: None
    with pytest.raises(LocalBrokerError, match=r"Node 3 does not see the brokers \[1, 2\] in time\. Its log ends:"):
        bench.node.await_members({2, 1}, bench.now_s + 10)


def test_broker_start_timeout_shows_the_end_of_the_log(bench: Bench) -> None:
    bench.start("the start before\n")
    bench.node.kill()
    bench.start("".join(f"line {number}\n" for number in range(40)))
    with pytest.raises(LocalBrokerError, match=r"Node 3 did not start in time\. Its log ends:\n  line 15\n") as failure:
        bench.node.await_start(10)
    assert str(failure.value).endswith("  line 39")
    assert 10 < bench.now_s < 10.1
    assert bench.node.running


def test_broker_that_ends_during_start_is_reported_at_once(bench: Bench) -> None:
    process = bench.start()
    process.code = 1
    with pytest.raises(LocalBrokerError, match=r"Node 3 ended while it started.*\n  \(it printed nothing\)"):
        bench.node.await_start(10)
    assert bench.now_s == 0
    assert bench.forgotten == [process.pid]
    assert not bench.node.running


def test_running_node_is_not_started_again(bench: Bench) -> None:
    process = bench.start()
    assert bench.node.pid == process.pid
    with pytest.raises(LocalBrokerError, match="Node 3 runs already"):
        bench.start()
    bench.node.kill()
    assert bench.forgotten == [process.pid]
    for ask in (lambda: bench.node.pid, bench.node.kill, bench.node.terminate, bench.node.suspend, bench.node.resume):
        with pytest.raises(LocalBrokerError, match="Node 3 does not run"):
            ask()
    assert not bench.node.suspended
    assert bench.start() is not process


def test_suspended_broker_is_resumed_before_sigterm_then_killed(bench: Bench) -> None:
    process = bench.start()
    bench.node.terminate()
    assert process.signals == [signal.SIGCONT, signal.SIGTERM]
    bench.node.await_end(7)
    assert process.waited[0] == 7
    assert process.signals[2:] == [signal.SIGKILL]
    assert not bench.node.running
    assert bench.node.was_killed
    in_order = bench.start()
    assert not bench.node.was_killed
    in_order.code = 143
    bench.node.await_end()
    assert in_order.signals == []
    assert not bench.node.was_killed
    assert bench.forgotten == [process.pid, in_order.pid]


@pytest.mark.parametrize("code", [0, 1, None])
def test_folder_counts_as_formatted_after_the_tool_succeeds(bench: Bench, code: int | None) -> None:
    bench.prints = "log.dirs is odd\n"
    bench.node.begin_format("abc", {"transaction.version": 2}, ["--standalone"])
    command = bench.commands[0]
    assert command[command.index(STORAGE_TOOL_CLASS) :] == [
        *(STORAGE_TOOL_CLASS, "format", "--cluster-id", "abc"),
        *("--config", str(bench.node.folder / "server.properties")),
        *("--feature", "transaction.version=2", "--standalone"),
    ]
    process = bench.processes[0]
    process.code = code
    bench.now_s = 4
    if code == 0:
        bench.node.await_format(10)
    else:
        text = "cannot be formatted:\n  log.dirs is odd" if code else "takes too long"
        with pytest.raises(LocalBrokerError, match=f"data folder of node 3 {text}"):
            bench.node.await_format(10)
    assert process.waited[0] == 6
    assert bench.node.running == (code is None)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state of a process is read from Linux's /proc")
def test_suspended_node_has_stopped_and_can_be_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watchdog = Watchdog(None)
    jvm: Any = SimpleNamespace(command=lambda *_, **__: ["sleep", "60"])
    node = Node(NodeAddress(1, 1, 2), tmp_path, jvm, watchdog)
    try:
        node.begin_start()
        assert not node.suspended
        node.suspend()
        node.suspend()  # bug: it waited forever, because a stop is reported once
        assert state_of(node.pid) == "T"
        assert node.running
        assert node.suspended
        node.resume()
        assert not node.suspended
        assert state_of(node.pid) != "T"
        node.suspend()
        node.kill()
        assert not node.running
        assert not node.suspended
        node.begin_start()
        assert node.running
        assert not node.suspended
        node.kill()
    finally:
        watchdog.close()


def test_files_of_a_node_are_for_its_user_only(bench: Bench) -> None:
    """Bug: every user of the machine could read the passwords of PLAIN."""
    for _ in range(2):
        bench.node.folder.chmod(0o755)
        bench.node.write_files({"node.id": "3"})
        assert (bench.node.folder / "server.properties").stat().st_mode & 0o777 == 0o600
        assert bench.node.folder.stat().st_mode & 0o777 == 0o700
