"""Rows that do not fit the schema of their format become dead letters: by columns and by rows, with and without the
kernel. A dead letter has as JSON text what has no bytes in its format.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest
from pyspark.sql import Row
from support.generated_columns import random_array, random_type
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink.common.errors import SchemaError, SerializationError, TooManyDeadLettersError
from spark_kafka_sink.producer.writes import WriteReport
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.fingerprint import MODULUS, fingerprint
from spark_kafka_sink.record.kernel import has_kernel
from spark_kafka_sink.record.sifting import TopicLimits
from spark_kafka_sink.serialization import column_encoder
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import ColumnFormat, FormatSettings, JsonOptions
from spark_kafka_sink.serialization.record_formats import ResolvedFormat, ResolvedFormats
from spark_kafka_sink.serialization.schemas import column_format
from spark_kafka_sink.sink.arrow_writer import write_all
from spark_kafka_sink.sink.dead_letters import DeadLetters, TaskPlace
from spark_kafka_sink.sink.delivery import TaskDelivery, report_rows
from spark_kafka_sink.sink.formatted_rows import FormattedWriter
from spark_kafka_sink.sink.options import SinkConfig

OPTIONS: Final = {
    "kafka.bootstrap.servers": "h:1",
    "topic": "orders",
    "errors.tolerance": "all",
    "errors.deadletterqueue.topic.name": "dead",
}
BY_KERNEL, BY_PYTHON = "kernel", "python"


@pytest.fixture(
    params=[pytest.param(BY_KERNEL, marks=pytest.mark.skipif(not has_kernel(), reason="no kernel")), BY_PYTHON]
)
def emitter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with the kernel's emitters and with those of plain Python."""
    if request.param == BY_PYTHON:
        monkeypatch.setattr(column_encoder, "KERNEL", None)
    return str(request.param)


def resolved(field: str, name: str, data_type: pa.DataType, schema: str | None = None, **more: Any) -> ResolvedFormat:
    return ResolvedFormat(column_format(FormatSettings(field, name, schema, **more), data_type), data_type)


class Bench:
    """A task with dead letters on a scripted producer."""

    def __init__(
        self,
        value: ResolvedFormat | None,
        key: ResolvedFormat | None = None,
        options: Mapping[str, str] | None = None,
        *,
        transaction: Any = None,
        most_bytes: int | None = None,
    ) -> None:
        self.producer = ScriptedProducer()
        self.pool = ScriptedPool(self.producer)
        plain = SinkConfig.from_options({**OPTIONS, **(options or {})})
        self.config = replace(plain, column_formats=ResolvedFormats(value, key))
        letters = DeadLetters(
            self.config, lambda _topic, _highest, _largest=None: TopicLimits(4, most_bytes), TaskPlace(3, "7")
        )
        self.delivery = TaskDelivery(self.config, self.pool, transaction, letters)

    def write(self, *batches: Mapping[str, pa.Array]) -> Bench:
        write_all(self.delivery, [pa.RecordBatch.from_arrays([*each.values()], [*each]) for each in batches])
        return self

    def write_rows(self, rows: list[Any], *, one_by_one: bool = False) -> Bench:
        assert self.config.column_formats is not None
        writer = FormattedWriter(self.delivery, self.config.column_formats)
        if one_by_one:  # foreach
            for row in rows:
                writer.add(row)
        else:  # foreachPartition
            writer.write(rows)
        writer.finish()
        return self

    def sent(self, *names: str) -> list[tuple[Any, ...]]:
        return [row for sent in self.producer.sent if sent.topic == "orders" for row in sent.rows(*names)]

    def dead(self) -> list[dict[str, Any]]:
        found = []
        for sent in self.producer.sent:
            if sent.topic == "dead":
                for key, value, headers in sent.rows("key", "value", "headers"):
                    own = {each["key"].decode(): each["value"] for each in headers}
                    found.append({"key": key, "value": value, **own})
        return found

    def report(self) -> WriteReport:
        return WriteReport.of(report_rows(self.delivery.report), 1.0)


MESSAGE: Final = "__sink.errors.exception.message"
AS_JSON: Final = "__sink.errors.as.json"
ROW: Final = "__sink.errors.row"
LEFT_OUT: Final = "__sink.errors.left.out"


# ---- each kind of row that does not fit ------------------------------------------------------------------------------


def record(**fields: Any) -> str:
    return json.dumps(
        {"type": "record", "name": "r", "fields": [{"name": name, "type": each} for name, each in fields.items()]}
    )


def fixed_decimal(size: int) -> dict[str, Any]:
    return {"type": "fixed", "name": "d", "size": size, "logicalType": "decimal", "precision": 4, "scale": 1}


