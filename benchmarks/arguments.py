"""Numbers and files on a command line, refused there and then if a run could only fail for them at its end."""

import argparse
import math
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.strip().isdecimal() or not 1 <= (value := int(text)) <= 1_000_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 1e9")
    return value


def factor(text: str) -> float:
    """A finite number above 0."""
    value = _float(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, up to 1e6")
    return value


def share(text: str) -> float:
    """A number above 0, up to 1."""
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, up to 1")
    return value


def seconds(text: str) -> float:
    """A finite number from 0 on."""
    value = _float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 0 or more")
    return value


def output(text: str) -> Path:
    """A file that can be written; its folder is made. What it has is left as it is."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written ({error}); name a file in a folder of yours"
        ) from None
    return path


def result(name: str, *, quick: bool = False) -> Path:
    """Where a benchmark writes unless a file is named. What a quick run finds is not worth stating, so it stays below
    `runs/`, away from the committed results."""
    return output(str(ROOT / ("runs/benchmarks" if quick else "benchmarks/results") / f"{name}.json"))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
