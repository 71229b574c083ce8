"""Sends requests and receives responses, over one connection for each node. The polling thread owns it. Any thread may
call `wakeup` and `new_client_request`.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
from collections.abc import Callable
from operator import itemgetter
from typing import Final, NamedTuple

from spark_kafka_sink.client.api_versions import CLUSTER_QUESTION, ApiVersions, VersionDiscovery
from spark_kafka_sink.client.connection_states import ClusterConnectionStates
from spark_kafka_sink.client.in_flight import InFlightRequest, InFlightRequests
from spark_kafka_sink.client.metadata_updater import LeastLoadedNode, MetadataUpdater
from spark_kafka_sink.client.network_metrics import NetworkMetrics, by_connection
from spark_kafka_sink.client.seams import ClientRequest, ClientResponse, RequestCallback, Selectable
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    DisconnectError,
    IllegalStateError,
    KafkaError,
    ProtocolError,
    UnsupportedVersionError,
)
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.network.channel import ChannelKind, ChannelState, NetworkReceive, NetworkSend, SetupStep
from spark_kafka_sink.network.sasl.authenticator import FIRST_CORRELATION_ID
from spark_kafka_sink.protocol.framing import SIZE_BYTES, correlation_id_of, parse_response
from spark_kafka_sink.protocol.versions import ApiKey, Message, Request, request_type, to_ms

_InternalHandler = Callable[[InFlightRequest, Message, int], None]
_HINTS: Final = {
    SetupStep.TLS: " Is it a TLS listener, and is it overloaded? socket.connection.setup.timeout.ms sets the time.",
    SetupStep.SASL: " Is the broker slow, or its login service, or the token endpoint?"
    " socket.connection.setup.timeout.ms sets the time.",
}
_FIRST_CLIENT_THROTTLED: Final = {
    ApiKey.PRODUCE: 6,
    ApiKey.FETCH: 8,
    ApiKey.LIST_OFFSETS: 3,
    ApiKey.METADATA: 6,
    ApiKey.OFFSET_FETCH: 4,
    ApiKey.FIND_COORDINATOR: 2,
    ApiKey.API_VERSIONS: 2,
    ApiKey.CREATE_TOPICS: 3,
    ApiKey.INIT_PRODUCER_ID: 1,
    ApiKey.ADD_PARTITIONS_TO_TXN: 1,
    ApiKey.ADD_OFFSETS_TO_TXN: 1,
    ApiKey.END_TXN: 1,
    ApiKey.TXN_OFFSET_COMMIT: 1,
    ApiKey.DESCRIBE_CONFIGS: 2,
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: 0,
    ApiKey.PUSH_TELEMETRY: 0,
}
"""From this version on a broker answers a throttled request at once, and the client waits (KIP-219)."""
_LOG_LEVELS: Final = {
    ChannelKind.NOT_CONNECTED: logging.WARNING,
    ChannelKind.AUTHENTICATE: logging.WARNING,
    ChannelKind.AUTHENTICATION_FAILED: logging.ERROR,
    ChannelKind.EXPIRED: logging.DEBUG,
}
"""The level at which a lost connection is logged; INFO if it is not listed."""
PAUSE_MS: Final = 60_000
_MOST_CAUSES: Final = 8
"""Log lines for one node in a minute. A server that sends ever new texts must not fill the log."""
_NUMBER: Final = re.compile(r"\d+")

log = logging.getLogger(__name__)


class _Loss(NamedTuple):
    """Why a connection ended. `timed_out`: this client closed it because no answer came."""

    state: ChannelState
    timed_out: bool = False


class LossLog:
    """Logs each cause of a node's lost connections once a minute. Causes that differ only in numbers, such as a
    correlation id, count as the same.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: dict[str, dict[str, int]] = {}
        self._repeated: dict[str, int] = {}

    def log(self, level: int, node_id: str, text: str, now_ms: int) -> None:
        """Log `text` at `level`, or at DEBUG if the same text was logged for the node within a minute."""
        if level < logging.WARNING:
            self._log.log(level, "%s", text)
            return
        causes = self._logged.setdefault(node_id, {})
        for cause in [cause for cause, logged_ms in causes.items() if now_ms - logged_ms >= PAUSE_MS]:
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


