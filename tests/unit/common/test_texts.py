"""What logs and errors show of a text."""

from __future__ import annotations

import io
import pickle

import pytest

from spark_kafka_sink.common.texts import Secret, for_stream, shown, without_logins


def test_secret_is_shown_only_by_reveal() -> None:
    secret = Secret("hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == "hunter2"
    assert secret == Secret("hunter2") != Secret("other")
    assert secret != "hunter2"
    assert hash(secret) == hash(Secret("hunter2"))


def test_secret_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Secret("hunter2"))).reveal() == "hunter2"


@pytest.mark.parametrize(
    ("text", "is_shown_as"),
    [
        ("no http://me:p@host/path", "no http://***@host/path"),
        ("http://me:p/a?s@host/path?code=p or 'https://x/y?p'", "http://***@host/path?*** or 'https://x/y?***'"),
        ("refused by h:9092, is it there? me@work", "refused by h:9092, is it there? me@work"),
        ("http://a:1,http://b:2", "http://a:1,http://b:2"),
    ],
)
def test_logins_and_queries_of_addresses_are_not_shown(text: str, is_shown_as: str) -> None:
    assert without_logins(text) == is_shown_as


@pytest.mark.parametrize(
    ("value", "is_shown_as"),
    [
        (7, "7"),
        ("h1", "'h1'"),
        ("me:p@h:9092", "***"),
        (["h:1", "me:p@h:2"], "***"),
        ("https://h/t?code=p", "'https://h/t?***'"),
        ("-----BEGIN PRIVATE KEY-----\nhunter2", "***"),
        ("org.example.PlainLoginModule required username='me' password='hunter2';", "***"),
        ("Password = hunter2", "***"),
        ("secret=hunter2", "***"),
        ("secret", "'secret'"),
        ("x" * 1_000, "'" + "x" * 499 + "... (1002 characters)"),
    ],
)
def test_refused_value_is_shown_unless_it_may_have_a_secret(value: object, is_shown_as: str) -> None:
    """Bug: a private key or a login in the wrong option was in the error, and a long value in its whole length."""
    assert shown(value) == is_shown_as


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("ascii", r"gr\xfcn \u2713 \udc80"), ("latin-1", r"grün \u2713 \udc80"), ("utf-8", r"grün ✓ \udc80")],
)
def test_character_that_a_stream_cannot_write_is_an_escape(encoding: str, written: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    text = for_stream("grün ✓ \udc80", stream)
    stream.write(text)
    assert text == written
    assert for_stream("grün", io.StringIO()) == "grün"
