"""`python -m benchmarks.elastic.switches [--quick] [--switches N] ...`: prints the findings as JSON; ends with 1 if one
of them may not be.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.arguments import count
from benchmarks.elastic.switches.switch_accounts import SwitchFindings, findings
from benchmarks.elastic.switches.switch_run import WINDOW_S, switched_run
from benchmarks.elastic.switches_part import plan_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic.switches")
    parser.add_argument("--quick", action="store_true", help="some three minutes on two cores")
    parser.add_argument("--switches", type=count, help="switches of the device")
    parser.add_argument("--kills", type=int, help="how many programs are killed meanwhile")
    parser.add_argument("--window-s", type=float, default=WINDOW_S, help="the trainer's; 0: it plans its windows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where logs stay; must be empty")
    options = parser.parse_args()
    plan = replace(plan_of(quick=options.quick, switches=options.switches), window_s=options.window_s)
    if options.kills is not None:
        plan = replace(plan, kills=options.kills)
    with tempfile.TemporaryDirectory(prefix="ebb-switches-") as temporary:
        work = switched_run(options.directory or Path(temporary), plan, seed=options.seed, tell=_tell)
        found: SwitchFindings = findings(asyncio.run(work))
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    failures = list(found.failures())
    for failure in failures:
        _tell(f"failed: {failure}")
    return 1 if failures else 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
