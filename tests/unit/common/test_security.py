"""The settings of TLS and SASL: Kafka's names and defaults, their contradictions, and that no secret is shown."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
from pyspark import cloudpickle

from spark_kafka_sink.common import options, security
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import parse_value, table_of
from spark_kafka_sink.common.security import SecurityConfig
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.sink.kafka_sink import KafkaSink

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
KEY = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nhunter2\n-----END ENCRYPTED PRIVATE KEY-----"
PLAIN = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="alice" password="hunter2";'
SCRAM = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="alice" password="hunter2";'
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"


def token() -> tuple[str, int]:
    return "token", 1


def config(**settings: Any) -> ProducerConfig:
    """Return settings with underscores for dots."""
    given = {key.replace("_", "."): value for key, value in settings.items()}
    return ProducerConfig.from_mapping({"bootstrap.servers": "localhost:9092", **given})


KAFKAS_DEFAULTS = {
    "security.protocol": "PLAINTEXT",
    "ssl.truststore.location": None,
    "ssl.truststore.certificates": None,
    "ssl.truststore.password": None,
    "ssl.keystore.location": None,
    "ssl.keystore.certificate.chain": None,
    "ssl.keystore.key": None,
    "ssl.keystore.password": None,
    "ssl.key.password": None,
    "ssl.endpoint.identification.algorithm": "https",
    "ssl.enabled.protocols": ("TLSv1.2", "TLSv1.3"),
    "ssl.protocol": "TLSv1.3",
    "ssl.cipher.suites": None,
    "sasl.mechanism": "GSSAPI",
    "sasl.jaas.config": None,
    "sasl.kerberos.service.name": None,
    "sasl.login.refresh.window.factor": 0.8,
    "sasl.login.refresh.window.jitter": 0.05,
    "sasl.login.refresh.min.period.seconds": 60,
    "sasl.login.refresh.buffer.seconds": 300,
    "sasl.login.retry.backoff.ms": 100,
    "sasl.login.retry.backoff.max.ms": 10_000,
    "sasl.oauthbearer.token.endpoint.url": None,
    "sasl.oauthbearer.client.credentials.client.id": None,
    "sasl.oauthbearer.client.credentials.client.secret": None,
    "sasl.oauthbearer.scope": None,
    "sasl.oauthbearer.header.urlencode": False,
}
OWN_DEFAULTS = {
    "ssl.truststore.type": "PEM",
    "ssl.keystore.type": "PEM",
    "sasl.login.connect.timeout.ms": 10_000,
    "sasl.login.read.timeout.ms": 10_000,
    "sasl.allow.cleartext.credentials": False,
    "sasl.oauthbearer.token.provider": None,
}


def test_defaults_are_kafkas_except_documented_ones() -> None:
    defaults = {**KAFKAS_DEFAULTS, **OWN_DEFAULTS}
    names = SecurityConfig.__dataclass_fields__
    assert {name.replace("_", "."): getattr(config(), name) for name in names} == defaults
    for key in OWN_DEFAULTS:
        assert "Kafka" in names[key.replace(".", "_")].metadata["doc"]


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("security.protocol", "ssl", "SSL"),
        ("ssl.enabled.protocols", " TLSv1.3 ,TLSv1.2", ("TLSv1.2", "TLSv1.3")),
        ("ssl.enabled.protocols", ["TLSv1.3"], ("TLSv1.3",)),
        ("ssl.endpoint.identification.algorithm", "", ""),
        ("ssl.endpoint.identification.algorithm", "HTTPS", "https"),
        (
            "ssl.cipher.suites",
            "DHE-RSA-AES128-GCM-SHA256,TLS_DHE_RSA_WITH_AES_256_GCM_SHA384,DHE-RSA-AES128-GCM-SHA256",
            ("DHE-RSA-AES128-GCM-SHA256", "TLS_DHE_RSA_WITH_AES_256_GCM_SHA384"),
        ),
        ("ssl.truststore.certificates", f"\n{CERTIFICATE}\n", Secret(CERTIFICATE)),
    ],
)
def test_values_are_parsed(key: str, given: object, expected: object) -> None:
    parsed = config(**{"security.protocol": "SSL", key: given})
    assert getattr(parsed, key.replace(".", "_")) == expected


@pytest.mark.parametrize(
    ("key", "given", "rule"),
    [
        ("security.protocol", "TLS", "one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        ("ssl.endpoint.identification.algorithm", "ldaps", "one of https, nothing"),
        ("ssl.enabled.protocols", "TLSv1.1,TLSv1.2", "one of TLSv1.2, TLSv1.3"),
        ("ssl.enabled.protocols", ",", "at least one name"),
        ("ssl.truststore.type", "BCFKS", "one of PEM, PKCS12, JKS"),
        ("sasl.mechanism", "DIGEST-MD5", "one of GSSAPI, PLAIN"),
        ("sasl.login.refresh.window.factor", "0.4", "between 0.5 and 1.0"),
        ("sasl.login.refresh.window.factor", "much", "between 0.5 and 1.0"),
        ("sasl.login.refresh.window.factor", "nan", "between 0.5 and 1.0"),
        ("sasl.login.refresh.window.factor", True, "between 0.5 and 1.0"),
        ("sasl.login.refresh.window.jitter", "0.26", "between 0.0 and 0.25"),
    ],
)
def test_malformed_value_is_refused_with_setting_and_remedy(key: str, given: object, rule: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config(**{key: given})
    assert str(refusal.value).startswith(f"{key}={given!r} must ")
    assert rule in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("sasl.jaas.config", "hunter2"),
        ("sasl.jaas.config", f"{PLAIN} {PLAIN}"),
        ("ssl.keystore.key", "hunter2"),
        ("ssl.key.password", ""),
        ("ssl.truststore.certificates", KEY),
        ("ssl.keystore.certificate.chain", KEY),
    ],
)
def test_malformed_secret_is_not_shown(key: str, given: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config(**{key: given})
    assert str(refusal.value).startswith(f"{key}=*** must ")
    assert "hunter2" not in str(refusal.value)
    assert refusal.value.__cause__ is None


@pytest.mark.parametrize("key", ["ssl.key.password", "sasl.oauthbearer.client.credentials.client.secret"])
def test_white_space_around_a_password_is_stripped(key: str) -> None:
    """Kafka's ConfigDef trims every text, also passwords: a password from a file often ends with a line break."""
    parsed = parse_value(key, " \thunter 2\u00a0\r\n", table_of(ProducerConfig)[key].metadata)
    assert parsed == Secret("hunter 2\u00a0")
    with pytest.raises(ConfigError, match="must not be empty"):
        config(**{key: " \n"})


