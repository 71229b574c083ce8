"""A batch from its first record to its end: room, places, sequences, the sealed bytes, and exactly one end."""

from __future__ import annotations

import sys
import weakref

import pytest
from support.fake_clock import FakeClock
from support.scripted_broker.batches import check_batch, read_records

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError, NotLeaderOrFollowerError
from spark_kafka_sink.producer.buffer_pool import BufferPool, Grant, SharedAllocation
from spark_kafka_sink.producer.futures import FutureRecordMetadata, RecordThunk, RunMetadata
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.encoder import encode_rows

PLACE = TopicPartition("flights", 0)
NONE = codec_for("none")


def batch_of(*values: bytes, size: int = 10_000, at_ms: int = 1_000) -> ProducerBatch:
    batch = ProducerBatch(PLACE, 50, size, at_ms)
    for index, value in enumerate(values):
        append(batch, value, timestamp_ms=50 + index)
    return batch


def append(batch: ProducerBatch, value: bytes, size: int = 100, timestamp_ms: int = 50) -> FutureRecordMetadata:
    future = FutureRecordMetadata(timestamp_ms, -1, len(value))
    grant = Grant()
    grant.size = size
    batch.append_row(None, value, (), timestamp_ms, size, RecordThunk(future, None), grant)
    return future


def free_memory() -> SharedAllocation:
    return SharedAllocation(lambda: None, "its append")


# ---- room ------------------------------------------------------------------------------------------------------------


def test_room_is_what_is_left_of_batch_size() -> None:
    batch = ProducerBatch(PLACE, 0, 300 + HEADER_SIZE, 0)
    assert batch.room == 300
    append(batch, b"v", size=200)
    assert batch.room == 100
    assert batch.has_room_for(100)
    assert not batch.has_room_for(101)
    assert not batch.is_full
    append(batch, b"v", size=100)
    assert batch.is_full


def test_first_record_of_any_size_has_room() -> None:
    assert ProducerBatch(PLACE, 0, 100, 0).has_room_for(5_000)


def test_a_closed_batch_has_no_room_and_is_full() -> None:
    batch = batch_of(b"v")
    batch.close_for_appends()
    assert (batch.room, batch.has_room_for(0), batch.is_full) == (0, False, True)


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_runs_filled_in_any_order_keep_their_places() -> None:
    batch = batch_of(b"row 0")
    first = batch.reserve_run(1, 90, free_memory(), None)
    second = batch.reserve_run(1, 90, free_memory(), None)
    append(batch, b"row 3")
    assert not batch.is_filled
    size = batch.size
    for place, delta in ((second, 2), (first, 1)):
        run = encode_rows(None, [b"run %d" % delta], None, [900 * delta], delta, batch.base_timestamp_ms)
        batch.fill_run(place, run.chunk, run.max_timestamp_ms, run.largest_record, 90)
        size += len(run.chunk) - 90
        assert batch.size == size
    assert batch.is_filled
    batch.close_for_appends()
    batch.seal(NONE)
    data = batch.sealed_bytes()
    assert [r.value for r in read_records(data)] == [b"row 0", b"run 1", b"run 2", b"row 3"]
    assert check_batch(data).max_timestamp == 1_800


def test_callback_is_called_once_for_consecutive_runs() -> None:
    reported: dict[str, list[RunMetadata]] = {"a": [], "b": []}
    a, b = (lambda run, _, calls=calls: calls.append(run) for calls in reported.values())
    batch = ProducerBatch(PLACE, 0, 10_000, 0)
    for count, size, callback in ((2, 20, a), (3, 50, a), (1, 9, b), (1, 7, a), (4, 40, None), (1, 8, a), (1, 6, a)):
        batch.reserve_run(count, size, free_memory(), callback)
    append(batch, b"row 13")
    batch.reserve_run(1, 5, free_memory(), a)
    batch.complete(100, None)
    runs = {
        name: [(run.base_offset, run.record_count, run.serialized_size) for run in reported[name]] for name in reported
    }
    assert runs == {"a": [(100, 5, 70), (106, 1, 7), (111, 2, 14), (114, 1, 5)], "b": [(105, 1, 9)]}


def test_callback_gets_exact_bytes_of_its_rows() -> None:
    reported: list[int] = []
    batch = ProducerBatch(PLACE, 0, 10_000, 0)

    def tell(run: RunMetadata, _: object) -> None:
        reported.append(run.serialized_size)

    first, second = (batch.reserve_run(2, 90, free_memory(), tell) for _ in range(2))
    taken = 0
    for place, offset in ((second, 2), (first, 0)):
        run = encode_rows(None, [b"a", b"bc"], None, [0, 0], offset, 0)
        taken += len(run.chunk)
        batch.fill_run(place, run.chunk, run.max_timestamp_ms, run.largest_record, 90)
    batch.close_for_appends()
    assert batch.seal(NONE).size == HEADER_SIZE + taken
    batch.complete(0, None)
    assert reported == [taken]


