"""The table of releases against what brokers of some releases say that they speak."""

from __future__ import annotations

import pytest
from support.scripted_broker.versions import KAFKA_2_1, KAFKA_3_0, KAFKA_4_1, VersionRanges

from spark_kafka_sink.protocol.messages import SUPPORTED_VERSIONS, ApiKey
from spark_kafka_sink.protocol.releases import first_release


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@pytest.mark.parametrize(("release", "spoken"), [((2, 1), KAFKA_2_1), ((3, 0), KAFKA_3_0), ((4, 1), KAFKA_4_1)])
def test_table_agrees_with_what_brokers_say(release: tuple[int, ...], spoken: VersionRanges) -> None:
    for api_key, (_, latest) in spoken.items():
        ours = SUPPORTED_VERSIONS[ApiKey(api_key)]
        if latest <= ours.latest:
            assert numbers(first_release(ApiKey(api_key), latest)) <= release, ApiKey(api_key).name
        if latest < ours.latest:
            assert numbers(first_release(ApiKey(api_key), latest + 1)) > release, ApiKey(api_key).name


def test_every_version_that_we_need_has_a_release() -> None:
    for api_key, versions in SUPPORTED_VERSIONS.items():
        found = [numbers(first_release(api_key, version)) for version in range(versions.latest + 1)]
        assert found == sorted(found)
