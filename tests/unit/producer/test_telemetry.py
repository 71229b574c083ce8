"""Client telemetry of a whole producer, against scripted brokers with a receiver, in one thread.

Docstrings name the tests of the Java client with the same case.
"""

from __future__ import annotations

import itertools
import logging
import sys
import uuid
from typing import Any
from unittest.mock import Mock

import pytest
from support.producer_harness import AT_ONCE, TOPIC, ProducerHarness
from support.scripted_broker import faults
from support.scripted_broker.exchange import Answer
from support.scripted_broker.telemetry import TelemetryReceiver
from support.transaction_harness import TransactionHarness

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import IllegalStateError, SaslAuthenticationError
from spark_kafka_sink.producer import telemetry_payload
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.telemetry import LAST_PUSH_MS, ClientTelemetry, Code, State, kafka_text
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.codecs import Codec

GET, PUSH = ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY
INTERVAL_MS = 10_000
SENT = "record.send.total"


def collecting(settings: dict[str, Any] | None = None, **more: Any) -> tuple[ProducerHarness, TelemetryReceiver]:
    """Return a producer with an acknowledged record, and the receiver of its brokers, which it has asked. `more`: the
    subscription.
    """
    node_count = more.pop("node_count", 1)
    harness = ProducerHarness({**AT_ONCE, **(settings or {})}, node_count=node_count, topics={TOPIC: node_count})
    receiver = harness.cluster.telemetry = TelemetryReceiver(**{"interval_ms": INTERVAL_MS, **more})
    harness.warm_up()
    if harness.producer._telemetry is not None:
        harness.run_until(lambda: telemetry_of(harness).states.subscription)
    return harness, receiver


def telemetry_of(harness: ProducerHarness) -> ClientTelemetry:
    telemetry = harness.producer._telemetry
    assert telemetry is not None
    return telemetry


def state(harness: ProducerHarness) -> State:
    return telemetry_of(harness).states.state


def asked(harness: ProducerHarness) -> int:
    return len(harness.cluster.requests_of(GET))


def pushed(harness: ProducerHarness) -> int:
    return len(harness.cluster.requests_of(PUSH))


def send(harness: ProducerHarness, count: int = 1) -> None:
    for _ in range(count):
        harness.send()
    harness.settle()
    assert all(delivery.error is None for delivery in harness.deliveries)


# ---- no receiver -----------------------------------------------------------------------------------------------------


def test_without_a_receiver_there_is_no_request_and_no_extra_turn() -> None:
    def turns(enabled: str) -> tuple[int, int]:
        harness = ProducerHarness({**AT_ONCE, "enable.metrics.push": enabled})
        harness.warm_up()
        harness.run_for(3_600_000)
        assert asked(harness) == pushed(harness) == 0
        return harness.turns, harness.selector.polls

    assert turns("true") == turns("false")


def test_option_turns_it_off(caplog: pytest.LogCaptureFixture) -> None:
    harness, receiver = collecting({"enable.metrics.push": "false"})
    harness.run_for(10 * INTERVAL_MS)
    harness.close()
    assert asked(harness) == pushed(harness) == len(receiver.pushes) == 0


# ---- questions and pushes --------------------------------------------------------------------------------------------


def test_first_push_is_spread_and_later_ones_follow_the_interval() -> None:
    """NetworkClientTest.testTelemetryRequest, ClientTelemetryReporterTest.testHandleResponseGetSubscriptions."""
    harness, receiver = collecting()
    assert asked(harness) == 1
    started_ms = harness.now_ms
    harness.run_for(5 * INTERVAL_MS)
    times = [push.at_ms for push in receiver.pushes]
    assert INTERVAL_MS // 2 <= times[0] - started_ms <= INTERVAL_MS * 3 // 2 + 10
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(pauses) >= 3
    assert all(INTERVAL_MS <= pause <= INTERVAL_MS + 10 for pause in pauses), pauses
    assert asked(harness) == 1


