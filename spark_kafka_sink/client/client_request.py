"""A request on its way through the client, and what became of it. Plain values; made and read by the I/O thread and
its callers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.protocol.building import Request
from spark_kafka_sink.protocol.messages import Message

RequestCallback = Callable[["ClientResponse"], None]
"""Called once with the response, by the thread that polls, after everything else of that poll."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request for the node `destination` (id string), not yet bound to a version. Times in ms of the client's
    clock.
    """

    destination: str
    request: Request
    correlation_id: int
    created_ms: int
    expect_response: bool
    request_timeout_ms: int
    callback: RequestCallback | None = None

    def __str__(self) -> str:
        return f"{self.request!r} with correlation id {self.correlation_id} to node {self.destination}"


@dataclass(frozen=True, slots=True)
class ClientResponse:
    """What became of `request`: at most one of the errors is set, or `body` (kio's response of `version`; None where
    none was expected).

    `disconnected` is true whenever the connection went before an answer could be had; then `timed_out` tells that we
    closed it because the answer took too long, `protocol_error` that we closed it because what came was not an answer
    to this request, and `authentication_error` that the node refused us. `version_mismatch` means that nothing was
    sent.
    """

    request: ClientRequest
    received_ms: int
    version: int = -1
    disconnected: bool = False
    timed_out: bool = False
    version_mismatch: KafkaError | None = None
    authentication_error: KafkaError | None = None
    protocol_error: KafkaError | None = None
    body: Message = None

    @property
    def destination(self) -> str:
        return self.request.destination

    @property
    def latency_ms(self) -> int:
        """From the request's making to this."""
        return self.received_ms - self.request.created_ms

    def complete(self) -> None:
        """Hand this to the request's callback."""
        if self.request.callback is not None:
            self.request.callback(self)
