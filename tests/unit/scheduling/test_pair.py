"""The governor between two simulated engines: what it promises of a whole stretch of traffic."""

import pytest

from benchmarks.pair.simulated import compared, percentile, played, ttft
from benchmarks.pair.simulated_pair import Engines
from ebbtide.demo.coserving.coserving_traffic import TrafficBursts, made_up
from ebbtide.scheduling.coserving.budget_decider import LatencyTargets, StepLimits
from ebbtide.scheduling.coserving.governor import Governor


@pytest.mark.parametrize("load", [0.2, 0.5])
def test_served_requests_hardly_feel_it_and_idle_time_is_harvested(load: float) -> None:
    requests = made_up(TrafficBursts(prompt=400, output=12), 240.0, seed=1)
    rows = {row.policy: row for row in compared(requests, load, Engines(together=1.2), [0.15], 0)}
    alone, ours, unguarded = rows["alone"], rows["governor 0.15"], rows["unguarded"]
    assert ours.requests == alone.requests == len(requests)
    assert ours.ttft_ms[-1] <= max(1.15 * alone.ttft_ms[-1], alone.ttft_ms[-1] + 26)
    assert ours.tpot_ms[-1] <= 1.15 * alone.tpot_ms[-1]
    assert ours.share_of_ideal >= 0.9
    assert ours.reclaim_p99_ms <= 20
    assert ours.ttft_ms[-1] < unguarded.ttft_ms[-1]


def test_the_same_seed_gives_the_same_history() -> None:
    requests = made_up(TrafficBursts(prompt=400, output=12), 60.0, seed=2)
    pairs = [
        played(Governor(LatencyTargets(ttft_s=1.0, tpot_s=0.1), StepLimits()), Engines(), requests, 5) for _ in range(2)
    ]
    assert pairs[0].harvested == pairs[1].harvested > 0
    assert percentile(ttft(pairs[0]), 0.99) == percentile(ttft(pairs[1]), 0.99)
