"""The two seams of this room, and the values that cross them.

`Selectable` is the selector that the network client needs. `KafkaClient` is the network client that other rooms need.
Tests put fakes at these seams, and patch nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.common.windows import Windows
from spark_kafka_sink.network.channel import ChannelState, NetworkReceive, NetworkSend, SetupStep
from spark_kafka_sink.network.selector import SelectorSample
from spark_kafka_sink.network.transport import Address
from spark_kafka_sink.protocol.versions import Message, Request

RequestCallback = Callable[["ClientResponse"], None]
"""The polling thread calls it once with the response, at the end of the poll."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request for node `destination` (its id as text), without a version yet. Times are ms of the client's clock."""

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
    """The outcome of `request`: one of the errors, or `body` (kio's response of `version`; None if none was expected).

    `disconnected` is true if the connection closed before the response. Then `timed_out` means that the client closed
    it because the response took too long, `protocol_error` that the client closed it because the data was no response
    to this request, and `authentication_error` that the node refused the login. `version_mismatch` means that nothing
    was sent.
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
        """Milliseconds from the creation of the request to this response."""
        return self.received_ms - self.request.created_ms

    def complete(self) -> None:
        """Call the request's callback with this response."""
        if self.request.callback is not None:
            self.request.callback(self)


class Selectable(Protocol):
    """Connections by node id (org.apache.kafka.common.network.Selectable). The four results are of the last poll. One
    thread uses it; any thread may call `wakeup`.
    """

    @property
    def completed_sends(self) -> Sequence[NetworkSend]: ...

    @property
    def completed_receives(self) -> Sequence[NetworkReceive]: ...

    @property
    def disconnected(self) -> Mapping[str, ChannelState]: ...

    @property
    def connected(self) -> Sequence[str]: ...

    @property
    def counts(self) -> Windows[SelectorSample]: ...

    @property
    def connection_count(self) -> int: ...

    def connect(self, connection_id: str, address: Address, send_buffer: int, receive_buffer: int) -> None:
        """Start to connect. The outcome is a result of a later poll."""
        ...

    def send(self, send: NetworkSend) -> None: ...

    def poll(self, timeout_ms: int) -> None: ...

    def wakeup(self) -> None: ...

    def is_channel_ready(self, connection_id: str) -> bool: ...

    def setup_step(self, connection_id: str) -> SetupStep | None:
        """Return what a connection waits for before it is ready; None if it was ready once, or does not exist."""
        ...

    def close(self, connection_id: str) -> None:
        """Close a connection, if it exists. No result reports it."""
        ...

    def close_all(self) -> None: ...


class KafkaClient(Protocol):
    """Requests to nodes and their responses (org.apache.kafka.clients.KafkaClient). One thread uses it; any thread may
    call `wakeup` and `new_client_request`.
    """

    def ready(self, node: Node, now_ms: int) -> bool:
        """Return whether a request to the node can be sent now. Start to connect if that is possible. No node is ready
        while a metadata update is due, because the update goes first.
        """
        ...

    def poll_delay_ms(self, node: Node, now_ms: int) -> int:
        """Return the ms until the connection can change without an event, or a throttle ends; FOREVER_MS while the node
        is connected and not throttled.
        """
        ...

    def connection_failed(self, node: Node) -> bool:
        """Return whether the node was tried and is not connected."""
        ...

    def authentication_error(self, node: Node) -> KafkaError | None:
        """Return the error with which the node refused this client, or None."""
        ...

    def new_client_request(
        self,
        node_id: str,
        request: Request,
        now_ms: int,
        expect_response: bool,
        request_timeout_ms: int | None = None,
        callback: RequestCallback | None = None,
    ) -> ClientRequest:
        """Return a request with the next correlation id. Without a timeout it gets the client's."""
        ...

    def send(self, request: ClientRequest, now_ms: int) -> None:
        """Queue the request. Raises IllegalStateError if the node is not ready."""
        ...

    def poll(self, timeout_ms: int, now_ms: int) -> list[ClientResponse]:
        """Read and write sockets. Wait up to `timeout_ms` for an event. All callbacks have run when it returns."""
        ...

    def least_loaded_node(self, now_ms: int) -> Node | None: ...

    def in_flight_request_count(self, node_id: str | None = None) -> int: ...

    def has_in_flight_requests(self, node_id: str | None = None) -> bool: ...

    def disconnect(self, node_id: str) -> None:
        """Close the connection. The next poll completes its in-flight requests as disconnected."""
        ...

    def wakeup(self) -> None:
        """End a waiting poll. Any thread may call it."""
        ...

    def metrics(self, now_ms: int) -> dict[str, float]:
        """Return the metrics of all connections together, by Kafka's names. Any thread."""
        ...

    def node_metrics(self, now_ms: int) -> dict[str, dict[str, float]]:
        """Return the metrics of each node's connection, by "node-" and the node's id. Any thread."""
        ...

    def connection_metrics(self, now_ms: int) -> dict[tuple[str, str], dict[str, float]]:
        """Return the state of each connection by "node-" with the node's id, and `host:port`. Any thread."""
        ...

    def close(self) -> None:
        """Close every connection."""
        ...
