"""The version to use with a node, and the release that introduced a version, compared with brokers of some releases."""

from __future__ import annotations

import pytest
from support.scripted_broker.responses import encode_response
from support.scripted_broker.versions import KAFKA_2_1, KAFKA_3_0, KAFKA_4_1, VersionRanges

from spark_kafka_sink.common.errors import ProtocolError, UnsupportedVersionError
from spark_kafka_sink.protocol.framing import parse_response
from spark_kafka_sink.protocol.metadata import MetadataRequest
from spark_kafka_sink.protocol.produce import ProduceRequest
from spark_kafka_sink.protocol.transactions import DescribeTransactionsRequest, EndTxnRequest, ListTransactionsRequest
from spark_kafka_sink.protocol.versions import (
    SUPPORTED_VERSIONS,
    ApiKey,
    NodeApiVersions,
    Request,
    VersionRange,
    first_release,
    request_type,
)


def versions_of(ranges: dict[int, tuple[int, int]], version: int = 3, **values: object) -> NodeApiVersions:
    keys = [{"api_key": key, "min_version": low, "max_version": high} for key, (low, high) in ranges.items()]
    frame = encode_response(ApiKey.API_VERSIONS, version, 1, {"error_code": 0, "api_keys": keys, **values})
    return NodeApiVersions.from_response(parse_response(request_type(18, version), frame[4:])[1])


def test_highest_common_version_is_used() -> None:
    assert versions_of({0: (0, 13)}).usable_version(ProduceRequest(-1, 1, {})) == 12
    assert versions_of({0: (0, 9)}).usable_version(ProduceRequest(-1, 1, {})) == 9
    assert versions_of({0: (3, 3)}).usable_version(ProduceRequest(-1, 1, {})) == 3


def test_limits_of_the_request_count() -> None:
    assert versions_of({26: (0, 5)}).usable_version(EndTxnRequest("t", 1, 1, True, transaction_version=1)) == 4
    with pytest.raises(UnsupportedVersionError, match=r"supports versions 0 to 5 of PRODUCE.* needs versions 7 to 12"):
        versions_of({0: (0, 5)}).usable_version(ProduceRequest(-1, 1, {}, has_zstd=True))


@pytest.mark.parametrize("theirs", [(0, 2), (13, 14)])
def test_no_version_in_common_names_the_api_and_both_ranges(theirs: tuple[int, int]) -> None:
    low, high = theirs
    with pytest.raises(UnsupportedVersionError, match=rf"versions {low} to {high} of PRODUCE \(api 0\).*3 to 12"):
        versions_of({0: theirs}).usable_version(ProduceRequest(-1, 1, {}))


def test_missing_api_of_the_node_is_named() -> None:
    with pytest.raises(UnsupportedVersionError, match="does not support METADATA"):
        versions_of({0: (0, 9)}).usable_version(MetadataRequest(None))


@pytest.mark.parametrize(("release", "produce", "metadata"), [(KAFKA_2_1, 7, 7), (KAFKA_4_1, 12, 13)])
def test_version_fits_old_and_new_releases(release: dict[int, tuple[int, int]], produce: int, metadata: int) -> None:
    node = versions_of(release)
    assert node.usable_version(ProduceRequest(-1, 1, {}, has_zstd=True)) == produce
    assert node.usable_version(MetadataRequest(("t",))) == metadata


def test_finalized_features_are_kept_by_name() -> None:
    features = [{"name": "transaction.version", "max_version_level": 2, "min_version_level": 1}]
    node = versions_of({3: (0, 9)}, finalized_features=features, finalized_features_epoch=41)
    assert node.finalized_features == {"transaction.version": 2}
    assert node.finalized_features_epoch == 41
    assert versions_of({18: (0, 0)}, version=0).finalized_features_epoch == -1


