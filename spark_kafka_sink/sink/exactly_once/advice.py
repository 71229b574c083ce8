"""Texts of errors and logs of exactly-once delivery that tell the user what to do about a batch."""

from __future__ import annotations

import shlex

from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.sink.options import DECISION_TOPIC


def name_of_query(query_id: str) -> str:
    """Return the query in words; a batch write has an empty `query_id`."""
    return f"query {query_id}" if query_id else "a batch write"


def operator_command(name: str, prefix: str, decision_topic: str) -> str:
    """Return the command to type, except for the servers. It names the decision topic, without which it would find
    nothing.
    """
    topic = "" if decision_topic == DECISION_TOPIC else f" --decision-topic={shlex.quote(decision_topic)}"
    own = f"--prefix={shlex.quote(prefix)}{topic}"  # the last argument may stand before a full stop
    return f"python -m spark_kafka_sink.transactions {name} {own} --bootstrap-servers HOST:PORT"


def finish_advice(query_id: str, command: str) -> str:
    """Return a sentence on how a decided batch is finished. A batch write that is called again is another one, and adds
    its rows again.
    """
    if query_id:
        return "It is finished when the query is started again, which must be within transaction.timeout.ms."
    return f"Do not write it again. Within transaction.timeout.ms it is finished by {command}."


def unknown_advice(query_id: str, command: str) -> str:
    """Return a sentence on how to find out whether a batch is decided."""
    if query_id:
        return "The next start of the query finds out, and finishes or repeats it."
    return (
        f"Do not write it again before it is known that it is not. Within transaction.timeout.ms {command} says so, or"
        " commits it."
    )


def timeout_advice(query_id: str, timeout_ms: int | None) -> str:
    """Return a sentence on what to change for a batch that takes longer than its transactions may be open; `timeout_ms`
    is None if it is not known.
    """
    now = "" if timeout_ms is None else f" (now {timeout_ms})"
    smaller = "batches smaller (maxOffsetsPerTrigger, maxFilesPerTrigger)" if query_id else "the write smaller"
    return (
        f"Raise kafka.transaction.timeout.ms{now} and, if need be, the brokers' transaction.max.timeout.ms; or make"
        f" {smaller}."
    )


def lost_decisions(prefix: str, topic: str, partitions: int) -> IllegalStateError:
    """Return the error for a prefix that was used before and has no record in the topic."""
    return IllegalStateError(
        f"decision.topic={topic} knows nothing of transactional.id.prefix={prefix!r}, which was used before: the topic"
        " was deleted, made again or emptied, partitions were added to it"
        f" (it has {partitions} now), the prefix was freed by an older release, or its decisions are in another topic."
        f" Without them a batch may be written twice. {_ways_out(prefix, topic)}"
    )


def missing_topic(prefix: str, topic: str) -> IllegalStateError:
    """Return the error for a prefix that was used before and whose decision topic is missing."""
    return IllegalStateError(
        f"decision.topic={topic} is not in the cluster, and transactional.id.prefix={prefix!r} was used before: the"
        " topic was deleted, or another one is named. Without its decisions a batch may be written twice."
        f" {_ways_out(prefix, topic)}"
    )


def copied_topic(prefix: str, topic: str, then: str, now: str, last_batch_id: int | None) -> IllegalStateError:
    """Return the error for records that were written into a topic with the id `then`, and are in one with the id `now`.
    `last_batch_id`: of the last decision in it.
    """
    last = "it has no decision" if last_batch_id is None else f"its last decision is on batch {last_batch_id}"
    known = "" if last_batch_id is None else f" after batch {last_batch_id}"
    return IllegalStateError(
        f"decision.topic={topic} is a copy for transactional.id.prefix={prefix!r}: its records were written into a"
        f" topic with the id {then}, and this one has the id {now}. It was restored, it is a mirror in another"
        f" cluster, or it was created again while a query ran. For this prefix {last}. If the copy lacks a later"
        " decision, that batch would be written twice. Look which batch is the last one in the topics that the query"
        f" writes. If no batch{known} is there, let the query go on: {operator_command('adopt', prefix, topic)}"
    )


def moved_decisions(prefix: str, topic: str, moved_to: str) -> IllegalStateError:
    """Return the error for a prefix whose decisions are in the topic `moved_to` since an operator moved it there."""
    return IllegalStateError(
        f"decision.topic={topic} has no longer the decisions of transactional.id.prefix={prefix!r}: adopt has moved"
        f" them to decision.topic={moved_to}. Name that topic, in the query and in commands. To move them back:"
        f" {operator_command('adopt', prefix, topic)}"
    )


def _ways_out(prefix: str, topic: str) -> str:
    return (
        "Name the right decision.topic, or restore this one from a copy with the last decision. Or move the query to"
        " this topic: adopt takes over its last decision from a topic of the cluster that it had before. If none has"
        " it, the query begins at the next batch of its checkpoint, so look first which batch is the last one in the"
        f" topics that the query writes. {operator_command('adopt', prefix, topic)}"
    )


def changed_batch(prefix: str, decision_topic: str, batch_id: int, what: str) -> str:
    """Return the error's text for a batch that was committed and comes again with other rows or for another topic;
    `what` says how the two differ.
    """
    accept, forget = (operator_command(name, prefix, decision_topic) for name in ("accept", "forget"))
    return (
        f"Batch {batch_id} of transactional.id.prefix={prefix!r} was committed {what}. Nothing of it was written or"
        " skipped, and the query stops. Find out which case this is. (1) The checkpoint is an older copy, or a copy for"
        " another query: start from the newest checkpoint, and give another query its own transactional.id.prefix."
        " (2) The input is the same, and the query computes other rows from it each time (rand(), the current time, a"
        " source that changed): the committed rows stay, and the query goes on after this batch with:"
        f" {accept}. (3) These rows must be written beside the committed ones: {forget}."
    )


def topic_in_words(topic: str | None) -> str:
    """Return the sink's option `topic` in words; None if the rows name their topics."""
    return "the topics that its rows name" if topic is None else f"topic={topic!r}"
