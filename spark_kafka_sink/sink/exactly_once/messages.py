"""What the driver and the tasks of an exactly-once batch send one another, and the records of the decision topic.

The decision topic has one record of decisions for each prefix, and the newest one counts: `decided` while transactions
may still be open, `finished` once all are committed. A second record, under a key of its own, says that the topic has
known the prefix since its first driver began. Both are versioned JSON with a checksum, which finds damage and is no
signature: every client that may write to the decision topic is trusted with every prefix in it. What a record says is
still checked before anything is done because of it.

Plain values that pickle; JSON where they travel as a column or as a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError, ProtocolError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.record.fingerprint import MODULUS
from spark_kafka_sink.sink.exactly_once.advice import name_of_query, operator_command

log = logging.getLogger(__name__)

_DECISION_VERSION: Final = 2
_FIRST_DECISION_VERSION: Final = 1
"""Its decisions name neither the fingerprint of the rows nor the topic."""
_DECIDED, _FINISHED = "decided", "finished"

_MOST_ID: Final = 2**63 - 1
_MOST_EPOCH: Final = 2**15 - 1
_MOST_TIME_MS: Final = 253_402_300_799_999
"""The end of the year 9999, the last one that Python's dates have."""


class TransactionLostError(KafkaError):
    """Rows of a decided batch are gone. Names batch, partitions and rows."""

    fatal = True


class BatchChangedError(KafkaError):
    """A batch was decided before, and now comes with other rows or for another topic. Nothing of it is written."""

    fatal = True


