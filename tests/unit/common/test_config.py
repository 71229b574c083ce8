"""The settings of the producer: the table, its parsers, the rules between settings, and the errors."""

from __future__ import annotations

import pickle
import re
from dataclasses import fields
from typing import Any

import pytest

from spark_kafka_sink.common import config as config_module
from spark_kafka_sink.common import security as security_module
from spark_kafka_sink.common.config import _JAVA_ONLY, ProducerConfig, describe_options
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import INT_MAX, table_of
from spark_kafka_sink.common.security import SecurityConfig

SERVERS = {"bootstrap.servers": "localhost:9092"}


def config(**settings: Any) -> ProducerConfig:
    """Return settings with underscores for dots."""
    return ProducerConfig.from_mapping({**SERVERS, **{key.replace("_", "."): value for key, value in settings.items()}})


KAFKAS_DEFAULTS = {
    "enable.metrics.push": True,
    "acks": -1,
    "enable.idempotence": True,
    "max.in.flight.requests.per.connection": 5,
    "retries": INT_MAX,
    "retry.backoff.ms": 100,
    "retry.backoff.max.ms": 1_000,
    "delivery.timeout.ms": 120_000,
    "request.timeout.ms": 30_000,
    "linger.ms": 5,
    "max.request.size": 1_048_576,
    "buffer.memory": 33_554_432,
    "max.block.ms": 60_000,
    "compression.type": "none",
    "compression.gzip.level": -1,
    "compression.lz4.level": 9,
    "compression.zstd.level": 3,
    "partitioner.ignore.keys": False,
    "partitioner.adaptive.partitioning.enable": True,
    "partitioner.availability.timeout.ms": 0,
    "metadata.max.age.ms": 300_000,
    "metadata.max.idle.ms": 300_000,
    "metadata.recovery.strategy": "rebootstrap",
    "metadata.recovery.rebootstrap.trigger.ms": 300_000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1_000,
    "socket.connection.setup.timeout.ms": 10_000,
    "socket.connection.setup.timeout.max.ms": 30_000,
    "connections.max.idle.ms": 540_000,
    "send.buffer.bytes": 131_072,
    "receive.buffer.bytes": 32_768,
    "transactional.id": None,
    "transaction.timeout.ms": 60_000,
    "client.dns.lookup": "use_all_dns_ips",
    "client.id": "",
}


@pytest.mark.parametrize("key", sorted(KAFKAS_DEFAULTS))
def test_defaults_are_kafkas(key: str) -> None:
    assert getattr(config(), key.replace(".", "_")) == KAFKAS_DEFAULTS[key]


def test_table_has_kafkas_keys_and_documents_its_own_default() -> None:
    assert ProducerConfig.keys() == {*KAFKAS_DEFAULTS, *table_of(SecurityConfig), "bootstrap.servers", "batch.size"}
    (row,) = [row for row in describe_options() if row.name == "batch.size"]
    assert row.default == "262144"
    assert "16384" in row.doc


def test_every_setting_takes_its_value_as_text_or_typed() -> None:
    for field in fields(ProducerConfig):
        value = getattr(config(), field.name)
        if value is None or isinstance(value, tuple) or field.name.startswith(("ssl_", "sasl_")):
            continue
        for given in (value, str(value), f" {value} "):
            assert getattr(config(**{field.name: given}), field.name) == value, field.name


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("acks", "all", -1),
        ("acks", " ALL ", -1),
        ("acks", 1, 1),
        ("acks", "0", 0),
        ("enable.idempotence", "TRUE", True),
        ("partitioner.ignore.keys", "false", False),
        ("compression.type", "ZSTD", "zstd"),
        ("linger.ms", "+7", 7),
        ("compression.zstd.level", -50, -50),
        ("compression.gzip.level", "9", 9),
        ("client.id", "  me ", "me"),
        ("bootstrap.servers", "a:1, b:2,", (("a", 1), ("b", 2))),
        ("bootstrap.servers", ["a:1", "[::1]:65535"], (("a", 1), ("::1", 65_535))),
        ("bootstrap.servers", "PLAINTEXT://a:9", (("a", 9),)),
        ("bootstrap.servers", "b-1.my_x.example:9,[fe80::1%eth0]:9", (("b-1.my_x.example", 9), ("fe80::1%eth0", 9))),
    ],
)
def test_values_are_parsed(key: str, given: object, expected: object) -> None:
    parsed = ProducerConfig.from_mapping({**SERVERS, key: given})
    assert getattr(parsed, key.replace(".", "_")) == expected


