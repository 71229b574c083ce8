"""Steps that several tests of the transactional producer share, on a cluster of either transaction.version."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.producer_harness import TOPIC
from support.transaction_harness import GROUP, PLACE, TransactionHarness

from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.protocol.versions import ApiKey

both_versions = pytest.mark.parametrize("version", [1, 2])
SMALL = {"batch.size": "1"}
SHORT = {**SMALL, "delivery.timeout.ms": "4000", "request.timeout.ms": "1000", "max.block.ms": "20000"}
OFFSETS = {PLACE: (7, None)}

Step = Callable[[TransactionHarness], None]
STEPS: dict[str, tuple[int, int, Step]] = {
    "init": (2, ApiKey.INIT_PRODUCER_ID, lambda harness: harness.producer.init_transactions()),
    "partitions": (1, ApiKey.ADD_PARTITIONS_TO_TXN, lambda harness: whole_transaction(harness)),
    "group": (1, ApiKey.ADD_OFFSETS_TO_TXN, lambda harness: whole_transaction(harness)),
    "offsets-1": (1, ApiKey.TXN_OFFSET_COMMIT, lambda harness: whole_transaction(harness)),
    "offsets-2": (2, ApiKey.TXN_OFFSET_COMMIT, lambda harness: whole_transaction(harness)),
    "end-1": (1, ApiKey.END_TXN, lambda harness: whole_transaction(harness)),
    "end-2": (2, ApiKey.END_TXN, lambda harness: whole_transaction(harness)),
}
every_request = pytest.mark.parametrize("step", STEPS)


def whole_transaction(harness: TransactionHarness) -> None:
    if harness.state is State.UNINITIALIZED:
        harness.producer.init_transactions()
    harness.producer.begin_transaction()
    harness.send(b"a", partition=0)
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.commit_transaction()


def finish(harness: TransactionHarness) -> None:
    """Check that the records and offsets are committed once, and that the next transaction works."""
    if harness.committed() == []:
        whole_transaction(harness)
    assert harness.committed() == [b"a"]
    assert harness.offsets() == {(TOPIC, 0): (7, None, -1)}
    harness.commit(b"b")
    assert harness.committed() == [b"a", b"b"]
    assert harness.memory_in_use == 0


def warm(version: int, settings: dict[str, str] | None = None, partitions: int = 2) -> TransactionHarness:
    """Complete a transaction, so that leaders know the producer, and begin another one."""
    harness = TransactionHarness(version, settings or SMALL, partitions=partitions)
    harness.producer.init_transactions()
    harness.commit(b"warm-up")
    harness.producer.begin_transaction()
    harness.send(b"first", partition=0)
    harness.settle()
    harness.deliveries.clear()
    harness.cluster.requests.clear()
    return harness


def aborted_and_next_works(harness: TransactionHarness) -> None:
    """Abort after `warm`, and check that the next transaction works."""
    harness.producer.abort_transaction()
    assert harness.memory_in_use == 0
    assert harness.committed() == [b"warm-up"]
    for number in range(3):
        harness.commit(b"next %d" % number, b"more %d" % number)
    expected = [b"warm-up"] + [text % number for number in range(3) for text in (b"next %d", b"more %d")]
    assert harness.committed() == expected
