"""How long the parts of batches take, and the fingerprint's share of a task."""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from exactly_once_batches import VALUE_BYTES, Query, Stage, blocks_of
from exactly_once_counts import Logs

from spark_kafka_sink.record import fingerprint as fingerprints
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.exactly_once import task as task_module


@dataclass
class Latency:
    """Milliseconds: of each batch's begin and commit, and of each task."""

    begin: list[float] = field(default_factory=list)
    task: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)


def timed(times: list[float], work: Callable[..., Any], *arguments: object) -> Any:
    started = time.perf_counter()
    result = work(*arguments)
    times.append((time.perf_counter() - started) * 1000)
    return result


def latency(stage: Stage, tasks: int, settings: argparse.Namespace) -> Latency:
    query = Query(stage.kafka.bootstrap_servers, stage.new_topic(settings.partitions))
    every = [blocks_of(settings.rows, VALUE_BYTES, task * settings.rows) for task in range(tasks)]
    logs = Logs(stage.kafka.bootstrap_servers, query.topic, query.decision_topic)
    found = Latency()
    for number in range(settings.warm_up + settings.batches):
        if number == settings.warm_up:
            found = Latency()
        batch_start = timed(found.begin, query.begin)
        outcomes = [timed(found.task, query.run_task, batch_start, task, blocks) for task, blocks in enumerate(every)]
        timed(found.commit, query.commit, outcomes)
        logs.await_markers()
    return found


@dataclass
class Share:
    """Nanoseconds for each record. Of tasks with the fingerprint and without: elapsed, and of the process's processor
    time, one entry for each round. Of the fingerprint alone: by the compiled kernel, and without it.
    """

    value_bytes: int
    rows: int
    elapsed: list[tuple[float, float]] = field(default_factory=list)
    processor: list[tuple[float, float]] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    alone_by_numpy: list[float] = field(default_factory=list)


def no_fingerprint(_topic: str, _columns: RecordColumns) -> int:
    return 0


def stream_of(blocks: Sequence[pa.RecordBatch]) -> bytes:
    """The blocks as Spark sends them to a task."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, blocks[0].schema) as writer:
        for block in blocks:
            writer.write_batch(block)
    return bytes(sink.getvalue())


def read(stream: bytes) -> pa.RecordBatchReader:
    """Blocks in new memory, as a task gets them: in the processor's caches, as far as they fit."""
    return pa.ipc.open_stream(io.BytesIO(stream))


def run_task_alone(query: Query, stream: bytes, rows: int) -> tuple[float, float]:
    """Elapsed and processor nanoseconds for each record of the task of a batch that has no other."""
    batch_start = query.begin()
    elapsed, processor = time.perf_counter_ns(), time.process_time_ns()
    outcome = query.run_task(batch_start, 0, read(stream))
    elapsed, processor = time.perf_counter_ns() - elapsed, time.process_time_ns() - processor
    query.commit([outcome])
    return elapsed / rows, processor / rows


def fingerprint_alone(stream: bytes) -> float:
    """Processor nanoseconds for each record."""
    spent = rows = 0
    for block in read(stream):
        columns = RecordColumns(value=block.column("value"), key=block.column("key"))
        started = time.thread_time_ns()
        fingerprints.fingerprint("topic", columns)
        spent += time.thread_time_ns() - started
        rows += block.num_rows
    return spent / rows


def task_without_fingerprint(query: Query, stream: bytes, rows: int) -> tuple[float, float]:
    """As `run_task_alone`."""
    with patch.object(task_module, "fingerprint", no_fingerprint):
        return run_task_alone(query, stream, rows)


def share(stage: Stage, value_bytes: int, rows: int, settings: argparse.Namespace) -> Share:
    query = Query(stage.kafka.bootstrap_servers, stage.new_topic(settings.partitions))
    blocks = blocks_of(rows, value_bytes)
    stream, first_block = stream_of(blocks), stream_of(blocks[:1])
    found = Share(value_bytes, rows)
    for number in range(settings.rounds + 1):
        ways = (run_task_alone, task_without_fingerprint)
        turn = [way(query, stream, rows) for way in (ways if number % 2 else ways[::-1])]
        with_it, without = turn if number % 2 else turn[::-1]
        alone = fingerprint_alone(stream)
        with patch.object(fingerprints, "add_hashes", fingerprints.add_hashes_by_numpy):
            by_numpy = fingerprint_alone(first_block)
        if number:  # the first round warms up
            found.elapsed.append((with_it[0], without[0]))
            found.processor.append((with_it[1], without[1]))
            found.alone.append(alone)
            found.alone_by_numpy.append(by_numpy)
    return found
