"""The contenders that write Arrow batches by confluent-kafka, with a scripted producer; the cells and their rows."""

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


@pytest.mark.parametrize(
    ("text", "fields", "title"),
    [
        ("keyed-lz4-4-100", (4, 100, 0, 0, 0), "keyed, lz4, 4 partitions, 100 B"),
        ("unkeyed-none-16-40-200x50", (16, 40, 200, 50, 0), "unkeyed, none, 16 partitions, 40 B, 200 tasks of 50 rows"),
        ("keyed-zstd-4-1000-8slots", (4, 1000, 0, 0, 8), "keyed, zstd, 4 partitions, 1,000 B, 8 slots"),
        (
            "keyed-none-4-100-9x7-3slots",
            (4, 100, 9, 7, 3),
            "keyed, none, 4 partitions, 100 B, 9 tasks of 7 rows, 3 slots",
        ),
    ],
)
def test_cell_is_read_from_its_text(contenders: ModuleType, text: str, fields: tuple[int, ...], title: str) -> None:
    cell = contenders.Cell.parse(text)
    assert (cell.partitions, cell.value_bytes, cell.tasks, cell.task_rows, cell.slots) == fields
    assert (str(cell), cell.title, cell.is_keyed) == (text, title, text.startswith("keyed"))


@pytest.mark.parametrize(
    "text",
    [
        *("keyed-lz4-4", "keyed-lz5-4-100", "keys-lz4-4-100", "keyed-lz4-0-100", "keyed-lz4-4-39", "keyed-lz4-4-x"),
        *("keyed-lz4-4-100-200", "keyed-lz4-4-100-0x50", "keyed-lz4-4-100-200x0", "keyed-lz4-4-100-0slots"),
        *("keyed-lz4-4-100-8slots-200x50", "flights-xml-lz4-50", "flights-json-lz4-0", "flights-json-lz4-4-8slots"),
    ],
)
def test_text_that_is_no_cell_is_refused(contenders: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        contenders.cell_of(text)


def test_every_cell_that_is_named_is_one_and_has_contenders(contenders: ModuleType) -> None:
    cells = importlib.import_module("cells")
    assert len(cells.COMBINATIONS) == 32
    for text in cells.ALL_CELLS:
        cell = contenders.cell_of(text)
        fitting = {name for name, each in contenders.CONTENDERS.items() if each.fits(cell)}
        assert {"jvm", "write", "format"} <= fitting, text
        assert ({"write_once", "format_once"} <= fitting) == bool(cell.tasks), text
        assert ("write_watched" in fitting) == (text in cells.COMMON), text
        assert ("table_write" in fitting) == (isinstance(cell, contenders.Cell) and not cell.tasks), text
        assert ("write_struct" in fitting) == text.startswith(("flights-json", "flights-avro")), text


@pytest.mark.parametrize(
    ("cell", "contender", "records"),
    [
        ("keyed-none-16-100-200x50", "write", 10_000),
        ("keyed-none-16-100-200x50", "confluent", 10_000),
        ("keyed-lz4-4-1000-8slots", "write", 1_600_000),
        ("flights-text-lz4-50", "write", 2_000_000),
        ("flights-json-lz4-50", "confluent_serializer", 250_000),
    ],
)
def test_records_of_a_run_fit_the_cell(contenders: ModuleType, cell: str, contender: str, records: int) -> None:
    assert contenders.CONTENDERS[contender].records(contenders.cell_of(cell), 8_000_000) == records


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
