"""A short demo with real vLLM engines: the main job, the kill and the books, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebbtide.local_cluster.launcher import tethered

#: The first test waits for the demo; on a machine that has no base model yet, for that too.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The report of a demo of four steps, and its directory."""
    folder = tmp_path_factory.mktemp("demo")
    options = ["--run-dir", str(folder), "--steps", "4", "--eval-problems", "40"]
    command = tethered(sys.executable, "-m", "ebbtide.cli", "demo", *options)
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((folder / "report.json").read_text()), folder


def test_every_rollout_is_accounted_for(demo: tuple[dict[str, Any], Path]) -> None:
    report, _ = demo
    assert report["status"] == "finished"
    assert report["rollouts_submitted"] == 4 * 32 * 8
    assert report["rollouts_submitted"] == report["rollouts_trained"] + sum(report["rollouts_dropped"].values())


def test_the_killed_workers_rollouts_resume_elsewhere_behind_what_was_stored(
    demo: tuple[dict[str, Any], Path],
) -> None:
    report, _ = demo
    assert report["workers_killed"] == 1
    (kill,) = report["kills"]
    far = [one for one in report["resumed"] if one["from"] == kill["program"] and one["offset"] >= 8]
    assert len(far) >= 8
    assert {one["to"] for one in far}.isdisjoint({kill["program"]})


def test_what_is_generated_twice_is_what_was_not_flushed_yet(demo: tuple[dict[str, Any], Path]) -> None:
    report, _ = demo
    assert report["mean_response_tokens"] >= 32
    window = report["flush_tokens"]
    assert report["tokens_generated_twice"] <= window * report["rollouts_interrupted"]
    # What the engine made while its worker had no core to itself comes on top, for as long as that lasts.
    assert report["tokens_generated_twice_at_most_per_rollout"] <= 2 * window
    assert report["tokens_generated"] - report["tokens_stored"] == report["tokens_generated_twice"]


def test_workers_and_trainer_agree_on_logprobs(demo: tuple[dict[str, Any], Path]) -> None:
    report, _ = demo
    assert report["logprob_gap"] <= 0.02


def test_versions_travel_as_patches_and_cost_a_small_part_of_a_step(demo: tuple[dict[str, Any], Path]) -> None:
    report, folder = demo
    weights = report["weights"]
    assert [(one["step"], one["patch"]) for one in weights["published"]] == [(step, True) for step in range(1, 5)]
    assert all(0 < one["bytes"] < one["dense_bytes"] for one in weights["published"])
    assert weights["bytes_over_dense"] < 0.9
    assert weights["installs"] > 0
    assert 0 < weights["install_stop_share_of_step"] < 0.5
    assert not (folder / "mirrors").exists()


def test_a_replacement_is_started(demo: tuple[dict[str, Any], Path]) -> None:
    report, folder = demo
    assert (folder / "logs" / "worker-3.log").exists()  # a run this short may end before it has joined
    assert report["policy_versions"] >= 5


def test_the_checkpoint_is_one_that_transformers_loads(demo: tuple[dict[str, Any], Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report, _ = demo
    network = AutoModelForCausalLM.from_pretrained(report["checkpoint"], local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(report["checkpoint"], local_files_only=True)
    assert network.config.vocab_size >= len(tokenizer)


def test_the_trackers_files_hold_the_runs_own_figures(demo: tuple[dict[str, Any], Path]) -> None:
    report, folder = demo
    lines = [json.loads(line) for line in (folder / "demo" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["reward"] for line in steps] == report["rewards"]
    assert sum(line["rollouts/trained"] for line in steps) == report["rollouts_trained"]
    # Rollouts of the last evaluation may be resumed after the last step.
    assert 0 < steps[-1]["rollouts/preempted"] <= len(report["resumed"])
    assert 0 < steps[-1]["tokens/saved"] <= report["tokens_saved"]
    accuracies = {line["step"]: line["eval_accuracy"] for line in lines if line["kind"] == "evaluation"}
    assert (accuracies[0], accuracies[4]) == (report["accuracy_before"], report["accuracy_after"])
    samples = [json.loads(line) for line in (folder / "demo" / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 2, 3, 4}
    assert all(sample["prompt"] and sample["completion"] for sample in samples)
    assert list((folder / "demo" / "tensorboard").iterdir())


def test_no_process_is_left(demo: tuple[dict[str, Any], Path]) -> None:
    _, folder = demo
    left = [
        process.cmdline() for process in psutil.process_iter(["cmdline"]) if str(folder) in str(process.info["cmdline"])
    ]
    assert left == []
