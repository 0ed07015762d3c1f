"""`python -m tests.http_fuzz --cases 100000 --jobs 2`: cases of HTTP through the proxy, and how to run one again."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from tests.http_fuzz.fuzz_batch import FuzzTotals, run_cases

#: Cases that one process runs on one proxy.
_BATCH: Final = 500
_PROGRESS_S: Final = 10.0
_SHOWN: Final = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases; exit code 1 if both ends disagreed about one, or one hung."""
    parser = argparse.ArgumentParser(prog="python -m tests.http_fuzz", description=main.__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case; each other one has the next seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, help="a file for the results, in JSON")
    options = parser.parse_args(argv)
    totals, after_tenth = FuzzTotals(), 0.0
    began = said = time.monotonic()
    for done in _batches(range(options.first, options.first + options.cases), options.jobs):
        totals.merge(done)
        if not after_tenth and totals.cases >= options.cases / 10:
            after_tenth = totals.memory_mib
        for seed, wrong in done.wrong[:_SHOWN]:
            _say(f"seed {seed}: {wrong}\n  again: python -m tests.http_fuzz --first {seed} --cases 1")
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            _say(f"{totals.cases} cases, {len(totals.wrong)} disagreements, {len(totals.hung)} hung")
    results = _results(totals, after_tenth, time.monotonic() - began)
    _say(json.dumps(results))
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if totals.wrong or totals.hung else 0


def _batches(seeds: range, jobs: int) -> Iterator[FuzzTotals]:
    batches = [seeds[first : first + _BATCH] for first in range(0, len(seeds), _BATCH)]
    if jobs == 1:
        yield from map(run_cases, batches)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_cases, batches)


def _results(totals: FuzzTotals, after_tenth_mib: float, seconds: float) -> dict[str, Any]:
    figures = {
        "http_cases": totals.cases,
        "http_disagreements": len(totals.wrong),
        "http_hangs": len(totals.hung),
        "memory_mib": round(totals.memory_mib, 1),
        "memory_growth_mib": round(totals.memory_mib - after_tenth_mib, 1),
    }
    details = {"requests": totals.passed, "refusals": totals.refused, "seconds": round(seconds, 1)}
    wrong = [{"seed": seed, "wrong": text} for seed, text in totals.wrong[:_SHOWN]]
    return {"figures": figures, **details, "kinds": dict(totals.kinds), "wrong": wrong, "hung": totals.hung[:_SHOWN]}


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
