"""The Python processes in which a Spark application runs its tasks."""

from __future__ import annotations

import psutil


def python_workers(driver_pid: int) -> list[psutil.Process]:
    """Return the children of PySpark's daemon, which is a child of the driver's JVM."""
    found = []
    for child in psutil.Process(driver_pid).children(recursive=True):
        try:
            parent = child.parent()
            if parent is not None and all("pyspark.daemon" in each.cmdline() for each in (child, parent)):
                found.append(child)
        except psutil.Error:  # it has just ended
            continue
    return found
