"""A thousand workers at one coordinator: `python -m benchmarks.scale [--quick] [--against PATH] [--out PATH]`.

Real processes: Redis that syncs every write, a coordinator whose event loop is measured, its standby, and scripted
workers, many in a process. Each has 64 slots; 100,000 rollouts of 20 runs and several users wait. The parts:

tokens    the cost of a million tokens, and how soon they are acknowledged, at 200,000 tokens/s of a hundred workers
crowd     a thousand workers arrive, idle, are filled, work, lose half of their number and then their coordinator
growth    what finished rollouts leave behind in coordinator and Redis
virtual   the crowd's decisions and memory in virtual time, without what the load itself costs the machine
http      generated HTTP messages through the guard's proxy, which both ends have to read alike

`figures` are those that are promised; `more` has all others. With `--against` the parts run in turns on the code of
another checkout (after `make env` there), whose figures are `baseline`; the virtual part has none.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import uvloop
from msgspec.structs import replace

from benchmarks import arguments
from benchmarks.conditions import commit, conditions
from benchmarks.scale.busy import busy
from benchmarks.scale.crowd import Crowd
from benchmarks.scale.figures import beyond, chosen, missing, table
from benchmarks.scale.growth import grow
from benchmarks.scale.http_messages import fuzz_http
from benchmarks.scale.plan import QUICK, ScalePlan
from benchmarks.scale.token_path import measure_tokens
from benchmarks.scale.town import Town
from benchmarks.scale.virtual import in_virtual_time

PARTS: Final = ("tokens", "crowd", "growth", "virtual", "http")
#: They measure no coordinator of another checkout.
_OWN: Final = {"virtual", "http"}


def _say(line: str) -> None:
    print(line, flush=True)


async def measure(part: str, plan: ScalePlan, checkout: Path | None = None, logs: Path | None = None) -> dict[str, Any]:
    """The figures of one part, with the code of a checkout; None: of this one. `logs`: see `Town`."""
    if part == "tokens":
        return await measure_tokens(plan, checkout, _say)
    if part == "virtual":
        return {"virtual": await in_virtual_time(plan)}
    if part == "http":
        return await fuzz_http(plan)
    async with Town(fleets=plan.fleets, users=plan.users, checkout=checkout, logs=logs) as town:
        if part == "growth":
            return await grow(town, plan, _say)
        crowd = Crowd(town, plan, _say)
        await crowd.run()
        return crowd.figures | {"phases": crowd.phases}


def run(
    plan: ScalePlan, parts: Sequence[str], against: Path | None, logs: Path | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All figures of this checkout and of the other, part by part in turns."""
    found: dict[Path | None, dict[str, Any]] = {against: {}, None: {}}
    for part in parts:
        for checkout, figures in found.items():
            if checkout and part in _OWN:
                continue
            began = time.monotonic()
            figures.update(uvloop.run(measure(part, plan, checkout, logs and logs / part)))
            took = figures[f"{part}_took_s"] = round(time.monotonic() - began, 1)
            _say(f"{part}{f' of {checkout}' if checkout else ''}: {took} s")
    return found[None], found[against] if against else {}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less of everything but the fleet, in 8 minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rate", type=arguments.factor, default=ScalePlan().rate, help="tokens/s of the whole fleet")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument(
        "--workers",
        type=arguments.count,
        default=ScalePlan().workers,
        help="an even number; so many times 100 rollouts wait",
    )
    parser.add_argument(
        "--kills", type=arguments.count, default=1, help="of the leading coordinator, one after another"
    )
    parser.add_argument("--beside", type=arguments.share, help="share of a core that another process takes meanwhile")
    parser.add_argument(
        "--within",
        type=arguments.factor,
        help="end with 1 if a figure is more than so many times what is promised, or so many where none is",
    )
    parser.add_argument("--logs", type=Path, help="a folder for the coordinators' logs")
    parser.add_argument("--out", type=arguments.output, help="file of figures")
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("scale", quick=options.quick)
    plan = QUICK if options.quick else ScalePlan()
    queued = plan.queued * options.workers // plan.workers
    plan = replace(plan, rate=options.rate, kills=options.kills, workers=options.workers, queued=queued)
    began, under = time.monotonic(), conditions()
    with busy(options.beside or 0.0):
        found, baseline = run(plan, options.parts, options.against and options.against.absolute(), options.logs)
    under |= {"fsync": "always", "quick": options.quick, "seconds": round(time.monotonic() - began, 1)}
    under["beside"] = options.beside or 0.0
    told: dict[str, Any] = {"figures": chosen(found), "missing": missing(found), "more": found, "conditions": under}
    if baseline:
        told["baseline"] = {"figures": chosen(baseline), "more": baseline, "conditions": commit(options.against)}
    options.out.write_text(json.dumps(told, indent=2) + "\n")
    _say(table(told))
    _say(f"All of it is in {options.out}")
    if failed := beyond(told["figures"], options.within) if options.within else []:
        _say(f"more than {options.within:g} times what is promised: {', '.join(failed)}")
        for name, phase in found.get("phases", {}).items():
            _say(
                f"{name}: {phase['workers_lost_unasked']} workers were lost unasked so far; "
                f"the workers' own loops were late by {phase['workers_longest_lag_s']} s"
            )
        _say(f"the coordinator warned: {found.get('warnings')}")
    return 1 if failed or told["figures"].get("tokens_lost") else 0


if __name__ == "__main__":
    sys.exit(main())