def null_key(rows: int) -> pa.Array:
    """A struct with a map, whose second row has a null key. Arrow takes one only in a dictionary."""
    keys = pa.DictionaryArray.from_arrays(pa.array([0, 1, *[0] * (rows - 2)], pa.int8()), pa.array(["a", None]))
    fields = [pa.field("key", keys.type, nullable=False), pa.field("value", pa.int64())]
    entries = pa.StructArray.from_arrays([keys, pa.array(range(rows), pa.int64())], fields=fields)
    offsets = pa.py_buffer(b"".join(number.to_bytes(4, "little") for number in range(rows + 1)))
    made = pa.Array.from_buffers(pa.map_(*fields), rows, [None, offsets], children=[entries])
    return pa.StructArray.from_arrays([made], names=["m"])


JSON_NUMBER: Final = json.dumps({"type": "object", "properties": {"a": {"type": "number"}}})
JSON_REQUIRED: Final = json.dumps({"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}})
JSON_ITEMS: Final = json.dumps({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}})

# name → format, schema, Arrow type of the field a, a good value, a bad one, path, reason, the bad one's JSON text
KINDS: Final[dict[str, tuple[str, str, pa.DataType, Any, Any, str, str, str]]] = {
    "null": (
        "avro", record(a="long"), pa.int64(), 5, None,
        "value.a", "it is null, and the schema allows no null there", "null",
    ),
    "null in a list": (
        "avro", record(a={"type": "array", "items": "string"}), pa.list_(pa.string()), ["x"], ["x", None],
        "value.a.element", "it is null, and the schema allows no null there", '["x",null]',
    ),
    "null in a map": (
        "avro", record(a={"type": "map", "values": "long"}), pa.map_(pa.string(), pa.int64()), [("k", 1)],
        [("k", 1), ("l", None)],
        "value.a.value", "it is null, and the schema allows no null there", '{"k":1,"l":null}',
    ),
    "symbol": (
        "avro", record(a={"type": "enum", "name": "e", "symbols": ["RED"]}), pa.string(), "RED", 'B"LUE',
        "value.a", "the enum 'e' has no such symbol", r'"B\"LUE"',
    ),
    "size": (
        "avro", record(a={"type": "fixed", "name": "f", "size": 2}), pa.binary(), b"ab", b"abc",
        "value.a", "the value has not the 2 bytes of the fixed type 'f'", '"YWJj"',
    ),
    "not finite": (
        "json-schema", JSON_NUMBER, pa.float64(), 0.5, float("nan"),
        "value.a", "NaN and infinity are no numbers in JSON", '"NaN"',
    ),
    "infinite": (
        "json-schema", JSON_NUMBER, pa.float32(), 0.5, float("-inf"),
        "value.a", "NaN and infinity are no numbers in JSON", '"-Infinity"',
    ),
    "required": (
        "json-schema", JSON_REQUIRED, pa.string(), "x", None,
        "value.a", "it is null, and the JSON Schema allows no null there", "null",
    ),
    "item": (
        "json-schema", JSON_ITEMS, pa.list_(pa.int32()), [1], [1, None],
        "value.a.element", "it is null, and the JSON Schema allows no null there", "[1,null]",
    ),
    "null in a repeated field": (
        "protobuf", 'syntax = "proto3"; message R { repeated int64 a = 1; }', pa.list_(pa.int64()), [1], [1, None],
        "value.a.element", "it is null, and Protobuf has no null in lists and maps", "[1,null]",
    ),
    "null in a map field": (
        "protobuf", 'syntax = "proto3"; message R { map<string, int32> a = 1; }', pa.map_(pa.string(), pa.int32()),
        [("k", 1)], [("k", None)],
        "value.a.value", "it is null, and Protobuf has no null in lists and maps", '{"k":null}',
    ),
    "required field": (
        "protobuf", 'syntax = "proto2"; message R { required string a = 1; }', pa.string(), "x", None,
        "value.a", "it is null, and the schema allows no null there", "null",
    ),
    "value of an enum": (
        "protobuf", 'syntax = "proto3"; message R { E a = 1; } enum E { RED = 0; }', pa.string(), "RED", "BLUE",
        "value.a", "the enum 'E' has no such value", '"BLUE"',
    ),
    "unsigned": (
        "protobuf", 'syntax = "proto3"; message R { uint32 a = 1; }', pa.int64(), 5, -1,
        "value.a", "the number is out of the range of uint32", "-1",
    ),
}  # fmt: skip

LAYOUTS: Final[dict[str, str]] = {
    "one among good ones": "ggggbgggg",
    "the first": "bggg",
    "the last": "gggb",
    "several": "gbbgggbgb",
    "all": "bbbb",
    "one alone": "b",
    "beside nulls": "nbngnbn",
}
"""g: a good row, b: a bad one, n: a null."""


def cells_of(layout: str, good: Any, bad: Any) -> list[dict[str, Any] | None]:
    return [{"g": {"a": good}, "b": {"a": bad}, "n": None}[each] for each in layout]


def check_kind(bench: Bench, kind: str, layout: str, first: int = 0) -> None:
    """Check what a bench wrote. Rows have their number as key. `first`: the number of the layout's first row."""
    name, schema, data_type, good, _, path, reason, text = KINDS[kind]
    struct = pa.struct([("a", data_type)])
    encoder = ColumnEncoder(resolved("value", name, struct, schema).column_format, struct)
    (as_bytes,) = encoder.encode(pa.array([{"a": good}], struct)).values.to_pylist()
    assert bench.sent("key", "value") == [
        (b"%d" % row, as_bytes if each == "g" else None) for row, each in enumerate(layout) if each != "b"
    ]
    bad_rows = [row for row, each in enumerate(layout) if each == "b"]
    dead = bench.dead()
    assert [letter["key"] for letter in dead] == [b"%d" % row for row in bad_rows]
    for row, letter in zip(bad_rows, dead, strict=True):
        assert letter["value"] == f'{{"a":{text}}}'.encode()
        assert (letter["h"], letter[AS_JSON], letter[ROW]) == (b"%d" % row, b"value", b"%d" % (first + row))
        assert letter["__sink.errors.topic"] == b"orders"
        assert letter["__sink.errors.exception.class.name"] == b"spark_kafka_sink.common.errors.SerializationError"
        message = letter[MESSAGE].decode()
        assert message.startswith(f"{path}: ")
        assert reason in message
    report = bench.report()
    assert (report.records, report.dead_letters) == (len(layout) - len(bad_rows), len(bad_rows))


HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def batch_of(values: pa.Array) -> dict[str, pa.Array]:
    rows = range(len(values))
    return {
        "value": values,
        "key": pa.array([str(row) for row in rows]),
        "headers": pa.array([[{"key": "h", "value": b"%d" % row}] for row in rows], HEADERS),
    }


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=[*LAYOUTS])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("emitter")
def test_columns(kind: str, layout: str) -> None:
    name, schema, data_type, good, bad, *_ = KINDS[kind]
    struct = pa.struct([("a", data_type)])
    values = pa.array(cells_of(layout, good, bad), struct)
    check_kind(Bench(resolved("value", name, struct, schema)).write(batch_of(values)), kind, layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("emitter")
def test_columns_that_are_slices(kind: str) -> None:
    """Rows before and after the slice do not count, whatever they are."""
    name, schema, data_type, good, bad, *_ = KINDS[kind]
    struct, layout = pa.struct([("a", data_type)]), "gbgnbbg"
    whole = pa.array(cells_of("bgb" + layout + "bbg", good, bad), struct)
    before = batch_of(pa.array(cells_of("ggg", good, bad), struct))
    bench = Bench(resolved("value", name, struct, schema))
    columns = batch_of(pa.array(cells_of("gg" + layout, good, bad), struct))
    assert len(before["value"]) == 3
    sliced = {**{field: column.slice(2) for field, column in columns.items()}, "value": whole.slice(3, len(layout))}
    sliced["key"] = pa.array([str(row) for row in range(len(layout))])
    sliced["headers"] = batch_of(sliced["value"])["headers"]
    check_kind(bench.write(sliced), kind, layout)


def python_cell(value: Any, data_type: pa.DataType) -> Any:
    """A value as PySpark has it in its rows."""
    return dict(value) if value is not None and pa.types.is_map(data_type) else value


@pytest.mark.parametrize("one_by_one", [False, True], ids=["foreachPartition", "foreach"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=[*LAYOUTS])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("emitter")
def test_rows(kind: str, layout: str, one_by_one: bool) -> None:
    name, schema, data_type, good, bad, *_ = KINDS[kind]
    struct = pa.struct([("a", data_type)])
    cells = cells_of(layout, python_cell(good, data_type), python_cell(bad, data_type))
    rows = [
        Row(value=None if cell is None else Row(**cell), key=str(row), headers=[("h", b"%d" % row)])
        for row, cell in enumerate(cells)
    ]
    bench = Bench(resolved("value", name, struct, schema))
    check_kind(bench.write_rows(rows, one_by_one=one_by_one), kind, layout)


@pytest.mark.usefixtures("emitter")
def test_a_map_with_a_null_key_has_no_text() -> None:
    """JSON has no such object, so the dead letter has no value."""
    values = null_key(4)
    bench = Bench(resolved("value", "json", values.type)).write(batch_of(values))
    assert [key for (key,) in bench.sent("key")] == [b"0", b"2", b"3"]
    (letter,) = bench.dead()
    assert (letter["key"], letter["value"], letter["h"], AS_JSON in letter) == (b"1", None, b"1", False)
    assert letter[LEFT_OUT] == b"value", "else the null is written again as a tombstone"
    assert letter[MESSAGE].startswith(b"value.m.key: it is null")


@pytest.mark.usefixtures("emitter")
def test_text_that_is_no_utf_8_is_shown_as_json_has_it() -> None:
    texts = [b"plain", b"a\xffb"]
    strings = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())
    values = pa.StructArray.from_arrays([strings], names=["a"])
    bench = Bench(resolved("value", "protobuf", values.type)).write(batch_of(values))
    assert bench.sent("key", "value") == [(b"0", b"\n\5plain")]
    (letter,) = bench.dead()
    assert letter["value"] == b'{"a":"a\xef\xbf\xbdb"}'
    assert letter[MESSAGE] == b"value.a: the text is not UTF-8, which Protobuf demands"


@pytest.mark.usefixtures("emitter")
def test_a_decimal_above_its_precision() -> None:
    data_type = pa.decimal128(4, 1)
    numbers = pa.py_buffer(b"".join(number.to_bytes(16, "little", signed=True) for number in (15, 1_000_000, -15)))
    decimals = pa.Array.from_buffers(data_type, 3, [None, numbers])
    values = pa.StructArray.from_arrays([decimals], names=["a"])
    bench = Bench(resolved("value", "avro", values.type, record(a=fixed_decimal(2)))).write(batch_of(values))
    assert bench.sent("key", "value") == [(b"0", b"\0\x0f"), (b"2", b"\xff\xf1")]
    (letter,) = bench.dead()
    assert (letter["key"], letter["value"]) == (b"1", b'{"a":100000.0}')
    assert letter[MESSAGE] == b"value.a: the decimal has more digits than the schema allows"


@pytest.mark.usefixtures("emitter")
def test_a_time_that_its_unit_cannot_hold() -> None:
    values = pa.StructArray.from_arrays([pa.array([1_000, 1_001, 2_000], pa.time64("ns"))], names=["a"])
    schema = record(a={"type": "long", "logicalType": "time-micros"})
    bench = Bench(resolved("value", "avro", values.type, schema)).write(batch_of(values))
    assert bench.sent("key", "value") == [(b"0", b"\x02"), (b"2", b"\x04")]
    (letter,) = bench.dead()
    assert (letter["key"], letter["value"]) == (b"1", b'{"a":"00:00:00.000001001"}')
    assert b"its rest would be lost" in letter[MESSAGE]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["foreachPartition", "foreach"])
