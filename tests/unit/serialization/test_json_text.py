"""JSON in the form of to_json. The expected texts are those that Spark 4.2 printed on Java 17, where it says so."""

from __future__ import annotations

import random
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from support.generated_columns import random_double

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import ColumnFormat, JsonOptions
from spark_kafka_sink.serialization.json_text import quoted

DEFAULTS = JsonOptions()


def texts(column: pa.Array, options: JsonOptions = DEFAULTS) -> list[str | None]:
    encoded = ColumnEncoder(ColumnFormat("value", "json", None, json=options), column.type).encode(column)
    assert encoded.bad_rows == ()
    return [None if value is None else value.decode() for value in encoded.values.to_pylist()]


def printed(values: pa.Array, options: JsonOptions = DEFAULTS) -> list[str]:
    """What stands for each value in an object."""
    made = texts(pa.StructArray.from_arrays([values], names=["a"]), options)
    return [(text or "")[5:-1] for text in made]


def of_ints(numbers: list[int], data_type: pa.DataType) -> pa.Array:
    return pa.array(numbers, pa.int32() if data_type.bit_width == 32 else pa.int64()).view(data_type)


# ---- seen from Spark 4.2 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1.0, "1.0"),
        (1e7, "1.0E7"),
        (1.5e-4, "1.5E-4"),
        (float("nan"), '"NaN"'),
        (float("-inf"), '"-Infinity"'),
        (float("inf"), '"Infinity"'),
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (0.002, "0.002"),
        (5e-324, "4.9E-324"),
        (-9999999.0, "-9999999.0"),
        (12345678.9, "1.23456789E7"),
        (2e23, "2.0E23"),
        (0.001, "0.001"),
        (9.999e-4, "9.999E-4"),
        (1.7976931348623157e308, "1.7976931348623157E308"),
        (1234567.0, "1234567.0"),
    ],
)
def test_double_is_printed_as_java_does(number: float, text: str) -> None:
    assert printed(pa.array([number], pa.float64())) == [text]


def test_float_has_the_digits_of_a_float() -> None:
    numbers = [0.1, 1e10, 1.4e-45, 3.4028235e38, 16777216.0, -0.0, 1.17549435e-38]
    expected = ["0.1", "1.0E10", "1.4E-45", "3.4028235E38", "1.6777216E7", "-0.0", "1.1754944E-38"]
    assert printed(pa.array(numbers, pa.float32())) == expected
    assert printed(pa.array([0.1, 65504.0], pa.float16())) == ["0.099975586", "65504.0"]


def test_decimals_keep_their_scale() -> None:
    numbers = ["0E-10", "1.000E-7", "-12.00", "12345678901234567890123456.7890000000", "0.000001", "-9.9E-9", "7"]
    for text in numbers:
        number = Decimal(text)
        scale = -int(number.as_tuple().exponent)
        assert printed(pa.array([number], pa.decimal128(38, scale))) == [text]
    assert printed(of_decimals([12, -1200, 0], -3)) == ["1.2E+4", "-1.200E+6", "0E+3"]


def of_decimals(unscaled: list[int], scale: int) -> pa.Array:
    data = b"".join(number.to_bytes(16, "little", signed=True) for number in unscaled)
    return pa.Array.from_buffers(pa.decimal128(38, scale), len(unscaled), [None, pa.py_buffer(data)])


UTC_MICROS, NTZ = pa.timestamp("us", "UTC"), pa.timestamp("us")


