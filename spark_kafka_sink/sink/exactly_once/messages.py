"""What the driver and the tasks of an exactly-once batch send one another, and the records of the decision topic.

The decision topic has one record of decisions for each prefix, and the newest one counts: `decided` while transactions
may still be open, `finished` once all are committed. A second record, under its own key, says that the topic has
known the prefix since its first driver began, and where the prefix was moved. Both are versioned JSON with a checksum,
which finds damage and is no signature: every client that may write to the decision topic is trusted with every prefix
in it. What a record says is still checked before anything is done because of it.

Plain values that pickle; JSON where they travel as a column or as a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError, ProtocolError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.record.fingerprint import MODULUS
from spark_kafka_sink.sink.exactly_once.advice import changed_batch, name_of_query, operator_command, topic_in_words

log = logging.getLogger(__name__)

Record = TypeVar("Record")

_FIRST_VERSION: Final = 1
"""Its decisions have neither the fingerprint of the rows nor the topic."""
_DECISION_VERSION: Final = 2
_DECIDED, _FINISHED = "decided", "finished"

_MOST_ID: Final = 2**63 - 1
_MOST_EPOCH: Final = 2**15 - 1
_MOST_TIME_MS: Final = 253_402_300_799_999
"""The end of the year 9999, the last year of Python's dates."""


class TransactionLostError(KafkaError):
    """Rows of a decided batch are lost. Names the batch, the partitions and the number of rows."""

    fatal = True


class BatchChangedError(KafkaError):
    """A batch was decided before, and comes again with other rows or for another topic. Nothing of it is written."""

    fatal = True


class TaskTransaction(NamedTuple):
    """The transaction that one task left open, with the rows of its partition."""

    transaction: OpenTransaction
    partition: int
    rows: int

    @property
    def marker_text(self) -> str:
        """The text of its marker. No other transaction has the same one."""
        own = self.transaction
        return f"producer_id={own.producer_id} epoch={own.producer_epoch} rows={self.rows}"


def is_marker_text(text: str) -> bool:
    """Return whether this may be a `TaskTransaction.marker_text`."""
    return re.fullmatch(r"producer_id=\d+ epoch=\d+ rows=\d+", text, re.ASCII) is not None


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one batch.

    `query_id` is empty for a batch write. `partitions` and `rows` are those of the whole batch; `tasks` has those with
    rows, and none once `is_finished`. `time_ms` is the driver's time of day. `is_accepted`: an operator closed the
    batch, even if rows of it are not in Kafka. `fingerprint` is that of all rows (record/fingerprint.py), None in a
    record of version 1; `topic` is the sink's option `topic`, None if the rows name their topics or the version is 1.
    `ends` has, for each partition, the offset after the batch's last record. It has no partition where a broker did not
    return offsets. It is empty once `is_finished`, and in decisions that an earlier release wrote. `topic_id` is that
    of the decision topic into which the record was written, empty if it is not known. A copy of the topic has another.
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
    ends: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_id: str = ""

    def finished(self) -> Decision:
        return replace(self, tasks=(), ends={}, is_finished=True)

    @property
    def transactions(self) -> list[OpenTransaction]:
        return [task.transaction for task in self.tasks]

    def to_bytes(self) -> bytes:
        content: dict[str, Any] = {
            "version": _FIRST_VERSION if self.fingerprint is None else _DECISION_VERSION,
            "state": _FINISHED if self.is_finished else _DECIDED,
            "batch_id": self.batch_id,
            "query_id": self.query_id,
            "time_ms": self.time_ms,
            "partitions": self.partitions,
            "rows": self.rows,
            "transactions": [[*task.transaction, task.partition, task.rows] for task in self.tasks],
        }
        if self.ends:
            content["ends"] = _by_topic((*place, end) for place, end in self.ends.items())
        if self.is_accepted:
            content["accepted"] = True
        if self.topic_id:
            content["topic_id"] = self.topic_id
        if self.fingerprint is not None:
            # as text: readers of JSON may read a 64-bit number as a float
            content |= {"fingerprint": f"{self.fingerprint:016x}", "topic": self.topic}
        return to_record(content)

    @classmethod
    def from_bytes(cls, data: bytes, where: str, prefix: str) -> Decision:
        """Read a record of the decision topic that `prefix` is the key of.

        Raises ProtocolError, which names `where`, for data that is not a whole decision of a known version, and for a
        decision with a transactional id of another prefix or a value out of range.
        """
        return read_record(data, where, f"decision of {prefix!r}", _DECISION_VERSION, partial(_decision, prefix=prefix))


