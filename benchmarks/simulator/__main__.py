"""How good the simulator is: beside real engines, beside published points, and in its speed.

    python -m benchmarks.simulator [--quick] [--parts real published speed] [--measured PATH] [--out PATH]

real       settings measured on this machine's real engines, and simulated with profiles fitted to other work
published  points of papers that no setting was fitted to
speed      a day of 32 workers and half an hour of 1,000 workers; null if quick

Prints tables and writes a JSON file with `figures`, and all that the parts found. A figure that was not measured is
null, and `missing` says why. Ends with 1 if a part failed.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.log_level import errors_only
from benchmarks.simulator.parts import FIGURES, PARTS, PartOptions, PartResult
from ebbtide.cli.interrupts import INTERRUPTED
from ebbtide.cli.interrupts import run as run_interruptible


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two real settings of ten steps: ten minutes")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--measured", type=Path, help="judge this session in place of measuring a new one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=arguments.output)
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("simulator", quick=options.quick)
    if options.measured is not None and not options.measured.is_file():
        parser.error(f"--measured: {options.measured} is not there; benchmarks.simulator.real_settings writes one")
    return options


async def run_parts(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """What each part found, why others failed, and what each took."""
    given = PartOptions(
        quick=options.quick,
        seed=options.seed,
        measured=options.measured,
        real_out=options.out.with_name(f"{options.out.stem}_real.json"),
        tell=partial(console.print, soft_wrap=True, markup=False),
    )
    figures: dict[str, float | None] = {name: None for names in FIGURES.values() for name in names}
    missing = {name: f"part {part} was not asked for" for part, names in FIGURES.items() for name in names}
    told: dict[str, Any] = {"failed": {}, "seconds": {}, "parts": {}}
    for part in dict.fromkeys(options.parts):
        console.print(f"\n{part}", style="bold")
        began = time.monotonic()
        try:
            result = await PARTS[part](given)
        except Exception as error:  # noqa: BLE001 - the other parts' figures are worth having
            traceback.print_exc()
            told["failed"][part] = f"{type(error).__name__}: {error}"
            missing |= dict.fromkeys(FIGURES[part], f"part {part} failed")
        else:
            figures |= result.figures
            missing |= dict.fromkeys(FIGURES[part], f"part {part} {'failed' if result.failures else 'brought none'}")
            if result.failures:
                told["failed"][part] = "; ".join(result.failures)
            told["parts"][part] = result.details
            _show(console, result)
            for failure in result.failures:
                console.print(f"failed: {failure}", markup=False)
        told["seconds"][part] = round(time.monotonic() - began, 1)
    known = {name: text for name, text in missing.items() if figures[name] is None}
    return {"figures": figures, "missing": known, **told}


def _show(console: Console, result: PartResult) -> None:
    if not result.table:
        return
    head, *rows = result.table
    table = Table(*head, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    options, console = parse(argv), Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    errors_only()
    under, told = conditions() | {"quick": options.quick, "seed": options.seed}, dict[str, Any]()

    async def run() -> int:
        told.update(await run_parts(options, console))
        return 1 if told["failed"] else 0

    status = run_interruptible(run)
    if status == INTERRUPTED:
        print("Interrupted; all processes are gone", file=sys.stderr)
        return status
    options.out.write_text(json.dumps({**told, "conditions": under}, indent=2, allow_nan=False) + "\n")
    for name, value in told["figures"].items():
        console.print(f"{name:<34} {'null' if value is None else f'{value:.4g}'}  {told['missing'].get(name, '')}")
    console.print(f"\nAll of it is in {options.out}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
