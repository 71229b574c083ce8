"""Which servers an administrator asks, and what it waits for."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from spark_kafka_sink.common.errors import LocalBrokerError, TopicExistsError
from spark_kafka_sink.local import admin
from spark_kafka_sink.local.admin import Admin


class Servers:
    """The answers of each server by the type of request: an error, an answer, or a list of answers in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.asked: list[tuple[str, str]] = []
        self._answers = answers
        monkeypatch.setattr(admin, "_exchange", self._exchange)
        now_s = [0.0]
        clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda s: now_s.__setitem__(0, now_s[0] + s))
        monkeypatch.setattr(admin, "time", clock)

    def _exchange(self, server: str, payload: Any, _type: object, _timeout_s: float) -> Any:
        kind = type(payload).__name__.removesuffix("Request")
        self.asked.append((server, kind))
        assert not getattr(payload, "allow_auto_topic_creation", False), "metadata for a topic would create it"
        answer = self._answers[kind][server]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def topic(*leaders: int, error: ErrorCode = ErrorCode.none) -> SimpleNamespace:
    partitions = [SimpleNamespace(leader_id=leader, error_code=ErrorCode.none) for leader in leaders]
    return SimpleNamespace(topics=[SimpleNamespace(partitions=partitions, error_code=error)])


def result(code: ErrorCode = ErrorCode.none) -> SimpleNamespace:
    answer = SimpleNamespace(error_code=code, error_message=None)
    return SimpleNamespace(topics=[answer], responses=[answer])


def test_next_server_is_asked_if_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    features = SimpleNamespace(finalized_features=[SimpleNamespace(name="transaction.version", max_version_level=2)])
    servers = Servers(monkeypatch, ApiVersions={"a:1": ConnectionRefusedError("refused"), "b:2": features})
    assert Admin("a:1, b:2").finalized_features() == {"transaction.version": 2}
    assert [server for server, _ in servers.asked] == ["a:1", "b:2"]


def test_error_without_any_answer_names_each_server_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    Servers(monkeypatch, ApiVersions={"a:1": ConnectionRefusedError("refused"), "b:2": TimeoutError("timed out")})
    with pytest.raises(LocalBrokerError, match=r"No server answers a ApiVersionsRequest: a:1: refused; b:2: timed out"):
        Admin("a:1,b:2").finalized_features()


def test_topic_is_created_when_every_server_shows_all_its_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = topic(error=ErrorCode.unknown_topic_or_partition)
    shown = {"a:1": [unknown, topic(1), topic(1, -1), topic(1, 2)], "b:2": [topic(1, -1), topic(1, 2)]}
    servers = Servers(monkeypatch, CreateTopics={"a:1": result()}, Metadata=shown)
    Admin("a:1,b:2").create_topic("t", 2)
    assert [server for server, kind in servers.asked if kind == "Metadata"] == ["a:1"] * 4 + ["b:2"] * 2


def test_topic_is_deleted_when_no_server_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = topic(error=ErrorCode.unknown_topic_or_partition)
    servers = Servers(
        monkeypatch, DeleteTopics={"a:1": result()}, Metadata={"a:1": gone, "b:2": [topic(1), topic(1), gone]}
    )
    Admin("a:1,b:2").delete_topic("t")
    assert [server for server, kind in servers.asked if kind == "Metadata"] == ["a:1"] + ["b:2"] * 3


def test_refusal_is_raised_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"a:1": result(ErrorCode.topic_already_exists)}
    servers = Servers(monkeypatch, CreateTopics=refused, DeleteTopics=refused)
    with pytest.raises(TopicExistsError, match="topic t cannot be created: topic_already_exists"):
        Admin("a:1").create_topic("t")
    with pytest.raises(TopicExistsError, match="topic t cannot be deleted: topic_already_exists"):
        Admin("a:1").delete_topic("t")
    assert [kind for _, kind in servers.asked] == ["CreateTopics", "DeleteTopics"]


def test_server_that_never_shows_a_topic_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {"a:1": topic(1), "b:2": topic(-1)}
    Servers(monkeypatch, CreateTopics={"a:1": result()}, Metadata=shown)
    with pytest.raises(LocalBrokerError, match=r"topic t on b:2: its partitions have no leader everywhere after 30 s"):
        Admin("a:1,b:2").create_topic("t")


@pytest.mark.parametrize("servers", ["localhost", "a:1,", "kafka://a:1", "::1:9092", "a:x", "", "user:secret@a:1"])
def test_list_that_is_not_host_and_port_is_refused_before_a_request(servers: str) -> None:
    """Bug: KAFKA_BOOTSTRAP_SERVERS=localhost failed each test by "invalid literal for int() with base 10"."""
    with pytest.raises(LocalBrokerError, match=r"it must be host:port, and \[address\]:port with IPv6") as refusal:
        Admin(servers)
    assert "secret" not in str(refusal.value)


def test_ipv6_address_is_connected_to_without_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the brackets were a part of the name, and no such host was found."""
    asked: list[tuple[str, int]] = []

    def refuse(place: tuple[str, int], **_: object) -> None:
        asked.append(place)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(LocalBrokerError, match=r"\[::1\]:9092: refused; b.example:2: refused"):
        Admin("[::1]:9092,b.example:2").finalized_features()
    assert asked == [("::1", 9092), ("b.example", 2)]


class Pieces:
    """A connection that returns the peer's bytes in pieces, and then its end."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [*pieces, b""]

    def recv(self, size: int) -> bytes:
        assert len(self._pieces[0]) <= size
        return self._pieces.pop(0)


def test_response_is_read_in_pieces_to_its_end() -> None:
    connection: Any = Pieces(b"ab", b"cd", b"ef")
    assert admin._receive(connection, 4) == b"abcd"
    with pytest.raises(ConnectionError, match="in the middle of an answer"):
        admin._receive(connection, 4)
