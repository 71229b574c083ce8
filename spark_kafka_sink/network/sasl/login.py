"""Makes the authenticator of each connection from the settings, and the threads on which its slow steps run.

A slow step computes or waits for long. It runs on its own thread, which wakes the loop at the step's end and ends.
When the step's connection is gone, the thread ends by itself and its result is dropped.
"""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError, RetriableError
from spark_kafka_sink.common.texts import Secret, one_line
from spark_kafka_sink.network.sasl.authenticator import SaslAuthenticator, SaslMechanism, Step
from spark_kafka_sink.network.sasl.aws_msk_iam import msk_token_provider, region_of
from spark_kafka_sink.network.sasl.gssapi import GssapiMechanism, KerberosLogin
from spark_kafka_sink.network.sasl.oauthbearer import OAuthBearerMechanism, RefreshRule, TokenCache, TokenProvider
from spark_kafka_sink.network.sasl.plain import PlainMechanism
from spark_kafka_sink.network.sasl.scram import ScramSha256Mechanism, ScramSha512Mechanism

T = TypeVar("T")


class _AsideStep(Generic[T]):
    def __init__(self, run: Callable[[], T], on_done: Callable[[], None]) -> None:
        self._run = run
        self._on_done = on_done
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.is_done = False
        threading.Thread(target=self._work, name="spark-kafka-sink-sasl", daemon=True).start()

    def _work(self) -> None:
        try:
            self._value.append(self._run())
        except BaseException as error:  # the loop decides what it means
            self._error = error
        self.is_done = True
        self._on_done()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


def run_aside(run: Callable[[], T], on_done: Callable[[], None]) -> Step[T]:
    """The `StepRunner` of a client. Raises RetriableError if the system starts no thread."""
    try:
        return _AsideStep(run, on_done)
    except RuntimeError as error:  # only this login fails, not the loop's turn
        raise RetriableError(f"No thread for a slow step of the login: {error}.") from None


_EXTENSION: Final = "extension_"
_ACCEPTED: Final = "its issuer, audience, scope and end must be what the broker accepts."

MechanismFactory = Callable[[str], SaslMechanism]
"""Host → the mechanism of one authentication with it."""


def mechanism_factory(config: ProducerConfig, clock: Clock, rng: random.Random) -> MechanismFactory:
    """Return the factory for sasl.mechanism. Raises ConfigError if the credentials cannot be used."""
    make = _FACTORIES[config.sasl_mechanism](config, clock, rng)
    make("")  # refuses wrong credentials before any connection is made
    return make


class AuthenticatorFactory:
    """Makes the authenticators of a client's connections. They share what can be shared, such as a token."""

    def __init__(self, config: ProducerConfig, clock: Clock, rng: random.Random) -> None:
        """Raises ConfigError as `mechanism_factory` does."""
        self._make_mechanism = mechanism_factory(config, clock, rng)
        self._client_id = config.client_id
        self._rng = rng
        self._advice = _what_to_check(config)

    def __call__(self, description: str, host: str, wakeup: Callable[[], None]) -> SaslAuthenticator:
        """See `AuthenticatorFactory` in `network.selector`."""
        return SaslAuthenticator(
            description, lambda: self._make_mechanism(host), self._client_id, self._rng, run_aside, wakeup, self._advice
        )


def _plain(config: ProducerConfig, _: Clock, __: random.Random) -> MechanismFactory:
    username, password = _credentials(config)
    return lambda _: PlainMechanism(username, password)


def _scram(made: type[ScramSha256Mechanism | ScramSha512Mechanism]) -> Callable[..., MechanismFactory]:
    def factory(config: ProducerConfig, _: Clock, __: random.Random) -> MechanismFactory:
        username, password = _credentials(config)
        is_token = (config.jaas_option("tokenauth") or "").lower() == "true"
        return lambda _: made(username, password, is_token)

    return factory


def _oauthbearer(config: ProducerConfig, clock: Clock, rng: random.Random) -> MechanismFactory:
    given = config.sasl_oauthbearer_token_provider
    provider = _oidc(config, clock) if given is None else given.load("sasl.oauthbearer.token.provider")
    options = config.sasl_jaas_config.options if config.sasl_jaas_config is not None else ()
    extensions = {
        name.removeprefix(_EXTENSION): value.reveal() for name, value in options if name.startswith(_EXTENSION)
    }
    return _bearer(provider, extensions, config, clock, rng)