@pytest.mark.parametrize(
    ("data_type", "good", "bad", "reason"),
    [
        (pa.int32(), 1, 2**31, "value.a of row 2 does not fit into 32 bits."),
        (pa.decimal128(4, 1), Decimal("1.5"), Decimal("1000"), "value.a of row 2 does not fit into decimal(4,1)."),
        (pa.float32(), 1.5, 1e39, "value.a of row 2 is too large for a float of 32 bits."),
        (pa.string(), "ä", "\ud800", "value.a of row 2 is a str that is not valid Unicode"),
    ],
    ids=str,
)
def test_cells_of_rows_that_no_column_can_hold(
    data_type: pa.DataType, good: Any, bad: Any, reason: str, one_by_one: bool
) -> None:
    """There is no column of which JSON text could be made. The key is as it is for a good row."""
    value, key = pa.struct([("a", data_type)]), pa.struct([("k", pa.int32())])
    rows = [Row(value=Row(a=bad if row in (2, 5) else good), key=Row(k=row)) for row in range(6)]
    bench = Bench(resolved("value", "json", value), resolved("key", "json", key))
    bench.write_rows(rows, one_by_one=one_by_one)
    assert [at for (at,) in bench.sent("key")] == [b'{"k":%d}' % row for row in (0, 1, 3, 4)]
    first, second = bench.dead()
    assert (first["key"], first["value"], AS_JSON in first) == (b'{"k":2}', None, False)
    assert first[LEFT_OUT] == b"value", "else the null is written again as a tombstone"
    assert reason in first[MESSAGE].decode()
    assert (second["key"], second[ROW]) == (b'{"k":5}', b"5")