@pytest.mark.parametrize(
    ("micros", "data_type", "zone", "text"),
    [
        (1_577_934_245_123_456, UTC_MICROS, None, "2020-01-02T03:04:05.123Z"),
        (-1, UTC_MICROS, None, "1969-12-31T23:59:59.999Z"),
        (0, UTC_MICROS, None, "1970-01-01T00:00:00.000Z"),
        (0, NTZ, None, "1970-01-01T00:00:00.000"),
        (0, NTZ, "America/New_York", "1970-01-01T00:00:00.000"),
        (0, pa.timestamp("us", "America/New_York"), None, "1969-12-31T19:00:00.000-05:00"),
        (0, UTC_MICROS, "Asia/Kolkata", "1970-01-01T05:30:00.000+05:30"),
        (0, UTC_MICROS, "-02:30", "1969-12-31T21:30:00.000-02:30"),
        (-62_135_596_800_000_000, UTC_MICROS, "America/New_York", "0000-12-31T19:03:58.000-04:56:02"),
        (1_594_000_000_000_000, UTC_MICROS, "Europe/Berlin", "2020-07-06T03:46:40.000+02:00"),
        (64_093_000_000_000_000, UTC_MICROS, "Europe/Berlin", "4001-01-10T04:06:40.000+01:00"),
        (317_000_000_000_000_000, UTC_MICROS, "Europe/Berlin", "+12015-05-01T13:33:20.000+02:00"),
    ],
)
def test_timestamp_is_cut_to_milliseconds_and_has_its_offset(
    micros: int, data_type: pa.DataType, zone: str | None, text: str
) -> None:
    assert printed(of_ints([micros], data_type), JsonOptions(time_zone=zone)) == [f'"{text}"']


def test_timestamps_of_other_units() -> None:
    for unit, number in (("s", -1), ("ms", -1), ("ns", -1)):
        fraction = "000" if unit == "s" else "999"
        assert printed(of_ints([number], pa.timestamp(unit))) == [f'"1969-12-31T23:59:59.{fraction}"']


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (0, "1970-01-01"),
        (18263, "2020-01-02"),
        (3_670_688, "+12020-01-02"),
        (-719_893, "-0001-01-01"),
        (-719_162, "0001-01-01"),
        (11_016, "2000-02-29"),
    ],
)
def test_dates(days: int, text: str) -> None:
    assert printed(of_ints([days], pa.date32())) == [f'"{text}"']
    assert printed(of_ints([days * 86_400_000], pa.date64())) == [f'"{text}"']


def test_times_and_intervals() -> None:
    assert printed(of_ints([43_994_500_000, 0], pa.time64("us"))) == ['"12:13:14.5"', '"00:00:00"']
    assert printed(of_ints([43_994_500], pa.time32("ms"))) == ['"12:13:14.5"']
    micros = [93_784_500_000, -93_784_500_000, 0]
    assert printed(of_ints(micros, pa.duration("us"))) == [
        "\"INTERVAL '1 02:03:04.5' DAY TO SECOND\"",
        "\"INTERVAL '-1 02:03:04.5' DAY TO SECOND\"",
        "\"INTERVAL '0 00:00:00' DAY TO SECOND\"",
    ]


def test_strings_have_the_escapes_of_jackson() -> None:
    values = ['q"\\/\n\t\b\f\r\x01\x1f', "\x7f\u2028é😀", "", "12345678", '1234567"9', "ä" * 20]
    assert printed(pa.array(values)) == [
        r'"q\"\\/\n\t\b\f\r\u0001\u001F"',
        '"\x7f\u2028é😀"',
        '""',
        '"12345678"',
        r'"1234567\"9"',
        f'"{"ä" * 20}"',
    ]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\xe2\x82", "\ufffd"),
        (b"\xe2\x82A", "\ufffdA"),
        (b"\xf0\x9f\x98", "\ufffd"),
        (b"\xed\xa0\x80x", "\ufffdx"),
        (b"\xc0\x80", "\ufffd\ufffd"),
        (b"\xf5\x80", "\ufffd\ufffd"),
        (b"12345678\x80", "12345678\ufffd"),
    ],
)
def test_bytes_that_are_no_utf8_are_replaced_as_java_does(text: bytes, read: str) -> None:
    offsets = struct.pack("<ii", 0, len(text))
    strings = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(text)])
    assert printed(strings) == [f'"{read}"']