def test_password_may_be_given_as_a_secret() -> None:
    given = Secret(" hunter2 ")
    for key in ("ssl.key.password", "ssl.truststore.password"):
        assert parse_value(key, given, table_of(ProducerConfig)[key].metadata) == given


def test_pem_text_as_a_path_names_the_right_setting() -> None:
    with pytest.raises(
        ConfigError, match=r"BEGIN CERTIFICATE-----; the path of a file goes into ssl\.truststore\.location"
    ):
        config(ssl_truststore_certificates="/etc/ca.pem")


@pytest.mark.parametrize("key", ["ssl.keystore.location", "ssl.truststore.location"])
def test_pem_text_given_as_path_is_refused_and_not_shown(key: str) -> None:
    rule = rf"^{re.escape(key)}=\*\*\* must be the path of a file; PEM text goes into ssl\.truststore\.certif"
    with pytest.raises(ConfigError, match=rule) as refusal:
        config(**{key: f"{KEY}\n{CERTIFICATE}"})
    assert "hunter2" not in str(refusal.value)
    with pytest.raises(ConfigError, match="must not be empty"):
        config(**{key: " "})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ssl_truststore_location": "ca.pem"}, "ssl.truststore.location has no effect with .*PLAINTEXT: set SSL or"),
        ({"sasl_jaas_config": PLAIN}, "sasl.jaas.config has no effect with .*PLAINTEXT: set SASL_SSL or"),
        ({"sasl_mechanism": "PLAIN", "security_protocol": "SSL"}, "sasl.mechanism has no effect"),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"}, "sasl.jaas.config is missing.*PlainLoginModule"),
        *(
            ({"security_protocol": "SASL_SSL", "sasl_mechanism": f"SCRAM-SHA-{bits}"}, "is missing.*ScramLoginModule")
            for bits in (256, 512)
        ),
        (
            {"security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-256", "sasl_jaas_config": PLAIN},
            "another login module .* is ScramLoginModule",
        ),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "PLAIN",
                "sasl_jaas_config": 'PlainLoginModule required username="hunter2";',
            },
            "must have a username and a password",
        ),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "PLAIN",
                "sasl_jaas_config": 'PlainLoginModule required password="hunter2";',
            },
            "must have a username and a password",
        ),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "SCRAM-SHA-512",
                "sasl_jaas_config": 'ScramLoginModule required username="hunter2";',
            },
            "must have a username and a password",
        ),
        (
            {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_jaas_config": PLAIN},
            "sasl.allow.cleartext.credentials=true",
        ),
        (
            {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER", "sasl_jaas_config": OAUTH},
            "sasl.allow.cleartext.credentials=true",
        ),
        ({"security_protocol": "SASL_SSL"}, r"GSSAPI \(Kafka's default\) needs sasl\.kerberos\.service\.name"),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}, "needs tokens"),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "OAUTHBEARER",
                "sasl_oauthbearer_token_provider": token,
                "sasl_oauthbearer_token_endpoint_url": "https://login.example/hunter2",
            },
            "leave one out",
        ),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "OAUTHBEARER",
                "sasl_oauthbearer_token_endpoint_url": "https://login.example/hunter2",
                "sasl_oauthbearer_client_credentials_client_id": "me",
            },
            "client.secret",
        ),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "OAUTHBEARER",
                "sasl_oauthbearer_token_endpoint_url": "https://login.example/",
                "sasl_oauthbearer_client_credentials_client_secret": "hunter2",
            },
            "client.id",
        ),
        *(
            (
                {
                    "security_protocol": "SASL_SSL",
                    "sasl_mechanism": "OAUTHBEARER",
                    "sasl_oauthbearer_token_endpoint_url": url,
                },
                "a URL",
            )
            for url in (
                "http://login.example/hunter2",
                "file:///etc/hunter2",
                "https:///hunter2",
                "https://me:hunter2@login.example/",
                "https://hunter2@login.example/",
                "https://login.example:99999/hunter2",
                "hunter2",
            )
        ),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "OAUTHBEARER",
                "sasl_oauthbearer_token_provider": "os.system",
            },
            "or its name as module:function",
        ),
        *(
            (
                {
                    "security_protocol": "SASL_SSL",
                    "sasl_mechanism": "AWS_MSK_IAM",
                    "sasl_jaas_config": f"IAMLoginModule required {options};",
                },
                text,
            )
            for options, text in (
                ('awsProfileName="hunter2" awsRoleArn="b"', "both given"),
                ('awsRoleArn="b" awsRoleExternalId="hunter2"', "only the Java module knows awsRoleExternalId"),
                ('awsStsRegion="hunter2"', "only the Java module knows awsStsRegion"),
            )
        ),
    ],
)
def test_settings_of_a_login_that_do_not_fit_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refusal:
        config(**settings)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("path", ["hunter2/\u00fc", "hunter2 ", "hunter2?a=\u00fc", "hunter2\tx"])