@pytest.mark.parametrize("one_by_one", [False, True], ids=["foreachPartition", "foreach"])
def test_a_header_without_a_name_is_a_dead_letter_by_rows(one_by_one: bool) -> None:
    """Bug: by rows with a format, such a header stopped the query although dead letters were on."""
    rows = [
        Row(value=Row(a=1), headers=[Row(key="h", value=b"x")]),
        Row(value=Row(a=2), headers=[Row(key=None, value=b"x")]),
        Row(value=Row(a=4), headers=None),
    ]
    bench = Bench(resolved("value", "json", pa.struct([("a", pa.int64())])))
    bench.write_rows(rows, one_by_one=one_by_one)
    assert bench.sent("value") == [(b'{"a":1}',), (b'{"a":4}',)]
    (letter,) = bench.dead()
    assert (letter["value"], letter[MESSAGE]) == (b'{"a":2}', b"a header has no name")


def test_without_dead_letters_a_header_without_a_name_fails_the_task_by_rows() -> None:
    bench = Bench(resolved("value", "json", pa.struct([("a", pa.int64())])))
    bench.delivery.letters = None
    with pytest.raises(SchemaError, match="A header key of row 1 is a NoneType"):
        bench.write_rows([Row(value=Row(a=1)), Row(value=Row(a=2), headers=[Row(key=None, value=b"x")])])


