"""Errors told again keep their class and their code."""

from __future__ import annotations

from spark_kafka_sink.common.errors import BrokerError, ProducerFencedError, error_for_code
from spark_kafka_sink.common.retold import retold


def test_an_error_of_a_code_without_a_class_keeps_its_code() -> None:
    told = retold(error_for_code(89), "at node 1: no")
    assert (type(told), told.error_code, str(told)) == (BrokerError, 89, "at node 1: no")


def test_one_of_a_class_is_of_that_class() -> None:
    told = retold(ProducerFencedError(), "t-0: fenced")
    assert (type(told), told.error_code, told.fatal) == (ProducerFencedError, 90, True)
