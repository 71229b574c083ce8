"""What setup.cfg cannot say: the compiled kernel, and README.md as a package registry shows it.

Where there is no C compiler the kernel's numpy twin does the work (spark_kafka_sink/record/kernel.py).
SPARK_KAFKA_SINK_KERNEL=none builds the wheel in pure Python, for every platform.
"""

import configparser
import os
import re
import runpy
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent

KERNEL = Extension(
    "spark_kafka_sink.record._kernel",
    ["spark_kafka_sink/record/_kernel.c", "spark_kafka_sink/record/_rows.c"],
    depends=["spark_kafka_sink/record/_kernel.h"],
    extra_compile_args=["-O3"],
    py_limited_api=True,
    optional=True,
)


def absolute_links(text, repository, version):
    """Return Markdown with its relative links made absolute: they lead to the tag of this version in the repository."""

    def absolute(link):
        image, label, target = link.groups()
        if "://" in target or target.startswith("#"):
            return link[0]
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/v{version}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, text)


def long_description():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg", encoding="utf-8")
    version = runpy.run_path(str(ROOT / "spark_kafka_sink" / "common" / "version.py"))["VERSION"]
    return absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), metadata["metadata"]["url"], version)


def kernel():
    """Return the extensions to build. Raises ValueError for an unknown SPARK_KAFKA_SINK_KERNEL."""
    asked = os.environ.get("SPARK_KAFKA_SINK_KERNEL", "compiled")
    if asked not in ("compiled", "none"):
        raise ValueError(f"SPARK_KAFKA_SINK_KERNEL must be compiled or none, not {asked!r}.")
    return [KERNEL] if asked == "compiled" else []


if __name__ == "__main__":
    setup(ext_modules=kernel(), long_description=long_description(), long_description_content_type="text/markdown")
