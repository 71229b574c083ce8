"""The process that keeps the budgets, over real sockets: how it is found, whom it trusts, and when it ends."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from support.pyspark_capabilities import FORMAT
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import ConfigError, LimitServerError
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.kafka_sink import KafkaSink
from spark_kafka_sink.sink.limits import driver, server
from spark_kafka_sink.sink.limits.budget import MOST_AHEAD
from spark_kafka_sink.sink.limits.conversation import Conversation, LimitServer, proof
from spark_kafka_sink.sink.limits.server import process_start
from spark_kafka_sink.sink.options import SinkConfig

OPTIONS: Final = {"kafka.bootstrap.servers": "h:1", "topic": "t", "write.max.records.per.second": "1000"}
CONFIG: Final = SinkConfig.from_options(OPTIONS)
COLUMNS: Final = RecordColumns.from_rows([b"v"] * 300)

TASK: Final = """
import json, sys, time
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.sink.limits.conversation import Conversation, LimitServer
host, port, secret, seconds = json.loads(sys.stdin.readline())
conversation = Conversation(LimitServer(host, port, Secret(secret)))
print("ready", flush=True)
sys.stdin.readline()
began = last = time.monotonic()
sent = 0
while last < began + seconds:
    conversation.ask(json.dumps({"query": "q", "rates": [1000, None], "ask": [50, 0]}), lambda: None)
    last = time.monotonic()
    sent += 50
print(json.dumps([began, last, sent]))
"""


def planned(folder: Path) -> SinkConfig:
    """Return the configuration as a planning worker makes it."""
    return driver.with_server_of_planners(CONFIG, {"SPARK_LOCAL_DIRS": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Spark's local directory of an application."""
    made = tmp_path / "application"
    made.mkdir()
    return made


@pytest.fixture
def config(folder: Path) -> Iterator[SinkConfig]:
    yield planned(folder)
    end(folder)


def end(folder: Path) -> None:
    shutil.rmtree(folder)
    for process in driver._started:
        process.wait(20)
    driver._started.clear()


def address(config: SinkConfig) -> LimitServer:
    assert config.limit_server is not None
    return config.limit_server


def send(config: SinkConfig) -> ScriptedProducer:
    producer = ScriptedProducer()
    delivery = TaskDelivery(config, ScriptedPool(producer))
    try:
        delivery.send("t", COLUMNS)
        delivery.finish()
        assert "limit" in json.loads(delivery.report[-1][-1])["durations_ms"]
    finally:
        delivery.abandon()
    return producer


