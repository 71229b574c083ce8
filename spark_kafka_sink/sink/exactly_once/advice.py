"""What errors and logs of exactly-once delivery say that people must do about a batch. Plain text."""

from __future__ import annotations

import shlex

from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.sink.options import DECISION_TOPIC


def name_of_query(query_id: str) -> str:
    """In words; an empty `query_id` is a batch write's."""
    return f"query {query_id}" if query_id else "a batch write"


def operator_command(name: str, prefix: str, decision_topic: str) -> str:
    """What to type, but for the servers. With another decision topic than the query's it would find nothing decided."""
    topic = "" if decision_topic == DECISION_TOPIC else f" --decision-topic={shlex.quote(decision_topic)}"
    own = f"--prefix={shlex.quote(prefix)}{topic}"  # what is typed last may stand before a full stop
    return f"python -m spark_kafka_sink.transactions {name} {own} --bootstrap-servers HOST:PORT"


def who_finishes(query_id: str, command: str) -> str:
    """Of a decided batch. A batch write that is called again is another one: its rows come beside the first ones."""
    if query_id:
        return "It is finished when the query is started again, which must be within transaction.timeout.ms."
    return f"Do not write it again. Within transaction.timeout.ms it is finished by {command}."


def who_finds_out(query_id: str, command: str) -> str:
    """Whether a batch is decided."""
    if query_id:
        return "The next start of the query finds out, and finishes or repeats it."
    return (
        f"Do not write it again before it is known that it is not. Within transaction.timeout.ms {command} says so, or"
        " commits it."
    )


def lost_decisions(prefix: str, topic: str, partitions: int) -> IllegalStateError:
    """The error for a prefix that was used, and of which the topic knows nothing."""
    return IllegalStateError(
        f"decision.topic={topic} knows nothing of transactional.id.prefix={prefix!r}, which was used before: the topic"
        " was deleted, made again or emptied, partitions were added to it"
        f" (it has {partitions} now), the prefix was freed by an older release, or its decisions are in another topic."
        f" Without them a batch may be written twice. {_ways_out(prefix, topic)}"
    )


def missing_topic(prefix: str, topic: str) -> IllegalStateError:
    """The error for a prefix that was used, and whose topic is not there."""
    return IllegalStateError(
        f"decision.topic={topic} is not in the cluster, and transactional.id.prefix={prefix!r} was used before: the"
        " topic was deleted, or another one is named. Without its decisions a batch may be written twice."
        f" {_ways_out(prefix, topic)}"
    )


def _ways_out(prefix: str, topic: str) -> str:
    return (
        "Name the right decision.topic, or restore this one. If it is lost for good, look which batch is the last one"
        " in the topics that the query writes, then let the query begin at the next batch of its checkpoint:"
        f" {operator_command('adopt', prefix, topic)}"
    )
