"""The producer's metrics in scripted situations: each changes as its name says, and no other one does."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from support.producer_harness import AT_ONCE, TOPIC, ProducerHarness, warm
from support.scripted_broker import faults
from support.scripted_broker.cluster import NO_LEADER
from support.transaction_harness import PLACE, TransactionHarness

from spark_kafka_sink.common.errors import (
    BufferExhaustedError,
    ClusterAuthorizationError,
    KafkaTimeoutError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    ProducerClosedError,
    RecordTooLargeError,
    TopicAuthorizationError,
)
from spark_kafka_sink.common.windows import EXPIRY_MS
from spark_kafka_sink.producer.metrics import TIMED_CALLS, ProducerMetrics
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import record_size_upper_bound

OF_CONNECTIONS = (
    *("outgoing-byte", "incoming-byte", "response", "network-io", "connection-creation", "connection-close"),
    *("successful-authentication", "failed-authentication", "select"),
)
BOTH = ("rate", "total")
OF_POLLS = {
    *("select-rate", "io-wait-ratio", "io-wait-time-ns-avg", "io-time-ns-avg", "outgoing-byte-rate"),
    *("incoming-byte-rate", "request-rate", "response-rate", "network-io-rate", "request-size-avg", "request-size-max"),
}
TOTALS = ("record-send", "record-error", "record-retry", "byte", "batch-send", "batch-split", "request")


def quiet(settings: Mapping[str, Any] = AT_ONCE, **more: Any) -> ProducerHarness:
    """As `warm`, and the windows of the metrics have passed since then."""
    harness = warm(settings, **more)
    harness.run_for(200_000)
    harness.cluster.requests.clear()
    return harness


class Moved:
    """The change of the totals since its creation."""

    def __init__(self, harness: ProducerHarness) -> None:
        self._harness = harness
        self._before = harness.producer.metrics()

    def __getitem__(self, name: str) -> float:
        metrics = self._harness.producer.metrics()
        both = (metrics["batch-send-total"], metrics["record-retry-total"])
        assert self._harness.producer.batches_and_retries() == both
        return metrics[name] - self._before[name]

    def totals(self) -> dict[str, float]:
        """Return the changed totals, without bytes and requests."""
        moved = {name: self[f"{name}-total"] for name in TOTALS if name not in {"byte", "request"}}
        return {name: value for name, value in moved.items() if value}


def wire_sizes(harness: ProducerHarness) -> list[int]:
    """Return the bytes of every batch that was sent to the brokers, in order."""
    return [
        len(bytes(data.records))
        for exchange in harness.cluster.requests_of(ApiKey.PRODUCE)
        for topic in exchange.request.topic_data
        for data in topic.partition_data
    ]


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_are_kafkas_with_one_exception() -> None:
    both = ("rate", "total")
    spread = ("avg", "max")
    expected = {
        *(f"{name}-{kind}" for name in TOTALS for kind in both),
        *(f"buffer-exhausted-{kind}" for kind in both),
        *(f"{name}-{kind}" for name in ("batch-size", "record-size", "record-queue-time") for kind in spread),
        *(f"{name}-{kind}" for name in ("request-latency", "produce-throttle-time") for kind in spread),
        *("compression-rate-avg", "records-per-request-avg", "requests-in-flight", "metadata-age", "waiting-threads"),
        *("bufferpool-wait-ratio", "bufferpool-wait-time-ns-total", "buffer-total-bytes", "buffer-available-bytes"),
        *(f"{call}-time-ns-total" for call in TIMED_CALLS),
        *(f"{name}-{kind}" for name in OF_CONNECTIONS for kind in both),
        *("connection-count", "request-size-avg", "request-size-max"),
        *(f"{name}-{kind}" for name in ("io-time-ns", "io-wait-time-ns") for kind in ("avg", "total")),
        *("io-ratio", "io-wait-ratio"),
    } - {"batch-send-rate"}
    metrics = ProducerHarness().producer.metrics()
    assert set(metrics) == expected
    assert {type(value) for value in metrics.values()} == {float}


def test_without_events_totals_are_0_and_averages_nan() -> None:
    metrics = ProducerHarness({"buffer.memory": "5000"}).producer.metrics()
    for name, value in metrics.items():
        if name.endswith(("-avg", "-max")) or name == "metadata-age":
            assert math.isnan(value), name
        else:
            assert value == (5_000 if name in {"buffer-total-bytes", "buffer-available-bytes"} else 0), name


def test_reading_changes_nothing() -> None:
    harness = quiet()
    harness.send()
    harness.settle()
    first, second = harness.producer.metrics(), harness.producer.metrics()
    assert first == pytest.approx(second, abs=0, nan_ok=True)


# ---- sent and acknowledged -------------------------------------------------------------------------------------------


def test_sent_records_bytes_batches_and_requests_are_counted() -> None:
    harness = quiet(topics={TOPIC: 3})
    moved = Moved(harness)
    for partition, count in ((0, 1), (1, 2), (2, 3)):
        for _ in range(count):
            harness.send(bytes(100), partition=partition)
    harness.settle()
    sizes = wire_sizes(harness)
    metrics = harness.producer.metrics()
    assert len(sizes) == 3
    assert moved.totals() == {"record-send": 6, "batch-send": 3}
    assert moved["byte-total"] == sum(sizes)
    assert moved["request-total"] == len(harness.cluster.requests_of(ApiKey.PRODUCE)) == 1
    assert metrics["batch-size-avg"] == sum(sizes) / 3
    assert metrics["batch-size-max"] == max(sizes)
    assert metrics["records-per-request-avg"] == 6
    assert metrics["compression-rate-avg"] == 1


def test_rates_are_per_second_of_the_window() -> None:
    harness = quiet()
    for _ in range(3):
        harness.send()
    start_ms = harness.now_ms
    harness.settle()
    harness.run_for(start_ms + 45_000 - harness.now_ms)
    metrics = harness.producer.metrics()
    assert metrics["record-send-rate"] == pytest.approx(3 / 45, rel=0.001)
    assert metrics["request-rate"] == pytest.approx(1 / 45, rel=0.001)
    assert metrics["byte-rate"] == pytest.approx(sum(wire_sizes(harness)) / 45, rel=0.001)


def test_old_events_count_in_totals_only() -> None:
    harness = quiet()
    harness.send(bytes(5_000))
    harness.settle()
    busy = harness.producer.metrics()
    harness.run_for(40_000)
    harness.send(b"small")
    harness.settle()
    assert harness.producer.metrics()["record-size-max"] == busy["record-size-max"] > 5_000
    harness.run_for(60_000)
    later = harness.producer.metrics()
    assert later["record-size-max"] < 100
    assert later["batch-size-max"] < 200
    harness.run_for(60_000)
    idle = harness.producer.metrics()
    for name, value in idle.items():
        if name in OF_POLLS:
            continue  # the Sender continues to poll, and requests metadata every five minutes
        if name.endswith("-rate"):
            assert value == 0, name
        elif name.endswith(("-avg", "-max")):
            assert math.isnan(value), name
        elif name.endswith("-total"):
            assert value >= busy[name], name
    assert idle["record-send-total"] == busy["record-send-total"] + 1


@pytest.mark.parametrize("acks", ["1", "0"])
def test_batch_counts_as_acknowledged_when_it_is_settled(acks: str) -> None:
    harness = quiet({**AT_ONCE, "acks": acks, "enable.idempotence": "false"})
    harness.network.held.add(0)
    moved = Moved(harness)
    harness.send()
    harness.run_for(50)
    assert moved["record-send-total"] == 1
    assert moved["batch-send-total"] == (1 if acks == "0" else 0)
    harness.network.held.clear()
    harness.settle()
    assert moved["batch-send-total"] == 1


def test_requests_for_a_producer_id_count_as_requests() -> None:
    harness = ProducerHarness(AT_ONCE)
    harness.send()
    harness.settle()
    requests = harness.producer.metrics()["request-total"]
    assert requests == len(harness.cluster.requests) == 5, "two for versions, metadata, producer id, Produce"
    assert harness.producer.metrics()["records-per-request-avg"] == 1


# ---- sizes and compression -------------------------------------------------------------------------------------------


def test_record_sizes_of_rows_are_those_of_their_bytes() -> None:
    harness = quiet({"linger.ms": "20"})
    for size in (10, 1_000, 100):
        harness.send(bytes(size))
    harness.settle()
    (size,) = wire_sizes(harness)
    metrics = harness.producer.metrics()
    assert metrics["record-size-avg"] == (size - 61) / 3
    assert 1_000 < metrics["record-size-max"] <= record_size_upper_bound(None, bytes(1_000))


def test_record_sizes_of_columns_are_known_without_reading_rows() -> None:
    harness = quiet(topics={TOPIC: 2})
    values = [bytes(size) for size in (10, 1_000, 100, 20)]
    harness.send_columns(RecordColumns.from_rows(values, partitions=[0, 1, 0, 1]))
    harness.settle()
    sizes = wire_sizes(harness)
    metrics = harness.producer.metrics()
    assert metrics["record-size-avg"] == (sum(sizes) - 61 * len(sizes)) / 4
    assert 1_000 < metrics["record-size-max"] <= 1_040


@pytest.mark.parametrize("as_columns", [False, True])
def test_the_compression_rate_is_compressed_by_uncompressed_bytes(as_columns: bool) -> None:
    rows = [b"the same again and again " * 40] * 20
    sizes: dict[str, int] = {}
    rates: dict[str, float] = {}
    averages: dict[str, float] = {}
    for codec in ("none", "zstd"):
        harness = quiet({"linger.ms": "20", "compression.type": codec, "batch.size": "100000"})
        if as_columns:
            harness.send_columns(RecordColumns(value=pa.array(rows, pa.binary())))
        else:
            for row in rows:
                harness.send(row)
        harness.settle()
        (sizes[codec],) = wire_sizes(harness)
        rates[codec] = harness.producer.metrics()["compression-rate-avg"]
        averages[codec] = harness.producer.metrics()["record-size-avg"]
    assert rates["none"] == 1
    assert rates["zstd"] == pytest.approx((sizes["zstd"] - 61) / (sizes["none"] - 61))
    assert rates["zstd"] < 0.05
    assert averages["none"] == averages["zstd"]  # the size of a record is its size before compression


def test_the_average_compression_rate_is_that_of_batches() -> None:
    harness = quiet({**AT_ONCE, "compression.type": "gzip"})
    for value in (bytes(10_000), random.Random(5).randbytes(10_000)):
        harness.send(value)
        harness.settle()
    small, large = (size - 61 for size in wire_sizes(harness))
    assert small * 50 < large
    assert harness.producer.metrics()["compression-rate-avg"] == pytest.approx((small + large) / 20_000, rel=0.01)


# ---- times -----------------------------------------------------------------------------------------------------------


def test_queue_time_runs_from_first_record_to_drain() -> None:
    harness = quiet({"linger.ms": "50", "batch.size": "500"})
    harness.send(b"lingers")
    harness.settle()
    assert harness.producer.metrics()["record-queue-time-avg"] == 50
    harness.send(bytes(600))  # full, so it is sent at once
    harness.settle()
    assert harness.producer.metrics()["record-queue-time-avg"] == 25
    assert harness.producer.metrics()["record-queue-time-max"] == 50


def test_the_latency_is_that_of_produce_requests() -> None:
    harness = quiet()
    for delay_ms in (100, 300):
        harness.cluster.on(ApiKey.PRODUCE, faults.delay(delay_ms))
        harness.send()
        harness.settle()
    metrics = harness.producer.metrics()
    assert metrics["request-latency-avg"] == pytest.approx(202, abs=1)  # and 1 ms in each direction
    assert metrics["request-latency-max"] == pytest.approx(302, abs=1)


def test_compression_does_not_count_as_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it included the compression of the turn's batches, which by gzip takes longer than the broker's answer."""
    harness = quiet()
    seal = ProducerBatch.seal

    def slowly(batch: ProducerBatch, *codec: Any) -> Any:
        harness.clock.advance(40)
        return seal(batch, *codec)

    monkeypatch.setattr(ProducerBatch, "seal", slowly)
    harness.send()
    harness.settle()
    assert harness.producer.metrics()["request-latency-max"] == pytest.approx(2, abs=1)


