"""The span of a task and the metrics of its worker, from its first row to the acknowledgement of its last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import SpanKind, StatusCode
from pyspark import TaskContext
from pyspark.sql import Row
from support.own_telemetry import KeptTelemetry, keep, new_process
from support.scripted_producer import ScriptedPool, ScriptedProducer, Sent

from spark_kafka_sink.common.batch_report import BatchReport
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError, RecordTooLargeError
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import tight_record_size_upper_bounds
from spark_kafka_sink.record.fingerprint import fingerprint
from spark_kafka_sink.record.sifting import TopicLimits
from spark_kafka_sink.sink import options as options_module
from spark_kafka_sink.sink.arrow_writer import columns_by_topic
from spark_kafka_sink.sink.batch_run import NO_QUERY, QueryIds
from spark_kafka_sink.sink.dead_letters import DeadLetters, TaskPlace
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool
from spark_kafka_sink.sink.rows import PartitionWriter
from spark_kafka_sink.sink.telemetry.batches import BatchTrace
from spark_kafka_sink.sink.telemetry.tasks import TASK_WAIT_S, TaskInstruments, trace_of_batch

OPTIONS = {"kafka.bootstrap.servers": "h1:9092,h2:9093", "topic": "orders", "telemetry.opentelemetry": "true"}
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ROWS = RecordColumns(pa.array([b"v", b"w"]))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptTelemetry:
    return keep(monkeypatch)


def config(batch_trace: str | None = None, **options: str) -> SinkConfig:
    return replace(SinkConfig.from_options(OPTIONS | options), batch_trace=batch_trace)


def delivery(producer: ScriptedProducer | None = None, given: SinkConfig | None = None) -> TaskDelivery:
    return TaskDelivery(given or config(), ScriptedPool(producer or ScriptedProducer(client_id="c-1")))


def in_task(monkeypatch: pytest.MonkeyPatch, **properties: str) -> None:
    context = SimpleNamespace(
        getLocalProperty=properties.get, stageId=lambda: 5, partitionId=lambda: 3, attemptNumber=lambda: 1
    )
    monkeypatch.setattr(TaskContext, "get", lambda: context)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if not name.endswith(".duration")}


def test_task_that_sends_has_a_span_inside_that_of_its_batch(
    kept: KeptTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_task(monkeypatch)
    task = delivery(given=config(TRACEPARENT))
    for _ in range(2):
        task.send("orders", ROWS)
    task.finish()
    task.abandon()
    (span,) = kept.spans
    assert (span.name, span.kind) == ("send orders", SpanKind.PRODUCER)
    assert span.parent is not None
    assert f"00-{span.parent.trace_id:032x}-{span.parent.span_id:016x}-01" == TRACEPARENT
    assert span.status.status_code == StatusCode.UNSET
    assert attributes(span) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "messaging.batch.message_count": 4,
        "messaging.client.id": "c-1",
        "server.address": "h1",
        "server.port": 9092,
        "kafka_sink.stage.id": 5,
        "kafka_sink.partition": 3,
        "kafka_sink.attempt": 1,
        "kafka_sink.bytes": 0,
    }
    assert {"kafka_sink.read.duration", "kafka_sink.acknowledge.duration"} <= set(span.attributes or {})
    assert kept.waits_s == [TASK_WAIT_S]  # once, at the end


def test_telemetry_has_no_secret(kept: KeptTelemetry) -> None:
    login = {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required username='u'"
        " password='canary';",
    }
    used = config(**login)
    batch = BatchTrace.begin(used, 1_000)
    task = delivery(given=used)
    task.send("orders", RecordColumns(pa.array(["canary"]), pa.array(["canary"])))
    task.finish()
    assert batch is not None
    batch.end(BatchReport("failed", "at-least-once", 1_000, 2_000, error="x.Error"))
    assert len(kept.spans) == 2
    for name in ("kafka_sink.batches", "messaging.client.sent.messages"):
        assert kept.points(name)
        assert "canary" not in repr(kept.points(name))
    assert all("canary" not in span.to_json() for span in kept.spans)


def test_task_without_rows_has_no_span(kept: KeptTelemetry) -> None:
    task = delivery()
    task.send_each([])
    task.finish()
    assert (kept.spans, kept.waits_s) == ([], [])


def test_task_that_fails_has_the_class_of_its_error(kept: KeptTelemetry) -> None:
    error_of_row = RecordTooLargeError("contents of a row")
    producer = ScriptedProducer(lambda sent: sent.report(error_of_row), lambda unreported: None)
    task = delivery(producer)
    try:
        task.send("orders", ROWS)
        with pytest.raises(RecordTooLargeError):
            task.finish()
    finally:
        task.abandon()
    (span,) = kept.spans
    error = "spark_kafka_sink.common.errors.RecordTooLargeError"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, error)
    assert attributes(span)["error.type"] == error
    assert attributes(span)["messaging.batch.message_count"] == 2
    assert "contents" not in span.to_json()
    ((sent, rows),) = kept.points("messaging.client.sent.messages")
    assert (rows, sent["error.type"], sent["messaging.destination.name"]) == (2, error, "orders")
    assert kept.waits_s == [TASK_WAIT_S]  # the worker ends now


def test_task_that_cannot_get_a_producer_has_failed(kept: KeptTelemetry) -> None:
    def refuse(_: object) -> ScriptedProducer:
        raise ZeroDivisionError

    task = TaskDelivery(config(), ScriptedPool(refuse))

    def write() -> None:
        try:
            task.send("orders", ROWS)
        finally:
            task.abandon()

    with pytest.raises(ZeroDivisionError):
        write()
    (span,) = kept.spans
    assert attributes(span)["error.type"] == "builtins.ZeroDivisionError"


@pytest.mark.parametrize(("variable", "lingers"), [("1", True), ("", False)])
def test_only_a_worker_that_stays_lets_its_spans_wait(
    kept: KeptTelemetry, monkeypatch: pytest.MonkeyPatch, variable: str, lingers: bool
) -> None:
    monkeypatch.setenv("SPARK_REUSE_WORKER", variable)
    task = delivery()
    task.send("orders", ROWS)
    task.finish()
    failed = delivery()
    failed.send("orders", ROWS)
    failed.abandon()
    assert kept.lingers == [lingers, False]  # a worker ends with a task that fails


def test_rows_that_are_given_up_for_no_known_reason(kept: KeptTelemetry) -> None:
    task = delivery()
    task.send("orders", ROWS)
    task.abandon()
    (span,) = kept.spans
    assert attributes(span)["error.type"] == "_OTHER"


def test_rows_that_are_acknowledged_while_a_failed_task_ends_do_not_hide_its_telemetry(
    kept: KeptTelemetry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a task that failed was missing in the metrics, and was not sent, if the Sender reached a new partition."""
    task = delivery()
    task.send("orders", ROWS)
    instruments = kept.telemetry.of_process(TaskInstruments)
    counted: list[int] = []

    def add(records: int, _: object) -> None:
        task.counts(RunMetadata("orders", 10 + len(counted), 0, 1, -1, 1), None)  # as the Sender thread does
        counted.append(records)

    monkeypatch.setattr(instruments, "sent", SimpleNamespace(add=add))
    for partition in (1, 2):
        task.counts(RunMetadata("orders", partition, 0, 5, -1, 50), None)
    task.abandon()
    assert counted == [5, 5]
    assert kept.waits_s == [TASK_WAIT_S]
    assert caplog.messages == []