def _aws_msk_iam(config: ProducerConfig, clock: Clock, rng: random.Random) -> MechanismFactory:
    region = region_of(host for host, _ in config.bootstrap_servers)
    return _bearer(msk_token_provider(config.sasl_jaas_config, region), {}, config, clock, rng)


def _bearer(
    provider: TokenProvider, extensions: Mapping[str, str], config: ProducerConfig, clock: Clock, rng: random.Random
) -> MechanismFactory:
    rule = RefreshRule(
        config.sasl_login_refresh_window_factor,
        config.sasl_login_refresh_window_jitter,
        config.sasl_login_refresh_min_period_seconds * 1_000,
        config.sasl_login_refresh_buffer_seconds * 1_000,
        config.sasl_login_retry_backoff_ms,
        config.sasl_login_retry_backoff_max_ms,
    )
    tokens = TokenCache(provider, rule, clock, random.Random(rng.getrandbits(64)))
    return lambda _: OAuthBearerMechanism(tokens.get, extensions)


def _gssapi(config: ProducerConfig, _: Clock, __: random.Random) -> MechanismFactory:
    if importlib.util.find_spec("gssapi") is None:
        raise ConfigError("sasl.mechanism=GSSAPI needs the package gssapi: pip install 'spark-kafka-sink[kerberos]'.")
    service = config.sasl_kerberos_service_name or config.jaas_option("serviceName")
    login = KerberosLogin(
        service or "", config.jaas_option("principal"), config.jaas_option("keyTab"), config.jaas_option("ticketCache")
    )
    return lambda host: GssapiMechanism(lambda: login.open_context(host))


_FACTORIES: Final[Mapping[str, Callable[[ProducerConfig, Clock, random.Random], MechanismFactory]]] = {
    "PLAIN": _plain,
    "SCRAM-SHA-256": _scram(ScramSha256Mechanism),
    "SCRAM-SHA-512": _scram(ScramSha512Mechanism),
    "OAUTHBEARER": _oauthbearer,
    "AWS_MSK_IAM": _aws_msk_iam,
    "GSSAPI": _gssapi,
}


def _credentials(config: ProducerConfig) -> tuple[str, Secret]:
    return config.jaas_option("username") or "", Secret(config.jaas_option("password") or "")


def _what_to_check(config: ProducerConfig) -> str:
    """Return a sentence for a refused login: the options, and the user, but no secret."""
    if config.sasl_mechanism == "OAUTHBEARER":
        is_given = config.sasl_oauthbearer_token_provider is not None
        source = "provider" if is_given else "endpoint.url"
        return f"Check the token of sasl.oauthbearer.token.{source}: {_ACCEPTED}"
    if config.sasl_mechanism == "AWS_MSK_IAM":
        return "Check the AWS credentials of this machine, and the profile or role of sasl.jaas.config if it names one."
    if config.sasl_mechanism == "GSSAPI":
        return "Check sasl.kerberos.service.name, and the principal of sasl.jaas.config or of the ticket."
    username, password = _credentials(config)
    if password.reveal() in username:  # the name would show the password
        return "Check the user and the password in sasl.jaas.config."
    return f"Check the user and the password in sasl.jaas.config: the user is {one_line(username)!r}."


def _oidc(config: ProducerConfig, clock: Clock) -> TokenProvider:
    # Imported here, because HTTP takes 0.7 MB of every worker and other logins do not need it.
    from spark_kafka_sink.network.sasl.oidc import ClientCredentials, OidcTokenProvider

    secret = config.sasl_oauthbearer_client_credentials_client_secret
    credentials = ClientCredentials(
        config.sasl_oauthbearer_token_endpoint_url or "",
        config.sasl_oauthbearer_client_credentials_client_id or config.jaas_option("clientId") or "",
        secret or Secret(config.jaas_option("clientSecret") or ""),
        config.sasl_oauthbearer_scope or config.jaas_option("scope"),
        config.sasl_oauthbearer_header_urlencode,
        config.sasl_login_connect_timeout_ms,
        config.sasl_login_read_timeout_ms,
    )
    return OidcTokenProvider(credentials, clock)
