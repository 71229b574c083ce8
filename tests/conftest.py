"""What every test may use, and what holds for all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

pytest_plugins = [
    "spark_kafka_sink.local.pytest_plugin",
    "support.spark_fixture",
    "support.secured_broker",
    "support.pyspark_results",
]

# Hypothesis gives an example 200 ms of the wall clock, but where CI is set: a machine that stalls is no failure.
settings.register_profile("no deadline", settings(), deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def _level_of_the_package() -> Iterator[None]:
    """A data source's commit sets a level where there is none; the next test must not find it."""
    log = logging.getLogger("spark_kafka_sink")
    level = log.level
    yield
    log.setLevel(level)
