"""The settings of a secured node. tests/integration/local has a real one."""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.properties import NodeAddress, refuse_owned, server_properties
from spark_kafka_sink.local.security import SCRAM_ITERATIONS, BrokerKerberos, BrokerSecurity

STORE = Path("/k.pem")
STORES = {"keystore": STORE, "truststore": STORE}
SECURITY = BrokerSecurity(
    listeners={"MTLS": "SSL", "SASL_SSL": "SASL_SSL"},
    keystore=STORE,
    truststore=STORE,
    requires_certificate=frozenset({"MTLS"}),
    mechanisms=("PLAIN", "SCRAM-SHA-256"),
    users={"al": 'p,"=\\'},
)


def properties_of(security: BrokerSecurity, **more: Any) -> dict[str, str]:
    node = NodeAddress(1, 9092, 9093, secured_ports={"MTLS": 9094, "SASL_SSL": 9095}, **more)
    return server_properties(node, [node], [Path("/data")], {}, security)


def test_secured_listeners_come_with_broker_and_proxy_listeners() -> None:
    properties = properties_of(SECURITY, proxied_port=9096, advertised="127.0.0.1:5000")
    assert properties["listeners"].split(",") == [
        "PLAINTEXT://127.0.0.1:9092",
        "MTLS://127.0.0.1:9094",
        "SASL_SSL://127.0.0.1:9095",
        "PROXIED://127.0.0.1:9096",
        "CONTROLLER://127.0.0.1:9093",
    ]
    assert "PROXIED://127.0.0.1:5000" in properties["advertised.listeners"]
    assert "CONTROLLER" not in properties["advertised.listeners"]
    protocols = dict(each.split(":") for each in properties["listener.security.protocol.map"].split(","))
    assert protocols == {
        "PLAINTEXT": "PLAINTEXT",
        "CONTROLLER": "PLAINTEXT",
        "MTLS": "SSL",
        "SASL_SSL": "SASL_SSL",
        "PROXIED": "PLAINTEXT",
    }
    assert properties["inter.broker.listener.name"] == "PLAINTEXT"


def test_client_certificates_and_logins_are_set_for_their_listeners_only() -> None:
    properties = properties_of(SECURITY)
    assert properties["ssl.keystore.location"] == properties["ssl.truststore.location"] == "/k.pem"
    assert properties["listener.name.mtls.ssl.client.auth"] == "required"
    assert "listener.name.sasl_ssl.ssl.client.auth" not in properties
    logins = {key for key in properties if key.endswith("sasl.jaas.config")}
    assert logins == {
        "listener.name.sasl_ssl.plain.sasl.jaas.config",
        "listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config",
    }
    assert ' "user_al"="p,\\"=\\\\";' in properties["listener.name.sasl_ssl.plain.sasl.jaas.config"]
    assert "authorizer.class.name" not in properties


def test_plain_users_may_have_any_characters() -> None:
    r"""Java's parser of such texts knows no \u, and does not accept an @ outside quotes in a name."""
    security = BrokerSecurity(
        listeners={"SASL": "SASL_PLAINTEXT"}, mechanisms=("PLAIN",), users={"bob@example.com": "pässwörd €"}
    )
    jaas = security.properties()["listener.name.sasl.plain.sasl.jaas.config"]
    assert str(jaas).endswith(' required "user_bob@example.com"="pässwörd €";')


def test_users_of_scram_are_formatted_with_salted_passwords() -> None:
    option, credential = SECURITY.format_arguments()
    assert option == "--add-scram"
    found = re.fullmatch(
        rf'SCRAM-SHA-256=\[name=al,iterations={SCRAM_ITERATIONS},salt="([^"]+)",saltedpassword="([^"]+)"\]', credential
    )
    assert found is not None
    salt, salted = map(b64decode, found.groups())
    assert salted == hashlib.pbkdf2_hmac("sha256", b'p,"=\\', salt, SCRAM_ITERATIONS)
    assert credential != SECURITY.format_arguments()[1], "a new salt"


