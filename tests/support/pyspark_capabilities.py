"""What the PySpark of this run can do. A test that needs more is skipped, and docs/pyspark-versions.md shows why."""

from __future__ import annotations

import re
from typing import NamedTuple

import pyspark
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

RELEASE = tuple(map(int, re.findall(r"\d+", pyspark.__version__)[:2]))


FAILURES = (PySparkException, Py4JJavaError)
"""The errors of a failed call: before PySpark 4.2 some are py4j's own."""


class Capability(NamedTuple):
    is_there: bool
    lacking: str
    """The reason of a skip: what PySpark lacks."""

    @property
    def needed(self) -> pytest.MarkDecorator:
        """Skips a test, or one of its parameters, where the capability is missing."""
        return pytest.mark.skipif(not self.is_there, reason=self.lacking)


FORMAT = Capability(RELEASE >= (4, 0), "Spark 3.5 has no data sources in Python")
BYTE_LIMIT = Capability(RELEASE >= (4, 1), "Spark before 4.1 has no limit of bytes for Arrow batches")
SAME_NAME = Capability(RELEASE >= (4, 1), "Spark 4.0 refuses to register a format that it has found by itself")
PARTITIONS_OF_CONNECT = Capability(RELEASE >= (4, 0), "Spark Connect 3.5 has no foreachPartition")
VARIANT = Capability(RELEASE >= (4, 0), "Spark 3.5 has no variants")
WORKER_LOGS = Capability(RELEASE >= (4, 1), "Spark before 4.1 does not capture the logs of workers")
NEW_CHECKPOINT_CHECK = Capability(RELEASE >= (4, 2), "Spark before 4.2 takes such a checkpoint")

each_form = pytest.mark.parametrize("form", [pytest.param("format", marks=FORMAT.needed), "foreachBatch"])
"""The forms of a stream that can be exactly once."""


def without_format(*interfaces: str) -> list[str]:
    """The interfaces of write_job.py, without those of a data source where PySpark has none."""
    return [each for each in interfaces if FORMAT.is_there or each not in ("register", "format", "stream")]
