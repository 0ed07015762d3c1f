"""Runs what needs a GPU, where there is one: the trainer's step on it, and a real engine of vLLM's ordinary wheel.

    python benchmarks/gpu.py

Prints a table and writes `benchmarks/results/gpu.json`. Ends with 1 if a check failed, with 2 where there is no GPU.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import torch

ROOT = Path(__file__).parents[1]
CHECKS = ("tests/unit/trainer/learning/test_learner.py", "tests/e2e/test_vllm_engine.py")


def run_checks(report: Path) -> list[dict[str, Any]]:
    """Name, seconds and outcome of each test."""
    subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *CHECKS], cwd=ROOT, check=False)
    cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - our own test runner's file
    return [
        {"name": case.get("name"), "seconds": float(case.get("time", 0)), "outcome": outcome(case)} for case in cases
    ]


def outcome(case: ET.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def main() -> int:
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        checks = run_checks(Path(folder) / "report.xml")
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    device = torch.cuda.get_device_name()
    (results / "gpu.json").write_text(json.dumps({"device": device, "checks": checks}, indent=2))
    print(f"on {device}")
    for check in checks:
        print(f"{check['outcome']:8} {check['seconds']:8.1f} s  {check['name']}")
    return int(any(check["outcome"] in {"failure", "error"} for check in checks))


if __name__ == "__main__":
    sys.exit(main())
