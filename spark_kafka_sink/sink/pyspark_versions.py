"""The PySpark that is there. The package does not require one, because a cluster brings its own, and versions differ.

| PySpark | |
|---|---|
| before 3.5 | refused |
| 3.5 | no Python data sources, so no `format("kafka_sink")` |
| 4.0 | data sources get Arrow batches in a batch write, and rows in a stream (row_interface.py) |
| 4.1 and newer | data sources get Arrow batches |

The import of this module raises ImportError if PySpark is missing or too old, with the versions and what to do. The
modules of this room that import PySpark when they are imported import this one first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Final

from spark_kafka_sink.common.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    WriteTask = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

OLDEST: Final = "3.5"
OLDEST_WITH_FORMAT: Final = "4.0"
CALLS_WITHOUT_FORMAT: Final = (
    "writeStream.foreachBatch(sink.write_batch), writeStream.foreach(sink), sink.write(df) and"
    " df.foreachPartition(sink.write_partition), with sink = KafkaSink(options)"
)
OUTPUT_RECORDS: Final = "spark.sql.execution.arrow.maxRecordsPerOutputBatch"
_INSTALL: Final = "-m pip install 'spark-kafka-sink[spark]'"


def _python() -> str:
    return sys.executable or "python"


def is_older(version: str, oldest: str) -> bool:
    """Compare major and minor number. A vendor's version may have any end, such as 3.5.2-amzn-0 or 4.2.0.dev1."""
    found, required = (re.match(r"(\d+)\.(\d+)", each) for each in (version, oldest))
    if found is None or required is None:
        return False
    return tuple(map(int, found.groups())) < tuple(map(int, required.groups()))


def _pyspark() -> str:
    """Return the version of PySpark. Raises ImportError if PySpark is missing or too old."""
    needs = f'KafkaSink and format("kafka_sink") need PySpark {OLDEST} or newer'
    try:
        version: str = import_module("pyspark").__version__
    except (ImportError, AttributeError) as error:  # of a folder that pip has emptied, Python makes a package
        raise ImportError(
            f"{needs}, and this Python ({_python()}) has none that works: {error}. Run the program with the Python of"
            f" your Spark, or install a PySpark: {_python()} {_INSTALL}. KafkaProducer works without PySpark."
        ) from error
    if is_older(version, OLDEST):
        raise ImportError(
            f"{needs}, and this is {version} ({_python()}). PySpark must have the version of your Spark, so use a newer"
            f" Spark. A newer PySpark for local use: {_python()} {_INSTALL} --upgrade."
        )
    return version


PYSPARK: Final = _pyspark()
"""The version of PySpark."""


def no_data_sources(cause: ImportError) -> ImportError:
    """Return the error for a PySpark without data sources in Python, whose import failed with `cause`."""
    return ImportError(
        f'format("kafka_sink") needs PySpark {OLDEST_WITH_FORMAT} or newer, and this is {PYSPARK}, which has'
        f" no data sources in Python ({cause}). These calls work: {CALLS_WITHOUT_FORMAT}."
    )


def has_arrow_writer(*, is_stream: bool) -> bool:
    """Return whether this PySpark gives Arrow batches to the writer of a stream, or of a batch write."""
    name = "DataSourceStreamArrowWriter" if is_stream else "DataSourceArrowWriter"
    return hasattr(import_module("pyspark.sql.datasource"), name)


def map_in_arrow(df: DataFrame, write_task: WriteTask, schema: str) -> DataFrame:
    """Call `df.mapInArrow`. Raises ImportError if the driver lacks a package that PySpark needs, mostly pandas."""
    try:
        return df.mapInArrow(write_task, schema)
    except ImportError as error:
        # Python 3.12 has no distutils, which PySpark 3.5 uses; setuptools has it
        missing = "setuptools" if error.name == "distutils" else "'pandas<3' pyarrow"
        raise ImportError(
            f"KafkaSink.write and write_batch need a package on the driver, because PySpark {PYSPARK} requires it for"
            f" mapInArrow: {error} Run: {_python()} -m pip install {missing}. Without it these calls"
            ' work: writeStream.format("kafka_sink"), df.write.format("kafka_sink"), writeStream.foreach(sink) and'
            " df.foreachPartition(sink.write_partition)."
        ) from error


def refuse_doubled_rows(version: str, most: str | None) -> None:
    """Raise ConfigError if Spark of this version, with this value of OUTPUT_RECORDS, hands over rows of Python
    functions twice: those of the query, and what the tasks of `write` report (SPARK-51769).
    """
    if most is not None and int(most) > 0 and re.match(r"4\.[12]\b", version):
        raise ConfigError(
            f"{OUTPUT_RECORDS}={most}: with this setting Spark 4.1 and 4.2 hand over rows of Python functions twice."
            " Set it to -1, or use Spark 4.3 or newer."
        )


def refuse_doubled_rows_in_task() -> None:
    """Raise ConfigError as `refuse_doubled_rows` does. Spark hands the settings of a session to its tasks, except to
    those of an RDD, such as of foreachPartition.
    """
    context = import_module("pyspark").TaskContext.get()
    if context is not None:
        refuse_doubled_rows(PYSPARK, context.getLocalProperty(OUTPUT_RECORDS))
