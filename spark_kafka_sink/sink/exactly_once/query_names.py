"""The names, or prefixes, under which a query has written exactly once; and the refusal of a name that it had before.

A name's decisions tell which batches the query has written under it, and not what it wrote under another name
meanwhile. So the decision topic has one more record for each query: its names, each with the batch at which the query
began under it. With that record the driver finds the decisions of the other name.

A query may have several names at one time, because each sink of a foreachBatch has its own. The driver's thread runs
this, once in each run of a query.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.sink.exactly_once.advice import name_of_query, operator_command
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, Decision, read_record, to_record

_VERSION: Final = 1
_SUFFIX: Final = b"\nnames"
"""No prefix ends like this: a transactional.id.prefix is printable."""
_NO_BATCH: Final = -1
_LOCKS: Final[dict[str, threading.Lock]] = {}
"""By query id. Held from reading a query's record to writing it, so by no more than one thread of this process."""


def names_key(query_id: str) -> bytes:
    """Return the key of a query's record."""
    return query_id.encode() + _SUFFIX


def is_names_key(key: bytes) -> bool:
    return key.endswith(_SUFFIX)


@dataclass(frozen=True, slots=True)
class QueryNames:
    """The prefixes of a query. `began`: prefix → the first batch under it, 0 if that was before this record."""

    began: Mapping[str, int]

    def to_bytes(self) -> bytes:
        return to_record({"version": _VERSION, "state": "names", "began": dict(self.began)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> QueryNames:
        """Raises ProtocolError, naming `where`, for data that is not a whole record of a known version."""
        return read_record(data, where, "record of a query's names", _VERSION, cls._of)

    @classmethod
    def _of(cls, content: dict[str, Any]) -> QueryNames:
        began = dict(content["began"])
        if not all(type(batch_id) is int and 0 <= batch_id < 2**63 for batch_id in began.values()):
            raise ValueError("a batch is out of range")
        return cls(began)


class NamesCluster(Protocol):
    """The requests of `check_name`. Each raises KafkaError."""

    def query_names(self, query_id: str) -> QueryNames: ...

    def write_query_names(self, query_id: str, names: QueryNames) -> None: ...

    def decision_of(self, prefix: str) -> Decision | None:
        """Return the newest committed decision under another prefix."""
        ...


class QueryBatch(NamedTuple):
    """A batch of a query. `topic` is the sink's option, None if the rows name their topics."""

    query_id: str
    batch_id: int
    topic: str | None


def check_name(
    cluster: NamesCluster, batch_start: BatchStart, batch: QueryBatch, is_of_this_run: Callable[[str], bool]
) -> bool:
    """Note the prefix among those of the query, before the first batch that a run of the query writes under it. Return
    whether it was noted: for a batch that is skipped it is not.

    Raises IllegalStateError if the query got another prefix after its last batch under this one, and has written this
    batch to the same topics under the other: it would be there twice. `is_of_this_run` tells of another prefix whether
    this run of the query writes under it too: then it is that of another sink of the same foreachBatch. Raises the
    errors of `BatchStart.is_written_already`, and KafkaError.

    After `adopt` a prefix without a decision counts as new from this batch on, and after `forget` even if the query has
    written the batch under another one.
    """
    if batch_start.is_written_already(batch.batch_id, batch.query_id):
        return False
    with _LOCKS.setdefault(batch.query_id, threading.Lock()):  # two sinks would each miss the other's name
        names = cluster.query_names(batch.query_id).began
        later = _later_names(batch_start, names)
        for other in later:
            if _is_the_same(cluster.decision_of(other), batch) and not is_of_this_run(other):
                raise _written_already(batch_start, batch, other)
        began = batch.batch_id if later else _beginning(batch_start, batch.batch_id, names.get(batch_start.prefix))
        ended = _ended_names(cluster, batch_start, batch, names, is_of_this_run)
        if names.get(batch_start.prefix) != began or ended:
            # No sink of this run comes back to an earlier name, also if it had no rows since its last decision.
            beside = {other: max(first, began) for other, first in names.items() if is_of_this_run(other)}
            kept = {other: first for other, first in names.items() if other not in ended}
            cluster.write_query_names(batch.query_id, QueryNames({**kept, **beside, batch_start.prefix: began}))
    return True


def _ended_names(
    cluster: NamesCluster,
    batch_start: BatchStart,
    batch: QueryBatch,
    names: Mapping[str, int],
    is_of_this_run: Callable[[str], bool],
) -> list[str]:
    """Return the names under which an earlier run began with this batch and has not written it. They are taken out of
    the record: else it would seem that the query began under both at the same batch, as two sinks of a foreachBatch do,
    and what it now writes would not count under the other name.
    """
    return [
        other
        for other, first in names.items()
        if first == batch.batch_id
        and other != batch_start.prefix
        and not is_of_this_run(other)
        and not _has(cluster.decision_of(other), batch)
    ]


def _is_the_same(decided: Decision | None, batch: QueryBatch) -> bool:
    """Return whether the decision, or one before it, is on the same rows. A sink of another topic has others."""
    if decided is None or not _has(decided, batch):
        return False
    return None in {decided.topic, batch.topic} or decided.topic == batch.topic


def _has(decided: Decision | None, batch: QueryBatch) -> bool:
    return decided is not None and decided.query_id == batch.query_id and decided.batch_id >= batch.batch_id


def _later_names(batch_start: BatchStart, names: Mapping[str, int]) -> list[str]:
    """Return the names under which the query began after its last batch under this one: all others for a prefix that an
    operator has adopted since. Under a name with which it began at the same batch or earlier, another sink may write.
    """
    if _begins_anew(batch_start):
        return [] if batch_start.is_free else [other for other in names if other != batch_start.prefix]
    last = _NO_BATCH if batch_start.last_batch_id is None else batch_start.last_batch_id
    known = max(last, names.get(batch_start.prefix, _NO_BATCH))
    return [other for other, began in names.items() if began > known]


def _beginning(batch_start: BatchStart, batch_id: int, noted: int | None) -> int:
    if noted is None and batch_start.last_batch_id is not None:
        return 0  # an earlier release did not note it
    return batch_id if noted is None or _begins_anew(batch_start) else noted


def _begins_anew(batch_start: BatchStart) -> bool:
    return batch_start.last_batch_id is None and batch_start.is_adopted


def _written_already(batch_start: BatchStart, batch: QueryBatch, other: str) -> IllegalStateError:
    prefix = batch_start.prefix
    return IllegalStateError(
        f"Batch {batch.batch_id} of {name_of_query(batch.query_id)} was written under"
        f" transactional.id.prefix={other!r}, and under {prefix!r} it would be written twice. Start the query under"
        f" {other!r} again, stop it between two batches, and change the prefix then. Or look whether the topics of this"
        " sink have rows of this batch, and if not, let it begin here:"
        f" {operator_command('forget', prefix, batch_start.place.topic)}"
    )
