"""The report's figures, from made-up events, counters and heartbeats."""

import json
from pathlib import Path

import msgspec
import pytest

from ebbtide.cli.views.run import RunProgress, WorkerSample
from ebbtide.demo.demo_report import (
    DemoReport,
    KillRecord,
    busy,
    make_report,
    phases,
    summary,
    trainer_idle,
    training_overlap,
    weighted_mean,
)
from ebbtide.demo.report_picture import terminal_curve, write_picture
from ebbtide.demo.token_accounts import TokenAccounts
from ebbtide.demo.weights_report import told, weights_figures
from ebbtide.types.fleet import Worker, WorkerKind, WorkerState
from ebbtide.types.run import EnvironmentSpec, Run, RunEvent, RunSpec, RunStatus, TrainerSpec
from ebbtide.types.weights import PolicyVersion

SPEC = RunSpec(
    name="demo", model="m", seed=3, environment=EnvironmentSpec(name="reasoning_gym"), trainer=TrainerSpec(steps=2)
)


MIGRATED = {
    "tokens_resumed": 320, "tokens_lost_at_most": 64, "moved": 2, "attempts": 39, "detection:le:0.5": 3,
    "resume:le:0.25": 1, "resume:le:inf": 2,
}  # fmt: skip


def step(number: int, reward: float, at: float, **values: float) -> RunEvent:
    named = {"step": float(number), "reward": reward, "tokens": 100.0, "trained": 8.0, "response_length": 40.0}
    clock = {"seconds_wait": 1.0, "seconds_train": 3.0, "seconds_publish": 0.5, "seconds_checkpoint": 0.5}
    return RunEvent(kind="step", key=f"a.{number}", values={**named, **clock, **values}, age_s=at)


def evaluation(number: int, accuracy: float, at: float) -> RunEvent:
    values = {"step": float(number), "accuracy": accuracy, "problems": 300.0}
    return RunEvent(kind="evaluation", key=str(number), values=values, age_s=at)


def worker(busy_s: float, uptime_s: float, tokens: int) -> Worker:
    return Worker(
        worker_id="worker-1",
        kind=WorkerKind.SPOT,
        state=WorkerState.READY,
        slots=8,
        busy_s=busy_s,
        uptime_s=uptime_s,
        tokens_generated=tokens,
    )


@pytest.fixture
def progress() -> RunProgress:
    made = RunProgress("demo", run=Run(run_id="demo", spec=SPEC))
    made.sample([worker(busy_s=0.0, uptime_s=1.0, tokens=5)])  # before the first evaluation: not counted
    made.apply(evaluation(0, 0.30, at=4.0))
    made.sample([worker(busy_s=3.0, uptime_s=5.0, tokens=1000)])
    published = {"publish_dense_bytes": 1e6, "publish_density": 0.04, "publish_pause_s": 0.03}
    published |= {"publish_patch": 1.0, "publish_seconds": 0.2}
    made.apply(step(1, 0.25, at=9.0, logprob_gap=0.001, version=2.0, publish_bytes=5e4, **published))
    made.apply(step(2, 0.90, at=11.0, logprob_gap=0.5))
    published |= {"publish_density": 0.06, "publish_pause_s": 0.05, "publish_bytes": 7e4, "version": 3.0}
    made.apply(
        step(2, 0.35, at=14.0, logprob_gap=0.003, tokens=300.0, **published)
    )  # trained again after the trainer was killed
    labels = {"rollout": "s1.g0.0.t0", "from": "worker-2", "to": "worker-1"}
    made.apply(RunEvent(kind="resumed", values={"offset": 17.0}, labels=labels))
    made.apply(RunEvent(kind="checkpoint", values={"step": 2.0}, labels={"path": "somewhere/step-000002"}))
    made.apply(evaluation(2, 0.65, at=15.5))
    installs = [("worker-1", 1, 9.0), ("worker-1", 2, 0.02), ("worker-3", 2, 8.0), ("worker-3", 3, 0.06)]
    for name, version, pause_s in installs:  # worker-3 took another's place in the middle of the run
        values = {"version": float(version), "pull_s": 0.5, "pause_s": pause_s}
        made.apply(RunEvent(kind="installed", values=values, labels={"worker": name}))
    return made


@pytest.fixture
def report(progress: RunProgress) -> DemoReport:
    progress.samples["worker-1"].append(WorkerSample(uptime_s=15.0, busy_s=8.0, tokens=3000))
    counters = {"submitted": 34, "trained": 32, "resumed_midway": 1, "tokens_stored": 995, **MIGRATED}
    run = Run(
        run_id="demo",
        spec=SPEC,
        status=RunStatus.FINISHED,
        counters=counters,
        dropped={"environment_failure": 2, "cancelled": 0},
        newest=PolicyVersion(policy="policy", version=5, step=2),
    )
    accounts = TokenAccounts(generated=1000, by_worker={"worker-1": 1000}, lost={"a": 3, "b": 2}, interrupted=4)
    kills = [
        KillRecord(program="worker-2", at_s=9.0, step=1, generating=20),
        KillRecord(program="trainer", at_s=11.0, step=2),
    ]
    seconds = {"base model": 20.0, "boot": 10.0, "run": 16.0, "shutdown": 2.0}
    return make_report(progress, run, accounts, kills=kills, seconds=seconds, flush_tokens=8)


def test_the_overlap_of_streamed_training_is_its_share_of_all_training(progress: RunProgress) -> None:
    assert training_overlap(progress.steps) is None
    progress.apply(step(1, 0.25, at=16.0, overlapped_s=2.4))
    progress.apply(step(2, 0.25, at=17.0, overlapped_s=1.2))
    assert training_overlap(progress.steps) == pytest.approx((2.4 + 1.2) / (3.0 + 3.0))


