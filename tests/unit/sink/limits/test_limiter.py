"""What a task asks for before it sends rows, what it pays, and when it gives up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.fake_clock import FakeClock
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink.common.errors import (
    IllegalStateError,
    KafkaError,
    LimitServerError,
    RecordTooLargeError,
    WriteLimitError,
)
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import lone_record_sizes
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.limits.conversation import LimitServer
from spark_kafka_sink.sink.limits.limiter import WriteLimiter
from spark_kafka_sink.sink.options import SinkConfig

ADDRESS = LimitServer("driver", 4711, Secret("s"))


class ScriptedServer:
    """Answers each request; `script` runs first, with the request's number and the task's `on_wait`."""

    def __init__(self, script: Callable[[int, Callable[[], None]], None] = lambda _number, _on_wait: None) -> None:
        self.asked: list[list[int]] = []
        self.queries: set[str] = set()
        self.connections = 0
        self.is_open = False
        self.ahead = 0
        self._script = script

    def connect(self, address: LimitServer) -> ScriptedServer:
        assert address == ADDRESS
        self.connections += 1
        self.is_open = True
        return self

    def ask(self, request: str, on_wait: Callable[[], None]) -> int:
        parsed = json.loads(request)
        self.asked.append(parsed["ask"])
        self.queries.add(parsed["query"])
        self._script(len(self.asked), on_wait)
        return self.ahead

    def close(self) -> None:
        self.is_open = False


class Task:
    """A limiter, with what the brokers have acknowledged."""

    def __init__(self, server: ScriptedServer, transaction_ms: float | None = None, **limits: Any) -> None:
        self.clock = FakeClock()
        self.acknowledged = (0, 0)
        self.error: KafkaError | None = None
        given = {f"write.max.{name}.per.second": rate for name, rate in limits.items()}
        config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "t", **given})
        self.limiter = WriteLimiter(
            replace(config, limit_server=ADDRESS),
            "q",
            lambda: self.acknowledged,
            self._check,
            self.clock,
            transaction_ms,
            server.connect,
        )

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


def columns(rows: int, size: int = 100) -> RecordColumns:
    return RecordColumns.from_rows([b"v" * size] * rows)


def test_rows_are_asked_for_in_parts_of_a_tenth_of_a_second() -> None:
    server = ScriptedServer()
    parts = [*Task(server, records=1_000).limiter.parts(columns(250))]
    assert [part.num_rows for part in parts] == [100, 100, 50]
    assert [records for records, _ in server.asked] == [100, 100, 50]
    assert (server.connections, server.queries) == (1, {"q"})


def test_a_low_limit_is_asked_for_row_by_row() -> None:
    assert [part.num_rows for part in Task(ScriptedServer(), records=1).limiter.parts(columns(3))] == [1, 1, 1]


def test_parts_end_at_the_tighter_limit_and_have_a_row_at_least() -> None:
    size = int(lone_record_sizes(columns(1))[0])
    parts = [*Task(ScriptedServer(), records=1_000, bytes=10 * 3 * size).limiter.parts(columns(7))]
    assert [part.num_rows for part in parts] == [3, 3, 1]
    parts = [*Task(ScriptedServer(), bytes=10).limiter.parts(columns(2))]
    assert [part.num_rows for part in parts] == [1, 1]


def test_a_part_is_asked_for_only_when_the_last_one_was_sent() -> None:
    server = ScriptedServer()
    parts = Task(server, records=10).limiter.parts(columns(2))
    next(parts)
    assert len(server.asked) == 1


def test_what_is_granted_in_advance_is_sent_without_a_question() -> None:
    server, size = ScriptedServer(), int(lone_record_sizes(columns(1))[0])
    server.ahead = 3
    task = Task(server, records=1_000_000)
    sent = [task_part.num_rows for rows in (2, 2, 2, 2, 2) for task_part in task.limiter.parts(columns(rows))]
    assert sent == [2] * 5
    assert server.asked == [[2, 2 * size]] * 2  # the first for four parts


@pytest.mark.parametrize(("rows", "size"), [(5, 10), (1, 500)])
def test_a_part_larger_than_what_is_left_in_advance_is_asked_for(rows: int, size: int) -> None:
    server = ScriptedServer()
    server.ahead = 2
    task = Task(server, records=1_000_000)
    for part in (columns(2), columns(rows, size)):
        assert len([*task.limiter.parts(part)]) == 1
    assert [records for records, _ in server.asked] == [2, rows]


def test_a_new_connection_has_nothing_in_advance() -> None:
    server = ScriptedServer()
    server.ahead = 5
    task = Task(server, records=1_000_000)
    for _ in range(2):
        assert len([*task.limiter.parts(columns(1))]) == 1
        task.limiter.close()
    assert len(server.asked) == 2


def test_bytes_that_a_batch_adds_are_paid_with_the_next_part() -> None:
    server, size = ScriptedServer(), int(lone_record_sizes(columns(1))[0])
    task = Task(server, bytes=10_000)
    for _ in task.limiter.parts(columns(1)):
        task.acknowledged = (1, size + 3)
    for _ in task.limiter.parts(columns(1)):
        pass  # the broker has not acknowledged it yet
    for _ in task.limiter.parts(columns(1)):
        task.acknowledged = (3, 3 * size + 3)
    for _ in task.limiter.parts(columns(1)):
        pass
    assert [paid for _, paid in server.asked] == [size, size + 3, size, size]


def test_more_that_was_paid_than_the_next_part_has_is_kept() -> None:
    server, size = ScriptedServer(), int(lone_record_sizes(columns(1))[0])
    task = Task(server, bytes=10_000)
    for _ in task.limiter.parts(columns(3)):
        pass
    task.acknowledged = (3, size)
    for _ in task.limiter.parts(columns(1)):
        pass
    for _ in task.limiter.parts(columns(2)):
        pass
    assert [paid for _, paid in server.asked] == [3 * size, 0, size]


def test_an_error_of_a_sent_row_ends_the_wait() -> None:
    task = Task(ScriptedServer(lambda _number, on_wait: on_wait()), records=10)
    task.error = RecordTooLargeError("large")
    with pytest.raises(RecordTooLargeError):
        next(task.limiter.parts(columns(1)))


def test_a_task_that_cannot_ask_fails_and_names_the_option_and_the_address() -> None:
    def lost(_number: int, _on_wait: Callable[[], None]) -> None:
        raise ConnectionRefusedError("refused")

    server = ScriptedServer(lost)
    with pytest.raises(LimitServerError, match=r"records\.per\.second=10: .* driver, port 4711, .*: refused") as raised:
        next(Task(server, records=10).limiter.parts(columns(1)))
    assert raised.value.retriable
    assert (server.connections, server.is_open) == (2, False)


def test_a_connection_that_was_lost_while_idle_is_made_again() -> None:
    def lost_once(number: int, _on_wait: Callable[[], None]) -> None:
        if number == 2:
            raise TimeoutError

    server = ScriptedServer(lost_once)
    assert len([*Task(server, records=10).limiter.parts(columns(2))]) == 2
    assert server.connections == 2


def test_ctrl_c_in_a_wait_closes_the_connection() -> None:
    def interrupted(_number: int, _on_wait: Callable[[], None]) -> None:
        raise KeyboardInterrupt

    server = ScriptedServer(interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(Task(server, records=10).limiter.parts(columns(1)))
    assert not server.is_open


def test_rows_that_need_more_than_the_transactions_time_are_refused_before_any_is_sent() -> None:
    server = ScriptedServer()
    with pytest.raises(WriteLimitError) as raised:
        next(Task(server, 48_000, records=10).limiter.parts(columns(500)))
    assert "500 more rows" in str(raised.value)
    assert "write.max.records.per.second=10" in str(raised.value)
    assert "kafka.transaction.timeout.ms=60000" in str(raised.value)
    assert server.asked == []
    assert len([*Task(server, 48_000, records=10).limiter.parts(columns(480))]) == 480


def test_time_that_the_transaction_is_open_counts() -> None:
    task = Task(ScriptedServer(), 48_000, records=10)
    for _ in task.limiter.parts(columns(1)):
        pass
    task.clock.advance(47_000)
    assert len([*task.limiter.parts(columns(13))]) == 13
    with pytest.raises(WriteLimitError, match="open for 47 s"):
        next(task.limiter.parts(columns(14)))


def test_a_wait_past_the_transactions_time_is_ended() -> None:
    task = Task(ScriptedServer(lambda number, on_wait: wait(on_wait) if number == 2 else None), 48_000, records=10)

    def wait(on_wait: Callable[[], None]) -> None:
        on_wait()
        task.clock.advance(48_500)
        on_wait()

    with pytest.raises(WriteLimitError, match="1 more rows"):
        assert len([*task.limiter.parts(columns(2))]) == 0


def test_time_of_waits_is_counted_and_no_other() -> None:
    task = Task(ScriptedServer(lambda _number, _on_wait: task.clock.advance(30)), records=10)
    for _ in task.limiter.parts(columns(2)):
        task.clock.advance(1_000)
    assert task.limiter.waited_ms == 60


def test_time_before_the_first_row_does_not_count() -> None:
    def wait(_number: int, on_wait: Callable[[], None]) -> None:
        task.clock.advance(100_000)
        on_wait()

    task = Task(ScriptedServer(wait), 48_000, records=10)
    next(task.limiter.parts(columns(1)))


def test_a_task_with_a_limit_and_no_server_sends_nothing() -> None:
    config = SinkConfig.from_options(
        {"kafka.bootstrap.servers": "h:1", "topic": "t", "write.max.records.per.second": 1}
    )
    producer = ScriptedProducer()
    with pytest.raises(IllegalStateError, match=r"write\.max\.records\.per\.second"):
        TaskDelivery(config, ScriptedPool(producer))


def test_without_the_options_nothing_of_limits_is_imported() -> None:
    script = (
        "import sys; import spark_kafka_sink.sink.kafka_sink as k;"
        "from spark_kafka_sink.sink.delivery import TaskDelivery;"
        "s = k.KafkaSink({'kafka.bootstrap.servers': 'h:1', 'topic': 't'}); s.__getstate__();"
        "TaskDelivery(s._config, None);"
        "print([name for name in sys.modules if 'sink.limits' in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