def test_a_request_without_an_answer_has_no_latency() -> None:
    harness = quiet()
    harness.cluster.on(ApiKey.PRODUCE, faults.close_after())
    harness.send()
    harness.settle()
    metrics = harness.producer.metrics()
    assert metrics["request-latency-max"] < 10  # only the latency of the second attempt
    assert metrics["records-per-request-avg"] == 1


def test_throttle_times_are_those_that_brokers_ask_for_zero_included() -> None:
    harness = quiet()
    harness.send()
    harness.settle()
    assert harness.producer.metrics()["produce-throttle-time-max"] == 0
    harness.cluster.throttle_ms = 400
    harness.send()
    harness.settle()
    harness.cluster.throttle_ms = 0
    metrics = harness.producer.metrics()
    assert metrics["produce-throttle-time-avg"] == 200
    assert metrics["produce-throttle-time-max"] == 400


def test_requests_in_flight_are_the_current_ones() -> None:
    harness = quiet({**AT_ONCE, "batch.size": "1"})
    harness.network.held.add(0)
    for _ in range(3):
        harness.send()
    harness.run_for(50)
    assert harness.producer.metrics()["requests-in-flight"] == 3
    harness.network.held.clear()
    harness.settle()
    harness.turn(0)
    assert harness.producer.metrics()["requests-in-flight"] == 0


