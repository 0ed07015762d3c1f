"""Preemption, migration and balancing, measured on two levels.

    python benchmarks/migration.py [--trace PATH ...] [--lengths PATH ...] [--levels ab] [--quick] [--out PATH]

(a) Whole spot traces in the simulator, on the very code that decides in the coordinator: restart, migrate,
    balance, RLBoost's Algorithm 2, and a fair oracle on the same fleet.
(b) Real vLLM workers that are really killed, each token compared with that of an undisturbed run.

Prints tables and writes a JSON file with `figures`, the `conditions` that they hold under, and all that the levels
found. A figure that was not measured is null, and `missing` says why. Ends with 1 if a level failed, or a token that
was acknowledged came out lost or twice; with 2 if the input is at fault.
"""

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from rich.console import Console

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # run as a script, from anywhere

from benchmarks import arguments  # noqa: E402 - after the path
from benchmarks.conditions import conditions  # noqa: E402
from benchmarks.replay.report import LEGEND  # noqa: E402
from benchmarks.replay.setting import CAP_HELP, CAP_TOKENS  # noqa: E402
from benchmarks.synthetic import CALM, CHURNY, write_lengths, write_trace  # noqa: E402
from ebbtide.checked_files import FileRefused  # noqa: E402
from ebbtide.simulator.scenario.input_tables import read_quantiles, read_spot_trace  # noqa: E402

Tell = Callable[[str], None]
TRACES: Final = ROOT.parent / "shared" / "traces"
SPOT: Final = ("spot_aws_g4dn_24.csv", "spot_gcp_a100x1_64.csv")
LENGTHS: Final = "response_length_deepseek_r1_quantiles.csv"
STRETCHES: Final = (1.0, 4.0)
#: Both levels are to take three minutes on two cores.
_QUICK_KILLS: Final = 3
#: Level -> its name, and what it is.
LEVELS: Final = {
    "a": ("replay", "spot traces in simulated time"),
    "b": ("real_kills", "real engines, really killed"),
}
#: Figure -> the level that measures it, and what is promised of it. Of several traces the worst.
PROMISED: Final[dict[str, tuple[str, str, float]]] = {
    "acknowledged_tokens_lost": ("b", "<=", 0),
    "acknowledged_tokens_doubled": ("b", "<=", 0),
    "replay_share_of_fair_oracle": ("a", ">=", 0.92),
    "share_generated_twice": ("a", "<=", 0.001),
    "speedup_over_restart": ("a", ">=", 1.0),
    "replay_balancing_over_none": ("a", ">=", 0.995),
    "replay_balancing_over_none_mean": ("a", ">=", 1.03),
    "replay_moves_per_rollout": ("a", "<=", 0.5),
    "detection_p99_s": ("b", "<=", 3.0),
    "resume_p50_s": ("b", "<=", 1.0),
    "resume_p99_s": ("b", "<=", 5.0),
    "unequal_responses": ("b", "<=", 0),
    "largest_logprob_gap": ("b", "<=", 1e-3),
}
#: What must be known to read a figure.
NOTES: Final = {
    "replay_share_of_fair_oracle": f"simulated; {LEGEND}",
    "share_generated_twice": "simulated; replay_share_generated_twice_by_restart: the same of restarting from zero",
    "speedup_over_restart": "simulated; of all cases the least",
    "replay_balancing_over_none": "simulated; speed beside that without balancing, of all cases the least; "
    "replay_balancing_over_none_mean: their mean",
    "replay_moves_per_rollout": "simulated; rollouts that the balancing moved, for each that ended",
}
#: Of these, what is not kept makes the benchmark fail: they do not depend on the machine.
STRICT: Final = ("acknowledged_tokens_lost", "acknowledged_tokens_doubled", "unequal_responses")


class Inputs(Struct, frozen=True, kw_only=True):
    """Of level (a). `said`: where they come from."""

    traces: list[Path]
    lengths: list[Path]
    stretches: Sequence[float] = STRETCHES
    cap: int = CAP_TOKENS
    said: dict[str, str]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    files: dict[str, Any] = {"type": Path, "nargs": "+", "action": "extend", "default": []}
    parser.add_argument("--trace", help="spot traces; named alone, only level a runs", **files)
    parser.add_argument("--lengths", help="response lengths, likewise", **files)
    parser.add_argument("--stretch", type=arguments.factor, nargs="+", default=STRETCHES, help="factors on the lengths")
    parser.add_argument("--cap", type=arguments.count, default=CAP_TOKENS, help=CAP_HELP)
    parser.add_argument("--levels", default="", help="some of ab; default: all")
    parser.add_argument("--quick", action="store_true", help="the same on less data: 3 minutes on two cores")
    parser.add_argument("--out", type=arguments.output)
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("migration", quick=options.quick)
    options.levels = options.levels or ("a" if options.trace or options.lengths else "ab")
    if unknown := set(options.levels) - set(LEVELS):
        parser.error(f"--levels: {', '.join(sorted(unknown))} is none of {', '.join(LEVELS)}")
    for flag, paths, read in (("trace", options.trace, read_spot_trace), ("lengths", options.lengths, read_quantiles)):
        for path in paths:
            try:
                read(path, str(path))
            except FileRefused as error:
                parser.error(f"--{flag}: {path} cannot be read ({error})")
    return options


