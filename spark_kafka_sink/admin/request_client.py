"""Requests with futures, and the timer of a call, for code that polls until it has its response. Not thread-safe."""

from __future__ import annotations

import random
from collections import deque
from typing import Final, Generic, NamedTuple, Protocol, Self, TypeVar

from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.client.factory import bootstrap, network_client
from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.client.network_metrics import throttles
from spark_kafka_sink.client.seams import ClientRequest, ClientResponse, KafkaClient
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import DisconnectError, IllegalStateError, KafkaError, KafkaTimeoutError
from spark_kafka_sink.protocol.versions import Request


class Timer:
    """Expires `timeout_ms` after its creation (org.apache.kafka.common.utils.Timer). Not thread-safe."""

    def __init__(self, clock: Clock, timeout_ms: int) -> None:
        self._clock = clock
        self.timeout_ms = timeout_ms
        self.now_ms = clock.now_ms()
        """The time as of the last `update`."""
        self._deadline_ms = min(self.now_ms + timeout_ms, FOREVER_MS)

    def update(self) -> None:
        """Read the clock."""
        self.now_ms = max(self._clock.now_ms(), self.now_ms)

    @property
    def remaining_ms(self) -> int:
        return max(self._deadline_ms - self.now_ms, 0)

    @property
    def is_expired(self) -> bool:
        return self.now_ms >= self._deadline_ms


T = TypeVar("T")

MAX_POLL_MS: Final = 5_000
_MANY_IN_FLIGHT: Final = 100


class RequestFuture(Generic[T]):
    """A value or a KafkaError, which a poll sets once
    (org.apache.kafka.clients.consumer.internals.RequestFuture).
    """

    def __init__(self) -> None:
        self._is_done = False
        self._value: T | None = None
        self._error: KafkaError | None = None

    def is_done(self) -> bool:
        return self._is_done

    def succeeded(self) -> bool:
        return self._is_done and self._error is None

    def failed(self) -> bool:
        return self._error is not None

    def should_block(self) -> bool:
        """Return whether to wait, as a `PollCondition`."""
        return not self._is_done

    @property
    def error(self) -> KafkaError:
        """The error of the failure. Raises IllegalStateError if the future has not failed."""
        if self._error is None:
            raise IllegalStateError("The request has not failed.")
        return self._error

    def value(self) -> T:
        """Return the value. Raises the error of a failure, or IllegalStateError if the future is not done."""
        if not self._is_done:
            raise IllegalStateError("The request is not done.")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set by `complete`, and None may be a value

    def complete(self, value: T) -> None:
        """Set the value. Raises IllegalStateError if the future is done."""
        self._finish(value, None)

    def fail(self, error: KafkaError) -> None:
        """Set the error. Raises IllegalStateError if the future is done, and TypeError if it is not a KafkaError: None
        would make the future a success.
        """
        if not isinstance(error, KafkaError):
            raise TypeError(f"A request fails with a KafkaError, not with {error!r}.")
        self._finish(None, error)

    def _finish(self, value: T | None, error: KafkaError | None) -> None:
        if self._is_done:
            raise IllegalStateError("The request is done already; it cannot end twice.")
        self._value, self._error = value, error
        self._is_done = True


class PollCondition(Protocol):
    """Decides whether a poll that has nothing to do should wait."""

    def should_block(self) -> bool: ...


class UnsentRequest(NamedTuple):
    """A request, and the future of its response."""

    request: ClientRequest
    future: RequestFuture[ClientResponse]


