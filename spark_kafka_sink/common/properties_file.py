"""Files of `name=value` lines, as java.util.Properties reads them: a query's options, for a job and for the operator.

Of what Java takes, `=` alone separates name and value, and a backslash escapes nothing: values are SQL and passwords.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spark_kafka_sink.common.errors import ConfigError


def read_properties(path: Path) -> dict[str, str]:
    """The settings of a file in UTF-8. # and ! begin a comment, a backslash at the end continues the line.

    Raises ConfigError, which names the file and the line, and OSError.
    """
    found: dict[str, str] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}.") from None
    for number, line in _logical_lines(text):
        name, equals, value = line.partition("=")
        if not equals:  # it is not shown: it may be the second line of a key
            raise ConfigError(
                f"{path}: line {number} is not name=value. Where it goes on from the line before, that one ends with a"
                " backslash."
            )
        found[name.strip()] = value.strip()
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Without blank ones and comments, each with the number of its last line. A comment does not go on, and a line that
    goes on holds none.
    """
    begun, number = "", 0
    for number, line in enumerate(map(str.lstrip, text.splitlines()), start=1):
        if begun or not line.startswith(("#", "!")):
            begun += line.removesuffix("\\")
            if not line.endswith("\\"):
                if begun.strip():
                    yield number, begun.strip()
                begun = ""
    if begun.strip():
        yield number, begun.strip()
