"""A table of settings, and the parsers of their values.

A row of the table is a dataclass field, made by `option`. Its metadata have its parser and its meaning. A parser turns
the value of a caller, text or typed, into a value of the right type, or raises RefusalError with what it must be.
`nearest` finds the known name that is most similar to a wrong one.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import math
import re
import sys
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MethodType
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.texts import Secret, shown

_TRIMMED = "".join(map(chr, range(0x21)))
"""The characters that Kafka strips from a password: Java's `trim` strips only ASCII's blanks."""
_HOST = re.compile(r"[\w.%:-]+")
_MOST_NAME_BYTES: Final = 32_000
"""Kafka's strings have at most 32,767 bytes, and numbers are added to some names."""


class RefusalError(Exception):
    """The refusal of a value, as the rest of a sentence: `parse_value` puts the name and the value before it."""


def whole_number(value: object) -> int:
    if isinstance(value, bool):
        raise RefusalError("must be a whole number")
    if isinstance(value, int):
        return value
    text = str(value).strip()
    if not re.fullmatch("[+-]?[0-9]{1,20}", text):
        raise RefusalError("must be a whole number")
    return int(text)


def between(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        number = whole_number(value)
        if not low <= number <= high:
            raise RefusalError(f"must be between {low} and {high}")
        return number

    return parse


INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
int_ms = between(0, INT_MAX)
"""Milliseconds, for a setting that is an int in Kafka."""
long_ms = between(0, LONG_MAX)


def number_between(low: float, high: float) -> Callable[[object], float]:
    def parse(value: object) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(str(value))
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise RefusalError(f"must be a number between {low} and {high}")
        return number

    return parse


def boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "false": False}
    text = str(value).strip().lower()
    if text not in known:
        raise RefusalError("must be true or false")
    return known[text]


def text(value: object) -> str:
    return str(value).strip()


def non_empty_text(value: object) -> str:
    if not text(value):
        raise RefusalError("must not be empty")
    return text(value)


def name(value: object) -> str:
    """Parse a name that goes into requests."""
    found = text(value)
    try:
        size = len(found.encode())
    except UnicodeEncodeError:
        raise RefusalError("must be text that UTF-8 can hold") from None
    if size > _MOST_NAME_BYTES:
        raise RefusalError(f"must have at most {_MOST_NAME_BYTES} bytes")
    return found


def non_empty_name(value: object) -> str:
    return name(non_empty_text(value))


def path(value: object) -> str:
    """Parse the path of a file with certificates or a key. Refuse PEM text, which may contain the key."""
    found = non_empty_text(value)
    if "-----BEGIN" in found:
        raise RefusalError(
            "must be the path of a file; PEM text goes into `ssl.truststore.certificates`, or into"
            " `ssl.keystore.key` and `ssl.keystore.certificate.chain`"
        )
    return found


