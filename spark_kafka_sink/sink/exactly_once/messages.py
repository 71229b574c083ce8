"""What the driver tells the tasks of an exactly-once batch, what they tell it, and what follows from either: whether a
task's batch is written already, and whether what the tasks tell is of one batch. Plain values that pickle; JSON where
they travel as a column. And what errors say that people should do about a batch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.record.fingerprint import MODULUS
from spark_kafka_sink.sink.exactly_once.decision import BatchChangedError, TaskTransaction
from spark_kafka_sink.sink.options import DECISION_TOPIC


@dataclass(frozen=True, slots=True)
class Mandate:
    """A fenced driver's word to its tasks, for one batch.

    `driver` is the transaction in which it will decide, and `place` where. `last_batch_id` is the last batch decided
    under the prefix, None where there is none, `last_query_id` whose it was, empty for a batch write. The other `last_`
    fields are those of that batch's `Decision`. `is_adopted`: an operator allowed a prefix without a decision to begin
    at any batch.
    """

    prefix: str
    driver: OpenTransaction
    place: TopicPartition
    last_batch_id: int | None = None
    last_query_id: str = ""
    last_rows: int = 0
    last_fingerprint: int | None = None
    last_topic: str | None = None
    last_is_accepted: bool = False
    is_adopted: bool = False

    def needs_trace(self, query_id: str) -> bool:
        """Whether a batch without rows must be decided on, too: the first one of a query, whose later batches could not
        be told from those of a query that has lost its decisions.
        """
        return bool(query_id) and self.last_batch_id is None

    @property
    def next_batch_id(self) -> int:
        """Of a batch write, to which nobody else gives a number."""
        return 0 if self.last_batch_id is None else self.last_batch_id + 1

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Mandate:
        return _mandate(json.loads(text))

    def is_written_already(self, batch_id: int, query_id: str) -> bool:
        """Whether the batch is the last one decided: then its rows must not be written again, in whatever partitions
        they come now.

        Raises IllegalStateError where the batch cannot be told from one written before: an earlier batch id, another
        query, a later batch of a query that has no decision.
        """
        if self.last_batch_id is None:
            if query_id and batch_id > 0 and not self.is_adopted:
                raise self._no_decision(batch_id, query_id)
            return False
        if query_id != self.last_query_id:
            raise IllegalStateError(
                f"transactional.id.prefix={self.prefix!r} belongs to {name_of_query(self.last_query_id)}, whose batch"
                f" {self.last_batch_id} was the last one written under it, and this is {name_of_query(query_id)}:"
                " give every query and every sink a transactional.id.prefix of its own. If the other one is gone for"
                f" good (a checkpoint that was deleted): {operator_command('forget', self.prefix, self.place.topic)}."
            )
        if batch_id < self.last_batch_id:
            raise IllegalStateError(
                f"Batch {batch_id} comes after batch {self.last_batch_id} was written under"
                f" transactional.id.prefix={self.prefix!r}: the checkpoint was reset or is an older copy, and its"
                " batches would be written twice. Go on from the newest checkpoint; or, to write them again on purpose,"
                " set another transactional.id.prefix."
            )
        return batch_id == self.last_batch_id

    def _no_decision(self, batch_id: int, query_id: str) -> IllegalStateError:
        return IllegalStateError(
            f"Batch {batch_id} of {name_of_query(query_id)} is the first one under"
            f" transactional.id.prefix={self.prefix!r}, and decision.topic={self.place.topic} has no decision on an"
            " earlier one. The query ran before with at-least-once, under another prefix, in another form, or on"
            " another cluster; or its decisions are lost. If this batch was written before and Spark did not log it, it"
            " would be written twice. Go back to what the query had; or look whether the topics that it writes have"
            " rows of this batch, and if not, let it begin here:"
            f" {operator_command('adopt', self.prefix, self.place.topic)}"
        )


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


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What a task reports to the driver. `written` is None where it left nothing open: the batch was written already
    (`was_skipped`), or there were no rows.
    """

    mandate: Mandate
    batch_id: int
    query_id: str
    partition: int
    rows: int
    written: TaskTransaction | None
    was_skipped: bool = False
    fingerprint: int = 0
    """Of the task's rows, also where they were not written."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TaskOutcome:
        fields = json.loads(text)
        written = fields.pop("written")
        return cls(**fields | {"mandate": _mandate(fields["mandate"]), "written": written and _task(written)})


def _mandate(fields: Mapping[str, Any]) -> Mandate:
    values = dict(fields)
    return Mandate(**values | {"driver": OpenTransaction(*values["driver"]), "place": TopicPartition(*values["place"])})


def _task(values: list[Any]) -> TaskTransaction:
    transaction, partition, rows = values
    return TaskTransaction(OpenTransaction(*transaction), partition, rows)


def driver_id(prefix: str) -> str:
    return f"{prefix}/driver"


def task_id(prefix: str, partition: int, attempt: int) -> str:
    """A second attempt has an id of its own: it cannot fence a first one that finished."""
    return f"{prefix}/{partition}" if attempt == 0 else f"{prefix}/{partition}.{attempt}"


def check_agreement(outcomes: Sequence[TaskOutcome]) -> None:
    """Raises IllegalStateError where the tasks are not those of one batch."""
    for what in ("batch_id", "query_id", "mandate", "was_skipped"):
        if len(found := {getattr(outcome, what) for outcome in outcomes}) > 1:
            raise IllegalStateError(f"The tasks do not agree on {what}: {found}. The batch must run again.")
    partitions = [outcome.partition for outcome in outcomes]
    if len(set(partitions)) < len(partitions):
        raise IllegalStateError(f"Two tasks wrote one partition: {sorted(partitions)}. The batch must run again.")


def check_same_batch(outcomes: Sequence[TaskOutcome], topic: str | None) -> None:
    """Compare a batch that is to be skipped with the one that was decided under its number; `topic` is the sink's
    option.

    Raises BatchChangedError where the rows, their number or the topic differ: then this is another batch, and to skip
    it would lose its rows. A decision of version 1 has the number of rows only. A batch that an operator accepted is
    skipped with whatever rows it comes.
    """
    mandate, rows = outcomes[0].mandate, sum(outcome.rows for outcome in outcomes)
    if mandate.last_is_accepted:
        return
    has_fingerprint = mandate.last_fingerprint is not None
    found = sum(outcome.fingerprint for outcome in outcomes) % MODULUS
    if has_fingerprint and topic != mandate.last_topic:
        what = f"for {_topic_in_words(mandate.last_topic)}, and now it comes for {_topic_in_words(topic)}"
    elif rows != mandate.last_rows:
        what = f"with {mandate.last_rows} rows, and now it comes with {rows}"
    elif has_fingerprint and found != mandate.last_fingerprint:
        what = f"with {mandate.last_rows} rows, and now it comes with as many rows, but their content differs"
    else:
        return
    accept, forget = (operator_command(name, mandate.prefix, mandate.place.topic) for name in ("accept", "forget"))
    raise BatchChangedError(
        f"Batch {mandate.last_batch_id} of transactional.id.prefix={mandate.prefix!r} was committed {what}. Nothing of"
        " it was written or skipped, and the query stops. Find out which case this is. (1) The checkpoint is an older"
        " copy, or a copy for another query: start from the newest checkpoint, and give another query a"
        " transactional.id.prefix of its own. (2) The input is the same, and the query computes other rows from it each"
        " time (rand(), the current time, a source that changed): the committed rows stay, and the query goes on after"
        f" this batch with: {accept}. (3) These rows must be written beside the committed ones: {forget}."
    )


def _topic_in_words(topic: str | None) -> str:
    return "the topics that its rows name" if topic is None else f"topic={topic!r}"