class NetworkClient:
    """Mirrors org.apache.kafka.clients.NetworkClient. Implements `KafkaClient`, and `NodeChoice` for its metadata
    updater. Keeps selector, connection states, version discovery and in-flight requests consistent.

    `max_in_flight_requests` is the limit for each connection. request.timeout.ms is the timeout of requests without
    their own, and the longest wait of a poll.
    """

    def __init__(
        self,
        config: ProducerConfig,
        selector: Selectable,
        metadata_updater: MetadataUpdater,
        connection_states: ClusterConnectionStates,
        api_versions: ApiVersions,
        clock: Clock,
        rng: random.Random,
        max_in_flight_requests: int,
    ) -> None:
        self._config = config
        self._selector = selector
        self._metadata_updater = metadata_updater
        self._states = connection_states
        self._api_versions = api_versions
        self._clock = clock
        self._rng = rng
        self._request_timeout_ms = config.request_timeout_ms
        self._in_flight = InFlightRequests(max_in_flight_requests)
        self._discovery = VersionDiscovery(api_versions, metadata_updater)
        self._metrics = NetworkMetrics()
        self._loss_log = LossLog(log)
        self._correlation_ids = itertools.count()
        self._aborted: list[ClientResponse] = []
        self._has_news = False
        """Whether metadata came in this poll."""
        self._is_closed = False
        self._on_internal_response: dict[ApiKey, _InternalHandler] = {
            ApiKey.METADATA: self._on_metadata,
            ApiKey.API_VERSIONS: self._on_api_versions,
        }

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def ready(self, node: Node, now_ms: int) -> bool:
        if self.is_ready(node, now_ms):
            return True
        if self.can_connect(node, now_ms):
            self.initiate_connect(node, now_ms)
        return False

    def is_ready(self, node: Node, now_ms: int) -> bool:
        return not self._metadata_updater.is_update_due(now_ms) and self.can_send_request(node.id_string, now_ms)

    def poll_delay_ms(self, node: Node, now_ms: int) -> int:
        return self._states.poll_delay_ms(node.id_string, now_ms)

    def connection_failed(self, node: Node) -> bool:
        return self._states.is_disconnected(node.id_string)

    def authentication_error(self, node: Node) -> KafkaError | None:
        return self._states.authentication_error(node.id_string)

    def least_loaded_node(self, now_ms: int) -> Node | None:
        return self.least_loaded(now_ms).node

    def can_send_request(self, node_id: str, now_ms: int) -> bool:
        """Return whether the node is connected, its handshakes are done, it is not throttled, and may get a request."""
        return (
            self._states.is_ready(node_id, now_ms)
            and self._selector.is_channel_ready(node_id)
            and self._in_flight.can_send_more(node_id)
        )

    def can_connect(self, node: Node, now_ms: int) -> bool:
        """Return whether the node is not connected and its backoff is over."""
        return self._states.can_connect(node.id_string, now_ms)

    def least_loaded(self, now_ms: int) -> LeastLoadedNode:
        """Return the node for a request that any node can answer.

        In this order: the ready node with the fewest requests in flight, a node that is being connected, the node with
        the oldest connection attempt. The search starts at a random node, so that clients spread. It skips nodes in
        backoff.
        """
        nodes = self._metadata_updater.fetch_nodes()
        start = self._rng.randrange(len(nodes)) if nodes else 0
        ready: list[tuple[int, Node]] = []
        connecting: list[Node] = []
        connectable: list[tuple[int, Node]] = []
        is_any_connected = False
        for node in (*nodes[start:], *nodes[:start]):
            node_id = node.id_string
            is_any_connected |= self._states.is_connected(node_id)
            if self.can_send_request(node_id, now_ms):
                ready.append((self._in_flight.count(node_id), node))
            elif self._states.is_preparing(node_id):
                connecting.append(node)
            elif self.can_connect(node, now_ms):
                connectable.append((self._states.last_attempt_ms(node_id), node))
        if ready:
            return LeastLoadedNode(min(ready, key=itemgetter(0))[1], is_any_connected)
        if connecting:
            return LeastLoadedNode(connecting[0], is_any_connected)
        return LeastLoadedNode(min(connectable, key=itemgetter(0))[1] if connectable else None, is_any_connected)

    def initiate_connect(self, node: Node, now_ms: int) -> None:
        """Start to connect to the node's next address. If its host does not resolve, the connection has failed."""
        node_id = node.id_string
        self._states.connecting(node_id, node.host, node.port, now_ms)
        try:
            address = self._states.current_address(node_id)
            self._selector.connect(node_id, address, self._config.send_buffer_bytes, self._config.receive_buffer_bytes)
        except Exception as error:  # any error: otherwise the node would stay in CONNECTING forever
            if not isinstance(error, KafkaError | OSError):
                log.debug("Where it was raised:", exc_info=error)
            self._loss_log.log(logging.WARNING, node_id, f"No connection to {node}: {error}", now_ms)
            self._states.disconnected(node_id, now_ms)
            self._metadata_updater.handle_disconnect(node_id, str(error), None, now_ms)

    def disconnect(self, node_id: str) -> None:
        if self._is_open(node_id):
            log.info("Disconnecting from node %s as asked.", node_id)
            self._aborted += self._drop(node_id, self._clock.now_ms())

    # ---- sending ---------------------------------------------------------------------------------------------------

    def new_client_request(
        self,
        node_id: str,
        request: Request,
        now_ms: int,
        expect_response: bool,
        request_timeout_ms: int | None = None,
        callback: RequestCallback | None = None,
    ) -> ClientRequest:
        timeout_ms = self._request_timeout_ms if request_timeout_ms is None else request_timeout_ms
        correlation_id = next(self._correlation_ids) % FIRST_CORRELATION_ID  # higher ids belong to logins
        return ClientRequest(node_id, request, correlation_id, now_ms, expect_response, timeout_ms, callback)

    def send(self, request: ClientRequest, now_ms: int) -> None:
        self._ensure_active()
        if not self.can_send_request(request.destination, now_ms):
            raise IllegalStateError(f"Node {request.destination} is not ready for {request.request!r}.")
        try:
            self._send_in_version(request, self._usable_version(request), False, now_ms)
        except (UnsupportedVersionError, ProtocolError) as error:
            self._aborted.append(ClientResponse(request, received_ms=now_ms, version_mismatch=error))

    def _send_internal(self, request: Request, node_id: str, now_ms: int) -> None:
        """Send a request whose response is for the metadata updater."""
        client_request = self.new_client_request(node_id, request, now_ms, True)
        try:
            self._send_in_version(client_request, self._usable_version(client_request), True, now_ms)
        except (UnsupportedVersionError, ProtocolError) as error:
            self._metadata_updater.handle_failed_request(error, now_ms)

    def _usable_version(self, request: ClientRequest) -> int:
        versions = self._api_versions.get(request.destination)
        if versions is None:
            raise IllegalStateError(f"The versions of node {request.destination} are not known.")
        try:
            return versions.usable_version(request.request)
        except UnsupportedVersionError as error:
            raise error.at(node=request.destination) from None

    def _send_in_version(self, request: ClientRequest, version: int, is_internal: bool, now_ms: int) -> None:
        frame = request.request.encode(version, request.correlation_id, self._config.client_id)
        send = NetworkSend(request.destination, frame)
        log.debug("Sending %s in version %d", request, version)
        answered_type = request_type(request.request.api_key, version)
        self._in_flight.add(InFlightRequest(request, version, answered_type, send, now_ms, is_internal))
        self._selector.send(send)

    # ---- polling ---------------------------------------------------------------------------------------------------

    def poll(self, timeout_ms: int, now_ms: int) -> list[ClientResponse]:
        self._ensure_active()
        responses: list[ClientResponse] = []
        if self._aborted:
            responses, self._aborted = self._aborted, responses
        else:
            metadata_ms = self._metadata_updater.maybe_update(self, self._send_internal, now_ms)
            setup_ms = self._states.next_setup_timeout_ms(now_ms)
            request_ms = self._in_flight.next_timeout_ms(now_ms)
            self._selector.poll(min(timeout_ms, metadata_ms, setup_ms, request_ms, self._request_timeout_ms))
            now_ms = self._clock.now_ms()
            self._handle_completed_sends(responses, now_ms)
            self._handle_completed_receives(responses, now_ms)
            self._handle_disconnections(responses, now_ms)
            self._handle_connections(now_ms)
            self._handle_timed_out(responses, now_ms)
            self._handle_moved(responses, now_ms)
            self._handle_rebootstrap(responses, now_ms)
        for response in responses:
            try:
                response.complete()
            except Exception:
                log.exception("A callback failed on the response to %s", response.request)
        return responses

    def _handle_completed_sends(self, responses: list[ClientResponse], now_ms: int) -> None:
        """Complete requests without a response (acks=0) when they are sent."""
        for send in self._selector.completed_sends:
            self._metrics.request_sent(send.destination, send.size, now_ms)
            newest = self._in_flight.newest(send.destination)
            if newest is not None and newest.send is send and not newest.request.expect_response:
                responses.append(self._in_flight.complete_newest(send.destination).completed(None, now_ms))

    def _handle_completed_receives(self, responses: list[ClientResponse], now_ms: int) -> None:
        for receive in self._selector.completed_receives:
            node_id = receive.source
            self._metrics.response_received(node_id, SIZE_BYTES + len(receive.payload), now_ms)
            try:
                self._handle_receive(responses, receive, now_ms)
            except KafkaError as error:
                responses += self._close_connection(node_id, _closed_for(error), now_ms)
            except Exception as cause:  # a bug here or in a library must not affect the other nodes' responses
                fault = ProtocolError(
                    f"The answer of node {node_id} raised an unexpected {type(cause).__name__}: {one_line(str(cause))}"
                )
                log.debug("Where it was raised:", exc_info=cause)
                responses += self._close_connection(node_id, _closed_for(fault), now_ms)

    def _handle_receive(self, responses: list[ClientResponse], receive: NetworkReceive, now_ms: int) -> None:
        """Handle one response. The request stays in flight until nothing can fail any more. If something fails, the
        connection closes, and that completes the request.
        """
        node_id, request = receive.source, self._in_flight.oldest(receive.source)
        try:
            if request is None:
                raise ProtocolError(
                    f"Node {node_id} sent {len(receive.payload)} bytes although no request was in flight.", node=node_id
                )
            body = _read_response(request, receive.payload, node_id)
        except ProtocolError as error:
            raise _unreadable(error, self._states.place(node_id), request) from error
        self._throttle(request, body, now_ms)
        if request.is_internal:
            self._on_internal_response[request.request.request.api_key](request, body, now_ms)
        self._in_flight.complete_oldest(node_id)
        if not request.is_internal:
            response = request.completed(body, now_ms)
            self._metrics.request_answered(node_id, response.latency_ms, now_ms)
            responses.append(response)

    def _on_metadata(self, request: InFlightRequest, body: Message, now_ms: int) -> None:
        node_id = request.request.destination
        if request.request.request is CLUSTER_QUESTION:
            self._discovery.on_cluster(node_id, body)
            self._states.ready(node_id)
            return
        self._metadata_updater.handle_response(body, now_ms)
        self._has_news = True

    def _on_api_versions(self, request: InFlightRequest, body: Message, _: int) -> None:
        node_id = request.request.destination
        if self._discovery.on_versions(node_id, request.version, body):
            self._states.ready(node_id)

    def _throttle(self, request: InFlightRequest, body: Message, now_ms: int) -> None:
        throttle_ms = client_throttle_ms(request.request.request.api_key, body)
        if throttle_ms:
            node_id = request.request.destination
            self._in_flight.add_throttle(node_id, throttle_ms)
            self._states.throttle(node_id, now_ms + throttle_ms)

    def _handle_disconnections(self, responses: list[ClientResponse], now_ms: int) -> None:
        for node_id, state in self._selector.disconnected.items():
            # Otherwise this poll has closed the connection, or the node was removed.
            if self._is_open(node_id):
                responses += self._lost(node_id, _Loss(state), now_ms)

    def _handle_connections(self, now_ms: int) -> None:
        """Ask every node that is connected and has done its handshakes for its versions, and then for its cluster."""
        for node_id in self._selector.connected:
            if self._states.is_connecting(node_id):
                self._discovery.begin(node_id)
        for node_id in self._discovery.due():
            if self._selector.is_channel_ready(node_id) and self._in_flight.can_send_more(node_id):
                self._states.checking_api_versions(node_id)
                asked, version = self._discovery.take(node_id)
                request = self.new_client_request(node_id, asked, now_ms, True)
                self._send_in_version(request, version, True, now_ms)

    def _handle_timed_out(self, responses: list[ClientResponse], now_ms: int) -> None:
        for node_id in self._states.nodes_with_setup_timeout(now_ms):
            step, limit_ms = self._selector.setup_step(node_id), self._states.setup_timeout_ms(node_id)
            responses += self._close_connection(node_id, _stalled_at(step, node_id, limit_ms), now_ms)
        for node_id in self._in_flight.nodes_with_timed_out_requests(now_ms):
            error = DisconnectError(f"Node {node_id} did not answer within the request's timeout.", node=node_id)
            responses += self._close_connection(node_id, _closed_for(error, timed_out=True), now_ms)

    def _handle_moved(self, responses: list[ClientResponse], now_ms: int) -> None:
        """Close connections to addresses that nodes have left. Another broker may have the address now, and would
        refuse this node's requests forever.
        """
        if not self._has_news:
            return
        self._has_news = False
        for node in self._metadata_updater.fetch_nodes():
            node_id = node.id_string
            if self._is_open(node_id) and self._states.place(node_id) != (node.host, node.port):
                log.info("%s has moved: closing the connection to where it was.", node)
                responses += self._drop(node_id, now_ms)

    def _handle_rebootstrap(self, responses: list[ClientResponse], now_ms: int) -> None:
        if not self._metadata_updater.needs_rebootstrap(now_ms):
            return
        for node_id in self._states.open_nodes():  # a bootstrap server's too: its name may have another address now
            responses += self._drop(node_id, now_ms)  # no failure: errors must name the one that led here
        self._metadata_updater.rebootstrap(now_ms)

    # ---- the loss of a connection ----------------------------------------------------------------------------------

    def _is_open(self, node_id: str) -> bool:
        """Return whether the node is connected or being connected."""
        return self._states.is_connecting(node_id) or self._states.is_connected(node_id)

    def _close_connection(self, node_id: str, loss: _Loss, now_ms: int) -> list[ClientResponse]:
        """Close the connection because of `loss`, and then do what `_lost` does."""
        self._selector.close(node_id)
        return self._lost(node_id, loss, now_ms)

    def _lost(self, node_id: str, loss: _Loss, now_ms: int) -> list[ClientResponse]:
        """Handle the loss of a connection. Return the outcomes of the requests in flight on it."""
        state = loss.state
        was_attempt = self._states.is_preparing(node_id)
        self._states.disconnected(node_id, now_ms)
        self._discovery.forget(node_id)
        refusal = None
        if state.kind is ChannelKind.AUTHENTICATION_FAILED and state.error is not None:
            refusal = state.error
            self._states.authentication_failed(node_id, refusal, now_ms)
        is_nonsense = isinstance(state.error, ProtocolError)
        lost = f"Connection to node {node_id} lost ({state.kind.name.lower()})"
        reason = str(state.error) if is_nonsense else f"{lost}: {state.error}"
        self._log_loss(node_id, state, reason, now_ms)
        cancelled = self._cancel_in_flight(node_id, loss, refusal, now_ms)
        self._metadata_updater.handle_disconnect(node_id, reason, refusal, now_ms, is_nonsense=is_nonsense)
        if not was_attempt:
            self._metadata_updater.note_reachable(node_id)
        return cancelled

    def _log_loss(self, node_id: str, state: ChannelState, reason: str, now_ms: int) -> None:
        level = _log_level(state)
        if node_id.startswith("-") and any(node.id_string == node_id for node in self._metadata_updater.fetch_nodes()):
            level, reason = max(level, logging.WARNING), f"No metadata yet: {reason}"
        self._loss_log.log(level, node_id, reason, now_ms)

    def _drop(self, node_id: str, now_ms: int) -> list[ClientResponse]:
        """Close an open connection because the user of this client asks for it. It is no failure, so the metadata stays
        valid.
        """
        self._selector.close(node_id)
        self._discovery.forget(node_id)
        self._states.disconnected(node_id, now_ms)
        return self._cancel_in_flight(node_id, _Loss(ChannelState(ChannelKind.LOCAL_CLOSE)), None, now_ms)

    def _cancel_in_flight(
        self, node_id: str, loss: _Loss, refusal: KafkaError | None, now_ms: int
    ) -> list[ClientResponse]:
        cancelled = self._in_flight.clear(node_id)
        if any(each.is_internal and _is_update(each.request.request) for each in cancelled):
            self._metadata_updater.handle_failed_request(None, now_ms)
        error = loss.state.error
        nonsense = error if isinstance(error, ProtocolError) else None
        return [
            each.disconnected(now_ms, loss.timed_out, refusal, nonsense) for each in cancelled if not each.is_internal
        ]

    # ---- in flight, and the end ------------------------------------------------------------------------------------

    def in_flight_request_count(self, node_id: str | None = None) -> int:
        return self._in_flight.count(node_id)

    def has_in_flight_requests(self, node_id: str | None = None) -> bool:
        return self._in_flight.count(node_id) > 0

    def wakeup(self) -> None:
        self._selector.wakeup()

    def metrics(self, now_ms: int) -> dict[str, float]:
        return self._metrics.snapshot(self._selector.counts, self._selector.connection_count, now_ms)

    def node_metrics(self, now_ms: int) -> dict[str, dict[str, float]]:
        return self._metrics.by_node(now_ms)

    def connection_metrics(self, now_ms: int) -> dict[tuple[str, str], dict[str, float]]:
        return by_connection(self._states.readings(now_ms), self._in_flight.count)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._selector.close_all()
            self._metadata_updater.close()

    def _ensure_active(self) -> None:
        if self._is_closed:
            raise DisconnectError("The client is closed.")


