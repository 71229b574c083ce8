"""How the kernel takes rows: the rows that it takes, the rows that it leaves, and hostile rows."""

from __future__ import annotations

import gc
import random
import sys
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from spark_kafka_sink.record.kernel import (
    HAS_ROOM,
    IS_FULL,
    NOT_TAKEN,
    RowTaker,
    bytes_step,
    has_kernel,
    headers_step,
    typed_step,
)

pytestmark = pytest.mark.skipif(not has_kernel(), reason="the kernel was not compiled")

MANY = 1 << 40
HEADER_BYTES = 32


class R(tuple[Any, ...]):
    """A row like that of PySpark."""

    __fields__: Any


def row(names: Any, *cells: Any) -> R:
    made = R(cells)
    made.__fields__ = names
    return made


class Columns:
    """Lists for values, keys, partitions and headers, with a taker that fills them."""

    def __init__(self, names: tuple[Any, ...] = ("key", "value"), rows: int = MANY, size: int = MANY) -> None:
        self.value: list[Any] = []
        self.key: list[Any] = []
        self.partition: list[Any] = []
        self.counts: list[Any] = []
        self.header_keys: list[Any] = []
        self.header_values: list[Any] = []
        make = {
            "value": lambda at: bytes_step(at, self.value),
            "key": lambda at: bytes_step(at, self.key),
            "partition": lambda at: typed_step(at, self.partition, (int, type(None))),
            "headers": lambda at: headers_step(at, self.counts, self.header_keys, self.header_values),
        }
        plan = tuple(make[name](at) for at, name in enumerate(names) if name in make)
        self.taker = RowTaker(R, names, plan, rows, size, HEADER_BYTES)

    def take(self, rows: Iterable[Any], most: int = MANY, size: int = MANY) -> Any:
        return self.taker.take(iter(rows), most, size)

    @property
    def all(self) -> list[list[Any]]:
        return [self.value, self.key, self.partition, self.counts, self.header_keys, self.header_values]

    @property
    def is_empty(self) -> bool:
        return not any(self.all) and self.taker.rows == self.taker.size == 0


NAMES = ["key", "value"]


def leaves(given: Any, names: tuple[Any, ...] = ("key", "value")) -> bool:
    """Return whether both ways leave a row to the caller without a part of it in a column."""
    columns = Columns(names)
    rest = columns.take([given])
    assert rest is None or rest[0] is given
    state = columns.taker.add(given)
    assert (state == NOT_TAKEN) == (rest is not None)
    assert columns.is_empty == (rest is not None)
    return rest is not None


# ---- taken rows ------------------------------------------------------------------------------------------------------


def test_cells_go_into_the_lists_of_their_columns() -> None:
    columns = Columns(("extra", "value", "key", "partition"))
    names = ["extra", "value", "key", "partition"]
    rows = [row(names, object(), "v", b"k", 7), row(names, [], None, "", None), row(names, 1, b"", None, -(10**30))]
    assert columns.take(rows) is None
    assert columns.value == ["v", None, b""]
    assert columns.key == [b"k", "", None]
    assert columns.partition == [7, None, -(10**30)]
    assert (columns.taker.rows, columns.taker.size) == (3, 2)


@pytest.mark.parametrize("names", [NAMES, tuple(NAMES), R(NAMES), ["k" + "ey", "".join(["val", "ue"])]], ids=repr)
def test_names_are_compared_by_their_texts(names: Any) -> None:
    columns = Columns()
    assert columns.take([row(names, "k", "v"), row(list(NAMES), "l", "w"), row(list(names), "m", "x")]) is None
    assert columns.key == ["k", "l", "m"]


def test_names_that_are_not_str_are_compared_by_identity() -> None:
    odd = object()
    assert not leaves(row([odd, 5, None, "value"], 1, 2, 3, "v"), (odd, 5, None, "value"))
    assert leaves(row([object(), 5, None, "value"], 1, 2, 3, "v"), (odd, 5, None, "value"))


def test_bytearray_is_copied_before_the_iterator_moves_on() -> None:
    reused = bytearray(b"0")

    def rows() -> Iterator[R]:
        for number in range(5):
            reused[:] = b"%d" % number
            yield row(NAMES, reused, reused)
        reused[:] = b"later"

    columns = Columns()
    assert columns.take(rows()) is None
    assert columns.value == columns.key == [b"0", b"1", b"2", b"3", b"4"]
    assert {type(value) for value in columns.value} == {bytes}