def test_binary_is_base64() -> None:
    values = [b"", b"a", b"ab", b"abc", bytes(range(256))[-7:]]
    assert printed(pa.array(values)) == ['""', '"YQ=="', '"YWI="', '"YWJj"', '"+fr7/P3+/w=="']
    assert printed(pa.array([b"abc"], pa.binary(3))) == ['"YWJj"']


NESTED = pa.struct([("x", pa.int32()), ("y", pa.list_(pa.int32())), ("m", pa.map_(pa.string(), pa.int32()))])


def test_null_fields_are_left_out_and_other_nulls_are_not() -> None:
    column = pa.array(
        [{"x": None, "y": [1, None], "m": [("a", None)]}, {"x": None, "y": None, "m": None}, None], NESTED
    )
    assert texts(column) == ['{"y":[1,null],"m":{"a":null}}', "{}", None]
    assert texts(column, JsonOptions(ignore_null_fields=False))[1] == '{"x":null,"y":null,"m":null}'


def test_maps_and_arrays_may_be_the_column() -> None:
    assert texts(pa.array([[1, None], [], None])) == ["[1,null]", "[]", None]
    assert texts(pa.array([[("k", {"a": None})]], pa.map_(pa.string(), pa.struct([("a", pa.int32())])))) == ['{"k":{}}']


@pytest.mark.parametrize(
    ("key_type", "keys", "printed_keys"),
    [
        (pa.int32(), [1, -2], ["1", "-2"]),
        (pa.bool_(), [True, False], ["true", "false"]),
        (pa.float64(), [1.5, float("nan")], ["1.5", "NaN"]),
        (pa.float16(), [1.5, -2.0], ["1.5", "-2.0"]),
        (pa.decimal128(5, 2), [Decimal("1.50"), Decimal("-0.01")], ["1.50", "-0.01"]),
        (pa.string(), ['a"', ""], [r"a\"", ""]),
        (pa.dictionary(pa.int8(), pa.string()), ["p", "q"], ["p", "q"]),
    ],
    ids=str,
)
def test_keys_of_maps_are_strings(key_type: pa.DataType, keys: list[Any], printed_keys: list[str]) -> None:
    made = pa.array(keys, key_type)
    child = pa.StructArray.from_arrays(
        [made, pa.array([1, 2])], fields=[pa.field("key", key_type, False), pa.field("value", pa.int64())]
    )
    column = pa.Array.from_buffers(
        pa.map_(key_type, pa.int64()), 1, [None, pa.py_buffer(struct.pack("<ii", 0, 2))], children=[child]
    )
    first, second = printed_keys
    assert texts(column) == [f'{{"{first}":1,"{second}":2}}']


def test_names_are_escaped() -> None:
    column = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=['a"\n', "é b"])
    assert texts(column) == [r'{"a\"\n":1,"é b":2}']
    assert quoted("\x1f\\") == rb'"\u001F\\"'


# ---- digits --------------------------------------------------------------------------------------------------------


def check_doubles(seed: int, count: int) -> None:
    """The digits are those of Python's repr, which are the fewest that lead back to the number."""
    rng = random.Random(seed)
    numbers = [random_double(rng) for _ in range(count)]
    numbers = [number for number in numbers if 1e-310 < abs(number) < float("inf")]
    made = printed(pa.array(numbers, pa.float64()))
    assert [(float(text), Decimal(text)) for text in made] == [(number, Decimal(repr(number))) for number in numbers]


def check_floats(seed: int, count: int) -> None:
    """The digits lead back to the number, and no decimal with fewer digits does."""
    rng = random.Random(seed)
    packed = rng.randbytes(4 * count)
    values = pa.Array.from_buffers(pa.float32(), count, [None, pa.py_buffer(packed)])
    for text, number in zip(printed(values), values.to_pylist(), strict=True):
        if text.startswith('"'):
            assert number != number or abs(number) == float("inf")
            continue
        assert pa.array([float(text)], pa.float32())[0].as_py() == number
        digits = Decimal(text).normalize().as_tuple().digits
        if len(digits) > 2:
            fewer = f"{number:.{len(digits) - 2}e}"
            assert pa.array([float(fewer)], pa.float64()).cast(pa.float32())[0].as_py() != number, text


