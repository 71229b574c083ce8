"""The record of a decision: which transactions make up a batch, so that whoever reads it can finish the batch.

One record in the decision topic for each prefix, the newest counts: `decided` while the transactions may still be
open, `finished` once all are committed. Versioned JSON with a checksum. Plain values.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from spark_kafka_sink.client.transaction_values import OpenTransaction
from spark_kafka_sink.common.errors import KafkaError, ProtocolError

_VERSION: Final = 1
_DECIDED, _FINISHED = "decided", "finished"


class TransactionLostError(KafkaError):
    """Rows of a decided batch are gone. Names batch, partitions and rows."""

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
    """

    batch_id: int
    query_id: str
    time_ms: int
    partitions: int
    rows: int
    tasks: tuple[TaskTransaction, ...]
    is_finished: bool = False
    is_accepted: bool = False

    def finished(self) -> Decision:
        return replace(self, tasks=(), is_finished=True)

    @property
    def transactions(self) -> list[OpenTransaction]:
        return [task.transaction for task in self.tasks]

    def to_bytes(self) -> bytes:
        content: dict[str, Any] = {
            "version": _VERSION,
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
        return json.dumps(content | {"checksum": _checksum(content)}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Decision:
        """Raises ProtocolError, naming `where`, for what is not a whole decision of a version known here."""
        try:
            content: dict[str, Any] = json.loads(data)
            stated = content.pop("checksum")
            if content["version"] != _VERSION:
                raise ProtocolError(
                    f"{where}: the decision has version {content['version']}, and only {_VERSION} is known here: it was"
                    " written by a newer release, which should read it."
                )
            if stated != _checksum(content):
                raise ProtocolError(f"{where}: the checksum of the decision does not match its content.")
            return cls(
                int(content["batch_id"]),
                str(content["query_id"]),
                int(content["time_ms"]),
                int(content["partitions"]),
                int(content["rows"]),
                tuple(
                    TaskTransaction(OpenTransaction(str(name), pid, epoch, version), partition, rows)
                    for name, pid, epoch, version, partition, rows in content["transactions"]
                ),
                content["state"] == _FINISHED,
                content.get("accepted") is True,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{where}: this is not a decision: {error!r}.") from error


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
