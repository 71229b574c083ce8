"""The record of a decision: which transactions make up a batch, so that whoever reads it can finish the batch.

One record in the decision topic for each prefix, the newest counts: `decided` while the transactions may still be
open, `finished` once all are committed. Versioned JSON with a checksum, which finds damage and is no signature. Plain
values.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from spark_kafka_sink.client.transaction_values import OpenTransaction
from spark_kafka_sink.common.errors import KafkaError, ProtocolError

_WITHOUT_FINGERPRINT: Final = 1
_VERSION: Final = 2
_DECIDED, _FINISHED = "decided", "finished"
_STATES: Final = (_DECIDED, _FINISHED)
_MOST: Final = 2**63 - 1
_MOST_TIME_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999."""
_MOST_EPOCH: Final = 2**15 - 1


class TransactionLostError(KafkaError):
    """Rows of a decided batch are gone. Names batch, partitions and rows."""

    fatal = True


class BatchChangedError(KafkaError):
    """A batch was committed before, and has other rows or another topic now. Nothing was written, nothing skipped."""

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
    """`query_id` is empty for a batch write. `partitions` and `rows` are those of the whole batch; `tasks` has those
    with rows, and none once `is_finished`. `time_ms` is the driver's time of day. `is_accepted`: an operator called it
    finished, though not all of `rows` are known to be committed.

    `fingerprint` is that of all rows (record/fingerprint.py), None in a decision of version 1, which knows no `topic`
    either. `topic` is the option, None where topics come from a column. `takes_any_rows`: an operator said that the
    batch is to be skipped when it comes again, whatever its rows are then.
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
    takes_any_rows: bool = False

    def finished(self) -> Decision:
        return replace(self, tasks=(), is_finished=True)

    @property
    def transactions(self) -> list[OpenTransaction]:
        return [task.transaction for task in self.tasks]

    def to_bytes(self) -> bytes:
        content: dict[str, Any] = {
            "version": _WITHOUT_FINGERPRINT if self.fingerprint is None else _VERSION,
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
            content |= {"fingerprint": self.fingerprint, "topic": self.topic}
        if self.takes_any_rows:
            content["any_rows"] = True
        return json.dumps(content | {"checksum": _checksum(content)}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Decision:
        """Raises ProtocolError, naming `where`, for what is not a whole decision of a version known here."""
        try:
            content: dict[str, Any] = json.loads(data)
            stated = content.pop("checksum")
            version = _number(content, "version", _MOST)
            if version not in (_WITHOUT_FINGERPRINT, _VERSION):
                raise ProtocolError(
                    f"{where}: the decision has version {version}, and only {_VERSION} and older ones are known here: a"
                    " newer release wrote it, and must read it."
                )
            if stated != _checksum(content):
                raise ProtocolError(f"{where}: the checksum of the decision does not match its content.")
            return cls._of(content, has_fingerprint=version == _VERSION)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{where}: this is not a decision: {error!r}.") from error

    @classmethod
    def _of(cls, content: dict[str, Any], *, has_fingerprint: bool) -> Decision:
        """Raises ValueError, KeyError or TypeError for a field of another type or out of its range."""
        if (state := content["state"]) not in _STATES:
            raise ValueError(f"state {state!r}")
        topic = content["topic"] if has_fingerprint else None
        return cls(
            _number(content, "batch_id", _MOST),
            _text("query_id", content["query_id"]),
            _number(content, "time_ms", _MOST_TIME_MS),
            _number(content, "partitions", _MOST),
            _number(content, "rows", _MOST),
            tuple(_task(*each) for each in content["transactions"]),
            state == _FINISHED,
            content.get("accepted") is True,
            _number(content, "fingerprint", 2**64 - 1) if has_fingerprint else None,
            None if topic is None else _text("topic", topic),
            content.get("any_rows") is True,
        )


def _task(name: Any, producer_id: Any, epoch: Any, version: Any, partition: Any, rows: Any) -> TaskTransaction:
    fields = {"producer_id": producer_id, "epoch": epoch, "version": version, "partition": partition, "rows": rows}
    if version not in (1, 2):
        raise ValueError(f"transaction version {version!r}")
    most = {"epoch": _MOST_EPOCH}
    numbers = {field: _number(fields, field, most.get(field, _MOST)) for field in fields}
    return TaskTransaction(
        OpenTransaction(_text("transactional id", name), numbers["producer_id"], numbers["epoch"], numbers["version"]),
        numbers["partition"],
        numbers["rows"],
    )


def _number(content: dict[str, Any], field: str, most: int) -> int:
    value = content[field]
    if type(value) is not int:  # a bool is one too
        raise TypeError(f"{field} {value!r}")
    if not 0 <= value <= most:
        raise ValueError(f"{field} {value}")
    return value


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field} {value!r}")
    return value


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
