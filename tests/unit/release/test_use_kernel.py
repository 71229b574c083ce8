"""The comparison of a compiled kernel with plain Python, which needs no other package."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from release import use_kernel
from spark_kafka_sink.record import kernel


class LosingTaker:
    """The kernel's RowTaker, but the last cell of the first column is lost."""

    def __init__(self, *given: Any) -> None:
        self._taker = kernel.RowTaker(*given)
        self._cells = given[2][0][2]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._taker, name)

    def take(self, *given: Any) -> Any:
        rest = self._taker.take(*given)
        self._cells.pop()
        return rest


needs_kernel = pytest.mark.skipif(not kernel.has_kernel(), reason="the kernel was not compiled")


def test_it_imports_only_the_standard_library() -> None:
    tree = ast.parse(Path(use_kernel.__file__).read_text())
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in named} <= sys.stdlib_module_names


@needs_kernel
@pytest.mark.parametrize("rows", [1, 2, 500])
def test_kernel_of_this_machine_agrees_with_plain_python(rows: int) -> None:
    assert use_kernel.differences(kernel.KERNEL, rows) == []


@needs_kernel
@pytest.mark.parametrize("name", use_kernel.USES)
def test_function_with_another_result_is_named(name: str) -> None:
    functions: dict[str, Any] = {name: getattr(kernel.KERNEL, name) for name in use_kernel.USES}
    wrong = {
        "encode": lambda *given: [bytes(chunk) + b"\0" for chunk in functions["encode"](*given)],
        "hash": lambda *given: None,
        "fingerprint": lambda *given: None,
        "RowTaker": LosingTaker,
        "encode_rows": lambda *given: (*functions["encode_rows"](*given)[:3], True),
    }
    changed: Any = SimpleNamespace(**{**functions, name: wrong[name]})
    assert use_kernel.differences(changed, 50) == [name]


@needs_kernel
def test_kernel_is_taken_out_of_a_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "a-1-cp311-abi3-any.whl"
    with zipfile.ZipFile(wheel, "w") as held:
        held.write(kernel.KERNEL.__file__, "spark_kafka_sink/record/_kernel.abi3.so")
    assert use_kernel.main([str(wheel), "20"]) == 0
    assert "encode, hash, fingerprint, RowTaker, encode_rows agree, 20 rows" in capsys.readouterr().out
