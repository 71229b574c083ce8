"""The connections to all nodes taken together: which node may be asked, and what the loss of one means. I/O thread
only.
"""

from __future__ import annotations

import logging
import random
from operator import itemgetter
from typing import Final, NamedTuple

from spark_kafka_sink.client.api_versions import VersionDiscovery
from spark_kafka_sink.client.connection_states import ClusterConnectionStates
from spark_kafka_sink.client.in_flight import InFlightRequests
from spark_kafka_sink.client.loss_log import LossLog
from spark_kafka_sink.client.metadata_updater import LeastLoadedNode, MetadataUpdater
from spark_kafka_sink.client.seams import ClientResponse, Selectable
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import DisconnectError, KafkaError, ProtocolError
from spark_kafka_sink.network.frames import ChannelKind, ChannelState
from spark_kafka_sink.protocol.messages import ApiKey

_LOG_LEVELS: Final = {
    ChannelKind.NOT_CONNECTED: logging.WARNING,
    ChannelKind.AUTHENTICATE: logging.WARNING,
    ChannelKind.AUTHENTICATION_FAILED: logging.ERROR,
    ChannelKind.EXPIRED: logging.DEBUG,
}
"""How loudly a lost connection is told of; INFO where it is not listed."""

log = logging.getLogger(__name__)


class Loss(NamedTuple):
    """Why a connection is over. `timed_out`: we closed it for want of an answer."""

    state: ChannelState
    timed_out: bool = False


