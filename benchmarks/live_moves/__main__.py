"""What moves of running rollouts between two real engines gain, beside the same steps without them.

    python -m benchmarks.live_moves [--quick] [--scenario NAME] [--pairs N] [--seed N] [--directory PATH]
                                   [--out PATH]

Two vLLM engines on a core each serve steps of greedy rollouts with a long tail, in turn with the coordinator's moves
and without: `steady`, where both engines are there from the beginning, and `late`, where the second one joins a step
under way, whose rollouts are all at the first. A step's time is that from its submit until its last rollout has
finished; a ratio above 1 says that moves make steps shorter. Prints a row for each step and writes a JSON file.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.live_moves.move_trials import PAIRS, QUICK_PAIRS, SCENARIOS, measure_moves


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live_moves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"pairs of each scenario: {QUICK_PAIRS}, not {PAIRS}")
    parser.add_argument("--scenario", choices=SCENARIOS, help="one of them; default: all")
    parser.add_argument("--pairs", type=arguments.count, help="of each scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where logs stay; must be empty")
    parser.add_argument("--out", type=arguments.output)
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("live_moves", quick=options.quick)
    pairs = options.pairs or (QUICK_PAIRS if options.quick else PAIRS)
    under = conditions() | {"quick": options.quick, "seed": options.seed, "pairs": pairs}
    scenarios = [options.scenario] if options.scenario else SCENARIOS
    found = asyncio.run(
        measure_moves(options.seed, scenarios, pairs, partial(print, flush=True), directory=options.directory)
    )
    options.out.write_text(json.dumps(found | {"conditions": under}, indent=2, allow_nan=False) + "\n")
    figures = found["figures"]
    for scenario in scenarios:
        print(_summary(scenario, figures))
    print(
        f"{figures['unequal_responses']} responses were unequal, {figures['tokens_twice']} tokens were made twice, "
        f"{figures['moves_while_off']} moves while they were off"
    )
    print(f"All of it is in {options.out}")
    return int(bool(figures["unequal_responses"] or figures["tokens_twice"] or figures["moves_while_off"]))


def _summary(scenario: str, figures: dict[str, Any]) -> str:
    ratios, moves = figures[f"{scenario}_speed_ratios"], figures["moves"][scenario]
    return (
        f"{scenario:<7} speed with moves over that without: median {figures[f'{scenario}_speed_ratio']:.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}), moves {moves}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