def test_token_endpoint_with_unusable_characters_is_refused_and_hidden(path: str) -> None:
    """HTTP would refuse the URL at each request, so tokens would be requested again and again."""
    with pytest.raises(
        ConfigError, match="must have %XX for blanks, and for characters of its path that are not ASCII"
    ) as refusal:
        config(**{"sasl.oauthbearer.token.endpoint.url": f"https://login.example/{path}/x"})
    assert "hunter2" not in str(refusal.value)
    key = "sasl.oauthbearer.token.endpoint.url"
    given = "https://b\u00fccher.example/t%C3%BC?a=b"
    assert parse_value(key, given, table_of(ProducerConfig)[key].metadata) == given


@pytest.mark.parametrize(
    "url", ["https://hunter2#@evil/", "https://hunter2/#x", "https://\u202ehunter2/", "https:///hunter2"]
)
def test_token_endpoint_with_odd_host_is_refused_and_hidden(url: str) -> None:
    """Bug: the first three were accepted."""
    with pytest.raises(ConfigError, match="must be a URL of the form https://host/path") as refusal:
        config(**{"sasl.oauthbearer.token.endpoint.url": url})
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("host", ["b\u00fccher.example", "[::1]:8443", "192.0.2.1", "login.example.:443"])
def test_token_endpoint_with_a_usual_host_is_accepted(host: str) -> None:
    key = "sasl.oauthbearer.token.endpoint.url"
    assert parse_value(key, f"https://{host}/t", table_of(ProducerConfig)[key].metadata) == f"https://{host}/t"


