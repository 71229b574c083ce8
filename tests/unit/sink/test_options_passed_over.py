"""Options of Spark's source and of consumers, handed to the sink."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.common import config
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.sink import options
from spark_kafka_sink.sink.options import PASSED_OVER, SinkConfig

SERVERS = {"kafka.bootstrap.servers": "h1:9092"}


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """Forget the warnings, which are logged once in a process."""
    options._warn_once.cache_clear()
    yield
    options._warn_once.cache_clear()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("name", [*PASSED_OVER, *PASSED_OVER.values()])
def test_an_option_of_reading_changes_nothing_and_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert SinkConfig.from_options({**SERVERS, name: "x"}) == SinkConfig.from_options(SERVERS)
    assert warnings(caplog) == [
        "Options of Spark's Kafka source and of consumers have no effect in a write, and are ignored:"
        f" {PASSED_OVER[name.lower()]}"
    ]


def test_one_warning_names_all_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    given = {**SERVERS, "SUBSCRIBE": "a", "kafka.Group.ID": "g", "includeHeaders": "true", "topic": "t"}
    for _ in range(3):
        assert "group" not in repr(KafkaSink(given))
    assert [text.rpartition(": ")[2] for text in warnings(caplog)] == ["includeHeaders, kafka.group.id, subscribe"]
    KafkaSink({**SERVERS, "subscribe": "a"})
    assert [text.rpartition(": ")[2] for text in warnings(caplog)[1:]] == ["subscribe"]


def test_no_warning_without_such_an_option_or_its_value(caplog: pytest.LogCaptureFixture) -> None:
    KafkaSink({**SERVERS, "subscribe": None, "kafka.acks": "all"})
    assert warnings(caplog) == []


def test_ignored_option_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        KafkaSink({**SERVERS, "subscribe": "a", "Subscribe": "b"})


def test_options_of_a_write_are_never_ignored() -> None:
    settings = {f"kafka.{key}" for key in (*ProducerConfig.keys(), *config._JAVA_ONLY)}
    assert PASSED_OVER.keys() & (settings | options._REFUSED.keys() | set(options._OPTIONS)) == set()
