"""Fits profiles of the real settings' engine and trainer to the session's profile blocks."""

from collections.abc import Sequence
from typing import Final

from benchmarks.simulator.bound_fleet import KV_TOKENS, SLOTS
from benchmarks.simulator.fitting_inputs import (
    LearnedStep,
    StepInterval,
    cluster_delays,
    learned_steps,
    step_intervals,
)
from benchmarks.simulator.profile_block import GRID
from benchmarks.simulator.real_settings import RealSession
from ebbtide.profiling.engine_measuring import MeasuredSteps, StepGroup
from ebbtide.profiling.measured_learning import LearnerWork
from ebbtide.profiling.profile_fits import fit_step_costs, fit_trainer_costs
from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile, KvCapacity, StepCosts
from ebbtide.simulator.engines.trainer_profile import SampleLength, TrainerDelays, TrainerProfile
from ebbtide.trainer.learning.sample_deal import micro_parts
from ebbtide.types.run import TrainerSpec

_SOURCE: Final = "profile blocks of this session"
_MODEL: Final = "random policy"


def fitted_engine(session: RealSession, *, whole_core: bool) -> EngineProfile:
    """Raises `InvalidRequest` if too little was observed."""
    intervals = step_intervals((block.engine for block in session.blocks), whole_core=whole_core)
    costs, errors = fit_step_costs([_steps(one) for one in intervals])
    delays = cluster_delays(session.blocks)
    return EngineProfile(
        name="real-engine",
        model=_MODEL,
        device="the engines' core" if whole_core else "a turn of the engines' core",
        gpus=0,
        source=_SOURCE,
        costs=costs,
        kv=KvCapacity(tokens=KV_TOKENS),
        sequences=SLOTS,
        weights_gb=version_bytes(session)[0] / 1e9,
        delays=EngineDelays(install_s=delays.pause_s, admit_s=_admit_s(delays.first_token_s, costs)),
        errors=errors,
    )


def fitted_trainer(session: RealSession) -> TrainerProfile:
    """Raises `InvalidRequest` if too little was observed."""
    micro_batch_tokens = TrainerSpec().micro_batch_tokens
    costs, errors = fit_trainer_costs([_work(one, micro_batch_tokens) for one in learned_steps(session.blocks)])
    delays, (dense, sent) = cluster_delays(session.blocks), version_bytes(session)
    return TrainerProfile(
        name="real-trainer",
        model=_MODEL,
        device="the other core",
        gpus=0,
        source=_SOURCE,
        costs=costs,
        micro_batch_tokens=micro_batch_tokens,
        weights_gb=dense / 1e9,
        patch_share=min(1.0, sent / dense),
        delays=TrainerDelays(publish_s=delays.notice_s + delays.publish_s),
        errors=errors,
    )


def _admit_s(first_token_s: float, costs: StepCosts) -> float:
    """What lies between a prompt's submission to an idle engine and the step that reads it."""
    tokens = min(GRID, key=lambda cell: cell.concurrency * cell.prompt).prompt
    read_s = costs.step_s(batch=0, context=0, prefill=tokens, pairs=tokens**2 // 2)
    return max(0.0, first_token_s - read_s)


def version_bytes(session: RealSession) -> tuple[float, float]:
    """Bytes of a version of the blocks' runs, whole and as it was sent, means."""
    steps = [step.trainer for block in session.blocks for run in block.trained for step in run.steps]
    names = ("publish_dense_bytes", "publish_bytes")
    dense, sent = (sum(step[name] for step in steps) / len(steps) for name in names)
    return dense, sent


def _steps(interval: StepInterval) -> MeasuredSteps:
    """Steps are whole; what was observed of a fraction of one is scaled."""
    steps = max(1, round(interval.steps))
    group = StepGroup(
        steps=steps,
        batch=interval.batch,
        context=interval.context,
        prefill=interval.prefill,
        pairs=round(interval.pairs),
    )
    return MeasuredSteps(seconds=interval.seconds * steps / interval.steps, groups=(group,))


def _work(step: LearnedStep, micro_batch_tokens: int) -> LearnerWork:
    parts = list(micro_parts([SampleLength(length) for length in step.lengths], micro_batch_tokens))
    return LearnerWork(
        seconds=step.seconds,
        updates=1,
        micro_batches=len(parts),
        tokens=sum(map(_padded, parts)),
        pairs=sum(_padded(part) * _longest(part) / 2 for part in parts),
    )


def _padded(part: Sequence[SampleLength]) -> int:
    return len(part) * _longest(part)


def _longest(part: Sequence[SampleLength]) -> int:
    return max(sample.length for sample in part)