class TaskTransaction(NamedTuple):
    """What one task left open: a partition's rows."""

    transaction: OpenTransaction
    partition: int
    rows: int

    @property
    def marker_text(self) -> str:
        """The text that its marker carries, which no other transaction's does."""
        own = self.transaction
        return f"producer_id={own.producer_id} epoch={own.producer_epoch} rows={self.rows}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided on one batch.

    `query_id` is empty for a batch write. `partitions` and `rows` are those of the whole batch; `tasks` has those with
    rows, and none once `is_finished`. `time_ms` is the driver's time of day. `is_accepted`: an operator closed the
    batch, whatever rows of it are in Kafka. `fingerprint` is that of all rows (record/fingerprint.py), None in a record
    of version 1; `topic` is the sink's option `topic`, None where the rows name their topics or the version is 1.
    """

    batch_id: int
    query_id: str
    time_ms: int
    partitions: int
    rows: int
    tasks: tuple[TaskTransaction, ...]
    is_finished: bool = False
    is_accepted: bool = False
    fingerprint: int | None = None
    topic: str | None = None

    def finished(self) -> Decision:
        return replace(self, tasks=(), is_finished=True)

    @property
    def transactions(self) -> list[OpenTransaction]:
        return [task.transaction for task in self.tasks]

    def to_bytes(self) -> bytes:
        content: dict[str, Any] = {
            "version": _FIRST_DECISION_VERSION if self.fingerprint is None else _DECISION_VERSION,
            "state": _FINISHED if self.is_finished else _DECIDED,
            "batch_id": self.batch_id,
            "query_id": self.query_id,
            "time_ms": self.time_ms,
            "partitions": self.partitions,
            "rows": self.rows,
            "transactions": [[*task.transaction, task.partition, task.rows] for task in self.tasks],
        }
        if self.is_accepted:
            content["accepted"] = True
        if self.fingerprint is not None:
            # as text: readers of JSON may take a number of 64 bits for a float
            content |= {"fingerprint": f"{self.fingerprint:016x}", "topic": self.topic}
        return json.dumps(content | {"checksum": _checksum(content)}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str, prefix: str) -> Decision:
        """Read a record of the decision topic that `prefix` is the key of.

        Raises ProtocolError, which names `where`, for what is not a whole decision of a version known here, and for a
        decision that names a transactional id of another prefix or a value out of its range.
        """
        try:
            content: dict[str, Any] = json.loads(data)
            stated = content.pop("checksum")
            if content["version"] not in {_FIRST_DECISION_VERSION, _DECISION_VERSION}:
                raise ProtocolError(
                    f"{where}: the decision has version {content['version']!r:.100}, and only versions up to"
                    f" {_DECISION_VERSION} are known here. A newer release wrote it: use that release."
                )
            if stated != _checksum(content):
                raise ProtocolError(f"{where}: the checksum of the decision does not match its content.")
            if (state := content["state"]) not in {_DECIDED, _FINISHED}:
                raise ValueError(f"state {state!r:.100}")
            has_fingerprint = content["version"] >= _DECISION_VERSION
            return cls(
                _integer(content, "batch_id"),
                _text(content["query_id"]),
                _integer(content, "time_ms", _MOST_TIME_MS),
                _integer(content, "partitions"),
                _integer(content, "rows"),
                tuple(_task(each, prefix) for each in content["transactions"]),
                state == _FINISHED,
                content.get("accepted") is True,
                _fingerprint(content["fingerprint"]) if has_fingerprint else None,
                _text(content["topic"]) if has_fingerprint and content["topic"] is not None else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{where}: this is not a decision of {prefix!r}: {error!r:.300}.") from error


def is_task_id(prefix: str, transactional_id: str) -> bool:
    """Whether tasks of `prefix` write under this transactional id: `<prefix>/<partition>` or with `.<attempt>`."""
    return re.fullmatch(re.escape(prefix) + r"/\d+(\.\d+)?", transactional_id, re.ASCII) is not None


def _task(values: Any, prefix: str) -> TaskTransaction:
    name, producer_id, epoch, version, partition, rows = values
    if not is_task_id(prefix, _text(name)):
        raise ValueError(f"the transactional id {name!r:.100} is not one of its tasks")
    if version not in {1, 2}:
        raise ValueError(f"transaction version {version!r:.100}")
    checked = _in_range(producer_id), _in_range(epoch, _MOST_EPOCH), _in_range(version)
    return TaskTransaction(OpenTransaction(name, *checked), _in_range(partition), _in_range(rows))


def _integer(content: dict[str, Any], name: str, most: int = _MOST_ID) -> int:
    try:
        return _in_range(content[name], most)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _in_range(value: Any, most: int = _MOST_ID) -> int:
    if type(value) is not int or not 0 <= value <= most:  # a bool is an int to isinstance
        raise ValueError(f"{value!r:.100} is not a whole number from 0 to {most}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is not text")
    return value


def _fingerprint(value: Any) -> int:
    if re.fullmatch("[0-9a-f]{16}", _text(value)) is None:
        raise ValueError(f"fingerprint {value!r:.100}")
    return int(value, 16)


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


_FIRST_USE_VERSION: Final = 1
_SUFFIX: Final = b"\nborn"
"""No prefix ends like this: a transactional.id.prefix is printable."""


@dataclass(frozen=True, slots=True)
class Birth:
    """`time_ms` is the driver's time of day; `partitions` and `topic_id` are those of the decision topic then.
    `is_adopted`: an operator allowed the prefix to begin at any batch.
    """

    time_ms: int
    partitions: int
    replicas: int
    topic_id: str = ""
    is_adopted: bool = False

    def to_bytes(self) -> bytes:
        content = {"version": _FIRST_USE_VERSION, "state": "born", **asdict(self)}
        return json.dumps(content | {"checksum": _checksum(content)}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Birth:
        """Raises ProtocolError, naming `where`, for what is not a whole birth of a version known here."""
        try:
            content: dict[str, Any] = json.loads(data)
            stated = content.pop("checksum")
            if content["version"] != _FIRST_USE_VERSION:
                raise ProtocolError(
                    f"{where}: the birth record has version {content['version']!r:.100}, and this release knows only"
                    f" {_FIRST_USE_VERSION}. A newer release wrote it, and must read it."
                )
            if stated != _checksum(content):
                raise ProtocolError(f"{where}: the checksum of the birth record does not match its content.")
            time_ms, partitions, replicas = (content[name] for name in ("time_ms", "partitions", "replicas"))
            if not all(type(number) is int and 0 <= number < 2**63 for number in (time_ms, partitions, replicas)):
                raise ProtocolError(f"{where}: a number of the birth record is out of range.")
            return cls(time_ms, partitions, replicas, str(content["topic_id"]), content["is_adopted"] is True)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{where}: this is not a birth record: {type(error).__name__}.") from error


def birth_key(prefix: bytes) -> bytes:
    """The key of a prefix's birth record, which is in the partition of the prefix's decisions."""
    return prefix + _SUFFIX


def prefix_of(key: bytes) -> bytes | None:
    """The prefix whose birth record has this key; None for the key of a decision."""
    return key.removesuffix(_SUFFIX) if key.endswith(_SUFFIX) else None


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
        return cls(
            **fields | {"mandate": _mandate(fields["mandate"]), "written": written and _task_transaction(written)}
        )


def _mandate(fields: Mapping[str, Any]) -> Mandate:
    values = dict(fields)
    return Mandate(**values | {"driver": OpenTransaction(*values["driver"]), "place": TopicPartition(*values["place"])})


def _task_transaction(values: list[Any]) -> TaskTransaction:
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


def remember_begun(mandate: Mandate) -> None:
    """Keep the mandate for `begun_batch`. Without a local directory, or a usable one, nothing is kept."""
    path = _path(mandate.prefix)
    if path is None:
        return
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(mandate.to_json())
        new.replace(path)
    except OSError as error:
        log.warning("A batch of %s that is stopped stays open until its timeout: %s", mandate.prefix, error)


def begun_batch(prefix: str) -> Mandate | None:
    """The mandate that this application began last under the prefix, None where nothing is known.

    It may be that of a batch that was committed: `ExactlyOnceDriver.abort` ends nothing then.
    """
    path = _path(prefix)
    try:
        return None if path is None else Mandate.from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError):  # nothing was kept, or not by this release
        return None


def _path(prefix: str) -> Path | None:
    """In Spark's directory of this application, which Spark deletes when the application ends."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Path(folder) / f"spark-kafka-sink-{hashlib.sha256(prefix.encode()).hexdigest()}" if folder else None
