"""What jobs/benchmark.py is told on its command line."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from argument_types import at_least_one, file_to_write, path_in_a_folder, seconds
from benchmark_cells import Cell
from benchmark_contenders import CONTENDERS, STREAMS

CELLS = ("keyed-none-4-100", "keyed-lz4-4-100", "unkeyed-none-4-100", "keyed-zstd-4-100", "keyed-lz4-200-100")
ALL_CELLS = tuple(
    "-".join(parts)
    for parts in itertools.product(
        ("keyed", "unkeyed"), ("none", "lz4", "zstd", "snappy"), ("4", "200"), ("100", "1000")
    )
)
SECURITY: Mapping[str, str] = {"PLAINTEXT": "without TLS", "SSL": "TLS"}
"""Kafka's security.protocol → as tables say it."""


def cell_names(text: str) -> list[str]:
    names = list(ALL_CELLS) if text == "all" else text.split(",")
    try:
        return [str(Cell.parse(name)) for name in names]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def names_of(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - known.keys():
            raise argparse.ArgumentTypeError(f"{min(unknown)!r}: there are {', '.join(known)}")
        return found

    return names


class Option(argparse.Action):
    """NAME=VALUE pairs into a mapping."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, equals, value = values.partition("=")
        if not equals:
            parser.error(f"{option_string} {values}: NAME=VALUE is wanted")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name: value})


def argument_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    cells = ",".join(CELLS)
    parser.add_argument("--cells", type=cell_names, default=cells, help="separated by commas, or all [%(default)s]")
    every = ",".join(CONTENDERS)
    parser.add_argument("--contenders", type=names_of(CONTENDERS), default=every, help="[%(default)s]")
    parser.add_argument(
        "--security",
        type=names_of(SECURITY),
        default="PLAINTEXT",
        help="PLAINTEXT, SSL or both, by turns and compared [%(default)s]",
    )
    parser.add_argument("--records", type=at_least_one, default=8_000_000, help="of a run [%(default)s]")
    parser.add_argument("--rounds", type=at_least_one, default=2, help="processes of each contender [%(default)s]")
    parser.add_argument("--runs", type=at_least_one, default=2, help="timed runs of each process [%(default)s]")
    parser.add_argument(
        "--warm-up", type=seconds, default=20, help="seconds that each process writes before it is timed [%(default)s]"
    )
    parser.add_argument("--cores", type=at_least_one, default=2, help="of Spark [%(default)s]")
    parser.add_argument("--timeout", type=seconds, default=900, help="seconds for a process [%(default)s]")
    parser.add_argument("--option", action=Option, default={}, metavar="NAME=VALUE", help="setting of every producer")
    parser.add_argument("--latency", action="store_true", help="measure micro-batches too, of the first cell's kind")
    every = ",".join(STREAMS)
    parser.add_argument("--streams", type=names_of(STREAMS), default=every, help="for --latency [%(default)s]")
    parser.add_argument("--batches", type=at_least_one, default=60, help="timed micro-batches [%(default)s]")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=path_in_a_folder, metavar="STEM", help="draw STEM.png and STEM.svg")
    return parser
