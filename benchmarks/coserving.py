"""A serving engine that lends its idle time: what users notice, and what rollouts get of it, beside other policies.

    python benchmarks/coserving.py [--quick] [--trace PATH --window START:END] [--speed X] [--loads 20,50,80]
        [--policies alone/ours/...] [--requests N] [--noise] [--set FLAG=VALUE] [--out PATH]

Two real vLLM engines share this machine's cores. A process of its own replays a trace of user requests (open loop, real
streaming clients; prompts and outputs scaled by factors that are told) into one of them, through the guard where
the policy has one; the other generates rollouts for a real coordinator with a real store. A load of 50 means that half
of the time a request is inside when serving is alone; `--speed` fixes the speed of the replay instead.

With `--noise` all but the first measurement of serving alone, which sets the SLO, run beside a process that takes 10 to
50 % of a core at random.

Each policy gets the same arrivals, in blocks that take turns. Blocks that were measured are kept below
`runs/bench-coserving`: a benchmark that was interrupted goes on where it was; `--anew` forgets them. Where no recorded
trace is to be found and none is named, one is made up, called `synthetic`.
Prints tables and writes a JSON file with `figures` and the `conditions` that they hold under, and a picture.
"""

import argparse
import asyncio
import csv
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # run as a script, from anywhere

import msgspec  # noqa: E402 - after the path
from rich.console import Console  # noqa: E402

from benchmarks import arguments, proxy  # noqa: E402
from benchmarks.conditions import conditions  # noqa: E402
from benchmarks.pair.results.report import draw, figures, told  # noqa: E402
from ebbtide.demo.coserving.request_traffic import COLUMNS, TrafficBursts, made_up, parse_window  # noqa: E402
from ebbtide.errors import InvalidRequest  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.pair.level import Measuring
    from benchmarks.pair.traffic import Speeds

KEPT: Final = ROOT / "runs" / "bench-coserving"
TRACES: Final = ROOT.parent / "shared" / "traces"
KNOWN: Final = ("serving_azure2023_code_first1700s.csv", "serving_azure2023_conv.csv")
_MADE_UP_S: Final = 3600.0
#: The rollout engine is measured by itself for so long before a scene, and again behind it.
_ALONE_S: Final = 15.0
_WHOLE: Final = (0.0, 1e9)
#: From its eleventh minute on the conversation trace has prompts like the whole for long; its first has other ones,
#: which makes their scale, and with it the scene, hang on how many of them a cell takes.
_QUICK_WINDOW: Final = (600.0, 1e9)
#: Behind ROSE's colon: seconds of an RL step, watermark, headroom, what of the SLO its test is held to.
#: An RL step took ROSE 500 to 1,000 s.
ROSES: Final = (
    "rose:600,1,0.2,1",
    "rose:600,1,0.2,0.5",
    "rose:600,1,0.2,0.25",
    "rose:600,1,0.2,0.1",
    "rose:600,1,0.2,0",
    "rose:600,0.5,0.2,0.5",
    "rose:600,1,0.4,0.25",
    "rose:600,1,0.4,0",
    "rose:60,1,0.2,0.25",
)
ALL: Final = ("alone", "alone-again", "unguarded", "split", *ROSES, "ours", "observe")
_SETTING: Final = re.compile(
    r"rose:[\d.]+(,[\d.]+){3}|(ours|observe)(:[\w-]+=[^+]+(\+[\w-]+=[^+]+)*)?|[a-z-]+(?<!rose)"
)
QUICK: Final = ("alone", "alone-again", "rose:600,1,0.2,0.25", "rose:600,1,0.2,0", "ours")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, action="append", help="CSV with t_s,input_tokens,output_tokens; repeatable"
    )
    parser.add_argument(
        "--window", type=_window, help="seconds of the trace, START:END; default: all; with --quick from 600 on"
    )
    parser.add_argument("--speed", type=arguments.factor, help="of the replay; default: as the loads want")
    parser.add_argument("--loads", type=_loads, help="percent of the time with a request inside; default 20,50,80")
    parser.add_argument(
        "--policies",
        type=_policies,
        help=f"with slashes between; default {'/'.join(ALL)}",
    )
    parser.add_argument("--seconds", type=arguments.factor, help="of each cell")
    parser.add_argument("--requests", type=arguments.count, help="of each cell, in place of seconds")
    parser.add_argument("--block", type=arguments.factor, help="seconds of a block; default 120, with --quick 25")
    parser.add_argument(
        "--set", dest="extra", action="append", default=[], metavar="FLAG=VALUE", help="a flag of our guard"
    )
    parser.add_argument("--quick", action="store_true", help="one trace, loads 20 and 50, three policies: 12 minutes")
    parser.add_argument("--soak", type=arguments.factor, help="one trace alone, then ours for so many seconds")
    parser.add_argument("--noise", action="store_true", help="beside a process that takes 10 to 50 %% of a core")
    parser.add_argument("--anew", action="store_true", help="measure blocks again that are kept")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of both engines; vLLM's CPU kernels for bfloat16 need instructions that not every processor has",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=arguments.output)
    options = parser.parse_args(argv)
    options.loads = options.loads or ((20, 50) if options.quick else (20, 50, 80))
    options.policies = options.policies or (QUICK if options.quick else ALL)
    if "alone" not in options.policies:
        options.policies = ("alone", *options.policies)
    if options.noise and "alone-again" not in options.policies:
        options.policies = (options.policies[0], "alone-again", *options.policies[1:])
    try:
        options.extra = dict(one.split("=", 1) for one in options.extra)
    except ValueError:
        parser.error("--set wants FLAG=VALUE")
    options.window = options.window or (_QUICK_WINDOW if options.quick and not options.trace else _WHOLE)
    options.trace = options.trace or traces(KNOWN[1:] if options.quick else KNOWN, options.seed)
    for path in options.trace:
        if not path.is_file():
            parser.error(f"--trace: {path} is not there; name a CSV with the columns t_s,input_tokens,output_tokens")
    name = f"coserving{'-soak' if options.soak else '-noise' if options.noise else ''}"
    options.out = options.out or arguments.result(name, quick=options.quick)
    return options


