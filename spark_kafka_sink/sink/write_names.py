"""The prefixes of exactly-once batch writes that were given none: made once, and used again by later writes.

Brokers keep each transactional id and each group for days, so that a new prefix for each write would leave as many as
there are writes times tasks. A name belongs to one write at a time. It is given back only after its write was
committed and that was noted: then no transaction of it is open, and no decision of it waits. The name of a write that
failed, or whose process died, is never used again, because errors tell the operator to settle that write by its name.

`KafkaSink.write` keeps free names in its process. The data source's writes run in several workers, which share the
application's local directory: a free name is an empty file there, and the worker that deletes the file has the name.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_ONE_OFF: Final = re.compile("spark-kafka-sink-[0-9a-f]{32}")
_SUFFIX: Final = ".free"

_FREE: Final[list[str]] = []
os.register_at_fork(after_in_child=_FREE.clear)  # else parent and child would write under one name


def one_off_prefix() -> str:
    """Make a prefix that no write has had."""
    return f"spark-kafka-sink-{uuid.uuid4().hex}"


def is_one_off(prefix: str) -> bool:
    """Tell whether it is one of `one_off_prefix`; the prefixes of streams are shorter."""
    return _ONE_OFF.fullmatch(prefix) is not None


def take_name() -> str:
    """Return a prefix that this process has free, or else a new one. Any thread."""
    try:
        return _FREE.pop()
    except IndexError:
        return one_off_prefix()


def give_back(prefix: str) -> None:
    """Keep a prefix of `take_name` for a later write. Only for a write that was committed. Any thread."""
    _FREE.append(prefix)


def take_shared_name() -> str | None:
    """Return a prefix that the application's workers have free, None where they have none or share no directory."""
    folder = _folder()
    if folder is None:
        return None
    try:
        for path in sorted(folder.glob(f"spark-kafka-sink-*{_SUFFIX}")):
            name = path.name.removesuffix(_SUFFIX)
            if is_one_off(name) and _is_deleted(path):
                return name
    except OSError as error:
        log.warning("The write gets a new name, because the names to use again cannot be read: %s", error)
    return None


def share_name(prefix: str) -> None:
    """Keep a prefix for a later write of any worker of the application. Only for a write that was committed."""
    folder = _folder()
    if folder is None:
        return
    try:
        (folder / f"{prefix}{_SUFFIX}").touch()
    except OSError as error:
        log.warning("The name %s cannot be kept for a later write, which gets a new one: %s", prefix, error)


def _is_deleted(path: Path) -> bool:
    """Delete the file; False where another worker was first."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _folder() -> Path | None:
    """Spark's directory of this application, which Spark deletes when the application ends."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Path(folder) if folder else None
