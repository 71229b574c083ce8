"""Wrong, late or missing answers, in addition to `scripted_broker.faults`. All are answers that a broker may give.

Errors that mean "not appended" are only sent for batches that are not in the log. A broker that breaks this rule causes
duplicates with any client.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

from support.scripted_broker import faults, metadata, produce
from support.scripted_broker.batches import BadBatchError, check_batch
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.faults import Hook, Proceed, change, corrupt

Chooses = Callable[[str, int, bytes], bool]
"""(topic, partition, batch): whether the fault is for this one."""


def refuse_some(error_code: int, chooses: Chooses, more: Mapping[str, Any] | None = None) -> Hook:
    """Refuse the chosen partitions without effect; append the others as usual."""

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        refused: list[dict[str, Any]] = []
        kept = []
        for topic in exchange.request.topic_data:
            chosen = [data for data in topic.partition_data if chooses(topic.name, data.index, data.records or b"")]
            if chosen:
                outcome = {"error_code": error_code, "base_offset": -1, **(more or {})}
                refused.append(
                    {"name": topic.name, "partition_responses": [outcome | {"index": d.index} for d in chosen]}
                )
            rest = tuple(data for data in topic.partition_data if data not in chosen)
            if rest:
                kept.append(dataclasses.replace(topic, partition_data=rest))
        request = dataclasses.replace(exchange.request, topic_data=tuple(kept))
        answer = produce.respond(cluster, dataclasses.replace(exchange, request=request))
        if answer.values is None:
            return answer if not refused else Answer(None, close=True)
        values = dict(answer.values)
        values["responses"] = [*values["responses"], *refused]
        return Answer(values)

    return hook


def any_of(rng: random.Random, share: float) -> Chooses:
    return lambda topic, partition, data: rng.random() < share


def new_ones(cluster: ScriptedCluster) -> Chooses:
    """Choose batches that are not in the log, in partitions without a later sequence."""

    def is_new(topic: str, partition: int, data: bytes) -> bool:
        try:
            header = check_batch(data)
        except BadBatchError:
            return False
        found = cluster.partition(topic, partition)
        mine = (
            [] if found is None else [b.header for b in found.log.batches if b.header.producer_id == header.producer_id]
        )
        return all(
            each.producer_epoch < header.producer_epoch or each.last_sequence < header.base_sequence for each in mine
        )

    return is_new


def answer_with(error_code: int) -> Hook:
    """Append the batch, and answer with an error that leaves the outcome unknown."""

    def set_code(outcome: Mapping[str, Any]) -> Mapping[str, Any]:
        return (
            outcome
            if outcome["error_code"]
            else {"index": outcome["index"], "error_code": error_code, "base_offset": -1}
        )

    return change(lambda values: _map_outcomes(values, lambda outcomes: [set_code(each) for each in outcomes]))


def leave_out(rng: random.Random) -> Hook:
    """Leave some partitions out of the answer."""
    return change(
        lambda values: _map_outcomes(values, lambda outcomes: [each for each in outcomes if rng.random() < 0.5])
    )


def list_twice() -> Hook:
    """List each partition twice in the answer."""
    return change(lambda values: _map_outcomes(values, lambda outcomes: [*outcomes, *outcomes]))


def answer_for_another_topic() -> Hook:
    """Add a partition to the answer that was not in the request."""
    another = {"index": 77, "error_code": 0, "base_offset": 5}
    return change(lambda values: _map_outcomes(values, lambda outcomes: [another, *outcomes]))


def _map_outcomes(values: dict[str, Any], change_outcomes: Callable[[list[Any]], list[Any]]) -> Mapping[str, Any]:
    topics = [
        {**topic, "partition_responses": change_outcomes(list(topic["partition_responses"]))}
        for topic in values["responses"]
    ]
    return {**values, "responses": topics}


def flip_bytes(rng: random.Random) -> Hook:
    """Change some bytes after the frame's length."""

    def flip(frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(4, len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    return corrupt(flip)


# ---- metadata ------------------------------------------------------------------------------------------------------


def stale(remembered: Mapping[str, Any]) -> Hook:
    """Answer as a broker with old metadata: as it was at the time of `remembered`."""
    return lambda cluster, exchange, proceed: _only_asked(exchange, remembered)


def snapshot(cluster: ScriptedCluster) -> Mapping[str, Any]:
    """Return the current metadata of all topics, for `stale`."""
    values = metadata.cluster_values(cluster)
    topics = [metadata.topic_values(cluster, topic) for topic in cluster.topics.values() if topic.is_visible]
    return values | {"topics": topics}


def _only_asked(exchange: Exchange, values: Mapping[str, Any]) -> Answer:
    asked = {topic.name for topic in exchange.request.topics or ()}
    return Answer({**values, "topics": [topic for topic in values["topics"] if topic["name"] in asked]})


def refuse_topics(error_code: int) -> Hook:
    """Refuse every topic; the other fields are as usual."""

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        values = dict(metadata.refuse(cluster, exchange, error_code))
        return Answer(values | {"error_code": 0})

    return hook


def no_other_broker() -> Hook:
    """Answer as a broker that starts and knows no other broker."""
    return change(lambda values: {**values, "brokers": [], "topics": []})


def no_answer(rng: random.Random) -> tuple[str, Hook]:
    """Return a fault after which a request has no answer, and its description."""
    return rng.choice(
        (
            ("request lost", faults.lose_request()),
            ("response lost", faults.lose_response()),
            ("closed before", faults.close_before()),
            ("closed after", faults.close_after()),
            ("closed after", faults.close_after()),
        )
    )


def late_answer(rng: random.Random) -> tuple[str, Hook]:
    delay_ms = rng.choice((20, 200, 1_000, 6_000))
    return f"{delay_ms} ms late", faults.delay(delay_ms)