def test_several_processes_share_one_limit(config: SinkConfig) -> None:
    server, seconds = address(config), 3
    tasks = [
        subprocess.Popen([sys.executable, "-c", TASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for task in tasks:
        assert task.stdin is not None
        task.stdin.write(json.dumps([server.host, server.port, server.secret.reveal(), seconds]) + "\n")
        task.stdin.flush()
    for task in tasks:
        assert task.stdout is not None
        assert task.stdout.readline() == "ready\n"
    for task in tasks:
        assert task.stdin is not None
        task.stdin.write("\n")
        task.stdin.flush()
    began, ended, sent = zip(*(json.loads(task.communicate(timeout=60)[0]) for task in tasks), strict=True)
    took_s = max(ended) - min(began)  # they do not begin in the same moment, and the clock is that of the machine
    assert 0.5 * 1_000 * seconds <= sum(sent) <= 1_000 * took_s + 500
    assert min(sent) > 0.2 * 1_000 * seconds / 3


def test_rows_are_sent_in_parts_as_they_are_allowed(config: SinkConfig) -> None:
    clock = SystemClock()
    started_ms = clock.now_ms()
    producer = send(config)
    assert [sent.columns.num_rows for sent in producer.sent] == [100, 100, 100]
    send(config)
    assert clock.now_ms() - started_ms >= 600 - 250 - 100  # the burst, and the last part


def test_planning_workers_find_one_server_that_only_its_user_can_read_of(config: SinkConfig, folder: Path) -> None:
    assert planned(folder).limit_server == config.limit_server
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_first_of_two_planning_workers_wins(config: SinkConfig, folder: Path) -> None:
    second = driver._start("127.0.0.1", "127.0.0.1", os.getpid(), Path("/"))
    process = driver._started[-1]
    assert driver._shared(folder / "spark-kafka-sink-limits", second) == config.limit_server
    assert process.poll() is not None


def test_a_server_that_was_killed_is_replaced_by_the_next_plan(config: SinkConfig, folder: Path) -> None:
    driver._started[-1].kill()
    driver._started[-1].wait()
    with pytest.raises(LimitServerError, match="cannot be reached from this task"):
        send(config)
    other = planned(folder)
    assert other.limit_server != config.limit_server
    assert len(send(other).sent) == 3


def test_a_task_with_a_wrong_secret_sends_nothing(config: SinkConfig) -> None:
    wrong = replace(address(config), secret=Secret("guessed"))
    producer = ScriptedProducer()
    delivery = TaskDelivery(replace(config, limit_server=wrong), ScriptedPool(producer))
    with pytest.raises(LimitServerError, match="cannot be reached from this task"):
        delivery.send("t", COLUMNS)
    delivery.abandon()
    assert producer.sent == []
    assert len(send(config).sent) == 3


@pytest.mark.parametrize("answer", [b"0" * 64, b"\xff\xfe"], ids=["digits", "binary"])
def test_a_stranger_at_the_port_gives_no_permission(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = (
            "import sys;"
            "from spark_kafka_sink.common.texts import Secret;"
            "from spark_kafka_sink.sink.limits.conversation import Conversation, LimitServer;"
            "Conversation(LimitServer('127.0.0.1', int(sys.argv[1]), Secret('s')))"
        )
        task = subprocess.Popen(
            [sys.executable, "-c", script, str(listener.getsockname()[1])], stderr=subprocess.PIPE, text=True
        )
        with listener.accept()[0] as own:
            own.sendall(b"0\n" + answer + b"\ngo\n")
            assert "LimitServerError: The program at 127.0.0.1" in task.communicate(timeout=60)[1]


def test_a_task_far_below_the_limit_may_send_in_advance(config: SinkConfig) -> None:
    request = json.dumps({"query": "q", "rates": [1_000_000, None], "ask": [1_000, 0]})
    conversation = Conversation(address(config))
    assert conversation.ask(request, lambda: None) == MOST_AHEAD
    conversation.close()


@pytest.mark.parametrize("answer", ["go", "go ", "go -1", "go x", "gone 1", ""])
def test_an_answer_that_is_not_known_gives_no_permission(answer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = LimitServer("127.0.0.1", listener.getsockname()[1], Secret("s"))
        task = threading.Thread(target=_answer, args=(listener, answer))
        task.start()
        conversation = Conversation(server)
        with pytest.raises(LimitServerError, match="an answer that is not known here"):
            conversation.ask("{}", lambda: None)
        conversation.close()
        task.join()


def _answer(listener: socket.socket, answer: str) -> None:
    """Be a server that knows the secret, and answers the first question."""
    with listener.accept()[0] as own, own.makefile("rw", newline="\n") as lines:
        lines.write("0\n")
        lines.flush()
        number, _ = lines.readline().split()
        lines.write(f"{proof('s', 'server', '0', number)}\n")
        lines.flush()
        lines.readline()
        lines.write(f"{answer}\n")


@pytest.mark.parametrize("line", [b"\n", b"ask\n", b"x" * 100_000, b"\xff\n", b"a " + b"0" * 64 + b"\n"])
def test_an_odd_line_ends_only_its_own_connection(config: SinkConfig, line: bytes) -> None:
    server = address(config)
    with socket.create_connection((server.host, server.port), 20) as odd:
        assert odd.recv(100).endswith(b"\n")
        odd.sendall(line)
        with suppress(ConnectionResetError):
            assert odd.recv(100) == b""
    Conversation(server).close()


def test_the_server_ends_when_sparks_directory_is_deleted(config: SinkConfig, folder: Path) -> None:
    Conversation(address(config)).close()
    process = driver._started[-1]
    assert process.poll() is None
    shutil.rmtree(folder)
    assert process.wait(20) == 0
    folder.mkdir()


def test_the_server_ends_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    server = driver._start("127.0.0.1", "127.0.0.1", owner.pid, Path("/"))
    Conversation(server).close()
    owner.kill()
    assert driver._started[-1].wait(20) == 0
    driver._started.clear()
    owner.communicate()


def test_copies_of_a_sink_ask_one_server_of_its_process() -> None:
    sink = KafkaSink(OPTIONS)
    assert sink._row_config.limit_server is None  # the sink itself opens nothing
    servers = {address(pickle.loads(pickle.dumps(sink))._row_config) for _ in range(2)}
    Conversation(servers.pop()).close()
    assert servers == set()
    driver._own.clear()
    process = driver._started.pop()
    driver._end(os.getppid(), process)
    assert process.poll() is None
    driver._end(os.getpid(), process)
    assert process.poll() is not None


def test_later_spark_context_of_a_process_has_a_server_that_its_executors_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: tasks of a cluster were told the loopback address of the server that an earlier, local session had."""
    found = []
    for place in (("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "localhost"), ("127.0.0.1", "127.0.0.1")):
        monkeypatch.setattr(driver, "_addresses_of_driver", lambda place=place: place)
        found.append(driver.with_server_of_process(CONFIG).limit_server)
    assert [each.host for each in found if each is not None] == ["127.0.0.1", "localhost", "127.0.0.1"]
    assert found[0] == found[2] != found[1]
    driver._own.clear()
    for _ in range(2):
        driver._end(os.getpid(), driver._started.pop())


def test_without_a_driver_of_spark_the_server_is_at_the_address_that_spark_local_ip_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Spark Connect, whose client has no SparkContext."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.7")
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    assert driver._addresses_of_driver() == ("127.0.0.7", "127.0.0.7")


def test_the_server_of_a_driver_ends_with_it_without_a_warning() -> None:
    script = (
        f"import pickle; from spark_kafka_sink import KafkaSink; pickle.dumps(KafkaSink({OPTIONS}));"
        "from spark_kafka_sink.sink.limits import driver; print(driver._started[0].pid)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", script], capture_output=True, text=True
    )
    assert "ResourceWarning" not in done.stderr
    assert process_start(int(done.stdout)) is None


@FORMAT.needed
def test_tasks_of_a_data_source_ask_the_server_of_its_planning_worker(
    config: SinkConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.types import StringType, StructType

    from spark_kafka_sink.sink.data_source import KafkaSinkDataSource

    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{folder},{folder}/more")
    for make in (KafkaSinkDataSource(dict(OPTIONS)).writer, KafkaSinkDataSource(dict(OPTIONS)).streamWriter):
        writer = make(StructType().add("value", StringType()), False)
        assert writer._config.limit_server is None
        assert pickle.loads(pickle.dumps(writer))._config.limit_server == config.limit_server


def test_an_address_of_another_machine_is_an_error_with_its_reason() -> None:
    with pytest.raises(LimitServerError, match=r"did not start at 192\.0\.2\.1: .*address"):
        driver._start("192.0.2.1", "192.0.2.1", os.getpid(), Path("/"))


def test_server_that_hangs_at_its_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the batch, and with it every batch of the process that has a limit, waited for ever."""
    made: list[subprocess.Popen[str]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            made.append(self)

    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(driver, "START_S", 0.3)
    with pytest.raises(LimitServerError, match="said nothing within 0 s"):
        driver._start("127.0.0.1", "127.0.0.1", os.getpid(), Path("/"))
    assert made[0].returncode == -signal.SIGKILL


def test_a_planning_worker_without_a_local_directory_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"write\.max\.records\.per\.second"):
        driver.with_server_of_planners(CONFIG, {})


def test_full_local_directory_is_named_and_leaves_no_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the query's error was only "No space left on device". Each try left a server and a file."""
    servers: list[Any] = []
    run = driver._run

    def keep(stdout: socket.socket) -> Any:
        servers.append(run(stdout))
        return servers[-1]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(driver, "_run", keep)
    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(LimitServerError, match=f"a file in {folder}, .* cannot be written: No space left on device"):
        planned(folder)
    assert [each.returncode for each in servers] == [-signal.SIGKILL]
    assert list(folder.iterdir()) == []


def test_connection_to_a_machine_that_is_gone_is_noticed() -> None:
    """Bug: nothing was sent to a task that computed its rows. If its machine lost power, its connection stayed as long
    as the driver, and after weeks the server could take no task any more.
    """

    async def options() -> list[int]:
        loop = asyncio.get_running_loop()
        made: list[server.Conversation] = []
        budgets = server.BudgetServer("secret", SystemClock(), loop)

        def make() -> server.Conversation:
            made.append(server.Conversation(budgets))
            return made[-1]

        listener = await loop.create_server(make, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        await reader.readline()
        own = made[0]._transport.get_extra_info("socket")
        found = [own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        found += [own.getsockopt(socket.IPPROTO_TCP, option) for option in (socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
        writer.close()
        await writer.wait_closed()
        listener.close()
        await listener.wait_closed()
        return found

    assert asyncio.run(options()) == [1, 15, 4]
