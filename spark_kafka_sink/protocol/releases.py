"""Which Kafka release brought which version of a request. Tables only; any thread may read them.

For errors that say what to upgrade to. Source: the `validVersions` of clients/src/main/resources/common/message in
Kafka's releases, and ApiKeys before 2.4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

from spark_kafka_sink.protocol.messages import ApiKey

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
    ApiKey.DESCRIBE_TRANSACTIONS: ((0, "3.0"),),
    ApiKey.LIST_TRANSACTIONS: ((0, "3.0"), (1, "3.8"), (2, "4.1")),
}  # fmt: skip
"""Pairs of a version and the release that brought it; a version between two pairs came with the earlier one."""


def first_release(api_key: ApiKey, version: int) -> str:
    """The oldest Kafka release whose brokers speak `version` of the request."""
    steps = _LATEST_BY_RELEASE[api_key]
    at = bisect_right(steps, version, key=lambda step: step[0])
    return steps[max(at - 1, 0)][1]
