"""Spot traces in the simulator: steps worked out by hand, policies in their order, tokens conserved."""

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from benchmarks.replay.played_case import play, speed_ratio
from benchmarks.replay.report import table
from benchmarks.replay.run import TitledCase, figures, replay, run_level, unknown
from benchmarks.replay.setting import (
    BALANCE,
    FAIR,
    MIGRATE,
    POLICIES,
    RESTART,
    Setting,
)
from benchmarks.replay.trace_scenario import (
    ReplayCase,
    machine_losses,
    serving_machines,
    trace_scenario,
)
from ebbtide.simulator.scenario.input_tables import QuantileTable, SpotTrace, TraceEvent
from tests.unit.simulator.level_bound import drawn_steps, ends, levelled

#: Half of the responses have few tokens, and one in eight has thousands.
LENGTHS = QuantileTable((0.0, 0.5, 0.875, 1.0), (50.0, 400.0, 2_000.0, 9_000.0), True)
SMALL = Setting(rollouts=64, slots=16, plateau=8, cap_tokens=9_000)


def churn(seed: int) -> SpotTrace:
    """Some six workers, of which one or two are lost every few minutes, and replaced."""
    draw = random.Random(seed)
    alive = [f"n{index}" for index in range(6)]
    events = [TraceEvent(0.0, True, name) for name in alive]
    for index in range(6):
        now = 200.0 * (index + 1)
        lost = [alive.pop(draw.randrange(len(alive))) for _ in range(draw.randint(0, 2))]
        events += [TraceEvent(now, False, name) for name in lost]
        while len(alive) < 6 and draw.random() < 0.7:
            alive.append(f"n{index}-{len(alive)}-later")
            events.append(TraceEvent(now, True, alive[-1]))
    return SpotTrace(events=tuple(events))


def case(seed: int, **setting: Any) -> ReplayCase:
    given = structs.replace(SMALL, seed=seed, **setting)
    return ReplayCase(trace=churn(seed), lengths=LENGTHS, stretch=1.0, setting=given)


def hand_made(*events: TraceEvent, tokens: int = 300, rollouts: int = 1, until_s: float = 200.0) -> ReplayCase:
    setting = Setting(rate=10.0, plateau=2, slots=4, boot_s=0.0, pull_s=0.0, rollouts=rollouts, cap_tokens=10_000)
    lengths = QuantileTable((0.0, 1.0), (float(tokens), float(tokens)))
    return ReplayCase(
        trace=SpotTrace(events=(*events, TraceEvent(until_s, True, "last"))), lengths=lengths, stretch=1.0,
        setting=setting,
    )  # fmt: skip


ONE = TraceEvent(0.0, True, "a")


def test_rollouts_share_what_an_engine_makes_beyond_its_plateau() -> None:
    alone, four = (play(hand_made(ONE, rollouts=rollouts), BALANCE).ends[0] for rollouts in (2, 4))
    assert alone == pytest.approx(30.0, abs=1.0)  # 300 tokens at 10 tokens/s each
    assert four == pytest.approx(60.0, abs=1.0)  # four share 20 tokens/s


def test_a_loss_costs_the_whole_of_a_rollout_or_next_to_nothing_of_it() -> None:
    events = (ONE, TraceEvent(20.0, False, "a"), TraceEvent(20.0, True, "b"))
    kept, again, told = (play(hand_made(*events), policy).ends[0] for policy in (BALANCE, RESTART, FAIR))
    assert told == pytest.approx(30.0, abs=1.0)
    assert told < kept == pytest.approx(30.0, abs=6.0)  # the loss is noticed after some seconds
    assert again == pytest.approx(kept + 20.0, abs=1.0)


def test_the_bound_ends_steps_when_worked_out_by_hand() -> None:
    setting = Setting(rate=10.0, plateau=2, slots=4)
    assert ends([[100, 100, 200, 400]], [(0.0, 1)], 1e6, setting) == pytest.approx([40.0])
    assert levelled([5.0, 3.0, 1.0], 2.0, 1) == pytest.approx([3.0, 3.0, 1.0])
    assert levelled([5.0, 3.0], 2.0, 2) == pytest.approx([3.0, 1.0])


