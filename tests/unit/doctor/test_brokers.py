"""What the doctor decides from what it saw of an address, of releases, and of the brokers' clock."""

from __future__ import annotations

import pytest

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    BootstrapResolutionError,
    ClusterAuthorizationError,
    DisconnectError,
    KafkaError,
    SslAuthenticationError,
)
from spark_kafka_sink.doctor.brokers import (
    CLOCK_MS,
    CLOCK_MUCH_MS,
    NEEDS_OF_OPTIONS,
    SOON_MS,
    Cluster,
    Seen,
    judge,
    judge_clock,
    judge_releases,
)
from spark_kafka_sink.doctor.connections import Contact, Stage
from spark_kafka_sink.doctor.findings import Finding, Status
from spark_kafka_sink.network import tls
from spark_kafka_sink.network.peek import Certificate
from spark_kafka_sink.protocol.versions import NodeApiVersions, VersionRange

NOW_MS = 1_800_000_000_000
DAY_MS = 86_400_000
PLAIN = ProducerConfig.from_mapping({"bootstrap.servers": "h1:9092"})
TLS = ProducerConfig.from_mapping({"bootstrap.servers": "h1:9092", "security.protocol": "SSL"})
NEW = NodeApiVersions({key: VersionRange(0, 12) for key in range(70)})


def node(stage: Stage = Stage.READY, error: KafkaError | None = None, number: int = 1) -> Contact:
    versions = NEW if stage is Stage.READY else None
    return Contact("h1", 9092, number, stage, error, versions=versions)


def problems(findings: list[Finding]) -> list[str]:
    return [each.name for each in findings if each.name]


def failure(fault: str) -> SslAuthenticationError:
    error = SslAuthenticationError("Node 1 at h1:9092: the TLS handshake failed (internal error).")
    error.fault = fault
    return error


def test_tls_failure_without_a_name_of_its_own_shows_its_text() -> None:
    (found,) = judge(Cluster((), (Seen(node(Stage.TLS, failure(""))),)), TLS, NOW_MS)
    assert found.name == "tls-failed"
    assert "internal error" in found.seen


def test_connection_lost_in_the_handshake_is_a_failure_of_tls() -> None:
    (found,) = judge(Cluster((), (Seen(node(Stage.TLS, DisconnectError("It ended."))),)), TLS, NOW_MS)
    assert found.name == "tls-failed"


@pytest.mark.parametrize(("left_ms", "is_soon"), [(SOON_MS - 1, True), (SOON_MS, False)])
def test_certificate_that_expires_soon_is_a_warning(left_ms: int, is_soon: bool) -> None:
    certificate = Certificate("h1", "authority", NOW_MS - DAY_MS, NOW_MS + left_ms, ("h1",))
    findings = judge(Cluster((), (Seen(node(), certificate=certificate),)), TLS, NOW_MS)
    assert problems(findings) == (["certificate-expires-soon"] if is_soon else [])
    assert findings[0].status is Status.OK


def test_expired_authority_is_told_from_an_expired_certificate() -> None:
    certificate = Certificate("h1", "authority", NOW_MS - DAY_MS, NOW_MS + DAY_MS, ("h1",))
    seen = Seen(node(Stage.TLS, failure(tls.EXPIRED)), certificate=certificate)
    (found,) = judge(Cluster((), (seen,)), TLS, NOW_MS)
    assert found.name == "certificate-expired"
    assert found.seen.endswith("An authority above it has expired")


def test_certificate_of_year_10000_is_shown() -> None:
    certificate = Certificate("h1", "authority", 0, 253_402_300_800_000, ())
    seen = Seen(node(Stage.TLS, failure(tls.UNKNOWN_AUTHORITY)), certificate=certificate)
    (found,) = judge(Cluster((), (seen,)), TLS, NOW_MS)
    assert "a day outside the calendar, for no names" in found.seen


def test_failing_address_of_a_server_and_a_node_is_shown_once() -> None:
    error = BootstrapResolutionError("h1:9092 cannot be resolved.")
    cluster = Cluster((Seen(node(Stage.NAME, error, -1)),), (Seen(node(Stage.NAME, error)),))
    findings = judge(cluster, PLAIN, NOW_MS)
    assert problems(findings) == ["listener-unreachable"]
    assert "node 1" in findings[0].what


def test_text_of_a_broker_stays_on_one_line() -> None:
    error = DisconnectError("first\nsecond\x1b[31m")
    (found,) = judge(Cluster((), (Seen(node(Stage.VERSIONS, error)),)), PLAIN, NOW_MS)
    assert found.seen == "first?second?[31m"


@pytest.mark.parametrize("option", NEEDS_OF_OPTIONS)
def test_broker_without_a_request_of_an_option_is_too_old_for_it(option: str) -> None:
    for key, version in NEEDS_OF_OPTIONS[option]:
        ranges = {other: each for other, each in NEW.ranges.items() if other != key}
        if version:
            ranges[key] = VersionRange(0, version - 1)
        contact = node()
        contact.versions = NodeApiVersions(ranges)
        (found,) = judge_releases([contact], [option])
        assert found.name == "brokers-too-old"
        assert option in found.change
    assert judge_releases([node()], [option]) == []


@pytest.mark.parametrize(
    ("ahead_ms", "name"),
    [
        (0, ""),
        (CLOCK_MS, ""),
        (-CLOCK_MS, ""),
        (CLOCK_MS + 1, "clock-differs"),
        (-CLOCK_MS - 1, "clock-differs"),
        (CLOCK_MUCH_MS, "clock-differs"),
        (CLOCK_MUCH_MS + 1, "clock-differs-much"),
        (-2 * CLOCK_MUCH_MS, "clock-differs"),
    ],
)
def test_clock_is_compared_with_the_brokers(ahead_ms: int, name: str) -> None:
    assert judge_clock(NOW_MS - ahead_ms, NOW_MS).name == name


@pytest.mark.parametrize("answer", [None, ClusterAuthorizationError("Not authorized.")])
def test_clock_is_not_checked_if_the_brokers_do_not_say_theirs(answer: KafkaError | None) -> None:
    found = judge_clock(answer, NOW_MS)
    assert found.status is Status.NOT_CHECKED


def test_unchecked_clock_names_the_permission_that_it_needs() -> None:
    """Bug: the advice was IDEMPOTENT_WRITE, the text of the broker's error code for a producer."""
    error = ClusterAuthorizationError("Not authorized for the cluster: grant IDEMPOTENT_WRITE.")
    assert judge_clock(error, NOW_MS).seen == "the brokers did not say theirs: this needs DESCRIBE on the cluster"
