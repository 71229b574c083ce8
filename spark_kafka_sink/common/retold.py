"""Errors told again, with more in their text or for each who hears of it, and the same to whoever asks what they are.
No state; any thread.
"""

from __future__ import annotations

import copy
from typing import TypeVar

from spark_kafka_sink.common.errors import KafkaError

E = TypeVar("E", bound=KafkaError)


def retold(error: E, text: str, *, retriable: bool = True) -> E:
    """Another error of the class and the code of `error`, and as fatal, which says `text`. Not `retriable`: what it
    came from must not be sent again, whatever its class is.
    """
    told = type(error)(text)
    told.error_code = error.error_code
    told.fatal = error.fatal
    told.retriable = retriable and error.retriable
    return told


def copied(error: E) -> E:
    """`error` for one of the many that it is raised to: one object would collect the tracebacks of all, from any
    thread, and keep their frames alive.
    """
    own = copy.copy(error).with_traceback(error.__traceback__)
    own.__cause__, own.__context__ = error.__cause__, error.__context__
    own.__suppress_context__ = error.__suppress_context__  # which to set a cause has set
    return own
