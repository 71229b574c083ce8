"""One operation at a time; its outcome is kept until its caller gets it."""

from __future__ import annotations

import pytest
from support.fake_clock import FakeClock

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError
from spark_kafka_sink.producer.operations import OperationResult, PendingOperation

PLACE = TopicPartition("t", 0)


def ignore(_: object) -> None:
    """Enqueue nothing, or undo nothing."""


def test_wait_ends_with_the_result_or_time_limit() -> None:
    clock = FakeClock()
    result = OperationResult("commit_transaction")
    began_ms = clock.now_ms()
    assert not result.wait(clock, 700)
    assert clock.now_ms() - began_ms == 700
    assert not result.is_reported

    def finish(timeout_ms: int) -> None:
        assert timeout_ms == 1_000
        clock.advance(300)
        result.finish()

    clock.on_wait = finish
    assert result.wait(clock, 1_000)
    assert clock.now_ms() - began_ms == 1_000
    assert result.is_reported
    assert result.error is None


def test_the_first_outcome_counts() -> None:
    result = OperationResult("commit_transaction")
    first = KafkaError("first")
    result.finish(first)
    result.finish()
    assert result.is_done
    assert result.error is first


def test_operation_in_progress_is_joined_by_the_same_call_only() -> None:
    pending = PendingOperation(ignore)
    assert pending.joined("commit_transaction") is None
    result = pending.begin("commit_transaction", ignore)
    assert pending.joined("commit_transaction") is result
    with pytest.raises(IllegalStateError, match=r"abort_transaction was called while .*commit_transaction is open"):
        pending.joined("abort_transaction")
    with pytest.raises(IllegalStateError, match=r"begin_transaction was called while .*commit_transaction is open"):
        pending.ensure_none("begin_transaction")
    assert pending.is_under_way("commit_transaction")
    assert not pending.is_under_way("abort_transaction")


def test_same_operation_with_other_arguments_is_refused() -> None:
    pending = PendingOperation(ignore)
    result = pending.begin("send_offsets_to_transaction", ignore, {"a": 1})
    assert pending.joined("send_offsets_to_transaction", {"a": 1}) is result
    for is_done in (False, True):
        with pytest.raises(IllegalStateError, match=r"outcome of an earlier send_off.* it again with the arguments"):
            pending.joined("send_offsets_to_transaction", {"a": 2})
        if not is_done:
            result.finish()
    assert result.wait(FakeClock(), 10)
    assert pending.joined("send_offsets_to_transaction", {"a": 2}) is None


@pytest.mark.parametrize("error", [None, KafkaError("refused")])
def test_unread_outcome_goes_to_the_repeated_call(error: KafkaError | None) -> None:
    pending = PendingOperation(ignore)
    result = pending.begin("commit_transaction", ignore)
    assert not result.wait(FakeClock(), 10)
    pending.give_up(error)
    assert pending.joined("commit_transaction") is result
    assert result.wait(FakeClock(), 10)
    assert pending.joined("commit_transaction") is None
    pending.ensure_none("begin_transaction")


def test_no_operation_begins_before_a_success_is_read() -> None:
    pending = PendingOperation(ignore)
    pending.begin("commit_transaction", ignore).finish()
    with pytest.raises(IllegalStateError, match="call that again"):
        pending.joined("abort_transaction")
    with pytest.raises(IllegalStateError, match="call that again"):
        pending.ensure_none("begin_transaction")


def test_any_operation_may_begin_after_a_failure() -> None:
    pending = PendingOperation(ignore)
    pending.begin("commit_transaction", ignore).finish(KafkaError("refused"))
    assert pending.joined("abort_transaction") is None
    pending.ensure_none("begin_transaction")


def test_only_an_abort_overtakes_offsets() -> None:
    pending = PendingOperation(ignore)
    pending.begin("send_offsets_to_transaction", ignore)
    with pytest.raises(IllegalStateError):
        pending.joined("commit_transaction")
    assert pending.joined("abort_transaction") is None
    pending.begin("init_transactions", ignore)
    with pytest.raises(IllegalStateError):
        pending.joined("abort_transaction")


def test_last_refusal_is_forgotten_with_the_next_operation() -> None:
    pending = PendingOperation(ignore)
    pending.give_up(KafkaError("nothing to give up"))
    pending.last_refusal = KafkaError("not yet")
    pending.begin("commit_transaction", ignore)
    assert pending.last_refusal is None


def test_operation_after_the_close_gets_its_own_error() -> None:
    pending = PendingOperation(ignore)
    error = KafkaError("closed")
    pending.close(error)
    for _ in range(2):
        with pytest.raises(KafkaError, match="closed"):
            pending.ensure_none("begin_transaction")
    assert error.__traceback__ is None
