"""The command: its arguments, its exit codes, and that no output shows a secret."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from support.fresh_process import run_script, without
from support.schema_registry import free_port

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.options import table_of
from spark_kafka_sink.doctor.__main__ import FAULT, WRONG_USE, main
from spark_kafka_sink.serialization.registry_settings import RegistrySettings

CANARY = "canary-p4ss"
SECRET = [
    *(f"kafka.{key}" for key, field in table_of(ProducerConfig).items() if field.metadata.get("is_secret")),
    *(f"schema.registry.{key}" for key, field in table_of(RegistrySettings).items() if field.metadata.get("is_secret")),
]
PATHS = {
    "kafka.ssl.truststore.location",
    "kafka.ssl.keystore.location",
    "kafka.sasl.oauthbearer.token.provider",
    "schema.registry.ssl.certificate.location",
    "schema.registry.ssl.key.location",
}
"""Hidden where options are shown, and named in errors: what stands there is a path or a function's name."""
LOGINS = {
    "kafka.sasl.jaas.config": f'ScramLoginModule required username="alice" password="{CANARY}";',
    "schema.registry.basic.auth.user.info": f"alice:{CANARY}",
}


def run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    return main([*arguments, "--timeout", "1"], out), out.getvalue()


@pytest.fixture
def options(tmp_path: Path) -> Path:
    file = tmp_path / "sink.properties"
    file.write_text(f"kafka.bootstrap.servers=127.0.0.1:{free_port()}\ntopic=orders\n")
    return file


@pytest.mark.parametrize("name", [name for name in SECRET if name not in PATHS])
def test_no_output_shows_a_secret(name: str, options: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = LOGINS.get(name, CANARY)
    more = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "SCRAM-SHA-256"}
    if name.startswith("schema.registry."):
        more = {"value.format": "avro", "schema.registry.url": f"http://127.0.0.1:{free_port()}"}
    with options.open("a") as file:
        file.writelines(f"{key}={value}\n" for key, value in {**more, name: own}.items())
    for arguments in ((), ("--json",)):
        code, text = run("--options", str(options), *arguments)
        assert code == FAULT
        assert CANARY not in text
    captured = capfd.readouterr()
    assert CANARY not in captured.out + captured.err


def test_option_of_the_command_wins_over_the_file(options: Path) -> None:
    _, text = run("--options", str(options), "--option", "TOPIC=payments", "--json")
    (understood,) = [each for each in json.loads(text)["findings"] if each["what"] == "understood"]
    assert understood["seen"].startswith("topic='payments'")


def test_wrong_option_is_named_with_its_line(options: Path) -> None:
    with options.open("a") as file:
        file.write("kafka.lingr.ms=5\n")
    code, text = run("--options", str(options), "--json")
    (found,) = [each for each in json.loads(text)["findings"] if each["name"] == "option-wrong"]
    assert code == FAULT
    assert found["what"] == "kafka.lingr.ms"
    assert "kafka.linger.ms" in found["seen"]
    assert found["change"] == f"Correct this option ({options}, line 3)."


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--option", "topic"), "--option takes NAME=VALUE, and topic … has no name or no value."),
        # bug: with a blank for the equals sign the password was shown
        (("--option", f"kafka.ssl.key.password {CANARY}"), "and kafka.ssl.key.password … has no name or no value."),
        (("--option", f"={CANARY}"), "--option takes NAME=VALUE, and this has no name or no value."),
        (("--options", "missing.properties"), "--options missing.properties cannot be read: No such file"),
    ],
)
def test_wrong_use_ends_with_2(arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == (WRONG_USE, "")
    shown = capsys.readouterr().err
    assert text in shown
    assert CANARY not in shown


@pytest.mark.parametrize("text", ["0", "soon", "601"])
def test_wrong_timeout_is_named_with_its_range(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the error for a text was "invalid _seconds value", by the name of a function."""
    with pytest.raises(SystemExit) as ended:
        main(["--timeout", text])
    assert ended.value.code == WRONG_USE
    assert f"--timeout: '{text}' must be a number of seconds, more than 0 and at most 600" in capsys.readouterr().err


def test_unknown_argument_ends_with_2() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--unknown"], io.StringIO())
    assert ended.value.code == WRONG_USE


def test_without_options_only_the_machine_is_looked_at() -> None:
    _, text = run("--json")
    assert {each["area"] for each in json.loads(text)["findings"]} == {"This machine", "Options"}


@pytest.mark.parametrize("package", ["pyarrow", "lz4", "kio"])
def test_package_that_does_not_load_is_named(package: str, tmp_path: Path) -> None:
    script = without(package) + (
        "from spark_kafka_sink.doctor.__main__ import main\n"
        "print(main(['--option', 'kafka.bootstrap.servers=127.0.0.1:1', '--option', 'topic=t']))\n"
    )
    lines = run_script(script, tmp_path, PYTHONIOENCODING="ascii").stdout.splitlines()
    assert lines[-1] == str(FAULT)
    assert next(line.split() for line in lines if "[package-missing]" in line)[:2] == ["X", package]


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=["table", "json"])
def test_terminal_without_a_letter_gets_the_findings(options: Path, arguments: list[str]) -> None:
    """Bug: the command ended with UnicodeEncodeError, and showed nothing."""
    written = io.BytesIO()
    out = io.TextIOWrapper(written, "ascii")
    given = ["--options", str(options), "--option", "topic=größe", "--timeout", "1", *arguments]
    assert main(given, out) == FAULT
    out.flush()
    text = written.getvalue().decode("ascii")
    if arguments:
        text = "\n".join(each["seen"] for each in json.loads(text)["findings"])
        assert "topic='größe'" in text
    else:
        assert r"topic='gr\xf6\xdfe'" in text
