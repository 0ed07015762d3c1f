"""Measures what thousands of open streams do to a gateway's other calls.

    python -m benchmarks.gateway [--quick] [--out PATH]

Prints a table and writes a JSON file with `figures`.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.gateway.stream_plan import QUICK_STREAMS, StreamPlan
from benchmarks.gateway.streams_part import measure_streams

#: What each figure is at most, as promised.
PROMISED: Final = {
    "streams_callback_max_ms": 50,
    "streams_unary_p99_over_few": 2,
    "one_key_callback_max_ms": 50,
    "one_key_unary_p99_over_few": 2,
    "greedy_key_other_p50_over_alone": 1.5,
    "greedy_key_other_p99_over_alone": 1.5,
}


def figure_row(name: str, value: float) -> str:
    """A figure's line: its value and bound, and whether that holds."""
    return f"{name:32}{value:>10.4g}   <= {PROMISED[name]:g}{'' if value <= PROMISED[name] else '   NOT KEPT'}"


def _notify(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of shorter blocks")
    parser.add_argument("--out", type=arguments.output)
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("gateway", quick=options.quick)
    under = conditions() | {"quick": options.quick}
    found = asyncio.run(measure_streams(QUICK_STREAMS if options.quick else StreamPlan(), _notify))
    figures = {name: found[name] for name in PROMISED}
    told = {"figures": figures, "more": found, "conditions": under}
    options.out.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n")
    print("\n".join(figure_row(name, value) for name, value in figures.items()))
    print(f"All of it is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
