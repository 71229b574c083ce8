"""The text of a .proto file becomes plain values; what the parser refuses is said in one sentence."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from support.fresh_process import run_script, without

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.protobuf_parser import descriptor_set, parse_proto
from spark_kafka_sink.serialization.protobuf_schema import ProtoEnum, ProtoField, ProtoMessage

PROTO = """
syntax = "proto3";
package shop; // with a comment
import "google/protobuf/timestamp.proto";
enum Kind { OLD = 0; NEW = 3; }
message Other { int32 n = 1; }
message Order {
  message Line { optional string sku = 2; repeated int64 amounts = 1; Kind kind = 3; }
  map<string, Line> lines = 1;
  google.protobuf.Timestamp at = 2;
  oneof pay { string card = 3; bool cash = 4; }
}
"""


def test_message_is_parsed_with_all_that_it_uses() -> None:
    found = parse_proto(PROTO, "Order", "value")
    assert found.root == "shop.Order"
    messages = {each.name: each for each in found.messages}
    assert set(messages) == {"shop.Order", "shop.Order.LinesEntry", "shop.Order.Line", "google.protobuf.Timestamp"}
    assert messages["shop.Order.Line"] == ProtoMessage(
        "shop.Order.Line",
        (
            ProtoField("amounts", 1, "int64", is_repeated=True, is_packed=True),
            ProtoField("sku", 2, "string", has_presence=True),
            ProtoField("kind", 3, "enum", "shop.Kind"),
        ),
    )
    assert messages["shop.Order.LinesEntry"].is_entry
    assert [each.oneof for each in messages["shop.Order"].fields] == ["", "", "pay", "pay"]
    assert found.enums == (ProtoEnum("shop.Kind", (("OLD", 0), ("NEW", 3))),)
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("message", "root"),
    [
        (None, "shop.Other"),
        ("Order", "shop.Order"),
        ("shop.Order.Line", "shop.Order.Line"),
        (".shop.Other", "shop.Other"),
    ],
)
def test_message_is_found_by_its_name(message: str | None, root: str) -> None:
    assert parse_proto(PROTO, message, "value").root == root


def test_message_behind_a_map_can_be_written_without_a_registry() -> None:
    """Its place in the file is not clear to all clients, but without a registry nobody asks for that."""
    proto = 'syntax = "proto3"; message A { map<string, int32> m = 1; message B { int32 n = 1; } }'
    assert parse_proto(proto, "A.B", "value").root == "A.B"


@pytest.mark.parametrize(
    ("proto", "said"),
    [
        ("message A { int32 n = 1 }", 'line 1, column 25: Expected ";".'),
        ('syntax = "proto3"; message A { Missing m = 1; }', 'line 1, column 32: "Missing" is not defined.'),
        ('syntax = "proto3"; message A { int32 n = 1; int32 m = 1; }', "Field number 1 has already been used"),
        (
            'syntax = "proto3"; import "shop/item.proto"; message A { shop.Item i = 1; }',
            "it imports shop/item.proto, and only the files of google/protobuf/ can be imported. Write the types into"
            " the schema itself.",
        ),
        (
            'syntax = "proto3"; message A {} // \ud800',
            "it has half of a character (a lone surrogate), which is no text",
        ),
        ('syntax = "proto3"; import "/etc/passwd"; message A {}', "it imports /etc/passwd, and only"),
        ('syntax = "proto3"; message A { ' + " ".join(f"X{n} f{n} = {n};" for n in range(1, 9)) + " }", "And 5 more."),
    ],
)
def test_text_that_is_no_schema_is_refused_in_the_words_of_the_parser(proto: str, said: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_proto(proto, "A", "value")
    assert str(caught.value).startswith("value.schema is no Protobuf schema that can be used: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_message_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SchemaError, match=r"no message Nothing\. It has: Other, Order, Order\.Line"):
        parse_proto(PROTO, "Nothing", "value")


def test_without_the_parser_the_error_names_the_extra(tmp_path: Path) -> None:
    script = without("grpc_tools") + (
        "from spark_kafka_sink.serialization.protobuf_parser import parse_proto\n"
        "try: parse_proto('message A {}', None, 'key')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    assert run_script(script, tmp_path).stdout.strip() == (
        "ConfigError key.format=protobuf needs a parser of .proto files on the driver, and grpcio-tools is not"
        " installed: pip install 'spark-kafka-sink[protobuf]'."
    )


def test_tasks_need_neither_parser_nor_runtime(tmp_path: Path) -> None:
    script = (
        "import sys, pickle, pyarrow as pa\n"
        "from spark_kafka_sink.serialization.column_format import FormatSettings\n"
        "from spark_kafka_sink.serialization.schemas import column_format\n"
        "made = column_format(FormatSettings('value', 'protobuf'), pa.struct([('a', pa.int32())]))\n"
        "sys.stdout.write(pickle.dumps(made).hex())\n"
    )
    task = (
        without("grpc_tools")
        + without("google")
        + (
            "import pickle, pyarrow as pa\n"
            "from spark_kafka_sink.serialization.column_encoder import ColumnEncoder\n"
            f"made = pickle.loads(bytes.fromhex({run_script(script, tmp_path).stdout.strip()!r}))\n"
            "column = pa.array([{'a': 1}], pa.struct([('a', pa.int32())]))\n"
            "print(ColumnEncoder(made, column.type).encode(column).values.to_pylist())\n"
        )
    )
    assert run_script(task, tmp_path).stdout.strip() == "[b'\\x08\\x01']"


def test_module_path_of_this_process_is_that_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of a driver may be in folders that only `sys.path` names."""
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    assert parse_proto("message OnlyHere {}", None, "value").root == "OnlyHere"


AS_A_MAP = """syntax = "proto3"; package shop; import "google/protobuf/timestamp.proto";
message Order { map<string, string> tags = 1; map<int32, google.protobuf.Timestamp> at = 2; string note = 3; }"""
AS_A_MESSAGE = """syntax = "proto3"; package shop; import "google/protobuf/timestamp.proto";
message Order {
  repeated .shop.Order.TagsEntry tags = 1; repeated AtEntry at = 2; string note = 3; // option map_entry = true;
  message TagsEntry { option map_entry = true; string key = 1; string value = 2; }
  message AtEntry { option  map_entry=true ; int32 key = 1; google.protobuf.Timestamp value = 2; }
}"""


def test_message_of_the_entries_of_a_map_is_that_map() -> None:
    """Bug: registries print a map so if a serializer has registered its descriptor, as Confluent's do. protoc refuses
    the option in a text, so the schema could not be used.
    """
    expected, found = (parse_proto(text, "Order", "value") for text in (AS_A_MAP, AS_A_MESSAGE))
    assert {each.name: each for each in found.messages} == {each.name: each for each in expected.messages}


def test_map_entry_in_a_string_is_no_option() -> None:
    text = 'syntax = "proto2"; message M { optional string s = 1 [default = "option map_entry = true;"]; }'
    assert b"option map_entry = true;" in descriptor_set(text)


def test_text_that_only_the_runtime_refuses_is_an_error_in_words() -> None:
    """Bug: TypeError."""
    with pytest.raises(SchemaError, match=r"value\.schema is no Protobuf schema that can be used: .*1Entry"):
        parse_proto('syntax = "proto3"; message M { map<string, int64> _1 = 1; }', None, "value")