def test_the_report_has_every_figure_it_promises(report: DemoReport) -> None:
    told = json.loads(msgspec.json.encode(report))
    assert (told["accuracy_before"], told["accuracy_after"]) == (0.30, 0.65)
    assert (told["seed"], told["steps"], told["rewards"]) == (3, 2, [0.25, 0.35])
    assert (told["rollouts_submitted"], told["rollouts_trained"]) == (34, 32)
    assert told["rollouts_dropped"] == {"environment_failure": 2}
    assert told["rollouts_accounted_for"] is True
    assert (told["workers_killed"], told["rollouts_interrupted"], told["rollouts_resumed_midway"]) == (1, 4, 1)
    assert told["resumed"] == [{"rollout": "s1.g0.0.t0", "from": "worker-2", "to": "worker-1", "offset": 17}]
    assert (told["tokens_generated"], told["tokens_generated_twice"]) == (1000, 5)
    assert told["tokens_generated_twice_at_most_per_rollout"] == 3
    assert (told["tokens_saved"], told["tokens_lost_at_most"]) == (320, 64)
    assert (told["rollouts_moved"], told["attempts"]) == (2, 39)
    assert (told["detection_p99_s"], told["resume_p50_s"]) == (0.5, None)
    assert told["logprob_gap"] == pytest.approx((0.001 * 100 + 0.003 * 300) / 400)
    assert told["logprob_gap_worst_step"] == 0.003
    assert told["mean_response_tokens"] == 40
    assert told["policy_versions"] == 5
    assert told["checkpoint"] == "somewhere/step-000002"


def test_bytes_of_versions_are_told_against_dense_ones(report: DemoReport) -> None:
    weights = report.weights
    assert [(one.step, one.version, one.bytes, one.dense_bytes) for one in weights.published] == [
        (1, 2, 50_000, 1_000_000),
        (2, 3, 70_000, 1_000_000),
    ]
    assert (weights.bytes_per_version, weights.dense_bytes_per_version) == (60_000, 1_000_000)
    assert weights.bytes_over_dense == pytest.approx(0.06)
    assert weights.density == pytest.approx(0.05)
    said = dict(summary(report, Path("report.json")))
    assert (
        said["weights"]
        == "60 kB per version, 6.0% of 1 MB dense, as 5.0% of the elements change; 2 of 2 versions by patches"
    )
    assert weights.publish_step_s == 0.5
    assert said["publishing"] == "the trainer paused 40 ms for the copy, and 500 ms of a step went to publishing"


def test_an_installs_stop_is_told_as_a_share_of_the_step_without_the_boots(report: DemoReport) -> None:
    weights = report.weights
    assert (weights.installs, weights.install_stop_worst_s, weights.pull_s) == (2, 0.06, 0.5)
    assert weights.install_stop_s == pytest.approx(0.04)
    assert weights.install_stop_share_of_step == pytest.approx(0.04 / 5.0)
    said = dict(summary(report, Path("report.json")))["installing"]
    assert said == "generation paused 40 ms per version, 0.80% of a step (at most 60 ms, 2 installs)"


def test_weights_of_which_nothing_is_known_are_left_out(progress: RunProgress) -> None:
    progress.steps = {1: {"step": 1.0, "version": 2.0, "seconds_train": 1.0}}
    progress.installs.clear()
    figures = weights_figures(progress)
    assert (figures.published, figures.bytes_over_dense, figures.install_stop_share_of_step) == ([], None, None)
    assert list(told(figures)) == []


def test_rates_and_idle_shares_are_those_of_training(report: DemoReport) -> None:
    assert report.tokens_per_s == {"worker-1": 400.0}
    assert report.idle_share == {"trainer": 0.2, "worker-1": 0.5}


def test_seconds_are_told_by_phase_and_add_up(report: DemoReport) -> None:
    assert report.seconds == {
        "base_model": 20.0,
        "boot": 10.0,
        "evaluation_before": 4.0,
        "training": 10.0,
        "evaluation_after": 2.0,
        "shutdown": 2.0,
        "total": 48.0,
    }


def test_sums_that_do_not_agree_are_not_hidden(progress: RunProgress, report: DemoReport) -> None:
    run = Run(run_id="demo", spec=SPEC, status=RunStatus.FINISHED, counters={"submitted": 9, "trained": 8})
    none = TokenAccounts(generated=0, by_worker={}, lost={}, interrupted=0)
    wrong = make_report(progress, run, none, kills=[], seconds={}, flush_tokens=8)
    assert not wrong.rollouts_accounted_for
    assert "DO NOT AGREE" in dict(summary(wrong, Path("report.json")))["rollouts"]
    assert "the sums agree" in dict(summary(report, Path("report.json")))["rollouts"]


def test_phases_without_a_run_are_left_alone() -> None:
    assert phases({"base model": 2.0}, RunProgress("demo")) == {"base_model": 2.0, "total": 2.0}


def test_means_and_shares_of_nothing_are_told_as_such() -> None:
    assert weighted_mean([]) is None
    assert trainer_idle({1: {"seconds_wait": 5.0}}) == 0.0
    assert busy([WorkerSample(1.0, 0.0, 0)]) == (0.0, 0.0)


def test_the_picture_is_a_picture(report: DemoReport, tmp_path: Path) -> None:
    write_picture(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_terminal_curve_fits_and_marks_kills_and_accuracies(report: DemoReport) -> None:
    lines = terminal_curve(report, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert sum("┊" in line for line in lines) == 11
    assert sum("o" in line for line in lines[:10]) == 2
