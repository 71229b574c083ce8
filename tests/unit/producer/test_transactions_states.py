"""The table of states: all legal moves, and no other move."""

from __future__ import annotations

import pytest

from spark_kafka_sink.common.errors import IllegalStateError, KafkaError
from spark_kafka_sink.producer.transactions import State, StateMachine

S = State
LEGAL = {
    (S.UNINITIALIZED, S.INITIALIZING),
    (S.UNINITIALIZED, S.PREPARED),  # after a resume
    (S.INITIALIZING, S.READY),
    (S.INITIALIZING, S.UNINITIALIZED),  # refused, and requested again
    (S.INITIALIZING, S.ABORTABLE_ERROR),  # refused until an abort
    (S.READY, S.IN_TRANSACTION),
    (S.READY, S.INITIALIZING),
    (S.IN_TRANSACTION, S.PREPARED),
    (S.IN_TRANSACTION, S.COMMITTING),
    (S.IN_TRANSACTION, S.ABORTING),
    (S.IN_TRANSACTION, S.ABORTABLE_ERROR),
    (S.PREPARED, S.INITIALIZING),
    (S.PREPARED, S.COMMITTING),
    (S.PREPARED, S.ABORTING),
    (S.PREPARED, S.ABORTABLE_ERROR),
    (S.COMMITTING, S.READY),
    (S.COMMITTING, S.UNINITIALIZED),  # after a resume
    (S.COMMITTING, S.INITIALIZING),  # and another epoch is needed
    (S.COMMITTING, S.ABORTABLE_ERROR),
    (S.ABORTING, S.READY),
    (S.ABORTING, S.UNINITIALIZED),
    (S.ABORTING, S.INITIALIZING),
    (S.ABORTING, S.ABORTABLE_ERROR),
    (S.ABORTABLE_ERROR, S.ABORTABLE_ERROR),
    (S.ABORTABLE_ERROR, S.ABORTING),
    *((state, S.FATAL_ERROR) for state in S),
}


@pytest.mark.parametrize("target", State, ids=lambda state: f"to-{state.name}")
@pytest.mark.parametrize("source", State, ids=lambda state: f"from-{state.name}")
def test_state_changes_follow_the_table(source: State, target: State) -> None:
    machine = StateMachine()
    machine.state = source
    error = KafkaError("why")
    if (source, target) in LEGAL:
        machine.move_to(target, error)
        assert (machine.state, machine.error) == (target, error)
        return
    with pytest.raises(IllegalStateError) as caught:
        machine.move_to(target, error)
    assert source.value in str(caught.value)
    assert target.value in str(caught.value)
    assert (machine.state, machine.error) == (source, None)


def test_a_fatal_error_may_follow_another_and_nothing_else_may() -> None:
    machine = StateMachine()
    with pytest.raises(IllegalStateError, match="has no producer id"):
        machine.move_to(State.READY)
    machine.move_to(State.FATAL_ERROR, KafkaError("over"))
    with pytest.raises(IllegalStateError):
        machine.move_to(State.INITIALIZING)
    assert machine.has_fatal_error
    machine.move_to(State.FATAL_ERROR, KafkaError("again"))
    assert str(machine.error) == "again"
    assert machine.error.fatal
