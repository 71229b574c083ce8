"""A small admin client that creates, deletes and describes topics: kio's messages, over one blocking socket a request.

PLAINTEXT only. Kafka 3.0 to 4.3 all support the versions that it uses.
"""

from __future__ import annotations

import io
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from kio.schema.api_versions.v3 import request as api_versions
from kio.schema.api_versions.v3.response import ApiVersionsResponse
from kio.schema.create_topics.v7 import request as create_topics
from kio.schema.create_topics.v7.response import CreateTopicsResponse
from kio.schema.delete_topics.v6 import request as delete_topics
from kio.schema.delete_topics.v6.response import DeleteTopicsResponse
from kio.schema.errors import ErrorCode
from kio.schema.metadata.v12 import request as metadata
from kio.schema.metadata.v12.response import MetadataResponse, MetadataResponseTopic
from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.types import TopicName
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import i16, i32, i32Timedelta
from kio.static.protocol import HeaderV2RequestPayload, ResponsePayload

from spark_kafka_sink.common.errors import LocalBrokerError, error_for_code
from spark_kafka_sink.common.texts import shown

_CLIENT = "spark-kafka-sink-local"
_POLL_S = 0.02
_SERVER = re.compile(r"(?:\[(?P<address>[^\[\]]+)\]|(?P<host>[^\s:/@\[\]]+)):(?P<port>[0-9]{1,5})")

Response = TypeVar("Response", bound=ResponsePayload)


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    partition: int
    leader: int
    """The leader's node id; -1 while there is none."""
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopicDescription:
    name: str
    partitions: tuple[PartitionDescription, ...]
    """Ordered by partition number."""


