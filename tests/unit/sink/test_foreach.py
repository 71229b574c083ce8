from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator

import pytest
from pyspark.cloudpickle import dumps as cloudpickle_dumps
from pyspark.sql import Row

from spark_kafka_sink.common.errors import ConfigError, IllegalStateError, SchemaError
from spark_kafka_sink.sink.foreach import KafkaSink

OPTIONS = {"kafka.bootstrap.servers": "h1:9092", "topic": "orders"}


def test_options_come_as_a_mapping_by_keyword_or_both() -> None:
    wanted = repr(KafkaSink(OPTIONS))
    assert repr(KafkaSink(topic="orders", **{"kafka.bootstrap.servers": "h1:9092"})) == wanted
    assert repr(KafkaSink({"kafka.bootstrap.servers": "h1:9092"}, topic="orders")) == wanted


def test_an_option_given_both_ways_is_refused() -> None:
    with pytest.raises(ConfigError, match="topic is given twice"):
        KafkaSink(OPTIONS, topic="other")


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


def test_close_after_an_error_adds_none_of_its_own() -> None:
    sink = KafkaSink(OPTIONS)
    sink.open(0, 7)
    with pytest.raises(SchemaError):
        sink.process(Row(key="k"))
    sink.close(SchemaError("the one of process"))


def test_close_without_open_does_nothing() -> None:
    KafkaSink(OPTIONS).close(None)


def test_an_error_of_the_rows_themselves_passes_through() -> None:
    def rows() -> Iterator[Row]:
        yield Row(value="v")
        raise ZeroDivisionError("upstream")

    with pytest.raises(ZeroDivisionError, match="upstream"):
        KafkaSink(OPTIONS).write_partition(rows())
