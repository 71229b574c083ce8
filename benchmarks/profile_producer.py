"""Measure the producer's processor time, step by step: columns into an embedded broker, without Spark.

    python benchmarks/profile_producer.py                                    half a minute
    python benchmarks/profile_producer.py --cells lz4-200 --rows 30000

A cell is codec and partitions. The table shows microseconds of a thread's processor time per thousand records, the
least of `--rounds` rounds of a million records, with keys of 20 bytes and values of 100, sent in blocks of `--rows`.
The time of a step includes that of the steps indented below it. The clocks themselves cost about 1 us per call.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from arguments import at_least_one
from cells import CODECS
from microbenchmark import columns
from rich.console import Console
from rich.table import Table

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.client.network_client import NetworkClient
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.network.channel import Channel
from spark_kafka_sink.producer import sender
from spark_kafka_sink.producer.record_accumulator import RecordAccumulator
from spark_kafka_sink.record.block import Block

RECORDS = 1_000_000

STEPS: Sequence[tuple[str, Any, str]] = (
    ("send_columns: the task's thread", KafkaProducer, "send_columns"),
    ("  append_block", RecordAccumulator, "append_block"),
    ("    encode", Block, "encode"),
    ("run_once: the Sender's thread", sender.Sender, "run_once"),
    ("  ready", RecordAccumulator, "ready"),
    ("  drain", RecordAccumulator, "drain"),
    ("  seal: compress, checksum", sender.Sender, "_sealed"),
    ("  build requests", sender.Sender, "_send_produce_request"),
    ("  poll: sockets, responses", NetworkClient, "poll"),
    ("    write", Channel, "write"),
)

spent: Counter[str] = Counter()


def clocked(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(work)
    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.thread_time_ns()
        try:
            return work(*arguments, **options)
        finally:
            spent[name] += time.thread_time_ns() - started

    return timed


def profile(servers: str, topic: str, codec: str, rows: int, rounds: int) -> dict[str, float]:
    """Return microseconds per thousand records, by step."""
    block = columns(rows)
    least: dict[str, float] = {}
    with KafkaProducer({"bootstrap.servers": servers, "compression.type": codec}) as producer:
        for number in range(rounds + 1):
            spent.clear()
            for _ in range(RECORDS // rows):
                producer.send_columns(topic, block)
            producer.flush()
            if number:  # the first warms up
                for name, nanoseconds in spent.items():
                    took = nanoseconds / (RECORDS // rows * rows)
                    least[name] = min(took, least.get(name, took))
    return least


def cells(text: str) -> list[tuple[str, int]]:
    found = []
    for name in text.split(","):
        codec, _, partitions = name.partition("-")
        if codec not in CODECS:
            raise argparse.ArgumentTypeError(f"{name!r} must be a codec ({', '.join(CODECS)}), a hyphen and partitions")
        found.append((codec, at_least_one(partitions)))
    return found


def rows_of_a_block(text: str) -> int:
    rows = at_least_one(text)
    if rows > RECORDS:
        raise argparse.ArgumentTypeError(f"{text}: a round has {RECORDS:,} records")
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=cells, default="none-4,lz4-4,zstd-4,lz4-200", help="[%(default)s]")
    parser.add_argument("--rows", type=rows_of_a_block, default=10_000, help="rows of a block [%(default)s]")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="[%(default)s]")
    settings = parser.parse_args(arguments)
    for name, owner, method in STEPS:
        setattr(owner, method, clocked(name, getattr(owner, method)))
    table = Table(title="us of processor time per thousand records")
    table.add_column("", no_wrap=True)
    measured = []
    logging.getLogger("spark_kafka_sink").setLevel(logging.ERROR)  # a new topic sometimes refuses its first batches
    with EmbeddedKafka() as kafka:
        for codec, partitions in settings.cells:
            table.add_column(f"{codec}, {partitions}", justify="right")
            kafka.create_topic(f"{codec}-{partitions}", partitions)
            topic = f"{codec}-{partitions}"
            measured.append(profile(kafka.bootstrap_servers, topic, codec, settings.rows, settings.rounds))
    for name, _, _ in STEPS:
        table.add_row(name, *(f"{figures[name]:.0f}" for figures in measured))
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
