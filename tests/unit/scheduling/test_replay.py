"""The replay's engine and books: steps worked out by hand, tokens conserved, outcomes repeated."""

import random
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay.bound import blind_ends, ends, levelled
from benchmarks.replay.engine import Engine, Rollout
from benchmarks.replay.report import table
from benchmarks.replay.run import draw_steps, replay, run_level
from benchmarks.replay.setting import (
    ABLATION,
    BALANCE,
    ORACLE,
    PLATEAU_FIRST,
    POLICIES,
    RESTART,
    Policy,
    Setting,
    costless,
)
from benchmarks.replay.traces import FleetEvent, read_lengths, read_spot, serving, window
from benchmarks.replay.world import World

#: Ten tokens/s up to two rollouts, and nothing else takes time.
PLAIN = costless(Setting(rate=10.0, plateau=2, slots=4, boot_s=0.0, pull_s=0.0, rollouts=4))


def test_an_engine_shares_what_it_makes_beyond_its_plateau() -> None:
    engine = Engine(PLAIN, 0.0)
    for number, length in enumerate((100, 100, 200, 400)):
        engine.give(Rollout(number, length), 0.0, prefill=False)
    assert engine.next_end() == pytest.approx(20.0)  # four share 20 tokens/s
    engine.advance(20.0)
    assert [one.length for one in engine.finished(20.0)] == [100, 100]
    assert engine.next_end() == pytest.approx(30.0)  # two have 100 and 300 left, at 10 each
    engine.advance(30.0)
    assert [one.length for one in engine.finished(30.0)] == [200]
    assert engine.next_end() == pytest.approx(50.0)


def test_what_was_not_flushed_is_lost_and_a_prefill_holds_all_up() -> None:
    setting = Setting(rate=10.0, plateau=2, slots=4, prefill_tokens_per_s=100.0, prompt_tokens=50)
    engine, one, other = Engine(setting, 0.0), Rollout(0, 1_000), Rollout(1, 1_000)
    engine.give(one, 0.0, prefill=False)
    engine.advance(10.1)
    assert engine.made(one) == pytest.approx(101.0)
    other.made = 150.0
    engine.give(other, 10.1, prefill=True)
    engine.advance(12.1)  # 200 tokens of prefill take two seconds
    assert engine.made(one) == pytest.approx(101.0)
    engine.advance(13.1)
    assert set(engine.lose(13.1)) == {one, other}
    assert one.twice == pytest.approx(10.0 * (13.1 % 0.25))  # ten tokens/s since its last flush
    assert one.made + one.twice == pytest.approx(111.0)
    assert other.made + other.twice == pytest.approx(160.0)


def step(policy: Policy, setting: Setting, events: list[FleetEvent], lengths: list[int]) -> float:
    return World(events, 1e6, policy, setting).run([lengths]).ends[0]


def test_a_step_ends_when_worked_out_by_hand() -> None:
    events = [FleetEvent(0.0, True, "a")]
    # 100 each in 20 s, then 100 and 300 left at full rate.
    assert step(BALANCE, PLAIN, events, [100, 100, 200, 400]) == pytest.approx(50.0)
    # The oracle fills its slots too; one that left two of them empty would keep the longest at full rate.
    assert step(ORACLE, PLAIN, events, [100, 100, 200, 400]) == pytest.approx(50.0)
    assert step(PLATEAU_FIRST, PLAIN, events, [100, 100, 200, 400]) == pytest.approx(40.0)
    assert ends([[100, 100, 200, 400]], [(0.0, 1)], 1e6, PLAIN) == pytest.approx([40.0])
    assert blind_ends([[100, 100, 200, 400]], [(0.0, 1)], 1e6, PLAIN) == pytest.approx([50.0])


def test_a_loss_costs_the_whole_of_a_rollout_or_nothing_of_it() -> None:
    """The worker goes after 10 s with 100 tokens made, and another serves at once."""
    events = [FleetEvent(0.0, True, "a"), FleetEvent(10.0, False, "a"), FleetEvent(10.0, True, "b")]
    assert step(BALANCE, PLAIN, events, [400]) == pytest.approx(40.0)
    assert step(RESTART, PLAIN, events, [400]) == pytest.approx(50.0)


def test_a_run_without_workers_waits_and_goes_on_with_the_first() -> None:
    events = [FleetEvent(0.0, True, "a"), FleetEvent(10.0, False, "a"), FleetEvent(500.0, True, "b")]
    assert step(BALANCE, PLAIN, events, [400]) == pytest.approx(530.0)


def test_the_bound_levels_what_is_left() -> None:
    assert levelled([5.0, 3.0, 1.0], 2.0, 1) == pytest.approx([3.0, 3.0, 1.0])
    assert levelled([5.0, 3.0], 2.0, 2) == pytest.approx([3.0, 1.0])
    assert levelled([4.0, 4.0], 4.0, 1) == pytest.approx([2.0, 2.0])


