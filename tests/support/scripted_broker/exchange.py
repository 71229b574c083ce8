"""One request at the scripted broker and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request as it arrived. `request` is kio's entity."""

    node_id: int
    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    request: Any
    now_ms: int
    connection: object = None
    """What tells one connection from another, where that matters."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the broker means to say: the response's fields (None for silence), when, and what happens to the bytes."""

    values: Mapping[str, Any] | None
    delay_ms: int = 0
    close: bool = False
    version: int | None = None
    """The version to write the response in, where it is not the request's."""
    transform: Callable[[bytes], bytes] | None = None
    """Applied to the whole frame, size included."""


def refused_partitions(exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    """The fields of a response with this error for each partition of the request."""
    topics = [
        {
            "name": topic.name,
            "partitions": [
                {"partition_index": each.partition_index, "error_code": error_code} for each in topic.partitions
            ],
        }
        for topic in exchange.request.topics
    ]
    return {"topics": topics}


class Reply(NamedTuple):
    """Bytes for the wire, size included, `delay_ms` from now; then, if `close`, the end of the connection."""

    delay_ms: int
    data: bytes
    close: bool = False
