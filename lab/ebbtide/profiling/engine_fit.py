"""Fits the time of an engine's steps to measured ones."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from ebbtide.errors import InvalidRequest
from ebbtide.profiling.engine_measuring import EngineMeasurements, MeasuredSteps
from ebbtide.profiling.non_negative_fit import Array, fit_costs, fit_errors
from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile, FitErrors, KvCapacity, StepCosts

#: With fewer observations than this the costs say nothing about other steps.
_LEAST: Final = 6


def fit_engine(
    measured: EngineMeasurements, *, name: str, model: str, device: str, gpus: int, source: str
) -> EngineProfile:
    """The profile of a measured engine. Raises `InvalidRequest` if too little was measured."""
    costs, errors = fit_step_costs(measured.steps)
    capacity = measured.capacity
    return EngineProfile(
        name=name,
        model=model,
        device=device,
        gpus=gpus,
        source=source,
        costs=costs,
        kv=KvCapacity(
            tokens=capacity.kv_tokens,
            block=capacity.kv_block,
            prefix_cache=capacity.prefix_cache,
            whole_prompt_fits=capacity.whole_prompt_fits,
        ),
        batched_tokens=capacity.batched_tokens,
        sequences=capacity.sequences,
        weights_gb=measured.weights_bytes / 1e9,
        delays=EngineDelays(
            start_s=measured.start_s,
            stop_s=_median(measured.stop_s),
            install_s=_median(measured.pause_s),
            sleep_s=measured.sleep_s,
            wake_s=measured.wake_s,
        ),
        errors=errors,
    )


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds)) if seconds else 0.0


def fit_step_costs(observations: Sequence[MeasuredSteps]) -> tuple[StepCosts, FitErrors]:
    """The costs with the least relative errors. The time to read the weights is a part of each step's base."""
    if len(observations) < _LEAST:
        text = f"{len(observations)} measured intervals are too few to fit costs to; {_LEAST} are the least"
        raise InvalidRequest(text, field="observations")
    costs, errors = fit_costs(_matrix(observations), np.array([one.seconds for one in observations]))
    base_s, token_s, sequence_s, context_s, pair_s, prompt_s = costs
    found = StepCosts(
        base_s=float(base_s),
        token_s=float(token_s),
        sequence_s=float(sequence_s),
        context_s=float(context_s),
        pair_s=float(pair_s),
        prompt_s=float(prompt_s),
    )
    return found, fit_errors(errors)


def _matrix(observations: Sequence[MeasuredSteps]) -> Array:
    """What each observation computed: steps, tokens, sequences, contexts, pairs and prompts."""
    return np.array(
        [
            [
                sum(group.steps for group in one.groups),
                sum(group.steps * (group.batch + group.prefill) for group in one.groups),
                sum(group.steps * group.batch for group in one.groups),
                sum(group.steps * group.context for group in one.groups),
                sum(group.steps * group.pairs for group in one.groups),
                sum(group.steps * group.prompts for group in one.groups),
            ]
            for one in observations
        ],
        dtype=np.float64,
    )
