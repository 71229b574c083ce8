"""`pyspark_kafka_sink`: Spark loses all Python data sources if such a module raises on import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.fresh_process import run_strictly

ROOT = Path(__file__).resolve().parents[2]

BLOCK = """
import importlib.abc

class Blocked(importlib.abc.MetaPathFinder):
    def __init__(self, name, error):
        self.name, self.error = name, error

    def find_spec(self, name, path=None, target=None):
        if name == self.name or name.startswith(self.name + "."):
            raise self.error
"""

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
    done = run_strictly(f"{BLOCK}\nsys.meta_path.insert(0, Blocked({name!r}, {error}))\n{USE}")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "requirement"),
    [
        ("kio", "kio<0.7,>=0.6.5"),
        ("numpy", "numpy>=2.0"),
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
    lines = use_without("pyarrow", "ModuleNotFoundError('No module named pyarrow', name='pyarrow')")
    assert "the package pyarrow is missing" in lines[0]
    assert "pip install 'pyarrow>=18'" in lines[0]


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


def test_pyspark_without_arrow_writers_is_named_by_its_version() -> None:
    older = "import pyspark.sql.datasource\ndel pyspark.sql.datasource.DataSourceStreamArrowWriter\n"
    done = run_strictly(f"{older}pyspark.__version__ = '4.0.1'\n{USE}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "needs PySpark 4.1 or newer, and this is 4.0.1" in done.stdout


def test_pyspark_without_data_sources_gets_a_module_without_one() -> None:
    script = "import pyspark_kafka_sink\nprint(hasattr(pyspark_kafka_sink, 'DefaultSource'))"
    error = "ModuleNotFoundError('No module named x', name='pyspark.sql.datasource')"
    done = run_strictly(f"{BLOCK}\nsys.meta_path.insert(0, Blocked('pyspark.sql.datasource', {error}))\n{script}")
    assert (done.stdout, done.stderr) == ("False\n", "")


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
