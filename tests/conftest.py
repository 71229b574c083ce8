"""Fixtures and settings of all tests."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Images often forbid Python to keep bytecode. Then each of some hundred Python workers compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest_plugins = [
    "spark_kafka_sink.local.pytest_plugin",
    "support.spark_fixture",
    "support.secured_broker",
    "support.pyspark_results",
]

# By default Hypothesis fails an example after 200 ms, unless CI is set. A slow machine must not fail a test.
settings.register_profile("no deadline", settings(), deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def _level_of_the_package() -> Iterator[None]:
    """Restore the log level, which a commit of the data source sets if there is none."""
    log = logging.getLogger("spark_kafka_sink")
    level = log.level
    yield
    log.setLevel(level)
