"""An error code that this client does not know is told with its number, the request, and the partition or node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.coordinator_bench import PLACE, CoordinatorBench
from support.scripted_broker import faults

from spark_kafka_sink.common.errors import KafkaTimeoutError, UnknownServerError
from spark_kafka_sink.protocol.fetch import LATEST_TIMESTAMP
from spark_kafka_sink.protocol.versions import ApiKey

SAID = "answered {api} with error code 999, which this client does not know"
Call = Callable[[CoordinatorBench], object]


def end(bench: CoordinatorBench) -> None:
    (open_,) = bench.open("id")
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(999), times=None)
    (outcome,) = bench.end([open_], 1_500)
    assert outcome.error is not None
    raise outcome.error


def write(bench: CoordinatorBench) -> None:
    bench.coordinator.writer.write(bench.raw.begin("id"), PLACE, b"k", b"v", 0, bench.timer())


CALLS: dict[ApiKey, tuple[Call, str]] = {
    ApiKey.INIT_PRODUCER_ID: (lambda b: b.coordinator.transactions.init_producer_id("id", 1_000, b.timer()), "node"),
    ApiKey.FIND_COORDINATOR: (lambda b: b.coordinator.transactions.describe_transactions(["id"], b.timer()), "node"),
    ApiKey.DESCRIBE_TRANSACTIONS: (
        lambda b: b.coordinator.transactions.describe_transactions(["id"], b.timer()),
        "node",
    ),
    ApiKey.LIST_TRANSACTIONS: (lambda b: b.coordinator.transactions.list_transactions(b.timer()), "node"),
    ApiKey.OFFSET_FETCH: (lambda b: b.coordinator.groups.fetch_offsets({"g": [PLACE]}, b.timer()), "node"),
    ApiKey.CREATE_TOPICS: (lambda b: b.coordinator.creation.ensure("new", 1, 1, {}, b.timer()), "Node "),
    ApiKey.DESCRIBE_CONFIGS: (lambda b: b.coordinator.creation.configs("t", ("x",), b.timer()), "Node "),
    ApiKey.LIST_OFFSETS: (lambda b: b.coordinator.topics.list_offsets([PLACE], LATEST_TIMESTAMP, b.timer()), "t-0"),
    ApiKey.ADD_PARTITIONS_TO_TXN: (write, "t-0"),
    ApiKey.PRODUCE: (write, "t-0"),
}


@pytest.mark.parametrize("api_key", CALLS, ids=lambda api_key: api_key.name)
def test_its_number_request_and_place_are_in_the_error(api_key: ApiKey) -> None:
    bench = CoordinatorBench(version=1 if api_key is ApiKey.ADD_PARTITIONS_TO_TXN else 2)
    call, place = CALLS[api_key]
    bench.coordinator.creation.ensure("t", 1, 1, {}, bench.timer())
    bench.raw.begin("warm-up")
    bench.cluster.on(api_key, faults.fail_with(999), times=None)
    with pytest.raises(UnknownServerError) as caught:
        call(bench)
    assert caught.value.error_code == 999
    api = api_key.name.title().replace("_", "")
    for part in (SAID.format(api=api), place):
        assert part in str(caught.value)


def test_unknown_code_of_end_txn_is_named_at_the_timeout() -> None:
    bench = CoordinatorBench()
    with pytest.raises(KafkaTimeoutError) as caught:
        end(bench)
    assert SAID.format(api="EndTxn") in str(caught.value)
    assert "Node broker-" in str(caught.value)
