"""A peer and a selector for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

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
def selector() -> Iterator[Selector]:
    made = Selector(SystemClock(), connections_max_idle_ms=540_000)
    yield made
    made.close_all()
