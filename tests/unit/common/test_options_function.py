"""Options whose value is a function: given as a function, or by its name."""

from __future__ import annotations

import pickle
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import NamedFunction, RefusalError, function

SETTING = "sasl.oauthbearer.token.provider"
MakeModule = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeModule]:
    """`module(text)` writes a module and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {*sys.modules}

    def make(text: str) -> str:
        name = f"provider_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield make
    for name in {*sys.modules} - before:
        del sys.modules[name]


def refusal(text: str) -> str:
    found = function(text)
    assert isinstance(found, NamedFunction)
    with pytest.raises(ConfigError) as caught:
        found.load(SETTING)
    assert caught.value.setting == SETTING
    assert str(caught.value).startswith(f"{SETTING}={text}: ")
    assert str(caught.value.named("kafka.")).startswith(f"kafka.{SETTING}={text}: ")
    return str(caught.value).partition(": ")[2]


def test_named_function_is_imported_when_it_is_loaded(module: MakeModule) -> None:
    name = module(
        "def token():\n    return 'abc', 1\nclass Vault:\n  @staticmethod\n  def token():\n    return 'x', 2\n"
    )
    found = function(f" {name}:token ")
    assert name not in sys.modules
    assert found.load(SETTING)() == ("abc", 1)
    assert function(f"{name}:Vault.token").load(SETTING)() == ("x", 2)


def test_equal_names_are_one_function_also_after_pickling() -> None:
    """Otherwise every task would have its own producer."""
    found = function("acme.auth:token")
    assert found == function("acme.auth:token") == pickle.loads(pickle.dumps(found)) == function(found)
    assert hash(found) == hash(function("acme.auth:token"))
    assert found != function("acme.auth:other")


def test_given_function_is_loaded_as_it_is() -> None:
    def token() -> tuple[str, int]:
        return "abc", 1

    assert function(token).load(SETTING) is token


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("os.system", "or its name as module:function"),
        ("eyJhbGciOiJub25lIn0.eyJzdWIiOiJhIn0.", "or its name as module:function"),
        ("acme:", "or its name as module:function"),
        (":token", "or its name as module:function"),
        ("acme:token()", "or its name as module:function"),
        ("acme/auth.py:token", "or its name as module:function"),
        ("acme:a:b", "or its name as module:function"),
        ("", "or its name as module:function"),
        (5, "or its name as module:function"),
        ("os:abort", "this one belongs to Python itself"),
        ("importlib.metadata:version", "this one belongs to Python itself"),
        ("builtins:breakpoint", "this one belongs to Python itself"),
        ("__main__:token", "__main__ is another program on the executors"),
    ],
)
def test_text_that_names_no_function_is_refused(value: object, text: str) -> None:
    with pytest.raises(RefusalError, match=text):
        function(value)


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.auth"])
def test_missing_module_is_named_with_the_remedy(name: str) -> None:
    found = refusal(f"{name}:token")
    assert found.startswith(
        f"there is no module {name.partition('.')[0]} for {sys.executable}. Install it for the Python"
    )
    assert "--py-files" in found


def test_module_missing_inside_the_module_is_named(module: MakeModule) -> None:
    name = module("import no_such_dependency.identity\n")
    expected = f"the module {name} imports no_such_dependency, which is missing for {sys.executable}: install it there."
    assert refusal(f"{name}:token") == expected


@pytest.mark.parametrize("failure", ["raise KeyError('hunter2')", "raise SystemExit('hunter2')"])
def test_failed_import_shows_only_the_type_of_the_error(module: MakeModule, failure: str) -> None:
    name = module(f"{failure}\n")
    found = refusal(f"{name}:token")
    assert found.startswith(f"the import of the module {name} failed with {failure.split()[1].partition('(')[0]}. ")
    assert "hunter2" not in found


def test_missing_function_is_named_with_the_file_of_the_module(module: MakeModule, tmp_path: Path) -> None:
    name = module("def tokens(): ...\n")
    expected = (
        f"the module {name} ({tmp_path / name}.py) has no function token. Correct the name, or define the function"
    )
    assert refusal(f"{name}:token").startswith(expected)


def test_value_that_cannot_be_called_is_refused_unseen(module: MakeModule) -> None:
    name = module("token = 'hunter2'\n")
    assert refusal(f"{name}:token") == f"token of the module {name} is a str. It must be a function without arguments."
