"""The requests for permissions and passwords, and which servers must confirm them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from spark_kafka_sink.common.errors import LocalBrokerError, TopicAuthorizationError
from spark_kafka_sink.local import access
from spark_kafka_sink.local.access import AccessAdmin, Permission
from spark_kafka_sink.local.admin import Admin
from spark_kafka_sink.local.security import SCRAM_ITERATIONS, salted_password

WRITE = Permission("User:a", "write", "topic", "orders")
CREATE = Permission("User:b", "create", "cluster")
FINE = SimpleNamespace(error_code=ErrorCode.none, error_message=None)
REFUSED = SimpleNamespace(error_code=ErrorCode.topic_authorization_failed, error_message="no such user")


class Servers:
    """Keeps the requests to two servers, and answers by the type of request. A list has one answer for each request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._answers = answers
        self.admin = AccessAdmin("a:1, b:2")
        self.now_s = 0.0
        monkeypatch.setattr(Admin, "ask", lambda _, *given: self._ask(*given))
        monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep))

    def _sleep(self, s: float) -> None:
        self.now_s += s

    def _ask(self, payload: Any, _: object, servers: Sequence[str] = ()) -> Any:
        self.asked.append((",".join(servers), payload))
        answer = self._answers[type(payload).__name__.removesuffix("Request")]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return answer

    def shown_by(self) -> list[str]:
        """Return the servers that were asked for their state, in order."""
        return [server for server, _ in self.asked if server]


def results(*found: object) -> SimpleNamespace:
    return SimpleNamespace(results=found, filter_results=found)


def shown(*found: object) -> SimpleNamespace:
    return SimpleNamespace(error_code=ErrorCode.none, error_message=None, resources=found)


def passwords(*mechanisms: int, iterations: int = SCRAM_ITERATIONS) -> SimpleNamespace:
    infos = [SimpleNamespace(mechanism=each, iterations=iterations) for each in mechanisms]
    return results(SimpleNamespace(credential_infos=infos))


def test_permission_uses_the_numbers_of_kafka() -> None:
    prefixed = Permission("User:a", "describe", "transactional_id", "orders", is_prefix=True)
    assert prefixed.as_filter() == {
        "resource_type_filter": 5,
        "resource_name_filter": "orders",
        "pattern_type_filter": 4,
        "principal_filter": "User:a",
        "host_filter": "*",
        "operation": 8,
        "permission_type": 3,
    }
    assert (CREATE.name, CREATE.pattern) == ("kafka-cluster", 3)


def test_grant_is_awaited_on_every_server(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(
        monkeypatch,
        CreateAcls=results(FINE, FINE),
        DescribeAcls=[shown(), shown(1), shown(), shown(), shown(1), shown(1)],
    )
    servers.admin.grant(WRITE, CREATE)
    assert servers.shown_by() == ["a:1", "a:1", "b:2", "b:2", "b:2", "a:1", "b:2"]
    first, second = servers.asked[0][1].creations
    made = (first.resource_type, first.resource_name, first.resource_pattern_type, first.principal)
    assert (*made, first.host, first.operation, first.permission_type) == (2, "orders", 3, "User:a", "*", 4, 3)
    assert (second.resource_type, second.operation) == (4, 5)


def test_permission_is_revoked_when_no_server_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(
        monkeypatch, DeleteAcls=results(FINE), DescribeAcls=[shown(1), shown(), shown(1), shown(1), shown()]
    )
    servers.admin.revoke(WRITE)
    assert servers.shown_by() == ["a:1", "a:1", "b:2", "b:2", "b:2"]
    (deleted,) = servers.asked[0][1].filters
    assert {name: getattr(deleted, name) for name in WRITE.as_filter()} == WRITE.as_filter()


@pytest.mark.parametrize(
    ("change", "answers", "text"),
    [
        (lambda to: to.grant(WRITE), {"CreateAcls": results(FINE), "DescribeAcls": shown()}, "is not granted"),
        (lambda to: to.revoke(WRITE), {"DeleteAcls": results(FINE), "DescribeAcls": shown(1)}, "is still granted"),
        (
            lambda to: to.set_password("a", "b"),
            {"AlterUserScramCredentials": results(FINE), "DescribeUserScramCredentials": passwords(2)},
            "no such password of a",
        ),
        (
            lambda to: to.remove_password("a"),
            {"AlterUserScramCredentials": results(FINE), "DescribeUserScramCredentials": passwords(1)},
            "a still has a password",
        ),
    ],
    ids=["grant", "revoke", "set", "remove"],
)
def test_change_that_does_not_arrive_names_its_server(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[AccessAdmin], None], answers: dict[str, Any], text: str
) -> None:
    servers = Servers(monkeypatch, **answers)
    with pytest.raises(LocalBrokerError, match=rf"{text} on a:1 after 30 s\."):
        change(servers.admin)
    assert 30 < servers.now_s < 31


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda to: to.grant(CREATE, WRITE), "CreateAcls", r"Permission\(.*write.* cannot be granted: no such user"),
        (lambda to: to.revoke(WRITE), "DeleteAcls", r"Permission\(.*write.* cannot be revoked: no such user"),
        (lambda to: to.set_password("a", "b"), "AlterUserScramCredentials", "password of a cannot be changed: no such"),
        (lambda to: to.remove_password("a"), "AlterUserScramCredentials", "password of a cannot be changed: no such"),
    ],
    ids=["grant", "revoke", "set", "remove"],
)
def test_refusal_is_raised_without_a_wait(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[AccessAdmin], None], kind: str, text: str
) -> None:
    answer = results(FINE, REFUSED) if kind == "CreateAcls" else results(REFUSED)
    servers = Servers(monkeypatch, DescribeUserScramCredentials=passwords(), **{kind: answer})
    with pytest.raises(TopicAuthorizationError, match=text):
        change(servers.admin)
    assert servers.asked[-1][0] == "", "the change is the last request, and no server is asked for its state"