def test_a_cell_of_a_wrong_python_type_fails_the_task() -> None:
    """It is an error of the program, and every row may have it."""
    bench = Bench(resolved("value", "json", pa.struct([("a", pa.int32())])))
    with pytest.raises(SchemaError, match=r"value\.a of row 1 is a str; give an int"):
        bench.write_rows([Row(value=Row(a=2**40), key="k"), Row(value=Row(a="1"), key="k")])


# ---- key and value ---------------------------------------------------------------------------------------------------

NO_NULL: Final = record(a="long")
LONG: Final = pa.struct([("a", pa.int64())])


def by_columns(bench: Bench, rows: list[Row]) -> None:
    bench.write({name: pa.array([row[name] and row[name].asDict() for row in rows], LONG) for name in ("value", "key")})


def by_rows(bench: Bench, rows: list[Row]) -> None:
    bench.write_rows(rows)


@pytest.mark.parametrize("write", [by_columns, by_rows])
@pytest.mark.parametrize("location", ["prefix", "header"])
def test_only_what_does_not_fit_is_json(write: Callable[[Bench, list[Row]], None], location: str) -> None:
    """What fits has its bytes, with the schema's id where a good row has it."""
    parts = {}
    for number, field in enumerate(("value", "key")):
        made = resolved(field, "avro", LONG, NO_NULL)
        prefix = bytes([0, 0, 0, 0, number])
        more: dict[str, Any] = {"prefix": prefix} if location == "prefix" else {"header": (f"__{field}_id", prefix)}
        parts[field] = replace(made, column_format=replace(made.column_format, **more))
    bench = Bench(parts["value"], parts["key"])
    cells = [(1, 2), (None, 2), (1, None), (None, None)]
    write(bench, [Row(value=Row(a=value), key=Row(a=key)) for value, key in cells])
    of_value, of_key = (bytes([0, 0, 0, 0, number]) if location == "prefix" else b"" for number in range(2))
    assert bench.sent("value", "key") == [(of_value + b"\2", of_key + b"\4")]
    dead = bench.dead()
    null = b'{"a":null}'
    assert [(letter["value"], letter["key"]) for letter in dead] == [
        (null, of_key + b"\4"),
        (of_value + b"\2", null),
        (null, null),
    ]
    assert [set(letter[AS_JSON].decode().split(", ")) for letter in dead] == [{"value"}, {"key"}, {"value", "key"}]
    assert [letter[MESSAGE].split(b":")[0] for letter in dead] == [b"value.a", b"key.a", b"key.a"]
    if location == "header":
        has = [("__value_id" in letter, "__key_id" in letter) for letter in dead]
        assert has == [(False, True), (True, False), (False, False)]


def test_a_primitive_value_is_json_too() -> None:
    schema = json.dumps({"type": "enum", "name": "e", "symbols": ["A"]})
    bench = Bench(resolved("value", "avro", pa.string(), schema)).write({"value": pa.array(["A", "B", None])})
    assert bench.sent("value") == [(b"\0",), (None,)]
    assert [letter["value"] for letter in bench.dead()] == [b'"B"']


def test_times_are_printed_in_the_zone_of_the_format() -> None:
    """Null fields are there, even if the format leaves them out."""
    data_type = pa.struct([("at", pa.timestamp("us", "UTC")), ("a", pa.int64()), ("b", pa.string())])
    schema = json.dumps({"type": "object", "required": ["a"]})
    zone = JsonOptions(time_zone="Europe/Berlin")
    rows = [{"at": datetime.datetime(2024, 7, 1, tzinfo=datetime.UTC), "a": None, "b": None}]
    bench = Bench(resolved("value", "json-schema", data_type, schema, json=zone))
    bench.write({"value": pa.array(rows, data_type)})
    (letter,) = bench.dead()
    assert letter["value"] == b'{"at":"2024-07-01T02:00:00.000+02:00","a":null,"b":null}'


def test_json_text_that_makes_a_dead_letter_too_large_is_left_out() -> None:
    data_type = pa.struct([("a", pa.int64()), ("b", pa.string())])
    schema = record(a="long", b="string")
    bench = Bench(
        resolved("value", "avro", data_type, schema), None, {"kafka.max.request.size": "9000"}, most_bytes=5_000
    )
    rows = [{"a": None, "b": "x" * size} for size in (10, 6_000, 10_000)]
    bench.write({"value": pa.array(rows, data_type), "key": pa.array(["k"] * 3)})
    small, *large = bench.dead()
    assert small["value"] == b'{"a":null,"b":"xxxxxxxxxx"}'
    assert LEFT_OUT not in small
    assert [(letter["value"], letter[LEFT_OUT], AS_JSON in letter) for letter in large] == [(None, b"value", False)] * 2