def _decision(content: dict[str, Any], prefix: str) -> Decision:
    if (state := content["state"]) not in {_DECIDED, _FINISHED}:
        raise ValueError(f"state {state!r:.100}")
    has_fingerprint = content["version"] >= _DECISION_VERSION
    return Decision(
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
        {
            TopicPartition(_text(topic), _in_range(partition)): _in_range(end)
            for topic, ends in content.get("ends", {}).items()
            for partition, end in ends
        },
        _text(content.get("topic_id", "")),
    )


def _by_topic(numbers: Iterable[tuple[Any, ...]]) -> dict[str, list[list[int]]]:
    """Return numbers of partitions, each after its topic, as JSON has them: the other numbers by topic."""
    found: dict[str, list[list[int]]] = {}
    for topic, *others in numbers:
        found.setdefault(topic, []).append(others)
    return found


def is_task_id(prefix: str, transactional_id: str) -> bool:
    """Return whether tasks of `prefix` write under this id: `<prefix>/<partition>` or with `.<attempt>`."""
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


def to_record(content: dict[str, Any]) -> bytes:
    """Return a record of the decision topic: its content as JSON, with a checksum."""
    return json.dumps(content | {"checksum": _checksum(content)}, separators=(",", ":")).encode()


def read_record(data: bytes, where: str, what: str, newest: int, make: Callable[[dict[str, Any]], Record]) -> Record:
    """Return what `make` makes of the content of a record of the decision topic. `make` may raise the errors that
    Python raises for JSON of another form.

    Raises ProtocolError, which names `where` and says `what` the record should be, for data that is damaged, of another
    form, or of a version that is later than `newest`.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        stated = content.pop("checksum")
        version = content["version"]
        if type(version) is not int or not _FIRST_VERSION <= version <= newest:
            raise ProtocolError(
                f"{where}: the {what} has version {version!r:.100}, and only versions up to {newest} are known here. A"
                " newer release wrote it: use that release."
            )
        if stated != _checksum(content):
            raise ProtocolError(f"{where}: the checksum of the {what} does not match its content.")
        return make(content)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{where}: this is not a {what}: {error!r:.300}.") from error


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


_SUFFIX: Final = b"\nborn"
"""No prefix ends like this: a transactional.id.prefix is printable."""


@dataclass(frozen=True, slots=True)
class FirstUse:
    """`time_ms` is the driver's time of day; `partitions` and `topic_id` are those of the decision topic then.
    `is_adopted`: an operator allowed the prefix to begin at any batch that the query has not written under another one.
    `is_free`: also at such a batch. `moved_to`: the decision topic in which an operator adopted the prefix after its
    decisions were in this one. Empty if this is its topic.
    """

    time_ms: int
    partitions: int
    replicas: int
    topic_id: str = ""
    is_adopted: bool = False
    moved_to: str = ""
    is_free: bool = False

    def to_bytes(self) -> bytes:
        return to_record({"version": _FIRST_VERSION, "state": "born", **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> FirstUse:
        """Raises ProtocolError, naming `where`, for data that is not a whole first-use record of a known version."""
        return read_record(data, where, "first-use record", _FIRST_VERSION, cls._of)

    @classmethod
    def _of(cls, content: dict[str, Any]) -> FirstUse:
        return cls(
            _integer(content, "time_ms"),
            _integer(content, "partitions"),
            _integer(content, "replicas"),
            _text(content["topic_id"]),
            content["is_adopted"] is True,
            _text(content.get("moved_to", "")),
            content.get("is_free") is True,
        )


def first_use_key(prefix: bytes) -> bytes:
    """Return the key of a prefix's first-use record, which is in the partition of the prefix's decisions."""
    return prefix + _SUFFIX


def prefix_of(key: bytes) -> bytes | None:
    """Return the prefix whose first-use record has this key; None for the key of a decision."""
    return key.removesuffix(_SUFFIX) if key.endswith(_SUFFIX) else None


@dataclass(frozen=True, slots=True)
class BatchStart:
    """The start of one batch, from its driver to its tasks: the driver is the only current one of the prefix.

    `driver` is the transaction in which the driver will decide, `place` the partition of the decision topic.
    `last_batch_id` is the last batch decided under the prefix, None if none exists, and `last_query_id` is its query,
    empty for a batch write. The other `last_` fields are those of that batch's `Decision`. `is_adopted` and `is_free`
    are those of `FirstUse`, for a prefix without a decision.
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
    is_free: bool = False

    @classmethod
    def after(
        cls,
        last: Decision | None,
        prefix: str,
        driver: OpenTransaction,
        place: TopicPartition,
        *,
        is_adopted: bool,
        is_free: bool = False,
    ) -> BatchStart:
        if last is None:
            return cls(prefix, driver, place, is_adopted=is_adopted, is_free=is_free)
        last_batch = (last.batch_id, last.query_id, last.rows, last.fingerprint, last.topic, last.is_accepted)
        return cls(prefix, driver, place, *last_batch, is_adopted, is_free)

    def needs_trace(self, query_id: str) -> bool:
        """Return whether a batch without rows must be decided too. The first batch of a query must be: without a
        decision, its later batches would look like those of a query that has lost its decisions.
        """
        return bool(query_id) and self.last_batch_id is None

    @property
    def next_batch_id(self) -> int:
        """The batch id of a batch write, to which Spark gives no number."""
        return 0 if self.last_batch_id is None else self.last_batch_id + 1

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BatchStart:
        return _batch_start(json.loads(text))

    def is_written_already(self, batch_id: int, query_id: str) -> bool:
        """Return whether the batch is the last decided one. Then its rows must not be written again, even if they come
        in other partitions.

        Raises IllegalStateError if the batch may have been written before: it has an earlier batch id, is of another
        query, or is a later batch of a query without a decision.
        """
        if self.last_batch_id is None:
            if query_id and batch_id > 0 and not self.is_adopted:
                raise self._no_decision(batch_id, query_id)
            return False
        if query_id != self.last_query_id:
            raise IllegalStateError(
                f"transactional.id.prefix={self.prefix!r} belongs to {name_of_query(self.last_query_id)}, whose batch"
                f" {self.last_batch_id} was the last one written under it, and this is {name_of_query(query_id)}:"
                " give every query and every sink its own transactional.id.prefix. If the other query was deleted with"
                f" its checkpoint: {operator_command('forget', self.prefix, self.place.topic)}."
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
            " another cluster; or its decisions are lost; or its function of foreachBatch did not call write_batch for"
            " batch 0 (if df.isEmpty(): return), which it must, also without rows. If this batch was written before and"
            " Spark did not log it, it would be written twice. Go back to what the query had; or look whether the"
            " topics that it writes have rows of this batch, and if not, let it begin here:"
            f" {operator_command('adopt', self.prefix, self.place.topic)}"
        )


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The report of a task to the driver. `written` is None if the task left nothing open: the batch was written
    already (`was_skipped`), or there were no rows.
    """

    batch_start: BatchStart
    batch_id: int
    query_id: str
    partition: int
    rows: int
    written: TaskTransaction | None
    was_skipped: bool = False
    fingerprint: int = 0
    """That of the task's rows, also if they were not written."""
    offsets: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """By topic, a list for each partition of the task's records: the partition, the first offset, the offset after the
    last one, and the number of records with an offset. Partitions where a broker did not return offsets are left out.
    These are lists, which JSON can hold, because 200 tasks may write 200 partitions each.
    """

    def to_json(self) -> str:
        return json.dumps(asdict(replace(self, offsets={})) | {"offsets": self.offsets}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TaskOutcome:
        fields = json.loads(text)
        written = fields["written"]
        return cls(
            **fields
            | {
                "batch_start": _batch_start(fields["batch_start"]),
                "written": written and _task_transaction(written),
            }
        )


def _batch_start(fields: Mapping[str, Any]) -> BatchStart:
    values = dict(fields)
    return BatchStart(
        **values | {"driver": OpenTransaction(*values["driver"]), "place": TopicPartition(*values["place"])}
    )


def _task_transaction(values: list[Any]) -> TaskTransaction:
    transaction, partition, rows = values
    return TaskTransaction(OpenTransaction(*transaction), partition, rows)


class PartitionOffsets(NamedTuple):
    """What the tasks of a batch have written to a partition."""

    first: int
    end: int
    """The offset after the last one."""
    records: int
    """Those with a known offset."""


def all_offsets(outcomes: Iterable[TaskOutcome]) -> dict[TopicPartition, PartitionOffsets]:
    """Return the offsets of all tasks together."""
    found: dict[tuple[str, int], tuple[int, int, int]] = {}
    for outcome in outcomes:
        for topic, ranges in outcome.offsets.items():
            for partition, first, end, records in ranges:
                known_first, known_end, known = found.get((topic, partition), (first, end, 0))
                found[topic, partition] = (
                    first if first < known_first else known_first,
                    end if end > known_end else known_end,
                    records + known,
                )
    return {TopicPartition(*place): PartitionOffsets(*offsets) for place, offsets in found.items()}


def driver_id(prefix: str) -> str:
    return f"{prefix}/driver"


def task_id(prefix: str, partition: int, attempt: int) -> str:
    """Return the transactional id of an attempt. A second attempt has another id, so that it cannot fence a finished
    first one.
    """
    return f"{prefix}/{partition}" if attempt == 0 else f"{prefix}/{partition}.{attempt}"


def check_agreement(outcomes: Sequence[TaskOutcome]) -> None:
    """Raise IllegalStateError if the tasks are not those of one batch."""
    for what in ("batch_id", "query_id", "batch_start", "was_skipped"):
        if len(found := {getattr(outcome, what) for outcome in outcomes}) > 1:
            raise IllegalStateError(f"The tasks do not agree on {what}: {found}. The batch must run again.")
    partitions = [outcome.partition for outcome in outcomes]
    if len(set(partitions)) < len(partitions):
        raise IllegalStateError(f"Two tasks wrote one partition: {sorted(partitions)}. The batch must run again.")


def skipped_records(outcomes: Sequence[TaskOutcome]) -> int | None:
    """Return the rows of a batch that is skipped; None if it is not skipped."""
    if not any(outcome.was_skipped for outcome in outcomes):
        return None
    return sum(outcome.rows for outcome in outcomes)


def check_same_batch(outcomes: Sequence[TaskOutcome], topic: str | None) -> None:
    """Compare a batch that is to be skipped with the one that was decided under its number; `topic` is the sink's
    option.

    Raises BatchChangedError if the rows, their number or the topic differ: then this is another batch, and skipping it
    would lose its rows. A decision of version 1 has only the number of rows. A batch that an operator accepted is
    skipped whatever its rows are.
    """
    batch_start, rows = outcomes[0].batch_start, sum(outcome.rows for outcome in outcomes)
    if batch_start.last_is_accepted:
        return
    has_fingerprint = batch_start.last_fingerprint is not None
    found = sum(outcome.fingerprint for outcome in outcomes) % MODULUS
    if has_fingerprint and topic != batch_start.last_topic:
        what = f"for {topic_in_words(batch_start.last_topic)}, and now it comes for {topic_in_words(topic)}"
    elif rows != batch_start.last_rows:
        what = f"with {batch_start.last_rows} rows, and now it comes with {rows}"
    elif has_fingerprint and found != batch_start.last_fingerprint:
        what = f"with {batch_start.last_rows} rows, and now it comes with as many rows, but their content differs"
    else:
        return
    assert batch_start.last_batch_id is not None
    raise BatchChangedError(changed_batch(batch_start.prefix, batch_start.place.topic, batch_start.last_batch_id, what))


def remember_start(batch_start: BatchStart) -> None:
    """Keep the batch start for `remembered_start`. Without a usable local directory nothing is kept.

    Spark aborts a stream's batch on a new writer in another process. If no task has finished, Spark hands that writer
    nothing of the driver's. Both processes have the application's local directory.
    """
    path = _path(batch_start.prefix)
    if path is None:
        return
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(batch_start.to_json())
        new.replace(path)
    except OSError as error:
        log.warning("A batch of %s that is stopped stays open until its timeout: %s", batch_start.prefix, error)


def remembered_start(prefix: str) -> BatchStart | None:
    """Return the batch start that this application began last under the prefix, None if nothing is known.

    Its batch may be committed already: then `ExactlyOnceDriver.abort` ends nothing.
    """
    path = _path(prefix)
    try:
        return None if path is None else BatchStart.from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError):  # nothing was kept, or not by this release
        return None


def _path(prefix: str) -> Path | None:
    """Return a file in Spark's directory of this application. Spark deletes it when the application ends."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Path(folder) / f"spark-kafka-sink-{hashlib.sha256(prefix.encode()).hexdigest()}" if folder else None
