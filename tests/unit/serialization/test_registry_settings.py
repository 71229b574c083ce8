"""The options of the schema registry: what is taken, what is refused and how, and that no secret is shown."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.serialization.registry_settings import REFUSED, RegistrySettings, registry_options

CANARY = "canary-p4ss"
HTTPS = "https://registry.example"


def parsed(url: object = HTTPS, **more: object) -> RegistrySettings:
    given = {f"schema.registry.{key.replace('_', '.')}": value for key, value in more.items()}
    found = RegistrySettings.from_options({"schema.registry.url": url, **given})
    assert found is not None
    return found


def test_no_option_of_the_registry_is_no_registry() -> None:
    assert RegistrySettings.from_options({}) is None
    assert RegistrySettings.from_options({"topic": "orders", "schema.registry.url": None}) is None


def test_text_and_typed_values_are_the_same() -> None:
    text = parsed(timeout="2.5", max_retries="0", auto_register_schemas="FALSE", use_schema_id=" 7 ")
    assert text == parsed(timeout=2.5, max_retries=0, auto_register_schemas=False, use_schema_id=7)
    assert pickle.loads(pickle.dumps(text)) == text


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("http://a:1", ("http://a:1",)),
        (" http://a:1/ , https://b/apis/ccompat/v7/,", ("http://a:1", "https://b/apis/ccompat/v7")),
        (["http://a:1", "http://[::1]:2"], ("http://a:1", "http://[::1]:2")),
        ("https://user:p%40ss%2C@a,https://user:p%40ss%2C@b", ("https://a", "https://b")),
    ],
)
def test_addresses_are_kept_in_order_and_without_users(url: object, addresses: tuple[str, ...]) -> None:
    assert parsed(url).url == addresses


def test_user_of_an_address_is_that_of_the_login() -> None:
    found = parsed("https://us%3Aer:p%40ss:@a").basic_auth_user_info
    assert found is not None
    assert found.reveal() == "us:er:p@ss:"


FORM = "must be addresses of the form http://host:port or https://host:port, separated by commas"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "schema.registry.url='' must have at least one address."),
        (" , ", "schema.registry.url=' , ' must have at least one address."),
        ("host:8081", f"schema.registry.url='host:8081' {FORM}."),
        ("mock://x", f"schema.registry.url='mock://x' {FORM}."),
        ("http://", f"schema.registry.url='http://' {FORM}."),
        ("http://a:0", f"schema.registry.url='http://a:0' {FORM}."),
        ("http://a:port", f"schema.registry.url='http://a:port' {FORM}."),
        ("http://a b", f"schema.registry.url='http://a b' {FORM}."),
        (
            "http://a?x=1",
            f"schema.registry.url='http://a?***' {FORM}, without a query. In a password write %2F for /, %3F for ?, %23"
            " for #, %2C for a comma, %40 for @.",
        ),
        (
            f"https://{CANARY}@a",
            "schema.registry.url=*** must have the form https://user:password@host if it has a user.",
        ),
        (f"https://me:{CANARY}/x@a", f"schema.registry.url=*** {FORM}."),
        (
            f"https://me:1/{CANARY}@a",
            f"schema.registry.url=*** {FORM}, without a query. In a password write %2F for /, %3F for ?, %23 for #, %2C"
            " for a comma, %40 for @.",
        ),
        (f"https://me:{CANARY},x@a", f"schema.registry.url=*** {FORM}."),
        (
            f"https://me:{CANARY}@a,https://b",
            "schema.registry.url=*** must have the same user and password in all addresses: one login is used for all.",
        ),
    ],
)
def test_wrong_address_is_an_error_that_shows_no_password(url: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(url)
    assert str(caught.value) == text
    assert caught.value.setting == "schema.registry.url"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"schema.registry.timeout": 1},
            "schema.registry.timeout has no effect without schema.registry.url: set that too, or leave it out.",
        ),
        (
            {"schema.id.location": "header"},
            "schema.id.location has no effect without schema.registry.url: set that too, or leave it out.",
        ),
        (
            {"schema.registry.url": HTTPS, "schema.id.location": "body"},
            "schema.id.location='body' must be one of prefix, header.",
        ),
        (
            {"schema.registry.url": HTTPS, "schema.registry.basic.auth.userinfo": CANARY},
            "There is no option schema.registry.basic.auth.userinfo. The nearest one is"
            " schema.registry.basic.auth.user.info.",
        ),
        (
            {"schema.registry.zebra": 1},
            "There is no option schema.registry.zebra, and no option has a similar name: leave it out.",
        ),
        (
            {"schema.registry.id.location": "header"},
            "There is no option schema.registry.id.location, and no option has a similar name: leave it out.",
        ),
    ],
)
def test_wrong_option_is_an_error(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RegistrySettings.from_options(options)
    assert str(caught.value) == text


STATIC = {"bearer_auth_credentials_source": "STATIC_TOKEN", "bearer_auth_logical_cluster": "lsrc-1"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"timeout": 0}, "schema.registry.timeout=0 must be a number between 0.001 and 600."),
        ({"use_schema_id": -1}, "schema.registry.use.schema.id=-1 must be between 0 and 2147483647."),
        ({"normalize_schemas": "yes"}, "schema.registry.normalize.schemas='yes' must be true or false."),
        (
            {"basic_auth_user_info": CANARY},
            "schema.registry.basic.auth.user.info=*** must have the form user:password.",
        ),
        (
            {"use_latest_version": True, "use_schema_id": 1},
            "schema.registry.use.latest.version and schema.registry.use.schema.id exclude each other: leave one of"
            " them out.",
        ),
        (
            {"use_schema_id": 0, "auto_register_schemas": True},
            "schema.registry.use.schema.id and schema.registry.auto.register.schemas exclude each other: leave one of"
            " them out.",
        ),
        (
            {"ssl_key_location": "k.pem"},
            "A private key needs its certificate: set schema.registry.ssl.certificate.location too.",
        ),
        (
            {"ssl_key_location": f"-----BEGIN PRIVATE KEY-----{CANARY}"},
            "schema.registry.ssl.key.location=*** must be the path of a PEM file, not its text.",
        ),
        (
            {"bearer_auth_token": CANARY},
            "schema.registry.bearer.auth.token has no effect without schema.registry.bearer.auth.credentials.source:"
            " set that too, or leave it out.",
        ),
        (
            STATIC,
            "schema.registry.bearer.auth.credentials.source=STATIC_TOKEN needs schema.registry.bearer.auth.token.",
        ),
        (
            {**STATIC, "bearer_auth_token": CANARY, "bearer_auth_scope": "x"},
            "schema.registry.bearer.auth.scope has no effect with"
            " schema.registry.bearer.auth.credentials.source=STATIC_TOKEN: leave it out.",
        ),
        (
            {**STATIC, "bearer_auth_token": CANARY, "basic_auth_user_info": "a:b"},
            "schema.registry.bearer.auth.credentials.source and a user with a password exclude each other: leave one of"
            " them out.",
        ),
        (
            {"bearer_auth_credentials_source": "OAUTHBEARER_AZURE_IMDS", "bearer_auth_logical_cluster": "lsrc-1"},
            "schema.registry.bearer.auth.credentials.source=OAUTHBEARER_AZURE_IMDS needs"
            " schema.registry.bearer.auth.issuer.endpoint.query.",
        ),
        (
            {"bearer_auth_credentials_source": "CUSTOM"},
            "schema.registry.bearer.auth.credentials.source='CUSTOM' must be one of STATIC_TOKEN, OAUTHBEARER,"
            " OAUTHBEARER_AZURE_IMDS.",
        ),
    ],
)
def test_wrong_settings_are_an_error(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**settings)
    assert str(caught.value) == text


def test_user_is_given_once() -> None:
    with pytest.raises(
        ConfigError, match=r"url has a user, and so has schema\.registry\.basic\.auth\.user\.info: leave"
    ):
        parsed("https://a:b@c", basic_auth_user_info="a:b")


def test_tls_without_https_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^schema\.registry\.ssl\.ca\.location has no effect, because no address of"):
        parsed("http://a", ssl_ca_location="ca.pem")
    assert parsed("http://a,https://b", ssl_ca_location="ca.pem").ssl_ca_location == "ca.pem"


@pytest.mark.parametrize("setting", REFUSED)
def test_setting_with_a_meaning_elsewhere_is_an_error_that_says_why(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**{setting: "x"})
    assert str(caught.value) == f"The option schema.registry.{setting} cannot be used here: {REFUSED[setting]}."


@pytest.mark.parametrize("setting", ["use_latest_version", "use_schema_id"])
def test_nothing_is_registered_where_the_registrys_schema_is_used(setting: str) -> None:
    assert parsed().auto_register_schemas
    assert not parsed(**{setting: 1 if setting == "use_schema_id" else True}).auto_register_schemas
    assert parsed(use_latest_version=False).auto_register_schemas


SECRETS = {
    "basic_auth_user_info": f"me:{CANARY}",
    "proxy": f"http://me:{CANARY}@proxy:1",
    "ssl_key_password": CANARY,
    "ssl_certificate_location": "c.pem",
}


def test_repr_shows_no_secret() -> None:
    token = parsed(**STATIC, bearer_auth_token=CANARY)
    endpoint = parsed(**{**BEARER, "bearer_auth_issuer_endpoint_url": f"https://i/t?code={CANARY}"})
    query = parsed(**{**AZURE, "bearer_auth_issuer_endpoint_query": f"code={CANARY}"})
    for found in (parsed(**SECRETS), parsed(f"https://me:{CANARY}@a"), token, endpoint, query):
        assert CANARY not in repr(found)
        assert any(CANARY in text for text in found.secrets())
        assert CANARY in found.secrets()


def test_login_in_the_token_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"endpoint\.url`?=\*\*\* must be a URL without credentials") as refused:
        parsed(**{**BEARER, "bearer_auth_issuer_endpoint_url": f"https://me:{CANARY}@i/t"})
    assert CANARY not in str(refused.value)


def test_client_gets_each_of_its_settings() -> None:
    found = parsed(**SECRETS, timeout=2, max_retries=1, normalize_schemas=True, use_latest_version=True)
    assert found.for_client("https://a") == {
        "url": "https://a", "timeout": 2.0, "max.retries": 1, "retries.wait.ms": 1000, "retries.max.wait.ms": 20_000,
        "proxy": f"http://me:{CANARY}@proxy:1", "basic.auth.user.info": f"me:{CANARY}", "ssl.key.password": CANARY,
        "ssl.certificate.location": "c.pem",
    }  # fmt: skip


BEARER = {
    "bearer_auth_credentials_source": "OAUTHBEARER",
    "bearer_auth_client_id": "me",
    "bearer_auth_client_secret": CANARY,
    "bearer_auth_scope": "s",
    "bearer_auth_issuer_endpoint_url": "https://i/t",
    "bearer_auth_logical_cluster": "lsrc-1",
    "bearer_auth_identity_pool_id": "pool",
}
AZURE = {
    "bearer_auth_credentials_source": "OAUTHBEARER_AZURE_IMDS",
    "bearer_auth_logical_cluster": "lsrc-1",
    "bearer_auth_issuer_endpoint_query": "a=b",
}


@pytest.mark.parametrize(
    "settings", [{}, BEARER, AZURE, {**STATIC, "bearer_auth_token": CANARY}, {"basic_auth_user_info": "a:b"}]
)
def test_confluents_client_takes_the_settings(settings: dict[str, Any]) -> None:
    """It refuses settings that it does not know, and sources that lack one."""
    SchemaRegistryClient(parsed(**settings).for_client(HTTPS)).close()


def test_each_option_has_its_row() -> None:
    rows = registry_options()
    assert [row.name for row in rows][:2] == ["schema.registry.url", "schema.registry.auto.register.schemas"]
    assert all(row.doc.endswith(".") for row in rows)
    assert len(rows) == 24
