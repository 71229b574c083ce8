"""Calls to coordinators: many items at once, each sent to its coordinator, with retries until it has a response or the
timer expires.

The module caches coordinators between calls. It knows no request. It runs on the caller's thread only.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from spark_kafka_sink.admin.request_client import RequestClient, RequestFuture, Timer
from spark_kafka_sink.client.backoff import COORDINATOR_BACKOFF_MS, FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.client.seams import ClientResponse
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    CoordinatorNotAvailableError,
    DisconnectError,
    InvalidTopicError,
    KafkaError,
    KafkaTimeoutError,
    NotCoordinatorError,
    TopicAuthorizationError,
    UnsupportedVersionError,
    error_for_code,
)
from spark_kafka_sink.protocol.metadata import (
    GROUP,
    TRANSACTION,
    FindCoordinatorRequest,
    FindCoordinatorsRequest,
    coordinator_of,
)
from spark_kafka_sink.protocol.versions import Message, Request

Item = TypeVar("Item", bound=Hashable)
Value = TypeVar("Value")
_Entry = TypeVar("_Entry")
_MAX_BACKOFF_MS: Final = 1_000
_MOST_AT_ONCE: Final = 1_000
"""The most items in flight. Most calls send one request an item. One that waits longer than request.timeout.ms behind
others fails, and its coordinator is forgotten.
"""
_MOVED: Final = (NotCoordinatorError, CoordinatorNotAvailableError, DisconnectError, KafkaTimeoutError)
"""After these errors the coordinator is looked up again."""
_MOST_KNOWN: Final = 10_000
"""Cached coordinators; more than one call has items. Batch writes without a prefix have new names each time."""
CONTRADICTION: Final = "The answer names it more than once, with different outcomes."
_OF_TOPICS: Final = (TopicAuthorizationError, InvalidTopicError)
"""Errors of metadata that no lookup needs."""
_ONE_AT_A_TIME: Final = CoordinatorNotAvailableError("The node takes one key at a time.")
_PERMISSIONS: Final = {
    (GROUP, 30): "Not authorized for the group: grant DESCRIBE on it, which READ includes.",
    (TRANSACTION, 53): "Not authorized for the transactional id: grant DESCRIBE on it, which WRITE includes.",
}
log = logging.getLogger(__name__)


class CoordinatorApi(ABC, Generic[Item, Value]):
    """One kind of call: the requests for items, and the meaning of the responses."""

    key_type: int
    """GROUP or TRANSACTION."""
    retried: ClassVar[tuple[type[KafkaError], ...]] = ()
    """Errors that are retried here, in addition to those that are retriable everywhere."""
    advice: ClassVar[Mapping[int, str]] = {}
    """Error code → what it means for this call, and what to change."""

    @abstractmethod
    def key(self, item: Item) -> str:
        """Return the group or transactional id that decides about the coordinator."""

    def node(self, item: Item) -> Node | None:  # noqa: ARG002
        """Return the node to ask, or None to ask the coordinator of `key`."""
        return None

    @abstractmethod
    def describe(self, item: Item) -> str:
        """Return the item in words, for the text of an error."""

    @abstractmethod
    def requests(self, items: Sequence[Item]) -> Iterable[tuple[Request, Sequence[Item]]]:
        """Return the requests to one node about all of `items`, each with its own items."""

    @abstractmethod
    def answers(self, items: Sequence[Item], body: Message) -> Mapping[Item, Value | KafkaError]:
        """Return the response's answer for each item. Items that it does not mention are requested again."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Value]):
    """The outcome of an item: a value or an error. The error is a KafkaTimeoutError if the timer expired.

    `is_in_doubt`: a request was sent without a clear response, so it may have taken effect whatever `error` says.
    """

    value: Value | None
    error: KafkaError | None = None
    is_in_doubt: bool = False

    def get(self) -> Value:
        """Return the value. Raises the error of a failure."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # set if there is no error, and None may be a value


class LookupFlight:
    """A request in flight to `node`. `take` may be called when `future` is done."""

    def __init__(
        self,
        lookup: CoordinatorLookup,
        node: Node,
        key_type: int,
        keys: Sequence[str],
        future: RequestFuture[ClientResponse],
    ) -> None:
        self.node = node
        self.keys = keys
        self.future = future
        self._lookup = lookup
        self._key_type = key_type

    def take(self) -> Mapping[str, KafkaError]:
        """Cache the coordinators of the response, and return the errors of keys that have none."""
        if self.future.failed():
            error = self.future.error
            if isinstance(error, UnsupportedVersionError) and len(self.keys) > 1:
                self._lookup.takes_several_keys = False
                error = _ONE_AT_A_TIME
            return dict.fromkeys(self.keys, error)
        body = self.future.value().body
        errors: dict[str, KafkaError] = {}
        for key in self.keys:
            found = coordinator_of(body, key)
            if found is None:
                errors[key] = CoordinatorNotAvailableError("The answer does not mention the key.")
            elif found.error_code:
                text = _PERMISSIONS.get((self._key_type, found.error_code)) or found.error_message or ""
                errors[key] = error_for_code(found.error_code, text, api="FindCoordinator")
            else:
                self._lookup.note(self._key_type, key, Node(found.node_id, found.host, found.port))
        return errors


class CoordinatorLookup:
    """Coordinators by type (GROUP, TRANSACTION) and key (KIP-98, KIP-699)."""

    def __init__(self, client: RequestClient) -> None:
        self._client = client
        self._nodes: dict[tuple[int, str], Node] = {}
        self.takes_several_keys = True
        """False after a node was too old for it (before Kafka 3.0)."""

    def known(self, key_type: int, key: str) -> Node | None:
        return self._nodes.get((key_type, key))

    def note(self, key_type: int, key: str, node: Node) -> None:
        self._nodes[key_type, key] = node
        if len(self._nodes) > _MOST_KNOWN:
            del self._nodes[next(iter(self._nodes))]

    def forget(self, key_type: int, key: str) -> None:
        """The node said that it is not the coordinator, or does not answer."""
        self._nodes.pop((key_type, key), None)

    def send(self, key_type: int, keys: Sequence[str]) -> list[LookupFlight]:
        """Ask the least loaded node, in one request if it takes several keys. The list is empty if none exists."""
        node = self._client.least_loaded_node()
        if node is None:
            return []
        if len(keys) > 1 and self.takes_several_keys:
            request: Request = FindCoordinatorsRequest(tuple(keys), key_type)
            return [LookupFlight(self, node, key_type, keys, self._client.send(node, request))]
        return [
            LookupFlight(self, node, key_type, [key], self._client.send(node, FindCoordinatorRequest(key, key_type)))
            for key in keys
        ]


@dataclass(slots=True, eq=False)
class _Work(Generic[Item]):
    """An item without an outcome yet."""

    item: Item
    attempts: int = 0
    resume_ms: int = 0
    is_in_flight: bool = False
    is_in_doubt: bool = False
    last_reason: str = "No answer came."


class _Flight(NamedTuple):
    node: Node
    works: Sequence[_Work[Any]]
    future: RequestFuture[ClientResponse]


class CoordinatorCalls:
    """Runs calls on `client`, which must share `metadata`. Times in ms.

    A retry waits 20 ms, then twice as long each time, up to a second. The two stages, lookup and request, are those of
    org.apache.kafka.clients.admin.internals.AdminApiDriver.
    """

    def __init__(
        self,
        client: RequestClient,
        metadata: Metadata,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.client = client
        self.metadata = metadata
        self.clock = clock
        self.lookup = CoordinatorLookup(client)
        self._backoff = ExponentialBackoff.doubling(COORDINATOR_BACKOFF_MS, _MAX_BACKOFF_MS, rng)

    def run(self, api: CoordinatorApi[Item, Value], items: Iterable[Item], timer: Timer) -> dict[Item, Outcome[Value]]:
        """Return each item's outcome, in the order of items, before the timer expires. Raises no error of an item."""
        call = _Call(self, api, list(dict.fromkeys(items)), timer)
        try:
            while not call.is_over and not timer.is_expired:
                call.send_due()
                call.poll(min(timer.remaining_ms, call.wait_ms()))
                call.take_answers()
            call.give_up()
        finally:
            # A later poll must not send requests that are left, because the caller has gone on.
            for flight in call.flights:
                self.client.disconnect_async(flight.node)
        return {item: call.outcomes[item] for item in call.items}

    def locate(self, names: Sequence[str], timer: Timer) -> None:
        """Look up the coordinators of `names`, as transactional ids and as groups: one request for each kind (KIP-699).

        A name without an answer stays unknown, and so do all if the node takes one key at a time: the call that needs
        one looks it up. Raises the error of a refused login.
        """
        if not self.lookup.takes_several_keys:
            return
        flights: list[LookupFlight] = []
        for key_type in (TRANSACTION, GROUP):
            if unknown := [name for name in names if self.lookup.known(key_type, name) is None]:
                flights += self.lookup.send(key_type, unknown)
        self._await((flight.future for flight in flights), timer)
        for flight in flights:
            if flight.future.is_done():
                flight.take()

    def without_coordinator(self, key_type: int, names: Sequence[str], timer: Timer) -> list[str]:
        """Return those of `names` for which no broker names a coordinator until the timer expires: their partition of
        the coordinators' topic has no leader. What is cached does not count. Names that may not be described are left
        out. Raises the error of a refused login.
        """
        left, attempts = list(names), 0
        while True:
            flights = self.lookup.send(key_type, left)
            self._await((flight.future for flight in flights), timer)
            for flight in flights:
                if flight.future.is_done():
                    errors = flight.take()
                    settled = {name for name in flight.keys if name not in errors or not errors[name].retriable}
                    left = [name for name in left if name not in settled]
            timer.update()
            if not left or timer.is_expired:
                return left
            self.clock.sleep_ms(min(self.backoff_ms(attempts), timer.remaining_ms))
            attempts += 1

    def disputed(self, key_type: int, names: Sequence[str], timer: Timer) -> list[str]:
        """Return those of `names` for which brokers name different coordinators until the timer expires. One of these
        brokers is cut off from its controllers, and may answer as a coordinator with what it knew before. Every broker
        is asked; one that does not answer, or refuses the login, does not count.
        """
        left, attempts = list(names), 0
        while True:
            request = FindCoordinatorsRequest(tuple(left), key_type)
            futures = [self.client.send(node, request) for node in self.metadata.fetch().nodes]
            self._await(futures, timer, (*_OF_TOPICS, AuthenticationError))
            timer.update()
            if attempts and not all(future.is_done() for future in futures):
                return left  # the limit has cut this round short, so it says nothing
            bodies = [future.value().body for future in futures if future.is_done() and future.succeeded()]
            left = [name for name in left if len(_coordinators(name, bodies)) > 1]
            if not left or timer.is_expired:
                return left
            self.clock.sleep_ms(min(self.backoff_ms(attempts), timer.remaining_ms))
            attempts += 1

    def _await(
        self,
        futures: Iterable[RequestFuture[ClientResponse]],
        timer: Timer,
        harmless: tuple[type[KafkaError], ...] = _OF_TOPICS,
    ) -> None:
        for future in futures:
            try:
                self.client.poll_until(future, timer)
            except harmless as error:
                log.debug("Not for a lookup: %s", error)

    def backoff_ms(self, attempts: int) -> int:
        return self._backoff.backoff_ms(attempts)


