"""The schedule of a served host: when a borrowed worker may step, and what its users meet."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.scheduling.dispatch.reclaim_risk import SHORT_S
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets
from ebbtide.simulator.serving.grant_tape import SPELL_S, GrantSpell
from ebbtide.simulator.serving.pair_costs import PairCosts
from ebbtide.simulator.serving.request_traffic import TrafficBursts, TrafficRequest, made_up
from ebbtide.simulator.serving.served_host import GrantTapes, ServedHost, ServedTraffic, borrowed_state
from ebbtide.simulator.serving.serving_policies import OURS
from ebbtide.types.grants import Forecast

COSTS = PairCosts()
SLO = LatencyTargets(ttft_s=1.0, tpot_s=0.05)
TRAFFIC = ServedTraffic(
    requests=tuple(made_up(TrafficBursts(prompt=400, output=12), 60.0, seed=1)), seconds=60.0, window_s=20.0, windows=3
)
#: No room to share.
TIGHT = LatencyTargets(ttft_s=1.0, tpot_s=0.0101)
#: Twelve seconds of one long answer, then silence.
BUSY = ServedTraffic(requests=(TrafficRequest(2.0, 400, 1300),), seconds=40.0, window_s=40.0, windows=1)


@pytest.fixture(scope="module")
def tapes() -> GrantTapes:
    return GrantTapes(TRAFFIC, COSTS, SLO)


def whole(spells: Iterator[GrantSpell], begin: float, end: float) -> list[GrantSpell]:
    """The spells, which fill that time without gaps."""
    found = list(spells)
    assert (found[0].begin_s, found[-1].end_s) == (begin, end)
    assert all(one.end_s == two.begin_s for one, two in pairwise(found))
    assert all(one.begin_s < one.end_s for one in found)
    return found


def test_spells_fill_hours_without_gaps_and_windows_are_played_once(tapes: GrantTapes) -> None:
    for seed in range(3):
        spells = whole(ServedHost(TRAFFIC, COSTS, SLO, seed, tapes=tapes).spells(10.0, 7_200.0), 10.0, 7_200.0)
        assert all(0.0 <= one.share <= 1.0 and 0 <= one.attained <= one.requests for one in spells)
    assert tapes.played == 3


def test_each_request_counts_once_however_the_time_is_cut(tapes: GrantTapes) -> None:
    host = ServedHost(TRAFFIC, COSTS, SLO, 7, tapes=tapes)
    at_once = list(host.spells(0.0, 600.0))
    in_parts = [one for begin in range(0, 600, 7) for one in host.spells(float(begin), min(600.0, begin + 7.0))]
    assert sum(one.requests for one in in_parts) == sum(one.requests for one in at_once)
    assert sum(one.requests for one in at_once) == pytest.approx(10 * len(TRAFFIC.requests), rel=0.15)


def test_the_same_seed_gives_the_same_spells_and_hosts_differ(tapes: GrantTapes) -> None:
    first, again, other = (
        list(ServedHost(TRAFFIC, COSTS, SLO, seed, tapes=shared).spells(0.0, 300.0))
        for seed, shared in ((1, tapes), (1, None), (2, tapes))
    )
    assert first == again
    assert first != other


def test_a_schedule_harvests_what_the_pair_itself_does(tapes: GrantTapes) -> None:
    pair = OURS.play(TRAFFIC.requests, COSTS, SLO, seed=0)
    pair.run(60.0)
    pair.rest(60.0)
    spells = ServedHost(TRAFFIC, COSTS, SLO, 3, tapes=tapes).spells(0.0, 600.0)
    harvest = sum(one.share * (one.end_s - one.begin_s) for one in spells) * tapes.tokens_per_s / 600.0
    assert harvest == pytest.approx(pair.harvested / 60.0, rel=0.1)


def test_a_long_reclaim_is_a_spell_of_its_own_and_a_short_one_is_none() -> None:
    spells = whole(ServedHost(replace(BUSY, shift_s=0.0), COSTS, TIGHT, 0).spells(0.0, 400.0), 0.0, 400.0)
    held = [one for one in spells if not one.granted]
    assert held
    assert all(one.end_s - one.begin_s >= SHORT_S for one in held if one.begin_s > 0)
    assert all(one.end_s - one.begin_s <= SPELL_S + 1.0 for one in spells if one.granted)
    assert sum(one.requests for one in spells) == 10


def test_a_longer_reclaim_says_so_in_the_heartbeats() -> None:
    spells = list(ServedHost(BUSY, COSTS, TIGHT, 0).spells(0.0, 400.0))
    held = max(spells, key=lambda one: (not one.granted) * (one.end_s - one.begin_s))
    said = borrowed_state(held, held.begin_s + 1.0)
    assert not said.granted
    assert said.spell_s == held.forecast.spell_s > 0.0
    assert said.share < 1.0
    assert borrowed_state(held, held.begin_s + 0.1).granted, "heartbeats notice a standstill after a quarter second"


def test_silent_windows_are_not_played_and_their_forecast_grows() -> None:
    traffic = ServedTraffic(requests=(), seconds=3_600.0)
    tapes = GrantTapes(traffic, COSTS, SLO)
    spells = whole(ServedHost(traffic, COSTS, SLO, 0, tapes=tapes).spells(0.0, 3_600.0), 0.0, 3_600.0)
    assert tapes.played == 0
    assert {one.share for one in spells} == {1.0}
    assert spells[-1].forecast.spell_s > spells[1].forecast.spell_s
    assert all(borrowed_state(one, one.end_s).share > 0.99 for one in spells)


def test_a_pace_of_the_day_scales_requests_and_zero_means_none(tapes: GrantTapes) -> None:
    paced = replace(TRAFFIC, paces=((0.0, 1.0), (1_200.0, 0.0), (2_400.0, 2.0)), day_s=3_600.0)
    host = ServedHost(paced, COSTS, SLO, 0)
    usual, none, twice = (
        sum(one.requests for one in host.spells(at + 100.0, at + 1_100.0)) for at in (0.0, 1_200.0, 2_400.0)
    )
    assert none == 0
    assert twice == pytest.approx(2 * usual, rel=0.15)


def test_factors_of_the_slo_are_on_serving_alone() -> None:
    ttft_s, tpot_s = GrantTapes(TRAFFIC, COSTS, LatencyTargets()).targets
    assert 1.6 * COSTS.prefill(400) < ttft_s < 10.0
    assert 1.27 * COSTS.decode(1) < tpot_s < 0.2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"requests": (TrafficRequest(2.0, 1, 1), TrafficRequest(1.0, 1, 1))}, "requests"),
        ({"requests": (TrafficRequest(61.0, 1, 1),)}, "requests"),
        ({"seconds": float("inf")}, "requests"),
        ({"window_s": 0.0}, "window_s"),
        ({"windows": 0}, "window_s"),
        ({"paces": ((1.0, 1.0),)}, "paces"),
        ({"paces": ((0.0, float("nan")),)}, "paces"),
    ],
)
def test_traffic_that_makes_no_sense_is_refused_by_the_fields_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        GrantTapes(replace(TRAFFIC, **changes), COSTS, SLO)


def test_a_spell_keeps_its_forecast_when_it_is_cut() -> None:
    spell = GrantSpell(0.0, 10.0, 0.5, 3, 2, Forecast(share=0.4, spell_s=2.0))
    head, tail = spell.between(0.0, 4.0), spell.between(4.0, 20.0)
    assert (head.end_s, head.requests, tail.begin_s, tail.end_s, tail.requests) == (4.0, 0, 4.0, 10.0, 3)
    assert head.forecast == tail.forecast == spell.forecast


def test_requests_that_are_late_for_good_count_as_missed_when_a_window_ends() -> None:
    flood = ServedTraffic(
        requests=tuple(TrafficRequest(0.01 * number, 4000, 400) for number in range(2_000)),
        seconds=20.0,
        window_s=20.0,
        windows=1,
    )
    spells = list(ServedHost(flood, COSTS, SLO, 0).spells(0.0, 20.0))
    assert sum(one.requests for one in spells) > 1_000
    assert sum(one.attained for one in spells) < 0.1 * sum(one.requests for one in spells)
