"""A pytest plugin that replaces the installed kernel by one built with sanitizers: see `make sanitizers`.

`SANITIZED_KERNEL` is the path of the built module. If it is missing the run fails, so that no run passes without it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from typing import Final

_NAME: Final = "spark_kafka_sink.record._kernel"


def pytest_configure() -> None:
    path = os.environ["SANITIZED_KERNEL"]
    assert "spark_kafka_sink.record.kernel" not in sys.modules, "the installed kernel is loaded already"
    spec = importlib.util.spec_from_loader(_NAME, importlib.machinery.ExtensionFileLoader(_NAME, path), origin=path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module


def pytest_report_header() -> str:
    from spark_kafka_sink.record.kernel import KERNEL

    assert KERNEL.__spec__.origin == os.environ["SANITIZED_KERNEL"]
    return f"kernel with sanitizers: {KERNEL.__spec__.origin}"
