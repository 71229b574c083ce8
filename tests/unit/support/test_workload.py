"""The ledger of the fault matrix finds each kind of anomaly, and the workload waits for acknowledgements."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.workload import Ledger, Workload

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.futures import RecordMetadata, RunMetadata

PLACE = ("t", 0)


def run_of(records: int) -> RunMetadata:
    return RunMetadata("t", 0, 7, records, -1, 10)


def test_one_outcome_of_each_record_passes() -> None:
    ledger = Ledger("l")
    ledger.settle(ledger.add(PLACE), 5, None)
    ledger.of_columns([ledger.add(PLACE), ledger.add(PLACE)])(run_of(2), None)
    ledger.check()
    assert [record.offset for record in ledger.sent] == [5, 7, 8]


def test_a_second_outcome_of_a_row_is_found() -> None:
    """Bug: it was an assertion in a callback. Errors there are only logged, and fail no test."""
    ledger = Ledger("l")
    callback = ledger.of_row(ledger.add(PLACE))
    callback(RecordMetadata(*PLACE, -1, -1, -1, -1), KafkaError("no"))
    callback(RecordMetadata(*PLACE, -1, -1, -1, -1), KafkaError("no"))
    with pytest.raises(AssertionError, match="1 outcomes too many"):
        ledger.check()
    assert len(ledger.errors) == 1


def test_a_second_outcome_of_a_block_is_found() -> None:
    ledger = Ledger("l")
    callback = ledger.of_columns([ledger.add(PLACE), ledger.add(PLACE)])
    callback(run_of(1), None)
    callback(run_of(2), None)
    with pytest.raises(AssertionError, match="1 outcomes too many"):
        ledger.check()


def test_records_that_failed_are_no_acknowledgements() -> None:
    """Bug: the first failure after a fault was counted as the end of the fault."""
    producer: Any = None
    work = Workload(producer, [PLACE], random.Random(0))
    for error in (None, KafkaError("no"), None):
        work.ledger.settle(work.ledger.add(PLACE), 1, error)
    sent = iter([KafkaError("no"), KafkaError("no"), None, KafkaError("no"), None])

    class Records(list[Any]):
        """Sends and settles one more record at each look."""

        def __getitem__(self, at: Any) -> Any:
            error = next(sent)
            record = work.ledger.add(("other", 0))
            work.ledger.settle(record, 1, error)
            self.append(record)
            return super().__getitem__(at)

    work.ledger.by_place[PLACE] = Records(work.ledger.by_place[PLACE])
    work.await_acknowledged(2)
    assert next(sent, "all of them") == "all of them"
