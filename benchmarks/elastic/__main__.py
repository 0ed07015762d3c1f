"""Compares windows of trainers that generate between their steps: `make bench-elastic`.

Parts: `windows` simulates published settings under ten policies and more; `lending` simulates what loans are worth in
small cases; `gradient` and `switches` measure this machine. The figures of parts that are not run are null, and the
file says why.

The recorded spot traces are looked for beside the checkout, in `shared/traces`; elsewhere name them by `--spot`.
Without them traces are made up, and the file says `synthetic` of each. Simulations that were made are kept below
`runs/bench-elastic`, under the digest of all code and inputs that they depend on. So a benchmark that was interrupted
goes on where it was; `--anew` forgets them. Ends with 1 if a part failed.
"""

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.arguments import count, output, result
from benchmarks.conditions import conditions
from benchmarks.elastic.elastic_part import FIGURES, PARTS, PartFindings, PartTerms, part
from benchmarks.elastic.elastic_policies import COMPARED
from benchmarks.elastic.elastic_setting import MODELS

_ROOT: Final = Path(__file__).parents[2]
_KEPT: Final = _ROOT / "runs" / "bench-elastic"


def terms(argv: Sequence[str] | None) -> tuple[PartTerms, argparse.Namespace]:
    """What the parts are asked for, and the rest of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps and policies: twelve minutes on two cores")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--spot", nargs="+", type=_file, default=[], help="spot traces: t_s,event,node or t_s,count")
    parser.add_argument("--lengths", type=_file, help="of responses: quantile,output_tokens or tokens,cdf")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[])
    parser.add_argument("--policies", nargs="+", choices=list(COMPARED), default=[])
    parser.add_argument("--steps", type=count, help="steps of each case")
    parser.add_argument("--switches", type=count, help="switches of live devices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=count, default=min(2, len(os.sched_getaffinity(0))), help="processes at a time")
    parser.add_argument("--anew", action="store_true", help="make simulations again that are kept")
    parser.add_argument("--out", type=output)
    options = parser.parse_args(argv)
    options.out = options.out or result("elastic", quick=options.quick)
    asked: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in PartTerms.__struct_fields__
    }
    return PartTerms(tell=_tell, kept=_KEPT, **asked), options


def main(argv: Sequence[str] | None = None) -> int:
    asked, options = terms(argv)
    if options.anew:
        shutil.rmtree(_KEPT, ignore_errors=True)
    begin_s, under = time.monotonic(), conditions()
    report = run_parts(asked, options.parts)
    report |= {"took_s": round(time.monotonic() - begin_s, 1), "conditions": under | {"quick": asked.quick}}
    options.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    for name, value in report["figures"].items():
        print(f"{name:<38} {'null' if value is None else f'{value:.4g}':<8} {report['skipped'].get(name, '')}")
    for name, reason in report["failed"].items():
        print(f"part {name} FAILED: {reason}")
    print(f"written to {options.out}")
    return 1 if report["failed"] else 0


def run_parts(asked: PartTerms, names: Sequence[str]) -> dict[str, Any]:
    """What each part found, why figures are null, and why parts failed."""
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    parts: dict[str, Any] = {}
    simulated: list[str] = []
    for name in (one for one in PARTS if one in names):
        asked.tell(f"part {name}")
        begin_s = time.monotonic()
        try:
            found = part(name)(asked)
            figures |= _known(name, found)
        except Exception as error:  # noqa: BLE001 - the other parts' figures are worth having
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        skipped |= found.skipped
        simulated += found.figures if found.simulated else ()
        if found.failures:
            failed[name] = "; ".join(found.failures)
        parts[name] = {"took_s": round(time.monotonic() - begin_s, 1), "found": msgspec.to_builtins(found.details)}
    nulls = {
        name: skipped.get(name) or _why_null(FIGURES[name], failed) for name, value in figures.items() if value is None
    }
    return {"figures": figures, "simulated": simulated, "skipped": nulls, "failed": failed, "parts": parts}


def _why_null(name: str, failed: Mapping[str, str]) -> str:
    return f"part {name} failed: {failed[name]}" if name in failed else f"part {name} was not run"


def _known(name: str, found: PartFindings) -> dict[str, float | None]:
    if unknown := [figure for figure in found.figures if FIGURES.get(figure) != name]:
        raise ValueError(f"part {name} brings {', '.join(unknown)}, which `FIGURES` does not have for it")
    return dict(found.figures)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file; name one that can be read")
    return path.resolve()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
