"""Errors told again keep their class and their code."""

from __future__ import annotations

import pickle

from spark_kafka_sink.common.errors import (
    BrokerError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    error_for_code,
)
from spark_kafka_sink.common.retold import copied, retold


def test_an_error_of_a_code_without_a_class_keeps_its_code() -> None:
    told = retold(error_for_code(89), "at node 1: no")
    assert (type(told), told.error_code, str(told)) == (BrokerError, 89, "at node 1: no")


def test_one_of_a_class_is_of_that_class() -> None:
    told = retold(ProducerFencedError(), "t-0: fenced")
    assert (type(told), told.error_code, told.fatal) == (ProducerFencedError, 90, True)


def test_a_copy_is_the_same_to_whoever_asks() -> None:
    error = error_for_code(89, "at node 1: no")
    error.__cause__ = KafkaError("why")
    for own in (copied(error), copied(pickle.loads(pickle.dumps(copied(error))))):
        assert (type(own), own.error_code, str(own), own.args) == (BrokerError, 89, "at node 1: no", error.args)
    assert copied(error).__cause__ is error.__cause__


def test_a_copy_shows_what_was_met_on_the_way_as_the_error_does() -> None:
    with_context = KafkaError("no")
    try:
        try:
            raise ValueError("first")
        except ValueError:
            raise with_context  # noqa: B904
    except KafkaError:
        pass
    own = copied(with_context)
    assert own.__context__ is with_context.__context__ is not None
    assert not own.__suppress_context__
    assert own.__traceback__ is with_context.__traceback__ is not None


def test_one_that_its_producer_called_fatal_stays_so() -> None:
    error = error_for_code(89)
    error.fatal = True
    assert retold(error, "at node 1: no").fatal
    assert copied(error).fatal
    assert pickle.loads(pickle.dumps(error)).fatal


def test_one_that_must_not_be_sent_again_says_so_whatever_its_class_is() -> None:
    """Bug: who wrote a batch again after an error that is retriable had each row twice, where the batch counts."""
    assert retold(KafkaTimeoutError(), "late").retriable
    told = retold(KafkaTimeoutError(), "late", retriable=False)
    for carried in (told, pickle.loads(pickle.dumps(told)), retold(told, "at node 1: late")):
        assert (type(carried), carried.retriable) == (KafkaTimeoutError, False)
    assert KafkaTimeoutError().retriable
    assert not retold(ProducerFencedError(), "t-0: fenced").retriable
