"""Where Spark finds `format("kafka_sink")` without registration: Spark looks for a `DefaultSource` in every top-level
module whose name begins with `pyspark_`.

Spark loses all Python data sources when one such module raises on import. So this module needs only PySpark, imports
the package when the format is used, and reports then what is missing. Its syntax suits every Python that runs Spark 4.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from pyspark.sql.types import StructType

    from spark_kafka_sink.sink.data_source import KafkaBatchWriter, KafkaSinkDataSource, KafkaStreamWriter

try:
    from pyspark.sql.datasource import DataSource
except Exception:  # before PySpark 4.0, which looks for no data source either
    __all__: list[str] = []
else:
    __all__ = ["DefaultSource"]

    class DefaultSource(DataSource):
        """`KafkaSinkDataSource`, imported when Spark asks for a schema or a writer."""

        def __init__(self, options: MutableMapping[str, str]) -> None:
            self.options = options

        @classmethod
        def name(cls) -> str:
            return "kafka_sink"

        def schema(self) -> StructType:
            """Raise ConfigError: kafka_sink only writes. Raises ImportError if a package is missing."""
            return _sink(self.options).schema()

        def writer(self, schema: StructType, overwrite: bool) -> KafkaBatchWriter:
            """Return `KafkaSinkDataSource.writer`. Raises ImportError if a package is missing."""
            return _sink(self.options).writer(schema, overwrite)

        def streamWriter(self, schema: StructType, overwrite: bool) -> KafkaStreamWriter:  # noqa: N802 - Spark's name
            """Return `KafkaSinkDataSource.streamWriter`. Raises ImportError if a package is missing."""
            return _sink(self.options).streamWriter(schema, overwrite)


def _sink(options: MutableMapping[str, str]) -> KafkaSinkDataSource:
    if sys.version_info < (3, 11):  # noqa: UP036 - pip refuses an older one, a copied package does not
        version = ".".join(map(str, sys.version_info[:3]))
        _fail(f"it needs Python 3.11 or newer, and this is {version}. Set PYSPARK_PYTHON to a newer one.")
    try:
        module: Any = import_module("spark_kafka_sink.sink.data_source")
    except Exception as error:
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package:
            _fail(f"the package {package} is missing. Run: {_python()} -m pip install '{_required(package)}'", error)
        command = f"{_python()} -m pip install --upgrade --force-reinstall 'spark-kafka-sink'"
        _fail(f"{_first_line(error)}. If a package is broken or too old, run: {command}", error)
    source: KafkaSinkDataSource = module.KafkaSinkDataSource(options)
    return source


def _fail(reason: str, cause: BaseException | None = None) -> NoReturn:
    raise ImportError(f'format("kafka_sink") cannot be used: {reason}') from cause


def _python() -> str:
    return sys.executable or "python"


def _first_line(error: BaseException) -> str:
    """Return the text of a failed import without the pages that numpy adds; the cause has them."""
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".") if lines else "no reason was given"
    return text if type(error) is ImportError else f"{type(error).__name__}: {text}"


def _required(package: str) -> str:
    """Return the requirement for `package` by the installed metadata, or its name if there is none."""
    from importlib import metadata

    try:
        requirements = metadata.requires("spark-kafka-sink") or []
    except metadata.PackageNotFoundError:
        requirements = []
    named = (each for each in requirements if ";" not in each and re.split(r"[^\w-]", each)[0] == package)
    return next(named, package.replace("_", "-"))
