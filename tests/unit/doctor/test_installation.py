"""This machine: what is decided from versions, and that the facts are those of this process."""

from __future__ import annotations

import configparser
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.planted_faults import UNIT

from spark_kafka_sink.doctor.findings import Finding, Status
from spark_kafka_sink.doctor.installation import REQUIRED, Machine, Package, fits, gather, judge
from spark_kafka_sink.record.kernel import has_kernel

ROOT = Path(__file__).resolve().parents[3]
GOOD = Machine(
    packages=(Package("pyarrow>=14", "26.0.1"), Package("kio>=0.6.5,<0.7", "0.6.5"), Package("lz4>=4.3", "4.4.5")),
    has_kernel=True,
    pyspark="4.2.0",
    pyspark_needs=(Package("pandas>=2.2", "2.3.1", "PySpark 4.2.0"), Package("pyarrow>=18", "26.0.1", "PySpark 4.2.0")),
    java="17.0.15",
    python="/opt/python",
)


def with_version(name: str, version: str | None) -> tuple[Package, ...]:
    return tuple(replace(each, version=version) if each.name == name else each for each in GOOD.packages)


PLANTED: dict[str, list[dict[str, Any]]] = {
    "package-missing": [
        {"packages": with_version("lz4", None)},
        {"packages": (Package("pyarrow>=14", "26.0.1", error="ImportError: pyarrow requires NumPy 2.0 or newer"),)},
    ],
    "package-too-old": [
        {"packages": with_version("pyarrow", "12.0.1")},
        {"packages": with_version("kio", "0.7")},
        {"pyspark_needs": (Package("pyarrow>=18", "15.0", "PySpark 4.2.0"),)},
    ],
    "kernel-missing": [{"has_kernel": False}],
    "kernel-does-not-load": [{"has_kernel": False, "kernel_error": "invalid ELF header"}],
    "pyspark-missing": [{"pyspark": None, "pyspark_needs": ()}, {"pyspark": "3.4.4", "pyspark_needs": ()}],
    "pyspark-without-format": [{"pyspark": "3.5.9", "pyspark_needs": ()}],
    "pandas-missing": [{"pyspark_needs": (Package("pandas>=2.2", None, "PySpark 4.2.0"),)}],
    "java-missing": [{"java": None}],
    "java-too-old": [{"java": "11.0.24"}, {"java": "1.8.0_402"}],
    "java-too-new": [{"java": "25.0.1", "pyspark": "4.1.4"}, {"java": "23", "pyspark": "4.0.5"}],
}
CASES = [(name, facts) for name, cases in PLANTED.items() for facts in cases]


def problems(findings: list[Finding]) -> list[str]:
    return [each.name for each in findings if each.name]


def test_each_name_of_this_machine_is_planted() -> None:
    elsewhere = {"tls-failed", "certificate-expires-soon", "transaction-hangs"}
    assert set(PLANTED) == set(UNIT) - elsewhere


@pytest.mark.parametrize(("name", "facts"), CASES)
def test_planted_fault_is_found_by_its_name_and_no_other(name: str, facts: dict[str, Any]) -> None:
    findings = judge(replace(GOOD, **facts))
    assert problems(findings) == [name]
    (found,) = [each for each in findings if each.name]
    assert "{" not in found.change


def test_machine_without_a_fault_has_only_good_lines() -> None:
    assert {each.status for each in judge(GOOD)} == {Status.OK}


@pytest.mark.parametrize("java", ["17", "17.0.15", "21-ea", "25.0.1"])
def test_java_of_spark_4_is_good(java: str) -> None:
    assert problems(judge(replace(GOOD, java=java))) == []


@pytest.mark.parametrize("java", ["1.8.0_402", "11.0.24", "17.0.15", "21.0.2"])
def test_old_java_is_good_for_spark_3_5(java: str) -> None:
    found = problems(judge(replace(GOOD, java=java, pyspark="3.5.9", pyspark_needs=())))
    assert found == ["pyspark-without-format"]


