"""Files of settings, as jobs and the operator's command read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import read_properties


def test_properties_file_may_have_comments_and_continued_lines(tmp_path: Path) -> None:
    file = tmp_path / "job.properties"
    file.write_text("# comment\n! too\n\n a = 1\nb=x = y\nc = one, \\\n    two\n")
    assert read_properties(file) == {"a": "1", "b": "x = y", "c": "one, two"}


def test_line_without_equals_is_named_by_number_only(tmp_path: Path) -> None:
    file = tmp_path / "job.properties"
    file.write_text("# of a job\nkafka.ssl.keystore.key=-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEI\n")
    with pytest.raises(ConfigError, match=r"job\.properties: line 3 is not name=value") as caught:
        read_properties(file)
    assert "MC4C" not in str(caught.value)


def test_comment_ends_with_its_line_despite_a_backslash(tmp_path: Path) -> None:
    """As in java.util.Properties. Otherwise the next setting would be lost silently."""
    file = tmp_path / "job.properties"
    file.write_text("# such as C:\\data\\\n# or\\\na = 1\nb = one, \\\n  two\nc = x\\\n#y\n")
    assert read_properties(file) == {"a": "1", "b": "one, two", "c": "x#y"}
    file.write_text("a = 1\\\n\nb = 2\\")
    assert read_properties(file) == {"a": "1", "b": "2"}


def test_file_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "job.properties"
    file.write_bytes("topic=Gebühren\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"job\.properties is not UTF-8: .* position 9"):
        read_properties(file)
