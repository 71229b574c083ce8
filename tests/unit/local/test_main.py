"""The command line of `python -m spark_kafka_sink.local`."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_kafka_sink.local import cluster
from spark_kafka_sink.local.__main__ import main
from spark_kafka_sink.local.jvm import Java


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--property", "no-equals-sign"], "'no-equals-sign' is not KEY=VALUE"),
        (["--property", "=value"], "'=value' is not KEY=VALUE"),
        (["--nodes", "2"], "invalid choice: 2"),
    ],
)
def test_wrong_argument_is_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_unwritable_folder_is_reported_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "fetch_jars", lambda *_, **__: [])
    monkeypatch.setattr(cluster, "find_java", lambda: Java(Path("java"), "17"))
    monkeypatch.setattr(cluster, "with_class_archive", lambda jvm, _: jvm)
    (tmp_path / "file").touch()
    assert main(["--data", str(tmp_path / "file" / "data")]) == 1
    assert "The cluster's files cannot be written: [Errno 20] Not a directory" in capsys.readouterr().err


def test_owned_property_ends_in_a_message_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--property", "node.id=7"]) == 1
    assert "node.id: set by the embedded cluster" in capsys.readouterr().err
