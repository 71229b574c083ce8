"""How much Spark hands over to a task at once. The driver's thread that starts the query.

Spark fills an Arrow batch up to 10,000 rows or 64 MB. Both suit this sink badly: a Python worker holds two batches, one
in use and one that is read, and with large values they are more than all the rest of it; while of small rows 10,000 are
few where a topic has hundreds of partitions, because a batch costs something for every partition that it goes to. So
the bytes are the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LIMITS: Final = {
    "spark.sql.execution.arrow.maxBytesPerBatch": 4 << 20,
    "spark.sql.execution.arrow.maxRecordsPerBatch": 32_768,
}


@contextmanager
def batches_by_size(session: SparkSession) -> Iterator[None]:
    """Queries of `session` that begin inside get batches of about 4 MB; but a limit that somebody has set stays.

    The settings are the session's, and are taken out again. Two threads may be inside at once: the second finds them
    set and leaves them alone, so that nothing stays, at the price of Spark's own limits for a query that begins just
    as the first one leaves.
    """
    ours = {key: limit for key, limit in _LIMITS.items() if session.conf.get(key, None) is None}
    for key, limit in ours.items():
        session.conf.set(key, str(limit))
    try:
        yield
    finally:
        for key in ours:
            session.conf.unset(key)