def churn(seed: int) -> list[FleetEvent]:
    """Some ten workers, of which several come and go at once every few minutes."""
    draw = random.Random(seed)
    events, alive = [], [f"n{index}" for index in range(10)]
    events += [FleetEvent(0.0, True, name) for name in alive]
    for index in range(40):
        now = 120.0 * (index + 1)
        for _ in range(draw.randint(0, min(5, len(alive)))):
            events.append(FleetEvent(now, False, alive.pop(draw.randrange(len(alive)))))
        while len(alive) < 10 and draw.random() < 0.7:
            alive.append(f"n{index}.{len(alive)}.{draw.random()}")
            events.append(FleetEvent(now, True, alive[-1]))
    return sorted(events, key=lambda event: (event.t_s, event.joins))


def small(seed: int) -> tuple[Setting, list[list[int]]]:
    draw = random.Random(seed)
    setting = Setting(slots=draw.choice([8, 64]), rollouts=128, seed=seed)
    return setting, [[min(32_768, int(draw.lognormvariate(6.8, 1.0)) + 1) for _ in range(128)] for _ in range(6)]


@pytest.mark.parametrize("policy", [*POLICIES, *ABLATION[:4]], ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_rollouts_are_conserved_and_no_policy_beats_the_bound(seed: Any, policy: Any) -> None:
    setting, steps = small(seed)
    events = churn(seed)
    world = World(events, 1e6, policy, setting)
    result = world.run(steps)
    assert len(result.ends) == len(steps)
    assert result.rollouts == 128 * len(steps)
    assert result.tokens == sum(map(sum, steps))
    assert result.attempts >= result.rollouts
    assert result.attempts < 2 * result.rollouts or not policy.delays
    assert world.result.unfinished == 0.0
    best = ends(steps, serving(events, setting.boot_s + setting.pull_s), 1e6, setting)
    allowed = 1e-6 if not policy.knows else 1.0
    assert all(end >= soonest - allowed for end, soonest in zip(result.ends, best, strict=True))
    again = World(events, 1e6, policy, setting).run(steps)
    assert again == result
    if policy.keeps:
        lost = result.losses * setting.slots * setting.rate * setting.flush_s
        assert result.twice <= lost


@pytest.mark.parametrize("seed", range(3))
def test_balancing_is_faster_than_restarts_and_than_none_where_work_outlasts_the_slots(seed: Any) -> None:
    setting, steps = small(seed)
    rows = {row["policy"]: row for row in replay(churn(seed), steps, until=1e6, setting=setting, say=lambda _: None)}
    assert rows["balance"]["over_first"] >= 1.0
    assert rows["balance"]["share_generated_twice"] < 0.001 < rows["restart"]["share_generated_twice"]


def test_both_formats_of_traces_and_of_lengths_are_read(tmp_path: Path) -> None:
    (tmp_path / "named.csv").write_text("t_s,event,node\n5,remove,a\n0,add,a\n5,add,b\n")
    (tmp_path / "counted.csv").write_text("t_s,count\n0,3\n10,1\n20,2\n")
    (tmp_path / "quantiles.csv").write_text("quantile,output_tokens\n0.0,10\n0.5,20\n1.0,40\n")
    (tmp_path / "cdf.csv").write_text("tokens,cdf\n10,0.0\n4000,0.95\n")
    assert read_spot(tmp_path / "named.csv") == [(0.0, True, "a"), (5.0, False, "a"), (5.0, True, "b")]
    assert serving(read_spot(tmp_path / "counted.csv"), 5.0) == [(5.0, 3), (10.0, 1), (25.0, 2)]
    assert [event.t_s for event in window(read_spot(tmp_path / "counted.csv"), 15.0, 10.0)] == [0.0, 5.0]
    draw = random.Random(1)
    drawn = [read_lengths(tmp_path / "quantiles.csv").draw(draw, stretch=4.0, cap=100) for _ in range(2_000)]
    assert (min(drawn), max(drawn)) == (40, 100)
    assert sum(length <= 80 for length in drawn) / 2_000 == pytest.approx(0.5, abs=0.05)
    drawn = [read_lengths(tmp_path / "cdf.csv", cap=16_000).draw(draw) for _ in range(4_000)]
    assert 12_000 < max(drawn) <= 16_000
    assert sum(length > 4_000 for length in drawn) / 4_000 == pytest.approx(0.05, abs=0.015)
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="t_s,event,node or t_s,count"):
        read_spot(tmp_path / "other.csv")


