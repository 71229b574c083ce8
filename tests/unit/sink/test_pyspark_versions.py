"""The error for a package that PySpark requires. tests/unit/test_package.py has the errors for PySpark itself."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import pyspark
import pytest

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.sink.pyspark_versions import OLDEST, is_older, map_in_arrow, refuse_doubled_rows


class FrameWithoutPandas:
    def mapInArrow(self, function: Any, schema: str) -> Any:  # noqa: N802 - Spark's name
        raise ImportError("[PACKAGE_NOT_INSTALLED] Pandas >= 2.2.0 must be installed; however, it was not found.")


def test_missing_pandas_is_named_with_the_calls_that_need_none() -> None:
    with pytest.raises(ImportError) as caught:
        map_in_arrow(FrameWithoutPandas(), lambda batches: batches, "n INT")  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith("KafkaSink.write and write_batch need a package on the driver, because PySpark")
    assert f"PySpark {pyspark.__version__} requires it for mapInArrow: [PACKAGE_NOT_INSTALLED] Pandas >= 2.2.0" in text
    assert f"{sys.executable} -m pip install" in text
    assert 'writeStream.format("kafka_sink")' in text


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [
        ("3.4.4", True),
        ("2.4", True),
        ("3.5.0", False),
        ("3.5.2-amzn-0", False),
        ("4.2.0.dev1", False),
        ("10.0", False),
        ("of a vendor", False),
    ],
)
def test_pyspark_before_3_5_is_too_old(version: str, is_refused: bool) -> None:
    assert is_older(version, OLDEST) == is_refused


@pytest.mark.parametrize(
    ("version", "most", "is_refused"),
    [
        ("4.0.5", "3", False),
        ("4.1.0", "3", True),
        ("4.1.4", "3", True),
        ("4.2.0", "3", True),
        ("4.2.1-amzn-0", "1", True),
        ("4.2.0", "-1", False),
        ("4.2.0", None, False),
        ("4.3.0", "3", False),
        ("4.20.0", "3", False),
    ],
)
def test_setting_with_which_spark_doubles_rows_is_refused(version: str, most: str | None, is_refused: bool) -> None:
    """Bug: the report counted up to twice the records that were written, and a decision would have, too. In 4.1 rows of
    Python functions were written twice.
    """
    refused = pytest.raises(ConfigError, match=rf"maxRecordsPerOutputBatch={most}: .* Set it to -1")
    with refused if is_refused else nullcontext():
        refuse_doubled_rows(version, most)