def test_the_largest_timestamp_is_kept() -> None:
    batch = batch_of(b"a")
    append(batch, b"b", timestamp_ms=900)
    append(batch, b"c", timestamp_ms=10)
    batch.close_for_appends()
    batch.seal(NONE)
    header = check_batch(batch.sealed_bytes())
    assert (header.base_timestamp, header.max_timestamp) == (50, 900)
    assert [record.timestamp_ms for record in read_records(batch.sealed_bytes())] == [50, 900, 10]


# ---- sequences and the wire ------------------------------------------------------------------------------------------


def test_a_batch_is_sealed_once_and_kept_for_retries() -> None:
    batch = batch_of(b"a", b"b")
    assert batch.wire_size == HEADER_SIZE + 200
    batch.set_producer_state(7, 1, 5, False)
    sealed = batch.seal(NONE)
    assert batch.wire_size == sealed.size < HEADER_SIZE + 200
    assert batch.seal(NONE) is sealed
    header = check_batch(batch.sealed_bytes())
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 1, 5)
    assert not header.is_transactional


def test_compressed_batch_frees_its_records() -> None:
    value = b"".join([b"a row of ", b"send"])  # not a constant that others have
    held = sys.getrefcount(value)
    batch = batch_of(value)
    run = encode_rows([None], [b"x"], [()], [50], 1, 50)
    batch.fill_run(
        batch.reserve_run(1, 60, free_memory(), None), run.chunk, run.max_timestamp_ms, run.largest_record, 60
    )
    chunk = weakref.ref(run.chunk)
    del run
    assert chunk() is not None
    assert sys.getrefcount(value) > held
    batch.seal(codec_for("gzip"))
    assert chunk() is None
    assert sys.getrefcount(value) == held


def test_the_largest_record_is_that_of_all_runs_and_rows() -> None:
    small, large = (encode_rows([None], [bytes(size)], [()], [50], 0, 50) for size in (1, 500))
    batch = ProducerBatch(PLACE, 50, 10_000, 0)
    for run in (large, small):
        place = batch.reserve_run(1, 600, free_memory(), None)
        batch.fill_run(place, run.chunk, run.max_timestamp_ms, run.largest_record, 600)
    assert batch.largest_record == large.largest_record
    append(batch, b"a row")
    batch.seal(NONE)
    assert batch.largest_record == large.largest_record


def test_new_producer_state_changes_only_the_header() -> None:
    batch = batch_of(b"a", b"b")
    batch.set_producer_state(7, 1, 5, False)
    before = batch.seal(NONE)
    assert not batch.sequence_has_been_reset
    batch.reset_producer_state(7, 2, 0, True)
    after = batch.seal(NONE)
    assert batch.sequence_has_been_reset
    assert after.buffers[1:] == before.buffers[1:]
    header = check_batch(batch.sealed_bytes())
    assert (header.producer_epoch, header.base_sequence, header.is_transactional) == (2, 0, True)
    assert batch.seal(NONE) is after


def test_the_last_sequence_wraps() -> None:
    batch = batch_of(b"a", b"b", b"c")
    assert not batch.has_sequence
    batch.set_producer_state(7, 0, 2**31 - 3, False)
    assert batch.last_sequence == 2**31 - 1
    batch.set_producer_state(7, 0, 2**31 - 2, False)
    assert batch.has_sequence
    assert batch.last_sequence == 0


# ---- time and retries ------------------------------------------------------------------------------------------------


def test_wait_counts_from_creation_then_from_the_last_attempt() -> None:
    batch = batch_of(b"a", at_ms=1_000)
    assert batch.waited_ms(1_030) == 30
    assert batch.waited_ms(900) == 0
    batch.mark_attempt(KafkaError("x"), 1_100, 1_200)
    assert batch.waited_ms(1_130) == 30


def test_delivery_timeout_counts_from_creation_through_all_attempts() -> None:
    batch = batch_of(b"a", at_ms=1_000)
    batch.mark_attempt(KafkaError("x"), 1_400, 1_500)
    assert not batch.has_reached_delivery_timeout(500, 1_499)
    assert batch.has_reached_delivery_timeout(500, 1_500)


def test_retry_backs_off_unless_the_leader_is_newer() -> None:
    batch = batch_of(b"a")
    batch.maybe_update_leader_epoch(3)
    assert not batch.is_backing_off(0)
    batch.mark_attempt(NotLeaderOrFollowerError(), 1_000, 1_200)
    assert batch.is_backing_off(1_199)
    assert not batch.is_backing_off(1_200)
    for stale in (None, 2, 3):
        batch.maybe_update_leader_epoch(stale)
        assert batch.is_backing_off(1_000)
        assert not batch.leader_has_changed
    batch.maybe_update_leader_epoch(4)
    assert batch.leader_has_changed
    assert not batch.is_backing_off(1_000)
    batch.mark_attempt(NotLeaderOrFollowerError(), 1_001, 1_300)
    assert batch.is_backing_off(1_002)  # the new leader was tried too