@pytest.mark.parametrize("seed", range(3))
def test_the_oracles_are_no_slower_than_who_knows_nothing(seed: Any) -> None:
    setting, steps = small(seed)
    rows = {row["policy"]: row for row in replay(churn(seed), steps, until=1e6, setting=setting, say=lambda _: None)}
    assert rows[ORACLE.name]["over_first"] >= 0.999 * rows[BALANCE.name]["over_first"]
    assert rows[PLATEAU_FIRST.name]["over_first"] >= 0.999 * rows[ORACLE.name]["over_first"]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_balancing_is_never_slower_than_restarts_where_machines_are_few(seed: Any, share: Any) -> None:
    _, steps = small(seed)
    events = [event for event in churn(seed) if random.Random(event.node).random() < share]
    setting, policies = Setting(rollouts=128), (RESTART, BALANCE)
    _, row = replay(events, steps, until=1e6, setting=setting, policies=policies, say=lambda _: None)
    assert row["over_first"] >= 1.0


@pytest.mark.parametrize("machines", [1, 2, 4])
def test_where_nothing_is_ever_lost_delayed_dispatch_costs_no_thousandth(machines: Any) -> None:
    _, steps = small(1)
    events = [FleetEvent(0.0, True, f"n{number}") for number in range(machines)]
    setting, policies = Setting(rollouts=128), (RESTART, BALANCE)
    _, row = replay(events, steps, until=1e6, setting=setting, policies=policies, say=lambda _: None)
    assert row["over_first"] >= 0.999


def test_a_cap_cuts_stretched_lengths_and_ends_the_tail_of_a_cdf(tmp_path: Path) -> None:
    (tmp_path / "cdf.csv").write_text("tokens,cdf\n10,0.0\n4000,0.95\n")
    setting = Setting(rollouts=4_000, cap_tokens=16_384)
    lengths = read_lengths(tmp_path / "cdf.csv", setting.cap_tokens)
    once, stretched = (draw_steps(lengths, stretch=by, until=0.0, setting=setting)[0] for by in (1.0, 4.0))
    assert 12_000 < max(once) < max(stretched) == 16_384
    assert sum(length > 4_000 for length in once) / 4_000 == pytest.approx(0.05, abs=0.015)


def test_a_whole_level_is_one_call(tmp_path: Path) -> None:
    spot, lengths = tmp_path / "spot.csv", tmp_path / "lengths.csv"
    spot.write_text("t_s,count\n0,6\n300,3\n600,6\n2000,5\n")
    lengths.write_text("quantile,output_tokens\n0.0,10\n0.9,400\n1.0,2000\n")
    said: list[str] = []
    report = run_level([spot], [lengths], stretches=(1.0,), setting=Setting(rollouts=32), say=said.append)
    assert {case["slots"] for case in report["cases"]} == {64, 8}
    assert report["figures"]["share_generated_twice"] < 0.01
    shares = [report["figures"][name] for name in report["legend"]]
    assert len(shares) == 4
    assert all(0.0 < report["figures"][f"{name}_with_fewest_slots"] <= 1.01 for name in report["legend"])
    assert all(0.0 < share <= 1.01 for share in shares)
    assert report["figures"]["share_of_bound"] <= min(1.0, *shares) + 1e-9
    shown = table(report["cases"])
    assert all(column in shown for column in ("of oracle", "of plateau 1st", "of bound", "of blind"))
    assert all(what in shown for what in report["legend"].values())
    assert len(report["ablation"]) == 3
    assert said
    assert inf > report["figures"]["speedup_over_restart"] > 0.0


@pytest.mark.parametrize("made", [2_000, 30_000])
def test_a_long_prefill_beside_an_idle_worker_is_moved_nowhere(made: int) -> None:
    """A rollout resumed after a loss is pending until its prefill ends, longer than others are let wait."""
    setting = Setting(rate=30.0, plateau=8, slots=8, boot_s=0.0, pull_s=0.0, rollouts=8, prefill_tokens_per_s=2_000.0)
    engine, one = Engine(setting, 0.0), Rollout(0, 40_000)
    one.made = float(made)
    engine.give(one, 1.0, prefill=True)
    ready = 1.0 + (made + setting.prompt_tokens) / 2_000.0
    assert (engine.pending(1.1), engine.started(one, 1.1)) == (1, False)
    assert (engine.pending(ready), engine.started(one, ready)) == (0, True)
    lost_s = made / 30.0
    events = [FleetEvent(0.0, True, "a"), FleetEvent(0.0, True, "b"), FleetEvent(lost_s, False, "a"),
              FleetEvent(lost_s, True, "c"), FleetEvent(lost_s, True, "d")]  # fmt: skip
    result = World(events, 1e5, BALANCE, setting).run([[40_000, 40_000, 100, 100]])  # the short ones teach speeds
    assert (result.rollouts, result.attempts, result.moves) == (4, 5, 0)