def test_metrics_of_the_conventions(kept: KeptTelemetry) -> None:
    without_topic = SinkConfig.from_options({name: value for name, value in OPTIONS.items() if name != "topic"})
    task = TaskDelivery(without_topic, ScriptedPool(ScriptedProducer()))
    for topic in ("a", "b", "a"):
        task.send(topic, ROWS)
    task.finish()
    common = {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "server.address": "h1",
        "server.port": 9092,
    }
    sent = kept.points("messaging.client.sent.messages")
    assert sorted((each["messaging.destination.name"], rows) for each, rows in sent) == [("a", 4), ("b", 2)]
    assert {
        frozenset(each.items()) - {("messaging.destination.name", each["messaging.destination.name"])}
        for each, _ in sent
    } == {frozenset(common.items())}
    ((of_operation, seconds),) = kept.points("messaging.client.operation.duration")
    assert of_operation == common
    (span,) = kept.spans
    assert span.name == "send"
    assert seconds == ((span.end_time or 0) - (span.start_time or 0)) / 1e9
    assert "kafka.producer.batch_send_total" in kept.names


# ---- without a driver ------------------------------------------------------------------------------------------------


def test_tasks_of_a_micro_batch_share_a_trace_without_a_driver(
    kept: KeptTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"sql.streaming.queryId": "q", "spark.jobGroup.id": "run-1", "streaming.sql.batchId": "4"}
    for more in ({}, {}, {"streaming.sql.batchId": "5"}):
        in_task(monkeypatch, **ids | more)
        task = delivery()
        task.send("orders", ROWS)
        task.finish()
    first, second, later = kept.spans
    assert first.context.trace_id == second.context.trace_id == trace_of_batch(QueryIds("q", "run-1", 4))
    assert first.context.span_id != second.context.span_id
    assert later.context.trace_id == trace_of_batch(QueryIds("q", "run-1", 5)) != first.context.trace_id
    assert {each.parent for each in kept.spans} == {None}
    assert attributes(first)["kafka_sink.batch.id"] == 4
    assert (attributes(first)["kafka_sink.query.id"], attributes(first)["kafka_sink.run.id"]) == ("q", "run-1")


