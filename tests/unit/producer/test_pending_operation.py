"""One operation at a time, and its outcome kept until it is heard."""

from __future__ import annotations

import pytest
from support.fake_clock import FakeClock

from spark_kafka_sink.common.errors import IllegalStateError, KafkaError
from spark_kafka_sink.producer.pending_operation import PendingOperation, TransactionalResult


def test_a_result_is_waited_for_until_it_comes_or_time_is_up() -> None:
    clock = FakeClock()
    result = TransactionalResult("commit_transaction")
    began_ms = clock.now_ms()
    assert not result.wait(clock, 700)
    assert clock.now_ms() - began_ms == 700
    assert not result.is_heard

    def finish(timeout_ms: int) -> None:
        assert timeout_ms == 1_000
        clock.advance(300)
        result.finish()

    clock.on_wait = finish
    assert result.wait(clock, 1_000)
    assert clock.now_ms() - began_ms == 1_000
    assert result.is_heard
    assert result.error is None


def test_the_first_outcome_counts() -> None:
    result = TransactionalResult("commit_transaction")
    first = KafkaError("first")
    result.finish(first)
    result.finish()
    assert result.is_done
    assert result.error is first


def test_an_operation_under_way_is_joined_by_the_same_and_refused_to_others() -> None:
    pending = PendingOperation()
    assert pending.joined("commit_transaction") is None
    result = pending.begin("commit_transaction")
    assert pending.joined("commit_transaction") is result
    with pytest.raises(IllegalStateError, match=r"abort_transaction was called while .*commit_transaction is open"):
        pending.joined("abort_transaction")
    with pytest.raises(IllegalStateError, match=r"begin_transaction was called while .*commit_transaction is open"):
        pending.ensure_none("begin_transaction")
    assert pending.is_under_way("commit_transaction")
    assert not pending.is_under_way("abort_transaction")


def test_the_same_operation_with_other_arguments_is_another() -> None:
    pending = PendingOperation()
    result = pending.begin("send_offsets_to_transaction", {"a": 1})
    assert pending.joined("send_offsets_to_transaction", {"a": 1}) is result
    for is_done in (False, True):
        with pytest.raises(IllegalStateError, match=r"outcome of an earlier send_off.* it again with the arguments"):
            pending.joined("send_offsets_to_transaction", {"a": 2})
        if not is_done:
            result.finish()
    assert result.wait(FakeClock(), 10)
    assert pending.joined("send_offsets_to_transaction", {"a": 2}) is None


@pytest.mark.parametrize("error", [None, KafkaError("refused")])
def test_an_outcome_that_nobody_heard_is_told_to_who_asks_again(error: KafkaError | None) -> None:
    pending = PendingOperation()
    result = pending.begin("commit_transaction")
    assert not result.wait(FakeClock(), 10)
    pending.give_up(error)
    assert pending.joined("commit_transaction") is result
    assert result.wait(FakeClock(), 10)
    assert pending.joined("commit_transaction") is None
    pending.ensure_none("begin_transaction")


def test_nothing_else_begins_before_a_success_is_heard() -> None:
    pending = PendingOperation()
    pending.begin("commit_transaction").finish()
    with pytest.raises(IllegalStateError, match="call that again"):
        pending.joined("abort_transaction")
    with pytest.raises(IllegalStateError, match="call that again"):
        pending.ensure_none("begin_transaction")


def test_after_a_failure_anything_may_begin() -> None:
    pending = PendingOperation()
    pending.begin("commit_transaction").finish(KafkaError("refused"))
    assert pending.joined("abort_transaction") is None
    pending.ensure_none("begin_transaction")


def test_an_abort_overtakes_offsets_and_nothing_else_does() -> None:
    pending = PendingOperation()
    pending.begin("send_offsets_to_transaction")
    with pytest.raises(IllegalStateError):
        pending.joined("commit_transaction")
    assert pending.joined("abort_transaction") is None
    pending.begin("init_transactions")
    with pytest.raises(IllegalStateError):
        pending.joined("abort_transaction")


def test_what_was_last_refused_is_forgotten_with_the_next_operation() -> None:
    pending = PendingOperation()
    pending.give_up(KafkaError("nothing to give up"))
    pending.last_refusal = KafkaError("not yet")
    pending.begin("commit_transaction")
    assert pending.last_refusal is None


def test_who_comes_after_the_close_is_told_by_an_error_of_its_own() -> None:
    pending = PendingOperation()
    error = KafkaError("closed")
    pending.close(error)
    for _ in range(2):
        with pytest.raises(KafkaError, match="closed"):
            pending.ensure_none("begin_transaction")
    assert error.__traceback__ is None
