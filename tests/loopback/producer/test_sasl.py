"""A whole producer logs in over real sockets, at a scripted SASL listener."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scram_server import ScramServer
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer
from support.scripted_broker.sasl import SaslListener
from support.scripted_server import ScriptedServer
from support.token_endpoint import CANARY, answering, token_endpoint

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import (
    IllegalSaslStateError,
    KafkaError,
    KafkaTimeoutError,
    SaslAuthenticationError,
    UnsupportedSaslMechanismError,
)
from spark_kafka_sink.protocol.versions import ApiKey

PASSWORD = "canary-Pa55word"
MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
QUICK_S = 5.0


@pytest.fixture
def cluster() -> ScriptedCluster:
    cluster = ScriptedCluster(2)
    cluster.create_topic("t", partitions=2)
    cluster.sasl = SaslListener(users={"alice": PASSWORD})
    return cluster


@pytest.fixture
def server(cluster: ScriptedCluster) -> Iterator[ScriptedServer]:
    with ScriptedServer(cluster) as server:
        yield server


@contextlib.contextmanager
def producer(server: ScriptedServer, password: str = PASSWORD, /, **settings: Any) -> Iterator[KafkaProducer]:
    given = {
        "bootstrap.servers": ",".join(server.bootstrap_servers),
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.jaas.config": f'{MODULE} required username="alice" password="{password}";',
        "max.block.ms": 20_000,
        **{key.replace("_", "."): value for key, value in settings.items()},
    }
    with KafkaProducer(given) as made:
        yield made


def values(cluster: ScriptedCluster) -> list[bytes]:
    return [record.value or b"" for records in cluster.records("t") for record in records]


def outcome(producer: KafkaProducer) -> KafkaError | None:
    """The outcome of a send, once it has ended."""
    future = producer.send("t", b"x")
    try:
        future.result(timeout=20)
    except KafkaError as error:
        return error
    return None


def failure(producer: KafkaProducer) -> KafkaError:
    """The error of a send, which must end at once."""
    started_s = time.monotonic()
    with pytest.raises(KafkaError) as caught:
        producer.send("t", b"x").result(timeout=30)
    assert time.monotonic() - started_s < QUICK_S
    assert PASSWORD not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("is_idempotent", [True, False])
def test_records_arrive_after_every_login(
    server: ScriptedServer, cluster: ScriptedCluster, mechanism: str, is_idempotent: bool
) -> None:
    cluster.sasl.mechanisms = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
    with producer(server, sasl_mechanism=mechanism, enable_idempotence=is_idempotent) as made:
        for number in range(10):
            made.send("t", b"%d" % number, partition=number % 2).result(timeout=20)
    assert sorted(values(cluster)) == [b"%d" % number for number in range(10)]
    assert set(cluster.sasl.handshakes) == {mechanism}
    assert {exchange.version for exchange in cluster.requests_of(ApiKey.SASL_HANDSHAKE)} == {1}
    assert {exchange.version for exchange in cluster.requests_of(ApiKey.SASL_AUTHENTICATE)} == {2}


def test_plain_without_tls_needs_the_setting(server: ScriptedServer, cluster: ScriptedCluster) -> None:
    cluster.sasl.mechanisms = ["PLAIN"]
    jaas = f"PlainLoginModule required username='alice' password='{PASSWORD}';"
    settings = {"sasl_mechanism": "PLAIN", "sasl_jaas_config": jaas}
    with pytest.raises(KafkaError, match=r"sasl\.allow\.cleartext\.credentials=true"), producer(server, **settings):
        pass
    with producer(server, sasl_allow_cleartext_credentials=True, **settings) as made:
        made.send("t", b"x").result(timeout=20)
    assert values(cluster) == [b"x"]


def test_tokens_of_a_function_log_in(server: ScriptedServer, cluster: ScriptedCluster) -> None:
    cluster.sasl.mechanisms, cluster.sasl.tokens = ["OAUTHBEARER"], {"good"}
    settings = {"sasl_mechanism": "OAUTHBEARER", "sasl_jaas_config": None, "sasl_allow_cleartext_credentials": True}
    with producer(server, sasl_oauthbearer_token_provider=lambda: ("good", 10**15), **settings) as made:
        made.send("t", b"x").result(timeout=20)
    assert values(cluster) == [b"x"]
    with producer(server, sasl_oauthbearer_token_provider=lambda: ("bad", 10**15), **settings) as made:
        assert isinstance(failure(made), SaslAuthenticationError)
    assert b"\x01" in cluster.sasl.received_tokens  # the last token may be of another connection, which the close ended


def test_tokens_of_an_endpoint_are_renewed_with_the_session(
    server: ScriptedServer, cluster: ScriptedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    cluster.sasl.mechanisms = ["OAUTHBEARER"]
    cluster.sasl.session_lifetime_ms, cluster.sasl.grace_ms = 1_200, 1_200
    with token_endpoint(tmp_path) as endpoint:
        monkeypatch.setenv("SSL_CERT_FILE", str(endpoint.authority_file))

        def respond(handler: Any) -> None:
            cluster.sasl.tokens = {f"token-{len(endpoint.requests)}"}
            answering(200, {"access_token": f"token-{len(endpoint.requests)}", "expires_in": 1.2})(handler)

        endpoint.respond = respond
        settings = {
            "sasl_mechanism": "OAUTHBEARER",
            "sasl_jaas_config": f'OAuthBearerLoginModule required clientId="me" clientSecret="{CANARY}" scope="s";',
            "sasl_oauthbearer_token_endpoint_url": endpoint.url,
            "sasl_allow_cleartext_credentials": True,
        }
        with producer(server, **settings) as made:
            deadline_s = time.monotonic() + 3.5
            sent = 0
            while time.monotonic() < deadline_s:
                made.send("t", b"%d" % sent, partition=0).result(timeout=20)
                sent += 1
                time.sleep(0.01)
    assert values(cluster) == [b"%d" % number for number in range(sent)]
    assert len(endpoint.requests) >= 2
    # one connection each to bootstrap, to a node for the producer id, to the leader; all others are renewals
    assert [is_renewal for _, is_renewal in cluster.sasl.logins].count(False) <= 3, cluster.sasl.logins
    assert cluster.sasl.expired == 0


# ---- refusals: final, quick, and without endless retries -------------------------------------------------------------


def refused(
    server: ScriptedServer, cluster: ScriptedCluster, kind: type[KafkaError], **settings: dict[str, Any]
) -> str:
    """Check that every send fails at once with `kind`, and that the producer does not reconnect without a pause."""
    with producer(server, **settings) as made:
        first = failure(made)
        assert type(first) is kind
        assert "127.0.0.1" in str(first)
        failure(made)
        with server.lock:
            before = len(cluster.sasl.handshakes) + len(cluster.requests_of(ApiKey.API_VERSIONS))
        time.sleep(1.0)  # as long as reconnect.backoff.max.ms: a storm would be hundreds
        with server.lock:
            assert len(cluster.sasl.handshakes) + len(cluster.requests_of(ApiKey.API_VERSIONS)) - before <= 8
    assert values(cluster) == []
    return str(first)


@pytest.mark.parametrize("settings", [{}, {"enable_idempotence": False}, {"transactional_id": "x"}])
def test_wrong_password_is_refused(server: ScriptedServer, cluster: ScriptedCluster, settings: dict[str, Any]) -> None:
    cluster.sasl.users = {"alice": "another"}
    if "transactional_id" in settings:
        with producer(server, **settings) as made:
            started_s = time.monotonic()
            with pytest.raises(SaslAuthenticationError):
                made.init_transactions()
            assert time.monotonic() - started_s < QUICK_S
        return
    text = refused(server, cluster, SaslAuthenticationError, **settings)
    assert "refuses the login by SASL SCRAM-SHA-256: Authentication failed during" in text
    assert "sasl.jaas.config: the user is 'alice'." in text


@pytest.mark.parametrize("offered", [["PLAIN"], [], ["PLAIN", "scram-sha-256"]])
def test_producer_tries_no_other_mechanism(
    server: ScriptedServer, cluster: ScriptedCluster, offered: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cluster.sasl.mechanisms = offered
    text = refused(server, cluster, UnsupportedSaslMechanismError)
    assert "sasl.mechanism=SCRAM-SHA-256" in text
    assert set(cluster.sasl.handshakes) == {"SCRAM-SHA-256"}
    assert cluster.sasl.received_tokens == []


def test_listener_without_sasl_is_refused(server: ScriptedServer, cluster: ScriptedCluster) -> None:
    cluster.sasl = None
    with producer(server) as made:
        assert isinstance(failure(made), IllegalSaslStateError)
    assert cluster.requests_of(ApiKey.SASL_AUTHENTICATE) == []


@pytest.mark.parametrize(
    ("twist", "why"),
    [
        ({"iterations": 2**31 - 1}, "iterations"),
        ({"iterations": 1}, "iterations"),
        ({"twist_first": lambda text: f"m=x,{text}"}, "m="),
        ({"twist_first": lambda text: "e=other-error"}, "other-error"),
        ({"twist_first": lambda text: f"r=abc{text[2:]}"}, "nonce"),
        ({"twist_final": lambda text: "x=" + text[2:]}, "no v="),
        ({"twist_final": lambda text: "v=AAAA"}, "is wrong"),
    ],
)
def test_untrusted_server_is_refused(
    server: ScriptedServer, cluster: ScriptedCluster, twist: dict[str, Any], why: str
) -> None:
    cluster.sasl.make_scram = lambda hash_name, users: _lax(ScramServer(hash_name, users, **twist))
    assert why in refused(server, cluster, SaslAuthenticationError)


def _lax(server: ScramServer) -> ScramServer:
    """A server that accepts every user, as an untrusted one would."""
    on_client_final = server.on_client_final
    server.on_client_final = lambda message: on_client_final(message) or server.twist_final("v=AAAA").encode()
    if server.iterations > 10**6:
        server.on_client_final = lambda message: b"v=AAAA"
    return server


def test_error_has_the_servers_text_on_one_line_without_secrets(
    server: ScriptedServer, cluster: ScriptedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.sasl.mechanisms, cluster.sasl.users = ["PLAIN"], {}
    cluster.sasl.refusal = f"no\nERROR root logged in with {PASSWORD}" + "x" * 5_000
    jaas = f"PlainLoginModule required username='alice' password='{PASSWORD}';"
    settings: dict[str, Any] = {"sasl_mechanism": "PLAIN", "sasl_jaas_config": jaas}
    settings["sasl_allow_cleartext_credentials"] = True
    with caplog.at_level(logging.DEBUG):
        text = refused(server, cluster, SaslAuthenticationError, **settings)
    assert "\n" not in text
    assert len(text) < 1_000
    assert PASSWORD not in caplog.text


# ---- failures that the producer retries ------------------------------------------------------------------------------


@pytest.mark.parametrize("api_key", [ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE])
@pytest.mark.parametrize(
    "hook",
    [
        faults.close_before(),
        faults.close_after(),
        faults.truncate(1),
        faults.wrong_correlation_id(),
        faults.frame_length(-1),
        faults.frame_length(2**31 - 1),
        faults.frame_length(10**6),
        faults.corrupt(lambda frame: frame[:8] + bytes(len(frame) - 8)),
    ],
    ids=["cut before", "cut after", "short", "another id", "-1", "2 GB", "1 MB", "zeroes"],
)
def test_failure_during_the_login_is_retried(
    server: ScriptedServer, cluster: ScriptedCluster, api_key: ApiKey, hook: faults.Hook
) -> None:
    zeroes_are_an_answer = {ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE}
    with server.lock:
        cluster.on(api_key, hook, times=2)
    with producer(server) as made:
        error = outcome(made)
    if error is None:
        assert values(cluster) == [b"x"]
    else:  # a message of zeroes proves nothing
        assert api_key in zeroes_are_an_answer
        assert isinstance(error, SaslAuthenticationError)


def test_silent_server_takes_one_connection_timeout(server: ScriptedServer, cluster: ScriptedCluster) -> None:
    with server.lock:
        cluster.on(ApiKey.SASL_AUTHENTICATE, faults.lose_response(), times=None)
    settings = {"max_block_ms": 1_500, "socket_connection_setup_timeout_ms": 300}
    with producer(server, **settings) as made:
        started_s = time.monotonic()
        with pytest.raises(KafkaTimeoutError, match="is connected, but the SASL login did not end within"):
            made.send("t", b"x").result(timeout=20)
        assert time.monotonic() - started_s < QUICK_S


def test_close_does_not_wait_for_a_login(server: ScriptedServer, cluster: ScriptedCluster) -> None:
    entered, release = threading.Event(), threading.Event()

    def provider() -> tuple[str, int]:
        entered.set()
        release.wait(30)
        return "late", 10**15

    cluster.sasl.mechanisms = ["OAUTHBEARER"]
    settings = {"sasl_mechanism": "OAUTHBEARER", "sasl_jaas_config": None, "sasl_allow_cleartext_credentials": True}
    try:
        with producer(server, sasl_oauthbearer_token_provider=provider, max_block_ms=1_000, **settings) as made:
            assert outcome(made) is not None
            assert entered.wait(10)
            started_s = time.monotonic()
            made.close(timeout=1)
            assert time.monotonic() - started_s < QUICK_S
    finally:
        release.set()


# ---- sessions that end -----------------------------------------------------------------------------------------------


def test_session_is_renewed_under_load_without_loss_or_reordering(
    server: ScriptedServer, cluster: ScriptedCluster
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    cluster.sasl.session_lifetime_ms, cluster.sasl.grace_ms = 1_200, 1_200
    rng = random.Random(seed)
    with server.lock:
        cluster.on(ApiKey.PRODUCE, _delayed(rng), times=None)
    sent: list[list[bytes]] = [[], []]
    with producer(server, linger_ms=0, batch_size=200) as made:
        futures: list[Any] = []
        deadline_s = time.monotonic() + 4.5
        while time.monotonic() < deadline_s:
            partition = rng.randrange(2)
            sent[partition].append(b"%d" % len(futures))
            futures.append(made.send("t", sent[partition][-1], partition=partition))
            if rng.random() < 0.2:
                time.sleep(0.002)
        for future in futures:
            future.result(timeout=20)
    found = [[record.value for record in records] for records in cluster.records("t")]
    assert found == sent
    renewals = [mechanism for mechanism, is_renewal in cluster.sasl.logins if is_renewal]
    assert len(renewals) >= 3
    assert len(cluster.sasl.logins) - len(renewals) == 3  # once to bootstrap.servers and once to each node
    assert cluster.sasl.expired == 0


def _delayed(rng: random.Random) -> Callable[..., Answer]:
    """A server whose responses are still on their way when the renewal begins."""

    def hook(cluster: Any, exchange: Any, proceed: Callable[[], Answer]) -> Answer:
        return dataclasses.replace(proceed(), delay_ms=rng.randrange(30))

    return hook


def test_unanswered_renewal_is_a_lost_connection(server: ScriptedServer, cluster: ScriptedCluster) -> None:
    cluster.sasl.session_lifetime_ms = 1_200
    with producer(server, request_timeout_ms=400) as made:
        made.send("t", b"first", partition=0).result(timeout=20)
        with server.lock:
            cluster.on(ApiKey.SASL_AUTHENTICATE, faults.lose_response(), times=1)
        time.sleep(1.25)
        made.send("t", b"second", partition=0).result(timeout=20)
    assert values(cluster) == [b"first", b"second"]


def test_refused_renewal_fails_in_flight_requests(server: ScriptedServer, cluster: ScriptedCluster) -> None:
    cluster.sasl.session_lifetime_ms = 1_200
    with producer(server) as made:
        made.send("t", b"first", partition=0).result(timeout=20)
        with server.lock:
            cluster.sasl.users = {"alice": "changed meanwhile"}
        time.sleep(1.25)
        error = failure(made)
    assert isinstance(error, SaslAuthenticationError)
    assert values(cluster) == [b"first"]


def test_old_node_without_session_lifetimes_works(server: ScriptedServer, cluster: ScriptedCluster) -> None:
    """SaslAuthenticate version 0 has no session lifetime."""
    from support.scripted_broker.versions import KAFKA_2_1

    cluster.versions = KAFKA_2_1
    with producer(server) as made:
        made.send("t", b"x").result(timeout=20)
    assert {exchange.version for exchange in cluster.requests_of(ApiKey.SASL_AUTHENTICATE)} == {0}


def _lifetime(lifetime_ms: int) -> faults.Hook:
    """Replace the last field before the (empty) tags."""
    return faults.corrupt(lambda frame: frame[:-9] + struct.pack(">q", lifetime_ms) + frame[-1:])


@pytest.mark.parametrize("lifetime_ms", [-1, 1, 10**15])
def test_implausible_session_lifetimes_cause_few_logins(
    server: ScriptedServer, cluster: ScriptedCluster, lifetime_ms: int
) -> None:
    with server.lock:
        cluster.on(ApiKey.SASL_AUTHENTICATE, _lifetime(lifetime_ms), times=None)
    with producer(server) as made:
        for _ in range(20):
            made.send("t", b"x", partition=0).result(timeout=20)
    assert len(cluster.sasl.logins) <= 4


@pytest.mark.parametrize("lifetime_ms", [-(2**63), 2**63 - 1])
def test_session_lifetime_out_of_range_is_an_error(
    server: ScriptedServer, cluster: ScriptedCluster, lifetime_ms: int
) -> None:
    with server.lock:
        cluster.on(ApiKey.SASL_AUTHENTICATE, _lifetime(lifetime_ms), times=None)
    with producer(server, max_block_ms=1_000) as made:
        error = failure(made)
    assert "SaslAuthenticate's response" in str(error)
