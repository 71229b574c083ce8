"""Connections to single addresses, over the selector that the producer uses: the same TLS, the same login.

Unlike the producer's client it retries nothing and follows no metadata, so that each address keeps its own outcome.
Every call blocks the caller, at most for the given time, except for DNS, whose limit is the system's. One thread.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    BootstrapResolutionError,
    DisconnectError,
    KafkaError,
    KafkaTimeoutError,
    ProtocolError,
    SslAuthenticationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.common.version import SOFTWARE_NAME, VERSION
from spark_kafka_sink.network.channel import ChannelKind, ChannelState, NetworkSend, SetupStep
from spark_kafka_sink.network.sasl.login import AuthenticatorFactory
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.network.tls import transport_factory
from spark_kafka_sink.network.transport import Address, resolve
from spark_kafka_sink.protocol.framing import correlation_id_of, parse_response
from spark_kafka_sink.protocol.handshake import ApiVersionsRequest
from spark_kafka_sink.protocol.versions import Message, NodeApiVersions, Request, request_type

_SLICE_MS: Final = 100
_OLD_API_VERSIONS: Final = 0
_UNSUPPORTED: Final = 35


class Stage(Enum):
    """How far a connection came. The value is for texts."""

    NAME = "look-up of the name"
    TCP = "TCP connection"
    TLS = "TLS handshake"
    LOGIN = "login"
    VERSIONS = "answer to ApiVersions"
    READY = "connection"


_STAGE_OF_STEP: Final = {SetupStep.TCP: Stage.TCP, SetupStep.TLS: Stage.TLS, SetupStep.SASL: Stage.LOGIN}


@dataclass(slots=True)
class Contact:
    """One address, and what became of the connection to it. `stage` is where it failed, or READY."""

    host: str
    port: int
    number: int = -1
    """The node's id. Below 0: a server of bootstrap.servers."""
    stage: Stage = Stage.NAME
    error: KafkaError | None = None
    is_timeout: bool = False
    address: Address | None = None
    """The one that was tried last."""
    versions: NodeApiVersions | None = None
    left: list[Address] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def id(self) -> str:
        """The id of the connection, as the producer's client and its errors have it."""
        return str(self.number)

    @property
    def node_id(self) -> int | None:
        return None if self.number < 0 else self.number

    @property
    def is_ready(self) -> bool:
        return self.stage is Stage.READY


