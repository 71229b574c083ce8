"""Client telemetry (KIP-714) at real brokers of two releases, with a plugin that writes down what it gets."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from support.metrics_receiver import MetricsReceiver, Push, subscribe

from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.producer import telemetry
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

INTERVAL_MS = 500
LIMIT_S = 30
SENT = "record.send.total"


class Collected(NamedTuple):
    """A broker with the plugin, and a subscription of the test's own producer."""

    servers: str
    receiver: MetricsReceiver

    def of(self, producer: KafkaProducer) -> list[Push]:
        return [push for push in self.receiver.pushes() if push.client_id == producer.client_id]

    def subscribe(self, producer: str, metrics: str | None, interval_ms: int = INTERVAL_MS) -> None:
        subscribe(self.servers, f"of-{producer}", metrics, interval_ms, f"client_id={producer}")


@pytest.fixture(scope="module", params=["4.3.1", "3.9.1"])
def collected(
    request: pytest.FixtureRequest, module_kafka: Callable[..., EmbeddedKafka], tmp_path_factory: pytest.TempPathFactory
) -> Collected:
    receiver = MetricsReceiver(request.param, tmp_path_factory.mktemp("receiver"))
    kafka = module_kafka(version=request.param, plugins=[receiver.jar], properties=receiver.properties)
    return Collected(kafka.bootstrap_servers, receiver)


@pytest.fixture
def start(collected: Collected, fresh_name: str) -> Iterator[Callable[..., KafkaProducer]]:
    """`start(...)`: a producer whose client.id is the test's own name, which is also that of its topic."""
    made: list[KafkaProducer] = []

    def start(**settings: Any) -> KafkaProducer:
        made.append(KafkaProducer({"bootstrap.servers": collected.servers, "client.id": fresh_name, **settings}))
        return made[-1]

    yield start
    for producer in made:
        producer.close(0)


def await_that(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.05)


def await_pushes(collected: Collected, producer: KafkaProducer, count: int) -> list[Push]:
    await_that(lambda: len(collected.of(producer)) >= count, f"{count} pushes")
    return collected.of(producer)


def is_quiet(collected: Collected, producer: KafkaProducer) -> bool:
    """Return whether no push comes within five intervals."""
    count = len(collected.of(producer))
    time.sleep(5 * INTERVAL_MS / 1000)
    return len(collected.of(producer)) == count


def send(producer: KafkaProducer, topic: str, count: int) -> None:
    for future in [producer.send(topic, b"value") for _ in range(count)]:
        future.result(LIMIT_S)


def test_plugin_gets_the_values_of_metrics_until_the_subscription_is_deleted(
    collected: Collected, start: Callable[..., KafkaProducer], fresh_name: str
) -> None:
    collected.subscribe(fresh_name, "org.apache.kafka.producer.")
    producer = start()
    send(producer, fresh_name, 40)
    await_pushes(collected, producer, 2)
    send(producer, fresh_name, 2)
    known = len(collected.of(producer))
    await_pushes(collected, producer, known + 2)
    pushes = collected.of(producer)

    assert {push.client_instance_id for push in pushes} == {producer.client_instance_id(0)}
    pauses = [later.at_ms - earlier.at_ms for earlier, later in itertools.pairwise(pushes)]
    assert min(pauses) >= INTERVAL_MS * 0.9, pauses
    # Brokers ask for increases: together they are the totals.
    metrics, topics = producer.metrics(), producer.topic_metrics()[fresh_name]
    assert sum(push.value(SENT) for push in pushes) == metrics["record-send-total"] == 42
    of_topic = [push.value(f"topic.{SENT}", topic=fresh_name) for push in pushes if push.has_topic(fresh_name)]
    assert sum(of_topic) == topics["record-send-total"] == 42
    assert sum(push.value("byte.total") for push in pushes) == metrics["byte-total"]
    last = pushes[-1]
    assert last.value("record.size.max") == metrics["record-size-max"]
    assert last.value("connection.count") >= 1
    pushed = {name for name, labels in last.values if not labels}
    expected = {
        f"org.apache.kafka.producer.{name.replace('-', '.')}" for name in metrics if not math.isnan(metrics[name])
    }
    assert pushed == expected
    assert any(labels and labels[0][0] == "node_id" for _, labels in last.values)

    collected.subscribe(fresh_name, None)
    await_that(lambda: is_quiet(collected, producer), "the end of the pushes")
    count = len(collected.of(producer))
    producer.close()
    assert len(collected.of(producer)) == count
    assert not any(push.is_terminating for push in collected.of(producer))


def test_close_pushes_the_last_values(
    collected: Collected, start: Callable[..., KafkaProducer], fresh_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "LAST_PUSH_MS", LIMIT_S * 1_000)  # a broker's first push may take it a second
    collected.subscribe(fresh_name, "org.apache.kafka.producer.record.send", 3_600_000)
    producer = start()
    send(producer, fresh_name, 3)
    assert producer.client_instance_id(LIMIT_S) is not None
    producer.close()
    (push,) = collected.of(producer)
    assert (push.is_terminating, push.value(SENT)) == (True, 3)
    assert {name for name, _ in push.values} == {
        f"org.apache.kafka.producer.{name}" for name in ("record.send.total", "record.send.rate")
    }


@pytest.mark.parametrize("codec", ["transactional", "idempotent"])
def test_changed_subscription_is_followed(
    collected: Collected, start: Callable[..., KafkaProducer], fresh_name: str, codec: str
) -> None:
    collected.subscribe(fresh_name, "org.apache.kafka.producer.byte.")
    producer = start(**({"transactional.id": fresh_name} if codec == "transactional" else {}))
    if codec == "transactional":
        producer.init_transactions()
    await_pushes(collected, producer, 1)
    collected.subscribe(fresh_name, "org.apache.kafka.producer.batch.")
    await_that(
        lambda: any(
            name.startswith("org.apache.kafka.producer.batch.") for name, _ in collected.of(producer)[-1].values
        ),
        "a push of the new subscription",
    )
    assert not any(".byte." in name for name, _ in collected.of(producer)[-1].values)


def test_without_a_subscription_the_id_is_known_and_nothing_is_pushed(
    collected: Collected, start: Callable[..., KafkaProducer], fresh_name: str
) -> None:
    producer = start()
    send(producer, fresh_name, 1)
    assert producer.client_instance_id(LIMIT_S) is not None
    producer.close()
    assert collected.of(producer) == []


def test_option_turns_it_off(collected: Collected, start: Callable[..., KafkaProducer], fresh_name: str) -> None:
    collected.subscribe(fresh_name, "*", 100)
    producer = start(**{"enable.metrics.push": "false"})
    send(producer, fresh_name, 1)
    time.sleep(0.5)
    producer.close()
    assert collected.of(producer) == []
