"""Measures and checks on a GPU what no CPU can show, in two halves of ten minutes each.

    python benchmarks/gpu.py trainer [--small] [--out FILE] [--parts NAME ...]
    python benchmarks/gpu.py engine [--small] [--out FILE] [--parts NAME ...]
    python benchmarks/gpu.py checks

The trainer's half needs PyTorch and transformers, and neither vLLM nor Redis nor a cluster; the engine's half needs all
of them. Each part is a process with a limit of its own, and the report (JSON) is written anew after each, so nothing is
lost with a part that fails. Networks have the shapes of Qwen3, in bf16, and random weights. `--small` takes tiny ones
instead, on what device there is. `checks` runs all tests that have something to do on a GPU, however long they take.

Ends with 1 if a part failed, with 2 where there is no GPU and no `--small`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Run as a script, from anywhere, also where Ebbtide is not installed.
sys.path[:0] = [str(ROOT / name) for name in ("", "common", "services", "lab") if str(ROOT / name) not in sys.path]

from benchmarks.arguments import output, result, seconds  # noqa: E402 - after the path
from benchmarks.gpu_parts.halves import CHECKS, HALVES  # noqa: E402
from benchmarks.gpu_parts.harness import PartRun, run_half, run_part  # noqa: E402


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    if options.what == "part":
        told = PartRun(
            options.told, device=options.device, small=options.small, models=options.models, limit_s=options.limit
        )
        return run_part(options.work, told)
    small = options.what != "checks" and options.small
    device = _device()
    if device == "cpu" and not small:
        print("torch sees no CUDA device here; --small runs what a CPU can", file=sys.stderr)
        return 2
    if options.what == "checks":
        return subprocess.run([sys.executable, "-m", "pytest", "-q", *CHECKS], cwd=ROOT, check=False).returncode
    half = HALVES[options.what]
    if unknown := set(options.parts) - {part.name for part in half.parts}:
        print(f"no parts of this half: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    out = options.out or result(f"gpu_{half.name}", quick=small)
    return run_half(half, out, device=device, small=small, only=options.parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for half in HALVES.values():
        command = commands.add_parser(half.name, help=f"parts: {', '.join(part.name for part in half.parts)}")
        command.add_argument("--small", action="store_true", help="tiny networks, on the device that there is")
        command.add_argument("--out", type=output, help="the report; by default below benchmarks/results")
        command.add_argument("--parts", nargs="+", default=[], metavar="NAME", help="only these parts")
    commands.add_parser("checks", help="all tests that have something to do on a GPU")
    part = commands.add_parser("part", help="one part in this process, as the others start it")
    part.add_argument("work", help="module:function")
    part.add_argument("--told", type=Path, required=True)
    part.add_argument("--models", type=Path, required=True)
    part.add_argument("--device", required=True)
    part.add_argument("--limit", type=seconds, required=True)
    part.add_argument("--small", action="store_true")
    return parser


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
