"""Errors carry facts: a copy with more words keeps the class, the code, and the facts."""

from __future__ import annotations

import pickle

from kio.schema.errors import ErrorCode

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    BrokerError,
    ConfigError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    error_for_code,
)


def test_error_of_a_code_without_a_class_keeps_its_code() -> None:
    reported = error_for_code(ErrorCode.throttling_quota_exceeded).reworded("at node 1: no")
    assert (type(reported), reported.error_code, str(reported)) == (
        BrokerError,
        ErrorCode.throttling_quota_exceeded,
        "at node 1: no",
    )


def test_reworded_error_keeps_class_and_code() -> None:
    reported = ProducerFencedError().reworded("t-0: fenced")
    assert type(reported) is ProducerFencedError
    assert (reported.error_code, reported.fatal) == (ErrorCode.producer_fenced, True)


def test_copied_error_equals_the_original() -> None:
    error = error_for_code(ErrorCode.throttling_quota_exceeded, "at node 1: no")
    error.__cause__ = KafkaError("why")
    for own in (error.copied(), pickle.loads(pickle.dumps(error.copied())).copied()):
        assert (type(own), own.error_code, str(own), own.args) == (
            BrokerError,
            ErrorCode.throttling_quota_exceeded,
            "at node 1: no",
            error.args,
        )
    assert error.copied().__cause__ is error.__cause__


def test_copied_error_has_context_and_traceback() -> None:
    with_context = KafkaError("no")
    try:
        try:
            raise ValueError("first")
        except ValueError:
            raise with_context  # noqa: B904
    except KafkaError:
        pass
    own = with_context.copied()
    assert own.__context__ is with_context.__context__ is not None
    assert not own.__suppress_context__
    assert own.__traceback__ is with_context.__traceback__ is not None


def test_error_marked_fatal_stays_fatal_in_a_copy() -> None:
    error = error_for_code(ErrorCode.throttling_quota_exceeded)
    error.fatal = True
    assert error.reworded("at node 1: no").fatal
    assert error.copied().fatal
    assert pickle.loads(pickle.dumps(error)).fatal


def test_error_marked_not_retriable_is_not_retriable() -> None:
    """Bug: a caller that wrote a batch again after a retriable error wrote each row twice."""
    assert KafkaTimeoutError().reworded("late").retriable
    reported = KafkaTimeoutError().reworded("late", retriable=False)
    for carried in (reported, pickle.loads(pickle.dumps(reported)), reported.reworded("at node 1: late")):
        assert (type(carried), carried.retriable) == (KafkaTimeoutError, False)
    assert KafkaTimeoutError().retriable
    assert not ProducerFencedError().reworded("t-0: fenced").retriable


T0 = TopicPartition("t", 0)


def test_topic_partition_is_a_fact_and_begins_the_text_once() -> None:
    error = error_for_code(ErrorCode.not_leader_or_follower).at(topic_partition=T0)
    assert (error.topic_partition, error.topic, str(error)) == (T0, "t", f"t-0: {error.text}")
    assert error.at(topic_partition=T0) is error
    assert error.at(topic="t") is error


def test_place_added_later_stands_first() -> None:
    error = KafkaError("no").at(node="3").at(topic="t")
    assert (error.node, error.topic, error.text, str(error)) == ("3", "t", "no", "Topic t: Node 3: no")


def test_fact_that_the_text_names_is_not_repeated() -> None:
    error = KafkaTimeoutError("1 records for t-0 are late.", topic_partition=T0)
    assert error.at(topic_partition=T0) is error
    assert str(error) == "1 records for t-0 are late."


def test_original_has_no_fact_of_its_copy() -> None:
    error = KafkaError("no")
    error.at(topic_partition=T0)
    assert (error.topic_partition, str(error)) == (None, "no")


def test_facts_go_through_a_pickle_and_through_other_words() -> None:
    error = ConfigError("linger.ms is -1.", setting="linger.ms").at(node="3")
    for carried in (pickle.loads(pickle.dumps(error)), error.reworded("linger.ms must be 0 or more.")):
        assert (carried.setting, carried.node) == ("linger.ms", "3")
    assert str(error.reworded("other words")) == "other words"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_foreign_topic_name_cannot_make_a_second_line() -> None:
    assert "\n" not in str(KafkaError("no").at(topic="a\nb"))
    assert "\n" not in str(KafkaError("no").at(topic_partition=TopicPartition("a\nb", 1)))


def test_setting_is_shown_with_the_prefix_of_its_caller() -> None:
    error = ConfigError("`acks`=0 needs `linger.ms`, not 'a`b`c d`'.", setting="acks")
    assert (str(error), error.setting) == ("acks=0 needs linger.ms, not 'abc d`'.", "acks")
    for named in (error.named("kafka."), pickle.loads(pickle.dumps(error)).named("kafka.")):
        assert (str(named), named.setting) == ("kafka.acks=0 needs kafka.linger.ms, not 'akafka.bc d`'.", "kafka.acks")
