"""setup.py: the long description of the package, and whether the kernel is compiled."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from spark_kafka_sink.common.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://example.org/project"


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[Options](docs/options.md)", "[Options](https://example.org/project/blob/v1.2.3/docs/options.md)"),
        ("[`a`](b.md#c)", "[`a`](https://example.org/project/blob/v1.2.3/b.md#c)"),
        ("![A plot](docs/plot.png)", "![A plot](https://example.org/project/raw/v1.2.3/docs/plot.png)"),
        ("[Kafka](https://kafka.apache.org)", "[Kafka](https://kafka.apache.org)"),
        ("[below](#speed)", "[below](#speed)"),
        ("a[0](x, y)", "a[0](x, y)"),
    ],
)
def test_relative_links_lead_to_the_tag_of_the_version(setup: dict[str, Any], written: str, shown: str) -> None:
    assert setup["absolute_links"](written, REPOSITORY, "1.2.3") == shown


def test_every_link_of_the_long_description_is_absolute_and_leads_to_a_file(setup: dict[str, Any]) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", setup["long_description"]())
    inside = [link.partition(f"/v{VERSION}/")[2].partition("#")[0] for link in links if f"/v{VERSION}/" in link]
    assert len(inside) > 10
    assert [name for name in inside if not (ROOT / name).exists()] == []
    assert [link for link in links if "://" not in link and not link.startswith("#")] == []


def test_kernel_is_compiled_unless_the_environment_says_none(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_KAFKA_SINK_KERNEL", raising=False)
    assert setup["kernel"]() == [setup["KERNEL"]]
    monkeypatch.setenv("SPARK_KAFKA_SINK_KERNEL", "none")
    assert setup["kernel"]() == []


def test_unknown_choice_of_kernel_is_an_error(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_KAFKA_SINK_KERNEL", "no")
    with pytest.raises(ValueError, match="must be compiled or none, not 'no'"):
        setup["kernel"]()
