"""PySpark 4.0's data sources get rows. Its worker's generator, and another one."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, StructField, StructType, TimestampType, UserDefinedType
from support.fresh_process import run_strictly
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.column_format import FormatSettings
from spark_kafka_sink.serialization.record_formats import ResolvedFormat, ResolvedFormats
from spark_kafka_sink.serialization.schemas import column_format
from spark_kafka_sink.sink.column_formats import with_column_formats
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.row_interface import arrow_batches, rows_of_connect, write_rows

BATCHES = [pa.RecordBatch.from_pydict({"value": ["a", "b"]}), pa.RecordBatch.from_pydict({"value": ["c"]})]
SPARKS = """
def rows_of(iterator):
    def batch_to_rows():
        for batch in iterator:
            for value in batch.column(0).to_pylist():
                yield Row(value=value)

    return batch_to_rows()
"""


def rows_of(batches: Any, file: str = "/x/pyspark.zip/pyspark/sql/worker/write_into_data_source.py") -> Iterator[Row]:
    """Rows as PySpark 4.0's worker makes them, by the code of this file."""
    names: dict[str, Any] = {"Row": Row}
    exec(compile(SPARKS, file, "exec"), names)
    made: Iterator[Row] = names["rows_of"](batches)
    return made


def test_batches_of_sparks_generator_are_found_before_a_row_is_made() -> None:
    found = arrow_batches(rows_of(iter(BATCHES)))
    assert found is not None
    assert [id(batch) for batch in found] == [id(batch) for batch in BATCHES]


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(iter(BATCHES), "/x/a_vendors/worker.py"),
        iter([Row(value="a")]),
        (row for row in [Row(value="a")]),
        rows_of(5),
    ],
    ids=["another file", "no generator", "another generator", "no batches"],
)
def test_rows_of_another_kind_have_no_batches(rows: Iterator[Row]) -> None:
    assert arrow_batches(rows) is None


def test_generator_that_has_started_is_left_alone() -> None:
    rows = rows_of(iter(BATCHES))
    assert next(rows).value == "a"
    assert arrow_batches(rows) is None
    assert [row.value for row in rows] == ["b", "c"]


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks go back at 3 o'clock on 26 October 2025."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


PLAIN = SinkConfig.from_options({"kafka.bootstrap.servers": "h1:9092", "topic": "t"})


def delivery_of(producer: ScriptedProducer) -> TaskDelivery:
    return TaskDelivery(PLAIN, ScriptedPool(producer))


@pytest.mark.usefixtures("in_berlin")
def test_rows_are_written_with_their_times() -> None:
    producer = ScriptedProducer()
    delivery = delivery_of(producer)
    times = [datetime.datetime(2025, 10, 26, 1, 59), datetime.datetime(2025, 10, 26, 3), None]
    write_rows(delivery, (Row(value=str(number), timestamp=moment) for number, moment in enumerate(times)))
    (sent,) = producer.sent
    assert sent.columns.timestamp_ms.to_pylist() == [1_761_436_740_000, 1_761_444_000_000, None]
    assert delivery.counts.acknowledged == 3


@pytest.mark.usefixtures("in_berlin")
def test_time_that_comes_twice_is_refused_with_the_number_of_its_row() -> None:
    rows = [Row(value="a", timestamp=datetime.datetime(2025, 10, 26, hour, 30)) for hour in (1, 2)]
    with pytest.raises(
        SchemaError, match=r"timestamp of row 1 is 2025-10-26 02:30:00.*foreachBatch\(sink\.write_batch\)"
    ):
        write_rows(delivery_of(ScriptedProducer()), rows)


MOMENT = pa.timestamp("us", "UTC")
NESTED = pa.struct(
    [
        ("at", MOMENT),
        ("local", pa.timestamp("us")),
        ("in_list", pa.list_(pa.struct([("at", MOMENT)]))),
        ("in_map", pa.map_(pa.string(), MOMENT)),
    ]
)


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize("place", ["at", "in_list", "in_map"])
def test_a_nested_time_that_comes_twice_is_refused(place: str) -> None:
    """Bug: only the column `timestamp` was looked at. A time in a struct was written as one of the two."""
    once, twice = (datetime.datetime(2025, 10, 26, hour, 30) for hour in (1, 2))
    wrap: dict[str, Any] = {
        "at": lambda moment: moment,
        "in_list": lambda moment: [None, Row(at=moment)],
        "in_map": lambda moment: {"k": moment},
    }

    def row(moment: datetime.datetime) -> Row:
        parts = {"at": None, "local": twice, "in_list": None, "in_map": None, place: wrap[place](moment)}
        return Row(value=Row(**parts))

    producer = ScriptedProducer()
    config = SinkConfig.from_options({"kafka.bootstrap.servers": "h1:9092", "topic": "t"})
    formatted = ResolvedFormat(column_format(FormatSettings("value", "json"), NESTED), NESTED)
    used = replace(config, column_formats=ResolvedFormats(formatted))
    write_rows(TaskDelivery(used, ScriptedPool(producer)), [Row(value=None), row(once)])
    assert "2025-10-25T23:30:00.000Z" in producer.sent[0].rows("value")[1][0].decode()
    with pytest.raises(SchemaError, match="value of row 1 has the time 2025-10-26 02:30:00"):
        write_rows(TaskDelivery(used, ScriptedPool(ScriptedProducer())), [Row(value=None), row(twice)])


