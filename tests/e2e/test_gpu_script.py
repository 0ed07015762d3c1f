"""`benchmarks/gpu.py --small` runs every part that a CPU can, with a real engine, and names what it skips."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_parts.halves import HALVES
from benchmarks.gpu_parts.harness import ROOT
from ebbtide.rollout_worker.engine.vllm import cpu_build


def ran(half: str, out: Path) -> dict[str, Any]:
    """The parts of a report, by name."""
    command = [sys.executable, "benchmarks/gpu.py", half, "--small", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert report["planned"] == list(report["parts"]) == [part.name for part in HALVES[half].parts]
    outcomes = {name: part["outcome"] for name, part in report["parts"].items()}
    if report["device"]["kind"] == "cpu":
        assert outcomes == {one.name: "skipped" if one.needs_gpu else "ran" for one in HALVES[half].parts}
    assert all(part.get("figures") for part in report["parts"].values() if part["outcome"] == "ran")
    parts: dict[str, Any] = report["parts"]
    return parts


@pytest.mark.timeout(600)
def test_the_trainers_half(tmp_path: Path) -> None:
    parts = ran("trainer", tmp_path / "report.json")
    attention = parts["passes"]["figures"]["small float32"]["attention"]
    assert any("scaled_dot_product" in call for call in attention)
    first, *later = parts["steps"]["figures"]["steps"]
    assert 0 < first["changed"] < 1
    assert all(step["patch_bytes"] < parts["publishing"]["figures"]["small"]["first"]["bytes"] for step in later)
    second, third = (parts["publishing"]["figures"]["small"][name] for name in ("second", "third"))
    assert 0.02 < second["changed"] < 0.04
    assert third["changes_bytes"] < third["bytes"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_engines_half(tmp_path: Path) -> None:
    parts = ran("engine", tmp_path / "report.json")
    assert parts["install"]["figures"]["reloaded and fresh"]["apart"] == []
    assert parts["install"]["figures"]["versions_in_flight"] == [0, 1]
    assert parts["lending"]["figures"]["killed"]
    if cpu_build.is_cpu_build():
        assert parts["mismatch"]["figures"]["p99_abs"] < 1e-4
        assert parts["boot"]["figures"]["obstacle_to_changes_in_place"]