def gather_inputs(traces: list[Path], lengths: list[Path], stretches: Sequence[float], scratch: Path) -> Inputs:
    """What was named; else the recorded ones if they are there; else synthetic ones, written to `scratch`."""
    said: dict[str, str] = {}
    if not traces:
        traces = [TRACES / name for name in SPOT]
        if not all(path.is_file() for path in traces):
            made = {"synthetic_calm": CALM, "synthetic_churny": CHURNY}
            traces = [write_trace(churn, scratch / f"{name}.csv") for name, churn in made.items()]
            said |= {name: f"synthetic: {churn.told}" for name, churn in made.items()}
    if not lengths:
        lengths = [TRACES / LENGTHS]
        if not lengths[0].is_file():
            lengths = [write_lengths(scratch / "synthetic_lengths.csv")]
            said["synthetic_lengths"] = "synthetic: lognormal, see benchmarks/synthetic.py"
    for path in (*traces, *lengths):
        said.setdefault(path.stem, path.name)
    return Inputs(traces=traces, lengths=lengths, stretches=stretches, said=said)


def run_level(level: str, inputs: Inputs, *, quick: bool, tell: Tell) -> dict[str, Any]:
    """What a level found: an object with `figures` by name, and whatever else it says."""
    if level == "a":
        from benchmarks import replay

        setting = replay.Setting(cap_tokens=inputs.cap)
        report = replay.run_level(
            inputs.traces,
            inputs.lengths,
            stretches=inputs.stretches,
            setting=setting,
            quick=quick,
            say=tell,
        )
        tell(replay.table(report["cases"]))
        return report | {"unknown": replay.unknown(report["figures"])}
    from benchmarks.real_kills import level as real_kills

    return {"figures": real_kills.run_level(quick=quick, kills=_QUICK_KILLS if quick else 0, notify=tell)}


def combine(found: dict[str, dict[str, Any]], asked: str) -> tuple[dict[str, Any], dict[str, str]]:
    """All figures of all levels, and why promised ones are missing. What is not promised bears its level's name."""
    figures: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, (level, _, _) in PROMISED.items():
        value = _value(found[level]["figures"], level, name) if level in found else None
        figures[name] = value if value is not None and math.isfinite(value) else None
        if figures[name] is None:
            missing[name] = f"level {level} {'brought none' if level in asked else 'was not asked for'}"
    for level, result in found.items():
        for name, value in result["figures"].items():
            if level != PROMISED.get(name, ("",))[0]:
                figures[f"{LEVELS[level][0]}_{name}"] = value
    return figures, missing


def _value(figures: dict[str, Any], level: str, name: str) -> Any:
    """A level's figure, whose name may begin with that of the level."""
    return figures.get(name, figures.get(name.removeprefix(f"{LEVELS[level][0]}_")))


def plain(value: Any) -> Any:
    """The same for JSON, which knows no number that is none."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(figures: dict[str, Any], missing: dict[str, str]) -> str:
    """A line per figure: what was measured, what is promised, and what is wrong with it."""
    width = max(map(len, figures))
    lines = []
    for name, value in figures.items():
        promise = PROMISED.get(name)
        bound = f"{promise[1]} {promise[2]:,g}" if promise else ""
        note = missing.get(name, "" if kept(name, value) else "NOT KEPT")
        lines.append(f"{name:<{width}}  {number(value):>12}  {bound:>10}  {note}".rstrip())
    return "\n".join(lines)


def kept(name: str, value: Any) -> bool:
    """Whether what is promised of a figure holds; so it does of one that was not measured, or has no promise."""
    if value is None or name not in PROMISED:
        return True
    _, sign, bound = PROMISED[name]
    return bool(value >= bound) if sign == ">=" else bool(value <= bound)


def number(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(number, value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def run_levels(
    options: argparse.Namespace, inputs: Inputs, console: Console
) -> tuple[dict[str, dict[str, Any]], dict[str, str], dict[str, Any]]:
    """What each level found, why others failed, and what each took."""
    tell = partial(console.print, soft_wrap=True, markup=False)
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    took: dict[str, Any] = {}
    for level in sorted(set(options.levels)):
        name, what = LEVELS[level]
        console.print(f"\n({level}) {what}", style="bold")
        began = time.monotonic()
        try:
            found[level] = run_level(level, inputs, quick=options.quick, tell=tell)
            if lacking := found[level].get("unknown"):
                failed[level] = f"some policy ended no step in some case: {', '.join(lacking)}"
        except Exception as error:  # noqa: BLE001 - the other levels' figures are worth having
            traceback.print_exc()
            failed[level] = f"{type(error).__name__}: {error}"
        took[level] = {"name": name, "what": what, "seconds": round(time.monotonic() - began, 1)}
    return found, failed, took


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = Console(highlight=False)
    began, under = time.monotonic(), conditions()
    with tempfile.TemporaryDirectory(prefix="ebbtide-migration-") as scratch:
        inputs = gather_inputs(options.trace, options.lengths, options.stretch, Path(scratch))
        inputs = msgspec.structs.replace(inputs, cap=options.cap)
        found, failed, took = run_levels(options, inputs, console)
    seconds = round(time.monotonic() - began, 1)
    under |= {
        "quick": options.quick,
        "inputs": inputs.said,
        "stretches": list(inputs.stretches),
        "cap_tokens": inputs.cap,
        "seconds": seconds,
        "levels": took,
    }
    figures, missing = combine(found, options.levels)
    told = {"figures": figures, "missing": missing, "notes": NOTES, "failed": failed, "conditions": under}
    told |= {"levels": found}
    options.out.write_text(json.dumps(plain(told), indent=2, allow_nan=False) + "\n")
    print(f"\n{table(figures, missing)}")
    console.print(f"\n{seconds:.0f} s on {under['cores']} cores. All of it is in {options.out}")
    return 1 if failed or not all(kept(name, figures[name]) for name in STRICT) else 0


if __name__ == "__main__":
    sys.exit(main())
