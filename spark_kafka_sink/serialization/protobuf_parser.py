"""Parses the text of a .proto file, on the driver.

The parser is `protoc` itself, of the package grpcio-tools (extra `protobuf`). It runs in a process of its own, because
it prints its errors. Only this module uses it, and only inside functions: tasks get the parsed `ProtoSchema`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.serialization.message_indexes import message_name
from spark_kafka_sink.serialization.protobuf_schema import ProtoEnum, ProtoField, ProtoMessage, ProtoSchema

_FILE: Final = "schema.proto"
_ERROR: Final = re.compile(rf"^.*?{re.escape(_FILE)}:(?:(\d+):(\d+): )?(?!warning)(.*)$", re.MULTILINE)
_IMPORT: Final = re.compile(r'Import "(.+?)" was not found')
_MAP_ENTRY: Final = re.compile(
    r"""(?P<other>//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|\boption\s+map_entry\s*=\s*true\s*;""",
    re.DOTALL,
)
"""The option. `other` matches comments and strings, which may contain the same words."""
_MARKED: Final = 2**29 - 1
"""The highest number of a field."""
_MARK: Final = f"reserved {_MARKED};"
_MOST_ERRORS: Final = 3
WELL_KNOWN: Final = "google/protobuf/"
"""Imports that work: files that come with the parser."""


def parse_proto(proto: str, message: str | None, field: str) -> ProtoSchema:
    """Return the message `message` of a .proto file, the first one if it is None. `field`: value or key, for errors.

    Takes some tenths of a second for a text that was not parsed before. Raises SchemaError for a text that is no schema
    or has no such message, and ConfigError without the extra `protobuf`.
    """
    root = message_name(proto, message)
    try:
        return _parsed(proto, root)
    except ModuleNotFoundError:
        raise ConfigError(
            f"{field}.format=protobuf needs a parser of .proto files on the driver, and grpcio-tools is not installed:"
            " pip install 'spark-kafka-sink[protobuf]'.",
            setting=f"{field}.format",
        ) from None
    except _NoSchemaError as error:
        raise SchemaError(f"{field}.schema is no Protobuf schema that can be used: {error}") from None


class _NoSchemaError(Exception):
    """What the parser says."""


@lru_cache(maxsize=1024)
def _parsed(proto: str, root: str) -> ProtoSchema:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    try:
        for file in FileDescriptorSet.FromString(descriptor_set(proto)).file:
            pool.Add(file)
        return _schema_of(pool.FindMessageTypeByName(root))
    except (TypeError, KeyError) as error:  # protoc takes a few texts that the runtime does not take
        raise _NoSchemaError(one_line(str(error.args[0] if error.args else error))) from None


@lru_cache(maxsize=64)
def descriptor_set(proto: str) -> bytes:
    """Return the FileDescriptorSet of a .proto file and its imports, serialized; the file itself is the last one.

    Registries that were given a descriptor print a map as the message of its entries, with the option `map_entry`,
    which protoc does not allow in a text. So protoc reads a mark instead, and the descriptor gets the option.
    """
    marked = _MAP_ENTRY.sub(lambda found: found["other"] or _MARK, proto)
    return _descriptor_set(marked) if marked == proto else _with_map_entries(_descriptor_set(marked))


def _with_map_entries(descriptors: bytes) -> bytes:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    files = FileDescriptorSet.FromString(descriptors)
    messages = list(files.file[-1].message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        if any(each.start == _MARKED for each in message.reserved_range):
            del message.reserved_range[:]
            message.options.map_entry = True
    serialized: bytes = files.SerializeToString()
    return serialized


def _descriptor_set(proto: str) -> bytes:
    import grpc_tools

    with TemporaryDirectory(prefix="spark-kafka-sink-") as folder:
        try:
            Path(folder, _FILE).write_text(proto, encoding="utf-8")
        except UnicodeEncodeError:
            raise _NoSchemaError("it has half of a character (a lone surrogate), which is no text.") from None
        result = Path(folder, "descriptors")
        options = ["--include_imports", f"--proto_path={folder}", f"--descriptor_set_out={result}", _FILE]
        done = subprocess.run(  # noqa: S603  the text is in a file
            [sys.executable, "-P", "-m", f"{grpc_tools.__name__}.protoc", *options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            return result.read_bytes()
    raise _NoSchemaError(_said(done.stderr.decode("utf-8", "replace")))


def _said(output: str) -> str:
    """Return the errors of protoc, each with its place, as sentences."""
    missing = _IMPORT.search(output)
    if missing is not None:
        return (
            f"it imports {one_line(missing[1])}, and only the files of {WELL_KNOWN} can be imported. Write the types"
            " into the schema itself."
        )
    errors = [
        f"line {line}, column {column}: {one_line(text)}" if line else one_line(text)
        for line, column, text in _ERROR.findall(output)
    ] or [one_line(output.strip())]
    more = f" And {len(errors) - _MOST_ERRORS} more." if len(errors) > _MOST_ERRORS else ""
    return " ".join(f"{each.rstrip('.')}." for each in errors[:_MOST_ERRORS]) + more


# ---- from descriptors ----------------------------------------------------------------------------------------------


def _schema_of(root: Any) -> ProtoSchema:
    """`root`: a Descriptor."""
    messages: dict[str, ProtoMessage] = {}
    enums: dict[str, ProtoEnum] = {}
    waiting = [root]
    while waiting:
        descriptor = waiting.pop()
        if descriptor.full_name in messages:
            continue
        messages[descriptor.full_name] = _message(descriptor)
        waiting += [each.message_type for each in descriptor.fields if each.message_type is not None]
        for each in descriptor.fields:
            if each.enum_type is not None:
                values = tuple((value.name, value.number) for value in each.enum_type.values)
                enums[each.enum_type.full_name] = ProtoEnum(each.enum_type.full_name, values)
    return ProtoSchema(root.full_name, tuple(messages.values()), tuple(enums.values()))


def _message(descriptor: Any) -> ProtoMessage:
    fields = sorted(_fields(descriptor), key=lambda each: each.number)
    return ProtoMessage(descriptor.full_name, tuple(fields), bool(descriptor.GetOptions().map_entry))


def _fields(descriptor: Any) -> Iterator[ProtoField]:
    from google.protobuf.descriptor_pb2 import DescriptorProto

    written = DescriptorProto()
    descriptor.CopyToProto(written)
    alone = {each.name for each in written.field if each.proto3_optional}  # each has a oneof that nobody wrote
    kinds = _kinds()
    for each in descriptor.fields:
        of = each.message_type or each.enum_type
        oneof = each.containing_oneof
        yield ProtoField(
            each.name,
            each.number,
            kinds[each.type],
            "" if of is None else of.full_name,
            is_repeated=each.is_repeated,
            is_packed=each.is_packed,
            is_required=each.is_required,
            has_presence=each.has_presence,
            oneof="" if oneof is None or each.name in alone else oneof.name,
        )


@lru_cache(maxsize=1)
def _kinds() -> dict[int, str]:
    """Return the names of field types by their numbers in descriptors."""
    from google.protobuf.descriptor import FieldDescriptor

    names = [name for name in dir(FieldDescriptor) if name.startswith("TYPE_")]
    return {getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower() for name in names}
