"""The record of a decision and the rule by which a task tells what is written already."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_kafka_sink.client.transaction_values import OpenTransaction
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, ProtocolError
from spark_kafka_sink.sink.decision import Decision, TaskTransaction, _checksum
from spark_kafka_sink.sink.mandate import Mandate, TaskOutcome, check_names, task_id

numbers = st.integers(0, 2**63 - 1)
tasks = st.builds(
    TaskTransaction,
    st.builds(OpenTransaction, st.text(), numbers, st.integers(0, 2**15 - 1), st.sampled_from([1, 2])),
    numbers,
    numbers,
)
decisions = st.builds(
    Decision,
    numbers,
    st.text(),
    st.integers(0, 253_402_300_799_999),
    numbers,
    numbers,
    st.lists(tasks, max_size=4).map(tuple),
    st.booleans(),
    st.booleans(),
)
decisions |= st.builds(
    replace,
    decisions,
    fingerprint=st.integers(0, 2**64 - 1),
    topic=st.none() | st.text(),
    takes_any_rows=st.booleans(),
)
DRIVER = OpenTransaction("P/driver", 7, 3, 2)
DECISION = Decision(4, "q", 1, 2, 9, (TaskTransaction(OpenTransaction("P/0", 8, 1, 2), 0, 9),))


@given(decisions)
def test_what_is_written_is_read(decision: Decision) -> None:
    assert Decision.from_bytes(decision.to_bytes(), "here") == decision


@given(decisions, st.data())
def test_a_changed_byte_is_noticed(decision: Decision, data: st.DataObject) -> None:
    written = bytearray(decision.to_bytes())
    at = data.draw(st.integers(0, len(written) - 1))
    written[at] ^= data.draw(st.integers(1, 255))
    try:
        read = Decision.from_bytes(bytes(written), "here")
    except ProtocolError:
        return
    assert read == decision  # another spelling of the same content


def endless() -> bytes:
    """Its checksum holds, and its batch id is no number that an int can be."""
    content = {key: value for key, value in json.loads(DECISION.to_bytes()).items() if key != "checksum"}
    content["batch_id"] = math.inf
    return json.dumps(content | {"checksum": _checksum(content)}).encode()


def test_a_finished_decision_carries_no_tasks_any_more() -> None:
    finished = DECISION.finished()
    assert finished.is_finished
    assert finished.tasks == ()
    assert (finished.batch_id, finished.query_id, finished.rows) == (4, "q", 9)


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b"null", b"\xff", b'{"checksum": 1}', b"[" * 100_000, endless()], ids=range(8)
)
def test_what_is_no_decision_is_refused_with_its_place(value: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"decisions-3, offset 9: "):
        Decision.from_bytes(value, "decisions-3, offset 9")


def test_a_newer_version_is_not_guessed_at() -> None:
    content = json.loads(DECISION.to_bytes()) | {"version": 3}
    with pytest.raises(ProtocolError, match="version 3, and only 2 and older ones are known"):
        Decision.from_bytes(json.dumps(content).encode(), "here")


def changed(**fields: Any) -> bytes:
    """The decision with other fields, and the checksum of those."""
    made = replace(DECISION, fingerprint=3, topic="t")
    content = {key: value for key, value in json.loads(made.to_bytes()).items() if key != "checksum"} | fields
    return json.dumps(content | {"checksum": _checksum(content)}).encode()


def with_task(*fields: Any) -> dict[str, Any]:
    return {"transactions": [list(fields)]}


@pytest.mark.parametrize(
    "fields",
    [
        *({name: value} for name in ("batch_id", "partitions", "rows") for value in (-1, 2**63, True, 1.0, "1", None)),
        *({"time_ms": value} for value in (-1, 253_402_300_800_000, True)),
        *({"fingerprint": value} for value in (-1, 2**64, True, None)),
        *({"version": value} for value in (0, True, "2", 2.0)),
        *({"state": value} for value in ("DECIDED", None, 1)),
        *({"query_id": value} for value in (None, 1)),
        {"topic": 1},
        *(with_task("P/0", value, 1, 2, 0, 9) for value in (-1, 2**63, True, "8")),
        *(with_task("P/0", 8, value, 2, 0, 9) for value in (-1, 2**15, False)),
        *(with_task("P/0", 8, 1, value, 0, 9) for value in (0, 3, True)),
        *(with_task("P/0", 8, 1, 2, value, 9) for value in (-1, True)),
        *(with_task("P/0", 8, 1, 2, 0, value) for value in (-1, True)),
        with_task(0, 8, 1, 2, 0, 9),
        with_task("P/0", 8, 1, 2, 0),
    ],
    ids=str,
)
def test_a_field_of_another_type_or_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=r"^decisions-3, offset 9: "):
        Decision.from_bytes(changed(**fields), "decisions-3, offset 9")


def test_a_decision_of_version_1_is_read_and_written_as_such() -> None:
    written = DECISION.to_bytes()
    assert json.loads(written)["version"] == 1
    assert "fingerprint" not in json.loads(written)
    read = Decision.from_bytes(written, "here")
    assert (read, read.fingerprint, read.topic) == (DECISION, None, None)


@pytest.mark.parametrize("name", ["payments", "P/driver", "P/", "P/1/2", "Q/0", "PP/0", "P/0.", "P/٣", "P/0\n", ""])
def test_a_decision_that_names_a_foreign_transaction_is_refused(name: str) -> None:
    task = TaskTransaction(OpenTransaction(name, 8, 1, 2), 0, 9)
    with pytest.raises(ProtocolError, match=r"^decisions-3, offset 9: .*batch 4 names .*'P'.*Nothing was done"):
        check_names(replace(DECISION, tasks=(task,)), "P", "decisions-3, offset 9")


@pytest.mark.parametrize("name", ["P/0", "P/12.3"])
def test_a_decision_names_tasks_of_its_prefix(name: str) -> None:
    check_names(replace(DECISION, tasks=(TaskTransaction(OpenTransaction(name, 8, 1, 2), 0, 9),)), "P", "here")


def test_a_thousand_tasks_fit_into_a_record() -> None:
    name = "spark-kafka-sink-" + "0" * 24
    many = [TaskTransaction(OpenTransaction(f"{name}/{n}", 2**40 + n, 30_000, 2), n, 10**9) for n in range(8_000)]
    decision = Decision(10**9, "q" * 36, 2**41, 8_000, 10**12, tuple(many))
    assert len(decision.to_bytes()) < 1_000_000


def mandate(last: int | None, query_id: str = "q") -> Mandate:
    return Mandate("P", DRIVER, TopicPartition("decisions", 3), last, query_id if last is not None else "")


def test_a_batch_is_written_already_if_it_is_the_last_one_decided() -> None:
    assert not mandate(None).is_written_already(0, "q")
    assert mandate(4).is_written_already(4, "q")
    assert not mandate(4).is_written_already(5, "q")
    assert not mandate(4).is_written_already(7, "q")
    assert (mandate(None).next_batch_id, mandate(4).next_batch_id) == (0, 5)


def test_an_earlier_batch_is_refused_with_what_to_change() -> None:
    with pytest.raises(IllegalStateError, match=r"Batch 3 comes after batch 4.*'P'.*another transactional\.id\.prefix"):
        mandate(4).is_written_already(3, "q")


@pytest.mark.parametrize("batch_id", [3, 4, 5])
@pytest.mark.parametrize("query_id", ["another", ""])
def test_another_querys_prefix_is_refused(batch_id: int, query_id: str) -> None:
    with pytest.raises(IllegalStateError, match=r"'P' belongs to query q.*transactional\.id\.prefix of its own"):
        mandate(4).is_written_already(batch_id, query_id)


@given(tasks, st.booleans(), st.text())
def test_what_a_task_tells_survives_both_ways_to_the_driver(
    written: TaskTransaction, has_rows: bool, text: str
) -> None:
    outcome = TaskOutcome(mandate(4, text), 5, text, written.partition, written.rows, written if has_rows else None)
    assert TaskOutcome.from_json(outcome.to_json()) == outcome
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_a_marker_tells_whose_it_is() -> None:
    task = DECISION.tasks[0]
    assert task.marker_text == "producer_id=8 epoch=1 rows=9"


def test_a_second_attempt_has_an_id_of_its_own() -> None:
    assert (task_id("P", 3, 0), task_id("P", 3, 2)) == ("P/3", "P/3.2")