@pytest.mark.parametrize(
    ("key", "given", "rule"),
    [
        ("acks", "2", "all, -1, 0, 1"),
        ("enable.idempotence", "yes", "true or false"),
        ("linger.ms", "5ms", "whole number"),
        ("linger.ms", "1_000", "whole number"),
        ("linger.ms", "٣", "whole number"),
        ("linger.ms", 1.5, "whole number"),
        ("linger.ms", True, "whole number"),
        ("linger.ms", "-1", "between 0 and"),
        ("batch.size", str(2**31), f"between 0 and {INT_MAX}"),
        ("compression.type", "brotli", "none, gzip, snappy, lz4, zstd"),
        ("compression.gzip.level", "0", "-1 or between 1 and 9"),
        ("compression.lz4.level", "18", "between 1 and 17"),
        ("compression.zstd.level", "23", "between -131072 and 22"),
        ("max.in.flight.requests.per.connection", "0", "between 1"),
        ("metadata.max.idle.ms", "4999", "between 5000"),
        ("transactional.id", "  ", "must not be empty"),
        ("client.id", "host\udc80", "must be text that UTF-8 can hold"),
        ("bootstrap.servers", "localhost", "'localhost' is not host:port"),
        ("bootstrap.servers", "localhost:0", "not host:port"),
        ("bootstrap.servers", "localhost:65536", "not host:port"),
        ("bootstrap.servers", "localhost:²", "not host:port"),
        ("bootstrap.servers", ":9092", "not host:port"),
        ("bootstrap.servers", "h1:9092;h2:9092", "separated by commas: 'h1:9092;h2:9092' is not host:port"),
        ("bootstrap.servers", "h1:9092 h2:9092", "commas"),
        ("bootstrap.servers", " , ", "at least one host:port"),
    ],
)
def test_malformed_value_is_refused_with_setting_and_remedy(key: str, given: object, rule: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ProducerConfig.from_mapping({**SERVERS, key: given})
    assert str(refusal.value).startswith(f"{key}={given!r} must ")
    assert rule in str(refusal.value)


@pytest.mark.parametrize("key", ["client.id", "transactional.id"])
def test_name_that_no_request_can_hold_is_refused(key: str) -> None:
    assert ProducerConfig.from_mapping({**SERVERS, key: "ü" * 16_000}) is not None
    with pytest.raises(ConfigError, match=rf"{key}='.* must have at most 32000 bytes") as refusal:
        ProducerConfig.from_mapping({**SERVERS, key: "ü" * 16_001})
    assert len(str(refusal.value)) < 1_000


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("liger.ms", "linger.ms"), ("bootstrap.server", "bootstrap.servers"), ("compresion.typ", "compression.type")],
)
def test_unknown_key_names_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is not a producer setting. The nearest one is {nearest}."):
        ProducerConfig.from_mapping({**SERVERS, key: "1"})


@pytest.mark.parametrize("key", [b"linger.ms", 1, None])
def test_key_that_is_not_str_is_refused(key: Any) -> None:
    """Bug: difflib raised a plain TypeError."""
    with pytest.raises(ConfigError, match=f"^Names of settings must be text, not {key!r}.$"):
        ProducerConfig.from_mapping({**SERVERS, key: "5"})