def _is_update(request: Request) -> bool:
    return request.api_key is ApiKey.METADATA and request is not CLUSTER_QUESTION


def _log_level(state: ChannelState) -> int:
    """Return the log level of a lost connection."""
    if isinstance(state.error, ProtocolError):
        return logging.ERROR
    if state.kind is ChannelKind.LOCAL_CLOSE and not isinstance(state.error, DisconnectError):
        return logging.WARNING
    return _LOG_LEVELS.get(state.kind, logging.INFO)


def _stalled_at(step: SetupStep | None, node_id: str, limit_ms: int) -> _Loss:
    """Return the loss of a connection that was not ready within socket.connection.setup.timeout.ms."""
    if step is None or step is SetupStep.TCP:
        error = DisconnectError(f"Node {node_id} could not be connected to within {limit_ms} ms.", node=node_id)
        return _Loss(ChannelState(ChannelKind.NOT_CONNECTED, error), timed_out=True)
    error = DisconnectError(
        f"Node {node_id} is connected, but {step.value} did not end within {limit_ms} ms.{_HINTS[step]}", node=node_id
    )
    return _Loss(ChannelState(ChannelKind.AUTHENTICATE, error), timed_out=True)


def _closed_for(error: KafkaError, timed_out: bool = False) -> _Loss:
    return _Loss(ChannelState(ChannelKind.LOCAL_CLOSE, error), timed_out)