def test_spark_connect_needs_no_java() -> None:
    findings = judge(replace(GOOD, java=None, is_remote=True))
    assert problems(findings) == []
    assert [each.what for each in findings if each.status is Status.NOT_CHECKED] == ["Java"]


@pytest.mark.parametrize(("java", "pyspark"), [("11.0.24", "4.2.0"), ("25.0.1", "4.1.4")])
def test_spark_connect_takes_any_java(java: str, pyspark: str) -> None:
    """Bug: it was a fault, and the server has a Java of its own."""
    assert problems(judge(replace(GOOD, java=java, pyspark=pyspark, is_remote=True))) == []


@pytest.mark.parametrize(
    ("version", "needs", "does_fit"),
    [
        ("14", "pyarrow>=14", True),
        ("14.0.2", "pyarrow>=14", True),
        ("13.9", "pyarrow>=14", False),
        ("2.7.post1", "crc32c>=2.7", True),
        ("0.6.5", "kio>=0.6.5,<0.7", True),
        ("0.7.0", "kio>=0.6.5,<0.7", False),
        ("0.6.4", "kio>=0.6.5,<0.7", False),
        ("2.0", "p!=2.0.0", False),
        ("2.0.0", "p==2", True),
        ("2.1", "p<=2", False),
        ("2.1", "p>2.0.9", True),
    ],
)
def test_version_fits_its_requirement(version: str, needs: str, does_fit: bool) -> None:
    assert fits(version, needs) is does_fit


def test_required_packages_are_those_of_the_setup() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = (line.strip() for line in setup["options"]["install_requires"].splitlines())
    assert [line for line in lines if line and not line.startswith("#")] == list(REQUIRED)


def test_missing_kernel_names_the_folder_of_the_package() -> None:
    """Bug: in a checkout the doctor said that the kernel was not compiled by the installation. It was: Python took the
    package from the checkout, and a new installation did not help.
    """
    (found,) = [each for each in judge(replace(GOOD, has_kernel=False, folder="/checkout/package")) if each.name]
    assert found.seen == "there is no compiled one in /checkout/package"
    assert "In a checkout run pip install -e . there" in (found.change or "")
    assert gather().folder == str(ROOT / "spark_kafka_sink")


def test_facts_are_those_of_this_process() -> None:
    found = gather()
    assert found.python == sys.executable
    assert found.has_kernel is has_kernel()
    assert {each.name for each in found.packages if each.version is None} == set()
    assert found.pyspark is not None
    assert {each.name for each in found.pyspark_needs} <= {"pandas", "pyarrow"}


@pytest.mark.parametrize("answer", ['openjdk version "21.0.2" 2024-01-16', 'java version "1.8.0_402"'])
def test_java_of_java_home_is_asked(tmp_path: Path, answer: str) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{answer}' >&2\n")
    java.chmod(0o755)
    found = gather({**os.environ, "JAVA_HOME": str(tmp_path)})
    assert found.java == answer.split('"')[1]


def test_java_that_answers_in_another_encoding_is_known(tmp_path: Path) -> None:
    """Bug: a JAVA_TOOL_OPTIONS in Latin-1, which Java repeats, ended the doctor with a UnicodeDecodeError."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_bytes(b"#!/bin/sh\necho 'Picked up -Dname=M\xfcller\nopenjdk version \"17.0.1\"' >&2\n")
    java.chmod(0o755)
    assert gather({**os.environ, "JAVA_HOME": str(tmp_path)}).java == "17.0.1"


def test_folder_without_java_has_none(tmp_path: Path) -> None:
    assert gather({"JAVA_HOME": str(tmp_path)}).java is None


def test_package_that_is_installed_and_does_not_load_is_a_fault_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: the doctor asked for versions only, and found no fault."""
    (tmp_path / "lz4.py").write_text("raise ImportError('lz4 requires\\nanother library')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == "lz4"]:
        monkeypatch.delitem(sys.modules, name)
    (found,) = [each for each in judge(gather()) if each.what == "lz4"]
    assert found.name == "package-missing"
    assert found.seen.endswith(" does not load: ImportError: lz4 requires another library")
