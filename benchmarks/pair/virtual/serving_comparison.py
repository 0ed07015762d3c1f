"""Plays the same arrivals under several policies, and finds the pace at which they load a served engine as wanted."""

from collections.abc import Sequence
from typing import Final

from benchmarks.pair.virtual.compared_policies import serving_policy
from benchmarks.pair.virtual.pair_costs import PairCosts
from benchmarks.pair.virtual.rollout_batch import RolloutShape
from benchmarks.pair.virtual.serving_figures import ServingFigures, serving_figures
from benchmarks.pair.virtual.serving_pair import ServingPair
from benchmarks.pair.virtual.serving_policies import played_alone, resolved_targets
from ebbtide.demo.coserving.request_traffic import TrafficRequest, faster
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

#: Serving alone again, with other noise: the difference to the first time is what says nothing.
AGAIN: Final = "alone again"
_AGAIN_SEED: Final = 1000
#: The pace is looked for between a thousandth and a thousand times the recorded one; 2^14 steps are finer than 0.1 %.
_SLOWEST, _FASTEST, _HALVINGS = 1e-3, 1e3, 14


def compared(
    requests: Sequence[TrafficRequest],
    costs: PairCosts,
    slo: LatencyTargets,
    names: Sequence[str],
    *,
    seed: int,
    shape: RolloutShape | None = None,
) -> list[ServingFigures]:
    """The figures of serving alone, alone again, and of each named policy; see `compared_policies` for names."""
    alone = played_alone(requests, costs, seed=seed)
    targets = resolved_targets(slo, alone.done)
    idle_s = alone.now - alone.busy_s

    def figures(name: str, pair: ServingPair) -> ServingFigures:
        return serving_figures(name, pair, costs, (targets.ttft_s, targets.tpot_s), idle_s)

    found = [figures("alone", alone), figures(AGAIN, played_alone(requests, costs, seed=seed + _AGAIN_SEED))]
    for name in names:
        pair = serving_policy(name, costs).play(requests, costs, targets, seed=seed, shape=shape)
        pair.run()
        found.append(figures(name, pair))
    return found


def speed_for_load(requests: Sequence[TrafficRequest], load: float, costs: PairCosts) -> float:
    """How many times as fast the requests must come for serving alone to be busy for that share of the time."""
    slow, fast = _SLOWEST, _FASTEST
    for _ in range(_HALVINGS):
        speed = float((slow * fast) ** 0.5)
        pair = played_alone(faster(requests, speed), costs)
        slow, fast = (speed, fast) if pair.busy_s < load * pair.now else (slow, speed)
    return float((slow * fast) ** 0.5)