def test_dicts_with_the_names_in_order_are_rows() -> None:
    reused = {"key": "k", "value": bytearray(b"v")}
    columns = Columns()
    assert columns.take([reused, reused]) is None
    assert columns.value == [b"v", b"v"]
    assert leaves({"value": "v", "key": "k"})
    assert leaves({"key": "k", "value": "v", "more": 1})
    assert leaves({"key": "k"})
    assert leaves({"key": "k", b"value": "v"})
    assert leaves({})
    assert leaves(OrderedDict(key="k", value="v"))
    assert leaves(UserDict(key="k", value="v"))


PAIRS: list[Any] = [
    ("a", b"1"),
    ["b", None],
    row(["key", "value"], "c", "3"),
    row(("value", "key"), bytearray(b"4"), "d"),
]
PAIRS += [{"key": "e", "value": b"5"}, {"value": b"6", "key": "f"}, row(R(["key", "value"]), "g", b"")]


@pytest.mark.parametrize("shape", [list, tuple])
def test_headers_of_every_form_become_keys_and_values(shape: type) -> None:
    columns = Columns(("value", "headers"))
    names = ["value", "headers"]
    rows = [row(names, "v", None), row(names, "w", shape(PAIRS)), row(names, "x", []), row(names, "y", ())]
    assert columns.take(rows) is None
    assert columns.counts == [0, 7, 0, 0]
    assert columns.header_keys == list("abcdefg")
    assert columns.header_values == [b"1", None, "3", b"4", b"5", b"6", b""]
    assert columns.taker.size == 4 + 7 * (HEADER_BYTES + 1) + 5


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_iterator_is_not_advanced_beyond_the_limit(count: int) -> None:
    source = iter([row(NAMES, "k", "v")] * 3)
    columns = Columns()
    assert columns.taker.take(source, count, MANY) == (() if count <= 3 else None)
    assert len(columns.value) == min(count, 3)
    assert len(list(source)) == 3 - min(count, 3)


def test_rows_are_taken_until_they_hold_enough_bytes() -> None:
    source = iter([row(NAMES, "kk", "vvv")] * 10)
    columns = Columns()
    assert columns.taker.take(source, MANY, 6) == ()
    assert (columns.taker.rows, columns.taker.size) == (2, 10)
    assert columns.taker.take(source, MANY, 6) == ()
    assert columns.taker.rows == 4


@pytest.mark.parametrize(("rows", "size"), [(3, MANY), (MANY, 6), (3, 6)])
def test_full_taker_takes_nothing(rows: int, size: int) -> None:
    one = row(NAMES, "k", "v")
    columns = Columns(rows=rows, size=size)
    assert [columns.taker.add(one) for _ in range(3)] == [HAS_ROOM, HAS_ROOM, IS_FULL]
    assert columns.take([one]) == ()
    assert columns.taker.rows == 3


# ---- rows that are left ---------------------------------------------------------------------------------------------


class Text(str):
    pass


class Bytes(bytes):
    pass


class Row2(R):
    pass


Named = namedtuple("Named", "key value")


@pytest.mark.parametrize(
    "given",
    [None, 5, "kv", b"kv", object(), ["k", "v"], ("k", "v"), Named("k", "v"), R(["k", "v"]), Row2(["k", "v"])],
    ids=repr,
)
def test_value_without_names_is_not_taken(given: Any) -> None:
    assert leaves(given)


def test_row_of_a_subclass_is_not_taken() -> None:
    """Its names or cells may differ from its contents."""
    given = Row2(["k", "v"])
    given.__fields__ = NAMES
    assert leaves(given)


@pytest.mark.parametrize(
    "names",
    [
        *([], ["key"], ["key", "value", "more"], ["value", "key"], ["key", "Value"], ["key", b"value"]),
        *(["key", None], "kv", 5, None, {"key": 1, "value": 2}, iter(NAMES), Named("key", "value")),
        *([Text("key"), "value"], type("Names", (list,), {})(NAMES), type("Names", (tuple,), {})(NAMES)),
    ],
    ids=repr,
)
def test_row_with_other_names_is_not_taken(names: Any) -> None:
    assert leaves(row(names, "k", "v"))