def _unreadable(error: ProtocolError, place: tuple[str, int], request: InFlightRequest | None) -> ProtocolError:
    """Return the error with the server's address. After its first answer, ask whether it is Kafka at all."""
    is_first = request is not None and request.request.request.api_key is ApiKey.API_VERSIONS
    question = " Is it a Kafka port, and does security.protocol fit it?" if is_first else ""
    return ProtocolError(f"The server at {place[0]}:{place[1]} does not answer as Kafka does: {error}{question}")


def _read_response(request: InFlightRequest, payload: bytes | bytearray, node_id: str) -> Message:
    """Return the response to `request`. Raises ProtocolError if it is none, and leaves the request as it is."""
    correlation_id = correlation_id_of(payload)
    if correlation_id != request.request.correlation_id:
        raise ProtocolError(
            f"Node {node_id} sent correlation id {correlation_id} instead of {request.request.correlation_id}.",
            node=node_id,
        )
    return parse_response(request.request_type, payload)[1]


def client_throttle_ms(api_key: ApiKey, response: Message) -> int:
    """Return how many ms the client must wait after this response. With older versions the broker has waited."""
    first_version = _FIRST_CLIENT_THROTTLED.get(api_key)
    if first_version is None or response.__version__ < first_version:
        return 0
    return max(to_ms(response.throttle_time), 0)
