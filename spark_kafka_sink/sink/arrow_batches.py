"""How much Spark hands over to a task at once. The driver's thread that starts the query.

Spark fills an Arrow batch up to 10,000 rows or 64 MB, and a Python worker holds two of them, one in use and one that
is read; with large values that is more than all the rest of it. What is sent goes in smaller blocks anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_BYTES_PER_BATCH: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
BATCH_BYTES: Final = 4 << 20

_UNITS: Final = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
_SIZE: Final = re.compile(r"(\d+)\s*([bkmgtp]?)b?", re.IGNORECASE)


@contextmanager
def small_batches(session: SparkSession) -> Iterator[None]:
    """Queries of `session` that begin inside get batches of at most BATCH_BYTES, or of one row that is larger.

    The setting is the session's, put back afterwards. Two threads may be inside at once: whoever finds it low leaves
    it alone, so that what is put back is always what it was before, at the price of larger batches for a query that
    begins just then.
    """
    before = session.conf.get(MAX_BYTES_PER_BATCH, None)
    if before is None or _num_bytes(before) <= BATCH_BYTES:  # PySpark before 4.1 has no such setting
        yield
        return
    session.conf.set(MAX_BYTES_PER_BATCH, str(BATCH_BYTES))
    try:
        yield
    finally:
        session.conf.set(MAX_BYTES_PER_BATCH, before)


def _num_bytes(size: str) -> int:
    """Bytes of a size as Spark writes it: 64MB, 67108864, 67108864b. 0 for what is none of these."""
    match = _SIZE.fullmatch(size.strip())
    return 0 if match is None else int(match[1]) << _UNITS[match[2].lower()]