class UnsentRequests:
    """Requests that wait until their node is ready: one queue for each node."""

    def __init__(self) -> None:
        self._queues: dict[Node, deque[UnsentRequest]] = {}

    def put(self, node: Node, request: UnsentRequest) -> None:
        self._queues.setdefault(node, deque()).append(request)

    def nodes(self) -> list[Node]:
        """Return the nodes with requests to send."""
        return [node for node, queue in self._queues.items() if queue]

    def first(self, node: Node) -> UnsentRequest | None:
        queue = self._queues.get(node)
        return queue[0] if queue else None

    def take_first(self, node: Node) -> None:
        """Remove the request that `first` returned."""
        self._queues[node].popleft()

    def take_all(self, node: Node) -> deque[UnsentRequest]:
        return self._queues.pop(node, deque())

    def take_expired(self, now_ms: int) -> list[UnsentRequest]:
        """Remove and return the requests that have waited longer than their timeout."""
        expired: list[UnsentRequest] = []
        for node, queue in self._queues.items():
            waiting: deque[UnsentRequest] = deque()
            for each in queue:
                is_late = now_ms - each.request.created_ms > each.request.request_timeout_ms
                (expired if is_late else waiting).append(each)
            self._queues[node] = waiting
        return expired

    def clean(self) -> None:
        """Remove nodes without requests to send."""
        self._queues = {node: queue for node, queue in self._queues.items() if queue}


