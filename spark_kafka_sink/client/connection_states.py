"""The state of each node's connection: when to try it again, and which address is next. The I/O thread owns it."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.clock import NEVER_MS
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError
from spark_kafka_sink.network.transport import Address

Resolver = Callable[[str, int], Sequence[Address]]
"""(host, port) → all addresses of the host, the preferred one first. Raises KafkaError if none exists."""


class ConnectionState(enum.Enum):
    """The states of a connection: DISCONNECTED → CONNECTING → CHECKING_API_VERSIONS → READY, and back."""

    DISCONNECTED = "disconnected"
    CONNECTING = "connecting"
    CHECKING_API_VERSIONS = "checking api versions"
    READY = "ready"
    AUTHENTICATION_FAILED = "authentication failed"


_DOWN: Final = (ConnectionState.DISCONNECTED, ConnectionState.AUTHENTICATION_FAILED)
_UP: Final = (ConnectionState.CHECKING_API_VERSIONS, ConnectionState.READY)
_PREPARING: Final = (ConnectionState.CONNECTING, ConnectionState.CHECKING_API_VERSIONS)


class _Addresses:
    """A host's addresses. Each one is tried once before the name is resolved again."""

    def __init__(self, host: str, port: int, resolve: Resolver) -> None:
        self.host = host
        self.port = port
        self._resolve = resolve
        self._addresses: Sequence[Address] = ()
        self._index = 0
        self._last_tried: Address | None = None

    def current(self) -> Address:
        """Return the address to try now. Resolves the host if no address is left, and raises the resolver's errors."""
        if not self._addresses:
            self._addresses = tuple(self._resolve(self.host, self.port))
            # The last address may be the cause of the failure, so begin with the one behind it.
            after = self._addresses.index(self._last_tried) + 1 if self._last_tried in self._addresses else 0
            self._index = after % len(self._addresses)
        self._last_tried = self._addresses[self._index]
        return self._last_tried

    def move_on(self) -> None:
        """Go to the next address. After the last one the host is resolved again."""
        self._index += 1
        if self._index >= len(self._addresses):
            self.forget()

    def forget(self) -> None:
        """Resolve the name again next time. Its addresses may have changed during the connection."""
        self._addresses = ()


@dataclass(slots=True)
class _NodeConnection:
    state: ConnectionState
    addresses: _Addresses
    last_attempt_ms: int
    reconnect_backoff_ms: int
    setup_timeout_ms: int
    failed_attempts: int = 0
    failed_setups: int = 0
    throttled_until_ms: int = NEVER_MS
    authentication_error: KafkaError | None = None


class ConnectionReading(NamedTuple):
    """What the metrics show of a connection."""

    address: str
    """`host:port`, as the broker or bootstrap.servers names it."""
    is_ready: bool
    throttle_ms: int
    """How long the broker still throttles this client."""


