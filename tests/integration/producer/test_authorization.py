"""The least permissions of each guarantee, as docs/security.md lists them, on a real broker with an authorizer. They
are enough, and without any one of them the error names the missing one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from support.secured_broker import SecuredBroker

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    AuthorizationError,
    ClusterAuthorizationError,
    GroupAuthorizationError,
    TopicAuthorizationError,
    TransactionalIdAuthorizationError,
)
from spark_kafka_sink.local.access import AccessAdmin, Permission
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

StartProducer = Callable[..., KafkaProducer]
TOPIC, SOURCE, TRANSACTION, GROUP = "{id}-topic", "{id}-source", "{id}-transaction", "{id}-group"

AT_LEAST_ONCE = [Permission("User:{user}", "write", "topic", TOPIC)]
TRANSACTIONS = [
    *AT_LEAST_ONCE,
    Permission("User:{user}", "write", "transactional_id", TRANSACTION),
    Permission("User:{user}", "read", "group", GROUP),
    Permission("User:{user}", "read", "topic", SOURCE),
]


@dataclass
class Guest:
    """A user of this test, without any permission at first."""

    broker: SecuredBroker
    id: str
    access: AccessAdmin
    start_producer: StartProducer

    def grant(self, permissions: list[Permission]) -> None:
        self.access.grant(*(self._own(each) for each in permissions))

    def name(self, form: str) -> str:
        return form.format(id=self.id)

    def settings(self) -> dict[str, str]:
        login = f'ScramLoginModule required username="{self.id}" password="{self.id}";'
        return {
            **self.broker.settings("SASL_PLAINTEXT"),
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.jaas.config": login,
            "max.block.ms": "10000",
        }

    def start(self, **more: str) -> KafkaProducer:
        given = {**self.settings(), **{key.replace("_", "."): value for key, value in more.items()}}
        return self.start_producer(given.pop("bootstrap.servers"), **given)

    def _own(self, permission: Permission) -> Permission:
        principal = permission.principal.format(user=self.id)
        return replace(permission, principal=principal, name=self.name(permission.name))


@pytest.fixture
def guest(secured_broker: SecuredBroker, start_producer: StartProducer) -> Iterator[Guest]:
    guest = Guest(
        secured_broker,
        f"guest-{uuid.uuid4().hex[:8]}",
        AccessAdmin(secured_broker.kafka.bootstrap_servers),
        start_producer,
    )
    guest.access.set_password(guest.id, guest.id)
    for form in (TOPIC, SOURCE):
        secured_broker.admin.create_topic(guest.name(form))
    yield guest
    for form in (TOPIC, SOURCE):
        secured_broker.admin.delete_topic(guest.name(form))


def send(guest: Guest, **settings: str) -> None:
    guest.start(**settings).send(guest.name(TOPIC), b"value").result(10)


def transact(guest: Guest) -> None:
    producer = guest.start(transactional_id=guest.name(TRANSACTION))
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(guest.name(TOPIC), b"value")
    producer.send_offsets_to_transaction({TopicPartition(guest.name(SOURCE), 0): (1, None)}, guest.name(GROUP))
    producer.commit_transaction()


def denied(work: Callable[[Guest], None], guest: Guest) -> AuthorizationError:
    with pytest.raises(AuthorizationError) as refusal:
        work(guest)
    return refusal.value


def test_at_least_once_needs_write_on_the_topic(guest: Guest) -> None:
    guest.grant(AT_LEAST_ONCE)
    send(guest)


def test_listed_permissions_are_enough_for_transactions(guest: Guest) -> None:
    guest.grant(TRANSACTIONS)
    transact(guest)


def test_user_without_permissions_gets_an_error_with_the_topic(guest: Guest) -> None:
    error = denied(send, guest)
    assert isinstance(error, TopicAuthorizationError)
    assert f"Not authorized for {guest.name(TOPIC)}: grant WRITE and DESCRIBE on it." in str(error)


def test_user_with_only_describe_gets_no_producer_id(guest: Guest) -> None:
    guest.grant([Permission("User:{user}", "describe", "topic", TOPIC)])
    error = denied(send, guest)
    assert isinstance(error, ClusterAuthorizationError)
    assert "grant IDEMPOTENT_WRITE, or WRITE on at least one topic" in str(error)
    error = denied(lambda guest: send(guest, enable_idempotence="false"), guest)
    assert isinstance(error, TopicAuthorizationError)
    assert guest.name(TOPIC) in str(error)
    assert "grant WRITE" in str(error)


@pytest.mark.parametrize(
    ("missing", "kind", "expected"),
    [
        (0, TopicAuthorizationError, [TOPIC, "grant WRITE"]),
        (1, TransactionalIdAuthorizationError, [TRANSACTION, "grant WRITE"]),
        (2, GroupAuthorizationError, [GROUP, "grant READ"]),
        (3, TopicAuthorizationError, [SOURCE, "READ"]),
    ],
    ids=["topic", "transactional id", "group", "source of the offsets"],
)
def test_missing_permission_is_named_in_the_error(
    guest: Guest, missing: int, kind: type[AuthorizationError], expected: list[str]
) -> None:
    guest.grant([each for number, each in enumerate(TRANSACTIONS) if number != missing])
    error = denied(transact, guest)
    assert isinstance(error, kind)
    for part in expected:
        assert guest.name(part) in str(error)
    guest.grant([TRANSACTIONS[missing]])
    transact(guest)
