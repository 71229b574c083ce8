"""The messages that this client sends, the versions of each that it understands, and the version to use with a node.

The keys are those of the protocol guide ("Api Keys"). A node says in its ApiVersions response which versions it
understands; a request uses the highest version that both sides understand. Holds no state; any thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import cache
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_writer

from spark_kafka_sink.common.errors import ProtocolError, UnsupportedVersionError

Message: TypeAlias = Any
"""A kio entity (a frozen dataclass). Its class depends on the negotiated version, so there is no narrower type."""

MessageType: TypeAlias = Any
"""The class of a `Message`."""


class ApiKey(IntEnum):
    """The requests that this client sends."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_CONFIGS = 32
    SASL_AUTHENTICATE = 36
    DESCRIBE_QUORUM = 55
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    GET_TELEMETRY_SUBSCRIPTIONS = 71
    PUSH_TELEMETRY = 72


class VersionRange(NamedTuple):
    """Oldest and latest version, both included."""

    oldest: int
    latest: int

    def __str__(self) -> str:
        return f"{self.oldest} to {self.latest}"


SUPPORTED_VERSIONS: Final[Mapping[ApiKey, VersionRange]] = {
    # Record batches of magic 2 need 3. From 13 on a topic id names the topic, so that a send would fail after the
    # topic is deleted and created again.
    ApiKey.PRODUCE: VersionRange(3, 12),
    # 4 has the isolation level. From 13 on a topic id names the topic.
    ApiKey.FETCH: VersionRange(4, 12),
    ApiKey.LIST_OFFSETS: VersionRange(1, 10),
    # Below 4 the request cannot forbid that the topic is created. Every broker with Produce 3 has 4.
    ApiKey.METADATA: VersionRange(4, 13),
    # Below 7 it does not wait for open transactions (KIP-447). From 10 on a topic id names the topic.
    ApiKey.OFFSET_FETCH: VersionRange(7, 9),
    # 0 finds coordinators of groups only, not of transactions.
    ApiKey.FIND_COORDINATOR: VersionRange(1, 6),
    # After 0 the tokens would have no frames.
    ApiKey.SASL_HANDSHAKE: VersionRange(1, 1),
    # 4 only adds features from version 0 on, and Azure Event Hubs closes the connection instead of refusing it.
    ApiKey.API_VERSIONS: VersionRange(0, 3),
    # From 4 on the broker can choose the numbers of replicas and partitions (KIP-464).
    ApiKey.CREATE_TOPICS: VersionRange(4, 7),
    # 6 is two-phase commit (KIP-939), which no released broker has.
    ApiKey.INIT_PRODUCER_ID: VersionRange(0, 5),
    # 4 and later are for requests between brokers (KIP-890).
    ApiKey.ADD_PARTITIONS_TO_TXN: VersionRange(0, 3),
    ApiKey.ADD_OFFSETS_TO_TXN: VersionRange(0, 4),
    ApiKey.END_TXN: VersionRange(0, 5),
    ApiKey.TXN_OFFSET_COMMIT: VersionRange(0, 5),
    ApiKey.SASL_AUTHENTICATE: VersionRange(0, 2),
    ApiKey.DESCRIBE_TRANSACTIONS: VersionRange(0, 0),
    ApiKey.LIST_TRANSACTIONS: VersionRange(0, 2),
    ApiKey.DESCRIBE_CONFIGS: VersionRange(1, 4),
    # 0 has no time.
    ApiKey.DESCRIBE_QUORUM: VersionRange(1, 2),
    ApiKey.DESCRIBE_PRODUCERS: VersionRange(0, 0),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: VersionRange(0, 0),
    ApiKey.PUSH_TELEMETRY: VersionRange(0, 0),
}


PURPOSE_OF_TRANSACTION_V2: Final = "A transaction in a cluster with transaction.version=2"
"""Each broker of such a cluster can do it. A proxy in front of the brokers may not."""
_MS: Final = timedelta(milliseconds=1)


@cache
def request_type(api_key: int, version: int) -> MessageType:
    """Return kio's class of this request in this version."""
    return load_request_schema(api_key, version)


@cache
def response_type(api_key: int, version: int) -> MessageType:
    """Return kio's class of the response to this request in this version."""
    return load_response_schema(api_key, version)


@cache
def writer_of(entity_type: MessageType) -> Callable[[Any, Message], None]:
    """Return the function that writes entities of this class into an object with a `write` method."""
    return cast("Callable[[Any, Message], None]", entity_writer(entity_type))