def test_requests_in_flight_are_known_after_a_fatal_error_too() -> None:
    harness = quiet({**AT_ONCE, "batch.size": "1"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(ClusterAuthorizationError))
    harness.cluster.on(ApiKey.PRODUCE, faults.delay(500), times=None)
    for _ in range(3):
        harness.send()
    harness.settle()
    harness.turn(0)
    assert harness.producer.metrics()["requests-in-flight"] == 2
    harness.run_for(1_000)
    assert harness.producer.metrics()["requests-in-flight"] == 0


def test_closed_producer_has_no_request_in_flight() -> None:
    harness = quiet({**AT_ONCE, "batch.size": "1"})
    harness.network.held.add(0)
    harness.send()
    harness.run_for(50)
    assert harness.producer.metrics()["requests-in-flight"] == 1
    harness.producer.sender.force_close()
    harness.producer.sender.run()
    assert harness.producer.metrics()["requests-in-flight"] == 0


def test_metadata_age_counts_seconds_since_full_update() -> None:
    harness = quiet({**AT_ONCE, "metadata.max.age.ms": "60000"})
    harness.metadata.request_update()
    harness.run_until(lambda: harness.producer.metrics()["metadata-age"] < 1)
    harness.run_for(20_000)
    assert harness.producer.metrics()["metadata-age"] == pytest.approx(20, abs=0.1)
    harness.run_for(41_000)
    assert harness.producer.metrics()["metadata-age"] == pytest.approx(1, abs=0.5)


# ---- retries, errors, splits -----------------------------------------------------------------------------------------


def test_retried_records_count_as_retries_and_sent_twice() -> None:
    harness = quiet({"linger.ms": "5"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotLeaderOrFollowerError), times=2)
    moved = Moved(harness)
    for _ in range(3):
        harness.send()
    harness.settle()
    assert moved.totals() == {"record-send": 9, "record-retry": 6, "batch-send": 1}
    assert moved["request-total"] == len(harness.cluster.requests) == 5, "a refusal asks for metadata, too"
    assert harness.producer.metrics()["record-retry-rate"] > 0


def test_records_refused_for_good_are_errors_and_not_retries() -> None:
    harness = quiet({"linger.ms": "5"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError))
    moved = Moved(harness)
    for _ in range(4):
        harness.send()
    harness.settle()
    assert moved.totals() == {"record-send": 4, "record-error": 4}
    assert harness.producer.metrics()["record-error-rate"] == pytest.approx(4 / 30, rel=0.01)


def test_exhausted_retries_count_as_retries_and_errors() -> None:
    harness = quiet({**AT_ONCE, "retries": "2"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotEnoughReplicasError), times=None)
    moved = Moved(harness)
    delivery = harness.send()
    harness.settle()
    assert isinstance(delivery.error, NotEnoughReplicasError)
    assert moved.totals() == {"record-send": 3, "record-retry": 2, "record-error": 1}


def test_records_that_expire_unsent_are_errors_and_were_never_sent() -> None:
    harness = quiet({**AT_ONCE, "delivery.timeout.ms": "10000", "request.timeout.ms": "3000"})
    harness.cluster.move_leader(TOPIC, 0, NO_LEADER)
    harness.metadata.request_update()
    harness.run_for(300)
    moved = Moved(harness)
    delivery = harness.send()
    harness.settle()
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert moved.totals() == {"record-error": 1}


def test_records_expired_in_flight_count_as_errors_once() -> None:
    harness = quiet({**AT_ONCE, "delivery.timeout.ms": "10000", "request.timeout.ms": "9000"})
    harness.network.held.add(0)
    moved = Moved(harness)
    first = harness.send()
    harness.clock.advance(2_000)
    harness.turn(1)
    harness.turn(1)
    harness.selector.at(first.sent_ms + 10_500, harness.network.held.clear)
    harness.settle()
    assert moved.totals() == {"record-send": 1, "record-error": 1}
    harness.run_for(1_000)
    assert harness.memory_in_use == 0  # the answer came
    assert moved.totals() == {"record-send": 1, "record-error": 1}


def test_refused_record_is_an_error_and_misuse_is_not() -> None:
    harness = quiet({**AT_ONCE, "max.request.size": "1000"})
    moved = Moved(harness)
    assert isinstance(harness.send(bytes(2_000)).error, RecordTooLargeError)
    assert moved.totals() == {"record-error": 1}
    harness.producer.close()
    with pytest.raises(ProducerClosedError):
        harness.send()
    assert moved.totals() == {"record-error": 1}


def test_a_batch_that_cannot_be_encoded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = quiet()

    def broken(*_: object) -> None:
        raise ValueError("no bytes")

    monkeypatch.setattr(ProducerBatch, "seal", broken)
    moved = Moved(harness)
    harness.send()
    harness.settle()
    assert moved.totals() == {"record-error": 1}


def test_records_abandoned_at_close_are_no_errors() -> None:
    harness = quiet()
    harness.network.held.add(0)
    delivery = harness.send()
    harness.run_for(10)
    moved = Moved(harness)
    harness.producer.sender.force_close()
    harness.producer.sender.run()
    assert isinstance(delivery.error, ProducerClosedError)
    assert moved.totals() == {}


def test_splits_are_counted_and_parts_are_no_retries() -> None:
    harness = quiet({"linger.ms": "20"})
    harness.cluster.topics[TOPIC].max_message_bytes = 500
    moved = Moved(harness)
    for index in range(6):
        harness.send(bytes([index]) * 100)
    harness.settle()
    totals = moved.totals()
    attempts = len(wire_sizes(harness))
    assert totals == {"record-send": 12, "batch-split": 1, "batch-send": attempts - 1}
    assert attempts >= 3
    assert harness.producer.metrics()["batch-split-rate"] > 0


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_that_is_taken_is_not_available() -> None:
    harness = quiet({"linger.ms": "1000", "buffer.memory": "5000"})
    harness.send(bytes(400))
    metrics = harness.producer.metrics()
    assert metrics["buffer-total-bytes"] == 5_000
    assert metrics["buffer-available-bytes"] == 5_000 - harness.memory_in_use < 4_600
    harness.settle()
    assert harness.producer.metrics()["buffer-available-bytes"] == 5_000


def test_wait_for_memory_is_visible_and_then_measured() -> None:
    harness = quiet({**AT_ONCE, "buffer.memory": "1000", "max.block.ms": "20000"})
    harness.network.held.add(0)
    harness.send(bytes(900))
    waiting: list[float] = []
    harness.on_turn = lambda: waiting.append(harness.producer.metrics()["waiting-threads"])
    start_ms = harness.now_ms
    harness.selector.at(start_ms + 6_000, harness.network.held.clear)
    harness.send(bytes(900))
    waited_ms = harness.now_ms - start_ms
    harness.on_turn = None
    metrics = harness.producer.metrics()
    assert waited_ms == pytest.approx(6_000, abs=10)
    assert waiting[-1] == 1
    assert metrics["waiting-threads"] == 0
    assert metrics["bufferpool-wait-time-ns-total"] == waited_ms * 1_000_000
    assert metrics["bufferpool-wait-ratio"] == pytest.approx(6 / 36, rel=0.02)
    assert metrics["buffer-exhausted-total"] == 0
    harness.run_for(100_000)
    assert harness.producer.metrics()["bufferpool-wait-ratio"] == 0
    assert harness.producer.metrics()["bufferpool-wait-time-ns-total"] == waited_ms * 1_000_000


def test_failed_wait_for_memory_counts_as_exhausted_buffer_and_error() -> None:
    harness = quiet({**AT_ONCE, "buffer.memory": "1000", "max.block.ms": "2000"})
    harness.network.held.add(0)
    harness.send(bytes(900))
    harness.run_for(10)
    moved = Moved(harness)
    assert isinstance(harness.send(bytes(900)).error, BufferExhaustedError)
    assert moved["buffer-exhausted-total"] == 1
    assert moved["bufferpool-wait-time-ns-total"] == 2_000 * 1_000_000
    assert moved["record-error-total"] == 1
    assert harness.producer.metrics()["buffer-exhausted-rate"] > 0


# ---- time of the application's threads -------------------------------------------------------------------------------


def test_a_flush_and_a_wait_for_metadata_are_measured() -> None:
    harness = ProducerHarness({"linger.ms": "60000", "delivery.timeout.ms": "120000"}, latency_ms=lambda: 20)
    start_ms = harness.now_ms
    harness.send()
    waited_ms = harness.now_ms - start_ms
    metrics = harness.producer.metrics()
    assert waited_ms >= 40
    assert metrics["metadata-wait-time-ns-total"] == waited_ms * 1_000_000
    assert metrics["flush-time-ns-total"] == 0
    harness.send()  # the topic is known
    assert harness.producer.metrics()["metadata-wait-time-ns-total"] == waited_ms * 1_000_000
    harness.accumulator.flush = lambda begun, wait: bool(harness.settle()) or True
    start_ms = harness.now_ms
    harness.producer.flush()
    assert harness.producer.metrics()["flush-time-ns-total"] == (harness.now_ms - start_ms) * 1_000_000 > 0


@pytest.mark.parametrize("version", [1, 2])
def test_the_calls_of_a_transaction_are_measured_each_by_itself(version: int) -> None:
    harness = TransactionHarness(version)
    harness.producer.partitions_for(TOPIC)
    spent = dict.fromkeys(TIMED_CALLS, 0)
    begin = harness.manager.begin_transaction

    def begin_slowly() -> None:  # no request: only a lock could delay it
        harness.clock.advance(3)
        begin()

    harness.manager.begin_transaction = begin_slowly

    def timed(call: str, *arguments: Any) -> None:
        method = getattr(harness.producer, _METHODS[call])
        before_ms = harness.now_ms
        method(*arguments)
        spent[call] += harness.now_ms - before_ms
        metrics = harness.producer.metrics()
        measured = {name: metrics[f"{name}-time-ns-total"] / 1_000_000 for name in _METHODS}
        assert measured == {name: spent[name] for name in _METHODS}

    timed("txn-init")
    for last in ("txn-commit", "txn-abort"):
        timed("txn-begin")
        harness.send(b"x", partition=0)
        timed("txn-send-offsets", {PLACE: (5, None)}, "readers")
        timed(last)
    assert spent["txn-begin"] == 6
    assert all(spent[call] > 0 for call in _METHODS)


_METHODS = {
    "txn-init": "init_transactions",
    "txn-begin": "begin_transaction",
    "txn-send-offsets": "send_offsets_to_transaction",
    "txn-commit": "commit_transaction",
    "txn-abort": "abort_transaction",
}


def test_timed_out_commit_is_measured_when_its_repeat_returns() -> None:
    harness = TransactionHarness(2).started()
    harness.send(b"x", partition=0)
    harness.cluster.on(ApiKey.END_TXN, faults.delay(8_000))
    with pytest.raises(KafkaTimeoutError):
        harness.producer.commit_transaction()
    assert harness.producer.metrics()["txn-commit-time-ns-total"] == 0
    before_ms = harness.now_ms
    harness.producer.commit_transaction()
    assert harness.producer.metrics()["txn-commit-time-ns-total"] == (harness.now_ms - before_ms) * 1_000_000 > 0


# ---- by topic, by node, of connections -------------------------------------------------------------------------------


def assert_rate_fits_total(metrics: Mapping[str, float], name: str) -> None:
    """All was counted within 30 seconds, and a rate is over 30 to 60 seconds."""
    rate, total = metrics[f"{name}-rate"], metrics[f"{name}-total"]
    assert total / 60 <= rate <= total / 30, name
    assert total > 0, name


def test_topics_are_counted_separately_and_add_up() -> None:
    harness = quiet({"linger.ms": "5", "compression.type": "gzip"})
    harness.cluster.create_topic("other", partitions=1)
    for _ in range(3):
        harness.send(bytes(1_000))
    harness.producer.send("other", b"x")
    harness.settle()
    by_topic, all_topics = harness.producer.topic_metrics(), harness.producer.metrics()
    assert set(by_topic) == {TOPIC, "other"}
    rates = {f"{name}-{kind}" for name in ("record-send", "record-error", "record-retry", "byte") for kind in BOTH}
    assert set(by_topic[TOPIC]) == {*rates, "compression-rate"}
    assert by_topic[TOPIC]["record-send-total"] == all_topics["record-send-total"] - 1
    assert by_topic["other"]["record-send-total"] == 1
    assert sum(each["byte-total"] for each in by_topic.values()) == all_topics["byte-total"]
    assert by_topic[TOPIC]["compression-rate"] < 0.1 < by_topic["other"]["compression-rate"]
    for name in ("record-send", "byte"):
        assert_rate_fits_total(by_topic[TOPIC], name)


def test_errors_and_retries_are_those_of_their_topic() -> None:
    harness = quiet({"linger.ms": "5", "retries": "1"})
    harness.cluster.create_topic("other", partitions=1)
    harness.producer.send("other", b"x")
    harness.run_for(100)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotEnoughReplicasError), times=2)
    harness.send()
    harness.settle()
    by_topic = harness.producer.topic_metrics()
    assert (by_topic[TOPIC]["record-retry-total"], by_topic[TOPIC]["record-error-total"]) == (1, 1)
    assert (by_topic["other"]["record-retry-total"], by_topic["other"]["record-error-total"]) == (0, 0)
    for name in ("record-retry", "record-error"):
        assert_rate_fits_total(by_topic[TOPIC], name)


