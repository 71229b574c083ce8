"""Arguments that benchmarks refuse before they begin."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.mark.parametrize(
    ("job", "option", "value", "why"),
    [
        ("benchmark", "--json", "/no/such/figures.json", "there is no folder '/no/such'"),
        ("benchmark", "--json", "/", "must be a file"),
        ("benchmark", "--plot", "/no/such/plot", "there is no folder '/no/such'"),
        ("benchmark", "--records", "0", "not a number from 1 on"),
        ("benchmark", "--warm-up", "-1", "'-1' is not a number of seconds"),
        ("benchmark", "--warm-up", "inf", "'inf' is not a number of seconds"),
        ("benchmark", "--timeout", "soon", "'soon' is not a number of seconds"),
        ("dashboard", "--seconds", "nan", "'nan' is not a number of seconds"),
        ("exactly_once_cost", "--tasks", "2,0", "'0' is not a number from 1 on"),
        ("exactly_once_cost", "--nodes", "2", "invalid choice: 2"),
        ("exactly_once_cost", "--rounds", "0", "not a number from 1 on"),
        ("exactly_once_cost", "--json", "/no/such/figures.json", "there is no folder '/no/such'"),
        ("microbenchmark", "--json", "/no/such/figures.json", "there is no folder '/no/such'"),
        ("microbenchmark", "--rounds", "0", "not a number from 1 on"),
        ("profile_producer", "--cells", "foo", "'foo' must be a codec (none, gzip, lz4, zstd, snappy)"),
        ("profile_producer", "--cells", "none-4,lz4", "'' is not a number from 1 on"),
        ("profile_producer", "--rows", "0", "not a number from 1 on"),
        ("profile_producer", "--rows", "1000001", "a round has 1,000,000 records"),
        ("profile_producer", "--rounds", "0", "not a number from 1 on"),
    ],
)
def test_useless_argument_is_refused_before_measuring(
    job: str, option: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with pytest.raises(SystemExit):
        importlib.import_module(job).main([option, value])
    error = capsys.readouterr().err
    assert f"argument {option}: " in error
    assert why in error


def test_writable_path_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plots").mkdir()
    arguments = ["--json", "figures.json", "--plot", "plots"]
    settings = importlib.import_module("benchmark").argument_parser("").parse_args(arguments)
    assert (settings.json, settings.plot) == (Path("figures.json"), Path("plots"))