class Admin:
    """Talks to the servers of a bootstrap list. Raises LocalBrokerError if none answers within `timeout_s`, and for a
    list that is not `host:port,...`.
    """

    def __init__(self, bootstrap_servers: str, *, timeout_s: float = 30.0) -> None:
        self.bootstrap_servers = bootstrap_servers
        self._servers = tuple(server.strip() for server in bootstrap_servers.split(","))
        for server in self._servers:
            _host_and_port(server)
        self._timeout_s = timeout_s

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int = 1,
        config: Mapping[str, str | int] | None = None,
    ) -> None:
        """Create a topic and wait until every server shows all its partitions with a leader.

        Raises the error of the server's code (TopicExistsError, InvalidTopicError, ...).
        """
        topic = create_topics.CreatableTopic(
            name=TopicName(name),
            num_partitions=i32(partitions),
            replication_factor=i16(replication_factor),
            assignments=(),
            configs=tuple(
                create_topics.CreatableTopicConfig(name=key, value=str(value)) for key, value in (config or {}).items()
            ),
        )
        payload = create_topics.CreateTopicsRequest(topics=(topic,), timeout=_milliseconds(self._timeout_s))
        (result,) = self.ask(payload, CreateTopicsResponse).topics
        check(result.error_code, f"topic {name} cannot be created: {result.error_message or result.error_code.name}")

        def ready(topic: MetadataResponseTopic) -> bool:
            led = [each for each in topic.partitions if each.leader_id >= 0 and each.error_code == ErrorCode.none]
            return len(led) == partitions

        self._await_topic(name, ready, "its partitions have no leader everywhere")

    def delete_topic(self, name: str) -> None:
        """Delete a topic and wait until no server shows it any more."""
        payload = delete_topics.DeleteTopicsRequest(
            topics=(delete_topics.DeleteTopicState(name=TopicName(name), topic_id=None),),
            timeout=_milliseconds(self._timeout_s),
        )
        (result,) = self.ask(payload, DeleteTopicsResponse).responses
        check(result.error_code, f"topic {name} cannot be deleted: {result.error_message or result.error_code.name}")
        self._await_topic(
            name, lambda topic: topic.error_code == ErrorCode.unknown_topic_or_partition, "it is still shown"
        )

    def describe_topic(self, name: str) -> TopicDescription:
        """Return leaders and replicas of a topic. A topic that does not exist is not created."""
        topic = _only_topic(self.ask(_metadata_request(name), MetadataResponse))
        check(topic.error_code, f"topic {name} cannot be described: {topic.error_code.name}")
        partitions = (
            PartitionDescription(
                int(each.partition_index),
                int(each.leader_id),
                tuple(int(node) for node in each.replica_nodes),
                tuple(int(node) for node in each.isr_nodes),
            )
            for each in topic.partitions
        )
        return TopicDescription(name, tuple(sorted(partitions, key=lambda each: each.partition)))

    def finalized_features(self) -> dict[str, int]:
        """Return the cluster's finalized features by name, such as `transaction.version`, with their levels."""
        payload = api_versions.ApiVersionsRequest(client_software_name=_CLIENT, client_software_version="1")
        response = self.ask(payload, ApiVersionsResponse)
        return {each.name: int(each.max_version_level) for each in response.finalized_features}

    def broker_ids(self, server: str) -> set[int]:
        """Return the ids of the brokers that one server considers alive. Raises OSError if it does not answer."""
        payload = metadata.MetadataRequest(
            topics=(), allow_auto_topic_creation=False, include_topic_authorized_operations=False
        )
        response = _exchange(server, payload, MetadataResponse, self._timeout_s)
        return {int(broker.node_id) for broker in response.brokers}

    def ask(
        self, payload: HeaderV2RequestPayload, response_type: type[Response], servers: Sequence[str] = ()
    ) -> Response:
        """Return the answer of the first server that gives one."""
        failures: list[str] = []
        for server in servers or self._servers:
            try:
                return _exchange(server, payload, response_type, self._timeout_s)
            except OSError as error:
                failures.append(f"{server}: {error}")
        raise LocalBrokerError(f"No server answers a {type(payload).__name__}: {'; '.join(failures)}")

    def _await_topic(self, name: str, settled: Callable[[MetadataResponseTopic], bool], what_is_wrong: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        for server in self._servers:
            while not settled(_only_topic(self.ask(_metadata_request(name), MetadataResponse, [server]))):
                if time.monotonic() > deadline:
                    raise LocalBrokerError(f"topic {name} on {server}: {what_is_wrong} after {self._timeout_s:g} s")
                time.sleep(_POLL_S)


def _metadata_request(topic: str) -> metadata.MetadataRequest:
    return metadata.MetadataRequest(
        topics=(metadata.MetadataRequestTopic(topic_id=None, name=TopicName(topic)),),
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
    )


def _only_topic(response: MetadataResponse) -> MetadataResponseTopic:
    (topic,) = response.topics
    return topic


def check(code: ErrorCode, message: str) -> None:
    """Raise the error of a server's code with `message`. Code 0 raises nothing."""
    if code != ErrorCode.none:
        raise error_for_code(int(code), message)


def _milliseconds(seconds: float) -> i32Timedelta:
    return i32Timedelta.parse(timedelta(seconds=seconds))


def _exchange(
    server: str, payload: HeaderV2RequestPayload, response_type: type[Response], timeout_s: float
) -> Response:
    """Send one request on its own connection, and return the response. Raises OSError."""
    header = RequestHeader(
        request_api_key=payload.__api_key__,
        request_api_version=payload.__version__,
        correlation_id=i32(1),
        client_id=_CLIENT,
    )
    buffer = io.BytesIO()
    entity_writer(RequestHeader)(buffer, header)
    entity_writer(type(payload))(buffer, payload)
    with socket.create_connection(_host_and_port(server), timeout=timeout_s) as connection:
        connection.sendall(struct.pack(">i", len(buffer.getvalue())) + buffer.getvalue())
        (size,) = struct.unpack(">i", _receive(connection, 4))
        frame = _receive(connection, size)
    _, header_size = entity_reader(response_type.__header_schema__)(frame, 0)
    response, _ = entity_reader(response_type)(frame, header_size)
    return response


def _host_and_port(server: str) -> tuple[str, int]:
    """Return both parts of `host:port`, of an IPv6 address without its brackets."""
    found = _SERVER.fullmatch(server)
    if found is None:
        raise LocalBrokerError(f"{shown(server)} is no server: it must be host:port, and [address]:port with IPv6.")
    return found["address"] or found["host"], int(found["port"])


def _receive(connection: socket.socket, size: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = connection.recv(size - len(chunks))
        if not chunk:
            raise ConnectionError("the server closed the connection in the middle of an answer")
        chunks += chunk
    return bytes(chunks)
