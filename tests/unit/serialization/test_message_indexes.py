"""Protobuf message indexes: which message of a .proto file stands where, and the bytes for it."""

from __future__ import annotations

import pytest
from confluent_kafka.schema_registry.serde import SchemaId

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.message_indexes import Message, find_message, index_bytes, message_name

PROTO = """
syntax = "proto3";  // message NotThis {}
package shop.v1;
/* message NorThis { */
import "google/protobuf/timestamp.proto";
option (note) = { text: "message Neither {" };
message First { string message = 1; reserved "message X {"; }
enum Kind { message = 0; }
message Order {
  message Line { message Part {} }
  enum State { OPEN = 0; }
  oneof one { int64 a = 1; string group = 3; }
  message Total {}
  map<string, Line> lines = 2;
}
service Shop { rpc Get (First) returns (Order) {} }
message Last {}
"""


@pytest.mark.parametrize(
    ("name", "indexes"),
    [
        ("First", (0,)),
        ("Order", (1,)),
        ("Order.Line", (1, 0)),
        ("Order.Line.Part", (1, 0, 0)),
        ("Order.Total", (1, 1)),
        ("Last", (2,)),
    ],
)
def test_message_is_found_with_and_without_its_package(name: str, indexes: tuple[int, ...]) -> None:
    expected = Message(f"shop.v1.{name}", indexes)
    assert [find_message(PROTO, each) for each in (name, f"shop.v1.{name}", f".shop.v1.{name}")] == [expected] * 3


AMBIGUOUS = "package shop; message shop { message A { int64 x = 2; } } message A { int64 x = 1; }"


def test_name_of_two_messages_is_refused_and_a_dot_says_which_is_meant() -> None:
    with pytest.raises(SchemaError, match=r"two messages for the name shop\.A: shop\.A and shop\.shop\.A\. Write"):
        find_message(AMBIGUOUS, "shop.A")
    assert find_message(AMBIGUOUS, ".shop.A") == Message("shop.A", (1,))
    assert find_message(AMBIGUOUS, "A") == Message("shop.A", (1,))
    assert find_message(AMBIGUOUS, ".shop.shop.A") == find_message(AMBIGUOUS, "shop.shop.A")
    assert find_message(AMBIGUOUS, "shop.shop.A") == Message("shop.shop.A", (0, 0))


@pytest.mark.parametrize(
    "before",
    ["package foo . bar;", "package/**/foo.bar ;", 'syntax = "proto3"; package foo. bar;', "; package foo .bar;"],
)
def test_package_may_have_blanks_in_it(before: str) -> None:
    proto = f"{before} message A {{ message package {{}} string package = 1; }}"
    assert find_message(proto, "foo.bar.A.package") == Message("foo.bar.A.package", (0, 0))


def test_first_message_is_taken_without_a_name() -> None:
    assert find_message(PROTO, None) == Message("shop.v1.First", (0,))
    assert find_message("message A{message B{}}message C{}", "C") == Message("C", (1,))


@pytest.mark.parametrize(
    "name", ["NotThis", "NorThis", "Neither", "X", "Kind", "State", "Shop", "Line", "v1.Order", ""]
)
def test_error_for_a_name_that_is_no_message_lists_the_messages(name: str) -> None:
    with pytest.raises(SchemaError) as caught:
        find_message(PROTO, name)
    assert str(caught.value) == (
        f"The Protobuf schema has no message {name}. It has: First, Order, Order.Line, Order.Line.Part, Order.Total,"
        " Last."
    )


@pytest.mark.parametrize("proto", ["", "enum A { B = 0; }", "message", "}}}"])
def test_file_without_a_message_is_an_error(proto: str) -> None:
    with pytest.raises(SchemaError, match=r"^The Protobuf schema has no message\.$"):
        find_message(proto, None)


@pytest.mark.parametrize(
    "field", ["map<string, int32> m = 1;", "map < string, int32 > m = 1;", "optional group G = 1 { message H {} }"]
)
def test_message_behind_a_map_field_or_a_group_is_refused(field: str) -> None:
    """Clients do not agree on its index: the entry of a map is a message for some."""
    proto = f"message A {{ message B {{}} {field} message C {{ message D {{}} }} }} message E {{ message F {{}} }}"
    assert find_message(proto, "A.B").indexes == (0, 0)
    assert find_message(proto, "E.F").indexes == (1, 0)
    for name in ("A.C", "A.C.D"):
        with pytest.raises(
            SchemaError, match=f"^The message {name} stands behind a map field or a group of the message"
        ):
            find_message(proto, name)


@pytest.mark.parametrize("indexes", [[0], [1], [0, 0], [3, 0, 2], [63], [64], [8191, 8192], [1_000_000], [0] * 70])
def test_bytes_are_those_of_confluents_client(indexes: list[int]) -> None:
    judge = SchemaId("PROTOBUF", 7, None, indexes).id_to_bytes()
    assert b"\0\0\0\0\7" + index_bytes(indexes) == judge


def test_byte_order_mark_does_not_hide_the_package() -> None:
    """Bug: KeyError for a file of proto2 that begins with it and has no line for the syntax."""
    assert message_name("\ufeffpackage p; message M {}", None) == "p.M"


def test_descriptor_in_base64_is_said_to_be_one() -> None:
    """Registries that keep the text as they get it have it from Confluent's client for Python."""
    with pytest.raises(SchemaError, match="no text but a descriptor in base64: register the text"):
        message_name("Cg9tZXRhL3Byb3RvLnByb3RvEg8K", None)
