"""The compiled kernel, the project URLs, and README.md as a package registry shows it, which setup.cfg cannot describe.

Without a C compiler the kernel's numpy twin replaces it (spark_kafka_sink/record/kernel.py).
SPARK_KAFKA_SINK_KERNEL=none builds the wheel in pure Python, for every platform.
SPARK_KAFKA_SINK_URL=https://host/owner/name is the URL of the repository. Without it the package has no project URLs.
"""

import os
import re
import runpy
from email.parser import Parser
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent

KERNEL = Extension(
    "spark_kafka_sink.record._kernel",
    sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("spark_kafka_sink/*/_*.c")),
    depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("spark_kafka_sink/*/_*.h")),
    extra_compile_args=["-O3"],
    py_limited_api=True,
    optional=True,
)

PAGES = {
    "Homepage": "",
    "Source": "",
    "Documentation": "/tree/HEAD/docs",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Issues": "/issues",
}
"""The project URLs, after the URL of the repository. GitHub and GitLab have these pages."""


def project_url(root=ROOT):
    """Return the URL of the repository, or None.

    It comes from SPARK_KAFKA_SINK_URL. A source distribution has it in PKG-INFO, so that a wheel built from it has the
    same metadata. Raises ValueError if SPARK_KAFKA_SINK_URL is not https://host/owner/name.
    """
    given = os.environ.get("SPARK_KAFKA_SINK_URL", "").rstrip("/")
    if given and not re.fullmatch(r"https://[^\s/]+(/[^\s/?#]+)+", given):
        raise ValueError(f"SPARK_KAFKA_SINK_URL must be https://host/owner/name, not {given!r}.")
    if not given and (root / "PKG-INFO").exists():
        fields = Parser().parsestr((root / "PKG-INFO").read_text(encoding="utf-8"), headersonly=True)
        given = dict(line.split(", ", 1) for line in fields.get_all("Project-URL", [])).get("Homepage", "")
    return given or None


def readme_for_registry(text, repository, version):
    """Return Markdown whose relative links work outside the repository: they lead to the tag of this version.

    Without a repository each of them becomes the name of a file in the source distribution.
    """

    def replaced(link):
        image, label, target = link.groups()
        if "://" in target or target.startswith("#"):
            return link[0]
        if repository:
            return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/v{version}/{target})"
        file = target.partition("#")[0]
        return f"`{file}`" if label == file else f"{label} (`{file}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replaced, text)


def long_description(repository):
    """Return README.md as a package registry shows it."""
    version = runpy.run_path(str(ROOT / "spark_kafka_sink" / "common" / "version.py"))["VERSION"]
    return readme_for_registry((ROOT / "README.md").read_text(encoding="utf-8"), repository, version)


def kernel():
    """Return the extensions to build. Raises ValueError for an unknown SPARK_KAFKA_SINK_KERNEL."""
    asked = os.environ.get("SPARK_KAFKA_SINK_KERNEL", "compiled")
    if asked not in ("compiled", "none"):
        raise ValueError(f"SPARK_KAFKA_SINK_KERNEL must be compiled or none, not {asked!r}.")
    return [KERNEL] if asked == "compiled" else []


if __name__ == "__main__":
    url = project_url()
    setup(
        ext_modules=kernel(),
        project_urls={label: url + page for label, page in PAGES.items()} if url else {},
        long_description=long_description(url),
        long_description_content_type="text/markdown",
    )