def test_unreadable_grants_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(monkeypatch, CreateAcls=results(FINE), DescribeAcls=REFUSED)
    with pytest.raises(TopicAuthorizationError, match="grants cannot be read: no such user"):
        servers.admin.grant(WRITE)


@pytest.mark.parametrize(("mechanism", "number"), [("SCRAM-SHA-256", 1), ("SCRAM-SHA-512", 2)])
def test_set_password_waits_until_every_server_has_it(
    monkeypatch: pytest.MonkeyPatch, mechanism: str, number: int
) -> None:
    shown_ = [passwords(3 - number), passwords(), passwords(1, 2), passwords(), passwords(number)]
    servers = Servers(monkeypatch, AlterUserScramCredentials=results(FINE), DescribeUserScramCredentials=shown_)
    servers.admin.set_password("a", "hunter2", mechanism)
    assert servers.shown_by() == ["a:1", "a:1", "a:1", "b:2", "b:2"]
    (payload,) = (payload for server, payload in servers.asked if not server)
    (made,) = payload.upsertions
    assert (made.name, made.mechanism, made.iterations, payload.deletions) == ("a", number, SCRAM_ITERATIONS, ())
    assert made.salted_password == salted_password("hunter2", mechanism, made.salt)
    assert len(made.salt) == 16


def test_changed_password_is_awaited_on_every_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the call returned at once, because each server had a password: the one before."""
    old, new = passwords(1), passwords(1, iterations=SCRAM_ITERATIONS + 1)
    servers = Servers(
        monkeypatch,
        AlterUserScramCredentials=results(FINE),
        DescribeUserScramCredentials=[old, old, new, old, new, new],
    )
    servers.admin.set_password("a", "hunter2")
    assert servers.shown_by() == ["a:1", "a:1", "a:1", "b:2", "b:2"]
    (made,) = servers.asked[1][1].upsertions
    assert made.iterations == SCRAM_ITERATIONS + 1
    assert made.salted_password == salted_password("hunter2", "SCRAM-SHA-256", made.salt, SCRAM_ITERATIONS + 1)
    servers._answers["DescribeUserScramCredentials"] = [new, passwords(1)]
    servers.admin.set_password("a", "hunter2")
    (again,) = servers.asked[-3][1].upsertions
    assert (again.iterations, again.salt == made.salt) == (SCRAM_ITERATIONS, False)


def test_names_that_kafka_does_not_have_are_refused_with_those_it_has() -> None:
    """Bug: a KeyError with the name."""
    with pytest.raises(LocalBrokerError, match="no operation 'Write': it must be one of all, read, write, "):
        Permission("User:a", "Write", "topic", "orders")
    with pytest.raises(LocalBrokerError, match="no resource 'topics': it must be one of topic, group, "):
        Permission("User:a", "write", "topics", "orders")
    admin = AccessAdmin("a:1")
    with pytest.raises(LocalBrokerError, match="PLAIN has no users: it must be one of SCRAM-SHA-256, SCRAM-SHA-512"):
        admin.set_password("a", "b", "PLAIN")
    with pytest.raises(LocalBrokerError, match="PLAIN has no users"):
        admin.remove_password("a", "PLAIN")


def test_password_is_removed_when_no_server_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_ = [passwords(1), passwords(2), passwords(1, 2), passwords()]
    servers = Servers(monkeypatch, AlterUserScramCredentials=results(FINE), DescribeUserScramCredentials=shown_)
    servers.admin.remove_password("a")
    assert servers.shown_by() == ["a:1", "a:1", "b:2", "b:2"]
    payload = servers.asked[0][1]
    assert [(each.name, each.mechanism) for each in payload.deletions] == [("a", 1)]
    assert payload.upsertions == ()
    assert all(payload.users[0].name == "a" for server, payload in servers.asked if server)
