"""The record of a decision: which transactions make up a batch, so that whoever reads it can finish the batch.

One record in the decision topic for each prefix, the newest counts: `decided` while the transactions may still be
open, `finished` once all are committed. Versioned JSON with a checksum, which finds damage and is no signature: whoever
may write to the decision topic is trusted with every prefix in it. What a record says is checked all the same before
anything is done in its name. Plain values.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from spark_kafka_sink.common.errors import KafkaError, ProtocolError
from spark_kafka_sink.common.open_transaction import OpenTransaction

_VERSION: Final = 2
_FIRST_VERSION: Final = 1
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
        return marker_text(self.transaction, self.rows)


def marker_text(transaction: OpenTransaction, rows: int) -> str:
    return f"producer_id={transaction.producer_id} epoch={transaction.producer_epoch} rows={rows}"


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
            "version": _FIRST_VERSION if self.fingerprint is None else _VERSION,
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
            if content["version"] not in {_FIRST_VERSION, _VERSION}:
                raise ProtocolError(
                    f"{where}: the decision has version {content['version']!r:.100}, and only versions up to {_VERSION}"
                    " are known here. A newer release wrote it: use that release."
                )
            if stated != _checksum(content):
                raise ProtocolError(f"{where}: the checksum of the decision does not match its content.")
            if (state := content["state"]) not in {_DECIDED, _FINISHED}:
                raise ValueError(f"state {state!r:.100}")
            has_fingerprint = content["version"] >= _VERSION
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
