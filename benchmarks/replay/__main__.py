"""Replay spot traces: `python -m benchmarks.replay --trace PATH --lengths PATH`, from the root of the repository."""

import argparse
import json
import sys
from pathlib import Path

from msgspec import structs

from benchmarks import arguments
from benchmarks.replay.report import table
from benchmarks.replay.run import UNEVEN, run_level, unknown
from benchmarks.replay.setting import CAP_HELP, CAP_TOKENS, Setting
from ebbtide.checked_files import FileRefused
from ebbtide.simulator.scenario.input_tables import read_quantiles, read_spot_trace


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", required=True, help="t_s,event,node or t_s,count")
    parser.add_argument(
        "--lengths", type=Path, action="append", required=True, help="quantile,output_tokens or tokens,cdf"
    )
    parser.add_argument(
        "--stretch", type=arguments.factor, nargs="+", default=[1.0, 4.0], help="factors on the lengths"
    )
    parser.add_argument("--cap", type=arguments.count, default=CAP_TOKENS, help=CAP_HELP)
    parser.add_argument(
        "--slots", type=arguments.count, nargs="+", default=[64, 8], help="rollouts that a worker runs at once"
    )
    parser.add_argument("--start-s", type=arguments.seconds, default=0.0, help="begin of a window of the trace")
    parser.add_argument(
        "--span-s", type=arguments.seconds, default=0.0, help="length of the window (0: the whole trace)"
    )
    parser.add_argument("--share", type=arguments.share, default=1.0, help="share of the trace's machines to keep")
    parser.add_argument(
        "--machines", type=arguments.count, default=0, help="keep such a share that about so many are there at most"
    )
    parser.add_argument(
        "--uneven", action="store_true", help="workers differ by up to 30 %% in speed, and long contexts cost time"
    )
    parser.add_argument(
        "--gap-s", type=arguments.seconds, default=0.0, help="time between steps, the same for all policies"
    )
    parser.add_argument("--seeds", "--seed", type=int, nargs="+", default=[0], help="figures are means over them")
    parser.add_argument(
        "--quick", action="store_true", help="ninety minutes of each trace, with fewer machines and rollouts"
    )
    parser.add_argument("--json", type=arguments.output, help="write all figures there")
    args = parser.parse_args()
    try:
        for path in args.trace:
            read_spot_trace(path, str(path))
        for path in args.lengths:
            read_quantiles(path, str(path))
    except FileRefused as error:
        parser.error(str(error))
    report = run_level(
        args.trace,
        args.lengths,
        stretches=args.stretch,
        slots=args.slots,
        setting=structs.replace(
            UNEVEN if args.uneven else Setting(), seed=args.seeds[0], gap_s=args.gap_s, cap_tokens=args.cap
        ),
        quick=args.quick,
        start_s=args.start_s,
        span_s=args.span_s,
        share=args.share,
        machines=args.machines,
        seeds=args.seeds,
    )
    print(table(report["cases"]))
    print("\nfigures:", json.dumps(report["figures"], indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if missing := unknown(report["figures"]):
        print(f"not known, since some policy ended no step in some case: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


sys.exit(main())
