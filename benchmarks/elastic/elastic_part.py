"""Defines the parts of the benchmark: each is a module whose function `measured` brings some of its figures.

A part is imported when it runs, so what only one part needs (engines, torch) is not loaded for the others.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from msgspec import Struct

#: The figures of the file, in its order, and the part that brings each. All are there in every run; null where they
#: were not measured.
FIGURES: Final[dict[str, str]] = {
    "throughput_over_rlboost_paper": "windows",
    "throughput_over_rlboost_code": "windows",
    "throughput_over_verl_hybrid": "windows",
    "share_of_window_oracle": "windows",
    "tokens_per_money_over_best_baseline": "windows",
    "streamed_gradient_error": "gradient",
    "switch_steps_p99": "switches",
    "mixed_fleet_over_oracle": "mixed",
    "steps_over_never_lent": "lending",
}


class PartTerms(Struct, frozen=True, kw_only=True):
    """What the command line asks of all parts, and of single ones."""

    quick: bool  # all parts together take at most twelve minutes on two cores
    seed: int
    jobs: int  # processes at a time, where a part has several
    tell: Callable[[str], None]  # one line for people who wait
    kept: Path  # a folder for what was found once and holds as long as the code stays
    switches: int | None = None  # so many switches of live devices; None: as many as `quick` allows
    # Of the simulated windows.
    spot: tuple[Path, ...] = ()  # spot traces; (): the known ones, or made-up ones
    lengths: Path | None = None  # of responses; None: those fitted to the paper's points
    models: tuple[str, ...] = ()  # (): all
    policies: tuple[str, ...] = ()  # (): all
    steps: int | None = None  # of each case


class PartFindings(Struct, frozen=True, kw_only=True):
    """What a part found."""

    figures: Mapping[str, float | None]  # names of `FIGURES`
    skipped: Mapping[str, str] = {}  # why a figure of the part is None
    simulated: bool = False  # the figures are of simulations, and the file says so of each
    details: Any = None  # for the file: anything that JSON can hold
    #: What does not hold and must. The benchmark fails then; all that was found is written nevertheless.
    failures: tuple[str, ...] = ()


#: Part -> its module, in the order in which they run: what measures this machine comes first.
PARTS: Final[dict[str, str]] = {
    "gradient": "benchmarks.elastic.streamed_gradient",
    "switches": "benchmarks.elastic.switches_part",
    "mixed": "benchmarks.elastic.mixed_fleet",
    "lending": "benchmarks.elastic.lending",
    "windows": "benchmarks.elastic.compared.compared_windows",
}


def part(name: str) -> Callable[[PartTerms], PartFindings]:
    """The function of a part."""
    return cast("Callable[[PartTerms], PartFindings]", import_module(PARTS[name]).measured)