def test_pushed_values_are_those_of_metrics() -> None:
    """Each metric of `metrics`, `topic_metrics` and `node_metrics` is pushed with its value, and nothing else is."""
    harness, receiver = collecting(has_deltas=False)
    send(harness, 7)
    harness.run_until(lambda: receiver.pushes)
    values = receiver.pushes[0].values
    expected: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        (f"org.apache.kafka.producer.{name.replace('-', '.')}", ()): value
        for name, value in harness.producer.metrics().items()
    }
    for group, label, by_label in (
        ("topic", "topic", harness.producer.topic_metrics()),
        ("node", "node_id", harness.producer.node_metrics()),
    ):
        for labelled, metrics in by_label.items():
            for name, value in metrics.items():
                key = f"org.apache.kafka.producer.{group}.{name.replace('-', '.')}", ((label, labelled),)
                expected[key] = value
    numbers = {key: value for key, value in expected.items() if value == value}  # no NaN
    assert values.keys() == numbers.keys()
    steady = {key for key in numbers if "record." in key[0] and key[0].endswith(("total", "max"))}
    assert len(steady) == 8
    assert {key: values[key].value for key in steady} == {key: numbers[key] for key in steady}
    assert receiver.pushes[0].value(SENT) == 8
    assert receiver.pushes[0].value(f"topic.{SENT}", topic=TOPIC) == 8


def test_standard_metrics_of_the_kip_are_pushed() -> None:
    harness, receiver = collecting()
    send(harness)
    harness.run_until(lambda: receiver.pushes)
    assert {name.removeprefix("org.apache.kafka.producer.") for name in receiver.pushes[0].names} >= {
        "connection.creation.rate",
        "connection.creation.total",
        "node.request.latency.avg",
        "node.request.latency.max",
        "produce.throttle.time.avg",
        "produce.throttle.time.max",
        "record.queue.time.avg",
        "record.queue.time.max",
    }


def test_increases_of_all_pushes_add_up_to_the_total() -> None:
    harness, receiver = collecting()
    for count in (3, 0, 5, 1):
        send(harness, count)
        harness.run_for(INTERVAL_MS)
    harness.close()
    assert sum(push.value(SENT) for push in receiver.pushes) == 10
    points = [push.values[f"org.apache.kafka.producer.{SENT}", ()] for push in receiver.pushes]
    assert all(point.is_delta for point in points)
    assert [point.since_ms for point in points[1:]] == [point.at_ms for point in points[:-1]]


def test_only_metrics_with_a_prefix_of_the_subscription_are_pushed() -> None:
    wanted = ("org.apache.kafka.producer.record.", "org.apache.kafka.producer.node.request.latency")
    harness, receiver = collecting(metrics=(*wanted, "org.apache.kafka.consumer."))
    send(harness)
    harness.run_until(lambda: receiver.pushes)
    assert receiver.pushes[0].names
    assert all(name.startswith(wanted) for name in receiver.pushes[0].names)


@pytest.mark.parametrize("everything", ["*", ""])
def test_both_words_for_all_metrics_mean_all(everything: str) -> None:
    """ClientTelemetryUtilsTest.testGetSelectorFromRequestedMetrics; an empty text in the protocol's own schema."""
    harness, receiver = collecting(metrics=[everything])
    harness.run_until(lambda: receiver.pushes)
    assert len(receiver.pushes[0].names) > 40


@pytest.mark.parametrize("metrics", [(), ("org.apache.kafka.consumer.",)])
def test_no_wanted_metric_means_questions_and_no_push(metrics: tuple[str, ...]) -> None:
    """ClientTelemetryReporterTest.testHandleResponseGetSubscriptionsWithoutMetrics."""
    harness, receiver = collecting(metrics=metrics)
    harness.run_for(20 * INTERVAL_MS)
    assert pushed(harness) == 0
    assert 7 <= asked(harness) <= 21
    receiver.subscribe("*")
    harness.run_until(lambda: receiver.pushes)


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [((4, 3), 4), ((3, 4), 3), ((1,), 1), ((2,), 2), ((99, 2), 2), ((), 0), ((99,), 0), ((0,), 0)],
)
def test_codec_is_the_first_of_the_brokers_list_that_is_known(accepted: tuple[int, ...], chosen: int) -> None:
    """ClientTelemetryReporterTest.testCreateRequestPushCompression; the receiver reads it."""
    harness, receiver = collecting(codec_ids=accepted)
    harness.run_until(lambda: receiver.pushes)
    assert receiver.pushes[0].codec_id == chosen


