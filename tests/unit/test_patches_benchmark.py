"""The benchmark of patches: what its speeds are of, and where a quick run writes."""

import json
from pathlib import Path

import pytest

from benchmarks import arguments
from benchmarks.patches import __main__ as benchmark
from benchmarks.patches.speeds import speeds


def test_speeds_are_of_exact_patches_and_of_the_same_rounds() -> None:
    found = speeds(700_000, 0.03, rounds=2, threads=2)
    assert found["bytes"] == 1_400_000
    assert found["density"] == pytest.approx(0.03, rel=0.2)
    assert len(found["all_seconds"]) == len(found["all_cpu_seconds"]) == 2
    assert found["over_memcpy"].keys() == {"memcpy", "encode", "check", "apply", "digests", "publish", "pull"}
    assert found["over_memcpy"]["memcpy"] == 1
    assert all(value > 0 for value in found["over_memcpy"].values())


def test_a_quick_run_writes_below_runs_and_a_whole_one_to_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark, "_QUICK_ELEMENTS", 700_000)
    monkeypatch.setattr(benchmark, "_ELEMENTS", 700_000)
    for words, folder in ((["--quick"], "runs/benchmarks"), ([], "benchmarks/results")):
        assert benchmark.main(words) == 0
        told = json.loads((tmp_path / folder / "patches.json").read_text())
        assert told["figures"].keys() >= {"encode_over_memcpy", "apply_over_memcpy"}
        assert told["conditions"]["quick"] == bool(words)
