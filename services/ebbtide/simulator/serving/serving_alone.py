"""Plays serving without rollouts, and says which latencies an SLO's factors come to."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from ebbtide.serving_guard.governor.budget_decider import LatencyTargets
from ebbtide.simulator.serving.pair_costs import PairCosts
from ebbtide.simulator.serving.request_traffic import TrafficRequest
from ebbtide.simulator.serving.served_engine import ServedCall
from ebbtide.simulator.serving.serving_pair import ServingPair
from ebbtide.simulator.serving.serving_policies import ALONE


def played_alone(requests: Sequence[TrafficRequest], costs: PairCosts, *, seed: int = 0) -> ServingPair:
    """Serving without rollouts."""
    pair = ALONE.play(requests, costs, LatencyTargets(), seed=seed)
    pair.run()
    return pair


def resolved_targets(slo: LatencyTargets, alone: Sequence[ServedCall]) -> LatencyTargets:
    """The targets in seconds; factors are on the percentile of serving alone."""
    ttft = latency_percentile(served_ttft(alone), slo.percentile)
    tpot = latency_percentile(served_tpot(alone), slo.percentile)
    return replace(slo, ttft_s=slo.ttft_s or slo.ttft_factor * ttft, tpot_s=slo.tpot_s or slo.tpot_factor * tpot)


def latency_percentile(values: Sequence[float], at: float) -> float:
    """The percentile (0 to 100) between two values in proportion; 0.0 without values."""
    return float(np.percentile(values, at)) if len(values) else 0.0


def served_ttft(calls: Sequence[ServedCall]) -> list[float]:
    """Seconds to the first token."""
    return [one.ttft_s for one in calls]


def served_tpot(calls: Sequence[ServedCall]) -> list[float]:
    """Mean seconds of each later token, of requests that have any."""
    return [one.tpot_s for one in calls if one.made > 1]