def to_ms(duration: timedelta) -> int:
    """Return a duration of kio in whole ms."""
    return duration // _MS if duration else 0


class Request(Protocol):
    """A request for the network client, which chooses the version when it knows those of the node."""

    @property
    def api_key(self) -> ApiKey: ...

    @property
    def oldest_version(self) -> int: ...

    @property
    def latest_version(self) -> int: ...

    @property
    def purpose(self) -> str:
        """The setting or the work that needs `oldest_version`, for error texts. Empty if it is plain."""
        ...

    def build(self, version: int) -> Message:
        """Return kio's entity. Raises UnsupportedVersionError if the version lacks a field that the request needs."""
        ...

    def encode(self, version: int, correlation_id: int, client_id: str | None) -> list[memoryview]:
        """Return the buffers of the frame of `build(version)`.

        Raises as `build`, and ProtocolError if a value does not fit its field.
        """
        ...


_LATEST_BY_RELEASE: Final[Mapping[ApiKey, Sequence[tuple[int, str]]]] = {
    ApiKey.PRODUCE: (
        (0, "0.8"), (1, "0.9"), (2, "0.10"), (3, "0.11"), (4, "1.0"), (6, "2.0"), (7, "2.1"), (8, "2.4"), (9, "2.8"),
        (10, "3.7"), (11, "3.8"), (12, "4.0"),
    ),
    ApiKey.FETCH: ((0, "0.8"), (4, "0.11"), (6, "1.0"), (7, "1.1"), (8, "2.0"), (9, "2.1"), (11, "2.3"), (12, "2.7")),
    ApiKey.LIST_OFFSETS: (
        (0, "0.8"), (1, "0.10.1"), (2, "0.11"), (3, "2.0"), (4, "2.1"), (5, "2.2"), (6, "2.8"), (7, "3.0"), (8, "3.5"),
        (9, "3.9"), (10, "4.0"),
    ),
    ApiKey.METADATA: (
        (0, "0.8"), (1, "0.10"), (2, "0.10.1"), (4, "0.11"), (5, "1.0"), (6, "2.0"), (7, "2.1"), (8, "2.3"), (9, "2.4"),
        (10, "2.8"), (12, "3.1"), (13, "4.0"),
    ),
    ApiKey.OFFSET_FETCH: (
        (0, "0.8"), (2, "0.10.2"), (3, "0.11"), (4, "2.0"), (5, "2.1"), (6, "2.4"), (7, "2.5"), (8, "3.0"),
        (9, "3.7"),
    ),
    ApiKey.FIND_COORDINATOR: ((0, "0.8"), (1, "0.11"), (2, "2.0"), (3, "2.4"), (4, "3.0"), (5, "3.8"), (6, "3.9")),
    ApiKey.SASL_HANDSHAKE: ((0, "0.10"), (1, "1.0")),
    ApiKey.API_VERSIONS: ((0, "0.10"), (1, "0.11"), (2, "2.0"), (3, "2.4"), (4, "3.9")),
    ApiKey.CREATE_TOPICS: ((0, "0.10.1"), (2, "0.11"), (3, "2.0"), (4, "2.4"), (6, "2.7"), (7, "2.8")),
    ApiKey.INIT_PRODUCER_ID: ((0, "0.11"), (1, "2.0"), (2, "2.4"), (3, "2.5"), (4, "2.7"), (5, "3.8")),
    ApiKey.ADD_PARTITIONS_TO_TXN: ((0, "0.11"), (1, "2.0"), (2, "2.7"), (3, "2.8")),
    ApiKey.ADD_OFFSETS_TO_TXN: ((0, "0.11"), (1, "2.0"), (2, "2.7"), (3, "2.8"), (4, "3.8")),
    ApiKey.END_TXN: ((0, "0.11"), (1, "2.0"), (2, "2.7"), (3, "2.8"), (4, "3.8"), (5, "4.0")),
    ApiKey.TXN_OFFSET_COMMIT: ((0, "0.11"), (1, "2.0"), (2, "2.1"), (3, "2.5"), (4, "3.8"), (5, "4.0")),
    ApiKey.SASL_AUTHENTICATE: ((0, "1.0"), (1, "2.2"), (2, "2.5")),
    ApiKey.DESCRIBE_CONFIGS: ((0, "0.11"), (1, "1.1"), (2, "2.0"), (3, "2.6"), (4, "2.8")),
    ApiKey.DESCRIBE_QUORUM: ((0, "3.0"), (1, "3.3"), (2, "3.9")),
    ApiKey.DESCRIBE_PRODUCERS: ((0, "2.8"),),
    ApiKey.DESCRIBE_TRANSACTIONS: ((0, "3.0"),),
    ApiKey.LIST_TRANSACTIONS: ((0, "3.0"), (1, "3.8"), (2, "4.1")),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: ((0, "3.7"),),
    ApiKey.PUSH_TELEMETRY: ((0, "3.7"),),
}  # fmt: skip
"""Pairs of a version and the release that brought it. A version between two pairs came with the earlier one.

Source: the `validVersions` of clients/src/main/resources/common/message in Kafka's releases, and ApiKeys before 2.4.
"""