def test_a_codec_that_fails_gives_way_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """ClientTelemetryReporterTest.testCreateRequestPushCompressionException."""
    compress = Codec.compress

    def failing(codec: Codec, chunks: Any) -> Any:
        if codec.name == "zstd":
            raise OSError("no zstd")
        return compress(codec, chunks)

    monkeypatch.setattr(Codec, "compress", failing)
    harness, receiver = collecting(codec_ids=(4, 3))
    harness.run_until(lambda: len(receiver.pushes) == 2)
    assert [push.codec_id for push in receiver.pushes] == [0, 3]


def test_label_of_a_transactional_producer_is_its_own_id() -> None:
    """ClientTelemetryReporterTest.testProducerLabels. In the sink each task has its own id, under one configured id."""
    harness = TransactionHarness(2)
    receiver = harness.cluster.telemetry = TelemetryReceiver(interval_ms=INTERVAL_MS)
    harness.producer.init_transactions()
    name = harness.config.transactional_id
    harness.run_until(lambda: receiver.pushes)
    assert receiver.pushes[0].labels == {"transactional_id": name}
    harness.producer.init_transactions("task-7")
    harness.run_until(lambda: len(receiver.pushes) == 2)
    assert receiver.pushes[1].labels == {}


# ---- changes of the subscription -------------------------------------------------------------------------------------


def test_changed_subscription_is_asked_for_at_once() -> None:
    """ClientTelemetryReporterTest.testHandleResponseSubscriptionChange. The refused push's counts are in the next."""
    harness, receiver = collecting()
    harness.run_until(lambda: receiver.pushes)
    receiver.subscribe("org.apache.kafka.producer.record.send.", interval_ms=2 * INTERVAL_MS)
    send(harness, 4)
    before = asked(harness)
    harness.run_until(lambda: asked(harness) > before)
    (question,) = harness.cluster.requests_of(GET)[before:]
    refused = harness.cluster.requests_of(PUSH)[-1]
    assert question.now_ms - refused.now_ms < 10
    assert question.request.client_instance_id == refused.request.client_instance_id
    harness.run_until(lambda: len(receiver.pushes) == 2)
    assert receiver.pushes[1].value(SENT) == 4
    assert all(name.startswith("org.apache.kafka.producer.record.send.") for name in receiver.pushes[1].names)


def test_deleted_subscription_ends_the_pushes() -> None:
    harness, receiver = collecting()
    harness.run_until(lambda: len(receiver.pushes) == 2)
    receiver.subscribe()
    harness.run_for(20 * INTERVAL_MS)
    assert len(receiver.pushes) == 2
    assert pushed(harness) == 3  # one learnt of the deletion
    harness.close()
    assert pushed(harness) == 3


def test_change_from_increases_to_totals_and_back_counts_nothing_twice() -> None:
    """ClientTelemetryReporterTest.testHandleResponseSubscriptionChange: Java begins anew."""
    harness, receiver = collecting()
    send(harness, 2)
    harness.run_until(lambda: receiver.pushes)
    receiver.subscribe("*", has_deltas=False)
    send(harness, 3)
    harness.run_until(lambda: len(receiver.pushes) == 2)
    receiver.subscribe("*", has_deltas=True)
    send(harness, 4)
    harness.run_until(lambda: len(receiver.pushes) == 3)
    assert [push.value(SENT) for push in receiver.pushes] == [3, 6, 4]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [*Code, -1, 31, 999])
