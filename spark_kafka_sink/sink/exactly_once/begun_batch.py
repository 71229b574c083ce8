"""The batch that a stream's driver has begun, from the planning worker to the worker that aborts it.

Spark aborts a stream's batch on a new writer in another process. Where no task has finished, Spark hands that writer
nothing of what the driver began. Both processes have the application's local directory.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from spark_kafka_sink.sink.exactly_once.messages import Mandate

log = logging.getLogger(__name__)


def remember_begun(mandate: Mandate) -> None:
    """Keep the mandate for `begun_batch`. Without a local directory, or a usable one, nothing is kept."""
    path = _path(mandate.prefix)
    if path is None:
        return
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(mandate.to_json())
        new.replace(path)
    except OSError as error:
        log.warning("A batch of %s that is stopped stays open until its timeout: %s", mandate.prefix, error)


def begun_batch(prefix: str) -> Mandate | None:
    """The mandate that this application began last under the prefix, None where nothing is known.

    It may be that of a batch that was committed: `ExactlyOnceDriver.abort` ends nothing then.
    """
    path = _path(prefix)
    try:
        return None if path is None else Mandate.from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError):  # nothing was kept, or not by this release
        return None


def _path(prefix: str) -> Path | None:
    """In Spark's directory of this application, which Spark deletes when the application ends."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Path(folder) / f"spark-kafka-sink-{hashlib.sha256(prefix.encode()).hexdigest()}" if folder else None