@pytest.mark.parametrize("write", ["columns", "rows"])
def test_parts_and_blocks_keep_their_dead_letters(write: str) -> None:
    """Columns go in parts of 16 MB, and rows in chunks and blocks of 1 MiB."""
    data_type = pa.struct([("a", pa.int64()), ("b", pa.string())])
    formats = resolved("value", "avro", data_type, record(a="long", b="string"))
    bench = Bench(formats, options={"kafka.max.request.size": str(1 << 20)})
    large, bad = "x" * 300_000, {0, 1, 3, 54, 55, 56, 60, 130, 199}
    cells = [(None if row in bad else row, large if row % 2 else str(row)) for row in range(200)]
    if write == "columns":
        rows = [{"a": a, "b": b} for a, b in cells]
        bench.write({"value": pa.array(rows, data_type), "key": pa.array([str(row) for row in range(200)])})
    else:
        bench.write_rows([Row(value=Row(a=a, b=b), key=str(row)) for row, (a, b) in enumerate(cells)])
    assert [int(key) for (key,) in bench.sent("key")] == [row for row in range(200) if row not in bad]
    dead = bench.dead()
    assert [(int(letter["key"]), int(letter[ROW])) for letter in dead] == [(row, row) for row in sorted(bad)]
    assert [json.loads(letter["value"]) for letter in dead] == [{"a": None, "b": cells[row][1]} for row in sorted(bad)]


def test_dead_letters_at_the_ends_of_blocks_of_rows() -> None:
    """A block has 8,192 rows, and a chunk fewer."""
    formats = resolved("value", "avro", LONG, NO_NULL)
    bench = Bench(formats, options={"errors.deadletterqueue.max.rows": "100000"})
    is_bad = [row % 8_192 in (0, 1, 8_190, 8_191) or row % 97 == 0 for row in range(20_000)]
    bench.write_rows([Row(value=Row(a=None if bad else row), key=str(row)) for row, bad in enumerate(is_bad)])
    assert [int(key) for (key,) in bench.sent("key")] == [row for row, bad in enumerate(is_bad) if not bad]
    dead = bench.dead()
    assert [(int(letter["key"]), int(letter[ROW])) for letter in dead] == [
        (n, n) for n, bad in enumerate(is_bad) if bad
    ]


def test_a_chunk_of_rows_that_is_encoded_in_parts() -> None:
    """A part has 16 MB at most, and the first chunk 32 rows."""
    data_type = pa.struct([("a", pa.int64()), ("b", pa.string())])
    formats = resolved("value", "avro", data_type, record(a="long", b="string"))
    bench = Bench(formats, options={"kafka.max.request.size": str(1 << 20)})
    text = "x" * 900_000
    bench.write_rows([Row(value=Row(a=None if row in (3, 25) else row, b=text), key=str(row)) for row in range(32)])
    assert [int(key) for (key,) in bench.sent("key")] == [row for row in range(32) if row not in (3, 25)]
    assert [json.loads(letter["value"]) for letter in bench.dead()] == [{"a": None, "b": text}] * 2


def test_a_key_is_json_if_no_column_can_hold_the_value() -> None:
    value, key = pa.struct([("n", pa.int32())]), LONG
    bench = Bench(resolved("value", "json", value), resolved("key", "avro", key, NO_NULL))
    bench.write_rows([Row(value=Row(n=2**31), key=Row(a=None))])
    (letter,) = bench.dead()
    assert (letter["key"], letter["value"]) == (b'{"a":null}', None)
    assert (letter[AS_JSON], letter[LEFT_OUT]) == (b"key", b"value")
    assert b"does not fit into 32 bits" in letter[MESSAGE]


def test_key_and_value_that_nothing_can_hold_are_both_left_out() -> None:
    key = pa.struct([("n", pa.int32())])
    bench = Bench(resolved("value", "json", key), resolved("key", "json", key))
    bench.write_rows([Row(value=Row(n=2**31), key=Row(n=2**31)), Row(value=Row(n=1), key=Row(n=2**31))])
    both, only_key = bench.dead()
    assert (both["key"], both["value"], both[LEFT_OUT]) == (None, None, b"value, key")
    assert (only_key["key"], only_key["value"], only_key[LEFT_OUT]) == (None, b'{"n":1}', b"key")


