"""`pyspark_kafka_sink`: Spark loses all Python data sources if such a module raises on import."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from support.fresh_process import run_strictly, without

ROOT = Path(__file__).resolve().parents[2]

USE = """
import pyspark_kafka_sink
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

source = pyspark_kafka_sink.DefaultSource
assert issubclass(source, DataSource) and source.name() == "kafka_sink"
for use in (
    lambda: source({}).schema(),
    lambda: source({}).writer(StructType(), False),
    lambda: source({}).streamWriter(StructType(), False),
):
    try:
        use()
    except ImportError as error:
        print(error)
"""


def use_without(name: str, error: str) -> list[str]:
    """Return the lines that each use prints if the import of `name` raises `error`."""
    done = run_strictly(without(name, error) + USE)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "requirement"),
    [
        ("kio", "kio<0.7,>=0.6.5"),
        ("numpy", "numpy>=1.23"),
        ("crc32c", "crc32c>=2.7"),
        ("lz4", "lz4>=4.3"),
        ("spark_kafka_sink", "spark-kafka-sink"),
    ],
)
def test_missing_package_is_named_when_the_format_is_used(name: str, requirement: str) -> None:
    lines = use_without(name, f"ModuleNotFoundError('No module named {name}', name={name!r})")
    assert len(lines) == 3
    for line in lines:
        assert line.startswith(f'format("kafka_sink") cannot be used: the package {name} is missing. Run: ')
        assert line.endswith(f" -m pip install '{requirement}'")


def test_missing_pyarrow_is_named_when_the_format_is_used() -> None:
    told = use_without("pyarrow", "ModuleNotFoundError('No module named pyarrow', name='pyarrow')")
    assert "the package pyarrow is missing" in told[0]
    assert "pip install 'pyarrow>=14'" in told[0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("ImportError('libcrc.so: wrong ELF class\\nand pages of advice')", "libcrc.so: wrong ELF class. If a package"),
        ("AttributeError('module has no attribute x')", "AttributeError: module has no attribute x. If a package"),
        ("SyntaxError('invalid syntax')", "SyntaxError: invalid syntax. If a package"),
    ],
)
def test_broken_package_is_reported_when_the_format_is_used(error: str, text: str) -> None:
    lines = use_without("crc32c", error)
    assert len(lines) == 3
    assert text in lines[0]
    assert "-m pip install --upgrade --force-reinstall 'spark-kafka-sink'" in lines[0]


def import_without(name: str, version: str = "3.5.7") -> str:
    """Return the error of the module's import if PySpark has this version, and `name` cannot be imported."""
    script = f"""
try:
    import pyspark
    pyspark.__version__ = {version!r}
except ImportError:
    pass
try:
    import pyspark_kafka_sink
except ImportError as error:
    print(error)
"""
    done = run_strictly(without(name) + script)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_pyspark_without_data_sources_is_named_with_the_calls_that_work() -> None:
    """Spark 3.5 itself looks for no such module."""
    told = import_without("pyspark.sql.datasource")
    assert 'format("kafka_sink") needs PySpark 4.0 or newer, and this is 3.5.7' in told
    assert "writeStream.foreachBatch(sink.write_batch)" in told


def test_missing_pyspark_is_named_with_the_python() -> None:
    told = import_without("pyspark")
    assert f"needs PySpark 4.0 or newer, and this Python ({sys.executable}) has none" in told


def test_python_too_old_is_named_when_the_format_is_used() -> None:
    older = "import pyspark.sql\nsys.version_info = (3, 9, 2, 'final', 0)\n"
    done = run_strictly(older + USE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "it needs Python 3.11 or newer, and this is 3.9.2. Set PYSPARK_PYTHON" in done.stdout


def test_front_module_is_valid_syntax_for_python_3_8() -> None:
    ast.parse((ROOT / "pyspark_kafka_sink.py").read_text(), feature_version=(3, 8))


def test_importing_the_front_module_loads_nothing_of_the_package() -> None:
    script = """
import pyspark.sql.datasource
before = set(sys.modules)
import pyspark_kafka_sink
print(sorted(set(sys.modules) - before))
"""
    done = run_strictly(script)
    assert (done.stdout, done.stderr) == ("['pyspark_kafka_sink']\n", "")