@pytest.mark.parametrize("seed", range(3))
def test_digits_are_the_fewest(seed: int) -> None:
    check_doubles(seed, 2000)
    check_floats(seed, 500)


@pytest.mark.slow
def test_digits_of_many_numbers_are_the_fewest() -> None:
    for seed in range(10, 30):
        check_doubles(seed, 20_000)
    check_floats(10, 20_000)


def test_powers_of_two_and_ten_have_their_digits() -> None:
    numbers = [2.0**power for power in range(-1020, 1024)] + [float(f"1e{power}") for power in range(-300, 309)]
    made = printed(pa.array(numbers, pa.float64()))
    assert [Decimal(text) for text in made] == [Decimal(repr(number)) for number in numbers]


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_type", "message"),
    [
        (pa.string(), "value: the format json takes a struct, a map, an array or a variant"),
        (pa.struct([("m", pa.map_(pa.date32(), pa.int32()))]), "value.m.key: keys of the Arrow type date32"),
        (pa.struct([("m", pa.map_(pa.binary(), pa.int32()))]), "value.m.key: keys of the Arrow type binary"),
        (
            pa.struct([("i", pa.list_(pa.month_day_nano_interval()))]),
            "value.i.element: values of the Arrow type month_day",
        ),
        (
            pa.struct([("v", pa.struct([pa.field("wkb", pa.binary(), metadata={b"geometry": b"true"})]))]),
            "value.v: a geometry cannot be written as JSON. Make it bytes before, by st_asbinary",
        ),
    ],
)
def test_type_without_a_form_is_refused_with_the_path(data_type: pa.DataType, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        ColumnEncoder(ColumnFormat("value", "json", None), data_type)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (JsonOptions(timestamp_format="yyyy"), "timestampFormat must be yyyy-MM-dd'T'HH:mm:ss[.SSS][XXX], not yyyy"),
        (JsonOptions(timestamp_ntz_format="yyyy"), "timestampNTZFormat must be"),
        (JsonOptions(date_format="dd.MM.yyyy"), "dateFormat must be yyyy-MM-dd, not dd.MM.yyyy"),
        (JsonOptions(time_zone="Mars/Olympus"), "The time zone 'Mars/Olympus' is not known here"),
        (JsonOptions(time_zone="+19:00"), "The time zone '+19:00' is not known"),
        (JsonOptions(time_zone="../etc/passwd"), "is not known here"),
    ],
)
def test_options_that_are_not_supported_are_refused(options: JsonOptions, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ColumnEncoder(ColumnFormat("value", "json", None, json=options), NESTED)
    assert message in str(caught.value)


def test_default_patterns_may_be_given() -> None:
    options = JsonOptions(date_format="yyyy-MM-dd", timestamp_format="yyyy-MM-dd'T'HH:mm:ss[.SSS][XXX]")
    now = pa.array([datetime(2020, 1, 2, tzinfo=UTC)], UTC_MICROS)
    assert printed(now, options) == ['"2020-01-02T00:00:00.000Z"']


def test_time_of_day_out_of_range_and_far_timestamps_are_bad_rows() -> None:
    column = pa.StructArray.from_arrays(
        [of_ints([-1, 0], pa.time64("us")), of_ints([0, 1 << 60], pa.timestamp("s"))], names=["a", "b"]
    )
    encoded = ColumnEncoder(ColumnFormat("value", "json", None), column.type).encode(column)
    assert [(bad.row, bad.path) for bad in encoded.bad_rows] == [(0, "value.a"), (1, "value.b")]
    assert encoded.bad_rows[0].reason == "the time of day is below 0 or not below 24 hours"
    assert encoded.values.to_pylist() == [None, None]
