"""What logs and errors show of a text."""

from __future__ import annotations

import io
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

from spark_kafka_sink.common.texts import Secret, exit_code_of, for_stream, shown, without_logins

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = [
    "spark_kafka_sink/transactions.py",
    "spark_kafka_sink/doctor/__main__.py",
    "spark_kafka_sink/local/__main__.py",
    "spark_kafka_sink/local/relock.py",
    "jobs/read_topic.py",
    "jobs/stream_to_kafka.py",
    "jobs/demo.py",
]


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


# ---- the output of a command -----------------------------------------------------------------------------------------


@contextmanager
def stdout_without_reader() -> Iterator[None]:
    """A stdout whose reader has gone. At the end it is flushed and closed, as by Python. A fixture cannot replace
    that of pytest.
    """
    reading, writing = os.pipe()
    os.close(reading)
    before = sys.stdout
    with open(writing, "w") as sys.stdout:
        try:
            yield
        finally:
            sys.stdout, own = before, sys.stdout
            own.flush()


def much() -> int:
    for _ in range(10_000):
        print("a line of a long list")
    return 0


def little_then_exit() -> int:
    print("usage: ...")
    sys.exit(0)


@pytest.mark.parametrize("command", [much, little_then_exit])
def test_command_without_a_reader_ends_as_by_sigpipe(command: Callable[[], int]) -> None:
    """Bug: `transactions list | head -1` printed a traceback."""
    with stdout_without_reader():
        assert exit_code_of(command) == 141


@pytest.mark.parametrize("file", COMMANDS)
def test_every_command_ends_quietly_without_a_reader(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `transactions list | head -1` printed a traceback."""
    monkeypatch.setattr(sys, "argv", [file, "--help"])
    monkeypatch.syspath_prepend(str(ROOT / "jobs"))  # as for a script that is started
    with stdout_without_reader(), pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / file), run_name="__main__")
    assert end.value.code == 141


def demo_that_prints() -> int:
    import_module("demo").console.print("a line")
    return 0


def job_of_the_demo() -> int:
    """The printer of its lines is the first to notice, in a thread of its own."""
    job = import_module("demo").Job("h:1", Path())
    job._command = [sys.executable, "-c", "for _ in range(9_999): print('a line', flush=True)"]
    with job:
        job.wait()
    return 0


def read_topic() -> int:
    job = import_module("read_topic")
    with patch.object(job, "read_topic", lambda *_: job.SCHEMA.empty_table()):
        code: int = job.main(["--bootstrap-servers", "h:1", "--topic", "t"])
    return code


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("command", [demo_that_prints, job_of_the_demo, read_topic])
def test_console_without_a_reader_ends_as_by_sigpipe(
    command: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: rich ended `read_topic | head -1` and the demo with 1, the code of a failure."""
    monkeypatch.syspath_prepend(str(ROOT / "jobs"))  # as for a script that is started
    with stdout_without_reader():
        assert exit_code_of(command) == 141


def test_code_of_a_command_that_is_read_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: 2) == 2
    assert exit_code_of(little_then_exit) == 0
    assert capsys.readouterr().out == "usage: ...\n"


def test_broken_pipe_of_another_file_is_no_end_of_stdout() -> None:
    def command() -> int:
        raise BrokenPipeError

    reading, writing = os.pipe()
    before = sys.stdout
    with open(reading), open(writing, "w") as sys.stdout:
        try:
            with pytest.raises(BrokenPipeError):
                exit_code_of(command)
        finally:
            sys.stdout = before


def test_character_that_stdout_cannot_write_does_not_end_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: with LC_ALL=C a name or a value with ü ended each job in a traceback."""

    def command() -> int:
        print("grün ✓ \udc80")
        return 0

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert exit_code_of(command) == 0
    assert written.getvalue() == rb"gr\xfcn \u2713 \udc80" + b"\n"
    for other in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdout", other)
        assert exit_code_of(lambda: 0) == 0
