"""A batch of records for one partition, from its first append to its acknowledgement.

Records come row by row (`append_row`), or as runs of an encoded block (`reserve_run`, then `fill_run`). Room is
reserved under the lock of the accumulator; encoding runs outside it. So the bytes of a run may come after those of the
next run, and each run has its place. A batch can be drained if no place is empty. Until then the lock of the
accumulator guards it; afterwards the Sender thread owns it.

`split_batch` cuts a batch that is too large for the broker. `BatchSizes` estimates the size after compression.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.buffer_pool import BufferPool, Grant, SharedAllocation
from spark_kafka_sink.producer.futures import BatchResult, Harmless, Headers, RecordThunk, RunCallback, RunThunk, Thunk
from spark_kafka_sink.record.batch import HEADER_SIZE, NO_SEQUENCE, SealedBatch, increment_sequence, seal
from spark_kafka_sink.record.codecs import Codec
from spark_kafka_sink.record.decoder import BatchLimits, DecodedRecord, decode_batches
from spark_kafka_sink.record.encoder import EncodedRun, encode_rows, record_size_upper_bound

if TYPE_CHECKING:
    from _typeshed import SizedBuffer


class RowRun:
    """Rows of `send`, as columns until they are encoded together. Guarded like their batch.

    `place`: the index of its bytes among the chunks of the batch. `base_offset_delta`: the records before it in the
    batch.
    """

    __slots__ = ("base_offset_delta", "headers", "keys", "place", "timestamps_ms", "values")

    def __init__(self, place: int, base_offset_delta: int) -> None:
        self.place = place
        self.base_offset_delta = base_offset_delta
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self.headers: list[Headers] = []
        self.timestamps_ms: list[int] = []

    def cut(self, end: int) -> None:
        """Keep the rows before record number `end` of the batch."""
        rows = end - self.base_offset_delta
        for column in (self.keys, self.values, self.headers, self.timestamps_ms):
            del column[rows:]

    def encode(self, base_timestamp_ms: int) -> EncodedRun:
        """Encode the rows for a batch with this base timestamp.

        Raises SerializationError for a row that does not fit.
        """
        return encode_rows(
            self.keys, self.values, self.headers, self.timestamps_ms, self.base_offset_delta, base_timestamp_ms
        )


class ProducerBatch:
    """A batch of `batch_size` bytes of records before compression, or of one larger record."""

    # A topic of hundreds of partitions makes many batches of few runs: attributes in slots are cheaper.
    __slots__ = (
        "_allocations", "_batch_size", "_chunks", "_empty_places", "_open_row_run", "_own", "_row_runs", "_sealed",
        "_sealed_stale", "_unfilled", "attempts", "base_sequence", "base_timestamp_ms", "created_ms", "drained_ms",
        "is_done", "is_in_flight", "is_open", "is_overtaken", "is_transactional", "largest_record", "last_attempt_ms",
        "last_error", "leader_epoch", "leader_epoch_at_last_attempt", "max_timestamp_ms", "may_be_in_log", "ordinal",
        "producer_epoch", "producer_id", "record_count", "result", "retry_at_ms", "sequence_has_been_reset", "size",
        "split_parts", "thunks", "topic_partition", "was_sent_in_larger",
    )  # fmt: skip

    def __init__(
        self, topic_partition: TopicPartition, base_timestamp_ms: int, batch_size: int, created_ms: int
    ) -> None:
        self.topic_partition = topic_partition
        self.created_ms = created_ms
        self.record_count = 0
        self.base_timestamp_ms = base_timestamp_ms
        self.max_timestamp_ms = base_timestamp_ms
        self.size = HEADER_SIZE
        """Bytes before compression: an upper bound until the batch is sealed."""
        self.largest_record = 0
        """An upper bound of the bytes of the largest record, known when the batch is sealed."""
        self.is_open = True
        self.result = BatchResult(topic_partition)
        self.is_done = False

        self.attempts = 0
        self.last_attempt_ms = created_ms
        self.retry_at_ms = created_ms
        self.drained_ms = created_ms
        self.last_error: KafkaError | None = None
        """Why the last attempt failed."""
        self.leader_epoch: int | None = None
        self.leader_epoch_at_last_attempt: int | None = None
        self.is_in_flight = False

        self.producer_id = -1
        self.producer_epoch = -1
        self.base_sequence = NO_SEQUENCE
        self.is_transactional = False
        self.sequence_has_been_reset = False
        """The batch has a new number and was not sent since, or is the first of its epoch since.

        So a gap before it is not a new one.
        """
        self.ordinal: tuple[int, ...] = ()
        """The place in the order of first sends of the partition. Unlike sequences, it does not wrap.

        The parts of a split batch extend its ordinal.
        """
        self.may_be_in_log = self.was_sent_in_larger = self.is_overtaken = False
        """Whether an earlier attempt may be in the log; whether that attempt was part of a larger batch, so that no
        leader recognizes this one as a duplicate; and whether a later batch may be in another log, because the topic
        was made again, so that its acknowledgement says nothing about this batch.
        """

        self.thunks: list[Thunk] = []
        self.split_parts: list[ProducerBatch] = []
        """The batches that replaced this one after a split."""
        self._batch_size = batch_size
        self._chunks: list[SizedBuffer | None] = []
        self._empty_places = 0
        self._unfilled: dict[int, RunThunk] = {}
        self._row_runs: list[RowRun] = []
        self._open_row_run: RowRun | None = None
        self._allocations: list[SharedAllocation] = []
        self._own = Grant()
        """Memory of rows, or of the compressed batch."""
        self._sealed: SealedBatch | None = None
        self._sealed_stale = False

    def __repr__(self) -> str:
        state = "done" if self.is_done else "open" if self.is_open else "closed"
        return (
            f"ProducerBatch({self.topic_partition}, {self.record_count} records, {self.size} bytes,"
            f" attempts {self.attempts}, {state})"
        )

    # ---- filling: under the accumulator's lock ---------------------------------------------------------------------

    @property
    def room(self) -> int:
        """The bytes that still fit."""
        return self._batch_size - self.size if self.is_open else 0

    def has_room_for(self, size: int) -> bool:
        return self.is_open and (self.record_count == 0 or self.size + size <= self._batch_size)

    def append_row(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int,
        size: int,
        thunk: RecordThunk | None,
        grant: Grant | None = None,
    ) -> None:
        """Append one record of at most `size` encoded bytes, with its memory in `grant`.

        Ctrl-C may come between any two of these lines. The record is in the batch when it is counted, in one last
        statement. `forget_uncounted` removes what was added of a record that is not counted.
        """
        run = self._open_row_run
        if run is None:
            run = RowRun(len(self._chunks), self.record_count)
            self._row_runs.append(run)
            self._chunks.append(None)
            self._open_row_run = run
        run.keys.append(key)
        run.values.append(value)
        run.headers.append(headers)
        run.timestamps_ms.append(timestamp_ms)
        if thunk is not None:
            thunk.bind(self.result, self.record_count)
            self.thunks.append(thunk)
        if timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = timestamp_ms
        rows, new_size = self.record_count + 1, self.size + size
        if grant is None:  # a part of a split batch shares its memory
            self.record_count, self.size = rows, new_size
            return
        own = self._own.size + grant.size
        self.record_count, self.size, self._own.size, grant.size = rows, new_size, own, 0

    def forget_uncounted(self) -> None:
        """Remove what was added of a row whose append ended early."""
        self._open_row_run = None
        while self._row_runs and self._row_runs[-1].base_offset_delta >= self.record_count:
            self._row_runs.pop()  # its place stays empty
        if self._row_runs:
            self._row_runs[-1].cut(self.record_count)
        while self.thunks and self.thunks[-1].first >= self.record_count:
            self.thunks.pop()

    def reserve_run(
        self, record_count: int, size: int, allocation: SharedAllocation, on_completion: RunCallback | None
    ) -> int:
        """Reserve room for a run, and a share of its memory. Return its place, for `fill_run`.

        If the run right before has the same callback, one call covers both. Ctrl-C may come between any two of these
        lines: a batch that waits for bytes must hold the allocation by which `lacks_bytes_of` finds it.
        """
        self._open_row_run = None
        chunks, first = self._chunks, self.record_count
        place = len(chunks)
        self._allocations.append(allocation)
        allocation.hold(self)
        self._empty_places += 1
        chunks.append(None)
        if on_completion is not None:
            last = self.thunks[-1] if self.thunks else None
            if not (isinstance(last, RunThunk) and last.extend(on_completion, first, record_count, size)):
                last = RunThunk(on_completion, record_count, size)
                last.bind(self.result, first)
                self.thunks.append(last)
            self._unfilled[place] = last
        self.record_count = first + record_count
        self.size += size
        return place

    def fill_run(
        self, place: int, chunk: SizedBuffer, max_timestamp_ms: int, largest_record: int, reserved_size: int
    ) -> None:
        """Put the bytes of the run into its place. `size` and the size for its callback become exact."""
        self._chunks[place] = chunk
        change = len(chunk) - reserved_size
        self.size += change
        if (thunk := self._unfilled.pop(place, None)) is not None:
            thunk.serialized_size += change
        if largest_record > self.largest_record:
            self.largest_record = largest_record
        if max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = max_timestamp_ms
        self._empty_places -= 1

    def close_for_appends(self) -> None:
        self.is_open = False
        self._open_row_run = None

    @property
    def is_filled(self) -> bool:
        """Whether it has records, and the bytes of every run are there. After Ctrl-C a batch may have no records, until
        the thread that made it takes it away.
        """
        return self._empty_places == 0 and self.record_count > 0

    def lacks_bytes_of(self, allocation: SharedAllocation) -> bool:
        """Return whether a run with rows for `allocation` is missing."""
        return self._empty_places > 0 and allocation in self._allocations

    @property
    def is_full(self) -> bool:
        return not self.is_open or self.size >= self._batch_size

    # ---- on its way: the Sender thread -----------------------------------------------------------------------------

    @property
    def has_sequence(self) -> bool:
        return self.base_sequence != NO_SEQUENCE

    @property
    def last_sequence(self) -> int:
        return increment_sequence(self.base_sequence, self.record_count - 1)

    def set_producer_state(
        self, producer_id: int, producer_epoch: int, base_sequence: int, is_transactional: bool
    ) -> None:
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.base_sequence = base_sequence
        self.is_transactional = is_transactional
        self._sealed_stale = self._sealed is not None

    def reset_producer_state(
        self, producer_id: int, producer_epoch: int, base_sequence: int, is_transactional: bool
    ) -> None:
        """Set a new producer state for records that were sent under an older one (KIP-360)."""
        self.sequence_has_been_reset = True
        # the leader lacks the batches before it
        self.may_be_in_log = self.was_sent_in_larger = self.is_overtaken = False
        self.set_producer_state(producer_id, producer_epoch, base_sequence, is_transactional)

    def seal(self, codec: Codec) -> SealedBatch:
        """Return the batch ready to be sent: rows encoded, chunks compressed, header and checksum made.

        Done once, and kept for retries.
        """
        state = (self.producer_id, self.producer_epoch, self.base_sequence, self.is_transactional)
        if self._sealed is None:
            self._encode_rows()
            chunks = [chunk for chunk in self._chunks if chunk is not None]
            self.size = HEADER_SIZE + sum(map(len, chunks))
            self._sealed = seal(chunks, self.record_count, self.base_timestamp_ms, self.max_timestamp_ms, codec, *state)
            self._chunks = []
        elif self._sealed_stale:
            self._sealed = self._sealed.with_producer_state(*state)
        self._sealed_stale = False
        return self._sealed

    @property
    def sealed(self) -> SealedBatch:
        """The batch as it was sealed last."""
        assert self._sealed is not None, "a batch is sealed when it is drained"
        return self._sealed

    @property
    def is_sealed(self) -> bool:
        return self._sealed is not None

    @property
    def wire_size(self) -> int:
        """The bytes to send. An upper bound before the batch is sealed."""
        return self._sealed.size if self._sealed is not None else self.size

    def _encode_rows(self) -> None:
        for run in self._row_runs:
            encoded = run.encode(self.base_timestamp_ms)
            self._chunks[run.place] = encoded.chunk
            self.largest_record = max(self.largest_record, encoded.largest_record)
        self._row_runs = []

    def has_reached_delivery_timeout(self, delivery_timeout_ms: int, now_ms: int) -> bool:
        return now_ms - self.created_ms >= delivery_timeout_ms

    def waited_ms(self, now_ms: int) -> int:
        """Return the time since the batch was made, or since it was sent last."""
        return max(0, now_ms - self.last_attempt_ms)

    def is_backing_off(self, now_ms: int) -> bool:
        """Return whether a retry waits for its backoff. After a leader change it does not wait (KIP-951)."""
        if self.attempts == 0 or now_ms >= self.retry_at_ms:
            return False
        return not self.leader_has_changed

    @property
    def leader_has_changed(self) -> bool:
        known, tried = self.leader_epoch, self.leader_epoch_at_last_attempt
        return self.attempts > 0 and known is not None and tried is not None and known > tried

    def maybe_update_leader_epoch(self, leader_epoch: int | None) -> None:
        if leader_epoch is not None and (self.leader_epoch is None or leader_epoch > self.leader_epoch):
            self.leader_epoch = leader_epoch

    def mark_attempt(self, error: KafkaError, now_ms: int, retry_at_ms: int) -> None:
        """Note an attempt that failed with `error`. The batch is sent again, not before `retry_at_ms`."""
        self.last_error = error
        self.attempts += 1
        self.last_attempt_ms = max(self.last_attempt_ms, now_ms)
        self.retry_at_ms = retry_at_ms
        self.leader_epoch_at_last_attempt = self.leader_epoch

    # ---- the end ---------------------------------------------------------------------------------------------------

    def complete(self, base_offset: int, log_append_time_ms: int | None) -> bool:
        """Acknowledge every record and call callbacks. Return False if the batch had expired in flight."""
        return self._end(base_offset, log_append_time_ms, None, {})

    def fail(
        self, error: KafkaError, record_errors: dict[int, KafkaError] | None = None, harmless: Harmless = BaseException
    ) -> bool:
        """Fail every record with `error`, or with its own error in `record_errors` (index in the batch → error).

        An exception of a callback that is not `harmless` is raised when the batch has ended.
        """
        return self._end(-1, None, error, record_errors or {}, harmless)

    def _end(
        self,
        base_offset: int,
        log_append_time_ms: int | None,
        error: KafkaError | None,
        record_errors: dict[int, KafkaError],
        harmless: Harmless = BaseException,
    ) -> bool:
        is_news = not self.is_done
        if is_news:
            if self.is_open:
                self.close_for_appends()
            self.result.set(base_offset, log_append_time_ms, error, record_errors)
            self.is_done = True
        try:
            self._fire_thunks(harmless)
        finally:
            self.result.mark_done()
        return is_news

    def _fire_thunks(self, harmless: Harmless) -> None:
        """Call the callbacks that were not called yet. An exception of one is raised after the others."""
        raised: BaseException | None = None
        for attempt_harmless in (harmless, BaseException):  # the second time for callbacks that a fault skipped
            for thunk in self.thunks:
                try:
                    thunk.fire(attempt_harmless)
                except BaseException as error:
                    raised = error if raised is None else raised
            if raised is None:
                break
        self.thunks = []
        if raised is not None:
            raise raised

    def forget_records(self) -> None:
        """Free the records, which a flush that waits for the batch would keep in memory.

        The caller holds the lock of the accumulator.
        """
        if self._sealed is not None:
            self.size = self._sealed.size
            self._sealed = None
        self._chunks = [None] * len(self._chunks)  # for runs that are still being encoded
        self._row_runs = []

    def give_memory_back(self, pool: BufferPool) -> None:
        """Give back the memory of the batch: its own, and its shares of blocks.

        Called again, it does the steps that a fault skipped.
        """
        pool.take_back(self._own)
        self._leave_allocations()

    def _leave_allocations(self) -> None:
        for allocation in self._allocations:
            allocation.release(self)
        self._allocations = []

    def keep_compressed(self, pool: BufferPool) -> None:
        """After sealing, keep only as much of `pool` as a compressed batch needs.

        Its records are freed, and the memory of a block goes back with its last batch. An uncompressed batch keeps its
        records.
        """
        if self.sealed.stamp.codec_id == 0:
            return
        pool.exchange(self._own, self.sealed.size)
        self._leave_allocations()

    def share_memory(self, memory: SharedAllocation) -> None:
        """Add a share of memory that other holders share too."""
        memory.hold(self)
        self._allocations.append(memory)

    def sealed_bytes(self) -> bytes:
        """Return the sealed batch in one piece, for a split."""
        return b"".join(self.sealed.buffers)


def split_batch(batch: ProducerBatch, now_ms: int) -> list[ProducerBatch]:
    """Split a batch into parts of at most half of its records' bytes (before compression), so that repeated splits end.

    A part has its share of the callbacks and futures, which are bound to it, and the sequence numbers of its records.
    The batch has no callbacks afterwards; its result is not set.
    """
    (decoded,) = decode_batches(batch.sealed_bytes(), BatchLimits(batch.size, batch.size))
    sizes = [record_size_upper_bound(record.key, record.value, record.headers) for record in decoded.records]
    target = max(sum(sizes) // 2, max(sizes)) + HEADER_SIZE
    parts: list[ProducerBatch] = []
    firsts: list[int] = []
    for index, (record, size) in enumerate(zip(decoded.records, sizes, strict=True)):
        if not parts or not parts[-1].has_room_for(size):
            parts.append(_new_part(batch, record, target, now_ms))
            firsts.append(index)
        parts[-1].append_row(record.key, record.value, record.headers, record.timestamp_ms, size, None)
    bound = [(thunk, thunk.first) for thunk in batch.thunks]
    try:
        for number, (part, first) in enumerate(zip(parts, firsts, strict=True)):
            part.close_for_appends()
            _hand_over(batch, part, first, number)
        batch.split_parts, batch.thunks = parts, []
    except BaseException:  # no memory, for example: the batch gets its callbacks and futures back
        for thunk, first in bound:
            thunk.bind(batch.result, first)
        for part in parts:
            part.result.mark_done()  # a future that waits for a part goes on with the batch
        raise
    return parts


def _new_part(batch: ProducerBatch, first_record: DecodedRecord, target: int, now_ms: int) -> ProducerBatch:
    part = ProducerBatch(batch.topic_partition, first_record.timestamp_ms, target, batch.created_ms)
    part.last_attempt_ms = part.retry_at_ms = now_ms
    part.leader_epoch, part.is_overtaken = batch.leader_epoch, batch.is_overtaken
    part.was_sent_in_larger = batch.was_sent_in_larger or batch.may_be_in_log
    return part


def _hand_over(batch: ProducerBatch, part: ProducerBatch, first: int, number: int) -> None:
    """Give `part`, whose records begin at `first` of the batch, its sequences and callbacks."""
    if batch.has_sequence:
        part.ordinal = (*batch.ordinal, number)
        base_sequence = increment_sequence(batch.base_sequence, first)
        part.set_producer_state(batch.producer_id, batch.producer_epoch, base_sequence, batch.is_transactional)
    end = first + part.record_count
    for thunk in batch.thunks:
        begins, ends = max(thunk.first, first), min(thunk.first + thunk.record_count, end)
        if begins < ends:
            share = thunk.part(begins, ends)
            share.bind(part.result, begins - first)
            part.thunks.append(share)


_MARGIN: Final = 1.05
"""Safety margin on the learnt compression ratio."""
LEAST_SHARE: Final = 0.3
"""The least expected share after compression.

