"""Rows 47 to 50 and 53: logins, trust and permissions, and no secret in any log or error."""

from __future__ import annotations

import base64
import io
import json
import logging
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.certificates import Authority, Identity
from support.fault_stage import Timeline
from support.lateness import Stopwatch
from support.secured_broker import LISTENERS, USERS, SecuredBroker
from support.tcp_proxy import TcpProxy, Way
from support.workload import Workload, draw_settings, finish

from spark_kafka_sink.common.errors import (
    AuthenticationError,
    ClusterAuthorizationError,
    KafkaError,
    SaslAuthenticationError,
    TopicAuthorizationError,
    TransactionalIdAuthorizationError,
)
from spark_kafka_sink.local import BrokerSecurity, EmbeddedKafka
from spark_kafka_sink.local.access import AccessAdmin, Permission
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.sink.kafka_sink import KafkaSink

StartProducer = Callable[..., KafkaProducer]
WRONG = "wrong-canary-secret"
CANARIES = (WRONG, *USERS.values(), USERS["alice"].partition('"')[2])  # this one also if quotes are escaped
MODULES = {"PLAIN": "plain.PlainLoginModule", "SCRAM-SHA-256": "scram.ScramLoginModule"}
FAST = {"linger.ms": 0, "max.block.ms": 5_000, "reconnect.backoff.max.ms": 200}


def login(user: str, password: str, mechanism: str = "SCRAM-SHA-256") -> dict[str, str]:
    quoted = password.replace("\\", "\\\\").replace('"', '\\"')
    module = f"org.apache.kafka.common.security.{MODULES[mechanism]}"
    return {
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f'{module} required username="{user}" password="{quoted}";',
    }


@pytest.fixture(autouse=True)
def no_secret_shown(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Check for row 53, in each of these rows, that no log line of any level and no output holds a secret. Bug:
    caplog's text is empty by then.
    """
    lines = io.StringIO()
    own, root = logging.StreamHandler(lines), logging.getLogger()
    level = root.level
    root.addHandler(own)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(own)
    reported = lines.getvalue() + "".join(capsys.readouterr())
    assert [canary for canary in CANARIES if canary in reported] == []


def text_of(error: BaseException) -> str:
    """The texts of the error and of all its causes."""
    texts = []
    each: BaseException | None = error
    while each is not None:
        texts += [str(each), repr(each), repr(each.__dict__)]
        each = each.__cause__ or each.__context__
    return "\n".join(texts)


@pytest.mark.parametrize("mechanism", MODULES)
@pytest.mark.parametrize("user", ["alice", "nobody"])
def test_row_47_bad_password_or_user(
    secured_broker: SecuredBroker, start_producer: StartProducer, timeline: Timeline, user: str, mechanism: str
) -> None:
    listener = "SASL_SSL" if mechanism == "PLAIN" else "SASL_PLAINTEXT"
    settings = secured_broker.settings(listener) | FAST | login(user, WRONG, mechanism)
    servers = str(settings.pop("bootstrap.servers"))
    with TcpProxy(servers) as proxy:
        producer = start_producer(proxy.address, **settings)
        with Stopwatch() as watch, pytest.raises(SaslAuthenticationError) as caught:
            producer.send("t", b"v").result(10)
        time.sleep(2)
        timeline.note(f"after {watch.took_s:.2f} s, {proxy.accepted} connections in 2 s more: {caught.value}")
        assert watch.own_s < 3
        assert proxy.accepted <= 6, "a storm"
    for canary in CANARIES:
        assert canary not in text_of(caught.value) + repr(producer) + repr(producer.config)


def connections_to(port: int) -> set[int]:
    """This process's own ends of its connections to a port."""
    found = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in found if each.raddr and each.raddr.port == port}


def test_row_48_session_ends(
    own_kafka: Callable[..., EmbeddedKafka], start_producer: StartProducer, timeline: Timeline, seed: int
) -> None:
    """The broker requires a new login every two seconds: records continue on the same connections, and none is lost."""
    rng = random.Random(seed)
    security = BrokerSecurity(listeners={"SASL_PLAINTEXT": "SASL_PLAINTEXT"}, users=USERS)
    kafka = own_kafka(security=security, properties={"connections.max.reauth.ms": 2_000})
    kafka.create_topic("t", 2)
    settings = draw_settings(rng) | {"security.protocol": "SASL_PLAINTEXT"} | login("alice", USERS["alice"])
    producer = start_producer(kafka.secured_servers("SASL_PLAINTEXT"), **settings)
    port = int(kafka.secured_servers("SASL_PLAINTEXT").rpartition(":")[2])
    with Workload(producer, [("t", 0), ("t", 1)], rng) as work:
        work.await_acknowledged(20)
        connections = connections_to(port)
        for _ in range(5):
            time.sleep(1)
            work.await_acknowledged(20)
        assert connections
        assert connections_to(port) >= connections, "a new connection was made instead of a new login"
    timeline.note(finish(kafka.bootstrap_servers, work))
    assert work.longest_silence_s() < 1.5


