"""What logs and errors show of a text: nothing of a secret, and one line of what a peer sent. And how a command writes
its texts. No state; any thread.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
from collections.abc import Callable
from typing import Final

_LONGEST: Final = 500
_BROKEN_PIPE: Final = 141
"""The code that a shell shows for a program which SIGPIPE has ended."""
_LOGIN: Final = re.compile(r"//[^\s'\"]*@")
_MAYBE_SECRET: Final = re.compile(r"@|-----BEGIN|LoginModule|(password|secret|token)\W*=", re.IGNORECASE)
_QUERY: Final = re.compile(r"(://[^\s'\"?]*)\?[^\s'\"]*")


class Secret:
    """Text that only `reveal` shows.

    It pickles with its text, because Spark sends options to its executors by pickle.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


def one_line(text: str) -> str:
    """Return a peer's text without line breaks and control characters, cut after 500 characters."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
    return "".join(character if character.isprintable() else "?" for character in cut)


def without_logins(text: str) -> str:
    """Return the text with *** in place of the login and of the query of each address in it."""
    return _QUERY.sub(r"\1?***", _LOGIN.sub("//***@", text))


def shown(value: object) -> str:
    """Return the repr of an option's value on one line, for an error that refuses it. A value that may have a secret is
    ***, because it may be in the wrong option: one with an @ (an address with a login), a key, a login module.
    """
    text = repr(value)
    return "***" if _MAYBE_SECRET.search(text) else one_line(without_logins(text))


def for_stream(text: str, stream: object) -> str:
    """Return the text with an escape, such as \\xfc, in place of each character that the stream cannot write."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def exit_code_of(command: Callable[[], int]) -> str | int | None:
    """Run a command, and return its code for `sys.exit`: 141 if the reader of stdout has gone, as in `| head -1`.

    In place of each character that stdout cannot write, it gets an escape.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            code: str | int | None = command()
        except SystemExit as end:  # of --help
            code = end.code
        _flush()
    except BrokenPipeError:
        if not _has_lost_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes as it ends
        return _BROKEN_PIPE
    return code


def _has_lost_reader() -> bool:
    if sys.stdout is None or not hasattr(select, "poll"):  # there is no select.poll on Windows
        return True
    poller = select.poll()
    poller.register(sys.stdout, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))


def _flush() -> None:
    if sys.stdout is not None:  # None if the command was started with a closed stdout
        sys.stdout.flush()
