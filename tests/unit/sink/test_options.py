from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.version import VERSION
from spark_kafka_sink.sink import options as sink_options
from spark_kafka_sink.sink.options import SinkConfig

SERVERS = {"kafka.bootstrap.servers": "h1:9092,h2:9093"}


def parse(**options: object) -> SinkConfig:
    return SinkConfig.from_options({**SERVERS, **options})


def test_kafka_options_become_the_producers_settings() -> None:
    config = parse(**{"kafka.linger.ms": "20", "kafka.compression.type": "zstd"})
    assert config.producer == ProducerConfig.from_mapping(
        {"bootstrap.servers": "h1:9092,h2:9093", "linger.ms": 20, "compression.type": "zstd"}
    )


def test_every_producer_setting_is_an_option_but_the_transactional_id() -> None:
    for key in ProducerConfig.keys() - {"transactional.id", "bootstrap.servers"}:
        assert parse(**{f"kafka.{key}": None}).producer is not None


def test_the_case_of_an_option_does_not_count() -> None:
    config = SinkConfig.from_options({"Kafka.Bootstrap.SERVERS": "h1:9092", "TOPIC": "Orders"})
    assert config.topic == "Orders"
    assert config.producer.bootstrap_servers == (("h1", 9092),)


def test_an_option_given_twice_in_different_case_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        parse(topic="a", Topic="b")


def test_name_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="Names of options must be text, not 7"):
        SinkConfig.from_options({7: "orders"})  # type: ignore[dict-item]


def test_the_topic_is_trimmed_and_may_be_left_out() -> None:
    assert parse(topic="  orders ").topic == "orders"
    assert parse().topic is None


def test_an_empty_topic_is_refused() -> None:
    with pytest.raises(ConfigError, match="topic is empty"):
        parse(topic="  ")


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("topics", "topic"),
        ("delivery.guarante", "delivery.guarantee"),
        ("bootstrap.servers", "kafka.bootstrap.servers"),
        ("linger.ms", "kafka.linger.ms"),
        ("kafka_acks", "kafka.acks"),
        ("queue.buffering.max.ms", "kafka.linger.ms"),
        ("kafka.topic", "topic"),
        ("kafka.delivery.guarantee", "delivery.guarantee"),
        ("kafka.transactional.id.prefix", "transactional.id.prefix"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_known_one(given: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"There is no option {given}\. The nearest one is {nearest}\."):
        parse(**{given: "x"})


def test_an_unknown_producer_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"kafka\.lingr\.ms is not a producer setting.*one is kafka\.linger\.ms"):
        parse(**{"kafka.lingr.ms": "5"})


def test_transactional_id_is_refused_with_and_without_kafka_prefix() -> None:
    with pytest.raises(ConfigError, match=r"The option transactional\.id cannot be used here: "):
        parse(**{"transactional.id": "orders"})


