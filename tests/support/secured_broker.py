"""One real broker for the whole session, with a listener for every way to connect, and the data for its clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.certificates import Authority

from spark_kafka_sink.local import Admin, BrokerSecurity, EmbeddedKafka

USERS = {"alice": 'al"ice, =secret', "bob": "bobs-secret", "joe": "joes-secret"}
LISTENERS = {"SSL": "SSL", "MTLS": "SSL", "SASL_PLAINTEXT": "SASL_PLAINTEXT", "SASL_SSL": "SASL_SSL"}


@dataclass(frozen=True)
class SecuredBroker:
    """`kafka.secured_servers(listener)` for a listener of LISTENERS. MTLS requires a client certificate."""

    kafka: EmbeddedKafka
    authority: Authority
    """Issues the certificates of the broker and of its clients."""
    authority_file: Path

    @property
    def admin(self) -> Admin:
        """Return an admin over the PLAINTEXT listener, which allows everything."""
        return Admin(self.kafka.bootstrap_servers)

    def settings(self, listener: str, prefix: str = "") -> dict[str, str]:
        """Return producer settings for the listener, without the user; each key begins with `prefix`."""
        settings = {
            "bootstrap.servers": self.kafka.secured_servers(listener),
            "security.protocol": LISTENERS[listener],
        }
        if LISTENERS[listener] != "SASL_PLAINTEXT":
            settings["ssl.truststore.location"] = str(self.authority_file)
        return {prefix + key: value for key, value in settings.items()}


@pytest.fixture(scope="session")
def secured_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    folder = tmp_path_factory.mktemp("secured-broker")
    authority = Authority()
    authority_file = authority.write(folder / "authority.pem")
    security = BrokerSecurity(
        listeners=LISTENERS,
        keystore=authority.issue().write(folder / "broker.pem"),
        truststore=authority_file,
        requires_certificate=frozenset({"MTLS"}),
        users=USERS,
        authorizes=True,
        super_users=("User:alice", "User:CN=alice"),
    )
    # A broker issues delegation tokens only with a master key. The sessions of one listener end.
    properties: dict[str, str | int] = {
        "delegation.token.secret.key": "master",
        "listener.name.sasl_plaintext.scram-sha-512.connections.max.reauth.ms": 5_000,
    }
    with EmbeddedKafka(security=security, properties=properties) as kafka:
        yield SecuredBroker(kafka, authority, authority_file)