def test_row_48_expired_token(secured_broker: SecuredBroker, start_producer: StartProducer, timeline: Timeline) -> None:
    """The provider reports a wrong end for the token: the broker refuses it, and the error says so."""
    now_s = int(time.time())

    def part(values: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")

    token = f"{part({'alg': 'none'})}.{part({'sub': 'alice', 'exp': now_s - 60, 'iat': now_s - 600})}."
    settings = secured_broker.settings("SASL_SSL") | FAST | {"sasl.mechanism": "OAUTHBEARER"}
    provider = {"sasl.oauthbearer.token.provider": lambda: (token, (now_s + 600) * 1000)}
    producer = start_producer(settings.pop("bootstrap.servers"), **settings, **provider)
    with Stopwatch() as watch, pytest.raises(AuthenticationError) as caught:
        producer.send("t", b"v").result(10)
    timeline.note(f"after {watch.took_s:.2f} s: {caught.value}")
    assert watch.own_s < 3
    assert token not in text_of(caught.value)


class Impostor:
    """A listener that takes connections, sends the given answer, and keeps the bytes that it receives."""

    def __init__(self, serve: Callable[[socket.socket, Impostor], None]) -> None:
        self.received = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._serve = serve
        self._thread = threading.Thread(target=self._run, name="impostor")

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            connection.settimeout(2)
            with connection:
                try:
                    self._serve(connection, self)
                except OSError:
                    continue


def tls_with(identity: Identity, folder: Path, highest: ssl.TLSVersion | None = None) -> Any:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.write(folder / "impostor.pem"))
    if highest is not None:
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = highest
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = highest

    def serve(connection: socket.socket, impostor: Impostor) -> None:
        with context.wrap_socket(connection, server_side=True) as channel:
            while data := channel.recv(4096):
                impostor.received += data

    return serve


def in_plain_text(connection: socket.socket, impostor: Impostor) -> None:
    connection.recv(4096)  # the client's hello, which holds nothing of the Kafka protocol
    connection.sendall(b"\x00\x00\x00\x0a\x00\x00\x00\x00\x00\x23\x00\x00\x00\x00")
    while data := connection.recv(4096):
        impostor.received += data


@pytest.mark.parametrize("what", ["wrong host", "expired", "untrusted", "TLS 1.1", "plain text"])
def test_row_49_untrusted_peers(
    secured_broker: SecuredBroker, start_producer: StartProducer, timeline: Timeline, tmp_path: Path, what: str
) -> None:
    """The error is clear, and the client sends no byte of the Kafka protocol or of a login."""
    authority = secured_broker.authority
    serve = {  # type: ignore[no-untyped-call]
        "wrong host": lambda: tls_with(authority.issue("elsewhere.example"), tmp_path),
        "expired": lambda: tls_with(authority.issue_expired(), tmp_path),
        "untrusted": lambda: tls_with(Authority("another authority").issue(), tmp_path),
        "TLS 1.1": lambda: tls_with(authority.issue(), tmp_path, ssl.TLSVersion.TLSv1_1),
        "plain text": lambda: in_plain_text,
    }[what]()
    settings = secured_broker.settings("SASL_SSL") | FAST | login("alice", USERS["alice"])
    del settings["bootstrap.servers"]
    with Impostor(serve) as impostor:
        producer = start_producer(impostor.address, **settings)
        with Stopwatch() as watch, pytest.raises(KafkaError) as caught:
            producer.send("t", b"v").result(10)
        timeline.note(f"{what}: after {watch.took_s:.2f} s and {impostor.connections} connections: {caught.value}")
        producer.close(0)
    assert bytes(impostor.received) == b""
    assert watch.own_s < 5.5
    assert isinstance(caught.value, AuthenticationError), type(caught.value)
    assert re.search(r"127\.0\.0\.1|certificate|TLS|ssl", str(caught.value))


def test_row_49_cut_in_the_handshake(
    secured_broker: SecuredBroker, start_producer: StartProducer, timeline: Timeline, seed: int
) -> None:
    """The error blames no certificate, and the producer connects again."""
    rng = random.Random(seed)
    name = f"cut-{rng.random()}".replace(".", "-")
    secured_broker.admin.create_topic(name)
    settings = secured_broker.settings("SASL_SSL") | FAST | login("alice", USERS["alice"])
    for _ in range(5):
        with TcpProxy(str(settings["bootstrap.servers"])) as proxy:
            proxy.cut_after(rng.randrange(1, 400), rng.choice((Way.UP, Way.DOWN)), reset=rng.random() < 0.5)
            producer = start_producer(proxy.address, **settings | {"bootstrap.servers": proxy.address})
            assert producer.send(name, b"v").result(10).partition == 0
            timeline.note(f"{proxy.accepted} connections")
            assert proxy.accepted >= 2
            producer.close(1)