@pytest.mark.usefixtures("emitter")
def test_a_row_that_an_option_would_mend_is_no_dead_letter() -> None:
    """The sink does not know the zone in which the variant's timestamp is to be printed."""
    parts = [pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False, {"variant": "true"})]
    small, time = b"\x0c\5", b"\x30" + bytes(8)
    cells = [pa.array([small, time]), pa.array([b"\1\0\0"] * 2)]
    values = pa.StructArray.from_arrays([pa.StructArray.from_arrays(cells, fields=parts)], names=["event"])
    bench = Bench(resolved("value", "json", values.type))
    with pytest.raises(SerializationError, match=r"value\.event of row 1: .* Set value\.json\.timeZone"):
        bench.write({"value": values})
    assert bench.producer.sent == []


def test_a_row_with_two_faults_has_the_reason_of_its_schema() -> None:
    bench = Bench(resolved("value", "avro", LONG, NO_NULL))
    values = pa.array([{"a": None}, {"a": 1}, {"a": 2}], LONG)
    bench.write({"value": values, "partition": pa.array([-1, -1, 0], pa.int32())})
    first, second = bench.dead()
    assert first[MESSAGE].startswith(b"value.a: it is null")
    assert (first["__sink.errors.partition"], first["value"]) == (b"-1", b'{"a":null}')
    assert (second[MESSAGE], second["value"]) == (b"partition -1 is negative", b"\2")


# ---- the limit, the report and transactions --------------------------------------------------------------------------


@pytest.mark.parametrize("write", [by_columns, by_rows])
def test_a_task_stops_at_the_limit(write: Callable[[Bench, list[Row]], None]) -> None:
    rows = [Row(value=Row(a=None if row % 2 else row), key=Row(a=row)) for row in range(8)]
    formats = resolved("value", "avro", LONG, NO_NULL), resolved("key", "json", LONG)
    enough = Bench(*formats, options={"errors.deadletterqueue.max.rows": "4"})
    write(enough, rows)
    assert (enough.report().dead_letters, enough.pool.dead_letters()) == (4, {"dead": 4})
    assert enough.report().first_dead_letter == (
        "row 1 of partition 3: value.a: it is null, and the schema allows no null there"
    )
    short = Bench(*formats, options={"errors.deadletterqueue.max.rows": "3"})
    with pytest.raises(
        TooManyDeadLettersError, match=r"At least 4 rows cannot be written.*max\.rows=3\. The first is row 1"
    ):
        write(short, rows)
    assert short.producer.sent == []


def test_rows_interface_logs_its_dead_letters_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(resolved("value", "avro", LONG, NO_NULL))
    assert bench.config.column_formats is not None
    writer = FormattedWriter(bench.delivery, bench.config.column_formats)
    writer.write([Row(value=Row(a=None if row % 2 else row)) for row in range(200)])
    writer.finish()
    writer.log_letters()
    assert [each.getMessage() for each in caplog.records] == [
        "Batch 7, partition 3: 100 rows cannot be written, and are in topic dead. The first is row 1 of partition 3:"
        " value.a: it is null, and the schema allows no null there"
    ]


def test_without_dead_letters_the_task_fails() -> None:
    bench = Bench(resolved("value", "avro", LONG, NO_NULL))
    bench.delivery.letters = None
    with pytest.raises(SerializationError, match=r"value\.a of row 1: it is null"):
        bench.write({"value": pa.array([{"a": 1}, {"a": None}], LONG)})


class Transaction:
    """Adds up the fingerprint as a task of exactly-once delivery does."""

    is_prepared = False

    def __init__(self, *, is_written_already: bool = False) -> None:
        self.is_written_already = is_written_already
        self.rows = self.fingerprint = self.marked = 0

    def takes(self, topic: str, columns: RecordColumns) -> bool:
        self.rows += columns.num_rows
        self.fingerprint = (self.fingerprint + fingerprint(topic, columns)) % MODULUS
        return not self.is_written_already

    def begin(self, pool: ScriptedPool, config: Any) -> Any:
        return pool.acquire(config)

    def add_marker(self, _producer: Any, rows: int) -> None:
        self.marked = rows

    def prepare(self, _producer: Any, _delivered: object) -> None:
        self.is_prepared = True


def test_dead_letters_belong_to_the_transaction_and_its_fingerprint() -> None:
    """A batch that comes again with another row among its dead letters is not the same batch."""
    data_type = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    formats = resolved("value", "avro", data_type, record(a="long", b="long"))
    found: list[tuple[int, int]] = []
    for other in (5, 5, 6):
        transaction = Transaction(is_written_already=bool(found))
        rows = pa.array([{"a": 1, "b": 2}, {"a": None, "b": other}], data_type)
        bench = Bench(formats, transaction=transaction).write({"value": rows})
        found.append((transaction.rows, transaction.fingerprint))
        assert (len(bench.dead()), transaction.marked) == ((0, 0) if transaction.is_written_already else (1, 2))
    assert found[0] == found[1] != found[2]


# ---- topic and dead letters are the input ----------------------------------------------------------------------------


