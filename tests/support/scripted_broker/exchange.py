"""One request at the scripted broker, and its answer."""

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
    """Distinguishes one connection from another, if necessary."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a broker: its fields (None for no response), its time, and changes of its bytes."""

    values: Mapping[str, Any] | None
    delay_ms: int = 0
    close: bool = False
    version: int | None = None
    """The version of the response, if it is not that of the request."""
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
    """Bytes to send, size included, `delay_ms` from now; then, with `close`, the end of the connection."""

    delay_ms: int
    data: bytes
    close: bool = False
