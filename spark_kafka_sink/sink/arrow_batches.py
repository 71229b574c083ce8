"""How much Spark hands over to a task at once. The driver's thread that starts the query.

Spark fills an Arrow batch up to 10,000 rows or 64 MB, and a Python worker holds two of them, one in use and one that
is read; with large values that is more than all the rest of it. What is sent goes in smaller blocks anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_BYTES_PER_BATCH: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
BATCH_BYTES: Final = 4 << 20


@contextmanager
def small_batches(session: SparkSession) -> Iterator[None]:
    """Queries of `session` that begin inside get batches of at most BATCH_BYTES, or of one row that is larger; unless
    somebody has set that limit.

    The setting is the session's, and is taken out again. Two threads may be inside at once: the second finds it set
    and leaves it alone, so that nothing stays, at the price of larger batches for a query that begins just as the
    first one leaves.
    """
    if session.conf.get(MAX_BYTES_PER_BATCH, None) is not None:
        yield
        return
    session.conf.set(MAX_BYTES_PER_BATCH, str(BATCH_BYTES))
    try:
        yield
    finally:
        session.conf.unset(MAX_BYTES_PER_BATCH)
