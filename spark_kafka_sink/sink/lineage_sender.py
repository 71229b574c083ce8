"""Sends the events of lineage.py in a thread of its own, through OpenLineage's client.

A batch only appends to a queue. A receiver that is slow or down, or that refuses, costs events, never a batch: the
queue holds at most MOST_EVENTS, and what does not fit is dropped with a warning. The client is made in the thread, by
its own settings (OPENLINEAGE_URL, openlineage.yml), and each event is made there too.

One sender for each process: a thread does not survive a fork.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from spark_kafka_sink.sink.lineage_facts import LineageEvent

log = logging.getLogger(__name__)

MOST_EVENTS: Final = 1_000
EXIT_WAIT_S: Final = 2.0
"""How long the end of the user's program waits at most for the last events. A killed process loses them."""


class OpenLineageClient:
    """OpenLineage's own client, made when the first event comes. Used by the sender's thread."""

    def __init__(self) -> None:
        self._client: Any = None

    def __call__(self, event: LineageEvent) -> None:
        """Send the event. Raises whatever the client and its transport raise."""
        from spark_kafka_sink.sink.lineage_events import run_event

        if self._client is None:
            from openlineage import client

            self._client = client.OpenLineageClient()
        self._client.emit(run_event(event))


class LineageSender:
    """A queue of events, and the thread that sends them in their order. Any thread may call it."""

    def __init__(self, emit: Callable[[LineageEvent], object], most_events: int = MOST_EVENTS) -> None:
        """`emit` sends an event, or raises."""
        self._emit = emit
        self._most_events = most_events
        self._changed = threading.Condition()
        self._events: deque[LineageEvent] = deque()
        """With the one that is being sent, as the first."""
        self._thread: threading.Thread | None = None
        self._is_late = False
        """Whether a wait ended before the events were sent. Until they are, nothing waits for them."""
        self._is_failing = False
        self._is_dropping = False

    def put(self, event: LineageEvent) -> None:
        """Append an event. Never waits."""
        with self._changed:
            is_full = len(self._events) >= self._most_events
            if not is_full:
                self._events.append(event)
                self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kafka-sink-lineage", daemon=True)
                thread.start()  # raises if the system has no room for a thread: the next event tries again
                self._thread = thread
        if is_full and not self._is_dropping:
            log.warning("%d OpenLineage events wait for their receiver. Later ones are dropped.", self._most_events)
        self._is_dropping = is_full

    def wait(self, seconds: float) -> bool:
        """Wait until every event is sent or refused, at most `seconds`. Return whether it is so. Does not wait while
        the receiver still has not taken what an earlier call waited for.
        """
        with self._changed:
            if not self._is_late:
                self._is_late = not self._changed.wait_for(lambda: not self._events, seconds)
            return not self._is_late

    def wait_at_exit(self, seconds: float) -> None:
        """Wait as `wait`, also for a receiver that is late."""
        with self._changed:
            self._changed.wait_for(lambda: not self._events, seconds)
            if self._events:
                log.warning("%d OpenLineage events were not sent before the end of the program.", len(self._events))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events)
                event = self._events[0]
            self._send(event)
            with self._changed:
                self._events.popleft()
                self._is_late = self._is_late and bool(self._events)
                self._changed.notify_all()

    def _send(self, event: LineageEvent) -> None:
        """Send one event. The first failure in a row is logged: by its class and status, because the text of an error
        may show the receiver's address with its login.
        """
        try:
            self._emit(event)
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            what = type(error).__name__ if status is None else f"{type(error).__name__}, status {status}"
            level = logging.DEBUG if self._is_failing else logging.WARNING
            log.log(level, "OpenLineage events of %s are not received: %s", event.run.job, what)
            self._is_failing = True
            return
        if self._is_failing:
            log.warning("OpenLineage events are received again")
        self._is_failing = False


_senders: Final[dict[int, LineageSender]] = {}
"""By process id. A forked process has those of its parents too, without their threads."""


def process_sender() -> LineageSender:
    """Return this process's sender."""
    process = os.getpid()
    if (sender := _senders.get(process)) is None:
        new = LineageSender(OpenLineageClient())
        sender = _senders.setdefault(process, new)  # another thread may have been faster
        if sender is new:
            atexit.register(_at_exit, sender, process)
    return sender


def _at_exit(sender: LineageSender, process: int) -> None:
    if process == os.getpid():  # else this is a child of the sender's process, without its thread
        sender.wait_at_exit(EXIT_WAIT_S)
