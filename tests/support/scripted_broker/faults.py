"""Hooks for `ScriptedCluster.on`: faults between a request and its response."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from support.scripted_broker.dispatch import API_BY_KEY
from support.scripted_broker.exchange import Answer, Exchange

from spark_kafka_sink.common.errors import KafkaError

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

Proceed: TypeAlias = Callable[[], Answer]
"""Handles the request as the broker would, with all effects, and returns its answer."""
Hook: TypeAlias = "Callable[[ScriptedCluster, Exchange, Proceed], Answer]"


@dataclass(slots=True)
class Script:
    """A hook, and the requests that it handles."""

    api_key: int
    hook: Hook
    times: int | None
    node_id: int | None
    skip: int
    used: int = 0

    def applies_to(self, exchange: Exchange) -> bool:
        """Return whether the hook handles this request. Count it against `skip` and `times`."""
        if exchange.api_key != self.api_key or self.node_id not in (None, exchange.node_id):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None and self.used >= self.times:
            return False
        self.used += 1
        return True


def _code(error: type[KafkaError] | int) -> int:
    code = error if isinstance(error, int) else error.error_code
    assert code is not None, f"{error} has no error code"
    return code


def fail_with(error: type[KafkaError] | int) -> Hook:
    """Refuse the request. Each error code of the response is that of `error`: an error class or a code."""
    error_code = _code(error)

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        return Answer(API_BY_KEY[exchange.api_key].refuse(cluster, exchange, error_code))

    return hook


def fail_records(error: type[KafkaError] | int, causes: Mapping[int, str | None], message: str | None = None) -> Hook:
    """Refuse each batch because of records in it. `causes`: the index of each in its batch, and what is wrong."""
    refuse = fail_with(error)
    found = [{"batch_index": index, "batch_index_error_message": text} for index, text in causes.items()]

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        answer = refuse(cluster, exchange, proceed)
        assert answer.values is not None
        for topic in answer.values["responses"]:
            for each in topic["partition_responses"]:
                each |= {"record_errors": found, "error_message": message}
        return answer

    return hook


def refuse_topic(name: str, error: type[KafkaError] | int) -> Hook:
    """Answer a Metadata request, with the error's code in place of this topic's partitions."""
    code = _code(error)

    def refuse(values: dict[str, Any]) -> Mapping[str, Any]:
        refused = {"error_code": code, "name": name}
        return {**values, "topics": [refused if each["name"] == name else each for each in values["topics"]]}

    return change(refuse)


def lose_request() -> Hook:
    """The request never arrives."""
    return lambda cluster, exchange, proceed: Answer(None)


def lose_response() -> Hook:
    """The request takes effect; its response is lost."""
    return lambda cluster, exchange, proceed: dataclasses.replace(proceed(), values=None)


def create_again(topic: str, error: type[KafkaError] | int) -> Hook:
    """The request is refused while the topic is deleted and created again. Partition 0 has the same leader as before,
    which does not know its producers any more.
    """

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        old = cluster.topics[topic].partitions
        cluster.delete_topic(topic)
        refused = fail_with(error)(cluster, exchange, proceed)
        cluster.create_topic(topic, len(old))
        cluster.move_leader(topic, 0, old[0].leader_id)
        return refused

    return hook


def delay(delay_ms: int) -> Hook:
    """The request takes effect now, the response comes `delay_ms` later."""

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        answer = proceed()
        return dataclasses.replace(answer, delay_ms=answer.delay_ms + delay_ms)

    return hook


def close_before() -> Hook:
    """The connection ends, without effect."""
    return lambda cluster, exchange, proceed: Answer(None, close=True)


def close_after() -> Hook:
    """The request takes effect, then the connection ends without a response."""
    return lambda cluster, exchange, proceed: dataclasses.replace(proceed(), values=None, close=True)


def corrupt(transform: Callable[[bytes], bytes]) -> Hook:
    """The request takes effect; the response's frame, size included, goes through `transform`."""
    return lambda cluster, exchange, proceed: dataclasses.replace(proceed(), transform=transform)


def frame_length(length: int) -> Hook:
    """The response's frame claims this length."""
    return corrupt(lambda frame: struct.pack(">i", length) + frame[4:])


def wrong_correlation_id(shift: int = 1) -> Hook:
    """The response belongs to another request."""

    def move(frame: bytes) -> bytes:
        (correlation_id,) = struct.unpack_from(">i", frame, 4)
        return frame[:4] + struct.pack(">i", correlation_id + shift) + frame[8:]

    return corrupt(move)


def truncate(count: int) -> Hook:
    """The response lacks its last `count` bytes, and its frame says so."""
    return corrupt(lambda frame: struct.pack(">i", len(frame) - 4 - count) + frame[4 : len(frame) - count])


def change(change_values: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Hook:
    """The request takes effect; the response's fields go through `change_values`."""

    def hook(cluster: ScriptedCluster, exchange: Exchange, proceed: Proceed) -> Answer:
        answer = proceed()
        if answer.values is None:
            return answer
        return dataclasses.replace(answer, values=change_values(dict(answer.values)))

    return hook


def older_end(topic: str, end: int) -> Hook:
    """A ListOffsets is answered as by a leader that has learnt nothing since `topic` ended at `end`."""

    def older(partition: dict[str, Any]) -> dict[str, Any]:
        return partition | {"offset": min(end, partition["offset"])}

    def answer(values: dict[str, Any]) -> dict[str, Any]:
        topics = [
            each | {"partitions": [*map(older, each["partitions"])]} if each["name"] == topic else each
            for each in values["topics"]
        ]
        return values | {"topics": topics}

    return change(answer)
