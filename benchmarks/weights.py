"""Weights on their way: what a version costs in bytes and time, and what cannot pass for one.

    python benchmarks/weights.py [--parts codec,links,mutants] [--quick] [--out PATH]
    python benchmarks/weights.py --from A.safetensors --to B.safetensors

codec    patches beside what else is in use, on real consecutive policies and synthetic ones: bytes, speed, memory
links    versions on their way to real processes over shaped links
mutants  broken manifests, patches and tiles, offered to what reads them

The first run trains the networks whose consecutive versions are compared (minutes), and keeps them below
`runs/bench-weights`. Prints tables and writes a JSON file with `figures`, the `conditions` that they hold under, and
all that the parts found: `weights.json` if all of them ran, else `weights-PARTS.json`. A figure that was not measured
is null, and `missing` says why. Ends with 1 if a part failed or a mutant passed; with 2 if the input is at fault.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # run as a script, from anywhere

from benchmarks import arguments  # noqa: E402 - after the path
from benchmarks.conditions import conditions  # noqa: E402
from ebbtide.errors import InvalidRequest  # noqa: E402

MUTANTS: Final = 10_000
#: Part -> its module. `run_level(quick=, tell=)` of the first two gives an object with `figures`.
PARTS: Final = {"codec": "benchmarks.patches", "links": "benchmarks.distribution", "mutants": "benchmarks.mutants"}
#: Figure -> the part that measures it, and what is promised of it.
PROMISED: Final[dict[str, tuple[str, str, float]]] = {
    "patch_over_entropy_bound": ("codec", "<=", 1.1),
    "xor_zstd_over_patch": ("codec", ">=", 1.8),
    "astraflow_over_patch": ("codec", ">=", 6.0),
    "patch_over_best_other": ("codec", "<=", 1.01),
    "encode_over_memcpy": ("codec", ">=", 0.4),
    "apply_over_memcpy": ("codec", ">=", 1.0),
    "memory_overhead": ("codec", "<=", 0.1),
    "slow_link_bytes_over_one_copy": ("links", "<=", 1.02),
    "last_install_over_one_transfer": ("links", "<=", 1.3),
    "full_over_patches": ("links", ">=", 15.0),
    "mutants_accepted": ("mutants", "<=", 0),
    "mutants_that_crashed_a_reader": ("mutants", "<=", 0),
}
#: Of these, what is not kept makes the benchmark fail: they do not depend on the machine.
STRICT: Final = ("mutants_accepted", "mutants_that_crashed_a_reader")


def present() -> list[str]:
    """The parts that there are."""
    return [part for part, module in PARTS.items() if find_spec(module)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=_parts, help=f"some of {','.join(PARTS)}; default: {','.join(present())}")
    parser.add_argument("--from", dest="base", type=Path, help="a version, as one safetensors file; codec alone runs")
    parser.add_argument("--to", dest="new", type=Path, help="the version after it")
    parser.add_argument("--quick", action="store_true", help="the same on less data: 4 minutes on two cores")
    parser.add_argument("--threads", type=arguments.count, default=1, help="to train networks with")
    parser.add_argument(
        "--out", type=arguments.output, help="default: benchmarks/results/weights.json, if all parts run on all data"
    )
    options = parser.parse_args(argv)
    if (options.base is None) != (options.new is None):
        parser.error("--from and --to name a pair: give both")
    if options.base and options.parts not in {None, ("codec",)}:
        parser.error("--from and --to are for the codec alone")
    options.parts = options.parts or (("codec",) if options.base else tuple(present()))
    try:
        options.out = options.out or arguments.result(_name(options), quick=options.quick)
    except argparse.ArgumentTypeError as error:
        parser.error(f"--out: {error}")
    return options


def _name(options: argparse.Namespace) -> str:
    """Figures of some parts, or of somebody's pair, are not to take the place of those of the whole."""
    if options.base:
        return "weights-given"
    return "weights" if set(options.parts) == set(PARTS) else f"weights-{'-'.join(options.parts)}"


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if unknown := [part for part in parts if part not in present()]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(present())}")
    return parts