@pytest.mark.parametrize("settings", [{}, {"bootstrap.servers": None}, {"acks": "all"}])
def test_bootstrap_servers_must_be_given(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is missing"):
        ProducerConfig.from_mapping(settings)


def test_none_means_the_default() -> None:
    assert config(linger_ms=None) == config()


# ---- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"delivery_timeout_ms": 1_000, "request_timeout_ms": 999, "linger_ms": 2}, "at least linger.ms"),
        ({"enable_idempotence": "true", "acks": "1"}, "needs acks=all"),
        ({"enable_idempotence": "true", "retries": "0"}, "needs retries above 0"),
        ({"enable_idempotence": "true", "max_in_flight_requests_per_connection": "6"}, "allows at most 5"),
        ({"transactional_id": "t", "enable_idempotence": "false"}, "needs enable.idempotence=true"),
        ({"transactional_id": "t", "acks": "1"}, "needs acks=all"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config(**settings)


@pytest.mark.parametrize(
    "settings", [{"acks": "1"}, {"acks": "0"}, {"retries": 0}, {"max_in_flight_requests_per_connection": 6}]
)
def test_default_idempotence_yields_to_conflicting_settings(settings: dict[str, Any]) -> None:
    assert not config(**settings).enable_idempotence


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"request_timeout_ms": 200_000}, 200_005),
        ({"linger_ms": 100_000}, 130_000),
        ({"request_timeout_ms": 1_000}, 120_000),
        ({"request_timeout_ms": INT_MAX, "linger_ms": 10}, INT_MAX),
    ],
)
def test_default_delivery_timeout_yields_to_longer_settings(settings: dict[str, Any], expected: int) -> None:
    assert config(**settings).delivery_timeout_ms == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reconnect_backoff_ms": 5_000}, 5_000),
        ({"reconnect_backoff_ms": 20}, 1_000),
        ({"reconnect_backoff_ms": 5_000, "reconnect_backoff_max_ms": 1_000}, 1_000),
    ],
)
def test_default_longest_reconnect_pause_yields_to_a_longer_first_one(settings: dict[str, Any], expected: int) -> None:
    assert config(**settings).reconnect_backoff_max_ms == expected


def test_delivery_may_take_exactly_linger_and_one_request() -> None:
    assert config(delivery_timeout_ms=1_005, request_timeout_ms=1_000).delivery_timeout_ms == 1_005


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({"compression_type": "none"}, None),
        ({"compression_type": "snappy"}, None),
        ({"compression_type": "gzip"}, None),
        ({"compression_type": "gzip", "compression_gzip_level": 4}, 4),
        ({"compression_type": "lz4"}, None),
        ({"compression_type": "lz4", "compression_lz4_level": 12}, 12),
        ({"compression_type": "zstd"}, 3),
        ({"compression_type": "zstd", "compression_zstd_level": -5, "compression_gzip_level": 4}, -5),
    ],
)
def test_compression_level_is_that_of_the_codec(settings: dict[str, Any], level: int | None) -> None:
    assert config(**settings).compression_level == level


# ---- identity, pickles -----------------------------------------------------------------------------------------------


def test_equal_settings_have_one_identity_however_they_are_written() -> None:
    one = config(linger_ms="10", acks="all")
    two = config(acks=-1, linger_ms=10)
    assert hash(one.canonical()) == hash(two.canonical())
    assert one.canonical() == two.canonical()
    assert one.canonical() != config(linger_ms=11).canonical()


def test_configuration_can_be_pickled() -> None:
    one = config(linger_ms=10, transactional_id="t")
    assert pickle.loads(pickle.dumps(one)) == one


def test_table_for_readers_has_a_row_for_every_key() -> None:
    rows = {row.name: row for row in describe_options()}
    assert set(rows) == ProducerConfig.keys()
    assert rows["acks"].default == "all"
    assert rows["enable.idempotence"].default == "true"
    assert rows["transactional.id"].default == "none"
    types = {"int", "long", "double", "string", "boolean", "list", "password", "function or string"}
    assert all(row.doc and row.type in types for row in rows.values())


@pytest.mark.parametrize("key", sorted(_JAVA_ONLY))
def test_java_only_setting_is_refused_with_the_remedy_and_without_value(key: str) -> None:
    remedy = "leave it out|instead|before |give |keep |KIP-939"
    with pytest.raises(ConfigError, match=f"^{key} is a setting of the Java client: .*({remedy})") as refusal:
        ProducerConfig.from_mapping({**SERVERS, key: "hunter2"})
    assert "hunter2" not in str(refusal.value)


def test_every_setting_in_a_refusal_is_marked() -> None:
    """The sink can then show the setting with its prefix."""
    rules = (*config_module._RULES, *security_module._TLS_RULES, *security_module._SASL_RULES)
    texts = [text for _, text in rules] + list(config_module._JAVA_ONLY.values())
    names = [re.escape(key) for key in table_of(ProducerConfig) if "." in key]
    name = re.compile(rf"(?<![\w.])(?:{'|'.join(names)})(?!\w)")
    found = [text for text in texts if name.search(re.sub(r"`[^`]+`|\{[^}]+\}", "", text))]
    assert found == []