def test_without_epochs_a_retry_waits() -> None:
    batch = batch_of(b"a")
    batch.mark_attempt(NotLeaderOrFollowerError(), 1_000, 1_200)
    batch.maybe_update_leader_epoch(9)
    assert batch.is_backing_off(1_100)


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_it_ends_once() -> None:
    calls: list[str] = []
    batch = ProducerBatch(PLACE, 0, 1_000, 0)
    future = FutureRecordMetadata(0, -1, 1)
    batch.append_row(None, b"v", (), 0, 10, RecordThunk(future, lambda metadata, error: calls.append(str(error))))
    assert batch.fail(KafkaError("first"))
    assert not batch.complete(5, None)
    assert not batch.fail(KafkaError("second"))
    assert calls == ["first"]
    assert batch.is_done
    assert not batch.is_open
    with pytest.raises(KafkaError, match="first"):
        future.result(0)


def test_futures_are_done_after_the_callbacks_have_run() -> None:
    seen: list[bool] = []
    batch = ProducerBatch(PLACE, 0, 1_000, 0)
    future = FutureRecordMetadata(0, -1, 1)
    batch.append_row(None, b"v", (), 0, 10, RecordThunk(future, lambda *_: seen.append(future.done())))
    batch.complete(9, None)
    assert seen == [False]
    assert future.result(0).offset == 9


def test_deallocated_batch_frees_exactly_its_bytes() -> None:
    batch = batch_of(b"a", b"b")
    first, second = (batch.reserve_run(1, 60, free_memory(), None) for _ in range(2))
    run = encode_rows([None], [b"x"], [()], [50], 2, 50)
    batch.fill_run(first, run.chunk, run.max_timestamp_ms, run.largest_record, 60)
    size = batch.wire_size
    batch.forget_records()
    batch.fill_run(
        second, run.chunk, run.max_timestamp_ms, run.largest_record, len(run.chunk)
    )  # a block was still being encoded
    assert batch.wire_size == size
    sealed = batch_of(b"a", b"b")
    size = sealed.seal(NONE).size
    bytes_of_it = weakref.ref(sealed.sealed.buffers[-1])
    assert bytes_of_it() is not None
    sealed.forget_records()
    assert bytes_of_it() is None
    assert sealed.wire_size == size


def test_compressed_batch_holds_only_its_compressed_bytes() -> None:
    pool = BufferPool(10_000, FakeClock())
    grant = Grant()
    pool.allocate(4_000, 0, grant)
    block = SharedAllocation(lambda: pool.take_back(grant), holder=grant)
    batches = []
    for _ in range(2):
        batch = ProducerBatch(PLACE, 50, 5_000, 0)
        run = encode_rows([None], [bytes(1_900)], [()], [50], 0, 50)
        place = batch.reserve_run(1, 2_000, block, None)
        batch.fill_run(place, run.chunk, run.max_timestamp_ms, run.largest_record, 2_000)
        batches.append(batch)
    block.release(grant)
    first, second = (batch.seal(codec_for("zstd")).size for batch in batches)
    assert first + second < 400
    batches[0].keep_compressed(pool)
    assert pool.available_memory == 10_000 - 4_000 - first
    batches[1].keep_compressed(pool)
    assert pool.available_memory == 10_000 - first - second
    batches[0].give_memory_back(pool)
    assert pool.available_memory == 10_000 - second
    batches[1].give_memory_back(pool)
    assert pool.available_memory == 10_000


def test_uncompressed_batch_keeps_the_memory_of_its_records() -> None:
    pool = BufferPool(10_000, FakeClock())
    grant = Grant()
    pool.allocate(2_000, 0, grant)
    block = SharedAllocation(lambda: pool.take_back(grant), holder=grant)
    batch = ProducerBatch(PLACE, 50, 5_000, 0)
    run = encode_rows([None], [bytes(1_900)], [()], [50], 0, 50)
    batch.fill_run(batch.reserve_run(1, 2_000, block, None), run.chunk, run.max_timestamp_ms, run.largest_record, 2_000)
    block.release(grant)
    batch.seal(NONE)
    batch.keep_compressed(pool)
    assert pool.available_memory == 8_000
    batch.give_memory_back(pool)
    assert pool.available_memory == 10_000


def test_memory_of_rows_and_blocks_is_given_back_once() -> None:
    pool = BufferPool(1_000, FakeClock())
    batch, rows, block = ProducerBatch(PLACE, 0, 1_000, 0), Grant(), Grant()
    pool.allocate(100, 0, rows)
    batch.append_row(None, b"v", (), 0, 100, None, rows)
    pool.allocate(50, 0, block)
    shared = SharedAllocation(lambda: pool.take_back(block), holder=block)
    for _ in range(2):
        batch.reserve_run(1, 25, shared, None)
    shared.release(block)
    assert pool.available_memory == 850
    for _ in range(2):
        batch.give_memory_back(pool)
        assert pool.available_memory == 1_000


def test_it_shows_its_state() -> None:
    batch = batch_of(b"a")
    assert repr(batch) == f"ProducerBatch(flights-0, 1 records, {HEADER_SIZE + 100} bytes, attempts 0, open)"
    batch.close_for_appends()
    assert repr(batch).endswith("closed)")
    batch.complete(0, None)
    assert repr(batch).endswith("done)")