def run_part(part: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """What a part found. Raises `InvalidRequest` if the files that were named are no pair."""
    tell, module = partial(console.print, soft_wrap=True, markup=False), importlib.import_module(PARTS[part])
    if part == "mutants":
        return mutants(module.offer(MUTANTS))
    settings: dict[str, Any] = {"quick": options.quick, "tell": tell}
    if part == "codec":
        settings["threads"] = options.threads
        settings["given"] = (options.base, options.new) if options.base else None
    found: dict[str, Any] = module.run_level(**settings)
    return found


def mutants(verdict: Any) -> dict[str, Any]:
    """The figures of a `benchmarks.mutants.Verdict`."""
    figures = {
        "mutants_accepted": len(verdict.accepted),
        "mutants_tried": verdict.tried,
        "mutants_that_only_blobs_tell": verdict.allowed,
        "mutants_that_crashed_a_reader": len(verdict.crashed),
        "mutants_peak_bytes": verdict.peak_bytes,
    }
    return {"figures": figures, "accepted": verdict.accepted, "crashed": verdict.crashed, "refused": verdict.refused}


def combine(found: dict[str, dict[str, Any]], asked: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """All figures of all parts, and why promised ones are missing."""
    figures: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, (part, _, _) in PROMISED.items():
        figures[name] = found.get(part, {}).get("figures", {}).get(name)
        if figures[name] is None:
            missing[name] = f"{part} {'brought none' if part in asked else 'was not asked for'}"
    for result in found.values():
        figures |= result["figures"]
    return figures, missing


def kept(name: str, value: Any) -> bool:
    """Whether what is promised of a figure holds; so it does of one that was not measured, or has no promise."""
    if value is None or name not in PROMISED:
        return True
    _, sign, promised = PROMISED[name]
    return bool(value >= promised) if sign == ">=" else bool(value <= promised)


def table(figures: dict[str, Any], missing: dict[str, str]) -> str:
    """A line per figure: what was measured, what is promised, and what is wrong with it."""
    width = max(map(len, figures))
    lines = []
    for name, value in figures.items():
        _, sign, promised = PROMISED.get(name, ("", "", 0.0))
        shown = f"{value:,.4g}" if isinstance(value, int | float) else json.dumps(value)
        note = missing.get(name, "" if kept(name, value) else "NOT KEPT")
        lines.append(f"{name:<{width}}  {shown:>12}  {f'{sign} {promised:g}' if sign else '':>10}  {note}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options, console = parse(argv), Console(highlight=False)
    began, under = time.monotonic(), conditions()
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for part in options.parts:
        console.print(f"\n{part}", style="bold")
        try:
            found[part] = run_part(part, options, console)
        except InvalidRequest as error:
            print(f"{Path(__file__).name}: {error}", file=sys.stderr)
            return 2
        except Exception as error:  # noqa: BLE001 - the other parts' figures are worth having
            traceback.print_exc()
            failed[part] = f"{type(error).__name__}: {error}"
    figures, missing = combine(found, options.parts)
    seconds = round(time.monotonic() - began, 1)
    under |= {"quick": options.quick, "parts": list(options.parts), "seconds": seconds}
    under["less"] = {part: result["less"] for part, result in found.items() if result.get("less")}
    under |= {
        "figures": {name: text for result in found.values() for name, text in result.get("conditions", {}).items()}
    }
    told = {"figures": figures, "missing": missing, "failed": failed, "conditions": under, "parts": found}
    options.out.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n")
    print(f"\n{table(figures, missing)}")
    console.print(f"\n{seconds:.0f} s on {under['cores']} cores. All of it is in {options.out}")
    return 1 if failed or not all(kept(name, figures[name]) for name in STRICT) else 0


if __name__ == "__main__":
    sys.exit(main())
