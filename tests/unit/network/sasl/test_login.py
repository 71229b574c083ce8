"""From the settings to the mechanism of a connection."""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fake_clock import FakeClock

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError, RetriableError
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.network.sasl import oidc
from spark_kafka_sink.network.sasl.authenticator import SaslMechanism
from spark_kafka_sink.network.sasl.aws_msk_iam import region_of
from spark_kafka_sink.network.sasl.gssapi import KerberosLogin
from spark_kafka_sink.network.sasl.login import AuthenticatorFactory, MechanismFactory, mechanism_factory, run_aside

MSK = "b-1.demo.abc123.c2.kafka.eu-central-1.amazonaws.com:9098"


def mechanism(name: str, jaas: str | None = None, servers: str = "localhost:9092", **settings: Any) -> SaslMechanism:
    config = config_of(name, jaas, servers, **settings)
    return mechanism_factory(config, FakeClock(), random.Random(1))("host.example")


def config_of(name: str, jaas: str | None = None, servers: str = "localhost:9092", **settings: Any) -> ProducerConfig:
    given = {
        "bootstrap.servers": servers,
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": name,
        "sasl.jaas.config": jaas,
        **{key.replace("_", "."): value for key, value in settings.items()},
    }
    return ProducerConfig.from_mapping(given)


def advice(name: str, jaas: str | None = None, **settings: Any) -> str:
    """Return what the error of a refused login says to check."""
    make = AuthenticatorFactory(config_of(name, jaas, **settings), FakeClock(), random.Random(1))
    return make("Node 1", "host.example", lambda: None)._advice


@pytest.mark.parametrize("name", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize(
    ("username", "user"), [("alice", ": the user is 'alice'."), ("canary", "."), ("a-canary-b", ".")]
)
def test_refused_login_names_the_option_and_the_user_and_no_password(name: str, username: str, user: str) -> None:
    module = "PlainLoginModule" if name == "PLAIN" else "ScramLoginModule"
    text = advice(name, f'{module} required username="{username}" password="canary";')
    assert text == f"Check the user and the password in sasl.jaas.config{user}"


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        ("provider", {"sasl_oauthbearer_token_provider": lambda: ("token", 1)}),
        (
            "endpoint.url",
            {
                "sasl_oauthbearer_token_endpoint_url": "https://host.example/token",
                "sasl_oauthbearer_client_credentials_client_id": "me",
                "sasl_oauthbearer_client_credentials_client_secret": "canary",
            },
        ),
    ],
)
def test_refused_token_names_the_option_that_it_is_from(option: str, settings: dict[str, Any]) -> None:
    text = advice("OAUTHBEARER", **settings)
    assert f"sasl.oauthbearer.token.{option}:" in text
    assert "canary" not in text


def test_plain_login_is_made_from_the_settings() -> None:
    made = mechanism("PLAIN", "org.apache.kafka.common.security.plain.PlainLoginModule required username=a password=b;")
    assert made.respond(b"") == b"\0a\0b"


