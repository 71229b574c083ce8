"""Habits of Spark's Python worker that the sink works around: late acknowledgements, long walks of the garbage
collector, logs that are not shown, errors that are shown twice, and no way to the user's process.

A worker is forked from a daemon. It runs one task after another, and a data source's planning workers run the driver's
part. Each function may be called in any process.
"""

from __future__ import annotations

import gc
import logging
import os
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from pickle import PickleError
from typing import Any, Final

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.network.acknowledgements import acknowledge, can_acknowledge

_DESCRIPTORS: Final = Path("/proc/self/fd")
MANY_MODULES: Final = 100
_package_log = logging.getLogger("spark_kafka_sink")


# ---- acknowledgements ------------------------------------------------------------------------------------------------


def acknowledge_now() -> int:
    """Acknowledge the data that came in over this process's TCP connections. Return how many descriptors they have.

    Spark sends a worker a task and, right behind it, the task's rows, with Nagle's algorithm (RFC 896): data that does
    not fill a segment, of 64 KB here, waits until all earlier data is acknowledged. The worker has nothing to answer
    yet, so its system delays the acknowledgement (RFC 1122, 4.2.3.2), Linux for 40 ms. Without this call a task of a
    few thousand rows waits that long for its rows.

    All connections are acknowledged, because nothing tells Spark's from the others. For those it is an early packet.
    """
    if not can_acknowledge():
        return 0
    count = 0
    for descriptor in _sockets():
        try:
            count += acknowledge(descriptor)
        except OSError:  # its owner has closed it meanwhile
            continue
    return count


def _sockets() -> Iterator[int]:
    """Yield this process's sockets; none if the system does not show them, as without /proc."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return
    for name in names:
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)
        except OSError:  # closed meanwhile
            continue


# ---- its end ---------------------------------------------------------------------------------------------------------


def stays() -> bool:
    """Return whether this worker stays for other tasks after one that succeeds: spark.python.worker.reuse."""
    return bool(os.environ.get("SPARK_REUSE_WORKER"))


# ---- garbage collector -----------------------------------------------------------------------------------------------


class LoadedModules:
    """Keeps the garbage collector from walking imported modules, which stay permanently.

    PySpark makes two tracked objects of every row, and a block of rows makes some for each partition, so the collector
    runs all the time. To walk all modules each time would cost more than everything else done for a row. A data
    source's worker imports pandas when its first task is done: without the second freeze that is a tenth of its
    processor time with 200 partitions.
    """

    def __init__(self) -> None:
        self._frozen = 0

    def freeze(self, modules: int) -> None:
        """Freeze all objects at the begin of a task; `modules` are loaded. Frozen objects are never collected, so this
        is done only if there are many new modules, a few times in a process's life.
        """
        if modules - self._frozen >= MANY_MODULES:
            gc.collect()  # garbage that was frozen would stay
            gc.freeze()
            self._frozen = modules


_LOADED: Final = LoadedModules()


def freeze_modules() -> None:
    """Keep the collector from walking the modules that this process has imported so far."""
    _LOADED.freeze(len(sys.modules))


# ---- logs ------------------------------------------------------------------------------------------------------------


def show_reports() -> None:
    """Show the sink's logs from INFO on, on stderr, if this worker has no logging that shows them.

    The stderr of a planning worker is the driver's.
    """
    if _package_log.level == logging.NOTSET:
        _package_log.setLevel(logging.INFO)
    if not _package_log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s kafka_sink: %(message)s", "%y/%m/%d %H:%M:%S")
        )
        _package_log.addHandler(handler)


# ---- errors ----------------------------------------------------------------------------------------------------------


def of_pickling(error: KafkaError) -> KafkaError:
    """Return `error` as an error of pickling too, with the same class name, facts, cause and traceback.

    PySpark's serializer (pyspark.serializers.CloudPickleSerializer.dumps) lets a PickleError pass. For every other
    error it prints the traceback, and raises a PicklingError that repeats the text behind "Could not serialize object".
    """
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    both: Any = type(kind.__name__, (kind, PickleError), names)
    found: KafkaError = both.__new__(both, *error.args)  # without __init__, whose arguments differ by class
    found.__dict__.update(error.__dict__)
    found.__cause__ = error.__cause__
    return found.with_traceback(error.__traceback__)


# ---- reports ---------------------------------------------------------------------------------------------------------

REPORTS: Final = "spark-kafka-sink-reports"
"""The folder in the application's local directory that has a folder for each `ReportListener`."""


def report_folder() -> Path | None:
    """Return the folder of the listeners that wait for reports; None if there was never a listener. The JVM, the
    user's process and the data source's workers have the same SPARK_LOCAL_DIRS on the driver.
    """
    local = _local_folder()
    folder = None if local is None else local / REPORTS
    return folder if folder is not None and folder.is_dir() else None


def _local_folder() -> Path | None:
    """Return Spark's directory of this application, which the driver's processes share."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Path(local) if local else None


# ---- from one of the driver's processes to another -------------------------------------------------------------------


def digest(text: str) -> str:
    """Return a short name for a text, such as a checkpoint location, that nobody should read."""
    return uuid.uuid5(uuid.NAMESPACE_URL, text).hex[:12]


def remember(kind: str, key: str, text: str) -> None:
    """Keep a text about the running batch of the stream `key` for `remembered`. Raises OSError.

    Spark commits and aborts a stream's batch in another process of the driver, and gives it only what the tasks
    returned: nothing, if none has finished.
    """
    folder = _local_folder()
    if folder is not None:
        write_whole(folder / f"spark-kafka-sink-{kind}-{key}", text)


def write_whole(path: Path, text: str) -> None:
    """Write a file that others see only when it is whole. Leave nothing if that fails. Raises OSError."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text, "utf-8")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def remembered(kind: str, key: str) -> str | None:
    """Return the last text that was kept; None if none was."""
    folder = _local_folder()
    try:
        return None if folder is None else (folder / f"spark-kafka-sink-{kind}-{key}").read_text("utf-8")
    except (OSError, ValueError):
        return None
