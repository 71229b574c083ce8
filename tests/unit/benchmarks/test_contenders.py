"""The contenders that write Arrow batches by confluent-kafka, with a scripted producer, and the rows of a cell."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
Report = Callable[[object, object], None]


@pytest.fixture
def contenders(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("contenders")


class ScriptedClient:
    """confluent-kafka's Producer: it delivers `by_poll` messages at each poll, and all at flush."""

    def __init__(self, by_poll: int = 0) -> None:
        self.calls: list[list[dict[str, Any]]] = []
        self.most_queued = 0
        self.left = 0
        self.refuses: Callable[[dict[str, Any]], str | None] = lambda message: None
        self.loses: Callable[[dict[str, Any]], str | None] = lambda message: None
        self._by_poll = by_poll
        self._queue: list[tuple[dict[str, Any], Report]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def produce_batch(self, topic: str, messages: list[dict[str, Any]], on_delivery: Report) -> int:
        assert topic == "t"
        self.calls.append(messages)
        for message in messages:
            if (error := self.refuses(message)) is not None:
                message["_error"] = error
            else:
                self._queue.append((message, on_delivery))
        self.most_queued = max(self.most_queued, len(self))
        return sum("_error" not in message for message in messages)

    def poll(self, timeout: float) -> None:
        self._deliver(self._by_poll)

    def flush(self, timeout: float) -> int:
        self._deliver(len(self) - self.left)
        return len(self)

    def _deliver(self, count: int) -> None:
        delivered, self._queue = self._queue[:count], self._queue[count:]
        for message, report in delivered:
            report(self.loses(message), message)


def batches(*values: str) -> list[pa.RecordBatch]:
    return [pa.record_batch({"value": [value], "key": [f"k{value}"]}) for value in values]


def test_each_batch_is_one_call_with_keys_and_values(contenders: ModuleType) -> None:
    client = ScriptedClient()
    assert contenders.produce_batches(client, "t", [*batches("1"), pa.record_batch({"value": ["2", None]})]) == 3
    assert client.calls == [[{"value": "1", "key": "k1"}], [{"value": "2"}, {"value": None}]]


def test_batch_waits_until_the_queue_has_room_for_it(contenders: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "MOST_QUEUED", 5)
    client = ScriptedClient(by_poll=1)
    assert contenders.produce_batches(client, "t", [pa.record_batch({"value": ["v"] * 3})] * 6) == 18
    assert client.most_queued == 5


def test_record_that_is_refused_lost_or_left_fails_the_write(contenders: ModuleType) -> None:
    for fault in ("refuses", "loses"):
        client = ScriptedClient()
        setattr(client, fault, lambda message: "too large" if message["value"] == "2" else None)
        with pytest.raises(RuntimeError, match=r"did not deliver all: .*too large"):
            contenders.produce_batches(client, "t", batches("1", "2", "3"))
    client = ScriptedClient()
    client.left = 1
    with pytest.raises(RuntimeError, match="did not deliver all"):
        contenders.produce_batches(client, "t", batches("1"))


@pytest.mark.parametrize(("keys", "names"), [("keyed", ["key", "value"]), ("unkeyed", ["value"])])
def test_table_of_a_cell_has_its_rows_again_after_a_million(
    contenders: ModuleType, monkeypatch: pytest.MonkeyPatch, keys: str, names: list[str]
) -> None:
    cells = importlib.import_module("cells")
    monkeypatch.setattr(cells, "CHUNK_ROWS", 10)
    found = cells.table(cells.Cell.parse(f"{keys}-lz4-4-1000"), 25)
    assert found.schema.names == names
    values = found["value"].to_pylist()
    assert {len(value) for value in values} == {1000}
    assert values[:10] == values[10:20]
    assert values[20:] == values[:5]
    assert len(set(values)) == 10
