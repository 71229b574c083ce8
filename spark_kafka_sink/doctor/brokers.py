"""The brokers: whether each server of bootstrap.servers and each advertised listener is reached, and if not, why.

`gather` connects; `judge`, `judge_clock` and `judge_releases` decide from what it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    ClusterAuthorizationError,
    DisconnectError,
    IllegalSaslStateError,
    KafkaError,
    SslAuthenticationError,
    UnsupportedSaslMechanismError,
)
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.doctor.connections import Connections, Contact, Stage
from spark_kafka_sink.doctor.findings import Area, Finding, not_checked, ok, problem
from spark_kafka_sink.network import tls
from spark_kafka_sink.network.peek import Certificate, Speech, certificate_of, speech_of
from spark_kafka_sink.protocol.handshake import SaslHandshakeRequest
from spark_kafka_sink.protocol.metadata import DescribeQuorumRequest, PermissionsRequest, time_of_quorum
from spark_kafka_sink.protocol.versions import ApiKey, Message, first_release, oldest_release_of, release_number

SOON_MS: Final = 14 * 24 * 3_600_000
"""A certificate that expires within this time is a warning."""
CLOCK_MS: Final = 30_000
CLOCK_MUCH_MS: Final = 3_600_000
"""The default of message.timestamp.after.max.ms."""
_PEEK_MS: Final = 2_000
_AREA: Final = Area.BROKERS
_OF_THE_WAY: Final = frozenset({Stage.NAME, Stage.TCP})


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one address. `mechanisms` are those that a listener offers to a client without login."""

    contact: Contact
    speech: Speech | None = None
    certificate: Certificate | None = None
    mechanisms: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.contact.is_ready and not self.mechanisms


@dataclass(frozen=True, slots=True)
class Cluster:
    """The servers of bootstrap.servers, and the nodes that they name. No nodes: no server answered."""

    servers: tuple[Seen, ...]
    nodes: tuple[Seen, ...] = ()
    cluster_id: str = ""

    @property
    def ready(self) -> list[Contact]:
        """The nodes that answer."""
        return [each.contact for each in self.nodes if each.is_ready]


# ---- facts -----------------------------------------------------------------------------------------------------------


def gather(
    config: ProducerConfig, connections: Connections, without_login: Callable[[], Connections], limit_ms: int
) -> Cluster:
    """Connect to all servers, then to all nodes that they name. `without_login` makes connections without login."""
    servers = [
        Contact(host, port, -1 - index) for index, (host, port) in enumerate(dict.fromkeys(config.bootstrap_servers))
    ]
    connections.reach(servers, limit_ms)
    described, refused = _describe(connections, servers, limit_ms)
    brokers = {int(each.node_id): each for each in (described.brokers if described is not None else ())}
    nodes = [Contact(str(each.host), int(each.port), number) for number, each in brokers.items() if number >= 0]
    connections.reach(nodes, limit_ms)
    peek_ms = min(limit_ms, _PEEK_MS)
    mechanisms = {each.place: _mechanisms(without_login, each, peek_ms) for each in refused if not config.uses_sasl}
    return Cluster(
        tuple(_seen(each, config, peek_ms, mechanisms) for each in servers),
        tuple(_seen(each, config, peek_ms, mechanisms) for each in nodes),
        "" if described is None else one_line(str(described.cluster_id or "")),
    )


def _describe(
    connections: Connections, servers: Sequence[Contact], limit_ms: int
) -> tuple[Message | None, list[Contact]]:
    """Return the first answer with brokers, and the servers that ended the connection instead of an answer."""
    refused: list[Contact] = []
    for server in servers:
        if not server.is_ready:
            continue
        try:
            described = connections.ask(server, PermissionsRequest(()), limit_ms)
        except KafkaError as error:
            server.stage, server.error = Stage.VERSIONS, error
            refused += [server] if isinstance(error, DisconnectError) else []
            continue
        if described.brokers:
            return described, refused
    return None, refused


def _mechanisms(without_login: Callable[[], Connections], server: Contact, limit_ms: int) -> tuple[str, ...]:
    """Return what a listener offers that ends connections without login; () if it is no SASL listener."""
    again = Contact(server.host, server.port)
    with without_login() as connections:
        connections.reach([again], limit_ms)
        if not again.is_ready:
            return ()
        try:
            answer = connections.ask(again, SaslHandshakeRequest("-"), limit_ms)
        except KafkaError:
            return ()
    return tuple(one_line(str(each)) for each in answer.mechanisms)


def _seen(contact: Contact, config: ProducerConfig, peek_ms: int, mechanisms: Mapping[str, tuple[str, ...]]) -> Seen:
    address, speech, certificate = contact.address, None, None
    if address is not None and contact.stage not in _OF_THE_WAY:
        is_odd = not contact.is_ready and not isinstance(contact.error, AuthenticationError)
        is_odd |= getattr(contact.error, "fault", "") == tls.NO_TLS
        speech = speech_of(address, peek_ms) if is_odd else None
        if config.uses_tls and speech in {None, Speech.TLS}:
            certificate = certificate_of(address, peek_ms)
    return Seen(contact, speech, certificate, mechanisms.get(contact.place, ()))