def test_nul_in_a_password_is_refused_before_any_connection() -> None:
    config = ProducerConfig.from_mapping(
        {
            "bootstrap.servers": "localhost:9092",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.jaas.config": 'PlainLoginModule required username="a" password="canary\\000b";',
        }
    )
    with pytest.raises(ConfigError, match="NUL") as caught:
        mechanism_factory(config, FakeClock(), random.Random(1))
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("name", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize(("flag", "is_token"), [("", False), ('tokenauth="true"', True), ("tokenauth=false", False)])
def test_scram_login_is_made_from_the_settings(name: str, flag: str, is_token: bool) -> None:
    made = mechanism(name, f"ScramLoginModule required username=a password=b {flag};")
    assert made.name == name
    first = made.respond(b"")
    assert first is not None
    assert first.startswith(b"n,,n=a,r=")
    assert first.endswith(b",tokenauth=true") == is_token


def test_two_exchanges_have_two_nonces() -> None:
    config = ProducerConfig.from_mapping(
        {
            "bootstrap.servers": "localhost:9092",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.jaas.config": "ScramLoginModule required username=a password=b;",
        }
    )
    make = mechanism_factory(config, FakeClock(), random.Random(1))
    assert make("h").respond(b"") != make("h").respond(b"")


def test_token_function_and_extensions_are_used() -> None:
    jaas = "OAuthBearerLoginModule required extension_logicalCluster=lkc-1 extension_identityPoolId=pool-1;"
    made = mechanism("OAUTHBEARER", jaas, sasl_oauthbearer_token_provider=lambda: ("token", 2 * 10**12))
    expected = b"n,,\x01auth=Bearer token\x01logicalCluster=lkc-1\x01identityPoolId=pool-1\x01\x01"
    assert made.respond(b"") == expected


def test_token_function_by_its_name_is_imported_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_tokens.py").write_text("def token():\n    return 'named', 2 * 10**12\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = mechanism("OAUTHBEARER", None, sasl_oauthbearer_token_provider="acme_tokens:token")
    monkeypatch.delitem(sys.modules, "acme_tokens")
    assert made.respond(b"") == b"n,,\x01auth=Bearer named\x01\x01"


def test_missing_module_of_a_token_function_refuses_the_settings() -> None:
    with pytest.raises(
        ConfigError, match=r"^sasl\.oauthbearer\.token\.provider=no_such_module:token: there is no module"
    ):
        mechanism("OAUTHBEARER", None, sasl_oauthbearer_token_provider="no_such_module:token")


def bearer_by(
    clock: FakeClock, provider: Callable[[], tuple[str, int]], settings: Mapping[str, Any]
) -> MechanismFactory:
    given = {
        "bootstrap.servers": "localhost:9092",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.provider": provider,
        **{f"sasl.login.{key}": value for key, value in settings.items()},
    }
    return mechanism_factory(ProducerConfig.from_mapping(given), clock, random.Random(1))


@pytest.mark.parametrize(
    ("settings", "at_s"),
    [
        ({}, 500),
        ({"refresh.window.factor": 0.7}, 700),
        ({"refresh.min.period.seconds": 800}, 800),
        ({"refresh.buffer.seconds": 600}, 400),
    ],
)
def test_token_is_fetched_again_at_the_time_of_the_settings(settings: dict[str, Any], at_s: int) -> None:
    clock, calls = FakeClock(), []

    def provide() -> tuple[str, int]:
        calls.append(clock.wall_ms())
        return "token", clock.wall_ms() + 1_000_000

    plain = {"refresh.window.factor": 0.5, "refresh.window.jitter": 0}
    make = bearer_by(clock, provide, plain | {"refresh.min.period.seconds": 0, "refresh.buffer.seconds": 0} | settings)
    make("h").respond(b"")
    clock.advance(at_s * 1_000 - 1)
    make("h").respond(b"")
    assert len(calls) == 1
    clock.advance(1)
    make("h").respond(b"")
    assert len(calls) == 2


def test_failed_provider_is_retried_by_the_settings() -> None:
    clock, calls = FakeClock(), []

    def provide() -> tuple[str, int]:
        calls.append(clock.wall_ms())
        raise RetriableError("away")

    make = bearer_by(clock, provide, {"retry.backoff.ms": 700, "retry.backoff.max.ms": 1_000})
    for pause_ms in (700, 1_000, 1_000):
        with pytest.raises(RetriableError, match="away"):
            make("h").respond(b"")
        clock.advance(pause_ms - 1)
        with pytest.raises(RetriableError, match="away"):
            make("h").respond(b"")
        clock.advance(1)
    assert len(calls) == 3


@pytest.mark.parametrize("is_by_jaas", [False, True])
def test_token_endpoint_gets_the_credentials_and_timeouts(monkeypatch: pytest.MonkeyPatch, is_by_jaas: bool) -> None:
    asked: list[oidc.ClientCredentials] = []
    monkeypatch.setattr(oidc, "OidcTokenProvider", lambda credentials, clock: asked.append(credentials))
    jaas = 'OAuthBearerLoginModule required clientId="me" clientSecret="canary" scope="kafka";'
    options = {
        "sasl_oauthbearer_client_credentials_client_id": "me",
        "sasl_oauthbearer_client_credentials_client_secret": "canary",
        "sasl_oauthbearer_scope": "kafka",
    }
    mechanism(
        "OAUTHBEARER",
        jaas if is_by_jaas else None,
        sasl_oauthbearer_token_endpoint_url="https://id/token",
        sasl_login_connect_timeout_ms=1,
        sasl_login_read_timeout_ms=2,
        **({} if is_by_jaas else options),
    )
    assert asked == [oidc.ClientCredentials("https://id/token", "me", Secret("canary"), "kafka", False, 1, 2)]


@pytest.mark.parametrize("is_by_jaas", [False, True])
def test_kerberos_ticket_is_for_the_connected_host(monkeypatch: pytest.MonkeyPatch, is_by_jaas: bool) -> None:
    opened: list[tuple[KerberosLogin, str]] = []

    def open_context(login: KerberosLogin, host: str) -> Any:
        opened.append((login, host))
        raise RetriableError("no KDC")

    monkeypatch.setattr(importlib.util, "find_spec", {"gssapi": "there"}.get)
    monkeypatch.setattr(KerberosLogin, "open_context", open_context)
    service = " serviceName=kafka" if is_by_jaas else ""
    jaas = f"Krb5LoginModule required principal=me keyTab=/keys ticketCache=/tickets{service};"
    made = mechanism("GSSAPI", jaas, **({} if is_by_jaas else {"sasl_kerberos_service_name": "kafka"}))
    with pytest.raises(RetriableError, match="no KDC"):
        made.respond(b"")
    assert opened == [(KerberosLogin("kafka", "me", "/keys", "/tickets"), "host.example")]


def test_auth_extension_is_refused_before_any_connection() -> None:
    with pytest.raises(ConfigError, match="extension"):
        mechanism(
            "OAUTHBEARER",
            "OAuthBearerLoginModule required extension_auth=x;",
            sasl_oauthbearer_token_provider=lambda: ("token", 1),
        )


# ---- MSK IAM ---------------------------------------------------------------------------------------------------------


class Signer:
    """The part of AWS's signer that is used."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def generate_auth_token(self, region: str) -> tuple[str, int]:
        self.calls.append(("default", region))
        return "signed", 2 * 10**12

    def generate_auth_token_from_profile(self, region: str, profile: str) -> tuple[str, int]:
        self.calls.append(("profile", region, profile))
        return "signed", 2 * 10**12

    def generate_auth_token_from_role_arn(self, region: str, role: str, name: str) -> tuple[str, int]:
        self.calls.append(("role", region, role, name))
        return "signed", 2 * 10**12


@pytest.fixture
def signer(monkeypatch: pytest.MonkeyPatch) -> Signer:
    signer = Signer()
    package = types.ModuleType("aws_msk_iam_sasl_signer")
    package.MSKAuthTokenProvider = signer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", package)
    return signer


@pytest.mark.parametrize(
    ("jaas", "call"),
    [
        (None, ("default", "eu-central-1")),
        ("software.amazon.msk.auth.iam.IAMLoginModule required;", ("default", "eu-central-1")),
        ('IAMLoginModule required awsProfileName="dev";', ("profile", "eu-central-1", "dev")),
        ('IAMLoginModule required awsRoleArn="arn:r";', ("role", "eu-central-1", "arn:r", "spark-kafka-sink")),
        (
            'IAMLoginModule required awsRoleArn="arn:r" awsRoleSessionName="s";',
            ("role", "eu-central-1", "arn:r", "s"),
        ),
    ],
)
def test_aws_msk_iam_sends_a_signed_token(signer: Signer, jaas: str | None, call: tuple[str, ...]) -> None:
    made = mechanism("AWS_MSK_IAM", jaas, MSK)
    assert made.name == "OAUTHBEARER"
    assert signer.calls == []
    assert made.respond(b"") == b"n,,\x01auth=Bearer signed\x01\x01"
    assert signer.calls == [call]


def test_signer_without_credentials_says_where_to_look(signer: Signer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(region: str) -> tuple[str, int]:
        raise ValueError("canary-key")

    monkeypatch.setattr(signer, "generate_auth_token", fail)
    with pytest.raises(RetriableError, match=r"\(ValueError\): can boto3 find credentials") as caught:
        mechanism("AWS_MSK_IAM", None, MSK).respond(b"")
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "region"),
    [
        (MSK.split(":")[0], "eu-central-1"),
        ("boot-abc.c1.kafka-serverless.us-east-2.amazonaws.com", "us-east-2"),
        ("b-1.x.y.c1.kafka.cn-north-1.amazonaws.com.cn", "cn-north-1"),
    ],
)
def test_region_comes_from_the_names_of_brokers(host: str, region: str) -> None:
    assert region_of(["other.example", host]) == region


def test_region_comes_from_the_environment_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert region_of(["localhost", "kafka.evil.amazonaws.com.example"]) == "eu-west-1"
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    assert region_of(["localhost"]) == "eu-west-2"
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(ConfigError, match="AWS_REGION"):
        region_of(["localhost"])


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", None)
    with pytest.raises(ConfigError, match=r"spark-kafka-sink\[aws\]"):
        mechanism("AWS_MSK_IAM", None, MSK)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"spark-kafka-sink\[kerberos\]"):
        mechanism("GSSAPI", sasl_kerberos_service_name="kafka")


def test_step_returns_its_result_and_reports_its_end() -> None:
    done = threading.Event()
    step = run_aside(threading.current_thread, done.set)
    assert done.wait(10)
    assert step.is_done
    assert step.result().name == "spark-kafka-sink-sasl"
    assert step.result().daemon, "a provider that hangs would keep its process from ending"


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_step_raises_its_error(kind: type[BaseException]) -> None:
    done = threading.Event()

    def fail() -> None:
        raise kind("no")

    step = run_aside(fail, done.set)
    assert done.wait(10)
    with pytest.raises(kind, match="no"):
        step.result()


def test_step_without_a_thread_fails_only_its_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: at a limit of threads the RuntimeError ended the whole turn, and the answers of other nodes were lost."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RetriableError, match="No thread for a slow step of the login: can't start new thread"):
        run_aside(lambda: None, lambda: None)


def test_caller_does_not_wait_for_a_step() -> None:
    release, done = threading.Event(), threading.Event()
    step = run_aside(lambda: release.wait(10), done.set)
    assert not step.is_done
    release.set()
    assert done.wait(10)
    assert step.is_done
