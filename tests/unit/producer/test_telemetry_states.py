"""The states of client telemetry, without requests: what is due after each event, and when.

The cases are those of Java's ClientTelemetryReporterTest and ClientTelemetryUtilsTest, as far as they are about states.
"""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.producer.telemetry import REACTIONS, Code, Reaction, State, TelemetryStates
from spark_kafka_sink.protocol.telemetry import DEFAULT_PUSH_INTERVAL_MS, Subscription

NOW_MS = 1_000_000
INTERVAL_MS = 20_000
CLIENT = uuid.UUID(int=7, version=4)
LATER, DEFAULT = NOW_MS + INTERVAL_MS, NOW_MS + DEFAULT_PUSH_INTERVAL_MS


class Middle(random.Random):
    """Every random number is the middle of its range."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def subscription(*prefixes: str) -> Subscription:
    return Subscription(CLIENT, 1, prefixes, INTERVAL_MS)


def in_state(state: State, subscribed: Subscription | None) -> TelemetryStates:
    rng = Middle()
    states = TelemetryStates(rng, ExponentialBackoff.doubling(1_000, DEFAULT_PUSH_INTERVAL_MS, rng))
    states.state, states.due_ms, states.subscription = state, NOW_MS, subscribed
    return states


NONE, SOME, EMPTY = None, subscription("org.apache"), subscription()
AT_ONCE, WAITS, STOPS = Reaction.ASK_AT_ONCE, Reaction.ASK_LATER, Reaction.STOP


@pytest.mark.parametrize(
    ("state", "subscribed", "event", "then", "due_ms"),
    [
        # What is due is sent.
        ("NOT_OFFERED", NONE, ("offered", NOW_MS), "SUBSCRIPTION_NEEDED", NOW_MS),
        ("SUBSCRIPTION_NEEDED", NONE, ("sent",), "SUBSCRIPTION_IN_PROGRESS", FOREVER_MS),
        ("PUSH_NEEDED", SOME, ("sent",), "PUSH_IN_PROGRESS", FOREVER_MS),
        ("TERMINATING_PUSH_NEEDED", SOME, ("sent",), "TERMINATING_PUSH_IN_PROGRESS", FOREVER_MS),
        # Answers.
        ("SUBSCRIPTION_IN_PROGRESS", NONE, ("subscribed", SOME, NOW_MS), "PUSH_NEEDED", LATER),
        ("SUBSCRIPTION_IN_PROGRESS", NONE, ("subscribed", EMPTY, NOW_MS), "SUBSCRIPTION_NEEDED", LATER),
        ("SUBSCRIPTION_IN_PROGRESS", SOME, ("subscribed", EMPTY, NOW_MS), "SUBSCRIPTION_NEEDED", LATER),
        ("TERMINATING_PUSH_NEEDED", SOME, ("subscribed", EMPTY, NOW_MS), "TERMINATING_PUSH_NEEDED", NOW_MS),
        ("PUSH_IN_PROGRESS", SOME, ("pushed", NOW_MS), "PUSH_NEEDED", LATER),
        ("TERMINATING_PUSH_IN_PROGRESS", SOME, ("pushed", NOW_MS), "TERMINATED", FOREVER_MS),
        ("PUSH_NEEDED", SOME, ("nothing_to_push", NOW_MS), "SUBSCRIPTION_NEEDED", LATER),
        ("TERMINATING_PUSH_NEEDED", SOME, ("nothing_to_push", NOW_MS), "TERMINATED", FOREVER_MS),
        # Errors of a push.
        ("PUSH_IN_PROGRESS", SOME, ("refused", AT_ONCE, NOW_MS), "SUBSCRIPTION_NEEDED", NOW_MS),
        ("PUSH_IN_PROGRESS", SOME, ("refused", WAITS, NOW_MS), "SUBSCRIPTION_NEEDED", LATER),
        ("PUSH_IN_PROGRESS", SOME, ("refused", STOPS, NOW_MS), "TERMINATED", FOREVER_MS),
        ("TERMINATING_PUSH_IN_PROGRESS", SOME, ("refused", AT_ONCE, NOW_MS), "TERMINATED", FOREVER_MS),
        # Errors of a question: never at once again.
        ("SUBSCRIPTION_IN_PROGRESS", NONE, ("refused", AT_ONCE, NOW_MS), "SUBSCRIPTION_NEEDED", DEFAULT),
        ("SUBSCRIPTION_IN_PROGRESS", NONE, ("refused", WAITS, NOW_MS), "SUBSCRIPTION_NEEDED", DEFAULT),
        ("SUBSCRIPTION_IN_PROGRESS", SOME, ("refused", WAITS, NOW_MS), "SUBSCRIPTION_NEEDED", LATER),
        ("SUBSCRIPTION_IN_PROGRESS", NONE, ("refused", STOPS, NOW_MS), "TERMINATED", FOREVER_MS),
        # No answer.
        ("SUBSCRIPTION_IN_PROGRESS", NONE, ("unanswered", NOW_MS), "SUBSCRIPTION_NEEDED", NOW_MS + 1_000),
        ("PUSH_IN_PROGRESS", SOME, ("unanswered", NOW_MS), "PUSH_NEEDED", LATER),
        ("TERMINATING_PUSH_IN_PROGRESS", SOME, ("unanswered", NOW_MS), "TERMINATED", FOREVER_MS),
        # The producer closes.
        ("NOT_OFFERED", NONE, ("terminate", NOW_MS), "TERMINATED", FOREVER_MS),
        ("SUBSCRIPTION_NEEDED", NONE, ("terminate", NOW_MS), "TERMINATED", FOREVER_MS),
        ("SUBSCRIPTION_NEEDED", SOME, ("terminate", NOW_MS), "TERMINATED", FOREVER_MS),
        ("SUBSCRIPTION_IN_PROGRESS", NONE, ("terminate", NOW_MS), "TERMINATED", FOREVER_MS),
        ("SUBSCRIPTION_IN_PROGRESS", EMPTY, ("terminate", NOW_MS), "TERMINATED", FOREVER_MS),
        ("SUBSCRIPTION_IN_PROGRESS", SOME, ("terminate", NOW_MS), "TERMINATING_PUSH_NEEDED", NOW_MS),
        ("PUSH_NEEDED", SOME, ("terminate", NOW_MS), "TERMINATING_PUSH_NEEDED", NOW_MS),
        ("PUSH_IN_PROGRESS", SOME, ("terminate", NOW_MS), "TERMINATING_PUSH_NEEDED", NOW_MS),
        ("TERMINATING_PUSH_IN_PROGRESS", SOME, ("terminate", NOW_MS), "TERMINATING_PUSH_IN_PROGRESS", NOW_MS),
        # The end is final.
        ("TERMINATED", SOME, ("terminate", NOW_MS), "TERMINATED", NOW_MS),
        ("TERMINATED", SOME, ("refused", WAITS, NOW_MS), "TERMINATED", NOW_MS),
        ("TERMINATED", SOME, ("offered", NOW_MS), "TERMINATED", NOW_MS),
        ("TERMINATED", SOME, ("delay", LATER), "TERMINATED", NOW_MS),
        ("PUSH_NEEDED", SOME, ("stop",), "TERMINATED", FOREVER_MS),
    ],
)
def test_event_leads_to_state_and_time(
    state: str, subscribed: Subscription | None, event: tuple[Any, ...], then: str, due_ms: int
) -> None:
    states = in_state(State[state], subscribed)
    name, *arguments = event
    getattr(states, name)(*arguments)
    assert (states.state, states.due_ms) == (State[then], due_ms)


def test_every_code_of_the_kip_has_its_reaction() -> None:
    """ClientTelemetryUtilsTest.testMaybeFetchErrorIntervalMs."""
    assert {code.name: REACTIONS[code].name for code in Code} == {
        "INVALID_REQUEST": "STOP",
        "INVALID_RECORD": "STOP",
        "UNSUPPORTED_VERSION": "STOP",
        "UNKNOWN_SUBSCRIPTION_ID": "ASK_AT_ONCE",
        "UNSUPPORTED_COMPRESSION_TYPE": "ASK_AT_ONCE",
        "TELEMETRY_TOO_LARGE": "ASK_LATER",
        "THROTTLING_QUOTA_EXCEEDED": "ASK_LATER",
    }


def test_first_push_comes_after_half_to_one_and_a_half_intervals() -> None:
    """ClientTelemetryReporterTest.testComputeStaggeredIntervalMs."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    waits = []
    for _ in range(200):
        states = in_state(State.SUBSCRIPTION_IN_PROGRESS, None)
        states._rng = rng
        states.subscribed(SOME, NOW_MS)
        waits.append(states.due_ms - NOW_MS)
    assert INTERVAL_MS * 0.5 <= min(waits) < INTERVAL_MS * 0.6, f"seed {seed}"
    assert INTERVAL_MS * 1.4 < max(waits) <= INTERVAL_MS * 1.5, f"seed {seed}"


def test_pushes_without_an_answer_come_less_and_less_often() -> None:
    """A plugin that hangs holds up records until the connection is closed: this must not happen at each interval."""
    states = in_state(State.PUSH_NEEDED, SOME)
    waits = []
    for _ in range(8):
        states.sent()
        states.unanswered(NOW_MS)
        waits.append((states.due_ms - NOW_MS) // INTERVAL_MS)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 64]
    states.sent()
    states.pushed(NOW_MS)
    assert states.due_ms == LATER


def test_lost_questions_wait_twice_as_long_each_time_and_never_longer_than_the_interval() -> None:
    states = in_state(State.SUBSCRIPTION_NEEDED, SOME)
    waits = []
    for _ in range(7):
        states.sent()
        states.unanswered(NOW_MS)
        waits.append(states.due_ms - NOW_MS)
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, INTERVAL_MS, INTERVAL_MS]
    states.sent()
    states.subscribed(SOME, NOW_MS)
    states.refused(AT_ONCE, NOW_MS)
    states.sent()
    states.unanswered(NOW_MS)
    assert states.due_ms == NOW_MS + 1_000
