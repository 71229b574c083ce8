"""Search for inputs that break a target, guided by coverage, and keep them in the corpus.

pip install atheris; python tests/unit/hostile/explore.py TARGET [-max_total_time=60 and other flags of libFuzzer]
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]

with atheris.instrument_imports(include=["spark_kafka_sink", "kio"]):
    from support import fuzz_targets


def main() -> None:
    name = sys.argv.pop(1)
    folder = HERE / "corpus" / name
    folder.mkdir(parents=True, exist_ok=True)
    atheris.Setup([*sys.argv, str(folder)], lambda data: fuzz_targets.run(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
