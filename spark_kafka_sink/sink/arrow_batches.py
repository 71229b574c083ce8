"""How much Spark hands over to a task at once: its part on the driver, before the query starts, and the task's.

Spark cuts an Arrow batch at 10,000 rows or 64 MB. Both suit this sink badly: a Python worker holds two batches, one in
use and one that is read, and with large values they are more than all the rest of it; while of small rows 10,000 are
few where a topic has hundreds of partitions, because a batch costs something for every partition that it goes to. So
the bytes are the limit.

To know them Spark would ask its Arrow writer for the sizes of all its buffers before every row: a third of what it
does for records of 100 bytes, half of it with headers, which are vectors in vectors. So the limit is one of rows, and a
large row counts for as many as it is long: `padded` puts rows without contents behind it, one for so many bytes, and
`without_padding` takes them out again. A row of padding costs half as much as being asked, so few rows should have any:
how large records are is known from the write before. A guess that is wrong costs time; the limit holds all the same.
After a small write, as of a micro-batch, Spark is let ask: that costs less than the larger plan. Its limit of rows then
stays.

A data source has no say in Spark's limits, and gets its 10,000 rows: `joined` makes larger batches of small ones. The
copy takes 17 us a thousand rows of 120 bytes, and 10 MB. It saves as much with 4 partitions, and 250 us with 200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from spark_kafka_sink.record.arrow import marked
from spark_kafka_sink.sink.running_query import context_of_thread, running_query
from spark_kafka_sink.sink.schema import HEADERS, KEY, TOPIC, VALUE

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
RECORDS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
IS_RECORD: Final = "is_record"
"""The column that tells records from padding."""
_PADDING: Final = "padding"

_NO_BYTES: Final = (1 << 31) - 1
"""Of all limits of bytes the one at which Spark counts rows alone."""
_MOST_BYTES: Final = 3_900_000
"""A batch of more than 4 MiB would be mapped and unmapped each time (record/arrow.py), and take twice as much in the
JVM, whose vectors grow by doubling.
"""
_MOST_ROWS: Final = 32_768


class PaddedRows(NamedTuple):
    """A limit of rows that is one of bytes."""

    row_bytes: int
    """What a row may have without padding behind it, which is one row for every so many bytes more."""
    most: int
    """Rows of a batch."""


_UNKNOWN: Final = 512
"""Bytes that a row may have without padding, where nobody knows the sizes: with twice as many, two rows of padding take
as long as Spark's own look."""
_OF_SPARK: Final = PaddedRows(_UNKNOWN, 10_000)
"""With Spark's own limit, where none can be set for one query."""
_MOST_OF_A_ROW: Final = 4_096
"""So that batches of small rows that come after large ones still have a thousand of them. A row of padding for as many
bytes costs nothing that shows."""
_ROOM: Final = 1.25
_ROOM_OF_EACH: Final = 28
"""Times, of the mean and so many bytes more: for rows that are larger than it, of which few shall have padding."""
_WORTH_A_PLAN: Final = 100_000
"""Records from which on rows are counted: the larger plan takes the driver 20 ms, and a record less 0.15 us."""


class LastWrite(NamedTuple):
    """What a write to a topic took: at least one record, and their bytes together."""

    records: int
    bytes: int


class LastWrites:
    """The last write to each topic (None: to topics of a column). Any thread of the driver may call."""

    def __init__(self) -> None:
        self._by_topic: dict[str | None, LastWrite] = {}

    def learn(self, topic: str | None, records: int, size: int) -> None:
        """A write has ended. One of nothing says nothing about the next."""
        if records:
            self._by_topic[topic] = LastWrite(records, size)

    def of(self, topic: str | None) -> LastWrite | None:
        """None where there was none."""
        return self._by_topic.get(topic)


