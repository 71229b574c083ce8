"""setup.py: the project URLs, README as a package registry shows it, and whether the kernel is compiled."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from spark_kafka_sink.common.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
URL = "https://example.org/owner/name"
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


@pytest.mark.parametrize(
    ("written", "with_url", "without"),
    [
        ("[Options](docs/a.md)", f"[Options]({URL}/blob/v1.2.3/docs/a.md)", "Options (`docs/a.md`)"),
        ("[`a`](b.md#c)", f"[`a`]({URL}/blob/v1.2.3/b.md#c)", "`a` (`b.md`)"),
        ("[A.md](A.md)", f"[A.md]({URL}/blob/v1.2.3/A.md)", "`A.md`"),
        ("![A plot](docs/a.png)", f"![A plot]({URL}/raw/v1.2.3/docs/a.png)", "A plot (`docs/a.png`)"),
        ("[Kafka](https://kafka.apache.org)", "[Kafka](https://kafka.apache.org)", "[Kafka](https://kafka.apache.org)"),
        ("[below](#speed)", "[below](#speed)", "[below](#speed)"),
        ("a[0](x, y)", "a[0](x, y)", "a[0](x, y)"),
    ],
)
def test_relative_links_lead_to_the_tag_or_name_a_file(
    setup: dict[str, Any], written: str, with_url: str, without: str
) -> None:
    assert setup["readme_for_registry"](written, URL, "1.2.3") == with_url
    assert setup["readme_for_registry"](written, None, "1.2.3") == without


def test_every_relative_link_of_readme_leads_to_a_file(setup: dict[str, Any]) -> None:
    links = LINK.findall(setup["long_description"](URL))
    inside = [link.partition(f"/v{VERSION}/")[2].partition("#")[0] for link in links if link.startswith(URL)]
    assert len(inside) > 10
    assert [name for name in inside if not (ROOT / name).exists()] == []


def metadata(folder: Path, url: str) -> Message:
    """Return the metadata that setuptools writes, without a build."""
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "SPARK_KAFKA_SINK_URL": url}, check=True)
    return Parser().parsestr((folder / "spark_kafka_sink.egg-info" / "PKG-INFO").read_text())


def test_metadata_with_a_url_has_project_urls_and_absolute_links(tmp_path: Path) -> None:
    fields = metadata(tmp_path, f"{URL}/")
    assert dict(line.split(", ") for line in fields.get_all("Project-URL", [])) == {
        "Homepage": URL,
        "Source": URL,
        "Documentation": f"{URL}/tree/HEAD/docs",
        "Changelog": f"{URL}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    }
    assert f"({URL}/blob/v{VERSION}/docs/options.md)" in fields.get_payload()


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="a source distribution keeps the URL of its release")
def test_metadata_without_a_url_has_no_project_urls_and_no_relative_links(tmp_path: Path) -> None:
    fields = metadata(tmp_path, "")
    assert fields.get_all("Project-URL") is None
    assert fields["Home-page"] is None
    text = str(fields.get_payload())
    assert "`docs/options.md`" in text
    assert [link for link in LINK.findall(text) if "://" not in link] == []


def test_source_distribution_keeps_the_url_of_its_release(
    setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_KAFKA_SINK_URL", raising=False)
    assert setup["project_url"](tmp_path) is None
    (tmp_path / "PKG-INFO").write_text(f"Project-URL: Issues, {URL}/issues\nProject-URL: Homepage, {URL}\n\ntext\n")
    assert setup["project_url"](tmp_path) == URL


@pytest.mark.parametrize("url", ["example.org/owner/name", "https://example.org", "http://example.org/owner/name"])
def test_wrong_url_is_an_error(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SPARK_KAFKA_SINK_URL", url)
    with pytest.raises(ValueError, match="must be https://host/owner/name, not"):
        setup["project_url"]()


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
