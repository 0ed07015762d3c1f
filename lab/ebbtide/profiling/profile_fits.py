"""Fits profiles of engines and trainers to measured times, with costs that are not negative."""

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from ebbtide.errors import InvalidRequest
from ebbtide.profiling.engine_measuring import EngineMeasurements, MeasuredSteps
from ebbtide.profiling.measured_learning import LearnerWork, TrainerMeasurements
from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile, FitErrors, KvCapacity, StepCosts
from ebbtide.simulator.engines.trainer_profile import TrainerCosts, TrainerDelays, TrainerProfile

Array = npt.NDArray[np.float64]

#: An observation counts in full up to this multiple of the usual relative error, and less beyond it (Huber 1964):
#: other programs held it up.
_USUAL: Final = 3.0
_ROUNDS: Final = 8
#: A fit may give an observation no time at all; nothing can be relative to that.
_SHORTEST_S: Final = 1e-6


def least_squares(matrix: Array, target: Array) -> Array:
    """Coefficients of at least 0 with the least squared error, (n,), for a matrix of (m, n).

    The best fit has some coefficients at 0, and is the plain fit on the others. So all choices are tried: n is small.
    """
    rows, columns = matrix.shape
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(float).tiny)
    best, least = np.zeros(columns), float(target @ target)
    for size in range(1, min(rows, columns) + 1):
        for chosen in combinations(range(columns), size):
            part = matrix[:, chosen] / scale[list(chosen)]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(((part @ found - target) ** 2).sum())
            if error < least * (1.0 - 1e-9):  # of equal fits the one with fewer costs
                best, least = np.zeros(columns), error
                best[list(chosen)] = found / scale[list(chosen)]
    return best


def fit_costs(matrix: Array, seconds: Array) -> tuple[Array, Array]:
    """Costs per unit of each column, and the relative errors of the observations. Relative errors are made small.

    They are relative to the fitted times: relative to the measured ones, an observation that is too short by chance
    would count for more than one that is too long, and all costs would come out too low.
    """
    weights, scale = np.ones(len(seconds)), seconds
    for _ in range(_ROUNDS):
        factor = np.sqrt(weights) / scale
        costs = least_squares(matrix * factor[:, None], seconds * factor)
        scale = np.maximum(matrix @ costs, _SHORTEST_S)
        errors = np.abs(seconds / scale - 1.0)
        usual = max(float(np.median(errors)), 1e-9)
        weights = 1.0 / np.maximum(1.0, errors / (_USUAL * usual))
    return costs, np.abs(matrix @ costs / seconds - 1.0)


def fit_errors(errors: Sequence[float] | Array) -> FitErrors:
    return FitErrors(
        observations=len(errors),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        worst=float(np.max(errors)),
    )


#: With fewer observations than this the costs say nothing about other steps.
_FEWEST_INTERVALS: Final = 6


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
    if len(observations) < _FEWEST_INTERVALS:
        text = f"{len(observations)} measured intervals are too few to fit costs to; {_FEWEST_INTERVALS} are the least"
        raise InvalidRequest(text, field="observations")
    costs, errors = fit_costs(_step_matrix(observations), np.array([one.seconds for one in observations]))
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


def _step_matrix(observations: Sequence[MeasuredSteps]) -> Array:
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


#: With fewer observations than this the costs say nothing about other steps.
_FEWEST_STEPS: Final = 5


def fit_trainer(
    measured: TrainerMeasurements, *, name: str, model: str, device: str, gpus: int, source: str
) -> TrainerProfile:
    """The profile of a measured trainer of one rank. Raises `InvalidRequest` if too little was measured."""
    costs, errors = fit_trainer_costs(measured.work)
    weights_gb = measured.weights_bytes / 1e9
    return TrainerProfile(
        name=name,
        model=model,
        device=device,
        gpus=gpus,
        source=source,
        costs=costs,
        micro_batch_tokens=measured.micro_batch_tokens,
        weights_gb=weights_gb,
        patch_share=min(1.0, measured.patch_bytes / measured.weights_bytes),
        delays=TrainerDelays(
            start_s=measured.start_s,
            snapshot_s=measured.snapshot_s,
            publish_s=measured.encode_s,
            checkpoint_s=measured.checkpoint_s,
        ),
        errors=errors,
    )


def fit_trainer_costs(observations: Sequence[LearnerWork]) -> tuple[TrainerCosts, FitErrors]:
    """Costs of work with backwards first; then what part of them a further forward takes."""
    plain = [one for one in observations if not one.forwards]
    if len(plain) < _FEWEST_STEPS:
        text = f"{len(plain)} measured steps are too few to fit costs to; {_FEWEST_STEPS} are the least"
        raise InvalidRequest(text, field="observations")
    found, _ = fit_costs(_work_matrix(plain), np.array([one.seconds for one in plain]))
    update_s, micro_batch_s, token_s, pair_s = map(float, found)
    costs = TrainerCosts(token_s=token_s, pair_s=pair_s, micro_batch_s=micro_batch_s, update_s=update_s)
    if further := [one for one in observations if one.forwards]:
        gradients = _work_matrix(further)[:, 1:] @ found[1:]
        extra = np.array([one.seconds - one.updates * update_s for one in further]) - gradients
        share = float(np.median(extra / (gradients * np.array([one.forwards for one in further]))))
        costs = TrainerCosts(
            token_s=token_s,
            pair_s=pair_s,
            micro_batch_s=micro_batch_s,
            update_s=update_s,
            forward_share=min(1.0, max(0.0, share)),
        )
    errors = [abs(_seconds(costs, one) / one.seconds - 1.0) for one in observations]
    return costs, fit_errors(errors)


def _seconds(costs: TrainerCosts, work: LearnerWork) -> float:
    gradients = costs.micro_batch_s * work.micro_batches + costs.token_s * work.tokens + costs.pair_s * work.pairs
    return costs.update_s * work.updates + gradients * (1.0 + costs.forward_share * work.forwards)


def _work_matrix(observations: Sequence[LearnerWork]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    rows = [[one.updates, one.micro_batches, one.tokens, one.pairs] for one in observations]
    return np.array(rows, dtype=np.float64)
