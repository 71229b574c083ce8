"""Every input of the corpus, and inputs near it: an error of ours or none, in bounded memory.

What explore.py finds is kept as a file and is tried here ever after.
"""

from __future__ import annotations

import logging
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fuzz_targets import TARGETS, mutations, run

CORPUS = Path(__file__).with_name("corpus")
MOST_MEMORY = 8 << 20
"""Of inputs of a few KiB. A decompressed batch may take 1 MiB, and is held twice."""
NEIGHBOURS = int(os.environ.get("FUZZ_NEIGHBOURS", "20"))


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_MEMORY


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.usefixtures("bounded_memory")
def test_every_input_of_the_corpus_is_handled(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert len(inputs) >= 3
    for path in inputs:
        try:
            run(target, path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{target} broke on {path.name}") from error


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_near_the_corpus_are_handled(target: str) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for path in sorted((CORPUS / target).iterdir()):
        for data in mutations(path.read_bytes(), rng, NEIGHBOURS):
            try:
                run(target, data)
            except Exception as error:
                raise AssertionError(f"{target} broke on {data!r}, near {path.name}, seed {seed}") from error
