"""Sums up the demo's report for people."""

from collections.abc import Iterator
from pathlib import Path

from ebbtide.demo.demo_report import DemoReport
from ebbtide.demo.weights_report import told


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
    yield "resumed", _resumed(report)
    again, most = report.tokens_generated_twice, report.tokens_generated_twice_at_most_per_rollout
    yield "tokens", f"{report.tokens_generated:,} generated, {again:,} of them twice (at most {most} of one rollout)"
    yield "saved", f"{report.tokens_saved:,} tokens that a rollout took along to another worker"
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in report.tokens_per_s.items())
    yield "tokens/s", f"{rates} (while it had work)"
    yield "idle", ", ".join(f"{name} {share:.0%}" for name, share in report.idle_share.items())
    yield from told(report.weights)
    if report.logprob_gap is not None:
        yield "logprob gap", f"{report.logprob_gap:.5f} between workers and trainer, mean absolute"
    yield "seconds", ", ".join(f"{name} {seconds:.0f}" for name, seconds in report.seconds.items())
    yield "checkpoint", report.checkpoint
    yield "report", f"{path}, {path.with_suffix('.png')}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _resumed(report: DemoReport) -> str:
    offsets = sorted(int(one["offset"]) for one in report.resumed if one["offset"])
    if not offsets:
        return f"{len(report.resumed)} rollouts elsewhere, none of them midway"
    middle = f"after {offsets[0]} to {offsets[-1]} stored tokens (median {offsets[len(offsets) // 2]})"
    return f"{len(report.resumed)} rollouts elsewhere, {len(offsets)} of them midway, {middle}"
