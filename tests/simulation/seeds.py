"""One seed, or one hunt for a planted bug, as a process of a pool runs it."""

import gc
import sys

from tests.simulation.bugs import BUGS
from tests.simulation.simulate import Outcome, simulate


def _settle_in() -> None:
    """Once per process: what is imported is never garbage."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
        sys.unraisablehook = lambda _: None  # coroutines of killed processes protest when they are let go


def run_seed(seed: int) -> Outcome:
    _settle_in()
    return simulate(seed)


def hunt(name: str, seeds: range) -> tuple[str, int, str]:
    """The bug, and the first seed that finds it with what it says; -1 if none does."""
    _settle_in()
    with BUGS[name]():
        for seed in seeds:
            if wrong := simulate(seed).wrong:
                return name, seed, wrong
    return name, -1, ""
