"""The command python -m spark_kafka_sink.doctor: arguments, the order of output, exit codes.

It imports what needs other packages only after it knows that they are there, so that it can say which one is missing.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TextIO

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.texts import exit_code_of, for_stream, one_line
from spark_kafka_sink.doctor import installation
from spark_kafka_sink.doctor.findings import Area, Finding, has_fault, not_checked, problem
from spark_kafka_sink.doctor.report import as_json, table

GOOD: Final = 0
FAULT: Final = 1
WRONG_USE: Final = 2
_SECONDS: Final = 10.0
_WIDTH: Final = 120

_EPILOG: Final = (
    "Nothing is written into a topic. An idempotent producer's id is drawn, and with delivery.guarantee=exactly-once an"
    " epoch of <transactional.id.prefix>/doctor, which no query uses. Exit codes: 0 no fault (warnings count as none),"
    " 1 a fault, 2 wrong use of this command."
)


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    """Run the command. Return the exit code."""
    given = _parser().parse_args(arguments)
    out = out or sys.stdout
    try:
        options, place = _options(given)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return WRONG_USE
    # the findings say what the log would; a warning of the client in between is no line of the table
    logging.getLogger("spark_kafka_sink").setLevel(logging.CRITICAL)
    findings = examined(options, place, int(given.timeout * 1000))
    if given.json:
        out.write(as_json(findings))
    else:
        width = shutil.get_terminal_size((_WIDTH, 0)).columns
        out.write(for_stream(table(findings, width, has_signs=_has_signs(out), has_colours=out.isatty()), out))
    return FAULT if has_fault(findings) else GOOD


def examined(options: dict[str, str], place: Callable[[str | None], str], limit_ms: int) -> list[Finding]:
    """Return all findings: of this machine, and of the options if there are some."""
    machine = installation.gather()
    findings = installation.judge(machine)
    if missing := [each.name for each in machine.packages if each.version is None or each.error]:
        why = f"{', '.join(missing)} must load first"
        return [*findings, not_checked(Area.BROKERS, "not checked", why)]
    if not options:
        why = "no options were given: name a file by --options, or give --option NAME=VALUE"
        return [*findings, not_checked(Area.OPTIONS, "not checked", why)]
    try:
        from spark_kafka_sink.doctor.examination import Examination  # it needs the packages
    except ImportError as error:
        name = (error.name or "a package").partition(".")[0]
        values = {"python": machine.python, "package": name}
        return [*findings, problem("package-missing", Area.MACHINE, name, one_line(str(error)), **values)]
    return findings + Examination(options, place, limit_ms, SystemClock(), random.Random()).run()


def _options(given: argparse.Namespace) -> tuple[dict[str, str], Callable[[str | None], str]]:
    """Return the options, and where the file sets one. Raises ConfigError for wrong use."""
    options: dict[str, str] = {}
    single: dict[str, str] = {}
    for text in given.option:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            first = f"{name.split()[0]} …" if name.strip() else "this"  # after a blank there may be a password
            raise ConfigError(f"--option takes NAME=VALUE, and {first} has no name or no value.")
        single[name.strip()] = value
    if given.checkpoint is not None:
        single["checkpointLocation"] = given.checkpoint
    place: Callable[[str | None], str] = _nowhere
    if given.options is not None:
        from spark_kafka_sink.sink.properties_file import read_properties

        try:
            file = read_properties(given.options)
        except OSError as error:
            raise ConfigError(f"--options {given.options} cannot be read: {error.strerror}.") from error
        again = {name.lower() for name in single}
        options = {name: value for name, value in file.values.items() if name.lower() not in again}
        place = file.place
    return options | single, place


def _nowhere(_: str | None) -> str:
    return ""


def _has_signs(out: TextIO) -> bool:
    """Return whether the signs ✓ and ✗ can be written."""
    try:
        "✓✗·".encode(getattr(out, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, more than 0 and at most 600")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spark_kafka_sink.doctor",
        description="Says why a sink does not work, and what to change: this machine, the options, brokers, topics,"
        " permissions, exactly once, the clock, the schema registry.",
        epilog=_EPILOG,
    )
    parser.add_argument("--options", type=Path, metavar="FILE", help="a properties file with the options of the sink")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="one option; it wins over the file"
    )
    parser.add_argument(
        "--checkpoint", metavar="LOCATION", help="the query's checkpointLocation, for exactly once without a prefix"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=_SECONDS, metavar="SECONDS", help=f"limit of each step [{_SECONDS:.0f}]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
