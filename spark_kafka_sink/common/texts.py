"""What logs and errors show of a text: nothing of a secret, and one line of what a peer sent. No state; any thread."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 500


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
