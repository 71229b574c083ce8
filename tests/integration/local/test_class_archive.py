"""A real JVM that crashes with its class archive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.local.jars import cache_dir, sha256_of


@pytest.mark.slow
def test_start_after_a_crash_uses_no_class_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jars").symlink_to(cache_dir() / "jars")
    monkeypatch.setenv("SPARK_KAFKA_SINK_CACHE", str(tmp_path))
    with EmbeddedKafka():
        (archive,) = (tmp_path / "class-archives").glob("*.jsa")
    content = bytearray(archive.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 3_000_000] = bytes(byte ^ 0xFF for byte in content[middle : middle + 3_000_000])
    archive.write_bytes(content)
    archive.with_suffix(".jsa.sha256").write_text(f"{sha256_of(archive)} {len(content)}\n", encoding="ascii")
    with pytest.raises(LocalBrokerError, match=r"crashed with the class archive .*\. The archive is dropped"):
        EmbeddedKafka().start()
    assert os.listdir(archive.parent) == [archive.name]
    with EmbeddedKafka() as kafka:
        assert kafka.running
    assert archive.stat().st_size == 0
