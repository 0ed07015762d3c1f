"""How turn routing does on two real engines, beside the least loaded worker and the session's own one.

    python -m benchmarks.turn_routing.engines [--quick] [--seed N] [--out PATH]

Two vLLM engines with prefix caches, each with one thread, serve blocks of the same sessions under a live coordinator,
which places by one rule after another. Hits are the engines' own count: the share of the tokens that a turn repeats
which the engine had. Prints a row for each block and writes a JSON file with medians, and of ratios of a round.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from functools import partial

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.turn_routing.engines.engine_trials import QUICK_ROUNDS, ROUNDS, measure_engines
from benchmarks.turn_routing.engines.ruled_coordinator import OURS, RULES


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.turn_routing.engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"rounds: {QUICK_ROUNDS}, not {ROUNDS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=arguments.output)
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("turn_routing_engines", quick=options.quick)
    under = conditions() | {"quick": options.quick, "seed": options.seed}
    found = asyncio.run(measure_engines(options.seed, partial(print, flush=True), quick=options.quick))
    options.out.write_text(json.dumps(found | {"conditions": under}, indent=2, allow_nan=False) + "\n")
    for rule in RULES:
        if rule != OURS:
            ratios = ", ".join(f"{name} {value:.3f}" for name, value in found[f"over_{rule}"].items())
            print(f"{OURS} over {rule:<14} {ratios}")
    prefill = found["prefill"]
    print(f"prefill: learnt {prefill['learnt_tokens_per_s']}, alone {prefill['alone_tokens_per_s']} tokens/s")
    print(f"All of it is in {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