@pytest.mark.parametrize("mechanism", list(security._LOGIN_MODULES))
def test_only_mechanisms_that_hide_credentials_work_without_tls(mechanism: str) -> None:
    """Bug: AWS_MSK_IAM sent its token over SASL_PLAINTEXT."""
    needed: dict[str, dict[str, Any]] = {
        "PLAIN": {"sasl_jaas_config": PLAIN},
        "OAUTHBEARER": {"sasl_oauthbearer_token_provider": token},
        "GSSAPI": {"sasl_kerberos_service_name": "kafka"},
        "AWS_MSK_IAM": {},
    }
    settings = needed.get(mechanism, {"sasl_jaas_config": SCRAM}) | {
        "sasl_mechanism": mechanism,
        "security_protocol": "SASL_PLAINTEXT",
    }
    config(**settings, sasl_allow_cleartext_credentials="true")
    if mechanism in {"SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI"}:
        config(**settings)
    else:
        with pytest.raises(ConfigError, match=rf"{mechanism} .*sasl\.allow\.cleartext\.credentials=true"):
            config(**settings)


def test_login_setting_of_none_counts_as_not_given() -> None:
    config(sasl_jaas_config=None, ssl_key_password=None, ssl_truststore_location=None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ssl_truststore_type": "JKS"}, r"ssl\.truststore\.type=JKS.*keytool -importkeystore"),
        ({"ssl_keystore_type": "jks"}, r"ssl\.keystore\.type=JKS.*keytool -importkeystore"),
        ({"ssl_truststore_location": "f", "ssl_truststore_certificates": CERTIFICATE}, "both given"),
        ({"ssl_keystore_location": "f", "ssl_keystore_key": KEY}, "leave one out"),
        ({"ssl_keystore_location": "f", "ssl_keystore_certificate_chain": CERTIFICATE}, "leave one out"),
        ({"ssl_keystore_key": KEY}, "one of them is missing"),
        ({"ssl_keystore_certificate_chain": CERTIFICATE}, "one of them is missing"),
        ({"ssl_truststore_type": "PKCS12"}, "needs ssl.truststore.location"),
        ({"ssl_keystore_type": "PKCS12"}, "needs ssl.keystore.location"),
        (
            {"ssl_truststore_password": "hunter2", "ssl_truststore_location": "f"},
            "does not go with ssl.truststore.type=PEM",
        ),
        ({"ssl_keystore_password": "hunter2", "ssl_keystore_location": "f"}, "as ssl.key.password"),
        ({"ssl_key_password": "hunter2"}, "but no key"),
        ({"ssl_protocol": "TLSv1.2", "ssl_enabled_protocols": "TLSv1.3"}, "no version is left"),
        ({"ssl_cipher_suites": "TLS_RSA_WITH_AES_128_CBC_SHA"}, "'TLS_RSA_WITH_AES_128_CBC_SHA' is not known here"),
        ({"ssl_cipher_suites": "TLS_AES_256_GCM_SHA384"}, "Name all three"),
        (
            {"ssl_cipher_suites": "ECDHE-RSA-AES128-GCM-SHA256", "ssl_enabled_protocols": "TLSv1.3"},
            "has no suite for the allowed TLS versions",
        ),
    ],
)
def test_settings_of_tls_that_do_not_fit_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refusal:
        config(security_protocol="SASL_SSL", sasl_mechanism="PLAIN", sasl_jaas_config=PLAIN, **settings)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"security_protocol": "SSL"},
        {"security_protocol": "SSL", "ssl_keystore_key": KEY, "ssl_keystore_certificate_chain": CERTIFICATE},
        {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_jaas_config": PLAIN},
        {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "SCRAM-SHA-512", "sasl_jaas_config": SCRAM},
        {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "PLAIN",
            "sasl_jaas_config": PLAIN,
            "sasl_allow_cleartext_credentials": "true",
        },
        {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "OAUTHBEARER",
            "sasl_oauthbearer_token_provider": token,
            "sasl_jaas_config": OAUTH,
        },
        {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "OAUTHBEARER",
            "sasl_oauthbearer_token_endpoint_url": "https://login.example/",
            "sasl_jaas_config": OAUTH.replace(";", ' clientId="me" clientSecret="hunter2";'),
        },
        {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "OAUTHBEARER",
            "sasl_oauthbearer_token_endpoint_url": "https://login.example/",
            "sasl_oauthbearer_client_credentials_client_id": "me",
            "sasl_oauthbearer_client_credentials_client_secret": "hunter2",
        },
        {"security_protocol": "SASL_PLAINTEXT", "sasl_kerberos_service_name": "kafka"},
        {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_jaas_config": 'com.sun.security.auth.module.Krb5LoginModule required serviceName="kafka";',
        },
        *(
            {
                "security_protocol": "SSL",
                f"ssl_{store}_type": "PKCS12",
                f"ssl_{store}_location": "f",
                f"ssl_{store}_password": "hunter2",
            }
            for store in ("truststore", "keystore")
        ),
        {"security_protocol": "SSL", "ssl_keystore_location": "f", "ssl_key_password": "hunter2"},
        {"security_protocol": "SSL", "ssl_protocol": "TLSv1.2"},
    ],
)
def test_compatible_settings_are_accepted(settings: dict[str, Any]) -> None:
    assert config(**settings).security_protocol == settings["security_protocol"]


