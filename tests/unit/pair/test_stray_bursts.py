"""A modelled process beside a virtual pair takes its part of a core at random, and from each policy the same."""

from random import Random

import pytest
from msgspec.structs import replace

from benchmarks.pair.virtual.compared_policies import serving_policy
from benchmarks.pair.virtual.pair_costs import PairCosts, StrayProcess
from benchmarks.pair.virtual.serving_policies import played_alone
from benchmarks.pair.virtual.step_noise import StrayBursts
from ebbtide.demo.coserving.request_traffic import TrafficBursts, TrafficRequest, made_up
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

EXACT = PairCosts(noise=0.0, hiccup=0)
STRAY = StrayProcess(least=0.1, most=0.5)


def bursts(stray: StrayProcess, seconds: float, seed: int = 0) -> list[tuple[float, float]]:
    """(seconds, speed of the served engine) of each stretch."""
    played, now, found = StrayBursts(stray, Random(seed)), 0.0, []
    while now < seconds:
        played.turn(now)
        found.append((played.until - now, played.serving))
        now = played.until
    return found


def test_bursts_take_the_part_of_the_time_that_is_drawn_for_spells() -> None:
    found = bursts(STRAY, 4000.0)
    shares = sum(lasted for lasted, speed in found if speed < 1.0) / sum(lasted for lasted, _ in found)
    assert shares == pytest.approx(0.3, abs=0.02)
    assert {speed for _, speed in found} == {1.0, STRAY.serving}


def test_the_same_seed_gives_the_same_bursts() -> None:
    assert bursts(STRAY, 60.0) == bursts(STRAY, 60.0) != bursts(STRAY, 60.0, seed=1)


def test_a_request_beside_a_stray_process_goes_on_at_its_part_of_the_speed() -> None:
    always = replace(EXACT, stray=StrayProcess(least=0.5, most=0.5, serving=0.5))
    (call,) = played_alone([TrafficRequest(1.0, 300, 2000)], always).done
    # Half of the time is spent in bursts, at half the speed.
    assert call.tpot_s == pytest.approx(EXACT.decode(1) / 0.75, rel=0.05)


def test_each_policy_meets_the_same_bursts_at_the_same_time() -> None:
    costs, targets = replace(EXACT, stray=STRAY), LatencyTargets(ttft_s=1.0, tpot_s=0.05)
    requests = made_up(TrafficBursts(prompt=400, output=12), 60.0, seed=2)
    found = []
    for name in ("alone", "ours", "rose:600,1,0.2,0.25"):
        pair = serving_policy(name, costs).play(requests, costs, targets, seed=3)
        pair.run(30.0)
        found.append((pair._stray.until, pair._stray.serving))
    assert found[0] == found[1] == found[2]
