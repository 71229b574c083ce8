"""An error code that this client does not know is named with its request, and its partition or node."""

from __future__ import annotations

import pytest
from support.producer_harness import TOPIC, ProducerHarness
from support.scripted_broker import faults
from support.transaction_harness import TransactionHarness

from spark_kafka_sink.common.errors import KafkaError, UnknownServerError
from spark_kafka_sink.protocol.versions import ApiKey


def assert_reported(error: BaseException | None, api: str, place: str) -> None:
    assert isinstance(error, KafkaError)
    assert f"answered {api} with error code 999, which this client does not know" in str(error)
    assert place in str(error)


@pytest.mark.parametrize("is_idempotent", ["true", "false"])
def test_of_a_batch(is_idempotent: str) -> None:
    harness = ProducerHarness({"enable.idempotence": is_idempotent})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(999))
    refused = harness.send()
    harness.settle()
    assert_reported(refused.error, "Produce", f"{TOPIC}-0")
    assert isinstance(refused.error, UnknownServerError)
    assert refused.error.error_code == 999
    later = harness.send()
    harness.settle()
    assert later.error is None


def test_of_the_producer_id_of_an_idempotent_producer() -> None:
    harness = ProducerHarness()
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(999))
    refused = harness.send()
    harness.settle()
    assert_reported(refused.error, "InitProducerId", "Node ")
    assert refused.error is not None
    assert refused.error.error_code == 999


def test_of_a_topics_metadata() -> None:
    harness = ProducerHarness({"max.block.ms": "2000"})
    harness.cluster.on(ApiKey.METADATA, faults.fail_with(999), times=None)
    assert_reported(harness.send().error, "Metadata", TOPIC)


@pytest.mark.parametrize(
    ("api_key", "api", "call"),
    [
        (ApiKey.FIND_COORDINATOR, "FindCoordinator", "init_transactions"),
        (ApiKey.INIT_PRODUCER_ID, "InitProducerId", "init_transactions"),
        (ApiKey.ADD_PARTITIONS_TO_TXN, "AddPartitionsToTxn", "commit_transaction"),
        (ApiKey.END_TXN, "EndTxn", "commit_transaction"),
    ],
)
def test_of_a_transactional_request(api_key: int, api: str, call: str) -> None:
    """These are sent again; the timeout includes the last answer."""
    harness = TransactionHarness(1, {"max.block.ms": "2000"})
    if call == "commit_transaction":
        harness.started()
    harness.cluster.on(api_key, faults.fail_with(999), times=None)
    if call == "commit_transaction":
        harness.send(partition=0)
    with pytest.raises(KafkaError) as caught:
        getattr(harness.producer, call)()
    assert_reported(caught.value, api, "Node 0")
