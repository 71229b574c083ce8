"""Which messages we speak, in which versions. Tables only; any thread may read them.

The keys are those of the protocol guide ("Api Keys"). The versions are what our code understands *and* kio has; what
a broker knows comes from its ApiVersions response, and a request uses the highest version that both know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import IntEnum
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias, cast

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_writer

Message: TypeAlias = Any
"""A kio entity (a frozen dataclass). Its class depends on the negotiated version, so no narrower type is true of it."""

MessageType: TypeAlias = Any
"""The class of a `Message`."""


class ApiKey(IntEnum):
    """The requests that we send: to produce, for transactions, to read back, to create and check a topic, to log in."""

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
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66


class VersionRange(NamedTuple):
    """Oldest and latest version, both included."""

    oldest: int
    latest: int

    def __str__(self) -> str:
        return f"{self.oldest} to {self.latest}"


SUPPORTED_VERSIONS: Final[Mapping[ApiKey, VersionRange]] = {
    # Record batches of magic 2 need 3. From 13 on topics go by id, which would tie each send to one incarnation of
    # the topic.
    ApiKey.PRODUCE: VersionRange(3, 12),
    # Isolation level since 4; by topic name up to 12.
    ApiKey.FETCH: VersionRange(4, 12),
    ApiKey.LIST_OFFSETS: VersionRange(1, 10),
    # Below 4 auto-creation cannot be declined: asking about a topic would make it. Every broker with Produce 3 speaks
    # 4.
    ApiKey.METADATA: VersionRange(4, 13),
    # Below 7 it does not wait for open transactions (KIP-447); from 10 on topics go by id.
    ApiKey.OFFSET_FETCH: VersionRange(7, 9),
    # 0 knows groups only, not transactions.
    ApiKey.FIND_COORDINATOR: VersionRange(1, 6),
    # 0 would be followed by unframed tokens.
    ApiKey.SASL_HANDSHAKE: VersionRange(1, 1),
    ApiKey.API_VERSIONS: VersionRange(0, 4),
    # From 4 on a broker fills in replicas and partitions that are left to it (KIP-464); older ones are not asked.
    ApiKey.CREATE_TOPICS: VersionRange(4, 7),
    # 6 is two-phase commit (KIP-939), which no released broker offers.
    ApiKey.INIT_PRODUCER_ID: VersionRange(0, 5),
    # 4 and later are for brokers among themselves (KIP-890).
    ApiKey.ADD_PARTITIONS_TO_TXN: VersionRange(0, 3),
    ApiKey.ADD_OFFSETS_TO_TXN: VersionRange(0, 4),
    ApiKey.END_TXN: VersionRange(0, 5),
    ApiKey.TXN_OFFSET_COMMIT: VersionRange(0, 5),
    ApiKey.SASL_AUTHENTICATE: VersionRange(0, 2),
    ApiKey.DESCRIBE_TRANSACTIONS: VersionRange(0, 0),
    ApiKey.LIST_TRANSACTIONS: VersionRange(0, 2),
    ApiKey.DESCRIBE_CONFIGS: VersionRange(1, 4),
}


_MS: Final = timedelta(milliseconds=1)


@cache
def request_type(api_key: int, version: int) -> MessageType:
    """kio's class of this request in this version."""
    return load_request_schema(api_key, version)


@cache
def response_type(api_key: int, version: int) -> MessageType:
    """kio's class of the response to this request in this version."""
    return load_response_schema(api_key, version)


@cache
def writer_of(entity_type: MessageType) -> Callable[[Any, Message], None]:
    """The function that writes entities of this class into anything with a `write` method."""
    return cast("Callable[[Any, Message], None]", entity_writer(entity_type))


def to_ms(duration: timedelta) -> int:
    """kio gives durations as timedelta; everything above counts whole ms."""
    return duration // _MS if duration else 0
