"""Makes profiles of a recorded run's engine and trainer, as measured from outside."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile, FitErrors, KvCapacity, StepCosts
from ebbtide.simulator.engines.trainer_profile import TrainerCosts, TrainerDelays, TrainerProfile
from ebbtide.simulator.recording.recorded_run import MeasuredEngine, RecordedRun, RecordedStep
from ebbtide.simulator.report.seed_spread import quantile

_UNKNOWN: Final = "recorded"
#: Whether memory for keys and values held rollouts back is in the measured pace, and must not count twice.
_NO_LIMIT: Final = 1 << 40
#: Of machines of whose pulls nothing is known: a scenario's default.
_LINK_GBPS: Final = 50.0
_GBIT_PER_BYTE: Final = 8e-9


def link_gbps(recorded: RecordedRun) -> float:
    """The link over which the bytes of a version came in the time of a pull, both in the median."""
    pull_s, sent = _pull_s(recorded), recorded.weights.sent
    return min(1e5, max(1e-3, sent * _GBIT_PER_BYTE / pull_s)) if pull_s and sent else _LINK_GBPS


def _pull_s(recorded: RecordedRun) -> float:
    return quantile([install.pull_s for install in recorded.installs], 0.5) or 0.0


def engine_of(recorded: RecordedRun, engine: MeasuredEngine) -> EngineProfile:
    """The engine whose rollouts get tokens at the recorded pace. Prefill, and waits inside the engine, are in it."""
    pauses = [install.pause_s for install in recorded.installs]
    return EngineProfile(
        name=f"{recorded.spec.name}-engine",
        model=_UNKNOWN,
        device=_UNKNOWN,
        gpus=0,
        source=f"{engine.attempts} attempts of a recorded run",
        costs=StepCosts(base_s=engine.base_s, sequence_s=engine.rollout_s),
        kv=KvCapacity(tokens=_NO_LIMIT, prefix_cache=False),
        sequences=_NO_LIMIT,
        batched_tokens=_NO_LIMIT,
        weights_gb=recorded.weights.dense / 1e9,
        delays=EngineDelays(install_s=quantile(pauses, 0.5) or 0.0),
        errors=_errors(engine),
    )


def trainer_of(recorded: RecordedRun) -> TrainerProfile:
    """The trainer that takes as long per token, and from there to the announcement, as the recorded one."""
    rows, weights = recorded.rollouts, recorded.weights
    works = list(_works(recorded.steps))
    trained = {step.step for step, _, _ in works}
    tokens = sum(
        prompt + length
        for step, prompt, length in zip(rows.step, rows.prompt, rows.length, strict=True)
        if step in trained
    )
    checkpoints = [step.checkpoint_s for step, _, _ in works if step.checkpoint_s]
    return TrainerProfile(
        name=f"{recorded.spec.name}-trainer",
        model=_UNKNOWN,
        device=_UNKNOWN,
        gpus=0,
        source=f"{len(works)} steps of a recorded run",
        costs=TrainerCosts(token_s=sum(learn_s for _, learn_s, _ in works) / max(1, tokens)),
        micro_batch_tokens=1,  # each sample alone, so that padding, which the record has in its time, costs nothing
        weights_gb=weights.dense / 1e9,
        patch_share=min(1.0, weights.sent / weights.dense) if weights.dense else 1.0,
        delays=TrainerDelays(
            publish_s=quantile([publish_s for _, _, publish_s in works], 0.5) or 0.0,
            checkpoint_s=quantile(checkpoints, 0.5) or 0.0,
        ),
    )


def _works(steps: list[RecordedStep]) -> Iterator[tuple[RecordedStep, float, float]]:
    """Each step with the seconds of learning, and those from there to the announcement of its version.

    The trainer begins when the step's rollouts have ended and the step before is announced. What it did not report as
    learning is the way to the announcement; without a report all of it is learning.
    """
    before = [0.0, *(step.announced_s for step, _ in pairwise(steps))]
    for step, free_s in zip(steps, before, strict=True):
        whole_s = max(0.0, step.announced_s - max(step.generated_s, free_s))
        learn_s = min(step.train_s or whole_s, whole_s)
        yield step, learn_s, whole_s - learn_s


def _errors(engine: MeasuredEngine) -> FitErrors:
    return FitErrors(
        observations=engine.attempts, median=engine.error_median, p90=engine.error_p90, worst=engine.error_worst
    )