@pytest.mark.parametrize("api_key", [GET, PUSH])
def test_error_of_a_broker_never_touches_records(api_key: ApiKey, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """ClientTelemetryReporterTest.testHandleResponseGetTelemetryErrorResponse, ...PushTelemetryErrorResponse."""
    caplog.set_level(logging.WARNING)
    harness = ProducerHarness(AT_ONCE)
    receiver = harness.cluster.telemetry = TelemetryReceiver(interval_ms=INTERVAL_MS)
    harness.cluster.on(api_key, faults.fail_with(int(code)))
    send(harness)
    harness.run_for(700_000)
    send(harness)
    stops = code in {Code.INVALID_REQUEST, Code.INVALID_RECORD, Code.UNSUPPORTED_VERSION}
    assert (state(harness) is State.TERMINATED) is stops
    assert (len(receiver.pushes) > 30) is not stops
    if not stops:
        assert sum(push.value(SENT) for push in receiver.pushes) >= 1
    told = [record.levelname for record in caplog.records if "refused the telemetry" in record.getMessage()]
    assert told == (["ERROR"] if stops else [] if code in set(Code) else ["WARNING"])
    assert not harness.producer.has_failed
    harness.close()


def test_broker_that_always_refuses_gets_one_push_in_an_interval() -> None:
    harness, _ = collecting()
    harness.cluster.on(PUSH, faults.fail_with(Code.UNKNOWN_SUBSCRIPTION_ID), times=None)
    harness.cluster.on(GET, faults.fail_with(Code.UNKNOWN_SUBSCRIPTION_ID), times=None, skip=3)
    harness.run_for(100 * INTERVAL_MS)
    assert pushed(harness) <= 110
    assert asked(harness) <= 110


def test_error_that_the_kip_does_not_name_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    harness, _ = collecting()
    harness.cluster.on(PUSH, faults.fail_with(31), times=None)
    harness.run_for(20 * INTERVAL_MS)
    assert pushed(harness) > 3
    told = [record for record in caplog.records if "refused the telemetry" in record.getMessage()]
    assert [record.levelname for record in told if record.levelno >= logging.WARNING] == ["WARNING"]


def test_refused_codec_is_not_used_again() -> None:
    harness, receiver = collecting(codec_ids=(4, 3))
    harness.cluster.on(PUSH, faults.fail_with(Code.UNSUPPORTED_COMPRESSION_TYPE))
    send(harness, 2)
    harness.run_until(lambda: receiver.pushes)
    assert receiver.pushes[0].codec_id == 3
    assert receiver.pushes[0].value(SENT) == 3


def test_limit_of_bytes_leaves_out_topics_and_brokers_first(caplog: pytest.LogCaptureFixture) -> None:
    """The KIP's TelemetryMaxBytes, which the Java client does not look at. The log says once what is missing."""
    harness, receiver = collecting(max_bytes=1_000, codec_ids=())
    send(harness)
    harness.run_until(lambda: len(receiver.pushes) == 3)
    for push in receiver.pushes:
        assert 500 < push.size <= 1_000
        assert SENT.removesuffix(".total") + ".total" in {name.partition("producer.")[2] for name in push.names}
        assert not any(".topic." in name or ".node." in name for name in push.names)
    (line,) = (
        record.getMessage() for record in caplog.records if "values that the brokers want" in record.getMessage()
    )
    assert "telemetry.max.bytes" in line


def test_limit_that_nothing_fits_into_means_no_push(caplog: pytest.LogCaptureFixture) -> None:
    harness, receiver = collecting(max_bytes=1)
    harness.run_for(5 * INTERVAL_MS)
    assert pushed(harness) == len(receiver.pushes) == 0
    assert "Only 0 of the" in caplog.text


def test_push_without_an_answer_is_not_counted_twice() -> None:
    harness, receiver = collecting()
    harness.cluster.on(PUSH, faults.lose_response())
    send(harness, 3)
    harness.run_until(lambda: len(receiver.pushes) == 3, 600_000)
    assert [push.value(SENT) for push in receiver.pushes] == [4, 0, 0]
    assert asked(harness) == 1


def test_question_without_an_answer_is_asked_again_soon() -> None:
    harness = ProducerHarness(AT_ONCE)
    harness.cluster.telemetry = TelemetryReceiver(interval_ms=INTERVAL_MS)
    harness.cluster.on(GET, faults.close_before(), times=2)
    send(harness)
    harness.run_until(lambda: state(harness) is State.PUSH_NEEDED, 10_000)
    assert asked(harness) == 3


def test_answer_that_is_no_answer_ends_telemetry_and_not_the_records(caplog: pytest.LogCaptureFixture) -> None:
    harness = ProducerHarness(AT_ONCE)
    harness.cluster.telemetry = TelemetryReceiver(interval_ms=INTERVAL_MS)
    harness.cluster.on(GET, faults.truncate(4))
    send(harness)
    harness.run_for(20 * INTERVAL_MS)
    send(harness)
    assert state(harness) is State.TERMINATED
    assert asked(harness) == 1
    assert "pushes no metrics any more" in caplog.text


def test_answer_without_an_instance_id_ends_telemetry(caplog: pytest.LogCaptureFixture) -> None:
    harness = ProducerHarness(AT_ONCE)
    harness.cluster.telemetry = TelemetryReceiver(interval_ms=INTERVAL_MS)
    harness.cluster.on(GET, lambda cluster, exchange, proceed: Answer({"error_code": 0, "client_instance_id": None}))
    send(harness)
    harness.run_for(5 * INTERVAL_MS)
    assert state(harness) is State.TERMINATED
    assert harness.producer.client_instance_id(1) is None
    assert "no client instance id" in caplog.text


def test_fault_of_our_own_ends_telemetry_and_not_the_records(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness, receiver = collecting()
    monkeypatch.setattr(telemetry_of(harness)._payloads._points, "of", lambda *_: 1 / 0)
    harness.run_for(3 * INTERVAL_MS)
    send(harness, 3)
    assert state(harness) is State.TERMINATED
    assert not harness.producer.has_failed
    assert receiver.pushes == []
    assert sum("pushes no metrics any more" in record.getMessage() for record in caplog.records) == 1
    harness.close()


def test_missing_extra_is_told_once_with_the_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    monkeypatch.setattr(telemetry_payload, "_warned", threading.Lock())
    monkeypatch.delitem(sys.modules, "spark_kafka_sink.producer.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.metrics.v1.metrics_pb2", None)
    for _ in range(2):
        harness, receiver = collecting()
        harness.run_for(5 * INTERVAL_MS)
        assert state(harness) is State.TERMINATED
        assert pushed(harness) == 0
        assert harness.producer.client_instance_id(0) in receiver.instances
        send(harness)
        harness.close()
    (line,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "pip install 'spark-kafka-sink[telemetry]'" in line


# ---- nodes and connections -------------------------------------------------------------------------------------------


def test_pushes_go_on_to_the_same_broker() -> None:
    """NetworkClientTest.testTelemetryRequest: the sticky node."""
    harness, receiver = collecting(node_count=3)
    harness.run_until(lambda: len(receiver.pushes) == 5)
    assert len({exchange.node_id for exchange in harness.cluster.requests_of(PUSH)}) == 1


def test_another_broker_gets_the_push_when_the_last_one_is_gone() -> None:
    harness, receiver = collecting(node_count=3)
    harness.run_until(lambda: receiver.pushes)
    gone = harness.cluster.requests_of(PUSH)[-1].node_id
    harness.network.stop(gone)
    harness.run_until(lambda: len(receiver.pushes) == 3)
    assert gone not in {exchange.node_id for exchange in harness.cluster.requests_of(PUSH)[1:]}
    assert len(receiver.instances) == 1
    assert asked(harness) == 1


def test_broker_without_a_receiver_gets_no_request() -> None:
    harness = ProducerHarness(AT_ONCE, node_count=2, topics={TOPIC: 2})
    receiver = harness.cluster.telemetry = TelemetryReceiver(interval_ms=INTERVAL_MS, node_ids=frozenset({1}))
    harness.warm_up()
    harness.run_until(lambda: len(receiver.pushes) >= 3, 120_000)
    assert {exchange.node_id for key in (GET, PUSH) for exchange in harness.cluster.requests_of(key)} == {1}


def test_unreachable_brokers_are_looked_for_less_and_less_often() -> None:
    harness, receiver = collecting()
    harness.run_until(lambda: receiver.pushes)
    harness.network.stop(0)
    searches = []
    choose = telemetry_of(harness)._choose
    telemetry_of(harness)._choose = lambda *args: searches.append(harness.now_ms) or choose(*args)
    harness.run_for(600_000)
    assert 5 < len(searches) < 60
    harness.network.start(0)
    harness.run_until(lambda: len(receiver.pushes) == 2)


def test_refused_login_is_no_error_of_telemetry() -> None:
    harness, receiver = collecting({"metadata.max.age.ms": "3600000"})
    harness.run_until(lambda: receiver.pushes)
    harness.network.refused_logins[0] = SaslAuthenticationError("wrong password")
    harness.network.cut(0)
    harness.run_for(10 * INTERVAL_MS)
    assert state(harness) is State.PUSH_NEEDED
    harness.network.refused_logins.clear()
    harness.run_until(lambda: len(receiver.pushes) == 2, 600_000)


def test_throttle_of_a_push_delays_requests_to_that_broker() -> None:
    harness, _ = collecting()
    harness.cluster.on(PUSH, lambda cluster, exchange, proceed: Answer({"error_code": 0, "throttle_time": 3_000}))
    harness.run_until(lambda: pushed(harness))
    harness.run_for(10)
    delivery = harness.send()
    harness.settle()
    assert delivery.error is None
    assert delivery.took_ms > 2_000


def test_records_do_not_wait_for_telemetry_in_flight() -> None:
    harness = ProducerHarness({**AT_ONCE, "max.in.flight.requests.per.connection": "1"})
    harness.cluster.telemetry = TelemetryReceiver(interval_ms=INTERVAL_MS)
    harness.warm_up()
    harness.run_for(2 * INTERVAL_MS)
    harness.cluster.on(PUSH, faults.delay(5_000))
    harness.run_until(lambda: telemetry_of(harness).in_flight)
    produced = len(harness.cluster.requests_of(ApiKey.PRODUCE))
    harness.send()
    harness.run_for(20)
    assert len(harness.cluster.requests_of(ApiKey.PRODUCE)) == produced + 1
    assert telemetry_of(harness).in_flight == 1


def test_busy_producer_pushes_as_often_as_an_idle_one() -> None:
    """Bug: a producer whose connection is always full pushed nothing, because its records went first in each turn."""
    settings = {**AT_ONCE, "batch.size": "1", "max.in.flight.requests.per.connection": "2"}
    harness = ProducerHarness(settings, latency_ms=lambda: 10)
    receiver = harness.cluster.telemetry = TelemetryReceiver(interval_ms=1_000)
    harness.warm_up()

    def fill() -> None:
        while sum(not delivery.is_settled for delivery in harness.deliveries[-10:]) < 10:
            harness.send()

    harness.on_turn = fill
    harness.run_for(6_000)
    assert len(harness.deliveries) > 500
    times = [push.at_ms for push in receiver.pushes]
    assert len(times) >= 4
    assert all(later - earlier <= 1_200 for earlier, later in itertools.pairwise(times)), times


def test_idle_sender_wakes_once_for_a_push() -> None:
    harness, receiver = collecting(interval_ms=300_000)
    harness.run_until(lambda: receiver.pushes, 500_000)
    idle, _ = collecting(metrics=(), interval_ms=3_600_000)
    pushes, turns, others = len(receiver.pushes), harness.turns, idle.turns
    harness.run_for(3_600_000)
    idle.run_for(3_600_000)
    extra = (harness.turns - turns) - (idle.turns - others)
    assert extra <= 4 * (len(receiver.pushes) - pushes)


# ---- the client instance id ------------------------------------------------------------------------------------------


def test_client_instance_id_is_the_brokers() -> None:
    """KafkaProducerTest.testClientInstanceId, ClientTelemetryReporterTest.testClientInstanceId."""
    harness, receiver = collecting()
    (expected,) = receiver.instances
    assert harness.producer.client_instance_id(0) == expected
    harness.run_for(3 * INTERVAL_MS)
    receiver.subscribe("*")
    harness.run_for(3 * INTERVAL_MS)
    assert harness.producer.client_instance_id(0) == expected
    assert {push.client_instance_id for push in receiver.pushes} == {expected}
    harness.close()
    assert harness.producer.client_instance_id(0) == expected


def test_client_instance_id_is_waited_for_without_a_send() -> None:
    harness = ProducerHarness(node_count=3)
    receiver = harness.cluster.telemetry = TelemetryReceiver()
    before_ms = harness.now_ms
    assert harness.producer.client_instance_id(10) in receiver.instances
    assert harness.now_ms - before_ms < 1_000


def test_client_instance_id_is_none_without_a_receiver() -> None:
    harness = ProducerHarness(AT_ONCE)
    harness.warm_up()
    before_ms = harness.now_ms
    assert harness.producer.client_instance_id(2.5) is None
    assert 2_500 <= harness.now_ms - before_ms < 3_000
    assert harness.producer.client_instance_id(0) is None


@pytest.mark.parametrize(
    ("settings", "timeout", "text"),
    [({}, -1, r"timeout=-1\): give seconds"), ({"enable.metrics.push": "false"}, 0, "set enable.metrics.push=true")],
)
def test_client_instance_id_refuses_misuse(settings: dict[str, str], timeout: float, text: str) -> None:
    """KafkaProducerTest.testClientInstanceIdInvalidTimeout, testClientInstanceIdNoTelemetryReporterRegistered."""
    with pytest.raises(IllegalStateError, match=text):
        ProducerHarness(settings).producer.client_instance_id(timeout)


def test_id_is_shown_as_brokers_show_it() -> None:
    assert kafka_text(uuid.UUID("f2e8a7c1-0000-4000-8000-0000000000ff")) == "8uinwQAAQACAAAAAAAAA_w"


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_close_pushes_once_more_after_the_last_record() -> None:
    """ClientTelemetryReporterTest.testTelemetryReporterInitiateClose, testHandleResponsePushTelemetryTerminating."""
    harness, receiver = collecting()
    harness.run_until(lambda: receiver.pushes)
    for _ in range(5):
        harness.send()
    harness.close()
    assert [push.is_terminating for push in receiver.pushes] == [False, True]
    assert receiver.pushes[1].value(SENT) == 5
    assert all(delivery.error is None for delivery in harness.deliveries)


def test_close_before_the_first_push_pushes_too() -> None:
    harness, receiver = collecting()
    harness.close()
    assert [(push.is_terminating, push.value(SENT)) for push in receiver.pushes] == [(True, 1)]


@pytest.mark.parametrize("metrics", [(), ("org.apache.kafka.consumer.",)])
def test_close_without_a_subscription_pushes_nothing(metrics: tuple[str, ...]) -> None:
    """ClientTelemetryReporterTest.testTelemetryReporterInitiateCloseNoSubscription."""
    harness, _ = collecting(metrics=metrics)
    before_ms = harness.now_ms
    harness.close()
    assert pushed(harness) == 0
    assert harness.now_ms - before_ms < 10


def test_close_waits_a_second_for_the_last_push_and_no_longer() -> None:
    harness, _ = collecting()
    harness.cluster.on(PUSH, faults.lose_request(), times=None)
    before_ms = harness.now_ms
    harness.close()
    assert pushed(harness) == 1
    assert LAST_PUSH_MS <= harness.now_ms - before_ms <= LAST_PUSH_MS + 10


def test_last_push_is_sent_at_once_if_the_last_record_cannot_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, _ = collecting()
    harness.send()
    monkeypatch.setattr(ProducerBatch, "seal", Mock(side_effect=ValueError))
    before_ms = harness.now_ms
    harness.close()
    assert pushed(harness) == 1
    assert harness.now_ms - before_ms < 10


def test_close_does_not_wait_for_a_question_in_flight() -> None:
    harness, _ = collecting(metrics=())
    harness.cluster.on(GET, faults.delay(20_000))
    harness.run_until(lambda: telemetry_of(harness).in_flight)
    before_ms = harness.now_ms
    harness.close()
    assert harness.now_ms - before_ms < 10


def test_close_during_a_push_pushes_once_more_and_ignores_the_first_answer() -> None:
    harness, receiver = collecting()
    harness.cluster.on(PUSH, faults.delay(300))
    harness.cluster.on(PUSH, faults.delay(600))
    harness.run_until(lambda: telemetry_of(harness).in_flight)
    harness.send()
    before_ms = harness.now_ms
    harness.close()
    assert [push.is_terminating for push in receiver.pushes] == [False, True]
    assert [push.value(SENT) for push in receiver.pushes] == [1, 1]
    assert harness.now_ms - before_ms >= 600


def test_close_opens_no_connection_for_the_last_push() -> None:
    harness, _ = collecting()
    harness.network.stop(0)
    harness.run_for(100)
    before_ms = harness.now_ms
    connected_to: list[Node] = []
    harness.client.ready = lambda node, now_ms: connected_to.append(node) or False
    harness.close()
    assert harness.now_ms - before_ms < 10
    assert (pushed(harness), connected_to) == (0, [])


def test_forced_close_pushes_nothing() -> None:
    harness, _ = collecting()
    harness.producer.sender.force_close()
    harness.producer.sender.run()
    assert pushed(harness) == 0
    assert state(harness) is State.TERMINATED


def test_nothing_is_due_after_the_end() -> None:
    harness, _ = collecting()
    harness.close()
    assert telemetry_of(harness).turn(harness.client, harness.now_ms) > FOREVER_MS // 2