def test_machines_serve_from_the_end_of_their_pull_until_they_are_gone() -> None:
    events = (ONE, TraceEvent(5.0, True, "b"), TraceEvent(50.0, False, "a"), TraceEvent(60.0, False, "b"))
    given = hand_made(*events)
    slow = structs.replace(given, setting=structs.replace(given.setting, boot_s=20.0, pull_s=10.0))
    assert serving_machines(slow) == [(30.0, 1), (35.0, 2), (50.0, 1), (60.0, 0)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_no_policy_beats_the_bound_and_each_trains_the_same_work(policy: Any) -> None:
    given = case(1)
    played, drawn = play(given, policy), drawn_steps(given)
    assert played.tokens == sum(map(sum, drawn[: len(played.ends)]))
    best = ends(drawn, serving_machines(given), given.until_s, given.setting)
    assert len(played.ends) >= 2
    assert all(end >= soonest - 1.0 for end, soonest in zip(played.ends, best, strict=False))
    if policy.name != RESTART.name:
        assert played.share_twice < 0.001


def test_the_same_case_is_played_alike_again() -> None:
    first, again = (structs.replace(play(case(2), BALANCE), cpu_s=0.0) for _ in range(2))
    assert first == again


def test_knowing_lengths_is_no_slower_than_balance_and_balance_than_restarts() -> None:
    # A step here is a few minutes, so that a hundredth is some seconds of luck.
    played = {policy.name: play(case(3), policy).ends for policy in POLICIES}
    assert speed_ratio(played[BALANCE.name], played[RESTART.name]) >= 1.0
    assert speed_ratio(played[BALANCE.name], played[MIGRATE.name]) >= 0.99
    assert speed_ratio(played[FAIR.name], played[BALANCE.name]) >= 0.99


@pytest.mark.parametrize("setting", [{}, {"slots": 4}, {"context_tokens": 4_096.0, "spread": 0.3}], ids=str)
def test_the_fair_oracle_is_as_fast_as_any_who_pays_what_it_pays(setting: dict[str, Any]) -> None:
    given = case(3, **setting)
    fair = play(given, FAIR)
    assert fair.twice == 0  # what a machine has is moved before that is lost
    for policy in POLICIES:
        assert speed_ratio(fair.ends, play(given, policy).ends) >= 0.998, policy.name


def test_losses_are_told_by_the_machines_names() -> None:
    given = hand_made(ONE, TraceEvent(20.0, True, "b"), TraceEvent(50.0, False, "a"))
    assert machine_losses(trace_scenario(given, FAIR), 0) == {"spot-1.a": 50.0}


def test_rollouts_leave_a_machine_before_it_is_lost() -> None:
    events = (ONE, TraceEvent(20.0, False, "a"), TraceEvent(0.0, True, "b"))
    played = play(hand_made(*events, rollouts=2, tokens=600), FAIR)
    assert played.twice == 0
    assert played.ends[0] == pytest.approx(60.0, abs=1.0)


def test_a_case_with_few_steps_is_played_for_longer() -> None:
    given = structs.replace(hand_made(ONE), span_s=40.0)
    said: list[str] = []
    (found,) = replay([TitledCase({"slots": 4}, given, (BALANCE, MIGRATE))], said.append)
    assert found["hours"] == round(160.0 / 3600.0, 2)  # of 40, 80 and 160 seconds the first in which three steps end
    assert min(row["steps"] for row in found["policies"]) >= 3
    assert len(said) == 3 * 3


def titled(slots: int, seed: int, **columns: float) -> dict[str, Any]:
    """A case in which all policies have the same figures."""
    names = ("over_first", "share_generated_twice", "attempts_per_rollout", "moves_per_rollout", "over_none")
    row = dict.fromkeys((*names, "share_of_fair_oracle"), 1.0) | columns
    rows: list[dict[str, Any]] = [{"policy": one.name, **row} for one in POLICIES]
    return {"slots": slots, "seed": seed, "hours": 1.0, "policies": rows}


def test_figures_are_of_the_worst_cell_which_is_the_mean_over_its_seeds() -> None:
    cases = [titled(64, 0, over_none=0.9), titled(64, 1, over_none=1.3), titled(8, 0), titled(8, 1)]
    found = figures(cases)
    assert found["balancing_over_none"] == pytest.approx(1.0)
    assert found["balancing_over_none_mean"] == pytest.approx(1.05)
    assert found["balancing_over_none_least_seed"] == pytest.approx(0.9)
    assert unknown(found) == []


def test_a_case_in_which_a_policy_ended_no_step_makes_figures_unknown_and_a_share_without_an_oracle_none() -> None:
    found = figures([titled(64, 0, share_of_fair_oracle=float("nan")), titled(8, 0)])
    assert unknown(found) == ["share_of_fair_oracle"]
    assert figures([titled(64, 0, share_of_fair_oracle=0.0)])["share_of_fair_oracle"] is None


def test_a_whole_level_is_one_call(tmp_path: Path) -> None:
    spot, lengths = tmp_path / "spot.csv", tmp_path / "lengths.csv"
    spot.write_text("t_s,count\n0,3\n200,1\n250,3\n400,2\n")
    lengths.write_text("quantile,output_tokens\n0.0,10\n0.9,400\n1.0,2000\n")
    said: list[str] = []
    setting = Setting(rollouts=16)
    report = run_level([spot], [lengths], stretches=(1.0,), setting=setting, say=said.append)
    assert {one["slots"] for one in report["cases"]} == {64, 8}
    assert report["figures"]["share_generated_twice"] < 0.01
    assert report["figures"]["balancing_over_none_least_seed"] <= report["figures"]["balancing_over_none"]
    assert 0.0 < report["figures"]["share_of_fair_oracle"] <= 1.01
    assert report["legend"] in table(report["cases"])
    assert len(said) == 2 * (1 + len(POLICIES))