def traces(names: Sequence[str], seed: int) -> list[Path]:
    """The recorded ones of these names that are there; if none is, one that is made up and says so in its name."""
    if found := [TRACES / name for name in names if (TRACES / name).is_file()]:
        return found
    made = KEPT / f"synthetic-{seed}.csv"
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((one.at, one.prompt, one.output) for one in made_up(TrafficBursts(), _MADE_UP_S, seed))
    return [made]


def _window(text: str) -> tuple[float, float]:
    try:
        return parse_window(text, field="--window")
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _policies(text: str) -> tuple[str, ...]:
    policies = tuple(part.strip() for part in text.split("/"))
    known = {name.partition(":")[0] for name in ALL}
    if unknown := [name for name in policies if name.partition(":")[0] not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(sorted(known))}")
    if odd := [name for name in policies if not _SETTING.fullmatch(name)]:
        text = "rose has STEP_S,WATERMARK,HEADROOM,HELD behind its colon, ours FLAG=VALUE+FLAG=VALUE, others nothing"
        raise argparse.ArgumentTypeError(f"{', '.join(odd)}: {text}")
    return policies


def _loads(text: str) -> tuple[int, ...]:
    try:
        loads = tuple(int(part) for part in text.split(","))
    except ValueError:
        loads = ()
    if not loads or not all(1 <= load <= 95 for load in loads):
        raise argparse.ArgumentTypeError(f"{text!r}: give percents from 1 to 95, as in 20,50")
    return loads


