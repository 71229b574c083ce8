"""Requests with futures, for code that polls until it has its answer. One thread, that of the caller."""

from __future__ import annotations

import random
from collections import deque
from typing import Final, Generic, NamedTuple, Protocol, Self, TypeVar

from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.client.factory import bootstrap, network_client
from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.client.seams import ClientRequest, ClientResponse, KafkaClient
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import DisconnectError, IllegalStateError, KafkaError, KafkaTimeoutError
from spark_kafka_sink.protocol.versions import Request


class Timer:
    """Runs out `timeout_ms` after it was made (org.apache.kafka.common.utils.Timer). Belongs to one thread."""

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
    """A value or a KafkaError, set once, by the poll that learns it
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
        """Whether it is worth waiting; makes a future a `PollCondition`."""
        return not self._is_done

    @property
    def error(self) -> KafkaError:
        """Why it failed. Raises IllegalStateError where it did not, or not yet."""
        if self._error is None:
            raise IllegalStateError("The request has not failed.")
        return self._error

    def value(self) -> T:
        """The value; raises the error where it failed, IllegalStateError where it is not done."""
        if not self._is_done:
            raise IllegalStateError("The request is not done.")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set by `complete`, and None may be a value

    def complete(self, value: T) -> None:
        """Set the value. Raises IllegalStateError where it is done already."""
        self._finish(value, None)

    def fail(self, error: KafkaError) -> None:
        """Set the error. Raises IllegalStateError where it is done already, and TypeError for what is not a KafkaError:
        None would make it a success.
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
    """Asked just before a poll that would wait."""

    def should_block(self) -> bool: ...


class UnsentRequest(NamedTuple):
    """A request, and the future of its response."""

    request: ClientRequest
    future: RequestFuture[ClientResponse]


class UnsentRequests:
    """Requests that wait for their node to be ready: a queue for each node, in order."""

    def __init__(self) -> None:
        self._queues: dict[Node, deque[UnsentRequest]] = {}

    def put(self, node: Node, request: UnsentRequest) -> None:
        self._queues.setdefault(node, deque()).append(request)

    def nodes(self) -> list[Node]:
        """Nodes with something to send."""
        return [node for node, queue in self._queues.items() if queue]

    def first(self, node: Node) -> UnsentRequest | None:
        queue = self._queues.get(node)
        return queue[0] if queue else None

    def take_first(self, node: Node) -> None:
        """Take out what `first` gave."""
        self._queues[node].popleft()

    def take_all(self, node: Node) -> deque[UnsentRequest]:
        return self._queues.pop(node, deque())

    def take_expired(self, now_ms: int) -> list[UnsentRequest]:
        """Take out those that have waited longer than their timeout."""
        expired: list[UnsentRequest] = []
        for node, queue in self._queues.items():
            waiting: deque[UnsentRequest] = deque()
            for each in queue:
                is_late = now_ms - each.request.created_ms > each.request.request_timeout_ms
                (expired if is_late else waiting).append(each)
            self._queues[node] = waiting
        return expired

    def clean(self) -> None:
        """Forget nodes with nothing to send."""
        self._queues = {node: queue for node, queue in self._queues.items() if queue}


class RequestClient:
    """Unsent requests per node in front of a `KafkaClient`
    (org.apache.kafka.clients.consumer.internals.ConsumerNetworkClient, for one thread: no lock and no wake-up).

    A poll waits no longer than MAX_POLL_MS, and no longer than `retry_backoff_ms` while nothing is in flight.
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
        """Make a client with connections of its own. `metadata` begins from bootstrap.servers. Raises
        BootstrapResolutionError where no address resolves.
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
        """Queue a request; a poll sends it. The future gets a response with a body, or fails: DisconnectError,
        KafkaTimeoutError, the node's refusal, UnsupportedVersionError.
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
        """Let the next poll close the connection; what is pending there fails with DisconnectError."""
        self._to_disconnect.append(node)

    # ---- metadata --------------------------------------------------------------------------------------------------

    def await_metadata_update(self, timer: Timer) -> bool:
        """Ask for an update and poll until it came; False where time ran out first. A client that starts again from
        bootstrap.servers has had no update: it knows no topic, and not all brokers.
        """
        version = self._metadata.request_update(reset_equivalent_backoff=False)
        self.poll(timer)
        while not self._has_come_since(version) and not timer.is_expired:
            self.poll(timer)
        return self._has_come_since(version)

    # ---- polling ---------------------------------------------------------------------------------------------------

    def poll_until(self, future: RequestFuture[T], timer: Timer) -> bool:
        """Poll until the future is done; False where time ran out first."""
        self.poll(timer, future)
        while not future.is_done() and not timer.is_expired:
            self.poll(timer, future)
        return future.is_done()

    def poll(self, timer: Timer, condition: PollCondition | None = None) -> None:
        """Send what can be sent and take in what came. Waits while there is nothing, and `condition` says it should.

        Raises what metadata met: a refusal by a node, an unauthorized or invalid topic.
        """
        self._handle_pending_disconnects()
        delay_ms = self._try_send(timer.now_ms)
        should_wait = condition is None or condition.should_block()
        self._client.poll(self._poll_ms(delay_ms, timer) if should_wait else 0, timer.now_ms)
        timer.update()
        # Before anything can begin to connect again, which would hide that the connection had failed.
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
        """Send to every node that is ready. Returns the time after which a node that is not may be."""
        delay_ms = MAX_POLL_MS
        for node in self._unsent.nodes():
            delay_ms = min(delay_ms, self._client.poll_delay_ms(node, now_ms))
            while (unsent := self._unsent.first(node)) is not None and self._client.ready(node, now_ms):
                self._client.send(unsent.request, now_ms)
                self._unsent.take_first(node)
        return delay_ms

    def _check_disconnects(self) -> None:
        """Requests to a node whose connection failed will not be sent; those in flight the client has seen to."""
        for node in self._unsent.nodes():
            if self._client.connection_failed(node):
                lost = DisconnectError(
                    f"The connection to {node} failed before the request could be sent.", node=node.id_string
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
    """The error that stands for what became of a request, None where it was answered."""
    if response.authentication_error is not None:
        return response.authentication_error
    if response.timed_out:
        limit = f"{response.request.request_timeout_ms} ms"
        return KafkaTimeoutError(f"{response.request} was not answered within {limit}.", node=response.destination)
    if response.disconnected:
        why = f": {response.protocol_error}" if response.protocol_error is not None else "."
        return DisconnectError(f"{response.request} failed: the connection was lost{why}", node=response.destination)
    return response.version_mismatch