@pytest.mark.parametrize("theirs", [(5, 4), (3, 0), (-3, -1), (32_767, -32_768)])
def test_inverted_range_disables_only_its_own_api(theirs: tuple[int, int]) -> None:
    node = versions_of({0: theirs, 3: (0, 9)})
    assert node.usable_version(MetadataRequest(None)) == 9
    low, high = theirs
    with pytest.raises(UnsupportedVersionError) as refused:
        node.usable_version(ProduceRequest(-1, 1, {}))
    assert str(refused.value) == (
        f"The node claims versions {low} to {high} of PRODUCE (api 0), which hold no version; this request needs"
        " versions 3 to 12: Kafka 0.11 or newer."
    )


def test_answer_that_names_no_api_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="names no api at all"):
        versions_of({})


def test_range_that_begins_below_zero_counts_from_zero() -> None:
    assert versions_of({0: (-1, 9)}).usable_version(ProduceRequest(-1, 1, {})) == 9


def test_api_named_twice_has_the_versions_of_both_ranges() -> None:
    def named_twice(*ranges: tuple[int, int]) -> NodeApiVersions:
        keys = [{"api_key": ApiKey.PRODUCE, "min_version": low, "max_version": high} for low, high in ranges]
        frame = encode_response(ApiKey.API_VERSIONS, 0, 1, {"error_code": 0, "api_keys": keys})
        return NodeApiVersions.from_response(parse_response(request_type(18, 0), frame[4:])[1])

    assert named_twice((0, 9), (0, 7)).usable_version(ProduceRequest(-1, 1, {})) == 7
    assert named_twice((0, 7), (5, 9)).usable_version(ProduceRequest(-1, 1, {})) == 7
    with pytest.raises(UnsupportedVersionError, match="claims versions 8 to 5 of PRODUCE"):
        named_twice((0, 5), (8, 9)).usable_version(ProduceRequest(-1, 1, {}))


@pytest.mark.parametrize(
    ("theirs", "request_", "text"),
    [
        (
            {0: (0, 5)},
            ProduceRequest(-1, 1, {}, has_zstd=True),
            "compression.type=zstd needs Kafka 2.1 or newer. The node",
        ),
        ({3: (0, 2)}, MetadataRequest(None), "needs versions 4 to 13: Kafka 0.11 or newer."),
        (
            {0: (0, 9)},
            MetadataRequest(None),
            "does not support METADATA (api 3) at all; this request needs versions 4 to 13: Kafka",
        ),
        (
            {0: (0, 9)},
            ListTransactionsRequest(),
            "delivery.guarantee=exactly-once needs Kafka 3.0 or newer. The node does not support LIST_TRANSACTIONS",
        ),
        (
            {0: (0, 9)},
            DescribeTransactionsRequest(("P/driver",)),
            "delivery.guarantee=exactly-once needs Kafka 3.0 or newer. The node does not support DESCRIBE_TRANSACTIONS",
        ),
        ({3: (14, 15)}, MetadataRequest(None), "The node is newer than this client: upgrade spark-kafka-sink."),
    ],
)
def test_refusal_names_the_release_that_is_needed(
    theirs: dict[int, tuple[int, int]], request_: Request, text: str
) -> None:
    with pytest.raises(UnsupportedVersionError) as refused:
        versions_of(theirs).usable_version(request_)
    assert text in str(refused.value)


def test_range_reads_as_text() -> None:
    assert str(VersionRange(3, 12)) == "3 to 12"


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@pytest.mark.parametrize(("release", "spoken"), [((2, 1), KAFKA_2_1), ((3, 0), KAFKA_3_0), ((4, 1), KAFKA_4_1)])
def test_table_agrees_with_real_brokers(release: tuple[int, ...], spoken: VersionRanges) -> None:
    for api_key, (_, latest) in spoken.items():
        ours = SUPPORTED_VERSIONS[ApiKey(api_key)]
        if latest <= ours.latest:
            assert numbers(first_release(ApiKey(api_key), latest)) <= release, ApiKey(api_key).name
        if latest < ours.latest:
            assert numbers(first_release(ApiKey(api_key), latest + 1)) > release, ApiKey(api_key).name


def test_every_supported_version_has_a_release() -> None:
    for api_key, versions in SUPPORTED_VERSIONS.items():
        found = [numbers(first_release(api_key, version)) for version in range(versions.latest + 1)]
        assert found == sorted(found)