class Named(NamedTuple):
    value: str
    timestamp: datetime.datetime | None = None


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize("make", [Row, dict, Named])
def test_a_time_that_comes_twice_is_refused_in_the_rows_of_spark_connect(make: Callable[..., Any]) -> None:
    """Bug: PySpark's conversion of Connect's rows loses `fold`, and the second of two times became the first one."""
    once, twice = (datetime.datetime(2025, 10, 26, hour, 30) for hour in (1, 2))
    sure = [make(value="a", timestamp=once), make(value="a", timestamp=twice.astimezone(datetime.UTC))]
    assert [*rows_of_connect(sure, PLAIN)] == sure
    with pytest.raises(SchemaError, match=r"timestamp of row 1 is 2025-10-26 02:30:00.*Use sink\.write\(df\)"):
        list(rows_of_connect([sure[0], make(value="b", timestamp=twice)], PLAIN))


def test_rows_of_spark_connect_without_a_time_are_left_alone() -> None:
    rows = [Row(value="a"), {"value": "b", "timestamp": None}, Row("no names"), None]
    assert [*rows_of_connect(rows, PLAIN)] == rows


class Day(UserDefinedType):
    """A type of a user: an object that is stored as a struct with a time."""

    @classmethod
    def sqlType(cls) -> StructType:  # noqa: N802 - PySpark's
        return StructType([StructField("at", TimestampType())])

    def serialize(self, obj: Any) -> tuple[Any]:
        return (obj["at"],)


@pytest.mark.usefixtures("in_berlin")
def test_a_time_that_comes_twice_in_a_user_defined_type_is_refused() -> None:
    """Bug: only the object was looked at, which is no struct. Its time was written as the first of the two."""
    once, twice = (datetime.datetime(2025, 10, 26, hour, 30) for hour in (1, 2))
    schema = StructType([StructField("value", StructType([StructField("days", ArrayType(Day()))]))])
    config = SinkConfig.from_options(
        {"kafka.bootstrap.servers": "h1:9092", "topic": "t", "value.format": "json", "value.json.timeZone": "UTC"}
    )
    used = replace(with_column_formats(config, schema), user_types=(("value", schema["value"].dataType),))
    sure = [Row(value=None), Row(value=Row(days=[{"at": once}, None]))]
    assert [*rows_of_connect(sure, used)] == sure
    with pytest.raises(SchemaError, match="value of row 1 has the time 2025-10-26 02:30:00"):
        list(rows_of_connect([sure[0], Row(value=Row(days=[None, {"at": twice}]))], used))


@pytest.mark.usefixtures("in_berlin")
def test_a_time_that_comes_twice_is_found_by_its_name() -> None:
    """Bug: fields were taken in the order of an Avro schema, which is another one than the row's."""
    data_type = pa.struct([("a", pa.int64()), ("at", MOMENT)])
    formatted = ResolvedFormat(column_format(FormatSettings("value", "json"), data_type), data_type)
    used = replace(PLAIN, column_formats=ResolvedFormats(formatted))
    with pytest.raises(SchemaError, match="value of row 0 has the time 2025-10-26 02:30:00"):
        list(rows_of_connect([Row(value=Row(at=datetime.datetime(2025, 10, 26, 2, 30), a=1))], used))


WRITER_OF_4_0 = """
import pickle
import sys
from types import ModuleType

import pyarrow as pa
import pyspark.sql.datasource as sources

del sources.DataSourceArrowWriter, sources.DataSourceStreamArrowWriter
from pyspark.sql import Row
from pyspark.sql.types import StringType, StructType

from spark_kafka_sink.sink import data_source
from support.scripted_producer import ScriptedPool, ScriptedProducer
from unit.sink.test_row_interface import BATCHES, rows_of

schema = StructType().add("value", StringType())
source = data_source.KafkaSinkDataSource({"kafka.bootstrap.servers": "h:1", "topic": "t"})
interfaces = {source.writer: sources.DataSourceWriter, source.streamWriter: sources.DataSourceStreamWriter}
for make, interface in interfaces.items():
    for rows in (rows_of(iter(BATCHES)), rows_of(iter(BATCHES), "/x/a_vendors/worker.py")):
        producer = ScriptedProducer()
        data_source.process_pool = lambda: ScriptedPool(producer)
        writer = pickle.loads(pickle.dumps(make(schema, False)))
        assert isinstance(writer, interface)
        told = writer.write(rows)
        print([text.decode() for sent in producer.sent for text in sent.columns.value.cast(pa.binary()).to_pylist()])
"""


def test_both_writers_of_pyspark_4_0_write_every_row() -> None:
    done = run_strictly("import sys\nsys.path.insert(0, 'tests')\n" + WRITER_OF_4_0)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["['a', 'b', 'c']"] * 4
