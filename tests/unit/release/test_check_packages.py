"""Which packages of a release are refused, by the files and metadata inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from release.build_wheels import platform_metadata
from release.check_packages import LABELS, metadata_faults, missing_files, target_of, wheel_faults
from release.targets import TARGETS

BY_TAG = {target.tags[-1]: target for target in TARGETS}
KERNEL = "spark_kafka_sink/record/_kernel.abi3.so"
PURE = "Wheel-Version: 1.0\nGenerator: setuptools\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n"
URL = "https://example.org/owner/name"


def test_wheel_with_its_kernel_has_no_fault() -> None:
    assert wheel_faults([KERNEL], platform_metadata(PURE, ("x",)), BY_TAG["macosx_11_0_arm64"]) == []
    assert wheel_faults(["a.py"], PURE, None) == []


@pytest.mark.parametrize(
    ("names", "metadata", "tag", "fault"),
    [
        ([], "Root-Is-Purelib: false\n", "win_amd64", "has [], not ['spark_kafka_sink/record/_kernel.pyd']"),
        ([KERNEL], "Root-Is-Purelib: true\n", "macosx_11_0_arm64", "says Root-Is-Purelib: true"),
        ([KERNEL], PURE, None, f"has ['{KERNEL}'], not []"),
    ],
)
def test_wheel_with_another_kernel_than_its_tags_say_is_refused(
    names: list[str], metadata: str, tag: str | None, fault: str
) -> None:
    assert wheel_faults(names, metadata, BY_TAG[tag] if tag else None) == [fault]


def metadata(labels: Sequence[str], description: str, url: str = URL) -> str:
    urls = [f"Project-URL: {label}, {url}/{label.lower()}" for label in sorted(labels)]
    return "\n".join(["Name: name", "License-Expression: Apache-2.0", *urls, "", description])


@pytest.mark.parametrize("url", [URL, None])
def test_metadata_has_all_project_urls_or_none(url: str | None) -> None:
    labels = sorted(LABELS) if url else []
    assert metadata_faults(metadata(labels, "[a](https://example.org) [b](#c) d (`e.md`)"), url) == []


@pytest.mark.parametrize(
    ("given", "url", "fault"),
    [
        (metadata(["Source"], "a"), None, "has the project URLs ['Source'], not []"),
        (metadata(sorted(LABELS - {"Issues"}), "a"), URL, "'Issues'"),
        (metadata(sorted(LABELS), "a", "https://other.org"), URL, "do not begin with https://example.org/owner/name"),
        (metadata(sorted(LABELS), "see [a](docs/a.md)"), URL, "has the relative links ['docs/a.md']"),
        ("Name: name\n\na", None, "has no SPDX licence"),
    ],
)
def test_wrong_metadata_is_refused(given: str, url: str | None, fault: str) -> None:
    (found,) = metadata_faults(given, url)
    assert fault in found


def test_wheel_is_matched_with_its_target_by_its_name() -> None:
    name = "spark_kafka_sink-0.1.0-cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
    assert target_of(Path(name)) == BY_TAG["manylinux2014_x86_64"]
    assert target_of(Path("spark_kafka_sink-0.1.0-py3-none-any.whl")) is None


def test_source_distribution_that_lacks_a_tracked_file_is_found() -> None:
    tracked = [".ci/run", ".gitignore", "docs/options.md", "setup.py"]
    assert missing_files(tracked, ["name-1.0", "name-1.0/setup.py"]) == ["docs/options.md"]
    assert missing_files(tracked, ["name-1.0/setup.py", "name-1.0/docs/options.md"]) == []
