"""The table of wrong responses, for a producer in one thread on a fake clock."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from support.answer_table import CASES, Case
from support.producer_harness import AT_ONCE, TOPIC, Delivery, ProducerHarness
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster


class HarnessStage:
    """A `Stage` that remembers the records that it sent."""

    def __init__(self, case: Case) -> None:
        cluster = ScriptedCluster(case.nodes, versions=case.versions)
        self.harness = ProducerHarness({**AT_ONCE, **case.settings}, topics={TOPIC: 2}, cluster=cluster)
        self.topic = TOPIC
        self.sent: dict[int, list[bytes | None]] = defaultdict(list)
        self.deliveries: list[Delivery] = []

    def send(self, number: int = 1, partition: int = 0) -> None:
        for _ in range(number):
            value = b"%d" % len(self.sent[partition])
            self.sent[partition].append(value)
            self.deliveries.append(self.harness.send(value, partition=partition))
        self.harness.turn(1)

    def deliver(self, number: int = 1, partition: int = 0) -> list[int]:
        self.send(number, partition)
        self.harness.settle()
        assert {delivery.error for delivery in self.deliveries} == {None}
        return [-1 if each.metadata is None else each.metadata.offset for each in self.deliveries[-number:]]

    def wait(self, duration_ms: int) -> None:
        self.harness.run_for(duration_ms)

    @contextlib.contextmanager
    def watch(self) -> Iterator[SimpleNamespace]:
        began_ms, made = self.harness.now_ms, SimpleNamespace(own_s=0.0)
        yield made
        made.own_s = (self.harness.now_ms - began_ms) / 1000

    def on(self, api_key: int, hook: faults.Hook, times: int | None = 1) -> faults.Script:
        return self.harness.cluster.on(api_key, hook, times=times)

    def requests(self, api_key: int) -> int:
        return len(self.harness.cluster.requests_of(api_key))

    def cluster(self) -> contextlib.AbstractContextManager[ScriptedCluster]:
        return contextlib.nullcontext(self.harness.cluster)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_records_arrive_once_after_a_wrong_response(case: Case) -> None:
    stage = HarnessStage(case)
    case.run(stage, random.Random(1))
    for partition in (0, 1):
        assert stage.harness.values(partition=partition) == stage.sent[partition]
    assert {len(each.calls) for each in stage.deliveries} == {1}
    assert stage.harness.memory_in_use == 0
