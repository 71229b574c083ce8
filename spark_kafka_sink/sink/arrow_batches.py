"""How much Spark hands over to a task at once: its part on the driver, before the query starts, and the task's.

Spark cuts an Arrow batch at 10,000 rows or 64 MB. Both suit this sink badly: a Python worker holds two batches, one in
use and one that is read, and with large values they are more than all the rest of it; while of small rows 10,000 are
few where a topic has hundreds of partitions, because a batch costs something for every partition that it goes to. So
the bytes are the limit.

To know them Spark asks its Arrow writer for the sizes of all its buffers before every row. With headers, vectors in
vectors, that is half of what the JVM does. There the limit is one of rows, and a large row counts for as many as it is
long: `padded` puts rows without contents behind it, one for every 512 bytes, and `without_padding` takes them out
again. (Rows without headers would gain a sixth by that where they have 100 bytes, and lose as much where they have a
thousand: Spark copies what comes out of an explode.)

A data source has no say in Spark's limits, and gets its 10,000 rows: `joined` makes larger batches of small ones. The
copy takes 17 us a thousand rows of 120 bytes, and 10 MB. It saves as much with 4 partitions, and 250 us with 200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from spark_kafka_sink.record.arrow_arrays import marked
from spark_kafka_sink.sink.frame import HEADERS, KEY, TOPIC, VALUE

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
RECORDS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
IS_RECORD: Final = "is_record"
"""The column that tells records from padding."""

_BYTES_OF_A_ROW: Final = 512
_OF_PADDED_ROWS: Final = {BYTES: (1 << 31) - 1, RECORDS: 7_168}
"""The greatest number means no limit of bytes: Spark then counts rows alone."""
_OF_ROWS: Final = {BYTES: 3_900_000, RECORDS: 32_768}
"""A batch of more than 4 MiB would be mapped and unmapped each time (record/heap.py), and take twice as much in the
JVM, whose vectors grow by doubling.
"""


@contextmanager
def batch_limits(df: DataFrame) -> Iterator[DataFrame]:
    """`df` as it should go through mapInArrow, with limits of about 4 MB for queries that this thread begins inside. A
    limit that somebody has set in the session stays.

    Ours are local properties of the thread, which Spark takes to a query's tasks along with the session's settings: no
    other thread's query sees them. Spark Connect has none; there Spark's own limits hold, with padding.
    """
    session = df.sparkSession
    free = [name for name in (BYTES, RECORDS) if session.conf.get(name, None) is None]
    context = _context(session)
    is_padded = len(free) == 2 and (context is None or HEADERS in df.columns)
    limits = _OF_PADDED_ROWS if is_padded else _OF_ROWS
    properties = {} if context is None else {name: str(limits[name]) for name in free}
    with _local_properties(context, properties):
        yield padded(df) if is_padded else df


def _context(session: object) -> SparkContext | None:
    """None in Spark Connect."""
    from pyspark.sql import SparkSession as ClassicSession

    return session.sparkContext if isinstance(session, ClassicSession) else None


@contextmanager
def _local_properties(context: SparkContext | None, properties: Mapping[str, str]) -> Iterator[None]:
    if context is None:
        yield
        return
    before = {name: context.getLocalProperty(name) for name in properties}
    for name, value in properties.items():
        context.setLocalProperty(name, value)
    try:
        yield
    finally:
        for name, earlier in before.items():
            context.setLocalProperty(name, earlier)  # type: ignore[arg-type]  # None takes it out


def padded(df: DataFrame) -> DataFrame:
    """`df`, which has passed `frame.projection`, with the column IS_RECORD: a row whose text and bytes take more than
    512 bytes is followed by one row of nulls, for which it is false, for every 512 of them.
    """
    # as text headers take more bytes than they do as Arrow columns, not fewer
    texts = {VALUE: VALUE, KEY: KEY, TOPIC: TOPIC, HEADERS: f"CAST({HEADERS} AS STRING)"}
    sizes = [f"coalesce(octet_length({text}), 0)" for name, text in texts.items() if name in df.columns]
    rows = f"CAST(({' + '.join(sizes)}) DIV {_BYTES_OF_A_ROW} AS INT)"
    # most rows are of the first kind: a constant array
    marks = f"if({rows} = 0, array(true), concat(array(true), array_repeat(false, {rows})))"
    contents = [f"if({IS_RECORD}, `{name}`, NULL) AS `{name}`" for name in df.columns]
    return df.selectExpr("*", f"explode({marks}) AS {IS_RECORD}").selectExpr(*contents, IS_RECORD)


def without_padding(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The records of a batch, in their order; text and bytes are not copied. Used by the task's thread."""
    place = batch.schema.get_field_index(IS_RECORD)
    if place < 0:
        return batch
    is_record = batch.column(place)
    if is_record.true_count == len(is_record):
        return batch
    columns = {name: marked(batch.column(at), is_record) for at, name in enumerate(batch.schema.names) if at != place}
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def joined(batches: Iterable[pa.RecordBatch], is_worth_it: Callable[[], bool]) -> Iterator[pa.RecordBatch]:
    """The rows of `batches` in batches as `write` gets them, where what comes is smaller; larger ones come as they are.
    Batches of one schema alone are put together. After the first whole `is_worth_it` is asked whether to go on so: else
    the others come as they are. Used by the task's thread.
    """
    batches = iter(batches)
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        its_rows, its_size = batch.num_rows, batch.nbytes
        if waiting and (_is_much(rows + its_rows, size + its_size) or batch.schema != waiting[0].schema):
            yield _one_of(waiting)
            rows = size = 0
            if not is_worth_it():
                waiting.append(batch)
                del batch
                yield _one_of(waiting)
                break
        waiting.append(batch)
        rows += its_rows
        size += its_size
        if _is_much(rows + its_rows, size + its_size):  # with another one like this
            del batch
            yield _one_of(waiting)
            rows = size = 0
            if not is_worth_it():
                break
    yield from batches
    if waiting:
        yield _one_of(waiting)


def _is_much(rows: int, size: int) -> bool:
    return rows > _OF_ROWS[RECORDS] or size > _OF_ROWS[BYTES]


def _one_of(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Takes them out of the list, which would keep their memory while the whole is at work."""
    whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    batches.clear()
    return whole
