"""The size of the Arrow batches that Spark hands to a task. The first part runs on the driver, before the query starts;
the second part in the task.

Spark cuts an Arrow batch at 10,000 rows or 64 MB. Both are wrong for this sink. A Python worker holds two batches, one
in use and one that is read; with large values they take more memory than everything else in it. For small rows 10,000
are few if a topic has hundreds of partitions, because a batch costs time for each of its partitions. So bytes are the
limit.

To count bytes, Spark would ask its Arrow writer for the sizes of all its buffers before every row: a third of its work
for records of 100 bytes, and half of it with headers, which are vectors in vectors. So the limit is one of rows, and a
large row counts as several: `padded` adds empty rows after it, one for a number of bytes, and `without_padding` removes
them. A row of padding costs half as much as the question, so few rows should have any: the write before tells the size
of records. A wrong guess costs time, but the limit still holds. After a small write, such as a micro-batch, Spark asks
for the sizes: that costs less than the larger plan. It also costs less for records of 256 bytes and more, which the
larger plan copies once more. Spark's limit of rows then stays. Older Spark, such as 3.5, has no limit of bytes: there
padding is the only one.

A data source cannot set Spark's limits, and gets 10,000 rows: `joined` makes larger batches of small ones. The copy
takes 17 us for a thousand rows of 120 bytes, and 10 MB. It saves as much with 4 partitions, and 250 us with 200.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql.types import BinaryType, DataType, StructType

from spark_kafka_sink.record.arrow import marked
from spark_kafka_sink.sink.pyspark_versions import OUTPUT_RECORDS, refuse_doubled_rows
from spark_kafka_sink.sink.running_query import context_of_thread, running_query
from spark_kafka_sink.sink.schema import HEADERS, KEY, TEXTS, TOPIC, VALUE

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
RECORDS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
IS_RECORD: Final = "is_record"
"""The column that is false for padding."""
_PADDING: Final = "padding"

_NO_BYTES: Final = (1 << 31) - 1
"""The only limit of bytes with which Spark counts rows only."""
_MOST_BYTES: Final = 3_900_000
"""A larger batch than 4 MiB would be mapped and unmapped each time (record/arrow.py), and take twice the memory in the
JVM, whose vectors grow by doubling.
"""
_MOST_ROWS: Final = 32_768


class PaddedRows(NamedTuple):
    """A limit of rows that works as one of bytes."""

    row_bytes: int
    """Bytes of a row without padding. Each further group of as many bytes gets one row of padding."""
    most: int
    """The most rows of a batch."""


_UNKNOWN: Final = 512
"""Bytes of a row without padding, if sizes are not known. At twice as many, two rows of padding take as long as Spark's
question for sizes.
"""
_OF_SPARK: Final = PaddedRows(_UNKNOWN, 10_000)
"""With Spark's own limit, if no limit can be set for one query."""
_MOST_OF_A_ROW: Final = 4_096
"""The most bytes for one row of padding, so that batches of small rows after large ones still have a thousand rows. At
this size, padding costs no measurable time.
"""
_ROOM: Final = 1.25
_ROOM_OF_EACH: Final = 28
"""Rows up to 1.25 times the mean of the last write plus 28 bytes have no padding, so that few rows have some."""
_WORTH_A_PLAN: Final = 100_000
"""From this number of records on rows are counted: the larger plan takes the driver 20 ms, and saves 0.15 us a record.
"""

_LARGE: Final = 256
"""From this mean of bytes on, Spark's question for sizes costs less than padding: the JVM and Python take 1.0 instead
of 1.1 us a record of 300 bytes, and 1.0 instead of 1.3 us a record of 1 KB, but 0.9 instead of 0.8 us one of 100 bytes.
"""


_MOST_TOPICS: Final = 1_000
"""That are known: a driver that runs for weeks may write to a new topic every hour."""


class LastWrite(NamedTuple):
    """The records of the last write to a topic, at least one, and their bytes."""

    records: int
    bytes: int


class LastWrites:
    """The last write to each topic (None: to topics of a column). Any thread of the driver may call."""

    def __init__(self) -> None:
        self._by_topic: dict[str | None, LastWrite] = {}

    def learn(self, topic: str | None, records: int, size: int) -> None:
        """Note a write that has ended. One without records says nothing about the next."""
        if not records:
            return
        self._by_topic.pop(topic, None)  # so that it is the newest one
        self._by_topic[topic] = LastWrite(records, size)
        for old in [*self._by_topic][:-_MOST_TOPICS]:
            self._by_topic.pop(old, None)  # another thread may have taken it out

    def of(self, topic: str | None) -> LastWrite | None:
        """Return the last write to the topic; None if there was none."""
        return self._by_topic.get(topic)


