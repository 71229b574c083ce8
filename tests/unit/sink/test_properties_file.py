"""Files of options, as jobs and the operator's command read them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.sink.properties_file import read_properties


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.properties"


def values(file: Path, text: str) -> dict[str, str]:
    file.write_bytes(text.encode())
    return read_properties(file).values


def refusal(file: Path, text: str) -> str:
    file.write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        read_properties(file)
    found = str(caught.value)
    assert found.startswith(f"{file}: line ")
    return found.removeprefix(f"{file}: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# comment\n! too\n\n a = 1\nb=x = y\nc = one, \\\n    two\n", {"a": "1", "b": "x = y", "c": "one, two"}),
        ("a:1\nspark.master   local[2]\nb=\nc = x:y\n", {"a": "1", "spark.master": "local[2]", "b": "", "c": "x:y"}),
        ("a = 1\r\nb = 2, \\\r\n 3\r\nc = 4\rd = 5", {"a": "1", "b": "2, 3", "c": "4", "d": "5"}),
        ("a=x\\ty\\n\\\\d\\u00e9\\uD83D\\uDE00\n", {"a": "x\ty\n\\dé😀"}),
        ("a=Gebühr\n", {"a": "Gebühr"}),
        ("\ufeffa=1\n", {"a": "1"}),
        ("a=1  \t\nb=x\\ \\   \nc=\\\\  \nd=\\t\n", {"a": "1", "b": "x  ", "c": "\\", "d": "\t"}),
        ("a=https\\://h\\:1/\\#x\\=\\!\\\"\\'\n", {"a": "https://h:1/#x=!\"'"}),
        ("a = x\u2028y\x0bz\n", {"a": "x\u2028y\x0bz"}),
    ],
    ids=[
        "comments and continued lines",
        "three separators",
        "three ends of a line",
        "escapes",
        "UTF-8",
        "byte order mark",
        "blanks at the end",
        "escaped punctuation",
        "no end of a line",
    ],
)
def test_file_is_read_as_java_and_spark_read_it(file: Path, text: str, expected: dict[str, str]) -> None:
    assert values(file, text) == expected


def test_comment_ends_with_its_line_despite_a_backslash(file: Path) -> None:
    """As in java.util.Properties. Otherwise the next setting would be lost silently."""
    text = "# such as C:\\data\\\n# or\\\na = 1\nb = one, \\\n  two\nc = x\\\n#y\n"
    assert values(file, text) == {"a": "1", "b": "one, two", "c": "x#y"}
    assert values(file, "a = 1\\\n\nb = 2\\") == {"a": "1", "b": "2"}


def test_line_of_each_option_is_known(file: Path) -> None:
    file.write_bytes(b"# c\n\na = 1, \\\n 2\r\n! d\rB = 3\n")
    found = read_properties(file)
    assert found.lines == {"a": 3, "B": 6}
    assert found.place("b") == f" ({file}, line 6)"
    assert found.place("c") == found.place(None) == ""


@pytest.mark.parametrize(
    "text",
    [
        "kafka.ssl.keystore.key=-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n",
        "kafka.ssl.keystore.key=-----BEGIN PRIVATE KEY-----\\\n\n-----END hunter2\n",
        "# of a job\nhunter2\\\n",
        '# of a job\n"hunter2";\n',
        "# of a job\n=hunter2\n",
    ],
)
def test_line_without_name_and_value_is_named_by_number_only(file: Path, text: str) -> None:
    found = refusal(file, text)
    assert "hunter2" not in found
    assert found.endswith(" is not name=value. If it goes on from the line before, that one must end with a backslash.")


def test_number_of_a_wrong_line_is_that_of_the_file(file: Path) -> None:
    assert refusal(file, "# c\\\na=1,\\\n 2\n\nhunter2\n").startswith("line 5 is not name=value")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a=1\nrecord.value = replace(x, '\\d', 'hunter2')\n", "line 2, record.value,"),
        ("record.value = one, \\\n  '\\\\\\d hunter2'\n", "line 2, record.value,"),
        ("source.path = C:\\data\\hunter2\n", "line 1, source.path,"),
    ],
)
def test_backslash_that_java_drops_is_refused(file: Path, text: str, place: str) -> None:
    """The value would change silently: it may be SQL, a path or a password."""
    found = refusal(file, text)
    assert found == f"{place} has a backslash that is no escape, and the format drops it. For a backslash write \\\\."


@pytest.mark.parametrize("value", ["C:\\users\\hunter2", "\\u12", "x \\\n  \\u12g4"])
def test_malformed_unicode_escape_is_refused_by_name(file: Path, value: str) -> None:
    found = refusal(file, f"a=1\r\n# c\nsource.path = {value}\nb=2\n")
    assert found == "line 3, source.path, has a \\u without four hexadecimal digits. For a backslash write \\\\."


def test_malformed_unicode_escape_in_a_name_is_refused(file: Path) -> None:
    assert refusal(file, "a=1\n\\u12=x\n").startswith("line 2 has a \\u without four hexadecimal digits.")


def test_option_that_comes_twice_is_refused(file: Path) -> None:
    """Java takes the last one silently."""
    found = refusal(file, "kafka.acks=all\n\nkafka.acks = hunter2\n")
    assert found == "line 3 sets kafka.acks again, after line 1: leave one of them out."


def test_file_in_another_encoding_is_refused_by_name(file: Path) -> None:
    file.write_bytes("topic=Gebühren\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"job\.properties is not UTF-8: .* position 9.* write \\uXXXX"):
        read_properties(file)


def test_missing_package_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "javaproperties", None)
    with pytest.raises(ConfigError, match=r"job\.properties needs the package javaproperties: pip install"):
        read_properties(file)
