"""Fits the time of a trainer's steps to measured ones."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from ebbtide.errors import InvalidRequest
from ebbtide.profiling.measured_learning import LearnerWork, TrainerMeasurements
from ebbtide.profiling.non_negative_fit import fit_costs, fit_errors
from ebbtide.simulator.engines.engine_profile import FitErrors
from ebbtide.simulator.engines.trainer_profile import TrainerCosts, TrainerDelays, TrainerProfile

#: With fewer observations than this the costs say nothing about other steps.
_LEAST: Final = 5


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
    if len(plain) < _LEAST:
        text = f"{len(plain)} measured steps are too few to fit costs to; {_LEAST} are the least"
        raise InvalidRequest(text, field="observations")
    found, _ = fit_costs(_matrix(plain), np.array([one.seconds for one in plain]))
    update_s, micro_batch_s, token_s, pair_s = map(float, found)
    costs = TrainerCosts(token_s=token_s, pair_s=pair_s, micro_batch_s=micro_batch_s, update_s=update_s)
    if further := [one for one in observations if one.forwards]:
        gradients = _matrix(further)[:, 1:] @ found[1:]
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


def _matrix(observations: Sequence[LearnerWork]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    rows = [[one.updates, one.micro_batches, one.tokens, one.pairs] for one in observations]
    return np.array(rows, dtype=np.float64)