def test_token_function_is_not_shown() -> None:
    given: Any = functools.partial(dict, client_secret="hunter2")
    made = config(security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER", sasl_oauthbearer_token_provider=given)
    assert "hunter2" not in repr(made) + str(made.canonical())
    with pytest.raises(ConfigError, match=r"token\.provider=\*\*\* must be a Python function, or its name as"):
        config(sasl_oauthbearer_token_provider="hunter2.the-token")


def test_function_by_its_name_is_checked_but_not_imported() -> None:
    given = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}
    made = config(**given, sasl_oauthbearer_token_provider="no_such_module:token")
    again = config(**given, sasl_oauthbearer_token_provider=" no_such_module:token")
    assert made.canonical() == pickle.loads(pickle.dumps(made)).canonical() == again.canonical()
    with pytest.raises(ConfigError, match="both given"):
        config(
            **given,
            sasl_oauthbearer_token_provider="no_such_module:token",
            sasl_oauthbearer_token_endpoint_url="https://login.example/",
        )


def test_configuration_shows_no_secret_and_pickles_them() -> None:
    secrets = {
        "ssl_keystore_key": KEY,
        "ssl_keystore_certificate_chain": f"{KEY}\n{CERTIFICATE}",
        "ssl_truststore_certificates": f"{KEY}\n{CERTIFICATE}",
        "ssl_key_password": "hunter2",
        "sasl_jaas_config": PLAIN,
        "sasl_mechanism": "PLAIN",
        "sasl_oauthbearer_client_credentials_client_secret": "hunter2",
    }
    whole = config(security_protocol="SASL_SSL", **secrets)
    assert "hunter2" not in f"{whole} {whole.canonical()}"
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert whole.canonical() != config(security_protocol="SASL_SSL", **{**secrets, "ssl_key_password": "x"}).canonical()


def test_pickled_function_is_the_same_function() -> None:
    """Otherwise every task would have its own producer."""
    given = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauthbearer_token_provider": lambda: ("token", 1),
    }
    made = config(**given)
    function: Any = made.sasl_oauthbearer_token_provider
    carried = cloudpickle.loads(cloudpickle.dumps(made))  # type: ignore[no-untyped-call]
    assert carried.sasl_oauthbearer_token_provider.call is not function.call
    assert carried.canonical() == made.canonical()
    assert hash(carried.canonical()) == hash(made.canonical())
    assert carried.sasl_oauthbearer_token_provider() == ("token", 1)
    again = config(**{**given, "sasl_oauthbearer_token_provider": function})
    assert again.canonical() == made.canonical()