def padded_rows(last: LastWrite | None) -> PaddedRows | None:
    """For a write that is like the last one; None: it is too small for it."""
    if last is not None and last.records < _WORTH_A_PLAN:
        return None
    wanted = _UNKNOWN if last is None else math.ceil((last.bytes / last.records + _ROOM_OF_EACH) * _ROOM)
    row_bytes = min(max(wanted, math.ceil(_MOST_BYTES / _MOST_ROWS)), _MOST_OF_A_ROW)
    return PaddedRows(row_bytes, _MOST_BYTES // row_bytes)


@contextmanager
def batch_limits(df: DataFrame, last: LastWrite | None = None) -> Iterator[DataFrame]:
    """`df` as it should go through mapInArrow, with limits of about 4 MB for queries that this thread begins inside. A
    limit that somebody has set in the session stays. `last`: the write that this one is likely to be like.

    The limits are a whole query's: Python functions that `df` itself is made by get their rows under them. There Spark
    goes on counting bytes, of their rows too, of which nobody knows how large they are, and its limit of rows stays.

    Ours are local properties of the thread, which Spark takes to a query's tasks along with the session's settings: no
    other thread's query sees them. Spark Connect has none, and with PYSPARK_PIN_THREAD=false they are anybody's; there
    Spark's own limits hold, with padding.
    """
    session = df.sparkSession
    free = [name for name in (BYTES, RECORDS) if session.conf.get(name, None) is None]
    context = context_of_thread(session)
    rows = None
    if len(free) == 2:
        rows = _OF_SPARK if context is None else padded_rows(last)
        if rows is not None and context is not None and _may_run_python(df, context):
            rows = None
    limits = {BYTES: _MOST_BYTES} if rows is None else {BYTES: _NO_BYTES, RECORDS: rows.most}
    properties = {} if context is None else {name: str(limits[name]) for name in free if name in limits}
    with _local_properties(context, properties):
        yield df if rows is None else padded(df, rows)


def _may_run_python(df: DataFrame, context: SparkContext) -> bool:
    """Whether rows may go through Python before they are those of `df`. Not known, and so taken for true, of a table
    function (any generator) and of an RDD that is not a micro-batch.
    """
    plans = [df._jdf.queryExecution().analyzed()]
    leaves = plans[0].collectLeaves()
    if any(leaves.apply(at).getClass().getSimpleName().endswith("RDD") for at in range(leaves.size())):
        of_stream = _plan_of_stream(df, context)
        if of_stream is None:
            return True
        plans.append(of_stream)
    assert context._jvm is not None
    pattern = context._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    wanted = (pattern.PYTHON_UDF(), pattern.GENERATE())
    return any(plan.containsPattern(each) for plan in plans for each in wanted)


def _plan_of_stream(df: DataFrame, context: SparkContext) -> Any | None:
    """Of the streaming query whose thread this is, as in `foreachBatch`; None where there is none. The DataFrame of a
    micro-batch shows an RDD alone.
    """
    query = running_query(df, context)
    return None if query is None else query.logicalPlan()


@contextmanager
def _local_properties(context: SparkContext | None, properties: Mapping[str, str]) -> Iterator[None]:
    if context is None:
        yield
        return
    before = {name: context.getLocalProperty(name) for name in properties}
    try:
        for name, value in properties.items():
            context.setLocalProperty(name, value)
        yield
    finally:
        for name, earlier in before.items():
            context.setLocalProperty(name, earlier)  # type: ignore[arg-type]  # None takes it out


def padded(df: DataFrame, rows: PaddedRows) -> DataFrame:
    """`df`, which has passed `schema.projection`, with the column IS_RECORD: a row is followed by one row of nulls, for
    which it is false, for every `row_bytes` of its text and bytes, and at most by as many as end any batch.

    The numbers are entries of an array at a place that Spark does not work out beforehand, so that they are not in the
    code that it makes: else every change of theirs would have the JVM compile it anew, which takes it seconds.
    """
    names = df.columns
    # as text headers take more bytes than they do as Arrow columns, not fewer
    texts = {VALUE: VALUE, KEY: KEY, TOPIC: TOPIC, HEADERS: f"CAST({HEADERS} AS STRING)"}
    sizes = [f"coalesce(octet_length({text}), 0)" for name, text in texts.items() if name in names]
    row_bytes, most = (f"array({rows.row_bytes}, {rows.most})[spark_partition_id() & 0 | {place}]" for place in (0, 1))
    padding = f"CAST(least(({' + '.join(sizes)}) DIV {row_bytes}, {most}) AS INT) AS {_PADDING}"
    # most rows are of the first kind: a constant array
    marks = f"if({_PADDING} = 0, array(true), concat(array(true), array_repeat(false, {_PADDING})))"
    contents = [f"if({IS_RECORD}, `{name}`, NULL) AS `{name}`" for name in names]
    sized = df.selectExpr("*", padding)
    return sized.selectExpr(*names, f"explode({marks}) AS {IS_RECORD}").selectExpr(*contents, IS_RECORD)


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
    return rows > _MOST_ROWS or size > _MOST_BYTES


def _one_of(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Takes them out of the list, which would keep their memory while the whole is at work."""
    if len(batches) == 1:
        return batches.pop()
    # concat_batches does it in one call, but pyarrow has it from 19 on only
    whole = pa.concat_arrays([batch.to_struct_array() for batch in batches])
    batches.clear()
    return pa.RecordBatch.from_struct_array(whole)