@pytest.mark.parametrize("cells", [(), ("k",), ("k", "v", "more")], ids=repr)
def test_row_with_a_wrong_number_of_names_is_not_taken(cells: tuple[Any, ...]) -> None:
    assert leaves(row(NAMES, *cells))
    assert leaves(row(NAMES * len(cells), *cells))


def test_names_changed_in_place_are_read_again() -> None:
    names = list(NAMES)

    def rows() -> Iterator[R]:
        yield row(names, "k", "v")
        names.reverse()
        yield row(names, "w", "l")

    columns = Columns()
    (left,) = columns.take(rows())
    assert left == ("w", "l")
    assert columns.value == ["v"]


ODD = [5, True, 1.5, Text("v"), Bytes(b"v"), memoryview(b"v"), ["v"], ("v",), {"v": 1}, object(), R(["v"]), type]


@pytest.mark.parametrize("cell", ODD, ids=lambda cell: type(cell).__name__)
@pytest.mark.parametrize("at", [0, 1])
def test_row_with_an_odd_value_or_key_is_not_taken(at: int, cell: Any) -> None:
    cells: list[Any] = ["k", "v"]
    cells[at] = cell
    assert leaves(row(NAMES, *cells))
    assert leaves(dict(zip(NAMES, cells, strict=True)))


@pytest.mark.parametrize("cell", [True, 1.5, "1", b"1", [1], object()], ids=repr)
def test_row_with_an_odd_partition_is_not_taken(cell: Any) -> None:
    names = ("value", "headers", "partition")
    assert leaves(row(list(names), "v", [("a", b"1")], cell), names)