class _Tokens:
    def __init__(self, secret: str) -> None:
        self.secret = secret

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tokens)

    def __hash__(self) -> int:
        return 0

    def __call__(self) -> tuple[str, int]:
        return self.secret, 1

    def token(self) -> tuple[str, int]:
        return self.secret, 1


def _with_function(call: Callable[[], tuple[str, int]]) -> tuple[object, ...]:
    return config(
        security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER", sasl_oauthbearer_token_provider=call
    ).canonical()


def test_same_function_gives_the_same_configuration() -> None:
    """Bug: a sink made again for each micro-batch had new producers, and logged in each time."""
    mine, other = _Tokens("mine"), _Tokens("other")
    whole, parts = functools.partial(_Tokens("a").token), functools.partial(_Tokens("a").token)
    assert _with_function(mine) == _with_function(mine) != _with_function(other)
    assert _with_function(mine.token) == _with_function(mine.token) != _with_function(other.token)
    assert _with_function(mine.token) != _with_function(mine)
    assert _with_function(whole) == _with_function(whole) != _with_function(parts)


def test_method_of_an_unhashable_object_is_accepted() -> None:
    """Bug: it raised TypeError: unhashable type."""

    class Decorated:
        __eq__ = _Tokens.__eq__

        def __call__(self, tokens: _Tokens) -> tuple[str, int]:
            return tokens.token()

    mine, decorated = _Tokens("mine"), Decorated()
    method, again = MethodType(decorated, mine), MethodType(decorated, mine)
    assert _with_function(method) == _with_function(again) != _with_function(MethodType(Decorated(), mine))


def test_deleted_function_is_forgotten() -> None:
    before = len(options._IDS)
    made = _Tokens("short-lived")
    _with_function(made)
    _with_function(made.token)
    assert len(options._IDS) == before + 2
    del made
    assert len(options._IDS) == before


def test_pickle_has_the_password_once_and_not_its_source_text() -> None:
    carried = pickle.dumps(config(security_protocol="SASL_SSL", sasl_mechanism="PLAIN", sasl_jaas_config=PLAIN))
    assert carried.count(b"hunter2") == 1
    assert b"required" not in carried


@pytest.mark.parametrize("servers", ["SASL_SSL://h:9093", "h:9092,ssl://h:9093", ["SSL://h:1"]])
def test_scheme_that_is_not_the_protocol_is_refused(servers: object) -> None:
    """Bug: the scheme was ignored, and the connection was not encrypted."""
    with pytest.raises(ConfigError, match=r"security\.protocol is PLAINTEXT"):
        ProducerConfig.from_mapping({"bootstrap.servers": servers})
    parsed = ProducerConfig.from_mapping({"bootstrap.servers": "SSL://h:9093,h:9094", "security.protocol": "SSL"})
    assert parsed.bootstrap_servers == (("h", 9093), ("h", 9094))


def test_names_from_reverse_dns_are_refused_with_tls() -> None:
    """Bug: the host for the check of a certificate came from the reverse DNS of the address."""
    canonical = {"client_dns_lookup": "resolve_canonical_bootstrap_servers_only"}
    with pytest.raises(ConfigError, match="name that the DNS gives"):
        config(security_protocol="SSL", **canonical)
    with pytest.raises(ConfigError, match="name that the DNS gives"):
        config(security_protocol="SASL_SSL", sasl_mechanism="PLAIN", sasl_jaas_config=PLAIN, **canonical)
    config(**canonical)
    config(security_protocol="SASL_SSL", sasl_kerberos_service_name="kafka", **canonical)


def test_repr_shows_no_secret_of_a_url() -> None:
    settings = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": "https://idp/t?code=hunter2",
        "sasl.jaas.config": OAUTH.replace(";", ' clientId="me" clientSecret="hunter2";'),
    }
    assert "hunter2" not in repr(ProducerConfig.from_mapping({"bootstrap.servers": "h:1", **settings}))
    sink = KafkaSink({"kafka.bootstrap.servers": "h:1", **{f"kafka.{key}": value for key, value in settings.items()}})
    assert "hunter2" not in repr(sink)
    assert "kafka.sasl.oauthbearer.token.endpoint.url=***" in repr(sink)