class Guarded:
    """The user Bob, with only the granted permissions, and a topic for this test."""

    def __init__(self, broker: SecuredBroker, start_producer: StartProducer) -> None:
        self.broker = broker
        self.topic = f"guarded-{random.SystemRandom().getrandbits(40):x}"
        broker.admin.create_topic(self.topic)
        self.access = AccessAdmin(broker.kafka.bootstrap_servers)
        self._start = start_producer

    def grant(self, operation: str, resource: str, name: str) -> None:
        self.access.grant(Permission("User:bob", operation, resource, name))

    def producer(self, **settings: object) -> KafkaProducer:
        given = self.broker.settings("SASL_PLAINTEXT") | FAST | login("bob", USERS["bob"]) | settings
        return self._start(given.pop("bootstrap.servers"), **given)


@pytest.fixture
def guarded(secured_broker: SecuredBroker, start_producer: StartProducer) -> Guarded:
    return Guarded(secured_broker, start_producer)


def test_row_50_topic_not_granted(guarded: Guarded) -> None:
    """The record fails at once, and succeeds after the grant. It aborts its transaction, but not the next one."""
    guarded.grant("write", "transactional_id", guarded.topic)
    guarded.grant("describe", "topic", guarded.topic)
    guarded.grant("idempotent_write", "cluster", "kafka-cluster")
    plain = guarded.producer()
    with Stopwatch() as watch, pytest.raises(TopicAuthorizationError, match=guarded.topic):
        plain.send(guarded.topic, b"v").result(10)
    assert watch.own_s < 3
    producer = guarded.producer(**{"transactional.id": guarded.topic})
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(guarded.topic, b"v")
    with pytest.raises(TopicAuthorizationError, match=guarded.topic):
        producer.commit_transaction()
    assert not producer.has_failed
    producer.abort_transaction()
    guarded.grant("write", "topic", guarded.topic)
    producer.begin_transaction()
    producer.send(guarded.topic, b"v")
    producer.commit_transaction()
    assert plain.send(guarded.topic, b"v").result(10).partition == 0


def test_row_50_transactional_id_not_granted(guarded: Guarded) -> None:
    """The same call of the same producer succeeds after the grant for the id."""
    guarded.grant("write", "topic", guarded.topic)
    producer = guarded.producer(**{"transactional.id": guarded.topic})
    with Stopwatch() as watch, pytest.raises(TransactionalIdAuthorizationError, match=guarded.topic):
        producer.init_transactions()
    assert watch.own_s < 3
    guarded.grant("write", "transactional_id", guarded.topic)
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(guarded.topic, b"v")
    producer.commit_transaction()


def test_row_50_cluster_not_granted(guarded: Guarded) -> None:
    """A user without any WRITE permission gets no producer id; the same producer works after a grant."""
    joe = login("joe", USERS["joe"])
    guarded.access.grant(Permission("User:joe", "describe", "topic", guarded.topic))
    producer = guarded.producer(**joe)
    with pytest.raises(ClusterAuthorizationError, match="IDEMPOTENT_WRITE"):
        producer.send(guarded.topic, b"v").result(10)
    guarded.access.grant(Permission("User:joe", "write", "topic", guarded.topic))
    assert producer.send(guarded.topic, b"v").result(10).partition == 0


def test_row_53_no_secret_is_shown(secured_broker: SecuredBroker, start_producer: StartProducer) -> None:
    """Settings, a producer and a sink show no secret when they are printed, compared or raised."""
    settings = secured_broker.settings("SASL_SSL") | login("alice", USERS["alice"])
    sink = KafkaSink({f"kafka.{key}": value for key, value in settings.items()}, topic="t")
    shown = [repr(sink), str(sink)]
    servers = str(settings.pop("bootstrap.servers"))
    producer = start_producer(servers, **settings)
    shown += [repr(producer), repr(producer.config), str(producer.config), repr(producer.metrics())]
    for bad in ({"sasl.mechanism": "SCRAM-SHA-257"}, {"sasl.jaas.config": f"nonsense {WRONG}"}, {"linger.ms": "x"}):
        with pytest.raises(KafkaError) as caught:
            start_producer(servers, **settings | bad)
        shown.append(text_of(caught.value))
    for text in shown:
        assert [canary for canary in (*CANARIES, USERS["alice"].replace('"', '\\"')) if canary in text] == []
    assert set(LISTENERS) >= {"SASL_SSL"}