def strict(schema: Any, rng: random.Random) -> Any:
    """An Avro schema in which some fields, elements and values may no longer be null."""
    if isinstance(schema, list):
        kinds = [each for each in schema if each != "null"]
        if "null" in schema and kinds and rng.random() < 0.3:
            return strict(kinds[0], rng) if len(kinds) == 1 else kinds
        return [strict(each, rng) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name in ("items", "values"):
        if name in made:
            made[name] = strict(made[name], rng)
    if "fields" in made:
        made["fields"] = [{**each, "type": strict(each["type"], rng)} for each in made["fields"]]
    return made


def strict_json(schema: Any, rng: random.Random) -> Any:
    """A JSON Schema in which some values may no longer be null, and some fields are required."""
    if isinstance(schema, dict):
        if "oneOf" in schema and rng.random() < 0.3:
            return strict_json(schema["oneOf"][1], rng)
        made = {name: strict_json(each, rng) for name, each in schema.items()}
        if "properties" in made:
            made["required"] = [name for name in made["properties"] if rng.random() < 0.3]
        return made
    return [strict_json(each, rng) for each in schema] if isinstance(schema, list) else schema


STRICT: Final[dict[str, Callable[[Any, random.Random], Any]]] = {"avro": strict, "json-schema": strict_json}


def random_format(field: str, name: str, data_type: pa.DataType, rng: random.Random) -> ResolvedFormat:
    """A format with a schema that not every row fits. Protobuf has no null in lists and maps in any case."""
    if name == "protobuf":
        with contextlib.suppress(SchemaError):  # it does not have every type
            return resolved(field, name, data_type)
        name = "avro"
    made = resolved(field, name, data_type)
    used = STRICT[name](json.loads(made.column_format.schema or ""), rng)
    return resolved(field, name, data_type, json.dumps(used))


def encoded(used: ResolvedFormat, row: pa.Array) -> tuple[bytes | None, bool]:
    """One row's bytes, and whether it fits."""
    (value,), bad = ColumnEncoder(used.column_format, row.type).encode(row)
    return value.as_py(), not bad


def all_text(column: pa.Array) -> list[bytes | None]:
    options = JsonOptions(ignore_null_fields=False)
    texts, bad = ColumnEncoder(ColumnFormat("value", "json", None, json=options), column.type).encode(column)
    assert not bad
    return list(texts.to_pylist())


def check_random(seed: int, *, without_kernel: bool = False) -> tuple[int, int]:
    """Write generated rows, and return how many are good and bad."""
    rng = random.Random(seed)
    formats, columns = [], []
    for field in ("value", "key"):
        data_type = pa.struct([pa.field(f"f{at}", random_type(rng, 2)) for at in range(rng.randint(1, 4))])
        formats.append(random_format(field, rng.choice([*STRICT, "protobuf"]), data_type, rng))
        columns.append(random_array(rng, data_type, rng.choice((7, 40, 70))))
    rows = min(map(len, columns))
    value, key = (column.slice(0, rows) for column in columns)
    headers = pa.array([[{"key": "n", "value": b"%d" % row}] for row in range(rows)], HEADERS)
    bench = Bench(formats[0], formats[1])
    cut = rng.randint(0, rows)
    named = {"value": value, "key": key, "headers": headers}
    bench.write(*({name: column.slice(*part) for name, column in named.items()} for part in ((0, cut), (cut,))))
    sent = {int(each[0]["value"]): (v, k) for v, k, each in bench.sent("value", "key", "headers")}
    dead = {int(letter["n"]): letter for letter in bench.dead()}
    assert len(bench.sent("value")) + len(bench.dead()) == rows, seed
    assert sorted([*sent, *dead]) == list(range(rows)), seed
    texts = [all_text(column) for column in (value, key)]
    for row in range(rows):
        made = [encoded(used, column.slice(row, 1)) for used, column in zip(formats, (value, key), strict=True)]
        assert (row in sent) == all(fits for _, fits in made), (seed, row)
        if row in sent:
            assert sent[row] == tuple(content for content, _ in made), (seed, row)
            continue
        for (content, fits), text, field in zip(made, texts, ("value", "key"), strict=True):
            assert dead[row][field] == (content if fits else text[row]), (seed, row, field)
            assert fits != (field in dead[row][AS_JSON].decode().split(", ")), (seed, row, field)
    return len(sent), len(dead)


@pytest.mark.usefixtures("emitter")
def test_topic_and_dead_letters_have_each_row_once(emitter: str) -> None:
    seeds = range(100, 116) if emitter == BY_KERNEL else range(116, 122)
    good, bad = (sum(counts) for counts in zip(*map(check_random, seeds), strict=True))
    assert good > 50
    assert bad > 50


@pytest.mark.slow
def test_topic_and_dead_letters_of_many_types_have_each_row_once() -> None:
    good, bad = (sum(counts) for counts in zip(*map(check_random, range(1_000, 1_300)), strict=True))
    assert good > 2_000
    assert bad > 2_000