def time_of_brokers(connections: Connections, contact: Contact, limit_ms: int) -> int | KafkaError | None:
    """Return the time of day of the leading controller, in ms since the epoch; an error, or None if it gave none."""
    try:
        return time_of_quorum(connections.ask(contact, DescribeQuorumRequest(), limit_ms))
    except KafkaError as error:
        return error


# ---- decisions -------------------------------------------------------------------------------------------------------


def judge(cluster: Cluster, config: ProducerConfig, now_ms: int) -> list[Finding]:
    """Return a finding for each address. `now_ms`: this machine's time of day, for certificates."""
    places = {each.contact.place for each in cluster.nodes}
    found: list[Finding] = []
    for each in cluster.servers:
        if each.contact.place not in places:
            found += _address(each, config, now_ms, is_one_of_more=bool(cluster.ready))
    for each in cluster.nodes:
        found += _address(each, config, now_ms, is_one_of_more=False)
    if not cluster.nodes:
        found.append(not_checked(_AREA, "advertised listeners", "no server of bootstrap.servers named the brokers"))
    return found


def _address(seen: Seen, config: ProducerConfig, now_ms: int, *, is_one_of_more: bool) -> list[Finding]:
    contact = seen.contact
    node = "" if contact.node_id is None else f" (node {contact.node_id})"
    what = one_line(f"{contact.place}{node}")
    if not seen.is_ready:
        return [_failure(seen, config, what, now_ms, is_one_of_more=is_one_of_more)]
    assert contact.versions is not None
    release = oldest_release_of(contact.versions.ranges)
    login = f", logged in by {config.sasl_mechanism}" if config.uses_sasl else ""
    found = [ok(_AREA, what, f"reached by {config.security_protocol}{login}; Kafka {release} or newer")]
    if seen.certificate is not None and seen.certificate.not_after_ms - now_ms < SOON_MS:
        text = f"its certificate expires on {_day(seen.certificate.not_after_ms)}"
        found.append(problem("certificate-expires-soon", _AREA, what, text))
    return found


def _failure(seen: Seen, config: ProducerConfig, what: str, now_ms: int, *, is_one_of_more: bool) -> Finding:
    contact = seen.contact
    text = one_line(str(contact.error or "It ended the connection."))
    if contact.stage in _OF_THE_WAY and contact.node_id is not None:
        return problem("listener-unreachable", _AREA, what, text, node=contact.node_id)
    if contact.stage in _OF_THE_WAY and is_one_of_more:
        return problem("some-servers-unreachable", _AREA, what, text, server=one_line(contact.place))
    name = _name_of(seen, config)
    if name in _OF_CERTIFICATES and seen.certificate is not None:
        text = _in_words(seen.certificate)
        if name == "certificate-expired" and seen.certificate.not_after_ms > now_ms:
            text += ". An authority above it has expired"
    if name in _OF_SPEECH.values() and seen.speech is not None:
        text = f"the port speaks {seen.speech.value}, and kafka.security.protocol={config.security_protocol}"
    if name == "login-required":
        text = f"it offers {', '.join(seen.mechanisms) or 'no mechanism'}, and ends connections without login"
    source = "kafka.bootstrap.servers" if contact.node_id is None else f"advertised.listeners of node {contact.node_id}"
    return problem(
        name,
        _AREA,
        what,
        text,
        source=source,
        host=one_line(contact.host),
        issuer="that signed it" if seen.certificate is None else f"'{seen.certificate.issuer}'",
        without_login="SSL" if config.uses_tls else "PLAINTEXT",
        with_login="SASL_SSL" if config.uses_tls else "SASL_PLAINTEXT",
    )


_OF_SPEECH: Final[Mapping[tuple[bool, Speech], str]] = {
    (False, Speech.TLS): "port-speaks-tls",
    (True, Speech.KAFKA): "port-speaks-plaintext",
    **{(uses_tls, Speech.HTTP): "port-speaks-http" for uses_tls in (False, True)},
    **{(uses_tls, Speech.ZOOKEEPER): "port-speaks-zookeeper" for uses_tls in (False, True)},
}
"""Whether TLS is configured, and what the port speaks → the problem."""
_OF_TLS: Final[Mapping[str, str]] = {
    tls.EXPIRED: "certificate-expired",
    tls.NOT_YET_VALID: "certificate-not-yet-valid",
    tls.WRONG_HOST: "certificate-for-another-host",
    tls.UNKNOWN_AUTHORITY: "certificate-of-unknown-authority",
    tls.OURS_REFUSED: "client-certificate-refused",
    tls.NO_COMMON_VERSION: "tls-versions-differ",
    tls.NO_TLS: "port-not-kafka",
}
_OF_CERTIFICATES: Final = frozenset(name for name in _OF_TLS.values() if name.startswith("certificate-"))
_OF_LOGIN: Final[Sequence[tuple[type[KafkaError], str]]] = (
    (UnsupportedSaslMechanismError, "mechanism-not-offered"),
    (IllegalSaslStateError, "login-not-offered"),
    (AuthenticationError, "login-refused"),
)
_OF_STAGE: Final[Mapping[Stage, str]] = {
    Stage.NAME: "host-unresolved",
    Stage.TCP: "connection-refused",
    Stage.TLS: "tls-failed",
    Stage.LOGIN: "login-failed",
}