class RequestClient:
    """Unsent requests per node in front of a `KafkaClient`
    (org.apache.kafka.clients.consumer.internals.ConsumerNetworkClient, for one thread: no lock and no wake-up).

    A poll waits at most MAX_POLL_MS, and at most `retry_backoff_ms` while nothing is in flight.
    """

    def __init__(
        self,
        client: KafkaClient,
        metadata: Metadata,
        clock: Clock,
        retry_backoff_ms: int,
        request_timeout_ms: int,
    ) -> None:
        self._client = client
        self._metadata = metadata
        self._clock = clock
        self._retry_backoff_ms = retry_backoff_ms
        self._request_timeout_ms = request_timeout_ms
        self._unsent = UnsentRequests()
        self._to_disconnect: deque[Node] = deque()

    @classmethod
    def connect(
        cls,
        config: ProducerConfig,
        metadata: Metadata,
        clock: Clock,
        rng: random.Random,
        api_versions: ApiVersions | None = None,
    ) -> Self:
        """Return a client with its own connections. `metadata` starts from bootstrap.servers. Raises
        BootstrapResolutionError if no address resolves.
        """
        bootstrap(metadata, config)
        client = network_client(
            config, metadata, clock, rng, api_versions or ApiVersions(), max_in_flight_requests=_MANY_IN_FLIGHT
        )
        return cls(client, metadata, clock, config.retry_backoff_ms, config.request_timeout_ms)

    # ---- requests --------------------------------------------------------------------------------------------------

    def send(
        self, node: Node, request: Request, request_timeout_ms: int | None = None
    ) -> RequestFuture[ClientResponse]:
        """Queue a request for the next poll. The future gets a response with a body, or fails with DisconnectError,
        KafkaTimeoutError, UnsupportedVersionError or the error of the login.
        """
        future: RequestFuture[ClientResponse] = RequestFuture()

        def on_response(response: ClientResponse) -> None:
            error = _error_of(response)
            if error is None:
                future.complete(response)
            else:
                future.fail(error)

        timeout_ms = self._request_timeout_ms if request_timeout_ms is None else request_timeout_ms
        client_request = self._client.new_client_request(
            node.id_string, request, self._clock.now_ms(), True, timeout_ms, on_response
        )
        self._unsent.put(node, UnsentRequest(client_request, future))
        return future

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def least_loaded_node(self) -> Node | None:
        return self._client.least_loaded_node(self._clock.now_ms())

    def disconnect_async(self, node: Node) -> None:
        """Let the next poll close the connection. Its pending requests fail with DisconnectError."""
        self._to_disconnect.append(node)

    # ---- metadata --------------------------------------------------------------------------------------------------

    def await_metadata_update(self, timer: Timer) -> bool:
        """Ask for an update and poll until it comes. Return False if the timer expires first. Starting again from
        bootstrap.servers is not an update, because it gives no topics and not all brokers.
        """
        version = self._metadata.request_update(reset_equivalent_backoff=False)
        self.poll(timer)
        while not self._has_come_since(version) and not timer.is_expired:
            self.poll(timer)
        return self._has_come_since(version)

    def why_unanswered(self) -> str:
        """Return why a request to the cluster got no answer in its time, as far as it is known."""
        return self._metadata.why_unanswered() + self.throttles()

    def throttles(self) -> str:
        """As `network_metrics.throttles`."""
        return throttles(self._client.connection_metrics(self._clock.now_ms()))

    # ---- polling ---------------------------------------------------------------------------------------------------

    def poll_until(self, future: RequestFuture[T], timer: Timer) -> bool:
        """Poll until the future is done. Return False if the timer expires first."""
        self.poll(timer, future)
        while not future.is_done() and not timer.is_expired:
            self.poll(timer, future)
        return future.is_done()

    def poll(self, timer: Timer, condition: PollCondition | None = None) -> None:
        """Send and receive. If there is nothing to do, wait as long as `condition` says so.

        Raises the errors of metadata: a refused login, an unauthorized or invalid topic.
        """
        self._handle_pending_disconnects()
        delay_ms = self._try_send(timer.now_ms)
        should_wait = condition is None or condition.should_block()
        self._client.poll(self._poll_ms(delay_ms, timer) if should_wait else 0, timer.now_ms)
        timer.update()
        # Before a new attempt to connect, which would hide the failed connection.
        self._check_disconnects()
        self._try_send(timer.now_ms)
        self._fail_expired(timer.now_ms)
        self._unsent.clean()
        self._metadata.maybe_raise_any_error()

    def close(self) -> None:
        self._client.close()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _has_come_since(self, version: int) -> bool:
        return self._metadata.update_version > version and not self._metadata.fetch().is_bootstrap_configured

    def _poll_ms(self, delay_ms: int, timer: Timer) -> int:
        longest_ms = MAX_POLL_MS if self._client.has_in_flight_requests() else self._retry_backoff_ms
        return min(timer.remaining_ms, delay_ms, longest_ms)

    def _try_send(self, now_ms: int) -> int:
        """Send to every node that is ready. Return the ms after which another node may be ready."""
        delay_ms = MAX_POLL_MS
        for node in self._unsent.nodes():
            delay_ms = min(delay_ms, self._client.poll_delay_ms(node, now_ms))
            while (unsent := self._unsent.first(node)) is not None and self._client.ready(node, now_ms):
                self._client.send(unsent.request, now_ms)
                self._unsent.take_first(node)
        return delay_ms

    def _check_disconnects(self) -> None:
        """Fail the unsent requests of nodes whose connection failed. The client fails those in flight."""
        for node in self._unsent.nodes():
            if self._client.connection_failed(node):
                why = self._metadata.node_failure(node.id_string)
                lost = DisconnectError(
                    f"The connection to {node} failed before the request could be sent{f': {why}' if why else '.'}",
                    node=node.id_string,
                )
                error = self._client.authentication_error(node) or lost
                for unsent in self._unsent.take_all(node):
                    unsent.future.fail(error)

    def _handle_pending_disconnects(self) -> None:
        while self._to_disconnect:
            node = self._to_disconnect.popleft()
            error = DisconnectError(f"The connection to {node} was closed on request.", node=node.id_string)
            for unsent in self._unsent.take_all(node):
                unsent.future.fail(error)
            self._client.disconnect(node.id_string)

    def _fail_expired(self, now_ms: int) -> None:
        for request, future in self._unsent.take_expired(now_ms):
            future.fail(KafkaTimeoutError(f"{request}: the node was not ready within {request.request_timeout_ms} ms."))


def _error_of(response: ClientResponse) -> KafkaError | None:
    """Return the error of a request that was not answered, None if it was answered."""
    if response.authentication_error is not None:
        return response.authentication_error
    if response.timed_out:
        limit = f"{response.request.request_timeout_ms} ms"
        return KafkaTimeoutError(f"{response.request} was not answered within {limit}.", node=response.destination)
    if response.disconnected:
        why = f": {response.protocol_error}" if response.protocol_error is not None else "."
        return DisconnectError(f"{response.request} failed: the connection was lost{why}", node=response.destination)
    return response.version_mismatch
