"""Client telemetry (KIP-714): the producer's metrics, pushed to brokers that ask for them.

`TelemetryStates` decides what is due and when, without requests; `ClientTelemetry` sends it, as a part of the Sender's
turn. Until a broker offers the two APIs, which it does only with a receiver, a turn costs one comparison. References:
org.apache.kafka.common.telemetry.internals.ClientTelemetryReporter, NetworkClient.TelemetrySender.

Differences from the Java client:

- A broker that does not offer the APIs is never asked. The Java client asks once in five minutes.
- If a push gets no answer, the next one follows after the interval, which doubles each time, with the same
  subscription: every broker knows it. A question without an answer is asked again after a pause that doubles. In Java
  either may end telemetry.
- Errors that the KIP does not name delay the next question by one interval. In Java they end telemetry.
- No pushed metric matches the brokers' prefixes: nothing is pushed, and they are asked again after the interval.
- The last push has the counts of the last records, because it is sent after these. A close waits for it at most
  LAST_PUSH_MS, and opens no connection for it. In Java the thread may end before this push.
- Connections to bootstrap.servers are not kept for telemetry.
"""

from __future__ import annotations

import base64
import enum
import logging
import random
import uuid
from collections.abc import Mapping
from typing import Final

from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.client.seams import ClientResponse, KafkaClient
from spark_kafka_sink.common.clock import NEVER_MS, Clock
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import error_for_code
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.operations import OperationResult
from spark_kafka_sink.producer.telemetry_payload import PayloadMaker
from spark_kafka_sink.producer.telemetry_points import TelemetryPoints
from spark_kafka_sink.producer.transactions import TransactionManager
from spark_kafka_sink.protocol.telemetry import (
    DEFAULT_PUSH_INTERVAL_MS,
    GetTelemetrySubscriptionsRequest,
    PushTelemetryRequest,
    Subscription,
)
from spark_kafka_sink.protocol.versions import ApiKey, Message, Request

log = logging.getLogger(__name__)

LAST_PUSH_MS: Final = 1_000
"""How long a close waits at most for the answer to the last push."""
_EARLIEST_PUSH: Final = 0.5
_LATEST_PUSH: Final = 1.5
"""The first push comes after this part of the interval, so that clients that start together do not push together."""
_FIRST_RETRY_MS: Final = 1_000
_MOST_DOUBLINGS: Final = 6
_FIRST_SEARCH_MS: Final = 100
_LONGEST_SEARCH_MS: Final = 30_000
"""The first and the longest pause before the next look for a broker that can be asked."""


class State(enum.Enum):
    """The states of Java's ClientTelemetryState, and one before them."""

    NOT_OFFERED = "no broker has offered the APIs"
    SUBSCRIPTION_NEEDED = "asks for the subscription next"
    SUBSCRIPTION_IN_PROGRESS = "has asked for the subscription"
    PUSH_NEEDED = "pushes next"
    PUSH_IN_PROGRESS = "has pushed"
    TERMINATING_PUSH_NEEDED = "pushes for the last time next"
    TERMINATING_PUSH_IN_PROGRESS = "has pushed for the last time"
    TERMINATED = "does nothing any more"


_IN_PROGRESS: Final = {
    State.SUBSCRIPTION_NEEDED: State.SUBSCRIPTION_IN_PROGRESS,
    State.PUSH_NEEDED: State.PUSH_IN_PROGRESS,
    State.TERMINATING_PUSH_NEEDED: State.TERMINATING_PUSH_IN_PROGRESS,
}
_TERMINATING: Final = frozenset({State.TERMINATING_PUSH_NEEDED, State.TERMINATING_PUSH_IN_PROGRESS})
_MAY_PUSH_LAST: Final = frozenset({State.PUSH_NEEDED, State.PUSH_IN_PROGRESS, State.SUBSCRIPTION_IN_PROGRESS})


class Reaction(enum.Enum):
    """What follows an error of a broker."""

    ASK_AT_ONCE = "ask for the subscription at once"
    ASK_LATER = "ask for the subscription after the interval"
    STOP = "stop"


class Code(enum.IntEnum):
    """The error codes that the KIP names."""

    UNSUPPORTED_VERSION = 35
    INVALID_REQUEST = 42
    UNSUPPORTED_COMPRESSION_TYPE = 76
    INVALID_RECORD = 87
    THROTTLING_QUOTA_EXCEEDED = 89
    UNKNOWN_SUBSCRIPTION_ID = 117
    TELEMETRY_TOO_LARGE = 118