def _name_of(seen: Seen, config: ProducerConfig) -> str:
    """Return the name of the problem. The error decides first, then what the port speaks, then how far it came."""
    contact = seen.contact
    if seen.mechanisms:
        return "login-required"
    if contact.stage is Stage.TCP and contact.is_timeout:
        return "connection-timeout"
    if seen.speech is not None and (name := _OF_SPEECH.get((config.uses_tls, seen.speech))) is not None:
        return name
    if isinstance(contact.error, SslAuthenticationError):
        return _OF_TLS.get(contact.error.fault, "tls-failed")
    if name := next((name for kind, name in _OF_LOGIN if isinstance(contact.error, kind)), None):
        return name
    return _OF_STAGE.get(contact.stage, "port-not-kafka")


def _in_words(certificate: Certificate) -> str:
    names = ", ".join(certificate.names) or "no names"
    return (
        f"its certificate '{certificate.subject}' is signed by '{certificate.issuer}', valid from"
        f" {_day(certificate.not_before_ms)} to {_day(certificate.not_after_ms)}, for {names}"
    )


def _day(time_ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return "a day outside the calendar"


_Needs = Sequence[tuple[ApiKey, int]]
NEEDS_ALWAYS: Final[_Needs] = ((ApiKey.PRODUCE, 3), (ApiKey.METADATA, 4))
NEEDS_OF_OPTIONS: Final[Mapping[str, _Needs]] = {
    "delivery.guarantee=exactly-once": (
        (ApiKey.LIST_TRANSACTIONS, 0),
        (ApiKey.DESCRIBE_TRANSACTIONS, 0),
        (ApiKey.OFFSET_FETCH, 7),
    ),
    "kafka.compression.type=zstd": ((ApiKey.PRODUCE, 7),),
    "topic.create=if-missing": ((ApiKey.CREATE_TOPICS, 4),),
}
"""Option → the requests that it needs, with their versions."""


def judge_releases(contacts: Sequence[Contact], options: Sequence[str]) -> list[Finding]:
    """Return a problem for each node that is too old for one of the `options`, which are keys of NEEDS_OF_OPTIONS."""
    found = []
    needs = {"this sink": NEEDS_ALWAYS} | {option: NEEDS_OF_OPTIONS[option] for option in options}
    for contact in contacts:
        for option, requests in needs.items():
            missing = [each for each in requests if not _has(contact, *each)]
            if missing:
                release = max((first_release(*each) for each in missing), key=release_number)
                seen = f"it has no {missing[0][0].name} {missing[0][1]}, which {option} needs"
                what = one_line(f"{contact.place} (node {contact.node_id})")
                found.append(problem("brokers-too-old", _AREA, what, seen, release=release, option=option))
    return found


def _has(contact: Contact, key: ApiKey, version: int) -> bool:
    theirs = contact.versions.ranges.get(key) if contact.versions is not None else None
    return theirs is not None and theirs.latest >= version


def _why_without_time(answer: KafkaError | None) -> str:
    if isinstance(answer, ClusterAuthorizationError):  # its own text is about permissions to write
        return "this needs DESCRIBE on the cluster"
    return "no answer had a time (needs KRaft, Kafka 3.3)" if answer is None else one_line(str(answer))


def judge_clock(answer: int | KafkaError | None, now_ms: int) -> Finding:
    """`answer`: of `time_of_brokers`; `now_ms`: this machine's time of day when it came."""
    area, what = Area.CLOCK, "this machine's time"
    if answer is None or isinstance(answer, KafkaError):
        return not_checked(area, what, f"the brokers did not say theirs: {_why_without_time(answer)}")
    ahead_ms = now_ms - answer
    seen = f"{abs(ahead_ms) / 1000:,.0f} s {'ahead of' if ahead_ms > 0 else 'behind'} the brokers' controller"
    if ahead_ms > CLOCK_MUCH_MS:
        return problem("clock-differs-much", area, what, seen)
    if abs(ahead_ms) > CLOCK_MS:
        return problem("clock-differs", area, what, seen)
    return ok(area, what, f"within {CLOCK_MS // 1000} s of the brokers' controller")
