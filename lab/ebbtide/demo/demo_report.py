"""Makes and sums up the demo's report, from the run's events and counters, the fleet's heartbeats, and the ledgers."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ebbtide.cli.views.run import EvaluationResult, RunProgress, WorkerSample, finite, histogram
from ebbtide.demo.token_accounts import TokenAccounts
from ebbtide.demo.weights_report import WeightsFigures, told, weights_figures
from ebbtide.types.run import Run

#: Seconds of a step in which the trainer waited for trajectories.
_WAIT = "seconds_wait"


class KillRecord(Struct, frozen=True, kw_only=True):
    """A program that was killed on purpose."""

    program: str
    at_s: float
    step: int
    generating: int = 0  # a worker's rollouts in the middle of a response


class DemoReport(Struct, frozen=True, kw_only=True):
    """The contents of `report.json`."""

    run_id: str
    status: str
    seed: int
    steps: int
    control: bool
    accuracy_before: float | None  # share of right answers to problems never trained on
    accuracy_after: float | None
    evaluations: list[EvaluationResult]
    rewards: list[float]
    mean_response_tokens: float
    rollouts_submitted: int
    rollouts_trained: int
    rollouts_dropped: dict[str, int]
    rollouts_accounted_for: bool
    workers_killed: int
    kills: list[KillRecord]
    rollouts_interrupted: int
    rollouts_resumed_midway: int
    resumed: list[dict[str, str | int]]
    tokens_generated: int
    tokens_stored: int
    tokens_saved: int  # a rollout took them along, so they were not generated again
    tokens_lost_at_most: int
    rollouts_moved: int
    attempts: int
    detection_p99_s: float | None  # a bound on the percentile; None: unknown
    resume_p50_s: float | None
    tokens_generated_twice: int
    tokens_generated_twice_at_most_per_rollout: int
    flush_tokens: int
    logprob_gap: float | None  # mean absolute difference of workers' and trainer's logprobs, in nats
    logprob_gap_worst_step: float | None
    policy_versions: int
    weights: WeightsFigures
    tokens_per_s: dict[str, float]
    idle_share: dict[str, float]
    training_overlap: float | None  # share of training before its step's last group was there; None: not streamed
    seconds: dict[str, float]
    checkpoint: str


def make_report(
    progress: RunProgress,
    run: Run,
    accounts: TokenAccounts,
    *,
    kills: Sequence[KillRecord],
    seconds: Mapping[str, float],
    flush_tokens: int,
) -> DemoReport:
    """Makes the report of an ended run; `seconds` by phase, as the screen measured them."""
    spec, counters = run.spec, run.counters
    submitted, trained = counters.get("submitted", 0), counters.get("trained", 0)
    dropped = {reason: count for reason, count in run.dropped.items() if count}
    accuracies = {found.step: found.accuracy for found in progress.evaluations}
    gaps = [(values["logprob_gap"], values["tokens"]) for values in progress.steps.values() if "logprob_gap" in values]
    workers = {name: busy(samples) for name, samples in progress.samples.items()}
    return DemoReport(
        run_id=run.run_id,
        status=run.status.name.lower(),
        seed=spec.seed,
        steps=max(progress.steps, default=0),
        control=spec.trainer.permute_rewards,
        accuracy_before=accuracies.get(0),
        accuracy_after=accuracies.get(spec.trainer.steps),
        evaluations=progress.evaluations,
        rewards=progress.rewards,
        mean_response_tokens=mean_response_tokens(progress.steps),
        rollouts_submitted=submitted,
        rollouts_trained=trained,
        rollouts_dropped=dropped,
        rollouts_accounted_for=submitted == trained + sum(dropped.values()),
        workers_killed=sum(kill.program.startswith("worker") for kill in kills),
        kills=list(kills),
        rollouts_interrupted=accounts.interrupted,
        rollouts_resumed_midway=counters.get("resumed_midway", 0),
        resumed=[
            {"rollout": one.rollout, "from": one.source, "to": one.target, "offset": one.offset}
            for one in progress.resumed
        ],
        tokens_generated=accounts.generated,
        tokens_stored=counters.get("tokens_stored", 0),
        tokens_saved=counters.get("tokens_resumed", 0),
        tokens_lost_at_most=counters.get("tokens_lost_at_most", 0),
        rollouts_moved=counters.get("moved", 0),
        attempts=counters.get("attempts", 0),
        detection_p99_s=finite(histogram(counters, "detection").at_most(0.99)),
        resume_p50_s=finite(histogram(counters, "resume").at_most(0.5)),
        tokens_generated_twice=accounts.twice,
        tokens_generated_twice_at_most_per_rollout=max(accounts.lost.values(), default=0),
        flush_tokens=flush_tokens,
        logprob_gap=weighted_mean(gaps),
        logprob_gap_worst_step=max((gap for gap, _ in gaps), default=None),
        policy_versions=run.newest.version if run.newest else 0,
        weights=weights_figures(progress),
        tokens_per_s={name: round(rate, 1) for name, (rate, _) in workers.items()},
        idle_share={"trainer": trainer_idle(progress.steps)} | {name: idle for name, (_, idle) in workers.items()},
        training_overlap=training_overlap(progress.steps),
        seconds={name: round(value, 1) for name, value in phases(seconds, progress).items()},
        checkpoint=progress.checkpoint,
    )


def weighted_mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Averages the first of each pair, weighted by the second; None without weight."""
    weight = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / weight if weight else None


