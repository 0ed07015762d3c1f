"""Records what a real run came to, and reads it from the run's events, its timeline and the workers' ledgers.

Times are seconds since the run was submitted, by the store's clock, to a millisecond. A step lasts from the
announcement of the version that opens it to that of the next.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.simulator.setting import RealSetting
from ebbtide.demo.token_accounts import LedgerAttempt, settle
from ebbtide.simulator.recording.recorded_run import RecordedInstall
from ebbtide.types.run import AttemptSpan, RunEvent

#: Values of a step's event that are kept: where the trainer's time went, and how large its version was.
_KEPT: Final = (
    "seconds_wait",
    "seconds_train",
    "seconds_publish",
    "seconds_checkpoint",
    "publish_seconds",
    "publish_bytes",
    "publish_dense_bytes",
)


class MeasuredStep(Struct, frozen=True, kw_only=True):
    step: int  # counted from 0
    opened_s: float
    first_s: float  # its first rollout was placed
    generated_s: float  # its last rollout ended
    announced_s: float  # the version was announced that it brought
    tokens: int  # of its responses
    trainer: dict[str, float]  # seconds by phase, and bytes of the version

    @property
    def seconds(self) -> float:
        return self.announced_s - self.opened_s


class MeasuredResponse(Struct, frozen=True, kw_only=True):
    step: int
    prompt: int  # of the step, from 0
    sample: int
    tokens: int


class MeasuredInterruption(Struct, frozen=True, kw_only=True):
    kind: str
    worker: str  # that was killed or drained, or joined
    step: int
    after_s: float  # since the step was opened
    gone_s: float | None = None  # since then until its process had ended
    handed_s: float | None = None  # since then until its last rollout was handed over, or known to be lost
    back_s: float | None = None  # since then until another one was attached in its place


class MeasuredTokens(Struct, frozen=True, kw_only=True):
    generated: int  # by the workers' own count
    kept: int  # of responses that ended
    twice: int  # made again because they were lost
    moved: int  # already made when a rollout went on at another worker


class Measured(Struct, frozen=True, kw_only=True):
    """One setting's real run."""

    setting: RealSetting
    steps: list[MeasuredStep]
    responses: list[MeasuredResponse]
    interruptions: list[MeasuredInterruption]
    installs: list[RecordedInstall]
    tokens: MeasuredTokens
    resumes: int  # attempts beyond a rollout's first
    served: dict[str, Any] | None = None  # users' requests, their latencies and the engine's speeds
    load: dict[str, float] = {}  # share of the cores that foreign programs took, lateness of the engines' turns

    @property
    def median_step_s(self) -> float:
        return median(step.seconds for step in self.steps)


def measured_steps(events: Iterable[RunEvent], spans: Sequence[AttemptSpan]) -> list[MeasuredStep]:
    """Lists the steps that brought a version."""
    opened, trainer = _opened(events), _trainer(events)
    found = []
    for step in sorted(opened):
        own = [span for span in spans if step_of(span.rollout_id) == step]
        if step + 1 not in opened or not own:
            continue
        found.append(
            MeasuredStep(
                step=step,
                opened_s=opened[step],
                first_s=min(span.begin_s for span in own),
                generated_s=max(span.end_s for span in own),
                announced_s=opened[step + 1],
                tokens=sum(span.last for span in own if span.finished),
                trainer=trainer.get(step, {}),
            )
        )
    return found


def _opened(events: Iterable[RunEvent]) -> dict[int, float]:
    """step -> when its version was announced."""
    return {int(event.values["step"]): event.age_s for event in events if event.kind == "version"}


def _trainer(events: Iterable[RunEvent]) -> dict[int, dict[str, float]]:
    """step -> what its event says. The event counts the optimiser steps that have been taken."""
    return {
        int(event.values["step"]) - 1: {name: event.values[name] for name in _KEPT if name in event.values}
        for event in events
        if event.kind == "step"
    }


def step_of(rollout_id: str) -> int:
    """Returns the step of a training rollout, named `s<step>.g<prompt>.<sample>.t<turn>`."""
    return int(rollout_id.partition(".")[0].removeprefix("s"))


def measured_responses(spans: Iterable[AttemptSpan]) -> list[MeasuredResponse]:
    """Lists the whole responses, in the order of steps, prompts and samples."""
    found = []
    for span in spans:
        if span.finished:
            step, prompt, sample, _ = span.rollout_id.split(".")
            number = int(step.removeprefix("s")), int(prompt.removeprefix("g")), int(sample)
            found.append((number, span.last))
    return [
        MeasuredResponse(step=step, prompt=prompt, sample=sample, tokens=tokens)
        for (step, prompt, sample), tokens in sorted(found)
    ]


def measured_tokens(
    attempts: Mapping[str, Sequence[LedgerAttempt]], spans: Sequence[AttemptSpan], killed: set[str]
) -> MeasuredTokens:
    """Sums up the ledgers' `attempts` (rollout -> attempts) and the timeline."""
    accounts = settle(attempts, killed)
    return MeasuredTokens(
        generated=accounts.generated,
        kept=sum(span.last for span in spans if span.finished),
        twice=accounts.twice,
        moved=sum(span.first for span in spans),
    )


def handed_over(
    interruptions: Iterable[MeasuredInterruption], steps: Sequence[MeasuredStep], spans: Sequence[AttemptSpan]
) -> list[MeasuredInterruption]:
    """Adds when the rollouts of those that are gone were free to go on elsewhere, by the timeline."""
    opened = {step.step: step.opened_s for step in steps}
    found = []
    for one in interruptions:
        ends = [span.end_s for span in spans if span.worker_id == one.worker and not span.finished]
        at_s = opened[one.step] + one.after_s if one.step in opened else None
        later = [end - at_s for end in ends if at_s is not None and end >= at_s]
        found.append(replace(one, handed_s=max(later)) if later and one.gone_s is not None else one)
    return found


def resumes(spans: Sequence[AttemptSpan]) -> int:
    return len(spans) - len({span.rollout_id for span in spans})
