"""`python -m spark_kafka_sink.local` starts a Kafka to try things with.

It prints the bootstrap servers on stdout, and runs until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.common.texts import exit_code_of
from spark_kafka_sink.local.cluster import EmbeddedKafka

_POLL_S = 0.2


def _property(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m spark_kafka_sink.local",
        description="Run a real Kafka on this machine until interrupted (Ctrl-C).",
    )
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1, help="how many nodes; default: 1")
    parser.add_argument(
        "--property",
        type=_property,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a broker property; repeatable",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep the data there; default: a temporary folder")
    return parser.parse_args(arguments)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 after Ctrl-C or SIGTERM, 1 if the broker did not start or ended by itself."""
    chosen = _parse(arguments)
    # A shell lets a command in the background ignore Ctrl-C; this sets a handler there too.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        print(f"Starting Kafka ({chosen.nodes} node{'s' if chosen.nodes > 1 else ''}) ...", file=sys.stderr)
        began = time.monotonic()
        with EmbeddedKafka(chosen.nodes, properties=dict(chosen.property), data_dir=chosen.data) as kafka:
            print(f"Ready after {time.monotonic() - began:.1f} s. Ctrl-C stops it. Bootstrap servers:", file=sys.stderr)
            print(kafka.bootstrap_servers, flush=True)
            while kafka.running:
                time.sleep(_POLL_S)
            print(f"A node ended by itself. Logs: {kafka.save_logs()}", file=sys.stderr)
            return 1
    except LocalBrokerError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "Stopped." if chosen.data is None else f"Stopped. The data is in {chosen.data.absolute()}", file=sys.stderr
        )
        return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