def mean_response_tokens(steps: Mapping[int, Mapping[str, float]]) -> float:
    """Averages the length of all trained responses."""
    pairs = [(values["response_length"], values["trained"]) for values in steps.values() if "response_length" in values]
    return round(weighted_mean(pairs) or 0.0, 1)


def trainer_idle(steps: Mapping[int, Mapping[str, float]]) -> float:
    """Share of time in which the trainer waited for trajectories, after the first step, which waits for evaluation."""
    later = [values for step, values in steps.items() if step > 1]
    total = sum(value for values in later for name, value in values.items() if name.startswith("seconds_"))
    return round(sum(values.get(_WAIT, 0.0) for values in later) / total, 3) if total else 0.0


def training_overlap(steps: Mapping[int, Mapping[str, float]]) -> float | None:
    """Share of training in which other groups of its step were awaited; None if nothing was streamed."""
    pairs = [(values["overlapped_s"], values["seconds_train"]) for values in steps.values() if "overlapped_s" in values]
    trained = sum(seconds for _, seconds in pairs)
    return round(sum(seconds for seconds, _ in pairs) / trained, 3) if trained else None


def busy(samples: Sequence[WorkerSample]) -> tuple[float, float]:
    """Returns a worker's tokens per second while it had work, and the share of time without work."""
    first, last = samples[0], samples[-1]
    worked, lived = last.busy_s - first.busy_s, last.uptime_s - first.uptime_s
    rate = (last.tokens - first.tokens) / worked if worked > 0 else 0.0
    return rate, round(1 - worked / lived, 3) if lived > 0 else 0.0


def phases(measured: Mapping[str, float], progress: RunProgress) -> dict[str, float]:
    """Splits the phase `run` into first evaluation, training and last evaluation, and adds the `total`."""
    named = {name.replace(" ", "_"): seconds for name, seconds in measured.items()}
    if progress.step_at_s and progress.evaluations and "run" in named:
        before, after = progress.evaluations[0].at_s, max(progress.step_at_s.values())
        parts = {"evaluation_before": before, "training": after - before, "evaluation_after": named["run"] - after}
        at = list(named).index("run")
        items = list(named.items())
        named = dict([*items[:at], *parts.items(), *items[at + 1 :]])
    return named | {"total": sum(named.values())}


def summary(report: DemoReport, path: Path) -> Iterator[tuple[str, str]]:
    yield (
        "accuracy",
        f"{_share(report.accuracy_before)} before, {_share(report.accuracy_after)} after"
        + (f" ({report.evaluations[0].problems} problems never trained on)" if report.evaluations else ""),
    )
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report.rollouts_dropped.items()) or "none"
    sums = "the sums agree" if report.rollouts_accounted_for else "THE SUMS DO NOT AGREE"
    yield (
        "rollouts",
        f"{report.rollouts_submitted:,} submitted = {report.rollouts_trained:,} trained + dropped ({dropped}): {sums}",
    )
    for kill in report.kills:
        middle = f", in the middle of {kill.generating} rollouts" if kill.generating else ""
        yield "killed", f"{kill.program} after step {kill.step}{middle}"
    yield "resumed", resumed_text(report)
    again, most = report.tokens_generated_twice, report.tokens_generated_twice_at_most_per_rollout
    yield (
        "tokens",
        f"{report.tokens_generated:,} generated, {again:,} of them regenerated (at most {most} in one rollout)",
    )
    yield "saved", f"{report.tokens_saved:,} tokens that a rollout took along to another worker"
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in report.tokens_per_s.items())
    yield "tokens/s", f"{rates} (while it had work)"
    yield "idle", ", ".join(f"{name} {share:.0%}" for name, share in report.idle_share.items())
    if report.training_overlap is not None:
        yield "overlap", f"{report.training_overlap:.0%} of training ran before its step's last group was there"
    yield from told(report.weights)
    if report.logprob_gap is not None:
        yield "logprob gap", f"{report.logprob_gap:.5f} between workers and trainer, mean absolute"
    yield "seconds", ", ".join(f"{name} {seconds:.0f}" for name, seconds in report.seconds.items())
    yield "checkpoint", report.checkpoint
    folder = path.parent / report.run_id
    yield "trackers", f"{folder / 'metrics.jsonl'}, {folder / 'samples.jsonl'}, {folder / 'tensorboard'}"
    yield "report", f"{path}, {path.with_suffix('.png')}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def resumed_text(report: DemoReport) -> str:
    """Tells how many rollouts went on elsewhere, and behind how many stored tokens."""
    offsets = sorted(int(one["offset"]) for one in report.resumed if one["offset"])
    if not offsets:
        return f"{len(report.resumed)} rollouts elsewhere, none of them midway"
    middle = f"after {offsets[0]} to {offsets[-1]} stored tokens (median {offsets[len(offsets) // 2]})"
    return f"{len(report.resumed)} rollouts elsewhere, {len(offsets)} of them midway, {middle}"