class Connections:
    """Selector, connection states, version discovery and requests in flight, kept in step."""

    def __init__(
        self,
        selector: Selectable,
        metadata_updater: MetadataUpdater,
        states: ClusterConnectionStates,
        discovery: VersionDiscovery,
        in_flight: InFlightRequests,
        rng: random.Random,
        send_buffer: int,
        receive_buffer: int,
    ) -> None:
        self.states = states
        self.discovery = discovery
        self.in_flight = in_flight
        self._selector = selector
        self._metadata_updater = metadata_updater
        self._rng = rng
        self._send_buffer = send_buffer
        self._receive_buffer = receive_buffer
        self._loss_log = LossLog(log)

    def can_send_request(self, node_id: str, now_ms: int) -> bool:
        """Connected, the channel done with its handshakes, not throttled, and room in flight."""
        return (
            self.states.is_ready(node_id, now_ms)
            and self._selector.is_channel_ready(node_id)
            and self.in_flight.can_send_more(node_id)
        )

    def can_connect(self, node: Node, now_ms: int) -> bool:
        """Not connected and not backing off."""
        return self.states.can_connect(node.id_string, now_ms)

    def least_loaded(self, now_ms: int) -> LeastLoadedNode:
        """The node to trouble with a request that any node can answer.

        In this order: a ready node with the fewest in flight, a node being connected, the node
        whose last connection attempt is longest ago. The search starts anywhere, so that clients spread. Nodes
        backing off are passed over.
        """
        nodes = self._metadata_updater.fetch_nodes()
        start = self._rng.randrange(len(nodes)) if nodes else 0
        ready: list[tuple[int, Node]] = []
        connecting: list[Node] = []
        connectable: list[tuple[int, Node]] = []
        is_any_connected = False
        for node in (*nodes[start:], *nodes[:start]):
            node_id = node.id_string
            is_any_connected |= self.states.is_connected(node_id)
            if self.can_send_request(node_id, now_ms):
                ready.append((self.in_flight.count(node_id), node))
            elif self.states.is_preparing(node_id):
                connecting.append(node)
            elif self.can_connect(node, now_ms):
                connectable.append((self.states.last_attempt_ms(node_id), node))
        if ready:
            return LeastLoadedNode(min(ready, key=itemgetter(0))[1], is_any_connected)
        if connecting:
            return LeastLoadedNode(connecting[0], is_any_connected)
        return LeastLoadedNode(min(connectable, key=itemgetter(0))[1] if connectable else None, is_any_connected)

    def initiate_connect(self, node: Node, now_ms: int) -> None:
        """Begin to connect to the node's next address. A host that does not resolve is a connection that failed."""
        node_id = node.id_string
        self.states.connecting(node_id, node.host, node.port, now_ms)
        try:
            address = self.states.current_address(node_id)
            self._selector.connect(node_id, address, self._send_buffer, self._receive_buffer)
        except Exception as error:  # of any kind: the node would stay in CONNECTING, and others wait for it
            if not isinstance(error, KafkaError | OSError):
                log.debug("Where it was raised:", exc_info=error)
            self._loss_log.tell(logging.WARNING, node_id, f"No connection to {node}: {error}", now_ms)
            self.states.disconnected(node_id, now_ms)
            self._metadata_updater.handle_disconnect(node_id, str(error), None, now_ms)

    def is_open(self, node_id: str) -> bool:
        """Connected or being connected."""
        return self.states.is_connecting(node_id) or self.states.is_connected(node_id)

    def close(self, node_id: str, loss: Loss, now_ms: int) -> list[ClientResponse]:
        """Close the connection ourselves, for what `loss` says; the rest as in `lost`."""
        self._selector.close(node_id)
        return self.lost(node_id, loss, now_ms)

    def lost(self, node_id: str, loss: Loss, now_ms: int) -> list[ClientResponse]:
        """The connection is gone. Returns what became of the requests in flight on it."""
        state = loss.state
        self.states.disconnected(node_id, now_ms)
        self.discovery.forget(node_id)
        refusal = None
        if state.kind is ChannelKind.AUTHENTICATION_FAILED and state.error is not None:
            refusal = state.error
            self.states.authentication_failed(node_id, refusal, now_ms)
        reason = f"Connection to node {node_id} lost ({state.kind.name.lower()}): {state.error}"
        is_nonsense = isinstance(state.error, ProtocolError)
        if is_nonsense:
            reason = str(state.error)
        self._log_loss(node_id, state, reason, now_ms)
        cancelled = self._cancel_in_flight(node_id, loss, refusal, now_ms)
        self._metadata_updater.handle_disconnect(node_id, reason, refusal, now_ms, is_nonsense=is_nonsense)
        return cancelled

    def _log_loss(self, node_id: str, state: ChannelState, reason: str, now_ms: int) -> None:
        level = _LOG_LEVELS.get(state.kind, logging.INFO)
        if isinstance(state.error, ProtocolError):
            level = logging.ERROR
        elif state.kind is ChannelKind.LOCAL_CLOSE and not isinstance(state.error, DisconnectError):
            level = logging.WARNING
        if node_id.startswith("-") and any(node.id_string == node_id for node in self._metadata_updater.fetch_nodes()):
            level, reason = max(level, logging.WARNING), f"No metadata yet: {reason}"
        self._loss_log.tell(level, node_id, reason, now_ms)

    def drop(self, node_id: str, now_ms: int) -> list[ClientResponse]:
        """Close the connection because our user wants it closed: no failure, and no reason to doubt the metadata."""
        self._selector.close(node_id)
        self.discovery.forget(node_id)
        if self.is_open(node_id):
            self.states.disconnected(node_id, now_ms)
        return self._cancel_in_flight(node_id, Loss(ChannelState(ChannelKind.LOCAL_CLOSE)), None, now_ms)

    def _cancel_in_flight(
        self, node_id: str, loss: Loss, refusal: KafkaError | None, now_ms: int
    ) -> list[ClientResponse]:
        cancelled = self.in_flight.clear(node_id)
        if any(each.is_internal and each.request.request.api_key is ApiKey.METADATA for each in cancelled):
            self._metadata_updater.handle_failed_request(None, now_ms)
        error = loss.state.error
        nonsense = error if isinstance(error, ProtocolError) else None
        return [
            each.disconnected(now_ms, loss.timed_out, refusal, nonsense) for each in cancelled if not each.is_internal
        ]