def first_release(api_key: ApiKey, version: int) -> str:
    """Return the oldest Kafka release whose brokers support `version` of the request."""
    steps = _LATEST_BY_RELEASE[api_key]
    at = bisect_right(steps, version, key=lambda step: step[0])
    return steps[max(at - 1, 0)][1]


def oldest_release_of(ranges: Mapping[int, VersionRange]) -> str:
    """Return the oldest Kafka release that can have these versions of its requests, such as `3.9`."""
    found = ["0.8"]
    for key, steps in _LATEST_BY_RELEASE.items():
        theirs = ranges.get(int(key))
        if theirs is not None and theirs.latest >= 0:
            found.append(first_release(key, min(theirs.latest, steps[-1][0])))
    return max(found, key=release_number)


def release_number(release: str) -> tuple[int, ...]:
    """Return a release such as `3.9` in a form that compares."""
    return tuple(map(int, release.split(".")))


@dataclass(frozen=True, slots=True)
class NodeApiVersions:
    """The version range of each api key at a node, and the finalized features of the cluster (KIP-584)."""

    ranges: Mapping[int, VersionRange]
    finalized_features: Mapping[str, int] = field(default_factory=dict)
    finalized_features_epoch: int = -1

    @classmethod
    def from_response(cls, response: Message) -> NodeApiVersions:
        """Read an ApiVersions response of any version without error.

        A range that is upside down or negative stays as it is: it contains no version, and only matters if that api is
        used. If an api is named twice, the versions in both ranges count. Raises ProtocolError if no api is named, as
        in a message of zeroes.
        """
        if not response.api_keys:
            raise ProtocolError("The answer names no api at all.")
        ranges: dict[int, VersionRange] = {}
        for api in response.api_keys:
            oldest, latest = int(api.min_version), int(api.max_version)
            if (other := ranges.get(int(api.api_key))) is not None:
                oldest, latest = max(oldest, other.oldest), min(latest, other.latest)
            ranges[int(api.api_key)] = VersionRange(oldest, latest)
        features = {
            feature.name: int(feature.max_version_level) for feature in getattr(response, "finalized_features", ())
        }
        return cls(ranges, features, int(getattr(response, "finalized_features_epoch", -1)))

    def usable_version(self, request: Request) -> int:
        """Return the highest version that both sides support. Raises UnsupportedVersionError with both ranges."""
        oldest, latest = request.oldest_version, request.latest_version
        theirs = self.ranges.get(request.api_key)
        if theirs is not None:
            version = min(latest, theirs.latest)
            if version >= oldest and version >= theirs.oldest:
                return version
        raise _refusal(request, theirs)


def _refusal(request: Request, theirs: VersionRange | None) -> UnsupportedVersionError:
    """Return the error: the versions that the request needs, those of the node, and the release to upgrade to."""
    name = f"{request.api_key.name} (api {int(request.api_key)})"
    oldest, latest = request.oldest_version, request.latest_version
    needed = f"this request needs versions {VersionRange(oldest, latest)}"
    if theirs is not None and theirs.oldest > latest and theirs.latest >= theirs.oldest:
        return UnsupportedVersionError(
            f"The node supports versions {theirs} of {name}; {needed}. The node is newer than this client: upgrade"
            " spark-kafka-sink."
        )
    if theirs is None:
        lack = f"The node does not support {name} at all"
    elif theirs.oldest > theirs.latest or theirs.latest < 0:
        lack = f"The node claims versions {theirs} of {name}, which hold no version"
    else:
        lack = f"The node supports versions {theirs} of {name}"
    release = first_release(request.api_key, oldest)
    if not request.purpose:
        return UnsupportedVersionError(f"{lack}; {needed}: Kafka {release} or newer.")
    refusal = UnsupportedVersionError(f"{request.purpose} needs Kafka {release} or newer. {lack}; {needed}.")
    refusal.oldest_release = release
    return refusal