@pytest.mark.parametrize("key", ["kafka.key.serializer", "kafka.value.serializer"])
def test_a_serializer_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} is a setting of the Java client: .*Cast the column"):
        parse(**{key: "org.apache.kafka.common.serialization.StringSerializer"})


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"kafka.linger.ms": "soon"}, r"kafka\.linger\.ms='soon' must be a whole number"),
        (
            {"kafka.acks": "1", "kafka.enable.idempotence": "true"},
            r"kafka\.enable\.idempotence=true needs kafka\.acks=all",
        ),
    ],
)
def test_producer_error_names_the_option_as_given(options: dict[str, str], start: str) -> None:
    with pytest.raises(ConfigError, match="^" + start):
        parse(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"kafka.delivery.timeout.ms": "5"},
            "kafka.delivery.timeout.ms=5 must be at least kafka.linger.ms + kafka.request.timeout.ms",
        ),
        (
            {"kafka.security.protocol": "SSL", "kafka.ssl.truststore.location": "/none/t.p12"},
            "kafka.ssl.truststore.location is a PKCS12 file: set kafka.ssl.truststore.type=PKCS12.",
        ),
        ({"kafka.acls": "1"}, "kafka.acls is not a producer setting. The nearest one is kafka.acks."),
        ({"kafka.client.dns.lookup": "linger.ms"}, "kafka.client.dns.lookup='linger.ms' must be one of"),
    ],
)
def test_producer_error_names_other_options_with_their_prefix(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(**options)
    assert str(refused.value).startswith(text)


def test_missing_bootstrap_servers_are_named_as_the_option() -> None:
    with pytest.raises(ConfigError, match=r"^kafka\.bootstrap\.servers is missing"):
        SinkConfig.from_options({"topic": "orders"})


def test_exactly_once_sets_timeout_and_decision_topic() -> None:
    config = parse(topic="orders", **{"delivery.guarantee": "Exactly-Once"})
    assert config.is_exactly_once
    assert config.producer.transaction_timeout_ms == 900_000
    assert config.transactional_id_prefix is None
    assert config.decision_topic == "__spark_kafka_sink_decisions"
    given = {"kafka.transaction.timeout.ms": "5000", "transactional.id.prefix": " a/b ", "decision.topic": "mine"}
    config = parse(topic="orders", **{"delivery.guarantee": "exactly-once"}, **given)
    assert config.producer.transaction_timeout_ms == 5_000
    assert (config.transactional_id_prefix, config.decision_topic) == ("a/b", "mine")
    assert "delivery.guarantee=exactly-once, transactional.id.prefix='a/b'" in config.describe()
    assert parse().producer.transaction_timeout_ms == 60_000


def test_write_outside_queries_is_false_by_default() -> None:
    given = {"delivery.guarantee": "exactly-once"}
    assert not parse(**given).is_outside_queries
    assert parse(**given, **{"write.outside.queries": "true"}).is_outside_queries
    with pytest.raises(ConfigError, match=r"write\.outside\.queries must be true or false"):
        parse(**given, **{"write.outside.queries": "perhaps"})


@pytest.mark.parametrize("key", ["transactional.id.prefix", "decision.topic", "write.outside.queries"])
def test_option_only_for_exactly_once_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} belongs to delivery.guarantee=exactly-once: set that too"):
        parse(**{key: "x"})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kafka.acks": "1"}, "needs kafka.enable.idempotence=true"),
        ({"kafka.enable.idempotence": "false"}, "needs kafka.enable.idempotence=true"),
        ({"transactional.id.prefix": " "}, "1 to 200 printable characters"),
        ({"transactional.id.prefix": "x" * 201}, "1 to 200 printable characters"),
        ({"transactional.id.prefix": "a\nb"}, "1 to 200 printable characters"),
        ({"decision.topic": ""}, "decision.topic is empty"),
        ({"topic": "orders", "decision.topic": "orders"}, "is also the decision topic"),
    ],
)
def test_setting_incompatible_with_exactly_once_is_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse(**{"delivery.guarantee": "exactly-once"}, **options)


@pytest.mark.parametrize("key", ["topic", "decision.topic"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a/b", r"a/b'?: The topic name is not valid: .* not '\.' or '\.\.'\.$"),
        ("..", "The topic name is not valid"),
        ("t" * 250, "The topic name is not valid"),
        ("__consumer_offsets", "the topic is one of Kafka's own, to which only brokers write"),
    ],
)
def test_topic_that_nobody_can_write_to_is_refused_before_any_task(key: str, name: str, text: str) -> None:
    options = {"delivery.guarantee": "exactly-once", key: name}
    with pytest.raises(ConfigError, match=f"^{key}=.*{text}") as caught:
        parse(**options)
    assert caught.value.setting == key


def test_a_prefix_may_have_200_characters() -> None:
    given = {"delivery.guarantee": "exactly-once", "transactional.id.prefix": "x" * 200}
    assert parse(**given).transactional_id_prefix == "x" * 200


def test_early_timestamps_are_refused_unless_the_option_allows_them() -> None:
    assert not parse().allows_early_timestamps
    assert not parse(**{"timestamp.allow.before.1980": "false"}).allows_early_timestamps
    assert parse(**{"Timestamp.Allow.Before.1980": "true"}).allows_early_timestamps
    with pytest.raises(ConfigError, match=r"timestamp\.allow\.before\.1980 must be true or false, not 'yes'"):
        parse(**{"timestamp.allow.before.1980": "yes"})


DEAD_LETTERS = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": " dead "}