So a batch of the default size stays below the default max.message.bytes even if it does not compress at all.
"""
_TELLING: Final = 4
"""Batches below batch.size divided by this are too small to learn from."""


class BatchSizes:
    """The learnt compression of each topic of a producer, for its codec.

    batch.size and max.request.size limit bytes after compression, but batches are filled and drained before it. So the
    ratio is learnt from earlier batches of the topic: the Sender thread reports and asks, application threads ask.
    Reference: org.apache.kafka.common.record.CompressionRatioEstimator, which learns in smaller steps, from smaller
    batches.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = max(1, batch_size)
        self._ratios: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._refused: set[str] = set()

    def capacity(self, topic: str) -> int:
        """Return the bytes of records before compression that fill a new batch. Without an estimate, batch.size."""
        return int(self._batch_size / self._shares.get(topic, 1.0))

    def on_wire(self, batch: ProducerBatch) -> int:
        """Return the bytes of the batch in a request: exact if it is sealed, else expected."""
        if batch.is_sealed:
            return batch.wire_size
        return int(batch.size * self._shares.get(batch.topic_partition.topic, 1.0))

    def learn(self, batch: ProducerBatch) -> None:
        """Learn from a batch that was sealed for the first time.

        A worse ratio than expected counts at once, a better one by half.
        """
        topic = batch.topic_partition.topic
        if topic in self._refused or batch.size * _TELLING < self._batch_size:
            return
        ratio = batch.wire_size / batch.size
        ratio = self._ratios[topic] = max(ratio, (self._ratios.get(topic, 1.0) + ratio) / 2)
        self._shares[topic] = min(1.0, max(LEAST_SHARE, ratio * _MARGIN))

    def refused(self, topic: str) -> None:
        """Expect no compression after a batch that was too large for its broker, so that the next ones fit."""
        self._refused.add(topic)
        self._shares[topic] = 1.0
