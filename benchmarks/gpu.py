"""Runs what needs a GPU, where there is one: the trainer's step on it, and a real engine of vLLM's ordinary wheel; and
measures how fast weight patches are made of tensors on it.

    python benchmarks/gpu.py

Prints tables and writes `benchmarks/results/gpu.json`. Ends with 1 if a check failed, with 2 where there is no GPU.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # run as a script, from anywhere

from benchmarks.patches.synthetic import rate_for, step  # noqa: E402 - after the path
from ebbtide.trainer.gpu_changes import encode_changes, find_changes  # noqa: E402
from ebbtide.types.weights import TILE_BYTES  # noqa: E402

CHECKS = (
    "tests/unit/trainer/learning/test_learner.py",
    "tests/unit/trainer/learning/test_gpu_changes.py",
    "tests/e2e/test_vllm_engine.py",
)
#: Elements of bf16 that are encoded, and the share of them that changed.
ELEMENTS, DENSITY = 100_000_000, 0.03


def run_checks(report: Path) -> list[dict[str, Any]]:
    """Name, seconds and outcome of each test."""
    subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *CHECKS], cwd=ROOT, check=False)
    cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - our own test runner's file
    return [
        {"name": case.get("name"), "seconds": float(case.get("time", 0)), "outcome": outcome(case)} for case in cases
    ]


def outcome(case: ET.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def patch_speeds(device: str, elements: int = ELEMENTS, rounds: int = 7) -> dict[str, Any]:
    """GB/s of dense bytes (medians over rounds that do all): a copy on the device, and one to pinned memory of the
    host; comparison and compaction alone; and the whole encoding, whose coding one core of the host does."""
    spread = 0.02
    pair = step(elements, spread, rate_for(DENSITY, [spread]), 9)
    base, new = (torch.from_numpy(units.view(np.int16)).view(torch.bfloat16).to(device) for units in pair)
    there, here = torch.empty_like(new), torch.empty(elements, dtype=new.dtype, pin_memory=device != "cpu")
    old, young = base.view(torch.int16), new.view(torch.int16)
    works: dict[str, Callable[[], object]] = {
        "copy_on_device": lambda: there.copy_(new),
        "copy_to_host": lambda: here.copy_(new),
        "find_changes": lambda: find_changes(old, young, TILE_BYTES // 2),
        "encode": lambda: sum(map(len, encode_changes(base, new))),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for index in range(rounds + 1):  # the first compiles, and makes allocations that later ones reuse
        for name, work in works.items():
            seconds = _seconds(work, device)
            times[name] += [seconds] if index else []
    found = {name: new.nbytes / median(values) / 1e9 for name, values in times.items()}
    over = {f"{name}_over_copy_on_device": found[name] / found["copy_on_device"] for name in ("find_changes", "encode")}
    return {"elements": elements, "density": DENSITY, "gb_per_s": found, **over}


def _seconds(work: Callable[[], object], device: str) -> float:
    def settle() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    settle()
    start = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - start


def main() -> int:
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        checks = run_checks(Path(folder) / "report.xml")
    speeds = patch_speeds("cuda")
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    device = torch.cuda.get_device_name()
    (results / "gpu.json").write_text(json.dumps({"device": device, "checks": checks, "patches": speeds}, indent=2))
    print(f"on {device}")
    for check in checks:
        print(f"{check['outcome']:8} {check['seconds']:8.1f} s  {check['name']}")
    for name, value in speeds["gb_per_s"].items():
        print(f"{name:16} {value:8.1f} GB/s of {ELEMENTS * 2 / 1e6:.0f} MB of bf16, {DENSITY:.0%} of it changed")
    return int(any(check["outcome"] in {"failure", "error"} for check in checks))


if __name__ == "__main__":
    sys.exit(main())
