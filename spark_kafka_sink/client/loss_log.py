"""Which lost connections are logged: each cause of a node once a minute, however often it is tried. I/O thread only."""

from __future__ import annotations

import logging
import re
from typing import Final

PAUSE_MS: Final = 60_000
_MOST_CAUSES: Final = 8
"""Of one node in a minute: texts that a server makes up must not fill the log either."""
_NUMBER: Final = re.compile(r"\d+")


class LossLog:
    """Logs to `log`. Causes that differ only in numbers, such as a correlation id, are the same."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: dict[str, dict[str, int]] = {}
        self._repeated: dict[str, int] = {}

    def tell(self, level: int, node_id: str, text: str, now_ms: int) -> None:
        """Log `text` at `level`, or at DEBUG where the same was logged of the node less than a minute ago."""
        if level < logging.WARNING:
            self._log.log(level, "%s", text)
            return
        causes = self._told.setdefault(node_id, {})
        for cause in [cause for cause, told_ms in causes.items() if now_ms - told_ms >= PAUSE_MS]:
            del causes[cause]
        cause = _NUMBER.sub("#", text)
        if cause in causes or len(causes) >= _MOST_CAUSES:
            self._repeated[node_id] = self._repeated.get(node_id, 0) + 1
            self._log.debug("%s", text)
            return
        causes[cause] = now_ms
        repeated = self._repeated.pop(node_id, 0)
        more = f" ({repeated} more of this node since the last such line)" if repeated else ""
        self._log.log(level, "%s%s", text, more)
