"""The definitions of a pipeline under test: two flows into one sink. Its folder has their files and `options.json`."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

FOLDER = Path(__file__).resolve().parents[1]

dp.create_sink("rows", format="kafka_sink", options=json.loads((FOLDER / "options.json").read_text()))


def rows_of(flow: str) -> DataFrame:
    """A file is a batch."""
    reader = SparkSession.active().readStream.schema("key STRING, value STRING").option("maxFilesPerTrigger", 1)
    return reader.json(str(FOLDER / flow))


@dp.append_flow(target="rows")
def first() -> DataFrame:
    return rows_of("first")


@dp.append_flow(target="rows")
def second() -> DataFrame:
    return rows_of("second")
