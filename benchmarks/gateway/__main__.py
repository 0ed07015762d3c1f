"""Measures the gateway: what clients see of kills, its cost beside vLLM's own server, what thousands of open streams do
to other calls, and the gain of routing turns.

    python -m benchmarks.gateway [--quick] [--parts kills vllm streams turns engines] [--seed N] [--out PATH]

Prints a table and writes a JSON file with `figures`. A figure that was not measured is null, and `missing` says why.
"""

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.gateway.gateway_figures import PROMISED_BOUNDS, figure_rows, promised_figures
from benchmarks.gateway.gateway_plan import QUICK_PLAN, GatewayPlan
from benchmarks.gateway.kills_part import measure_kills
from benchmarks.gateway.streams.stream_plan import QUICK_STREAMS, StreamPlan
from benchmarks.gateway.streams.streams_part import measure_streams
from benchmarks.gateway.vllm_part import measure_beside_vllm
from benchmarks.turn_routing.engines.engine_trials import measure_engines

_ROOT: Final = Path(__file__).parents[2]
_PARTS: Final = {
    "kills": ("client_errors_under_kills", "trace_mismatches"),
    "vllm": ("ttft_overhead_p50_ms", "ttft_overhead_p99_ms", "tpot_over_vllm", "gateway_cpu_over_vllm"),
    "streams": (
        "streams_callback_max_ms",
        "streams_unary_p99_over_few",
        "one_key_callback_max_ms",
        "one_key_unary_p99_over_few",
        "greedy_key_other_p50_over_alone",
        "greedy_key_other_p99_over_alone",
    ),
    "turns": ("prefix_hits_over_sticky", "throughput_over_least_loaded", "throughput_over_rose_rule"),
    "engines": (),  # turn routing on two real engines: nothing is promised of it
}
_UNTOLD: Final = "the gateway has no route that tells a session's trace; wrong_answers counts answers"


def measure(parts: Sequence[str], seed: int, *, quick: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """All that was found, by part, and why figures are missing, by figure."""
    plan = QUICK_PLAN if quick else GatewayPlan()
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "kills": lambda: asyncio.run(measure_kills(plan, seed, _notify)),
        "vllm": lambda: asyncio.run(measure_beside_vllm(plan, seed, _notify)),
        "streams": lambda: asyncio.run(measure_streams(QUICK_STREAMS if quick else StreamPlan(), _notify)),
        "turns": lambda: _simulated_turns(quick=quick),
        "engines": lambda: {"turn_routing_on_engines": asyncio.run(measure_engines(seed, _notify, quick=quick))},
    }
    found: dict[str, Any] = {}
    missing = dict.fromkeys(PROMISED_BOUNDS, "its part did not run")
    for part in parts:
        began = time.monotonic()
        try:
            found[part] = work[part]()
            missing |= dict.fromkeys(_PARTS[part], _UNTOLD)
        except Exception as error:  # noqa: BLE001 - the other parts' figures are kept
            missing |= dict.fromkeys(_PARTS[part], f"its part failed: {type(error).__name__}: {error}"[:500])
        _notify(f"part {part} took {time.monotonic() - began:.0f} s")
    return found, missing


def _simulated_turns(*, quick: bool) -> dict[str, Any]:
    """What the benchmark of turn routing finds, in a process of its own: its log is not ours."""
    if importlib.util.find_spec("benchmarks.turn_routing") is None:
        raise RuntimeError("benchmarks.turn_routing is not there")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "turns.json"
        command = [sys.executable, "-m", "benchmarks.turn_routing", "--out", str(out), *(["--quick"] * quick)]
        subprocess.run(command, cwd=_ROOT, check=True, stdout=sys.stderr)
        figures: dict[str, Any] = json.loads(out.read_text())["figures"]
        return figures


def _notify(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = list(_PARTS)
    parser.add_argument("--quick", action="store_true", help="fewer blocks, shorter conversations: in 20 minutes")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=arguments.output)
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("gateway", quick=options.quick)
    under = conditions() | {"quick": options.quick, "seed": options.seed}
    found, missing = measure(options.parts, options.seed, quick=options.quick)
    figures = promised_figures({name: value for part in found.values() for name, value in part.items()})
    reasons = {name: missing[name] for name, value in figures.items() if value is None}
    told = {"figures": figures, "missing": reasons, "more": found, "conditions": under}
    options.out.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n")
    print("\n".join(figure_rows(figures, reasons)))
    print(f"All of it is in {options.out}")
    return 1 if found.get("kills", {}).get("client_errors_under_kills") else 0


if __name__ == "__main__":
    sys.exit(main())