async def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every cell. See `figures.row` for what is found of each."""
    from benchmarks.pair.keeping import Keeping
    from benchmarks.pair.level import Measuring, probe
    from benchmarks.pair.plan import BLOCK_S, QUICK_BLOCK_S, scene_of
    from benchmarks.pair.soak import soak
    from benchmarks.pair.stack import EngineSizes, pair, setting

    sizes = EngineSizes(dtype=options.dtype)
    keeping = Keeping(KEPT / "blocks", setting(sizes) | {"seed": options.seed})
    with tempfile.TemporaryDirectory(prefix="ebb-pair-") as temporary:
        async with pair(Path(temporary), options.seed, sizes) as both:
            url = await both.serve("serving", 2)
            if (speeds := keeping.speeds()) is None:
                keeping.keep_speeds(speeds := await probe(url))
            console.print(
                f"served engine alone: {speeds.fixed_s * 1e3:.0f} ms and {speeds.prompt_s * 1e6:.0f} us a token read, "
                f"{speeds.token_s * 1e3:.1f} ms a token, {speeds.more_s * 1e3:.1f} ms more for each other request"
            )
            measuring = Measuring(
                both,
                keeping,
                speeds,
                lambda text: console.print(text, markup=False),
                noise=options.noise,
                block_s=options.block or (QUICK_BLOCK_S if options.quick else BLOCK_S),
            )
            found: dict[str, Any]
            if options.soak:
                scene, _ = scene_of(options, options.trace[0], options.loads[0], speeds)
                alone = await measuring.speed_alone(_ALONE_S)
                found = {"soak": await soak(measuring, scene, alone, options.soak, options.extra)}
            else:
                found = await _cells(options, console, measuring, speeds)
            await measuring.drain()
            return found | {
                "books": both.books(),
                "speeds": msgspec.to_builtins(speeds),
                "pair": setting(sizes),
                "blocks_measured_before": keeping.found,
            }


async def _cells(
    options: argparse.Namespace, console: Console, measuring: "Measuring", speeds: "Speeds"
) -> dict[str, Any]:
    """A row for each policy of each scene, and what was measured of each engine alone."""
    from benchmarks.pair.plan import scene_of
    from benchmarks.pair.results.figures import Alone
    from benchmarks.pair.results.report import alone_run

    cells: list[dict[str, Any]] = []
    alone_runs: dict[str, Any] = {}
    for path, load in product(options.trace, (0,) if options.speed else options.loads):
        scene, lengths = scene_of(options, path, load, speeds)
        console.print(
            f"\n{scene.name}: {len(scene.requests)} requests in {scene.requests[-1].at:.0f} s, "
            f"prompts x {lengths.prompts}, outputs x {lengths.outputs}",
            style="bold",
        )
        seconds = _ALONE_S * (0.4 if options.quick else 1.0)
        before = await measuring.speed_alone(seconds)
        found = await measuring.scene(scene, options.policies, options.extra)
        after = await measuring.speed_alone(seconds)
        console.print(
            f"rollouts alone: {before.tokens_per_s:.0f} tokens/s before, {after.tokens_per_s:.0f} behind; "
            f"steps of {before.step_s * 1e3:.1f} and {after.step_s * 1e3:.1f} ms"
        )
        alone = Alone(
            tokens_per_s=(before.tokens_per_s + after.tokens_per_s) / 2,
            step_s=(before.step_s + after.step_s) / 2,
            samples=before.samples + after.samples,
        )
        alone_runs[scene.name] = alone_run(found["alone"], alone)
        scaled = {"prompts": lengths.prompts, "outputs": lengths.outputs}
        cells += [one | scaled for one in told(scene.name, path.stem, load, found, alone, console, noise=options.noise)]
        if "ours" in found:
            draw(scene.name, found, options.out.with_name(f"{options.out.stem}-{scene.name}.png"))
    return {"cells": cells, "alone_runs": alone_runs}


def main(argv: Sequence[str] | None = None) -> int:
    options, console = parse(argv), Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    began, under = time.monotonic(), conditions()
    if options.anew:
        shutil.rmtree(KEPT / "blocks", ignore_errors=True)
    try:
        found = asyncio.run(measure(options, console))
        if "cells" in found:
            console.print("\nwhat the proxy adds", style="bold")
            found["proxy"] = proxy.measure(quick=True)
    except InvalidRequest as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 2
    seconds = round(time.monotonic() - began, 1)
    result = figures(found) if "cells" in found else found["soak"] | found["books"]
    replayed = {"traces": [path.name for path in options.trace], "window": options.window, "seed": options.seed}
    replayed |= {"quick": options.quick, "noise": options.noise, "set": options.extra}
    told = {
        "figures": result,
        "conditions": under | replayed | {"seconds": seconds},
        **found,
    }
    options.out.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n")
    console.print("")
    for name, value in result.items():
        console.print(
            f"{name:<32} {value:.4g}" if isinstance(value, float) else f"{name:<32} {json.dumps(value)}", markup=False
        )
    console.print(f"\n{seconds:.0f} s on {under['cores']} cores. All of it is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