def test_topic_that_takes_no_record_is_not_counted() -> None:
    harness = quiet({**AT_ONCE, "max.request.size": "1000"})
    before = set(harness.producer.topic_metrics())
    for number in range(20):
        harness.producer.send(f"bad name {number}", b"x")
    assert set(harness.producer.topic_metrics()) == before
    assert harness.producer.metrics()["record-error-total"] == 20


def test_idle_topic_and_node_are_forgotten_after_an_hour() -> None:
    harness = quiet(AT_ONCE)
    harness.send()
    harness.settle()
    assert set(harness.producer.topic_metrics()) == {TOPIC}
    assert "node--1" in harness.producer.node_metrics()
    harness.clock.advance(EXPIRY_MS + 30_000)
    assert harness.producer.topic_metrics() == {}
    assert harness.producer.node_metrics() == {}


def test_nodes_are_counted_separately_and_add_up() -> None:
    harness = quiet(AT_ONCE)
    harness.network.latency_ms = lambda: 50
    harness.send()
    harness.settle()
    by_node, all_nodes = harness.producer.node_metrics(), harness.producer.metrics()
    assert {"node-0", "node--1"} <= set(by_node)
    for name in ("request-total", "response-total", "outgoing-byte-total", "incoming-byte-total"):
        assert sum(each[name] for each in by_node.values()) == all_nodes[name] > 0, name
    assert by_node["node-0"]["request-latency-max"] == 100
    assert math.isnan(by_node["node--1"]["request-latency-max"]), "metadata and versions are the client's own"
    assert set(by_node["node-0"]) == {
        *(f"{name}-{kind}" for name in ("request", "response", "outgoing-byte", "incoming-byte") for kind in BOTH),
        *(f"{name}-{kind}" for name in ("request-size", "request-latency") for kind in ("avg", "max")),
    }


