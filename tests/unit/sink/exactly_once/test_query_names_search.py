"""Searches all ways in which a query may change its prefixes, for one that writes a batch twice without an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, Decision
from spark_kafka_sink.sink.exactly_once.query_names import QueryBatch, QueryNames, check_name

TOPIC = "t"
FAILS, IS_DECIDED, IS_LOGGED = "fails", "is decided, and Spark dies", "is logged"


@dataclass(frozen=True, slots=True)
class Known:
    """What a prefix has in the decision topic."""

    decided: int | None = None
    is_adopted: bool = False

    @property
    def decision(self) -> Decision | None:
        return None if self.decided is None else Decision(self.decided, "q", 0, 1, 1, (), is_finished=True, topic=TOPIC)


@dataclass(frozen=True)
class State:
    """The next batch in Spark's checkpoint, and what Kafka has. It is a cluster for `check_name`."""

    prefixes: Mapping[str, Known]
    batch_id: int = 0
    began: Mapping[str, int] = field(default_factory=dict)
    is_written: bool = False
    """Whether Kafka has the next batch."""

    def query_names(self, _query_id: str) -> QueryNames:
        return QueryNames(self.began)

    def write_query_names(self, _query_id: str, names: QueryNames) -> None:
        object.__setattr__(self, "began", names.began)

    def decision_of(self, prefix: str) -> Decision | None:
        return self.prefixes[prefix].decision

    @property
    def key(self) -> object:
        began, prefixes = sorted(self.began.items()), sorted(self.prefixes.items(), key=lambda each: each[0])
        return self.batch_id, self.is_written, tuple(began), tuple(prefixes)

    def after(self, prefix: str, outcome: str) -> State | None:
        """Return the state after a run of the query that tries one batch under this prefix; None if it is refused. An
        operator has adopted the prefix before. Raises AssertionError if the run writes a batch that Kafka has.
        """
        ran, known = replace(self), self.prefixes[prefix]
        if self.batch_id and known == Known():
            known = Known(is_adopted=True)
        place, driver = TopicPartition("decisions", 0), OpenTransaction(f"{prefix}/driver", 1, 1, 2)
        start = BatchStart.after(known.decision, prefix, driver, place, is_adopted=known.is_adopted)
        try:
            has_begun = check_name(ran, start, QueryBatch("q", self.batch_id, TOPIC), lambda _: False)
        except IllegalStateError:
            return None
        if not has_begun:  # it is skipped
            return replace(ran, batch_id=self.batch_id + 1, is_written=False)
        if outcome != FAILS:
            assert not self.is_written
            known = Known(self.batch_id, known.is_adopted)
        ran = replace(ran, prefixes={**self.prefixes, prefix: known})
        if outcome == IS_LOGGED:
            return replace(ran, batch_id=self.batch_id + 1)
        return replace(ran, is_written=self.is_written or outcome == IS_DECIDED)


def following(state: State, path: tuple[str, ...]) -> Iterator[tuple[State, tuple[str, ...]]]:
    for prefix in state.prefixes:
        for outcome in (FAILS, IS_DECIDED, IS_LOGGED):
            taken = (*path, f"{prefix}: batch {state.batch_id} {outcome}")
            try:
                found = state.after(prefix, outcome)
            except AssertionError:
                pytest.fail("a batch is written twice:\n" + "\n".join(taken))
            if found is not None:
                yield found, taken


@pytest.mark.parametrize(("prefixes", "runs"), [("PQ", 9), ("PQR", 6)])
def test_no_change_of_prefixes_writes_a_batch_twice(prefixes: str, runs: int) -> None:
    level: list[tuple[State, tuple[str, ...]]] = [(State(dict.fromkeys(prefixes, Known())), ())]
    seen: set[object] = set()
    for _ in range(runs):
        found = {each.key: (each, path) for before in level for each, path in following(*before)}
        level = [each for key, each in found.items() if key not in seen]
        seen.update(found)
    assert len(seen) > 500
