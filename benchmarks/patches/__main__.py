"""Patches of a version of the weights: how fast they are made, published, checked, applied and pulled, beside memcpy.

    python -m benchmarks.patches [--quick] [--out PATH]

How large patches are is tested: `tests/unit/weights/patch/test_tiles.py` has them beside their entropy and other
formats. Prints a table and writes a JSON file with `figures`. Ends with 1 if a patch was not exact.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.patches.speeds import speeds

#: Of the tensor. Quick: three of 64 MB are twice the largest caches of today.
_ELEMENTS, _QUICK_ELEMENTS = 100_000_000, 32_000_000
_ROUNDS, _QUICK_ROUNDS = 15, 5
_DENSITY: Final = 0.03
#: What is promised of speeds, as shares of memcpy's.
PROMISED: Final = {"encode": 0.4, "apply": 1.0}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.patches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a third of the elements, in a third of the rounds")
    parser.add_argument("--threads", type=arguments.count, default=1)
    parser.add_argument("--out", type=arguments.output)
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("patches", quick=options.quick)
    under = conditions() | {"quick": options.quick}
    elements, rounds = (_QUICK_ELEMENTS, _QUICK_ROUNDS) if options.quick else (_ELEMENTS, _ROUNDS)
    found = speeds(elements, _DENSITY, rounds, options.threads)
    figures = {f"{name}_over_memcpy": value for name, value in found["over_memcpy"].items() if name != "memcpy"}
    told = {"figures": figures, "more": found, "conditions": under}
    options.out.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n")
    print(f"{found['bytes'] / 1e6:.0f} MB of bf16, {found['density']:.2%} changed, medians of {rounds} rounds")
    for name, value in found["over_memcpy"].items():
        least = PROMISED.get(name, 0.0)
        note = f">= {least:g}{'' if value >= least else '   NOT KEPT'}" if least else ""
        print(f"{name:8} {found['gb_per_cpu_s'][name]:7.2f} GB per CPU second {value:7.3f} x memcpy  {note}".rstrip())
    print(f"All of it is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
