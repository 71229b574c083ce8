"""A peer and a selector for every test of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from support.peer import Peer

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.network.selector import Selector


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def new_peer() -> Iterator[Callable[..., Peer]]:
    """Make peers; the argument is the size of the receive buffer. They are closed also if the test fails."""
    with ExitStack() as made:
        yield lambda receive_buffer=None: made.enter_context(closing(Peer(receive_buffer)))


@pytest.fixture
def selector() -> Iterator[Selector]:
    made = Selector(SystemClock(), connections_max_idle_ms=540_000)
    yield made
    made.close_all()