@dataclass(slots=True)
class _Call(Generic[Item, Value]):
    """One run of a call over its items."""

    calls: CoordinatorCalls
    api: CoordinatorApi[Item, Value]
    items: Sequence[Item]
    timer: Timer
    waiting: deque[Item] = field(default_factory=deque)
    """The items that were never requested."""
    works: dict[Item, _Work[Item]] = field(default_factory=dict)
    outcomes: dict[Item, Outcome[Value]] = field(default_factory=dict)
    flights: list[_Flight] = field(default_factory=list)
    lookups: list[tuple[LookupFlight, Sequence[_Work[Item]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting.extend(self.items)

    @property
    def is_over(self) -> bool:
        return not self.works and not self.waiting

    def _left(self) -> list[_Work[Item]]:
        """Return the items without an outcome, requested or not."""
        self.works |= {item: _Work(item) for item in self.waiting}
        self.waiting.clear()
        return list(self.works.values())

    # ---- asking ----------------------------------------------------------------------------------------------------

    def send_due(self) -> None:
        """Send all that is due: to coordinators that are known, and to any node for those that are not."""
        by_node: dict[Node, list[_Work[Item]]] = {}
        without_node: dict[str, list[_Work[Item]]] = {}
        for work in self._due():
            node = self.api.node(work.item) or self.calls.lookup.known(self.api.key_type, self.api.key(work.item))
            if node is None:
                without_node.setdefault(self.api.key(work.item), []).append(work)
            else:
                by_node.setdefault(node, []).append(work)
        for node, works in by_node.items():
            self._ask(node, works)
        if without_node:
            self._look_up(without_node)

    def _due(self) -> list[_Work[Item]]:
        """Return the items to send now. New items come before retries. Otherwise one coordinator that is down would
        delay the items of all others.
        """
        idle = [work for work in self.works.values() if not work.is_in_flight]
        room = _MOST_AT_ONCE - (len(self.works) - len(idle))
        idle = [work for work in idle if work.resume_ms <= self.timer.now_ms]
        located = [work for work in idle if not work.attempts]
        new = [_Work(self.waiting.popleft()) for _ in range(min(room - len(located), len(self.waiting)))]
        self.works |= {work.item: work for work in new}
        return [*located, *new, *(work for work in idle if work.attempts)][:room]

    def _ask(self, node: Node, works: Sequence[_Work[Item]]) -> None:
        for request, items in self.api.requests([work.item for work in works]):
            asked = [self.works[item] for item in items]
            for work in asked:
                work.is_in_flight = True
            self.flights.append(_Flight(node, asked, self.calls.client.send(node, request)))

    def _look_up(self, without_node: Mapping[str, Sequence[_Work[Item]]]) -> None:
        flights = self.calls.lookup.send(self.api.key_type, list(without_node))
        if not flights:
            for work in _flat(without_node.values()):
                self._retry(work, f"No node could be asked for the coordinator.{self.calls.client.throttles()}")
        for flight in flights:
            works = _flat(without_node[key] for key in flight.keys)
            for work in works:
                work.is_in_flight = True
            self.lookups.append((flight, works))

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def wait_ms(self) -> int:
        """Return the ms until an item is due that is not in flight."""
        idle = [work.resume_ms for work in self.works.values() if not work.is_in_flight]
        if len(self.works) - len(idle) >= _MOST_AT_ONCE:
            return FOREVER_MS
        return 0 if self.waiting else max(min(idle, default=FOREVER_MS) - self.timer.now_ms, 0)

    def should_block(self) -> bool:
        """Return whether no response has come, as a PollCondition."""
        return not any(future.is_done() for future in self._futures())

    def _futures(self) -> Iterable[RequestFuture[ClientResponse]]:
        yield from (flight.future for flight in self.flights)
        yield from (flight.future for flight, _ in self.lookups)

    def poll(self, wait_ms: int) -> None:
        """Poll once. A refusal by the cluster ends the whole call. The error of a topic is left to its readers."""
        try:
            self.calls.client.poll(Timer(self.calls.clock, wait_ms), self)
        except (TopicAuthorizationError, InvalidTopicError) as error:
            # Not an error of this call. A reader of the topic gets it again with its next update.
            log.debug("Not for %s: %s", type(self.api).__name__, error)
        except KafkaError as error:
            self.take_answers()
            self._doubt_what_is_on_its_way()
            for work in self._left():
                self._end(work, self._named(error, work, None))
        self.timer.update()

    # ---- answers ---------------------------------------------------------------------------------------------------

    def take_answers(self) -> None:
        for flight, works in _take_done(self.lookups, lambda lookup: lookup[0].future):
            found = flight.take()
            for work in works:
                work.is_in_flight = False
                error = found.get(self.api.key(work.item))
                if error is not None:
                    self._failed(work, error, flight.node)
        for asked in _take_done(self.flights, lambda flight: flight.future):
            self._take(asked)

    def _take(self, flight: _Flight) -> None:
        for work in flight.works:
            work.is_in_flight = False
        works = [work for work in flight.works if work.item in self.works]
        if flight.future.failed():
            for work in works:
                self._failed(work, flight.future.error, flight.node, was_asked=True)
            return
        answers = self.api.answers([work.item for work in works], flight.future.value().body)
        silence = CoordinatorNotAvailableError("The answer does not mention it.")
        for work in works:
            answer = answers.get(work.item, silence)
            if isinstance(answer, KafkaError):
                self._failed(work, answer, flight.node, was_asked=True)
            else:
                self.outcomes[work.item] = Outcome(answer)
                del self.works[work.item]

    def _failed(self, work: _Work[Item], error: KafkaError, node: Node, *, was_asked: bool = False) -> None:
        if isinstance(error, _MOVED):
            self.calls.lookup.forget(self.api.key_type, self.api.key(work.item))
        if error.retriable or isinstance(error, self.api.retried):
            work.is_in_doubt |= was_asked
            self._retry(work, f"Node {node}: {error}")
        else:
            self._end(work, self._named(error, work, node))

    def _retry(self, work: _Work[Item], reason: str) -> None:
        work.resume_ms = self.timer.now_ms + self.calls.backoff_ms(work.attempts)
        work.attempts += 1
        work.last_reason = reason

    def _end(self, work: _Work[Item], error: KafkaError) -> None:
        self.outcomes[work.item] = Outcome(None, error, work.is_in_doubt)
        del self.works[work.item]

    def give_up(self) -> None:
        """The timer expired before these items had an outcome."""
        self._doubt_what_is_on_its_way()
        for work in self._left():
            text = f"{self.api.describe(work.item)}: no outcome within {self.timer.timeout_ms} ms. {self._why(work)}"
            self._end(work, KafkaTimeoutError(text))

    def _why(self, work: _Work[Item]) -> str:
        metadata = self.calls.metadata
        if metadata.fetch().is_bootstrap_configured:  # no broker is reached, so there is no other reason
            return self.calls.client.why_unanswered()
        failure = metadata.connection_failure
        is_known = failure is None or failure in work.last_reason
        return (work.last_reason if is_known else f"{work.last_reason} {failure}") + self.calls.client.throttles()

    def _doubt_what_is_on_its_way(self) -> None:
        for flight in self.flights:
            for work in flight.works:
                work.is_in_doubt = True

    def _named(self, error: KafkaError, work: _Work[Item], node: Node | None) -> KafkaError:
        """Return the error with the item, the node and the remedy in its text."""
        place = self.api.describe(work.item)
        if node is not None and str(node) not in place:
            place += f", asked of node {node}"
        return error.reworded(f"{place}: {self.api.advice.get(error.error_code or 0) or error.text}")


def _coordinators(name: str, bodies: Iterable[Message]) -> set[int]:
    """Return the ids of the nodes that answers to FindCoordinator name."""
    found = (coordinator_of(body, name) for body in bodies)
    return {int(each.node_id) for each in found if each is not None and not each.error_code}


def _take_done(entries: list[_Entry], future: Callable[[_Entry], RequestFuture[ClientResponse]]) -> list[_Entry]:
    """Remove and return the entries whose future is done."""
    done = [entry for entry in entries if future(entry).is_done()]
    entries[:] = [entry for entry in entries if not any(entry is each for each in done)]
    return done


def _flat(groups: Iterable[Sequence[_Work[Item]]]) -> list[_Work[Item]]:
    return [work for group in groups for work in group]
