"""Errors told again with more in their text, and the same to whoever asks what they are. No state; any thread."""

from __future__ import annotations

from typing import TypeVar

from spark_kafka_sink.common.errors import KafkaError

E = TypeVar("E", bound=KafkaError)


def retold(error: E, text: str) -> E:
    """Another error of the class and the code of `error`, which says `text`."""
    told = type(error)(text)
    told.error_code = error.error_code
    return told
