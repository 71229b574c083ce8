"""The records of the decision topic, and the messages between the driver and its tasks."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, ProtocolError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchStart,
    Decision,
    FirstUse,
    TaskOutcome,
    TaskTransaction,
    all_offsets,
    first_use_key,
    prefix_of,
    remember_start,
    remembered_start,
    task_id,
    to_record,
)

longs = st.integers(0, 2**63 - 1)
tasks = st.builds(
    TaskTransaction,
    st.builds(
        OpenTransaction,
        st.from_regex(r"P/[0-9]{1,4}(\.[0-9]{1,3})?", fullmatch=True),
        longs,
        st.integers(0, 2**15 - 1),
        st.sampled_from([1, 2]),
    ),
    longs,
    longs,
)
decisions = st.builds(
    Decision,
    longs,
    st.text(),
    st.integers(0, 253_402_300_799_999),
    longs,
    longs,
    st.lists(tasks, max_size=4).map(tuple),
    st.booleans(),
    st.booleans(),
    fingerprint=st.integers(0, 2**64 - 1),
    topic=st.one_of(st.none(), st.text()),
    ends=st.dictionaries(st.builds(TopicPartition, st.text(), longs), longs, max_size=3),
)
DRIVER = OpenTransaction("P/driver", 7, 3, 2)
DECISION = Decision(4, "q", 1, 2, 9, (TaskTransaction(OpenTransaction("P/0", 8, 1, 2), 0, 9),))


@given(decisions)
def test_written_decision_is_read_back(decision: Decision) -> None:
    assert Decision.from_bytes(decision.to_bytes(), "here", "P") == decision


@given(decisions, st.data())
def test_a_changed_byte_is_noticed(decision: Decision, data: st.DataObject) -> None:
    written = bytearray(decision.to_bytes())
    at = data.draw(st.integers(0, len(written) - 1))
    written[at] ^= data.draw(st.integers(1, 255))
    try:
        read = Decision.from_bytes(bytes(written), "here", "P")
    except ProtocolError:
        return
    assert read == decision  # a different spelling of the same content


def endless() -> bytes:
    """A decision with a correct checksum, whose batch id is a number too large for an int."""
    content = {key: value for key, value in json.loads(DECISION.to_bytes()).items() if key != "checksum"}
    content["batch_id"] = math.inf
    return to_record(content)


def test_finished_decision_has_no_tasks() -> None:
    finished = DECISION.finished()
    assert finished.is_finished
    assert (finished.tasks, finished.ends) == ((), {})
    assert (finished.batch_id, finished.query_id, finished.rows) == (4, "q", 9)


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b"null", b"\xff", b'{"checksum": 1}', b"[" * 100_000, endless()], ids=range(8)
)
def test_other_content_is_refused_with_its_place(value: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"decisions-3, offset 9: "):
        Decision.from_bytes(value, "decisions-3, offset 9", "P")


def test_newer_version_is_refused() -> None:
    content = json.loads(DECISION.to_bytes()) | {"version": 3}
    with pytest.raises(ProtocolError, match="version 3, and only versions up to 2 are known"):
        Decision.from_bytes(json.dumps(content).encode(), "here", "P")


@pytest.mark.parametrize("name", ["version", "state", "query_id", "batch_id", "fingerprint", "transactions"])
def test_error_about_a_decision_shows_no_control_character(name: str) -> None:
    wild = "\x1b[2J\n" * 10_000
    content = json.loads(replace(DECISION, fingerprint=5, topic="t").to_bytes())
    content |= {name: [[wild, 8, 1, 2, 0, 9]] if name == "transactions" else [wild] if name == "query_id" else wild}
    del content["checksum"]
    forged = to_record(content)
    with pytest.raises(ProtocolError) as error:
        Decision.from_bytes(forged, "here", "P")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500


def test_decision_of_version_1_stays_in_version_1() -> None:
    content = {
        "version": 1, "state": "decided", "batch_id": 4, "query_id": "q", "time_ms": 1, "partitions": 2, "rows": 9,
        "transactions": [["P/0", 8, 1, 2, 0, 9]],
    }  # fmt: skip
    written = to_record(content)
    assert Decision.from_bytes(written, "here", "P") == DECISION
    assert DECISION.to_bytes() == written


@pytest.mark.parametrize(
    "change",
    [
        {"batch_id": -1}, {"batch_id": True}, {"batch_id": 1.5}, {"batch_id": "4"}, {"batch_id": 2**63},
        {"query_id": 7}, {"query_id": None}, {"time_ms": 10**18}, {"time_ms": -1}, {"partitions": None}, {"rows": -3},
        {"state": "begun"}, {"fingerprint": 7}, {"fingerprint": "7"}, {"fingerprint": "G" * 16}, {"topic": 5},
        {"transactions": [["payments/0", 8, 1, 2, 0, 9]]}, {"transactions": [["P/driver", 8, 1, 2, 0, 9]]},
        {"transactions": [["PP/0", 8, 1, 2, 0, 9]]}, {"transactions": [["P/0x", 8, 1, 2, 0, 9]]},
        {"transactions": [["P/\u0663", 8, 1, 2, 0, 9]]}, {"transactions": [["P/0\n", 8, 1, 2, 0, 9]]},
        {"transactions": [[["P/0"], 8, 1, 2, 0, 9]]}, {"transactions": [["P/0", -1, 1, 2, 0, 9]]},
        {"transactions": [["P/0", 2**63, 1, 2, 0, 9]]}, {"transactions": [["P/0", 8, 32_768, 2, 0, 9]]},
        {"transactions": [["P/0", 8, 1, 3, 0, 9]]}, {"transactions": [["P/0", 8, 1, True, 0, 9]]},
        {"transactions": [["P/0", 8, 1, 2, -1, 9]]}, {"transactions": [["P/0", 8, 1, 2, 0, "9"]]},
        {"transactions": [["P/0", 8, 1, 2, 0]]}, {"transactions": 7},
        {"ends": []}, {"ends": {"t": 5}}, {"ends": {"t": [[0]]}}, {"ends": {"t": [[0, -1]]}},
        {"ends": {"t": [["0", 1]]}},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_make_no_decision(change: dict[str, object]) -> None:
    content = json.loads(replace(DECISION, fingerprint=5, topic="t").to_bytes()) | change
    del content["checksum"]
    forged = to_record(content)
    with pytest.raises(ProtocolError, match="decisions-3, offset 9: this is not a decision of 'P'"):
        Decision.from_bytes(forged, "decisions-3, offset 9", "P")


def test_a_thousand_tasks_fit_into_a_record() -> None:
    name = "spark-kafka-sink-" + "0" * 24
    many = [TaskTransaction(OpenTransaction(f"{name}/{n}", 2**40 + n, 30_000, 2), n, 10**9) for n in range(8_000)]
    decision = Decision(10**9, "q" * 36, 2**41, 8_000, 10**12, tuple(many))
    assert len(decision.to_bytes()) < 1_000_000


def batch_start(last: int | None, query_id: str = "q") -> BatchStart:
    return BatchStart("P", DRIVER, TopicPartition("decisions", 3), last, query_id if last is not None else "")


def test_last_decided_batch_counts_as_written() -> None:
    assert not batch_start(None).is_written_already(0, "q")
    assert batch_start(4).is_written_already(4, "q")
    assert not batch_start(4).is_written_already(5, "q")
    assert not batch_start(4).is_written_already(7, "q")
    assert (batch_start(None).next_batch_id, batch_start(4).next_batch_id) == (0, 5)


def test_earlier_batch_is_refused_with_advice() -> None:
    with pytest.raises(IllegalStateError, match=r"Batch 3 comes after batch 4.*'P'.*another transactional\.id\.prefix"):
        batch_start(4).is_written_already(3, "q")


@pytest.mark.parametrize("batch_id", [3, 4, 5])
@pytest.mark.parametrize("query_id", ["another", ""])
def test_another_querys_prefix_is_refused(batch_id: int, query_id: str) -> None:
    with pytest.raises(IllegalStateError, match=r"'P' belongs to query q.*its own transactional\.id\.prefix"):
        batch_start(4).is_written_already(batch_id, query_id)


@given(tasks, st.booleans(), st.text(), st.dictionaries(st.text(), st.lists(st.lists(longs, min_size=4, max_size=4))))
def test_task_message_reaches_the_driver_by_both_interfaces(
    written: TaskTransaction, has_rows: bool, text: str, offsets: dict[str, list[list[int]]]
) -> None:
    made = written if has_rows else None
    outcome = TaskOutcome(batch_start(4, text), 5, text, written.partition, written.rows, made, offsets=offsets)
    assert TaskOutcome.from_json(outcome.to_json()) == outcome
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_offsets_of_all_tasks() -> None:
    empty = TaskOutcome(batch_start(4), 5, "q", 0, 0, None)
    outcomes = [
        replace(empty, offsets={"t": [[0, 7, 9, 2], [1, 2, 3, 1]]}),
        replace(empty, offsets={"t": [[0, 3, 8, 3], [2, 5, 6, 1]], "dead": [[0, 1, 2, 1]]}),
        replace(empty, offsets={"t": [[0, 9, 20, 11]]}),
        empty,
    ]
    found = {("t", 0): (3, 20, 16), ("t", 1): (2, 3, 1), ("t", 2): (5, 6, 1), ("dead", 0): (1, 2, 1)}
    assert all_offsets(outcomes) == found


def test_marker_names_producer_epoch_and_rows() -> None:
    task = DECISION.tasks[0]
    assert task.marker_text == "producer_id=8 epoch=1 rows=9"


def test_second_attempt_has_its_own_id() -> None:
    assert (task_id("P", 3, 0), task_id("P", 3, 2)) == ("P/3", "P/3.2")


FIRST_USE = FirstUse(1_700_000_000_000, 16, 3, "an id", is_adopted=True)


def test_first_use_comes_back_as_it_was_written() -> None:
    for first_use in (FIRST_USE, FirstUse(0, 1, 1)):
        assert FirstUse.from_bytes(first_use.to_bytes(), "here") == first_use


def test_first_use_key_names_its_prefix() -> None:
    assert prefix_of(first_use_key(b"orders")) == b"orders"
    assert prefix_of(b"orders") is None
    assert not first_use_key(b"orders").decode().isprintable()  # as every transactional.id.prefix is


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"version": 2}, "has version 2, and only versions up to 1 are known"),
        ({"version": 0}, "has version 0"),
        ({"version": True}, "has version True"),
        ({"version": "\x1b[2J"}, r"has version '\\x1b\[2J'"),
        ({"time_ms": 10**400}, "first-use record: .*time_ms: .*is not a whole number"),
        ({"time_ms": -1}, "first-use record: .*time_ms: .*is not a whole number"),
        ({"partitions": "16"}, "first-use record: .*partitions: .*is not a whole number"),
        ({"replicas": True}, "first-use record: .*replicas: .*is not a whole number"),
        ({"topic_id": None}, "None is not text"),
        ({"topic_id": None, "checksum": 1}, "checksum"),
    ],
    ids=str,
)
def test_first_use_of_other_content_is_refused_by_name(changed: dict[str, Any], text: str) -> None:
    content = json.loads(FIRST_USE.to_bytes()) | changed
    if "checksum" not in changed:
        del content["checksum"]
        content = json.loads(to_record(content))
    with pytest.raises(ProtocolError, match=f"^here: .*{text}"):
        FirstUse.from_bytes(json.dumps(content).encode(), "here")


def test_error_about_a_first_use_is_short() -> None:
    with pytest.raises(ProtocolError) as error:
        FirstUse.from_bytes(json.dumps({"checksum": 1, "version": "\x1b[2J" * 10_000}).encode(), "here")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"checksum":1}'])
def test_other_data_than_a_first_use_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^here: this is not a first-use record: \w+\(.*\)\.$"):
        FirstUse.from_bytes(data, "here")


BATCH_START = BatchStart("p/q", OpenTransaction("p/q/driver", 1, 2, 2), TopicPartition("decisions", 3), 6, "q1", 9)


def test_the_last_batch_of_a_prefix_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    assert remembered_start("p/q") is None
    remember_start(BATCH_START)
    assert remembered_start("p/q") == BATCH_START
    assert remembered_start("p") is None
    assert len(list(tmp_path.iterdir())) == 1


def test_batch_start_kept_by_another_release_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    remember_start(BATCH_START)
    (kept,) = tmp_path.iterdir()
    for text in ("", "{}", "[]", '{"prefix":"p/q"}'):
        kept.write_text(text)
        assert remembered_start("p/q") is None


def test_without_a_local_directory_no_batch_start_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    remember_start(BATCH_START)
    assert remembered_start("p/q") is None
    assert caplog.text == ""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "gone"))
    remember_start(BATCH_START)
    assert remembered_start("p/q") is None
    assert "stays open until its timeout" in caplog.text