REACTIONS: Final[Mapping[int, Reaction]] = {
    Code.UNSUPPORTED_VERSION: Reaction.STOP,
    Code.INVALID_REQUEST: Reaction.STOP,
    Code.UNSUPPORTED_COMPRESSION_TYPE: Reaction.ASK_AT_ONCE,
    Code.INVALID_RECORD: Reaction.STOP,
    Code.THROTTLING_QUOTA_EXCEEDED: Reaction.ASK_LATER,
    Code.UNKNOWN_SUBSCRIPTION_ID: Reaction.ASK_AT_ONCE,
    Code.TELEMETRY_TOO_LARGE: Reaction.ASK_LATER,
}
"""By error code. After any other code the subscription is asked for later, with a warning."""


class TelemetryStates:
    """What is due, and when. Times are ms of the monotonic clock; `due_ms` is that of the next action.

    `rng` spreads the first push; `retry_backoff` paces questions that got no answer.
    """

    def __init__(self, rng: random.Random, retry_backoff: ExponentialBackoff) -> None:
        self._rng = rng
        self._retry_backoff = retry_backoff
        self._losses = 0
        """Requests without an answer since the last one with an answer."""
        self.state = State.NOT_OFFERED
        self.due_ms = NEVER_MS
        self.subscription: Subscription | None = None
        """The last answer, also if it asks for no metrics."""

    @property
    def interval_ms(self) -> int:
        return DEFAULT_PUSH_INTERVAL_MS if self.subscription is None else self.subscription.push_interval_ms

    @property
    def is_terminating(self) -> bool:
        return self.state in _TERMINATING

    def offered(self, now_ms: int) -> None:
        """A broker offers the APIs."""
        self._move(State.SUBSCRIPTION_NEEDED, now_ms)

    def sent(self) -> None:
        """The request that was due is on its way."""
        self._move(_IN_PROGRESS[self.state], FOREVER_MS)

    def subscribed(self, subscription: Subscription, now_ms: int) -> None:
        """The brokers answered with a subscription."""
        if self.state is not State.SUBSCRIPTION_IN_PROGRESS:
            return
        self._losses = 0
        self.subscription = subscription
        if subscription.prefixes:
            spread = self._rng.uniform(_EARLIEST_PUSH, _LATEST_PUSH)
            self._move(State.PUSH_NEEDED, now_ms + round(spread * subscription.push_interval_ms))
        else:
            self._move(State.SUBSCRIPTION_NEEDED, now_ms + subscription.push_interval_ms)

    def pushed(self, now_ms: int) -> None:
        """A broker took a push."""
        self._losses = 0
        self._push_next(now_ms + self.interval_ms)

    def nothing_to_push(self, now_ms: int) -> None:
        """No metric matches: ask again after the interval, as without a subscription."""
        if self.is_terminating:
            self.stop()
        else:
            self._move(State.SUBSCRIPTION_NEEDED, now_ms + self.interval_ms)

    def refused(self, reaction: Reaction, now_ms: int) -> None:
        """A broker answered with an error. A question that is refused is not asked again at once."""
        if reaction is Reaction.STOP or self.is_terminating:
            self.stop()
        elif reaction is Reaction.ASK_AT_ONCE and self.state is State.PUSH_IN_PROGRESS:
            self._move(State.SUBSCRIPTION_NEEDED, now_ms)
        else:
            self._move(State.SUBSCRIPTION_NEEDED, now_ms + self.interval_ms)

    def unanswered(self, now_ms: int) -> None:
        """The connection was lost before the answer. Pushes that get no answer come less and less often: each may have
        held up the records on its connection until that was closed.
        """
        pause_ms = min(self._retry_backoff.backoff_ms(self._losses), self.interval_ms)
        if self.state is State.SUBSCRIPTION_IN_PROGRESS:
            self._move(State.SUBSCRIPTION_NEEDED, now_ms + pause_ms)
        else:
            self._push_next(now_ms + (self.interval_ms << min(self._losses, _MOST_DOUBLINGS)))
        self._losses += 1

    def delay(self, due_ms: int) -> None:
        """What is due cannot be sent before `due_ms`."""
        self._move(self.state, due_ms)

    def terminate(self, now_ms: int) -> None:
        """The producer closes: push once more, if brokers want metrics."""
        if self.subscription is not None and self.subscription.prefixes and self.state in _MAY_PUSH_LAST:
            self._move(State.TERMINATING_PUSH_NEEDED, now_ms)
        elif not self.is_terminating:
            self.stop()

    def stop(self) -> None:
        self._move(State.TERMINATED, FOREVER_MS)

    def _push_next(self, due_ms: int) -> None:
        if self.is_terminating:
            self.stop()
        elif self.state is State.PUSH_IN_PROGRESS:
            self._move(State.PUSH_NEEDED, due_ms)

    def _move(self, state: State, due_ms: int) -> None:
        if self.state is not State.TERMINATED:
            self.state, self.due_ms = state, due_ms


