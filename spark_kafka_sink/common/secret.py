"""Text that must not be shown. Any thread."""

from __future__ import annotations


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