def padded_rows(last: LastWrite | None) -> PaddedRows | None:
    """Return the limit for a write that is like the last one; None if the last one was too small for it."""
    if last is not None and last.records < _WORTH_A_PLAN:
        return None
    expected_bytes = _UNKNOWN if last is None else math.ceil((last.bytes / last.records + _ROOM_OF_EACH) * _ROOM)
    row_bytes = min(max(expected_bytes, math.ceil(_MOST_BYTES / _MOST_ROWS)), _MOST_OF_A_ROW)
    return PaddedRows(row_bytes, _MOST_BYTES // row_bytes)


@contextmanager
def batch_limits(df: DataFrame, last: LastWrite | None = None, formatted: Collection[str] = ()) -> Iterator[DataFrame]:
    """The DataFrame that goes through mapInArrow. Sets limits of about 4 MB for queries that this thread starts inside
    the `with`. A limit that the user has set in the session stays. `last`: the last write, which this one is probably
    like. `formatted`: the columns that have a format. If one has arrays, maps or variants, Spark counts bytes where it
    can: their size is not seen without a look at each element. So it does for very many texts, and for fields whose
    names differ only in case, which SQL cannot tell apart.

    Limits hold for the whole query, also for Python functions that `df` is made by. The size of their rows is not
    known, so with such functions Spark counts bytes, and its limit of rows stays. Older Spark cannot count bytes: there
    padding fills the batches up to the limit of rows in force.

    The limits are local properties of the thread, which Spark hands to a query's tasks with the session's settings: no
    other thread's query has them. Spark Connect has no local properties, and with PYSPARK_PIN_THREAD=false threads
    share them; then Spark's own limits hold, with padding.

    Raises ConfigError for a setting with which Spark would hand over what the tasks report twice.
    """
    session = df.sparkSession
    refuse_doubled_rows(session.version, session.conf.get(OUTPUT_RECORDS, None))
    free = [name for name in (BYTES, RECORDS) if session.conf.get(name, None) is None]
    context = context_of_thread(session)
    rows = None
    if len(free) == 2 and not (formatted and session.conf.isModifiable(BYTES) and _is_uncounted(df, formatted)):
        is_counted = _is_cheap_to_count(df, last, formatted) and session.conf.isModifiable(BYTES)
        rows = _OF_SPARK if context is None else None if is_counted else padded_rows(last)
        if rows is not None and context is not None and may_run_python(df, context):
            rows = None
        if rows is not None and formatted and context is not None:
            rows = _with_room_for(rows, [df.schema[name].dataType for name in formatted])
    if rows is None and not session.conf.isModifiable(BYTES):
        free = []
        rows = padded_under(int(session.conf.get(RECORDS) or 0))
    given = None if rows is None else _with_padding(df, rows, formatted)
    if given is None:
        given, rows = df, None
    limits = {BYTES: _MOST_BYTES} if rows is None else {BYTES: _NO_BYTES, RECORDS: rows.most}
    properties = {} if context is None else {name: str(limits[name]) for name in free if name in limits}
    with _local_properties(context, properties):
        yield given


def _with_padding(df: DataFrame, rows: PaddedRows, formatted: Collection[str]) -> DataFrame | None:
    """Return `padded`; None if Spark does not take its SQL. Before 4.2 a function of the session hides one of Spark's
    with the same name, and may have other types. And names of fields may be patterns (quotedRegexColumnNames).
    """
    try:
        return padded(df, rows, formatted)
    except AnalysisException as error:
        log.info("The rows are not padded: %s", error)
        return None


def _is_cheap_to_count(df: DataFrame, last: LastWrite | None, formatted: Collection[str]) -> bool:
    """Return whether few vectors hold large rows, if the write is like the last one."""
    is_large = last is not None and last.bytes >= _LARGE * last.records
    return is_large and not formatted and HEADERS not in df.columns


def padded_under(most: int) -> PaddedRows | None:
    """The padding that limits bytes under a given limit of rows; None if the user has set rows without a limit."""
    return PaddedRows(max(_UNKNOWN, math.ceil(_MOST_BYTES / most)), most) if most > 0 else None


def may_run_python(df: DataFrame, context: SparkContext, also: Collection[str] = ()) -> bool:
    """Return whether `df` may be made by Python functions. True also for a table function (any generator), and for an
    RDD that is not a micro-batch: the plan does not show what made it. `also`: further patterns of plans to look for,
    names in Spark's TreePattern.
    """
    plans = plans_of(df, context)
    if plans is None:
        return True
    assert context._jvm is not None
    pattern = context._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    patterns = [getattr(pattern, name)() for name in ("PYTHON_UDF", "GENERATE", *also)]
    return any(plan.containsPattern(each) for plan in plans for each in patterns)


def plans_of(df: DataFrame, context: SparkContext) -> list[Any] | None:
    """Return Spark's logical plans that `df` is made by: its own, and for a micro-batch that of its query. None for
    another RDD, which does not show what made it.
    """
    plans = [df._jdf.queryExecution().analyzed()]
    if any(leaf.getClass().getSimpleName().endswith("RDD") for leaf in leaves_of(plans[0])):
        of_stream = plan_of_stream(df, context)
        if of_stream is None:
            return None
        plans.append(of_stream)
    return plans


def leaves_of(plan: Any) -> Iterator[Any]:
    leaves = plan.collectLeaves()
    return (leaves.apply(at) for at in range(leaves.size()))


def plan_of_stream(df: DataFrame, context: SparkContext) -> Any | None:
    """Return the plan of the streaming query that this thread belongs to, as in `foreachBatch`; None if none exists.
    The DataFrame of a micro-batch shows only an RDD.
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


def _is_uncounted(df: DataFrame, columns: Collection[str]) -> bool:
    return any(not _is_counted(df.schema[name].dataType) for name in columns if name in df.columns)


def _is_counted(data_type: DataType) -> bool:
    """Return whether the bytes of a column are the sum of its fields', which SQL can name and add."""
    leaves = [leaf for _, leaf in _leaves("", data_type)]
    return not any(type(leaf).__name__ in _UNCOUNTED for leaf in leaves) and _can_add(data_type, leaves)


def _can_add(data_type: DataType, leaves: Iterable[DataType]) -> bool:
    return sum(_has_size(leaf) for leaf in leaves) <= _MOST_SIZES and not _has_twins(data_type)


def _has_size(leaf: DataType) -> bool:
    return _is_text(leaf) or type(leaf).__name__ in _UNCOUNTED


def _has_twins(data_type: DataType) -> bool:
    """Return whether a struct has two fields that Spark may take for the same one, because their names are equal or
    differ only in case.
    """
    if not isinstance(data_type, StructType):
        return False
    names = {_folded(field.name) for field in data_type.fields}
    return len(names) < len(data_type.fields) or any(_has_twins(field.dataType) for field in data_type.fields)


def _folded(name: str) -> str:
    """Return the same text for names that Java's `equalsIgnoreCase` takes for equal: it goes by single characters, so
    that a Turkish İ equals an i.
    """
    return "".join(letter.upper()[0].lower()[0] for letter in name)


def _leaves(path: str, data_type: DataType) -> Iterator[tuple[str, DataType]]:
    """Yield the fields of a column that are no structs, each as SQL, with its type."""
    if isinstance(data_type, StructType):
        for field in data_type.fields:
            name = field.name.replace("`", "``")
            yield from _leaves(f"{path}.`{name}`", field.dataType)
    else:
        yield path, data_type


def _with_room_for(rows: PaddedRows, types: Iterable[DataType]) -> PaddedRows:
    """Return the limit for columns of these types, which are larger in Arrow than the records of the last write if the
    format is a dense one. A row of padding takes as many bytes as a row of empty texts: so much has any row.
    """
    leaves = [leaf for data_type in types for _, leaf in _leaves("", data_type)]
    least_bytes = sum(map(_fixed_bytes, leaves))
    expected_bytes = least_bytes + (_TEXT - _OFFSET_BYTES) * sum(map(_is_text, leaves))
    row_bytes = max(min(max(rows.row_bytes, math.ceil(expected_bytes * _ROOM)), _MOST_OF_A_ROW), least_bytes)
    return rows if row_bytes == rows.row_bytes else PaddedRows(row_bytes, _MOST_BYTES // row_bytes)


def _is_text(leaf: DataType) -> bool:
    return isinstance(leaf, (*TEXTS, BinaryType))


def _fixed_bytes(leaf: DataType) -> int:
    """Return the bytes that any value of a field has in Arrow, also a null."""
    return _OFFSET_BYTES if _is_text(leaf) else _WIDTHS.get(type(leaf).__name__, _WIDEST)


def _size_of(path: str, data_type: DataType) -> str:
    """Return SQL for the bytes of a column in Arrow, not counting marks of nulls."""
    fixed = 0
    texts = []
    leaves = [*_leaves(path, data_type)]
    for leaf, leaf_type in leaves:
        if type(leaf_type).__name__ in _UNCOUNTED:
            # its text takes about as many bytes as its Arrow columns; only for a Spark that cannot count bytes
            texts.append(_octets(leaf, f"CAST({leaf} AS STRING)"))
            continue
        fixed += _fixed_bytes(leaf_type)
        if _is_text(leaf_type):
            texts.append(_octets(leaf, leaf))
    if not _can_add(data_type, (leaf_type for _, leaf_type in leaves)):
        texts = [_octets(path, f"CAST({path} AS STRING)")]  # numbers count twice
    return " + ".join([*texts, str(fixed)])


def _octets(column: str, text: str) -> str:
    """Return SQL for the bytes of `text`, a text of `column`: 0 for a null."""
    return f"CASE WHEN {column} IS NULL THEN 0 ELSE octet_length({text}) END"


_UNCOUNTED: Final = ("ArrayType", "MapType", "VariantType")
"""Classes of PySpark, which may be missing in an older one: their size is not seen without a look at each element."""
_MOST_SIZES: Final = 100
"""Fields whose sizes are added one by one. Each sum is a level of a tree: with 600 the JVM has no stack left."""
_OFFSET_BYTES: Final = 4
_TEXT: Final = 24
"""About the bytes of a text or its offset, in a column with many fields."""
_WIDEST: Final = 8
_WIDTHS: Final[Mapping[str, int]] = {
    "NullType": 0,
    "BooleanType": 1,
    "ByteType": 1,
    "ShortType": 2,
    "IntegerType": 4,
    "DateType": 4,
    "FloatType": 4,
    "DecimalType": 16,
}
"""Class of PySpark → the bytes of a value in Arrow. Others have _WIDEST."""


def padded(df: DataFrame, rows: PaddedRows, formatted: Collection[str] = ()) -> DataFrame:
    """Add padding and the column IS_RECORD to `df`, which has passed `schema.projection`. After each row comes one row
    of nulls, for which IS_RECORD is false, for every `row_bytes` of its texts and bytes, and of the fields of its
    structs; at most as many as end any batch.

    The numbers are elements of an array at an index that Spark does not evaluate beforehand, so they are not in the
    code that Spark generates. Else the JVM would compile that code again after each change, which takes seconds.

    No record may be lost if a function of the session hides one of Spark's and gives nulls. So conditions are CASE,
    which nothing hides, and a row whose padding is not known is a record without padding.
    """
    names = df.columns
    # headers as text take at least as many bytes as in Arrow columns
    texts = {VALUE: VALUE, KEY: KEY, TOPIC: TOPIC, HEADERS: f"CAST({HEADERS} AS STRING)"}
    types = {name: df.schema[name].dataType for name in formatted}
    sizes = [
        _size_of(name, types[name]) if name in types else _octets(name, text)
        for name, text in texts.items()
        if name in names
    ]
    number = "spark_partition_id()"
    row_bytes, most = (
        f"CASE WHEN {number} >= 0 THEN array({rows.row_bytes}, {rows.most})[{number} & 0 | {place}] END"
        for place in (0, 1)
    )
    padding = f"({' + '.join(sizes)}) DIV {row_bytes} AS {_PADDING}"
    count = f"CASE WHEN {_PADDING} < {most} THEN CAST({_PADDING} AS INT) ELSE {most} END"
    # most rows have no padding: a constant array
    marks = f"CASE WHEN {_PADDING} > 0 THEN array(true) || array_repeat(false, {count}) ELSE array(true) END"
    is_record = f"{IS_RECORD} IS NOT FALSE"
    contents = [f"CASE WHEN {is_record} THEN `{name}` END AS `{name}`" for name in names]
    sized = df.selectExpr("*", padding)
    marked_rows = sized.selectExpr(*names, f"explode_outer({marks}) AS {IS_RECORD}")
    return marked_rows.selectExpr(*contents, f"{is_record} AS {IS_RECORD}")


def without_padding(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the records of a batch, in their order; text and bytes are not copied. Only in the task's thread."""
    place = batch.schema.get_field_index(IS_RECORD)
    if place < 0:
        return batch
    is_record = batch.column(place)
    if is_record.true_count == len(is_record):
        return batch
    columns = {name: marked(batch.column(at), is_record) for at, name in enumerate(batch.schema.names) if at != place}
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def joined(batches: Iterable[pa.RecordBatch], is_worth_it: Callable[[], bool]) -> Iterator[pa.RecordBatch]:
    """Join small batches of one schema to batches of about the size that `write` gets. Larger ones are not changed.
    After the first joined batch `is_worth_it` says whether to go on; if not, the other batches are not changed. Only in
    the task's thread.
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
    """Join the batches, and empty the list, which would keep their memory while the joined one is in use."""
    if len(batches) == 1:
        return batches.pop()
    # pyarrow has concat_batches only from 19 on
    whole = pa.concat_arrays([batch.to_struct_array() for batch in batches])
    batches.clear()
    return pa.RecordBatch.from_struct_array(whole)
