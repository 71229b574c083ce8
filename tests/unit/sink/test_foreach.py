from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator

import pytest
from pyspark.cloudpickle import dumps as cloudpickle_dumps
from pyspark.sql import Row
from support.scripted_producer import ScriptedProducer, Sent

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import ConfigError, IllegalStateError, RecordTooLargeError
from spark_kafka_sink.sink.foreach import KafkaSink
from spark_kafka_sink.sink.partition_writer import BLOCK_ROWS, PartitionWriter
from spark_kafka_sink.sink.producer_pool import ProducerPool

ROWS = [Row(value=str(n)) for n in range(BLOCK_ROWS + 200)]
OPTIONS = {"kafka.bootstrap.servers": "h1:9092", "topic": "orders"}


class BenchSink(KafkaSink):
    """A sink on a pool of one scripted producer."""

    def __init__(self, producer: ScriptedProducer | None = None) -> None:
        super().__init__(OPTIONS)
        self.producer = producer or ScriptedProducer()
        self.pool = ProducerPool(lambda config: self.producer, SystemClock())

    def _new_writer(self) -> PartitionWriter:
        return PartitionWriter(self._config, self.pool)

    def process_all(self) -> None:
        for row in ROWS:
            self.process(row)

    @property
    def lent(self) -> int:
        return len(self.pool._lent)


def test_options_come_as_a_mapping_by_keyword_or_both() -> None:
    wanted = repr(KafkaSink(OPTIONS))
    assert repr(KafkaSink(topic="orders", **{"kafka.bootstrap.servers": "h1:9092"})) == wanted
    assert repr(KafkaSink({"kafka.bootstrap.servers": "h1:9092"}, topic="orders")) == wanted


def test_an_option_given_both_ways_is_refused() -> None:
    with pytest.raises(ConfigError, match="topic is given twice"):
        KafkaSink(OPTIONS, topic="other")


def test_options_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes a mapping of options, not str"):
        KafkaSink("h1:9092")  # type: ignore[arg-type]


def test_a_bad_option_is_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="There is no option topik"):
        KafkaSink(OPTIONS, topik="orders")


def test_a_sink_is_a_plain_value_that_opens_nothing() -> None:
    threads = threading.active_count()
    sink = KafkaSink(OPTIONS)
    for copy in (pickle.loads(pickle.dumps(sink)), pickle.loads(cloudpickle_dumps(sink))):
        assert repr(copy) == repr(sink)
    assert threading.active_count() == threads


def test_its_bound_method_travels_to_the_tasks() -> None:
    write_partition = pickle.loads(cloudpickle_dumps(KafkaSink(OPTIONS).write_partition))
    write_partition(iter([]))


def test_the_writer_of_an_open_sink_does_not_travel() -> None:
    sink = KafkaSink(OPTIONS)
    assert sink.open(0, 0) is True
    copy = pickle.loads(pickle.dumps(sink))
    with pytest.raises(IllegalStateError, match="before open"):
        copy.process(Row(value="v"))


def test_spark_takes_it_for_a_writer_and_not_for_a_function() -> None:
    assert not callable(KafkaSink(OPTIONS))


def test_the_repr_shows_the_options_on_one_line() -> None:
    assert repr(KafkaSink(OPTIONS)) == "KafkaSink(topic='orders', kafka.bootstrap.servers='h1:9092')"


def test_an_empty_partition_opens_and_closes_without_a_broker() -> None:
    sink = KafkaSink(OPTIONS)
    sink.open(0, 7)
    sink.close(None)
    sink.write_partition(iter([]))


def test_rows_are_acknowledged_before_close_returns() -> None:
    sink = BenchSink()
    sink.open(0, 7)
    sink.process_all()
    sink.close(None)
    assert sum(sent.columns.num_rows for sent in sink.producer.sent) == len(ROWS)
    assert sink.producer.flushes == 1
    assert sink.lent == 0


def test_close_after_an_error_waits_for_nothing_and_adds_no_error_of_its_own() -> None:
    def refuse(sent: Sent) -> None:
        sent.report(RecordTooLargeError("too large"))

    sink = BenchSink(ScriptedProducer(on_send=refuse))
    sink.open(0, 7)
    with pytest.raises(RecordTooLargeError) as caught:
        sink.process_all()
    sink.close(caught.value)
    assert sink.producer.flushes == 0
    assert sink.lent == 0


def test_close_without_an_error_raises_the_deliverys() -> None:
    sink = BenchSink(ScriptedProducer(on_flush=lambda sent: sent[0].report(RecordTooLargeError("too large"))))
    sink.open(0, 7)
    sink.process(ROWS[0])
    with pytest.raises(RecordTooLargeError):
        sink.close(None)
    assert sink.lent == 0


def test_an_open_without_a_close_before_gives_the_old_producer_back() -> None:
    sink = BenchSink()
    sink.open(0, 7)
    sink.process_all()
    assert sink.lent == 1
    sink.open(0, 7)
    assert sink.lent == 0


def test_close_without_open_does_nothing() -> None:
    KafkaSink(OPTIONS).close(None)


def test_an_error_of_the_rows_themselves_passes_through_without_waiting() -> None:
    def rows() -> Iterator[Row]:
        yield from ROWS
        raise ZeroDivisionError("upstream")

    sink = BenchSink()
    with pytest.raises(ZeroDivisionError, match="upstream"):
        sink.write_partition(rows())
    assert sink.producer.sent
    assert sink.producer.flushes == 0
    assert sink.lent == 0