def test_state_of_each_connection_is_shown() -> None:
    harness = quiet(AT_ONCE)
    harness.send()
    harness.settle()
    place = next(place for place in harness.producer.connection_metrics() if place[0] == "node-0")
    assert place == ("node-0", "broker-0:9092")
    idle = {"ready": 1.0, "requests-in-flight": 0.0, "throttle-time-left": 0.0}
    assert harness.producer.connection_metrics()[place] == idle
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), times=1)
    sent = harness.send()
    harness.run_until(lambda: harness.producer.connection_metrics()[place]["requests-in-flight"] == 1)
    harness.network.cut(0)
    harness.run_until(lambda: not harness.producer.connection_metrics()[place]["ready"])
    assert harness.producer.connection_metrics()[place] == idle | {"ready": 0.0}
    harness.run_until(lambda: sent.is_settled)
    assert harness.producer.connection_metrics()[place] == idle


def test_throttle_of_a_connection_is_shown() -> None:
    harness = quiet(AT_ONCE)
    harness.send()
    harness.settle()
    harness.cluster.throttle_ms = 1_000
    harness.send()
    harness.settle()
    left = {place: shown["throttle-time-left"] for place, shown in harness.producer.connection_metrics().items()}
    assert 0 < left["node-0", "broker-0:9092"] <= 1_000
    harness.clock.advance(2_000)
    assert set(harness.producer.connection_metrics()["node-0", "broker-0:9092"].values()) == {1.0, 0.0}


def test_connections_are_counted_as_they_come_and_go() -> None:
    harness = quiet(AT_ONCE)
    moved, open_before = Moved(harness), len(harness.selector.connection_ids)
    harness.network.cut(0)
    harness.send()
    harness.settle()
    assert (moved["connection-close-total"], moved["connection-creation-total"]) == (open_before, 1)
    metrics = harness.producer.metrics()
    open_now = metrics["connection-creation-total"] - metrics["connection-close-total"]
    assert metrics["connection-count"] == len(harness.selector.connection_ids) == open_now


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_errors_that_many_threads_count_are_all_counted() -> None:
    harness = ProducerHarness()
    metrics = ProducerMetrics(harness.accumulator.pool, harness.metadata, harness.client)
    threads = [
        threading.Thread(target=lambda: [metrics.records_failed("t", 1, now) for now in range(5_000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    seen = [metrics.snapshot(5_000)["record-error-total"] for _ in range(50)]
    for thread in threads:
        thread.join(30)
    assert seen == sorted(seen)
    assert metrics.snapshot(5_000)["record-error-total"] == 20_000