def one_of(*allowed: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = str(value).strip()
        by_lower = {known.lower(): known for known in allowed}
        if text.lower() not in by_lower:
            raise RefusalError(f"must be one of {', '.join(name or 'nothing' for name in allowed)}")
        return by_lower[text.lower()]

    return parse


def names(value: object) -> tuple[str, ...]:
    """Parse names separated by commas: at least one, without duplicates."""
    items = [str(item) for item in value] if isinstance(value, (list, tuple)) else str(value).split(",")
    found = tuple(dict.fromkeys(item.strip() for item in items if item.strip()))
    if not found:
        raise RefusalError("must have at least one name")
    return found


def some_of(*allowed: str) -> Callable[[object], tuple[str, ...]]:
    """Return a parser of at least one of the names, in the order of the table."""
    parse_one = one_of(*allowed)

    def parse(value: object) -> tuple[str, ...]:
        given = {parse_one(name) for name in names(value)}
        return tuple(name for name in allowed if name in given)

    return parse


def secret(value: object) -> Secret:
    found = value if isinstance(value, Secret) else Secret(str(value).strip(_TRIMMED))
    if not found.reveal():
        raise RefusalError("must not be empty")
    return found


def secret_pem(label: str) -> Callable[[object], Secret]:
    """Return a parser of PEM text with at least one block whose label ends in `label`.

    Certificates are secret too, because a private key may stand in the same text.
    """

    def parse(value: object) -> Secret:
        text = secret(value).reveal().strip()
        if not re.search(f"-----BEGIN [A-Z0-9 ]*{label}-----", text):
            raise RefusalError(
                f"must be PEM text with -----BEGIN {label}-----; the path of a file goes into"
                " `ssl.truststore.location` or `ssl.keystore.location`"
            )
        return Secret(text)

    return parse


def endpoint_url(value: object) -> str:
    """Parse a URL for a client of another library: http or https, with a host, and without a login."""
    url = str(value).strip()
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and "#" not in url
    except ValueError:
        is_usable = False
    if not is_usable or re.search(r"[\0-\x20\x7f]", url):
        raise RefusalError("must be a URL of the form https://host/path")
    if "@" in parts.netloc:
        raise RefusalError(_NO_LOGIN)
    return url


_NO_LOGIN: Final = "must be a URL without credentials; they have their own options"


def https_url(value: object) -> str:
    """Parse a URL that is safe for credentials: no fragment (RFC 6749, 3.2), and a host that DNS can have."""
    url = str(value).strip()
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme == "https" and parts.port != 0 and "#" not in url
        is_usable = is_usable and bool((parts.hostname or "").encode("idna"))
    except ValueError:  # a UnicodeError too
        is_usable = False
    if not is_usable:
        raise RefusalError("must be a URL of the form https://host/path")
    if parts.username is not None or parts.password is not None:
        raise RefusalError(_NO_LOGIN)
    if re.search(r"[\0-\x20\x7f]", url) or not (parts.path + parts.query).isascii():
        raise RefusalError("must have %XX for blanks, and for characters of its path that are not ASCII")
    return url


@dataclass(frozen=True, slots=True)
class GivenFunction:
    """A caller's function with an id, which is the same after the function was pickled to a task.

    The function is not in the repr: a `functools.partial`, for example, shows its arguments.
    """

    call: Callable[[], Any] = field(compare=False, repr=False)
    id: str

    def __call__(self) -> Any:
        return self.call()

    def load(self, setting: str) -> Callable[[], Any]:  # noqa: ARG002 - as of NamedFunction
        return self.call


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function by its name, for options that are text. Equal names are the same function.

    The module is imported only by `load`, where the function is needed: the driver may not have it.
    """

    module: str
    name: str

    def load(self, setting: str) -> Callable[[], Any]:
        """Import the module and return the function. Raises ConfigError, which names `setting`, module and function.

        Of a failure inside the module it shows only the type, because the text may show credentials.
        """
        head = f"`{setting}`={self.module}:{self.name}: "
        try:
            found = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{self.module}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"{head}there is no module {error.name} for {sys.executable}. Install it for the Python of the"
                    " executors and of the driver, or ship its file by --py-files. Or correct the name.",
                    setting=setting,
                ) from None
            raise ConfigError(
                f"{head}the module {self.module} imports {error.name}, which is missing for {sys.executable}: install"
                " it there.",
                setting=setting,
            ) from error
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{head}the import of the module {self.module} failed with {type(error).__name__}. Import it with"
                f" {sys.executable} to see why.",
                setting=setting,
            ) from error
        return self._function_of(found, head, setting)

    def _function_of(self, module: object, head: str, setting: str) -> Callable[[], Any]:
        try:
            function = functools.reduce(getattr, self.name.split("."), module)
        except AttributeError:
            file = getattr(module, "__file__", None) or "without a file"
            raise ConfigError(
                f"{head}the module {self.module} ({file}) has no function {self.name}. Correct the name, or define the"
                " function there.",
                setting=setting,
            ) from None
        if not callable(function):
            raise ConfigError(
                f"{head}{self.name} of the module {self.module} is a {type(function).__name__}. It must be a function"
                " without arguments.",
                setting=setting,
            )
        return function


Function = GivenFunction | NamedFunction


def function(value: object) -> Function:
    """Parse a function, or its name as `module:function`. The name's module is not imported.

    Modules of Python's own library are refused. None of them has a function that an option could mean, and some do
    harm, such as `os:abort`.
    """
    if isinstance(value, GivenFunction | NamedFunction):
        return value
    if callable(value):
        return GivenFunction(value, _id_of(value))
    if not isinstance(value, str):
        raise RefusalError("must be a Python function, or its name as module:function")
    module, _, name = (part.strip() for part in value.partition(":"))
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise RefusalError("must be a Python function, or its name as module:function")
    if module == "__main__":
        raise RefusalError("must name another module: __main__ is another program on the executors")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise RefusalError("must name a module of your own: this one belongs to Python itself")
    return NamedFunction(module, name)


_IDS: dict[tuple[int, int], str] = {}
"""The ids of the functions in use. A sink that is made again with the same function has the same configuration.

The key is the address in memory, because an equal function may hold another secret. For a method it is that of its
object, because Python makes a method again at each access.
"""


def _id_of(call: Callable[[], Any]) -> str:
    owner, what = (call.__self__, call.__func__) if isinstance(call, MethodType) else (call, None)
    key = id(owner), id(what)
    if key not in _IDS:
        try:
            weakref.finalize(owner, _IDS.pop, key, what)  # keeps `what` alive, and so its address unique
        except TypeError:  # a class with slots has no weak references
            return uuid.uuid4().hex
    return _IDS.setdefault(key, uuid.uuid4().hex)


def acks(value: object) -> int:
    known = {"all": -1, "-1": -1, "0": 0, "1": 1}
    text = str(value).strip().lower()
    if text not in known:
        raise RefusalError("must be one of all, -1, 0, 1")
    return known[text]


def gzip_level(value: object) -> int:
    level = whole_number(value)
    if level != -1 and not 1 <= level <= 9:
        raise RefusalError("must be -1 or between 1 and 9")
    return level


def addresses(value: object) -> tuple[tuple[str, int], ...]:
    """Parse host:port pairs, with IPv6 hosts in brackets."""
    items = [str(item) for item in value] if isinstance(value, (list, tuple)) else str(value).split(",")
    found: list[tuple[str, int]] = []
    for item in (item.strip() for item in items):
        if not item:
            continue
        host, colon, port_text = item.rpartition(":")
        host = host.rsplit("://", 1)[-1].removeprefix("[").removesuffix("]")
        is_port = re.fullmatch("[0-9]{1,5}", port_text) and 0 < int(port_text) < 65536
        if not colon or not _HOST.fullmatch(host) or not is_port:
            raise RefusalError(f"must be host:port pairs, separated by commas: {shown(item)} is not host:port")
        found.append((host, int(port_text)))
    if not found:
        raise RefusalError("must have at least one host:port")
    return tuple(found)


def schemes(value: object) -> list[str]:
    """Return the text before `://` of each address, as in `SSL://host:9093`. Skip addresses without it."""
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return [str(item).strip().split("://", 1)[0] for item in items if "://" in str(item)]


T = TypeVar("T")


class OptionRow(NamedTuple):
    """A row of the table for documents."""

    name: str
    type: str
    default: str
    doc: str


def option(parse: Callable[[object], T], default: object, type_name: str, doc: str, *, is_secret: bool = False) -> Any:
    """Return a row of the table, a dataclass field.

    `default` is parsed like the value of a caller. If `is_secret`, no error and no `repr` shows the value.
    """
    metadata = {"parse": parse, "type": type_name, "default": default, "doc": doc, "is_secret": is_secret}
    if default is None:
        return field(default=None, metadata=metadata, repr=not is_secret)
    return field(default=parse(default), metadata=metadata, repr=not is_secret)


def key_of(field_name: str) -> str:
    return field_name.replace("_", ".")


def field_name_of(key: str) -> str:
    return key.replace(".", "_")


def table_of(settings: Any) -> dict[str, Any]:
    """Return key → dataclass field, for a class with fields made by `option`."""
    return {key_of(f.name): f for f in fields(settings)}


def parse_value(key: str, value: object, metadata: Mapping[str, Any]) -> object:
    """Return the parsed value. Raises ConfigError with the key, and with the value unless that may be secret."""
    try:
        return metadata["parse"](value)
    except RefusalError as refusal:
        given = "***" if metadata.get("is_secret") else shown(value)
        raise ConfigError(f"`{key}`={given} {refusal}.", setting=key) from None


def row_of(key: str, metadata: Mapping[str, Any]) -> OptionRow:
    default = metadata["default"]
    text = "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
    return OptionRow(key, metadata["type"], text, metadata["doc"])


_MOST_EDITS: Final = 2
_LEAST_RATIO: Final = 0.76
"""Least similarity by difflib. At 0.75 session.timeout.ms of the consumer would lead to transaction.timeout.ms."""


def nearest(given: str, known: Collection[str]) -> str | None:
    """Return the known name that `given` probably means, or None if no name is near.

    A name is near with at most two edits, or if it is very similar. Two swapped neighbours count as one edit.
    """
    as_long = (name for name in known if abs(len(name) - len(given)) <= _MOST_EDITS)
    edits, name = min(((_edits(given, name), name) for name in as_long), default=(_MOST_EDITS + 1, ""))
    if edits <= _MOST_EDITS:
        return name
    return next(iter(difflib.get_close_matches(given, known, n=1, cutoff=_LEAST_RATIO)), None)


def _edits(one: str, other: str) -> int:
    """Return the number of letters inserted, deleted, replaced, or swapped with a neighbour."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]