def test_authorizer_allows_all_to_broker_and_super_users() -> None:
    security = BrokerSecurity(
        listeners={"SASL": "SASL_PLAINTEXT"}, authorizes=True, super_users=("User:admin",), mechanisms=("PLAIN",)
    )
    properties = security.properties()
    assert properties["super.users"] == "User:ANONYMOUS;User:admin"
    assert str(properties["authorizer.class.name"]).endswith("StandardAuthorizer")


@pytest.mark.parametrize(
    ("keys", "url"),
    [(Path("/keys.json"), "file:///keys.json"), ("http://127.0.0.1:80/keys", "http://127.0.0.1:80/keys")],
)
def test_token_keys_are_read_only_from_the_allowed_place(keys: Path | str, url: str) -> None:
    security = BrokerSecurity(
        listeners={"SASL": "SASL_PLAINTEXT"},
        mechanisms=("OAUTHBEARER",),
        token_keys=keys,
        token_audience="kafka",
    )
    properties = security.properties()
    prefix = "listener.name.sasl.oauthbearer.sasl"
    assert properties[f"{prefix}.oauthbearer.jwks.endpoint.url"] == url
    assert properties[f"{prefix}.oauthbearer.expected.audience"] == "kafka"
    assert security.system_properties() == {"org.apache.kafka.sasl.oauthbearer.allowed.urls": url}
    assert BrokerSecurity(listeners={"SASL": "SASL_PLAINTEXT"}).system_properties() == {}


def test_brokers_that_take_kerberos_log_in_by_their_keytab() -> None:
    kerberos = BrokerKerberos("kafka/127.0.0.1@R", Path("/my keys/kafka.keytab"), Path("/krb5.conf"))
    security = BrokerSecurity(listeners={"SASL": "SASL_PLAINTEXT"}, mechanisms=("GSSAPI",), kerberos=kerberos)
    properties = security.properties()
    assert properties["sasl.kerberos.service.name"] == "kafka"
    jaas = str(properties["listener.name.sasl.gssapi.sasl.jaas.config"])
    assert jaas.endswith(' keyTab="/my keys/kafka.keytab" principal="kafka/127.0.0.1@R";')
    assert security.system_properties() == {"java.security.krb5.conf": "/krb5.conf"}


def test_users_are_not_shown() -> None:
    assert 'p,"' not in repr(SECURITY)


@pytest.mark.parametrize("name", ["listener.security.protocol.map", "inter.broker.listener.name", "listeners"])
def test_listener_properties_cannot_be_overridden(name: str) -> None:
    with pytest.raises(LocalBrokerError, match=name):
        refuse_owned({name: "x"})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"listeners": {"SSL": "SSL"}}, "needs a `keystore`"),
        ({"listeners": {"SSL": "TLS"}}, "one of SASL_PLAINTEXT, SASL_SSL, SSL"),
        ({"listeners": {"mtls": "SSL"}, "keystore": Path("k")}, "in capitals"),
        ({"listeners": {"PLAINTEXT": "SSL"}, "keystore": Path("k")}, "not one of CONTROLLER, PLAINTEXT"),
        (
            {"listeners": {"SSL": "SSL"}, "keystore": Path("k"), "requires_certificate": frozenset({"SSL"})},
            "needs a `truststore`",
        ),
        ({"listeners": {"SASL": "SASL_PLAINTEXT"}, "mechanisms": ("GSSAPI",)}, "needs `kerberos`"),
        # bug: a listener whose name was misspelt asked no client for a certificate
        ({"listeners": {"SSL": "SSL"}, **STORES, "requires_certificate": {"SLS"}}, "names SLS: only a listener"),
        ({"listeners": {"A": "SASL_PLAINTEXT"}, **STORES, "requires_certificate": {"A"}}, "names A: only a listener"),
        # bug: a KeyError, when the cluster started
        ({"listeners": {"SASL": "SASL_PLAINTEXT"}, "mechanisms": ("SCRAM-SHA-1",)}, "has SCRAM-SHA-1: a mechanism is"),
        # bug: tokens for every audience were accepted
        ({"listeners": {"SASL": "SASL_PLAINTEXT"}, "token_audience": "kafka"}, "`token_audience` needs `token_keys`"),
    ],
)
def test_contradicting_security_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(LocalBrokerError, match=text):
        BrokerSecurity(**arguments)