class ClientTelemetry:
    """The telemetry of one producer. The Sender's thread uses it; any thread may wait for the client instance id.

    No error of telemetry reaches the producer: an unexpected one ends telemetry, with a line in the log.
    """

    def __init__(
        self, *, api_versions: ApiVersions, payloads: PayloadMaker, clock: Clock, rng: random.Random, client_id: str
    ) -> None:
        self._api_versions = api_versions
        self._payloads = payloads
        self._clock = clock
        self._client_id = client_id
        self._search_backoff = ExponentialBackoff.doubling(_FIRST_SEARCH_MS, _LONGEST_SEARCH_MS, rng)
        self._searches = 0
        self._node: Node | None = None
        """The broker of the last request. As the KIP says, the next one goes there too, as long as that is possible."""
        self._known = OperationResult("GetTelemetrySubscriptions")
        self._ends_ms = FOREVER_MS
        self._warned_codes: set[int] = set()
        self.states = TelemetryStates(rng, ExponentialBackoff.doubling(_FIRST_RETRY_MS, DEFAULT_PUSH_INTERVAL_MS, rng))
        self.in_flight = 0
        """Requests of telemetry without an answer yet. A close does not wait for them."""

    # ---- any thread ------------------------------------------------------------------------------------------------

    def client_instance_id(self, timeout_ms: int) -> uuid.UUID | None:
        """Wait up to `timeout_ms` for the id that a broker gives this client. Return None if there is none."""
        if self.states.subscription is None:
            self._known.wait(self._clock, timeout_ms)
        subscription = self.states.subscription
        return None if subscription is None else subscription.client_instance_id

    # ---- the Sender's thread ---------------------------------------------------------------------------------------

    def turn(self, client: KafkaClient, now_ms: int) -> int:
        """Send what is due. Return the ms until something is due, FOREVER_MS if only an answer can change that."""
        states = self.states
        if now_ms < states.due_ms:
            return states.due_ms - now_ms
        if states.state is State.NOT_OFFERED:
            if not self._api_versions.was_offered(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS):
                return FOREVER_MS
            states.offered(now_ms)
        try:
            self._send_due(client, now_ms)
        except Exception:
            self._fail("Its request could not be made or sent.")
        return states.due_ms - now_ms if states.due_ms > now_ms else _FIRST_SEARCH_MS

    def is_ending(self, now_ms: int) -> bool:
        """Return whether a close should wait for the last push. The first call makes that push due."""
        if self._ends_ms == FOREVER_MS:
            self._ends_ms = now_ms + LAST_PUSH_MS
            self.states.terminate(now_ms)
        return self.states.is_terminating and now_ms < self._ends_ms

    def close(self) -> None:
        """End it. Threads that wait for the client instance id go on."""
        self.states.stop()
        self._known.finish()

    def _send_due(self, client: KafkaClient, now_ms: int) -> None:
        if self.states.is_terminating and self.states.state is not State.TERMINATING_PUSH_NEEDED:
            self.states.stop()  # its time is over
            return
        node = self._choose(client, now_ms)
        if node is None or not client.ready(node, now_ms):
            self._wait(now_ms)
            return
        self._node = node if node.id >= 0 else None  # a bootstrap server's connection is not kept
        self._searches = 0
        request = self._request(now_ms)
        if request is None:
            return
        self.states.sent()
        if self.states.is_terminating:
            self.states.delay(self._ends_ms)
        client.send(client.new_client_request(node.id_string, request, now_ms, True, None, self._settle), now_ms)
        self.in_flight += 1

    def _choose(self, client: KafkaClient, now_ms: int) -> Node | None:
        """Return the last node if a request can be sent to it now, or else the least loaded one if it offers the APIs
        or is not connected. The last push goes to no node without a connection.
        """
        last = self._node
        if last is not None and self._offers(last) and client.ready(last, now_ms):
            return last
        node = client.least_loaded_node(now_ms)
        if node is None or self._offers(node):
            return node
        is_connected = self._api_versions.get(node.id_string) is not None
        return None if is_connected or self.states.is_terminating else node

    def _wait(self, now_ms: int) -> None:
        """Try again in each turn if brokers are only busy, and after pauses that double if none is connected."""
        if self.states.is_terminating:
            self.states.stop()
        elif not self._api_versions.is_offered(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS):
            self.states.delay(now_ms + self._search_backoff.backoff_ms(self._searches))
            self._searches += 1

    def _offers(self, node: Node) -> bool:
        versions = self._api_versions.get(node.id_string)
        return versions is not None and ApiKey.GET_TELEMETRY_SUBSCRIPTIONS in versions.ranges

    def _request(self, now_ms: int) -> Request | None:
        """Return the request that is due, or None if there is nothing to push."""
        subscription = self.states.subscription
        if subscription is None or self.states.state is State.SUBSCRIPTION_NEEDED:
            return GetTelemetrySubscriptionsRequest(None if subscription is None else subscription.client_instance_id)
        payload = self._payloads.make(subscription, now_ms, self._clock.wall_ms())
        if payload is None:
            if self._payloads.is_possible:
                self.states.nothing_to_push(now_ms)
            else:
                self.states.stop()
            return None
        return PushTelemetryRequest(
            subscription.client_instance_id,
            subscription.subscription_id,
            self.states.is_terminating,
            payload.codec_id,
            payload.data,
        )

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _settle(self, response: ClientResponse) -> None:
        self.in_flight -= 1
        try:
            self._handle(response)
        except Exception:
            self._fail("The answer of a broker could not be handled.")

    def _handle(self, response: ClientResponse) -> None:
        now_ms, body, request = response.received_ms, response.body, response.request.request
        is_push = isinstance(request, PushTelemetryRequest)
        if self.states.is_terminating and not (isinstance(request, PushTelemetryRequest) and request.is_terminating):
            return  # only the answer to the last push still counts
        if response.protocol_error is not None:
            log.warning("%s pushes no metrics any more: %s", self._client_id, response.protocol_error)
            self._stop()
        elif response.version_mismatch is not None or response.authentication_error is not None:
            if is_push:
                self._payloads.refused()
            self.states.refused(Reaction.ASK_LATER, now_ms)
        elif body is None:
            self.states.unanswered(now_ms)
        elif int(body.error_code) != 0:
            self._refused(int(body.error_code), response.destination, is_push, now_ms)
        elif is_push:
            self.states.pushed(now_ms)
        else:
            self._subscribed(body, now_ms)

    def _subscribed(self, body: Message, now_ms: int) -> None:
        subscription = Subscription.from_response(body)
        before = self.states.subscription
        self.states.subscribed(subscription, now_ms)
        self._known.finish()
        if subscription.prefixes and self.states.subscription is subscription:
            self._payloads.prepare()
        if before is None:
            log.info("The client instance id of %s is %s", self._client_id, kafka_text(subscription.client_instance_id))
        log.debug("%s: %r", self._client_id, subscription)

    def _refused(self, code: int, node_id: str, is_push: bool, now_ms: int) -> None:
        error = error_for_code(code, api="PushTelemetry" if is_push else "GetTelemetrySubscriptions", node=node_id)
        reaction = REACTIONS.get(code, Reaction.ASK_LATER)
        level = logging.DEBUG
        if reaction is Reaction.STOP:
            level = logging.ERROR
        elif code not in REACTIONS and code not in self._warned_codes:
            level = logging.WARNING
            self._warned_codes.add(code)
        log.log(level, "Node %s refused the telemetry of %s: %s", node_id, self._client_id, error)
        if is_push and not self.states.is_terminating:
            self._payloads.refused()
            if code == Code.UNSUPPORTED_COMPRESSION_TYPE:
                self._payloads.refuse_codec()
        self.states.refused(reaction, now_ms)
        if self.states.state is State.TERMINATED:
            self._known.finish()

    def _fail(self, text: str) -> None:
        log.exception("%s pushes no metrics any more. %s Its records are not affected.", self._client_id, text)
        self._stop()

    def _stop(self) -> None:
        self.states.stop()
        self._known.finish()


def telemetry_of(
    config: ProducerConfig,
    metrics: ProducerMetrics,
    transactions: TransactionManager | None,
    api_versions: ApiVersions,
    clock: Clock,
    rng: random.Random,
) -> ClientTelemetry | None:
    """Return the telemetry of a producer, or None if enable.metrics.push is false.

    Its metrics have the label transactional_id if the producer has that id at the brokers. Brokers add what they know
    of the client themselves: its instance id, client.id, software, address and principal.
    """

    def labels() -> dict[str, str]:
        name = config.transactional_id
        if transactions is None or name is None or not transactions.identity.producer.is_valid:
            return {}
        return {"transactional_id": name} if transactions.transactional_id == name else {}  # each task has its own

    if not config.enable_metrics_push:
        return None
    payloads = PayloadMaker(TelemetryPoints(metrics, clock.wall_ms()), labels)
    return ClientTelemetry(
        api_versions=api_versions, payloads=payloads, clock=clock, rng=rng, client_id=config.client_id
    )


def kafka_text(client_instance_id: uuid.UUID) -> str:
    """Return the id in the form in which brokers show it (org.apache.kafka.common.Uuid)."""
    return base64.urlsafe_b64encode(client_instance_id.bytes).decode().rstrip("=")
