"""Text that a peer sent, made fit for a log line or an error. No state; any thread."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 500


def one_line(text: str) -> str:
    """Return `text` without line breaks and control characters, cut after 500 characters."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
    return "".join(character if character.isprintable() else "?" for character in cut)
