"""The error tree: every error keeps its text in a pickle, and every code has its class."""

from __future__ import annotations

import copy
import pickle

import pytest
from kio.schema.errors import ErrorCode

from spark_kafka_sink.common import errors
from spark_kafka_sink.common.errors import BrokerError, KafkaError, UnknownServerError, error_for_code


def classes() -> list[type[KafkaError]]:
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, KafkaError)]
    return sorted(found, key=lambda each: each.__name__)


@pytest.mark.parametrize("error_class", classes())
def test_every_error_keeps_its_text_and_kind_through_a_pickle(error_class: type[KafkaError]) -> None:
    for error in (error_class("topic t, partition 3: what to do"), error_class()):
        for carried in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(carried) is error_class
            assert str(carried) == str(error) != ""
            assert carried.args == error.args
            assert carried.error_code == error.error_code
            assert (carried.retriable, carried.fatal) == (error.retriable, error.fatal)


def test_advice_follows_the_brokers_own_text() -> None:
    for text in ("Timestamp 7 is out of range.", "Timestamp 7 is out of range"):
        error = error_for_code(ErrorCode.invalid_timestamp, text)
        assert str(error).startswith("Timestamp 7 is out of range. Timestamps must be in milliseconds since 1970, not")
    assert str(error_for_code(ErrorCode.invalid_timestamp)).endswith(error.advice)
    assert str(error_for_code(ErrorCode.invalid_record, "no key")) == "no key"


def test_refused_timestamp_names_the_clock_as_a_cause() -> None:
    """Bug: with a clock two hours ahead the error spoke only of microseconds and of the topic's settings, although the
    user had given no timestamp.
    """
    assert "correct that machine's clock if it is wrong" in str(error_for_code(ErrorCode.invalid_timestamp))


def test_code_without_a_class_is_kept() -> None:
    error = pickle.loads(pickle.dumps(error_for_code(ErrorCode.throttling_quota_exceeded)))
    assert isinstance(error, BrokerError)
    assert error.error_code == ErrorCode.throttling_quota_exceeded
    assert BrokerError.error_code is None


def test_unknown_code_is_an_unknown_server_error_with_its_number() -> None:
    error = pickle.loads(pickle.dumps(error_for_code(999, api="Produce", node="7")))
    assert isinstance(error, UnknownServerError)
    assert error.error_code == 999
    assert UnknownServerError.error_code == ErrorCode.unknown_server_error
    assert not error.retriable
    assert str(error) == (
        "Node 7 answered Produce with error code 999, which this client does not know. Its log says more."
    )
    assert str(error_for_code(999, "a quota")) == (
        "The server answered a request with error code 999, which this client does not know. It said: a quota"
    )


@pytest.mark.parametrize(
    "error_code",
    [
        ErrorCode.offset_metadata_too_large,
        ErrorCode.illegal_generation,
        ErrorCode.invalid_group_id,
        ErrorCode.unknown_member_id,
        ErrorCode.rebalance_in_progress,
        ErrorCode.invalid_commit_offset_size,
        ErrorCode.invalid_partitions,
        ErrorCode.invalid_replication_factor,
        ErrorCode.invalid_replica_assignment,
        ErrorCode.invalid_config,
        ErrorCode.not_controller,
        ErrorCode.policy_violation,
        ErrorCode.operation_not_attempted,
        ErrorCode.fenced_instance_id,
        ErrorCode.throttling_quota_exceeded,
    ],
)
def test_code_without_a_class_has_a_sentence(error_code: int) -> None:
    error = error_for_code(error_code)
    assert type(error) is BrokerError
    assert error.error_code == error_code
    assert "error code" not in str(error)
    assert str(error_for_code(error_code, "from the broker")) == "from the broker"


def test_code_set_on_an_error_goes_through_a_pickle() -> None:
    error = errors.InvalidRecordError("record 3")
    error.error_code = 2
    assert pickle.loads(pickle.dumps(error)).error_code == ErrorCode.corrupt_message


@pytest.mark.parametrize("error_class", [each for each in classes() if each.error_code is not None])
def test_code_becomes_its_class_with_a_text(error_class: type[KafkaError]) -> None:
    assert error_class.error_code is not None
    assert type(error_for_code(error_class.error_code)) is error_class
    assert str(error_for_code(error_class.error_code)) == error_class.sentence != ""
    assert str(error_for_code(error_class.error_code, "from the broker")).startswith("from the broker")


def test_each_code_has_one_class() -> None:
    codes = [each.error_code for each in classes() if each.error_code is not None]
    assert len(set(codes)) == len(codes)
    assert set(codes) <= {code.value for code in ErrorCode}


def test_retriable_codes_are_those_of_kafka() -> None:
    """kio has Kafka's own table of retriable codes. Only the producer decides on out-of-order sequences."""
    ours = {each.error_code: each.retriable for each in classes() if each.error_code is not None}
    theirs = {int(code.value): code.retriable for code in ErrorCode}
    assert {code for code, retriable in ours.items() if retriable != theirs[code]} == set()


def test_metadata_errors_are_retriable() -> None:
    assert all(each.retriable for each in classes() if each.invalid_metadata)


def test_error_without_text_shows_its_name() -> None:
    assert str(KafkaError()) == "KafkaError"


def test_text_of_a_broker_stays_on_one_line() -> None:
    reported = str(error_for_code(ErrorCode.invalid_record, "bad record\nERROR root logged in\x1b[2J" + "x" * 10_000))
    assert reported.startswith("bad record?ERROR root logged in?[2J")
    assert len(reported) < 600
    assert str(error_for_code(ErrorCode.throttling_quota_exceeded, "\r\n")) == "??"
    assert str(error_for_code(12_345, "\r\n")).endswith("It said: ??")


def test_every_code_of_kafka_has_a_sentence() -> None:
    silent = [code for code in ErrorCode if int(code) > 0 and "error code" in str(error_for_code(int(code)))]
    assert silent == []


def test_old_message_format_is_named_with_its_remedies() -> None:
    text = str(error_for_code(ErrorCode.unsupported_for_message_format))
    assert "message.format.version" in text
    assert "enable.idempotence=false" in text
