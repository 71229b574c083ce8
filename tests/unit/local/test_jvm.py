"""Which Java and which release a broker runs, and its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.local.jars import JarLock
from spark_kafka_sink.local.jvm import CURRENT, RELEASES, SERVER_CLASS, TUNINGS, Java, Jvm, find_java, major_version


def install(folder: Path, script: str) -> Path:
    """An executable `java` that runs a shell script."""
    folder.mkdir(parents=True)
    java = folder / "java"
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return java


def says(version: str) -> str:
    return f"""echo 'openjdk version "{version}" 2025-04-15' >&2"""


@pytest.mark.parametrize(
    ("version", "major"),
    [("17.0.15", 17), ("21", 21), ("21-ea", 21), ("1.8.0_412", 8), ("9", 9), ("25.0.1+8-LTS", 25), ("unknown", None)],
)
def test_major_version_is_read_from_old_and_new_schemes(version: str, major: int | None) -> None:
    assert major_version(version) == major


def test_java_home_wins_over_path(tmp_path: Path) -> None:
    chosen = install(tmp_path / "home" / "bin", says("21.0.2"))
    install(tmp_path / "path", says("17.0.1"))
    java = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})
    assert (java.path, java.version) == (chosen, "21.0.2")


def test_relative_java_path_works_from_a_brokers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = install(tmp_path / "home" / "bin", says("21.0.2"))
    monkeypatch.chdir(tmp_path)
    assert find_java({"JAVA_HOME": "home"}).path == chosen
    assert find_java({"PATH": "home/bin"}).path == chosen


def test_without_java_home_path_is_searched(tmp_path: Path) -> None:
    chosen = install(tmp_path / "path", says("17.0.1"))
    assert find_java({"PATH": str(tmp_path / "path")}).path == chosen


@pytest.mark.parametrize("version", ["1.8.0_412", "11.0.20", "16.0.2"])
def test_older_java_is_refused_with_the_version_to_install(tmp_path: Path, version: str) -> None:
    java = install(tmp_path / "path", says(version))
    with pytest.raises(LocalBrokerError) as caught:
        find_java({"PATH": str(java.parent)})
    assert str(java) in str(caught.value)
    assert f"is Java {version}" in str(caught.value)
    assert "install a JRE or JDK 17+" in str(caught.value)


def test_missing_java_is_refused_with_the_version_to_install(tmp_path: Path) -> None:
    with pytest.raises(LocalBrokerError, match=r"No Java found.*PATH has no `java`.*install a JRE or JDK 17\+"):
        find_java({"PATH": str(tmp_path)})


def test_java_home_without_java_is_named(tmp_path: Path) -> None:
    install(tmp_path / "path", says("17.0.1"))
    with pytest.raises(LocalBrokerError, match=rf"JAVA_HOME is {tmp_path / 'gone'}.*is not there"):
        find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(tmp_path / "path")})


def test_java_output_may_have_another_encoding(tmp_path: Path) -> None:
    """Bug: it repeats JAVA_TOOL_OPTIONS unchanged, and a Latin-1 letter there raised UnicodeDecodeError."""
    picked_up = r"printf 'Picked up JAVA_TOOL_OPTIONS: -Duser.name=Andr\351\n' >&2"
    java = install(tmp_path / "path", f"{picked_up}\n{says('17.0.1')}")
    assert find_java({"PATH": str(java.parent)}).version == "17.0.1"


@pytest.mark.parametrize("script", ["echo 'no such luck' >&2; exit 1", "exit 0"])
def test_java_without_a_version_is_refused_with_its_output(tmp_path: Path, script: str) -> None:
    java = install(tmp_path / "path", script)
    with pytest.raises(LocalBrokerError, match="names no version"):
        find_java({"PATH": str(java.parent)})


@pytest.mark.parametrize(
    ("version", "log_binding", "jars"), [("4.3.1", "log4j-slf4j-impl", 46), ("3.9.1", "slf4j-reload4j", 57)]
)
def test_each_lock_has_one_release_and_one_log_binding(version: str, log_binding: str, jars: int) -> None:
    coordinates = [jar.coordinate.split(":") for jar in JarLock.read(RELEASES[version].lock_path).jars]
    assert {found for group, _, found in coordinates if group == "org.apache.kafka"} == {version}
    assert len({(group, artifact) for group, artifact, _ in coordinates}) == len(coordinates) == jars
    bindings = {"log4j-slf4j-impl", "log4j-slf4j2-impl", "slf4j-reload4j", "slf4j-simple", "logback-classic"}
    assert bindings & {artifact for _, artifact, _ in coordinates} == {log_binding}


def test_unknown_release_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LocalBrokerError, match=r"No embedded Kafka '2\.8\.0': there are 4\.3\.1 and 3\.9\.1"):
        EmbeddedKafka(version="2.8.0")


def command(**more: str) -> list[str]:
    jvm = Jvm(Java(Path("/java"), "21"), CURRENT, [Path("/a.jar")], **more)  # type: ignore[arg-type]
    return list(map(str, jvm.command(SERVER_CLASS, "x", folder=Path("/node"))))


def test_jvm_flags_favour_a_quick_start_by_default() -> None:
    assert "-XX:TieredStopAtLevel=1" in command()
    assert "-Xmx512m" in command()


def test_throughput_uses_the_full_compiler() -> None:
    flags = command(tuned_for="throughput")
    assert not [flag for flag in flags if "Tiered" in flag or "SerialGC" in flag]
    assert {"-Xmx1g", "-XX:+UseG1GC"} < set(flags)


@pytest.mark.parametrize("tuned_for", TUNINGS)
def test_jvm_writes_only_to_its_folder(
    tuned_for: str,
) -> None:
    flags = command(tuned_for=tuned_for)
    assert {"-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"} < set(flags)
    assert flags[-2:] == [SERVER_CLASS, "x"]


def test_unknown_tuning_is_refused() -> None:
    with pytest.raises(LocalBrokerError, match="start or throughput, not for speed"):
        EmbeddedKafka(tuned_for="speed")