class ClusterConnectionStates:
    """The connection of each node, by the node's id string (org.apache.kafka.clients.ClusterConnectionStates).

    The backoff between attempts grows from `reconnect_backoff_ms` to `reconnect_backoff_max_ms`, and the connection
    setup timeout from `setup_timeout_ms` to `setup_timeout_max_ms`. Both double, with a jitter of 20 %. All times in
    ms.
    """

    def __init__(
        self,
        reconnect_backoff_ms: int,
        reconnect_backoff_max_ms: int,
        setup_timeout_ms: int,
        setup_timeout_max_ms: int,
        resolve: Resolver,
        rng: random.Random,
    ) -> None:
        self._reconnect_backoff = ExponentialBackoff.doubling(reconnect_backoff_ms, reconnect_backoff_max_ms, rng)
        self._setup_timeout = ExponentialBackoff.doubling(setup_timeout_ms, setup_timeout_max_ms, rng)
        self._resolve = resolve
        self._connections: dict[str, _NodeConnection] = {}

    # ---- questions -------------------------------------------------------------------------------------------------

    def can_connect(self, node_id: str, now_ms: int) -> bool:
        """Return whether the node is not connected and its backoff since the last attempt is over."""
        connection = self._connections.get(node_id)
        return connection is None or (connection.state in _DOWN and self._backoff_left(connection, now_ms) == 0)

    def connection_delay(self, node_id: str, now_ms: int) -> int:
        """Return the ms until the state can change without an event: the rest of the backoff while disconnected, or of
        the setup timeout while connecting.
        """
        connection = self._connections.get(node_id)
        if connection is None:
            return 0
        if connection.state in _DOWN:
            return self._backoff_left(connection, now_ms)
        if connection.state is ConnectionState.CONNECTING:
            return self._setup_left(connection, now_ms)
        return FOREVER_MS

    def poll_delay_ms(self, node_id: str, now_ms: int) -> int:
        """Return `connection_delay`, or the rest of the throttle if the node is connected and throttled."""
        throttle_ms = self.throttle_delay_ms(node_id, now_ms)
        return throttle_ms if throttle_ms and self.is_connected(node_id) else self.connection_delay(node_id, now_ms)

    def throttle_delay_ms(self, node_id: str, now_ms: int) -> int:
        connection = self._connections.get(node_id)
        return max(connection.throttled_until_ms - now_ms, 0) if connection is not None else 0

    def is_connecting(self, node_id: str) -> bool:
        return self._is_in(node_id, (ConnectionState.CONNECTING,))

    def is_preparing(self, node_id: str) -> bool:
        """Return whether the node is being connected, or its versions are being requested."""
        return self._is_in(node_id, _PREPARING)

    def is_connected(self, node_id: str) -> bool:
        return self._is_in(node_id, _UP)

    def open_nodes(self) -> list[str]:
        """Return the nodes that are connected or being connected."""
        return [node_id for node_id, connection in self._connections.items() if connection.state not in _DOWN]

    def is_disconnected(self, node_id: str) -> bool:
        """Return whether the last attempt failed or ended. A node that was never tried is not disconnected."""
        return self._is_in(node_id, _DOWN)

    def is_ready(self, node_id: str, now_ms: int) -> bool:
        """Return whether the node is ready for requests and not throttled."""
        connection = self._connections.get(node_id)
        if connection is None or connection.state is not ConnectionState.READY:
            return False
        return connection.throttled_until_ms <= now_ms

    def authentication_error(self, node_id: str) -> KafkaError | None:
        """Return the error with which the node refused this client, until a later connection to it is ready."""
        connection = self._connections.get(node_id)
        return connection.authentication_error if connection is not None else None

    def last_attempt_ms(self, node_id: str) -> int:
        connection = self._connections.get(node_id)
        return connection.last_attempt_ms if connection is not None else NEVER_MS

    def setup_timeout_ms(self, node_id: str) -> int:
        return self._connection(node_id).setup_timeout_ms

    def nodes_with_setup_timeout(self, now_ms: int) -> list[str]:
        """Return the nodes whose connection setup has timed out."""
        return [
            node_id
            for node_id, connection in self._connections.items()
            if connection.state is ConnectionState.CONNECTING and self._setup_left(connection, now_ms) == 0
        ]

    def next_setup_timeout_ms(self, now_ms: int) -> int:
        """Return the ms until the first connection setup times out."""
        left_ms = FOREVER_MS
        for connection in self._connections.values():
            if connection.state is ConnectionState.CONNECTING:
                left_ms = min(left_ms, self._setup_left(connection, now_ms))
        return left_ms

    def readings(self, now_ms: int) -> dict[str, ConnectionReading]:
        """Return every connection by its node id. Any thread may call it."""
        return {
            node_id: ConnectionReading(
                f"{each.addresses.host}:{each.addresses.port}",
                each.state is ConnectionState.READY,
                max(0, each.throttled_until_ms - now_ms),
            )
            for node_id, each in self._connections.copy().items()
        }

    # ---- moves -----------------------------------------------------------------------------------------------------

    def connecting(self, node_id: str, host: str, port: int, now_ms: int) -> None:
        """Begin an attempt with the next address, or with those of the new host if the node has moved."""
        connection = self._connections.get(node_id)
        if connection is not None and (connection.addresses.host, connection.addresses.port) == (host, port):
            connection.last_attempt_ms = now_ms
            connection.state = ConnectionState.CONNECTING
            connection.addresses.move_on()
            return
        self._connections[node_id] = _NodeConnection(
            state=ConnectionState.CONNECTING,
            addresses=_Addresses(host, port, self._resolve),
            last_attempt_ms=now_ms,
            reconnect_backoff_ms=self._reconnect_backoff.backoff_ms(0),
            setup_timeout_ms=self._setup_timeout.backoff_ms(0),
        )

    def place(self, node_id: str) -> tuple[str, int]:
        """Return host and port of the last attempt."""
        addresses = self._connection(node_id).addresses
        return addresses.host, addresses.port

    def current_address(self, node_id: str) -> Address:
        """Return the address of the current attempt. Raises the resolver's errors."""
        return self._connection(node_id).addresses.current()

    def disconnected(self, node_id: str, now_ms: int) -> None:
        """The connection has ended, or the attempt has failed."""
        connection = self._connection(node_id)
        self._lengthen_backoff(connection, now_ms)
        if connection.state is ConnectionState.CONNECTING:
            connection.failed_setups += 1
            connection.setup_timeout_ms = self._setup_timeout.backoff_ms(connection.failed_setups)
        else:
            self._reset_setup_timeout(connection)
            if connection.state in _UP:
                connection.addresses.forget()
        connection.state = ConnectionState.DISCONNECTED

    def checking_api_versions(self, node_id: str) -> None:
        """The node is connected. Its versions are being requested."""
        connection = self._connection(node_id)
        connection.state = ConnectionState.CHECKING_API_VERSIONS
        self._reset_setup_timeout(connection)

    def ready(self, node_id: str) -> None:
        """The node accepts requests. Earlier failures no longer count."""
        connection = self._connection(node_id)
        connection.state = ConnectionState.READY
        connection.authentication_error = None
        connection.failed_attempts = 0
        connection.reconnect_backoff_ms = self._reconnect_backoff.backoff_ms(0)
        self._reset_setup_timeout(connection)

    def authentication_failed(self, node_id: str, error: KafkaError, now_ms: int) -> None:
        """The node refused this client. Call it after `disconnected`."""
        connection = self._connection(node_id)
        connection.state = ConnectionState.AUTHENTICATION_FAILED
        connection.authentication_error = error
        self._lengthen_backoff(connection, now_ms)

    def throttle(self, node_id: str, until_ms: int) -> None:
        """Allow no request to the node before `until_ms`. A throttle that lasts longer stays."""
        connection = self._connections.get(node_id)
        if connection is not None:
            connection.throttled_until_ms = max(connection.throttled_until_ms, until_ms)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _connection(self, node_id: str) -> _NodeConnection:
        connection = self._connections.get(node_id)
        if connection is None:
            raise IllegalStateError(f"No connection to node {node_id} was ever begun.")
        return connection

    def _is_in(self, node_id: str, states: tuple[ConnectionState, ...]) -> bool:
        connection = self._connections.get(node_id)
        return connection is not None and connection.state in states

    def _backoff_left(self, connection: _NodeConnection, now_ms: int) -> int:
        return max(connection.last_attempt_ms + connection.reconnect_backoff_ms - now_ms, 0)

    def _setup_left(self, connection: _NodeConnection, now_ms: int) -> int:
        return max(connection.last_attempt_ms + connection.setup_timeout_ms - now_ms, 0)

    def _lengthen_backoff(self, connection: _NodeConnection, now_ms: int) -> None:
        connection.last_attempt_ms = now_ms
        connection.reconnect_backoff_ms = self._reconnect_backoff.backoff_ms(connection.failed_attempts)
        connection.failed_attempts += 1

    def _reset_setup_timeout(self, connection: _NodeConnection) -> None:
        connection.failed_setups = 0
        connection.setup_timeout_ms = self._setup_timeout.backoff_ms(0)