class Connections:
    """A context manager that closes its connections. Raises ConfigError if files of ssl.* cannot be used."""

    def __init__(self, config: ProducerConfig, clock: Clock, rng: random.Random, *, has_login: bool = True) -> None:
        """`has_login` False: without the login that the configuration asks for."""
        self._clock = clock
        self._client_id = config.client_id
        self._uses_tls = config.uses_tls
        login = AuthenticatorFactory(config, clock, rng) if config.uses_sasl and has_login else None
        self._has_login = login is not None
        self._selector = Selector(clock, -1, make_authenticator=login, make_transport=transport_factory(config))
        self._correlation_id = 0
        self._contacts: dict[str, Contact] = {}

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close_all()

    # ---- connecting ------------------------------------------------------------------------------------------------

    def reach(self, contacts: Sequence[Contact], timeout_ms: int) -> None:
        """Connect to all, log in, and ask for versions. The outcome is in each contact."""
        deadline_ms = self._clock.now_ms() + timeout_ms
        waiting: dict[str, Contact] = {}
        for contact in contacts:
            try:
                contact.left = resolve(contact.host, contact.port)
            except BootstrapResolutionError as error:
                contact.error = error
                continue
            self._contacts[contact.id] = waiting[contact.id] = contact
            self._next_address(contact)
        while waiting and (left_ms := deadline_ms - self._clock.now_ms()) > 0:
            self._selector.poll(min(left_ms, _SLICE_MS))
            for name, contact in list(waiting.items()):
                if self._is_settled(name, contact):
                    del waiting[name]
        for name, contact in waiting.items():
            contact.is_timeout = True
            contact.error = KafkaTimeoutError(f"The {contact.stage.value} took more than {timeout_ms} ms.")
            self._selector.close(name)
        self._ask_for_versions([each for each in contacts if each.stage is Stage.VERSIONS], timeout_ms)

    def _next_address(self, contact: Contact) -> None:
        contact.address = contact.left.pop(0)
        contact.stage = Stage.TCP
        self._selector.connect(contact.id, contact.address)

    def _is_settled(self, name: str, contact: Contact) -> bool:
        state = self._selector.disconnected.get(name)
        if state is not None:
            contact.stage, contact.error = self._stage_of(contact, state), state.error
            if contact.stage is Stage.TCP and contact.left:  # the next address of the host, as the client does
                self._next_address(contact)
                return False
            return True
        if self._selector.is_channel_ready(name):
            contact.stage, contact.error = Stage.VERSIONS, None
            return True
        step = self._selector.setup_step(name)
        contact.stage = Stage.TCP if step is None else _STAGE_OF_STEP[step]
        return False

    def _stage_of(self, contact: Contact, state: ChannelState) -> Stage:
        """Return where a connection failed. One poll may pass several steps."""
        if state.kind is ChannelKind.NOT_CONNECTED:
            return Stage.TCP
        if isinstance(state.error, SslAuthenticationError):
            return Stage.TLS
        if state.kind is ChannelKind.AUTHENTICATION_FAILED:
            return Stage.LOGIN
        if self._uses_tls and contact.stage in {Stage.TCP, Stage.TLS}:
            return Stage.TLS
        return Stage.LOGIN if self._has_login else Stage.VERSIONS

    def _ask_for_versions(self, contacts: Sequence[Contact], timeout_ms: int) -> None:
        request = ApiVersionsRequest(SOFTWARE_NAME, VERSION)
        answers = self._ask({each.id: (request, 3) for each in contacts}, timeout_ms)
        old = {
            name: (request, _OLD_API_VERSIONS)
            for name, answer in answers.items()
            if not isinstance(answer, KafkaError) and int(answer.error_code) == _UNSUPPORTED
        }
        answers |= self._ask(old, timeout_ms)
        for contact in contacts:
            answer = answers[contact.id]
            try:
                if isinstance(answer, KafkaError):
                    raise answer
                contact.versions = NodeApiVersions.from_response(answer)
                contact.stage = Stage.READY
            except KafkaError as error:
                contact.error, contact.is_timeout = error, isinstance(error, KafkaTimeoutError)

    # ---- asking ----------------------------------------------------------------------------------------------------

    def ask(self, contact: Contact, request: Request, timeout_ms: int) -> Message:
        """Return the answer of a contact that is ready. Raises KafkaError if none came."""
        answer = self.ask_all({contact.id: request}, timeout_ms)[contact.id]
        if isinstance(answer, KafkaError):
            raise answer
        return answer

    def ask_all(self, requests: Mapping[str, Request], timeout_ms: int) -> dict[str, Message | KafkaError]:
        """Ask contacts that are ready, by their ids, all at once."""
        versioned: dict[str, tuple[Request, int]] = {}
        found: dict[str, Message | KafkaError] = {}
        for name, request in requests.items():
            versions = self._contacts[name].versions
            try:
                if versions is None:
                    raise UnsupportedVersionError("The node's versions are not known.")
                versioned[name] = request, versions.usable_version(request)
            except UnsupportedVersionError as error:
                found[name] = error
        return found | self._ask(versioned, timeout_ms)

    def _ask(self, requests: Mapping[str, tuple[Request, int]], timeout_ms: int) -> dict[str, Message | KafkaError]:
        deadline_ms = self._clock.now_ms() + timeout_ms
        found: dict[str, Message | KafkaError] = {}
        sent: dict[str, int] = {}
        for name, (request, version) in requests.items():
            if not self._selector.is_channel_ready(name):
                found[name] = DisconnectError(f"Node {name}: the connection is closed.")
                continue
            self._correlation_id += 1
            try:
                frame = request.encode(version, self._correlation_id, self._client_id)
            except KafkaError as error:  # a field that the version lacks, or a value that does not fit
                found[name] = error
                continue
            sent[name] = self._correlation_id
            self._selector.send(NetworkSend(name, frame))
        while len(found) < len(requests) and (left_ms := deadline_ms - self._clock.now_ms()) > 0:
            self._selector.poll(min(left_ms, _SLICE_MS))
            self._take(found, sent, requests)
        for name in requests.keys() - found.keys():
            found[name] = KafkaTimeoutError(f"Node {name} did not answer within {timeout_ms} ms.")
        return found

    def _take(
        self,
        found: dict[str, Message | KafkaError],
        sent: Mapping[str, int],
        requests: Mapping[str, tuple[Request, int]],
    ) -> None:
        for receive in self._selector.completed_receives:
            if receive.source not in sent or receive.source in found:
                continue
            request, version = requests[receive.source]
            try:
                received = correlation_id_of(receive.payload)
                if 0 < received < sent[receive.source]:
                    continue  # the late answer to an earlier request
                if received != sent[receive.source]:
                    raise ProtocolError(f"Node {receive.source} sent an answer to a request that it did not get.")
                found[receive.source] = parse_response(request_type(int(request.api_key), version), receive.payload)[1]
            except KafkaError as error:
                found[receive.source] = error
        for name, state in self._selector.disconnected.items():
            if name in sent and name not in found:
                found[name] = state.error or DisconnectError(f"Node {name} closed the connection.")
