"""The options of the topic that the sink may create."""

from __future__ import annotations

import pickle

import pytest

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.requested_topic import RequestedTopic


def parse(**options: object) -> SinkConfig:
    given = {key.replace("_", "."): value for key, value in options.items()}
    return SinkConfig.from_options({"kafka.bootstrap.servers": "h1:9092", "topic": "orders", **given})


def test_no_topic_is_created_by_default() -> None:
    assert parse().requested_topic is None
    assert parse(topic_create=" Never ").requested_topic is None


def test_options_are_read_as_text_and_as_numbers() -> None:
    options = {"Topic.Config.Retention.MS": " 1000 ", "topic.config.preallocate": True, "topic.config.flush.ms": None}
    found = parse(topic_create="If-Missing", topic_partitions="6", topic_replication_factor=3, **options)
    assert found.requested_topic == RequestedTopic(6, 3, (("preallocate", "true"), ("retention.ms", "1000")))
    assert pickle.loads(pickle.dumps(found)) == found
    assert found.describe() == (
        "topic='orders', topic.create=if-missing (partitions=6, replication.factor=3, preallocate=true,"
        " retention.ms=1000), kafka.bootstrap.servers='h1:9092'"
    )


def test_numbers_may_be_left_to_the_brokers() -> None:
    found = parse(topic_create="if-missing")
    assert found.requested_topic == RequestedTopic()
    assert "(partitions=default, replication.factor=default)" in found.describe()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topic_create": "always"}, "topic.create must be never or if-missing, not 'always'."),
        (
            {"topic_partitions": 6},
            "The option topic.partitions has no effect without topic.create=if-missing: set that too, or leave it out.",
        ),
        (
            {"topic_create": "never", "topic_replication_factor": 3},
            "The option topic.replication.factor has no effect without topic.create=if-missing: set that too, or leave"
            " it out.",
        ),
        (
            {"topic_config_retention_ms": 3},
            "The option topic.config.retention.ms has no effect without topic.create=if-missing: set that too, or leave"
            " it out.",
        ),
        (
            {"topic_create": "if-missing", "topic": None},
            "topic.create=if-missing needs the option topic: the topics of a column are known only when its rows are"
            " written, and the topic is created before. Set topic, or leave topic.create out.",
        ),
        ({"topic_create": "if-missing", "topic_partitions": 0}, "topic.partitions=0 must be between 1 and 2147483647."),
        ({"topic_create": "if-missing", "topic_partitions": "many"}, "topic.partitions='many' must be a whole number."),
        (
            {"topic_create": "if-missing", "topic_replication_factor": "40000"},
            "topic.replication.factor='40000' must be between 1 and 32767.",
        ),
        (
            {"topic_create": "if-missing", "topic_config_": "1"},
            "topic.config. needs the name of a setting, as in topic.config.retention.ms.",
        ),
        ({"topic_partition": 6}, "There is no option topic.partition. The nearest one is topic.partitions."),
        ({"kafka_topic_create": "never"}, "There is no option kafka.topic.create. The nearest one is topic.create."),
    ],
)
def test_wrong_option_is_an_error_that_names_it(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**options)
    assert str(caught.value) == text
