"""Measures what shortens a step's tail: `make bench-tail`.

    python -m benchmarks.long_tail [--quick] [--parts NAME ...] [--marginals NAME ...] [--lengths PATH] [--out PATH]

Parts with real programs: `admission` (preemptions of an engine with little memory, with admission by memory and
without), `rewards` (responses scored beside the rollout or behind it; simulated, too), `decisions` (the processor's
time of a round with forecasts, for a thousand workers). Simulated: `seer` (policies in Seer's settings), `freed`
(workers that two runs share). Computed: `lengths` (how often forecast intervals
cover the truth), `order` (step times under orders of starting, in a model of slots), `bias` (what rules of rounds do
to trained lengths and gradients, in a toy model). Recorded lengths are looked for beside the checkout, in
`shared/traces`; without them only the fitted ones are drawn from. Writes a JSON file with `figures`; those that were
not measured are null, and `missing` says why. Ends with 1 if a part failed; what the others found is written
nevertheless.
"""

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.arguments import count, output, result
from benchmarks.conditions import conditions
from benchmarks.long_tail.admission.admission_part import admission_part
from benchmarks.long_tail.bias_part import bias_part
from benchmarks.long_tail.freed_part import freed_part
from benchmarks.long_tail.lengths.length_marginals import TRACES, known_marginals
from benchmarks.long_tail.lengths.lengths_part import lengths_part
from benchmarks.long_tail.lengths.recorded_groups import recorded_coverage, recorded_groups
from benchmarks.long_tail.order.decision_part import decision_part
from benchmarks.long_tail.order.order_part import order_part
from benchmarks.long_tail.rewards.rewards_part import rewards_part
from benchmarks.long_tail.seer.seer_part import seer_part
from benchmarks.long_tail.tail_figures import figure_rows, missing, promised_figures
from ebbtide.errors import InvalidRequest

PARTS: Final = (
    "admission",
    "lengths",
    "order",
    "rewards",
    "seer",
    "bias",
    "freed",
    "decisions",
)


def measured(
    options: argparse.Namespace, tell: Callable[[str], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What the chosen parts tell, by their names, and why others of them failed."""
    drawn = {"quick": options.quick, "jobs": options.jobs, "only": options.marginals or (), "folder": options.traces}
    path = options.lengths
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "admission": lambda: admission_part(tell, quick=options.quick),
        "lengths": lambda: lengths_part(
            tell, recorded=recorded_coverage(path.stem, recorded_groups(path)) if path is not None else [], **drawn
        ),
        "order": lambda: order_part(tell, **drawn),
        "rewards": lambda: rewards_part(tell, quick=options.quick),
        "seer": lambda: seer_part(tell, quick=options.quick, jobs=options.jobs, recorded=_recorded(path)),
        "bias": lambda: bias_part(tell, quick=options.quick),
        "freed": lambda: freed_part(tell, quick=options.quick),
        "decisions": lambda: decision_part(tell, quick=options.quick),
    }
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name in options.parts:
        try:
            found[name] = parts[name]()
        except Exception as error:  # noqa: BLE001 - what the other parts find is worth having
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
    return found, failed


def _recorded(path: Path | None) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, recorded_groups(path))) if path is not None else ()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_tail",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="less data in each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--marginals", nargs="+", help="of the parts lengths and order; default: all")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of recorded marginals")
    parser.add_argument("--lengths", type=Path, help="recorded lengths: group,sample,output_tokens")
    parser.add_argument("--jobs", type=count, default=min(2, len(os.sched_getaffinity(0))), help="processes at a time")
    parser.add_argument("--out", type=output)
    options = parser.parse_args(argv)
    options.out = options.out or result("tail", quick=options.quick)
    names = [one.name for one in known_marginals(options.traces)]
    if unknown := [one for one in options.marginals or () if one not in names]:
        parser.error(f"--marginals: {unknown[0]!r} is not known; name some of {', '.join(names)}")
    if options.lengths is not None:
        try:
            recorded_groups(options.lengths)
        except InvalidRequest as error:
            parser.error(f"--lengths: {error}")
    under, begin_s = conditions() | {"quick": options.quick}, time.monotonic()
    parts, failed = measured(options, partial(print, flush=True))
    figures = promised_figures({name: one for part in parts.values() for name, one in part.pop("figures").items()})
    reasons = missing(figures, failed)
    report = {
        "figures": figures,
        "missing": reasons,
        "failed": failed,
        **parts,
        "took_s": time.monotonic() - begin_s,
        "conditions": under,
    }
    options.out.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    failures = [f"part {name} FAILED: {reason}" for name, reason in failed.items()]
    print(*figure_rows(figures, reasons), *failures, f"All of it is in {options.out}", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
