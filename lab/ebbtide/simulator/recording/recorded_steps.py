"""Reads from a run's events when its steps were opened and trained."""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from ebbtide.simulator.recording.recorded_run import RecordedInstall, RecordedStep, WeightSizes
from ebbtide.simulator.report.seed_spread import quantile
from ebbtide.types.run import RunEvent

_NOTHING: Final[Mapping[str, float]] = {}


class StepTimes(Struct, frozen=True):
    """Announcements and reports by step. A version's step counts the optimiser steps behind it."""

    announced: dict[int, float]  # step -> when the first version behind so many steps was announced
    reports: dict[int, dict[str, float]]  # step -> what the trainer said of it, counted as versions are

    def opened_s(self, step: int, max_staleness: int) -> float | None:
        """When a step's rollouts could be submitted; None if the version for that was never announced."""
        return self.announced.get(max(0, step - max_staleness))

    def over(self, step: int) -> bool:
        """Whether a version, or the trainer's report, shows that the step was trained."""
        return any(later > step for later in (*self.announced, *self.reports))

    def recorded(self, step: int, max_staleness: int, generated_s: float) -> RecordedStep | None:
        """The step's record; None if its begin or its end was not announced."""
        opened_s, announced_s = self.opened_s(step, max_staleness), self.announced.get(step + 1)
        if opened_s is None or announced_s is None:
            return None
        report = self.reports.get(step + 1, _NOTHING)
        return RecordedStep(
            step=step,
            opened_s=opened_s,
            generated_s=generated_s,
            announced_s=announced_s,
            # A simulated trainer begins when all groups are there, so what streaming did before is left out.
            train_s=report.get("seconds_train", 0.0) - report.get("overlapped_s", 0.0),
            publish_s=report.get("seconds_publish", 0.0),
            checkpoint_s=report.get("seconds_checkpoint", 0.0),
        )

    def weights(self) -> WeightSizes:
        """Bytes of a version, in the median of what the trainer reported."""
        dense, sent = (
            quantile([one[name] for one in self.reports.values() if one.get(name)], 0.5)
            for name in ("publish_dense_bytes", "publish_bytes")
        )
        return WeightSizes(dense=round(dense or 0), sent=round(sent or 0))


def step_times(events: Iterable[RunEvent]) -> StepTimes:
    """Reads `version` and `step` events, in any order. A step that was trained again has its last report."""
    announced: dict[int, float] = {}
    reports: dict[int, dict[str, float]] = {}
    for event in sorted(events, key=lambda event: event.age_s):
        if "step" not in event.values:
            continue
        step = int(event.values["step"])
        if event.kind == "version":
            announced.setdefault(step, event.age_s)
        elif event.kind == "step":
            reports[step] = event.values
    return StepTimes(announced, reports)


def installs(events: Iterable[RunEvent]) -> list[RecordedInstall]:
    """Reads `installed` events."""
    return [
        RecordedInstall(
            worker=event.labels["worker"],
            version=int(event.values["version"]),
            at_s=event.age_s,
            pull_s=event.values["pull_s"],
            pause_s=event.values["pause_s"],
        )
        for event in events
        if event.kind == "installed"
        and {"version", "pull_s", "pause_s"} <= event.values.keys()
        and "worker" in event.labels
    ]