def test_dead_letters_need_their_options() -> None:
    assert (parse().dead_letter_topic, parse().most_dead_letters) == (None, 1000)
    assert parse(**{"errors.tolerance": "None"}) == parse()
    found = parse(**DEAD_LETTERS, **{"errors.deadletterqueue.max.rows": " 5 "})
    assert (found.dead_letter_topic, found.most_dead_letters) == ("dead", 5)
    assert "errors.tolerance=all, errors.deadletterqueue.topic.name='dead'" in found.describe()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"errors.tolerance": "some"}, r"errors\.tolerance must be none or all, not 'some'"),
        (
            {"errors.tolerance": "all"},
            r"needs a topic for the rows that cannot be written: set errors\.deadletterqueue",
        ),
        ({**DEAD_LETTERS, "errors.deadletterqueue.topic.name": " "}, r"topic\.name is empty"),
        ({"errors.deadletterqueue.topic.name": "dead"}, r"topic\.name has no effect without errors\.tolerance=all"),
        ({"errors.deadletterqueue.max.rows": "5"}, r"max\.rows has no effect without errors\.tolerance=all"),
        *(
            (
                {**DEAD_LETTERS, "errors.deadletterqueue.topic.name": name},
                r"topic\.name='.*': The topic name is not valid",
            )
            for name in ("my letters", "a/b", "..", "t" * 250)
        ),
        ({**DEAD_LETTERS, "topic": "dead"}, "'dead' is also topic: give the dead letters a topic of their own"),
        (
            {**DEAD_LETTERS, "errors.deadletterqueue.topic.name": "__spark_kafka_sink_decisions"},
            r"is also decision\.topic",
        ),
        *(
            ({**DEAD_LETTERS, "errors.deadletterqueue.max.rows": text}, "must be a whole number of 1 or more")
            for text in ("0", "-1", "many", "1.5", "", "9" * 19)
        ),
    ],
)
def test_wrong_options_of_dead_letters_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse(**options)


def test_default_guarantee_is_at_least_once() -> None:
    assert parse(**{"delivery.guarantee": "At-Least-Once"}) == parse()


def test_at_least_once_works_without_idempotence() -> None:
    assert not parse(**{"kafka.enable.idempotence": "false"}).producer.enable_idempotence


def test_another_guarantee_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be at-least-once or exactly-once"):
        parse(**{"delivery.guarantee": "at-most-once"})


def test_a_transactional_id_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"The option kafka\.transactional\.id cannot be used here: \w+"):
        parse(**{"kafka.transactional.id": "x"})


@pytest.mark.parametrize(
    "given",
    [
        "truncate",
        "checkpointLocation",
        "kafka.schema.registry.url",
        "kafka.max.message.bytes",
        "group.id",
        "isolation.level",
    ],
)
def test_an_option_that_resembles_none_is_refused_without_another_name(given: str) -> None:
    with pytest.raises(ConfigError, match=r", and no \w+ has a similar name: leave it out\.$"):
        parse(**{given: "x"})


@pytest.mark.parametrize("given", ["startingOfsets", "kafka.group.ids", "schema.registry.url", "kafka.subscribe"])
def test_only_exact_names_are_ignored(given: str) -> None:
    with pytest.raises(ConfigError, match=given.lower().removeprefix("kafka.")):
        parse(**{given: "x"})


def test_a_config_is_a_plain_value() -> None:
    config = parse(topic="orders", **{"kafka.acks": "all"})
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))


def test_config_of_another_version_is_refused_in_a_task() -> None:
    """Bug: a task with another version took the value of one setting for that of another, by their positions."""
    pickled = pickle.dumps(parse(topic="orders"))
    assert pickled.count(VERSION.encode()) == 1
    with pytest.raises(ConfigError, match=f"This worker has version {VERSION} in .*, and the driver has version 9.9.9"):
        pickle.loads(pickled.replace(VERSION.encode(), b"9.9.9"))


