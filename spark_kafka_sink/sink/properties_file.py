"""Reads options from a .properties file, for jobs and for the operator's command.

The package javaproperties knows the format of java.util.Properties: comments, continued lines, the separators `=`, `:`
and blank, the escapes. As Spark does with its own files, this reads UTF-8, and drops blanks after a value. It refuses
what Java accepts and a user hardly means: a name that comes twice, a line without a value, and a backslash before a
letter that is no escape, which Java drops. No error shows a value, because it may be a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_kafka_sink.common.errors import ConfigError

if TYPE_CHECKING:
    from javaproperties.reading import KeyValue

_NAME: Final = re.compile(r"[A-Za-z_][\w./-]*")
"""The name of an option. A line of a key in PEM form has no such beginning, or no separator."""
_WRITTEN_NAME: Final = re.compile(rf"[ \t\f]*({_NAME.pattern})[ \t\f]*[=:]")
_ESCAPE: Final = re.compile(r"""\\(?P<escape>[tnrfu\\:=#! "']|\r\n|[\r\n]|\Z)|\\(?P<other>.)""")
"""An escape of the format. Quotes need none, but many files have them escaped."""
_BLANKS_AT_END: Final = re.compile(r"(?<!\\)((?:\\\\)*)[ \t\f]+(?=[\r\n]|\Z)")
"""Those of a line, from the first one that is not escaped."""
_LINE_END: Final = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class PropertiesFile:
    """The options of a file by name, in their order, and the line where each begins."""

    path: Path
    values: dict[str, str]
    lines: dict[str, int]

    def place(self, option: str | None) -> str:
        """Return where the file sets the option, for the end of an error text. Empty if it does not. Case does not
        count, because the sink's errors have names in lower case.
        """
        line = next((self.lines[name] for name in self.lines if name.lower() == (option or "").lower()), None)
        return "" if line is None else f" ({self.path}, line {line})"


def read_properties(path: Path) -> PropertiesFile:
    """Read a file of options. Raises OSError, and ConfigError with the file, the line and the name for text that is not
    in the format.
    """
    try:
        # not needed in tasks: a cluster that has the package only as a zip may lack it
        from javaproperties import InvalidUEscapeError, KeyValue, parse
    except ImportError as error:
        raise ConfigError(f"{path} needs the package javaproperties: pip install javaproperties.") from error
    text = _text(path)
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    line = 1
    try:
        for element in parse(text):
            if isinstance(element, KeyValue):
                name = element.key
                _check(element, path, line)
                if name in values:
                    again = f"{path}: line {line} sets {name} again, after line {lines[name]}: leave one of them out."
                    raise ConfigError(again)
                values[name], lines[name] = element.value, line
            line += len(_LINE_END.findall(element.source))
    except InvalidUEscapeError:
        named = _WRITTEN_NAME.match(_LINE_END.split(text)[line - 1])
        where = f"line {line}, {named[1]}," if named else f"line {line}"
        raise ConfigError(
            f"{path}: {where} has a \\u without four hexadecimal digits. For a backslash write \\\\."
        ) from None
    return PropertiesFile(path, values, lines)


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _BLANKS_AT_END.sub(r"\1", file.read())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: {error}. Save it as UTF-8, or write \\uXXXX for characters that are not ASCII."
        ) from None


def _check(element: KeyValue, path: Path, line: int) -> None:
    """Raise ConfigError if this is no option, which is not shown then: it may be the second line of a key."""
    has_separator = element.value or element.source_stripped.endswith(("=", ":"))
    if not has_separator or not _NAME.fullmatch(element.key):
        raise ConfigError(
            f"{path}: line {line} is not name=value. If it goes on from the line before, that one must end with a"
            " backslash."
        )
    for escape in _ESCAPE.finditer(element.source):
        if escape["other"] is not None:
            at = line + len(_LINE_END.findall(element.source, 0, escape.start()))
            raise ConfigError(
                f"{path}: line {at}, {element.key}, has a backslash that is no escape, and the format drops it. For a"
                " backslash write \\\\."
            )
