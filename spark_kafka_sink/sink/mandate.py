"""What the driver tells the tasks of an exactly-once batch, what they tell it, and what follows from either: whether a
task's batch is written already, and whether what the tasks tell is of one batch. Plain values that pickle; JSON where
they travel as a column. And what errors say that people should do about a batch.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spark_kafka_sink.client.transaction_values import OpenTransaction
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, ProtocolError
from spark_kafka_sink.record.fingerprint import MODULUS
from spark_kafka_sink.sink.decision import BatchChangedError, Decision, TaskTransaction
from spark_kafka_sink.sink.options import DECISION_TOPIC

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mandate:
    """A fenced driver's word to its tasks, for one batch.

    `driver` is the transaction in which it will decide, and `place` where. `last_batch_id` is the last batch decided
    under the prefix, None where there is none, `last_query_id` whose it was, empty for a batch write, and `last_rows`
    how many rows it had. The others are the fields of its decision.
    """

    prefix: str
    driver: OpenTransaction
    place: TopicPartition
    last_batch_id: int | None = None
    last_query_id: str = ""
    last_rows: int = 0
    last_fingerprint: int | None = None
    last_topic: str | None = None
    last_takes_any_rows: bool = False

    @classmethod
    def after(cls, prefix: str, driver: OpenTransaction, place: TopicPartition, last: Decision | None) -> Mandate:
        """For the batch that follows the decision `last`."""
        if last is None:
            return cls(prefix, driver, place)
        content = (last.rows, last.fingerprint, last.topic, last.takes_any_rows)
        return cls(prefix, driver, place, last.batch_id, last.query_id, *content)

    @property
    def next_batch_id(self) -> int:
        """Of a batch write, to which nobody else gives a number."""
        return 0 if self.last_batch_id is None else self.last_batch_id + 1

    def is_written_already(self, batch_id: int, query_id: str) -> bool:
        """Whether the batch is the last one decided: then its rows must not be written again, in whatever partitions
        they come now.

        Raises IllegalStateError where the batch cannot be told from one written before: an earlier batch id, another
        query.
        """
        if self.last_batch_id is None:
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


def name_of_query(query_id: str) -> str:
    """In words; an empty `query_id` is a batch write's."""
    return f"query {query_id}" if query_id else "a batch write"


def operator_command(name: str, prefix: str, decision_topic: str) -> str:
    """What to type, but for the servers. With another decision topic than the query's it would find nothing decided."""
    topic = "" if decision_topic == DECISION_TOPIC else f" --decision-topic={decision_topic}"
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
    """What a task tells the driver. `written` is None where it left nothing open: the batch was written already
    (`was_skipped`), or there were no rows. `rows` and `fingerprint` are those of the task's rows, be they skipped.
    `topic` is the option, None where topics come from a column.
    """

    mandate: Mandate
    batch_id: int
    query_id: str
    partition: int
    rows: int
    written: TaskTransaction | None
    was_skipped: bool = False
    fingerprint: int = 0
    topic: str | None = None

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


def task_ids(prefix: str) -> re.Pattern[str]:
    """Matches what `task_id` can give."""
    return re.compile(re.escape(prefix) + r"/[0-9]+(\.[0-9]+)?")


def check_agreement(outcomes: Sequence[TaskOutcome]) -> None:
    """Raises IllegalStateError where the tasks are not those of one batch."""
    for what in ("batch_id", "query_id", "mandate", "was_skipped", "topic"):
        if len(found := {getattr(outcome, what) for outcome in outcomes}) > 1:
            raise IllegalStateError(f"The tasks do not agree on {what}: {found}. The batch must run again.")
    partitions = [outcome.partition for outcome in outcomes]
    if len(set(partitions)) < len(partitions):
        raise IllegalStateError(f"Two tasks wrote one partition: {sorted(partitions)}. The batch must run again.")


def fingerprint_of(outcomes: Sequence[TaskOutcome]) -> int:
    """That of the whole batch."""
    return sum(outcome.fingerprint for outcome in outcomes) % MODULUS


def check_unchanged(mandate: Mandate, outcomes: Sequence[TaskOutcome]) -> None:
    """Raise BatchChangedError where the batch, which was committed before, has other rows or another topic now.

    `outcomes` are those of its tasks, none where it has no tasks now. A decision of version 1 has the number of rows
    only. Where an operator accepted whatever comes, a difference is logged.
    """
    rows = sum(outcome.rows for outcome in outcomes)
    differing = []
    if outcomes and mandate.last_fingerprint is not None and outcomes[0].topic != mandate.last_topic:
        differing.append(f"its topic was {_topic(mandate.last_topic)} and is {_topic(outcomes[0].topic)} now")
    if rows != mandate.last_rows:
        differing.append(f"it had {mandate.last_rows} rows and has {rows} now")
    elif mandate.last_fingerprint not in (None, fingerprint_of(outcomes)):
        differing.append(f"it had {mandate.last_rows} rows and has {rows} now, which are not the same ones")
    if not differing:
        return
    what = f"Batch {mandate.last_batch_id} under transactional.id.prefix={mandate.prefix!r} was committed before, and"
    what += f" {'; '.join(differing)}."
    if mandate.last_takes_any_rows:
        log.warning("%s It is skipped, because an operator has accepted that.", what)
        return
    accept, forget = (operator_command(name, mandate.prefix, mandate.place.topic) for name in ("accept", "forget"))
    raise BatchChangedError(
        f"{what} Nothing was written now, and the batch was not skipped. Either the checkpoint is an older copy, or"
        " another query's: go on from the newest one of this query. Or the query gives other rows when a batch runs"
        " again (rand(), current_timestamp(), a source that cannot be replayed, a query that was changed): to keep"
        f" what is in Kafka and skip this batch, stop the query, run {accept}, and start the query again; rows that"
        " come only now are then missing in Kafka. To write the batch as it comes now beside what is in Kafka, set"
        f" another transactional.id.prefix or run {forget}; rows that came before as well are then there twice."
    )


def _topic(option: str | None) -> str:
    return "that of the column" if option is None else repr(option)


def check_names(decision: Decision, prefix: str, where: str) -> None:
    """Raise ProtocolError where a decision names a transaction that is not of a task of its prefix."""
    for task in decision.tasks:
        name = task.transaction.transactional_id
        if not task_ids(prefix).fullmatch(name):
            raise ProtocolError(
                f"{where}: the decision on batch {decision.batch_id} names the transaction {name!r}, which no task of"
                f" transactional.id.prefix={prefix!r} can have. Nothing was done with it. Somebody else writes to the"
                " decision topic: only its queries may, and each group that trusts each other needs a decision.topic"
                " of its own."
            )