def test_config_of_another_commit_is_refused_in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the same, from a checkout: its version number is the same before and after a new setting."""
    pickled = pickle.dumps(parse(topic="orders"))
    monkeypatch.setattr(sink_options, "_fields_checksum", lambda: 1)
    with pytest.raises(ConfigError, match="the driver has another commit with the same version number"):
        pickle.loads(pickled)


def test_description_shows_the_given_options() -> None:
    shown = parse(topic="orders", **{"kafka.linger.ms": "20"}).describe()
    assert shown == "topic='orders', kafka.bootstrap.servers='h1:9092,h2:9093', kafka.linger.ms=20"


def test_the_description_leaves_out_a_topic_that_was_not_given() -> None:
    assert parse().describe() == "kafka.bootstrap.servers='h1:9092,h2:9093'"


RECORDS, BYTES = "write.max.records.per.second", "write.max.bytes.per.second"


def test_limits_of_a_write_are_whole_numbers() -> None:
    config = parse(**{RECORDS: " 100 ", BYTES: 5})
    assert (config.records_per_second, config.bytes_per_second, config.is_limited) == (100, 5, True)
    assert f"{RECORDS}=100, {BYTES}=5" in config.describe()
    assert not parse(**{RECORDS: None}).is_limited


@pytest.mark.parametrize("option", [RECORDS, BYTES])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "fast", "", True, 2**63])
def test_a_limit_below_one_or_not_whole_is_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"must be a whole number of 1 or more") as raised:
        parse(**{option: value})
    assert raised.value.setting == option


def test_a_limit_without_time_for_one_record_in_a_transaction_is_refused() -> None:
    given = {"delivery.guarantee": "exactly-once", RECORDS: "1", "kafka.transaction.timeout.ms": "999"}
    with pytest.raises(ConfigError, match=r"records\.per\.second=1 and kafka\.transaction\.timeout\.ms=999"):
        parse(**given)
    assert parse(**{**given, "kafka.transaction.timeout.ms": "1000"}).is_limited
    assert parse(**{RECORDS: "1", "kafka.transaction.timeout.ms": "999"}).is_limited


# ---- telemetry -------------------------------------------------------------------------------------------------------


def test_telemetry_is_off_unless_it_is_switched_on() -> None:
    assert not parse().sends_telemetry
    on = {"telemetry.opentelemetry": "true"}
    assert parse(**on).sends_telemetry
    assert not parse(**on).writes_traceparent
    assert parse(**on, **{"telemetry.headers.traceparent": "TRUE"}).writes_traceparent
    with pytest.raises(ConfigError, match=r"^telemetry\.opentelemetry must be true or false, not 'otlp'\.$"):
        parse(**{"telemetry.opentelemetry": "otlp"})


def test_traceparent_needs_telemetry() -> None:
    assert not parse(**{"telemetry.headers.traceparent": "false"}).writes_traceparent
    with pytest.raises(ConfigError, match=r"has no effect without telemetry\.opentelemetry=true: set that too"):
        parse(**{"telemetry.headers.traceparent": "true"})


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
@pytest.mark.parametrize("is_parent_missing", [False, True])
def test_telemetry_without_its_packages_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, missing: str, is_parent_missing: bool
) -> None:
    find: Callable[..., object] = importlib.util.find_spec

    def found(name: str, *more: Any) -> object:
        if name != missing:
            return find(name, *more)
        if is_parent_missing:
            raise ModuleNotFoundError(name)
        return None

    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert not parse(**{"telemetry.opentelemetry": "false"}).sends_telemetry
    with pytest.raises(ConfigError, match=r"pip install 'spark-kafka-sink\[opentelemetry\]'"):
        parse(**{"telemetry.opentelemetry": "true"})


# ---- lineage ---------------------------------------------------------------------------------------------------------


def test_lineage_is_off_unless_it_is_switched_on() -> None:
    assert not parse().sends_lineage
    assert not parse(**{"lineage.openlineage": "false"}).sends_lineage
    assert parse(**{"lineage.openlineage": "TRUE"}).sends_lineage
    with pytest.raises(ConfigError, match=r"^lineage\.openlineage must be true or false, not 'yes, please'\.$"):
        parse(**{"lineage.openlineage": "yes, please"})


def test_lineage_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., object] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "openlineage" else find(name, *more)
    )
    assert not parse(**{"lineage.openlineage": "false"}).sends_lineage
    with pytest.raises(ConfigError, match=r"pip install 'spark-kafka-sink\[openlineage\]'"):
        parse(**{"lineage.openlineage": "true"})