def test_tasks_outside_of_a_stream_have_traces_of_their_own(kept: KeptTelemetry) -> None:
    assert trace_of_batch(NO_QUERY) is None
    for _ in range(2):
        task = delivery()
        task.send("orders", ROWS)
        task.finish()
    assert len({each.context.trace_id for each in kept.spans}) == 2


# ---- without OpenTelemetry -------------------------------------------------------------------------------------------


def test_executor_without_the_packages_fails_the_task_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    given = config()

    def missing(where: str) -> None:
        raise ConfigError(f"needs the packages{where}: pip install")

    monkeypatch.setattr("spark_kafka_sink.sink.delivery.check_telemetry", missing)
    with pytest.raises(ConfigError, match=r"needs the packages, on the executors too: pip install"):
        TaskDelivery(given, ScriptedPool(ScriptedProducer()))
    assert options_module.check_telemetry is not missing


def test_telemetry_that_fails_does_not_fail_the_task(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread() -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("spark_kafka_sink.sink.telemetry.tasks.process_telemetry", no_thread)
    producer = ScriptedProducer()
    acknowledged: list[Sequence[Sent]] = []
    task = delivery(producer)
    task.send("orders", ROWS)
    task.finish()
    assert acknowledged == []
    assert (task.counts.acknowledged, len(producer.sent)) == (2, 1)
    assert "a span or metric is missing; the batch itself does not change" in caplog.text


# ---- the header ------------------------------------------------------------------------------------------------------

HEADER_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
WITH_HEADER = {"telemetry.headers.traceparent": "true"}


def own(span: ReadableSpan) -> bytes:
    context = span.context
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()


def headers_of(producer: ScriptedProducer, topic: str = "orders") -> list[list[tuple[bytes, bytes | None]]]:
    rows = [row for sent in producer.sent if sent.topic == topic for (row,) in sent.rows("headers")]
    return [[(each["key"], each["value"]) for each in row] for row in rows]


@pytest.mark.parametrize(("sampler", "flag"), [(ALWAYS_ON, b"1"), (ALWAYS_OFF, b"0")], ids=["sampled", "not sampled"])
def test_each_record_has_the_span_of_its_task(monkeypatch: pytest.MonkeyPatch, sampler: Sampler, flag: bytes) -> None:
    kept = keep(monkeypatch, sampler)
    producer = ScriptedProducer()
    task = delivery(producer, config(TRACEPARENT if flag == b"1" else None, **WITH_HEADER))
    task.send("orders", ROWS)
    task.send("orders", RecordColumns(pa.array(["x"]), headers=pa.array([[("a", b"1")]], HEADER_TYPE)))
    task.finish()
    first, second, third = headers_of(producer)
    assert first == second == [(b"traceparent", first[0][1])]
    assert third == [(b"a", b"1"), first[0]]
    value = first[0][1]
    assert value is not None
    assert int(value[-1:], 16) & 1 == int(flag)
    assert [own(span) for span in kept.spans] == ([value] if flag == b"1" else [])


def test_header_of_a_row_is_kept(kept: KeptTelemetry) -> None:
    given = [[("traceparent", b"own"), ("b", b"2")], None, [("Traceparent", b"other")], [("traceparent", None)]]
    producer = ScriptedProducer()
    task = delivery(producer, config(**WITH_HEADER))
    task.send("orders", RecordColumns(pa.array(["v"] * 4), headers=pa.array(given, HEADER_TYPE)))
    task.finish()
    ours = (b"traceparent", own(kept.spans[0]))
    assert headers_of(producer) == [
        [(b"traceparent", b"own"), (b"b", b"2")],
        [ours],
        [(b"Traceparent", b"other"), ours],
        [(b"traceparent", None)],
    ]


def test_records_have_no_header_unless_it_is_wanted(kept: KeptTelemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = ScriptedProducer()
    delivery(producer).send("orders", ROWS)
    with new_process(monkeypatch, OTEL_SDK_DISABLED="true"):
        delivery(producer, config(**WITH_HEADER)).send("orders", ROWS)
    assert [sent.columns.headers for sent in producer.sent] == [None, None]
    assert kept.spans == []


class Remembering:
    """A transaction that remembers the fingerprint of its rows."""

    is_prepared = False
    is_written_already = False

    def __init__(self) -> None:
        self.fingerprints: list[int] = []

    def takes(self, topic: str, columns: RecordColumns) -> bool:
        self.fingerprints.append(fingerprint(topic, columns))
        return True

    def begin(self, pool: ProducerPool, config: ProducerConfig) -> Producer:
        return pool.borrow(config)

    def add_marker(self, producer: Producer, rows: int) -> None:
        pass

    def prepare(self, producer: Producer, delivered: object) -> None:
        self.is_prepared = True


@pytest.mark.usefixtures("kept")
def test_batch_that_comes_again_has_the_fingerprint_of_the_first_time() -> None:
    """Each run has other spans. Their ids in the fingerprint would make an exactly-once batch another one."""
    transaction, producer = Remembering(), ScriptedProducer()
    for _ in range(2):
        task = TaskDelivery(config(**WITH_HEADER), ScriptedPool(producer), transaction)
        task.send("orders", ROWS)
        task.finish()
    assert transaction.fingerprints == [fingerprint("orders", ROWS)] * 2
    first, _, second, _ = headers_of(producer)
    assert first != second


LETTERS = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": "dead"}


def size_limits(limit: TopicLimits) -> Any:
    return lambda topic, highest, largest=None: limit


@pytest.mark.parametrize("has_own", [False, True])
def test_row_that_is_too_large_only_with_the_header_is_a_dead_letter(kept: KeptTelemetry, has_own: bool) -> None:
    """Its size counts before the row is sent: a producer that refused it would fail the task."""
    header = ("traceparent", b"x" * 55)
    given = RecordColumns(pa.array(["v" * 900]), headers=pa.array([[header] if has_own else None], HEADER_TYPE))
    whole = given.with_header(header)
    most = int(tight_record_size_upper_bounds(whole)[0]) + HEADER_SIZE
    for limit, is_dead in ((most, False), (most - 1, True)):
        used = config(**WITH_HEADER, **LETTERS, **{"kafka.max.request.size": str(limit)})
        letters = DeadLetters(used, size_limits(TopicLimits(partitions=4)), TaskPlace())
        producer = ScriptedProducer()
        task = TaskDelivery(used, ScriptedPool(producer), letters=letters)
        columns = {"value": given.value, "headers": given.headers}
        task.send_each(columns_by_topic(used, task.sifted(columns)))
        task.finish()
        assert [sent.topic for sent in producer.sent] == ["dead" if is_dead else "orders"]


@pytest.mark.parametrize("options", [WITH_HEADER, {**WITH_HEADER, **LETTERS}], ids=["rows", "with dead letters"])
def test_task_whose_rows_are_written_already_has_no_span(kept: KeptTelemetry, options: dict[str, str]) -> None:
    class Skipping(Remembering):
        is_written_already = True

        def takes(self, topic: str, columns: RecordColumns) -> bool:
            return False

    used = config(**options)
    letters = DeadLetters(used, size_limits(TopicLimits()), TaskPlace()) if options != WITH_HEADER else None
    task = TaskDelivery(used, ScriptedPool(ScriptedProducer()), Skipping(), letters)
    task.send_each(columns_by_topic(used, task.sifted({"value": pa.array(["good", "bad" * 1_000_000])})))
    task.finish()
    assert (kept.spans, kept.waits_s) == ([], [])


@pytest.mark.parametrize("limit", [None, 10_000])
def test_dead_letter_has_the_header_too(kept: KeptTelemetry, limit: int | None) -> None:
    used = config(**WITH_HEADER, **LETTERS)
    letters = DeadLetters(used, size_limits(TopicLimits(1, limit)), TaskPlace())
    producer = ScriptedProducer()
    task = TaskDelivery(used, ScriptedPool(producer), letters=letters)
    columns = {
        "value": pa.array(["good", "bad", "bad"]),
        "partition": pa.array([0, 7, 7], pa.int32()),
        "headers": pa.array([None, None, [("traceparent", b"own")]], HEADER_TYPE),
    }
    task.send_each(columns_by_topic(used, task.sifted(columns)))
    task.finish()
    ours = own(kept.spans[0])
    found = [[value for name, value in row if name == b"traceparent"] for row in headers_of(producer, "dead")]
    assert found == [[ours], [b"own"]]
    assert headers_of(producer) == [[(b"traceparent", ours)]]
    counts = attributes(kept.spans[0])
    assert (counts["messaging.batch.message_count"], counts["kafka_sink.dead_letters"]) == (1, 2)


def test_rows_one_by_one_have_the_header_too(kept: KeptTelemetry) -> None:
    producer = ScriptedProducer()
    writer = PartitionWriter(delivery(producer, config(**WITH_HEADER)))
    writer.add(Row(value="a"))
    writer.add(Row(value="b", headers=[("h", b"1")]))
    writer.finish()
    ours = (b"traceparent", own(kept.spans[0]))
    assert headers_of(producer) == [[ours], [(b"h", b"1"), ours]]
