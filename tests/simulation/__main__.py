"""`python -m tests.simulation --seeds 0:5000 --jobs 2`: run seeds, and say how to run again what failed."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

#: Strings hash alike in every process, or a set of them would not be in the same order again.
_HASH_SEED: Final = "0"
_PROGRESS_S: Final = 10.0
#: A process keeps some 9 MB of each seed.
_SEEDS_OF_A_PROCESS: Final = 100


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds of the simulation; exit code 1 if one failed."""
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        os.environ["PYTHONHASHSEED"] = _HASH_SEED
        os.execv(  # noqa: S606 - this program again
            sys.executable, [sys.executable, "-m", "tests.simulation", *(argv or sys.argv[1:])]
        )
    options = _options(argv)
    sys.unraisablehook = lambda _: None  # coroutines of killed processes protest when they are let go
    if options.bugs:
        return _find_bugs(options)
    if options.seed is not None:
        return _replay(options.seed, trace=options.trace, bug=options.bug, record=options.record)
    return _run_all(options)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=main.__doc__)
    parser.add_argument("--seeds", default="0:100", help="FIRST:END")
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: all that happened")
    parser.add_argument("--record", type=Path, help="with --seed: a folder for what coordinators decide")
    parser.add_argument("--bug", default="", help="with --seed: a planted bug")
    parser.add_argument("--bugs", action="store_true", help="plant each bug, until one of the seeds finds it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="at the end, one line of JSON with the results")
    return parser.parse_args(argv)


def _replay(seed: int, *, trace: bool, bug: str, record: Path | None) -> int:
    from tests.simulation.bugs import BUGS
    from tests.simulation.simulate import simulate

    with BUGS[bug]() if bug else nullcontext():
        outcome = simulate(seed, trace=trace, record=record)
    if outcome.trace:
        say("\n".join(outcome.trace))
    say(f"seed {seed}: {outcome.wrong or 'all held'}; digest {outcome.digest:08x}, {outcome.virtual_s:.1f} s")
    return 1 if outcome.wrong else 0


def _outcomes(seeds: range, jobs: int) -> Iterator[Any]:
    from tests.simulation.seeds import run_seed

    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=_SEEDS_OF_A_PROCESS) as pool:
        yield from pool.map(run_seed, seeds, chunksize=1)


def _run_all(options: argparse.Namespace) -> int:
    from tests.simulation.faults import CELLS

    first, _, end = options.seeds.partition(":")
    began = said = time.monotonic()
    cells: Counter[str] = Counter()
    failed: dict[int, str] = {}
    done = takeovers = several = 0
    for outcome in _outcomes(range(int(first), int(end)), options.jobs):
        done += 1
        cells.update(outcome.cells)
        takeovers, several = takeovers + outcome.takeovers, several + (outcome.runs > 1)
        if outcome.wrong:
            failed[outcome.seed] = outcome.wrong
            say(f"seed {outcome.seed} FAILED: {outcome.wrong}\n  again: python -m tests.simulation --seed "
                  f"{outcome.seed} --trace")  # fmt: skip
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            rate = done / (said - began) * 60
            say(
                f"{done} seeds, {len(failed)} failed, {rate:.0f} a minute, {len(cells)} of {len(CELLS)} cells",
            )
    rate = done / (time.monotonic() - began) * 60
    say(f"{done} seeds, {len(failed)} failed, {rate:.0f} a minute, {len(cells)} of {len(CELLS)} cells visited")
    say(f"{several} of them with several runs; {takeovers} takeovers by a coordinator that stood by")
    if options.json:
        found = {"seeds": done, "failed": failed, "per_minute": rate, "cells": dict(cells)}
        found |= {"several_runs": several, "takeovers": takeovers}
        say(json.dumps(found))
    return 1 if failed else 0


def _find_bugs(options: argparse.Namespace) -> int:
    from tests.simulation.bugs import BUGS
    from tests.simulation.seeds import hunt

    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end))
    found: dict[str, int] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        hunts = [pool.submit(hunt, name, seeds) for name in BUGS]
        for one in hunts:
            name, seed, wrong = one.result()
            found[name] = seed
            say(f"{name}: " + (f"seed {seed}: {wrong}" if seed >= 0 else f"NOT FOUND in {len(seeds)} seeds"))
    missed = [name for name, seed in found.items() if seed < 0]
    say(f"{len(found) - len(missed)} of {len(found)} planted bugs found")
    if options.json:
        say(json.dumps({"found": found, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