@pytest.mark.parametrize(
    "header",
    [
        *(None, 5, "ab", b"ab", (), ("a",), ("a", b"1", b"2"), ["a"], ["a", b"1", b"2"], {"a", "b"}, R(["a", b"1"])),
        *({}, {"a": b"1"}, {"key": "a"}, {"key": "a", "value": b"1", "more": 1}, {"key": "a", "KEY": b"1"}),
        *({b"key": "a", b"value": b"1"}, OrderedDict(key="a", value=b"1"), Named("a", b"1"), Row2(["a", b"1"])),
        *(row(["name", "value"], "a", b"1"), row(["key", "data"], "a", b"1"), row(["Key", "Value"], "a", b"1")),
        *(row(["key", "key"], "a", b"1"), row(["value", "value"], "a", b"1"), row(["key"], "a", b"1")),
        *(row(["key", "value", "more"], "a", b"1"), row(["key", "value"], "a"), row(["key", "value"], "a", b"1", b"2")),
        *(row(5, "a", b"1"), row(None, "a", b"1"), row([None, None], "a", b"1"), row("ab", "a", b"1")),
        *((None, b"1"), (5, b"1"), (b"a", b"1"), (Text("a"), b"1"), ("a", 5), ("a", True), ("a", ["1"])),
        *(("a", memoryview(b"1")), ("a", Text("1")), ("a", Bytes(b"1")), ("a", bytearray), {"key": 1, "value": b"1"}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("before", [0, 2])
def test_row_with_an_odd_header_is_not_taken(before: int, header: Any) -> None:
    names = ("value", "headers")
    assert leaves(row(list(names), "v", [*[("a", b"1")] * before, header]), names)


@pytest.mark.parametrize(
    "headers", ["ab", b"ab", 5, {"a": b"1"}, {("a", b"1")}, iter([]), R([]), Named("a", b"1"), Row2([])], ids=repr
)
def test_row_with_headers_of_another_type_is_not_taken(headers: Any) -> None:
    assert leaves(row(["value", "headers"], "v", headers), ("value", "headers"))


def test_rows_before_and_after_an_untaken_row_are_complete() -> None:
    columns = Columns(("headers", "value", "key"))
    names = ["headers", "value", "key"]
    good = row(names, [("a", b"1")], "v", "k")
    source = iter([good, row(names, [("b", b"2"), ("c", b"3")], "w", 5), good])
    (left,) = columns.taker.take(source, MANY, MANY)
    assert left[1] == "w"
    assert columns.all == [["v"], ["k"], [], [1], ["a"], [b"1"]]
    assert columns.taker.take(source, MANY, MANY) is None
    assert columns.all == [["v", "v"], ["k", "k"], [], [1, 1], ["a", "a"], [b"1", b"1"]]


# ---- hostile rows
# -----------------------------------------------------------------------------------------------------


class HarmError(Exception):
    pass


def raising(error: BaseException) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_error_of_the_iterator_passes_and_keeps_the_rows_before() -> None:
    def rows() -> Iterator[R]:
        yield row(NAMES, "k", "v")
        raise HarmError

    columns = Columns()
    with pytest.raises(HarmError):
        columns.take(rows())
    assert (columns.value, columns.key, columns.taker.rows) == (["v"], ["k"], 1)


@pytest.mark.parametrize("given", [[], (), None, 5, object()], ids=repr)
def test_rows_without_an_iterator_raise_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="iterator"):
        Columns().taker.take(given, 1, 1)


@pytest.mark.parametrize("error", [AttributeError(), HarmError()], ids=repr)
def test_raising_getattr_is_not_called(error: Exception) -> None:
    harmful = type("Harmful", (tuple,), {"__getattr__": raising(error), "__getattribute__": raising(error)})
    columns = Columns()
    taker = RowTaker(harmful, ("key", "value"), (bytes_step(1, columns.value),), MANY, MANY, 0)
    assert taker.take(iter([harmful(["k", "v"])]), 1, MANY) != ()
    assert columns.value == []


@pytest.mark.parametrize("error", [AttributeError("no"), HarmError("no")], ids=repr)
def test_names_that_raise_skip_the_row_or_pass_the_error(error: Exception) -> None:
    harmful = type("Harmful", (tuple,), {"__fields__": property(raising(error))})
    columns = Columns()
    taker = RowTaker(harmful, ("key", "value"), (bytes_step(1, columns.value),), MANY, MANY, 0)
    given = harmful(["k", "v"])
    if isinstance(error, AttributeError):
        assert taker.add(given) == NOT_TAKEN
    else:
        with pytest.raises(HarmError):
            taker.add(given)
        with pytest.raises(HarmError):
            taker.take(iter([given]), 1, MANY)
    assert columns.value == []


class Lookalike:
    """A key of a dict in the place of a text, with its own comparison."""

    def __init__(self, text: str, act: Any) -> None:
        self.text, self.act = text, act

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        self.act()
        return False


@pytest.mark.parametrize("text", ["key", "value"])
def test_error_of_a_header_key_leaves_no_row(text: str) -> None:
    other = "key" if text == "value" else "other"
    lookalike: dict[Any, Any] = {other: "a", Lookalike(text, raising(HarmError())): 1}
    columns = Columns(("value", "key", "headers"))
    given = row(["value", "key", "headers"], "v", "k", [("a", b"1"), lookalike])
    with pytest.raises(HarmError):
        columns.take([given])
    with pytest.raises(HarmError):
        columns.taker.add(given)
    assert columns.is_empty


def test_headers_that_shrink_while_they_are_read_do_no_harm() -> None:
    headers: list[Any] = []
    header: dict[Any, Any] = {}

    def act() -> None:
        headers.clear()
        header.clear()
        gc.collect()

    header.update({Lookalike("key", act): "a" * 1000, "other": bytes(1000)})
    headers += [("a", b"1"), header, *[("b", bytes(1000))] * 100]
    columns = Columns(("value", "headers"))
    assert columns.taker.add(row(["value", "headers"], "v", headers)) == NOT_TAKEN
    assert columns.is_empty


def test_names_in_a_similar_attribute_do_no_harm() -> None:
    names = list(NAMES)
    given = R(["k", "v"])
    given.__dict__[Lookalike("__fields__", names.clear)] = 1  # type: ignore[index]
    given.__fields__ = names
    assert leaves(given)


def test_lists_that_the_iterator_changes_do_no_harm() -> None:
    columns = Columns(("value", "headers"))
    names = ["value", "headers"]

    def rows() -> Iterator[R]:
        for number in range(100):
            yield row(names, "v", [("a", b"1")] * 3)
            random.Random(number).choice(columns.all).clear()
            yield row(names, "v", [("a", b"1"), 5])

    source = rows()
    while columns.taker.take(source, MANY, MANY) is not None:
        pass
    assert columns.taker.rows == 100


def test_taker_used_by_its_own_iterator_does_no_harm() -> None:
    columns = Columns()
    rows = [row(list(NAMES), f"k{number}", f"v{number}") for number in range(100)]
    source = iter(rows)

    def nested() -> Iterator[R]:
        for each in source:
            columns.taker.take(source, 3, MANY)
            columns.taker.take(iter([row(["k" + "ey", "value"], "k", "v")]), 1, MANY)
            yield each

    assert columns.taker.take(nested(), MANY, MANY) is None
    assert len(columns.value) == columns.taker.rows == 125


def test_iterator_that_drops_row_and_taker_does_no_harm() -> None:
    held: list[Any] = [Columns()]

    def rows() -> Iterator[Any]:
        yield {"key": bytearray(b"k"), "value": "v" * 100}
        held.clear()
        gc.collect()
        yield {"key": bytearray(b"k"), "value": "v" * 100}

    assert held[0].taker.take(rows(), MANY, MANY) is None


PLAIN_STEP = bytes_step(0, [])


@pytest.mark.parametrize(
    "plan",
    [
        (PLAIN_STEP,) * 9,
        [PLAIN_STEP],
        ([*PLAIN_STEP],),
        (5,),
        ((),),
        (PLAIN_STEP[:5],),
        ((3, 0, [], None, None, None),),
        ((-1, 0, [], None, None, None),),
        ((0, 2, [], None, None, None),),
        ((0, -1, [], None, None, None),),
        ((0, 2**70, [], None, None, None),),
        ((0, 0, (), None, None, None),),
        ((1, 0, [], None, None, None),),
        ((1, 0, [], [int], None, None),),
        ((2, 0, [], None, None, []),),
        ((2, 0, [], None, [], None),),
        ((2, 0, None, None, [], []),),
        ((2, 0, [], None, (), []),),
    ],
    ids=repr,
)
def test_wrong_plan_is_refused(plan: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        RowTaker(R, ("key", "value"), plan, 1, 1, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (R, NAMES, (), 1, 1, 1),
        (R, None, (), 1, 1, 1),
        (list, ("key",), (), 1, 1, 1),
        (R(), ("key",), (), 1, 1, 1),
        (R, ("key",), (), None, 1, 1),
        (R, ("key",), (), 2**70, 1, 1),
        (R, R(NAMES), (), 1, 1, 1),
    ],
    ids=repr,
)
def test_wrong_arguments_of_a_taker_are_refused(arguments: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        RowTaker(*arguments)
    with pytest.raises(TypeError):
        RowTaker(R, ("key",), (), 1, 1, header_bytes=1)


def test_every_reference_is_released() -> None:
    text, number = "text " * 10, 10**20
    names = ["key", "value", "headers", "partition"]
    headers = [("a" * 50, text), ["b" * 50, text], {"key": text, "value": text}, row(["value", "key"], text, text)]
    objects = [text, number, names, headers, R, None, 0, ()]
    times = 1_000
    gc.collect()
    before = [sys.getrefcount(each) for each in objects]
    for _ in range(times):
        columns = Columns(("key", "value", "headers", "partition"))
        good = row(names, text, text, headers, number)
        twin = row(["".join(name) for name in names], text, bytearray(10), tuple(headers), number)
        bad = row(names, text, text, [*headers, ("c", 5)], number)
        columns.take([good, twin, dict(zip(names, good, strict=True)), row(names, None, None, None, None)])
        columns.take([bad])
        columns.taker.add(bad)
        columns.take([row(names, text, text, headers, 1.5)], 1)
        assert columns.taker.rows == 4
        del columns, good, twin, bad
    gc.collect()
    after = [sys.getrefcount(each) for each in objects]
    assert after[:4] == before[:4]
    assert all(abs(here - there) < times // 2 for here, there in zip(after, before, strict=True))


def test_taker_in_a_reference_cycle_is_collected() -> None:
    columns = Columns()
    columns.value.append(columns.taker)
    weak = type("Weak", (), {})
    columns.value.append(weak)
    count = sys.getrefcount(weak)
    del columns
    gc.collect()
    assert sys.getrefcount(weak) == count - 1
