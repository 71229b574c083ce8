"""What a lookup that failed leads to."""

from __future__ import annotations

from typing import Any

import pytest
from support.coordinator_bench import CoordinatorBench as Bench
from support.scripted_broker import faults

from spark_kafka_sink.protocol.coordinator_requests import TRANSACTION
from spark_kafka_sink.protocol.messages import ApiKey

FIND = int(ApiKey.FIND_COORDINATOR)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_key_that_an_answer_misses_is_not_asked_for_again_at_once(bench: Bench) -> None:
    bench.cluster.on(FIND, faults.change(lambda values: {"coordinators": values["coordinators"][:1]}))
    bench.coordinator.find_coordinators(TRANSACTION, ["a", "b"], bench.timer())
    first, second = bench.asked(FIND)
    assert second.now_ms - first.now_ms >= 16


def test_after_a_lost_lookup_of_several_keys_others_are_still_asked_for_at_once(bench: Bench) -> None:
    bench.cluster.on(FIND, faults.close_before())
    bench.coordinator.find_coordinators(TRANSACTION, ["a", "b"], bench.timer())
    bench.coordinator.find_coordinators(TRANSACTION, ["c", "d"], bench.timer())
    assert bench.asked(FIND)[-1].request.coordinator_keys == ("c", "d")


def test_what_a_broker_says_of_a_lookup_that_it_refuses_is_told(bench: Bench) -> None:
    def refuse(values: dict[str, Any]) -> dict[str, Any]:
        refusal = {"error_code": 42, "error_message": "no such name here"}
        return {"coordinators": [{**each, **refusal} for each in values["coordinators"]]}

    bench.cluster.on(FIND, faults.change(refuse))
    found = bench.coordinator.find_coordinators(TRANSACTION, ["a", "b"], bench.timer())
    assert "no such name here" in str(found["b"].error)
