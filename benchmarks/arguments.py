"""Checks of command-line arguments. A benchmark refuses a wrong one at once, because it may run for an hour first."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    try:
        given = float(text)
    except ValueError:
        given = math.nan
    if not 0 <= given < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return given


def path_in_a_folder(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return path


def file_to_write(text: str) -> Path:
    path = path_in_a_folder(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file, not a folder")
    return path
