"""What the benchmark of co-serving makes of its blocks."""

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from benchmarks.coserving import parse
from benchmarks.pair import simulated
from benchmarks.pair.keeping import Keeping
from benchmarks.pair.over_rose import comparisons, real_tokens_over_rose
from benchmarks.pair.plan import QUICK_BLOCK_S, QUICK_S, Scene, block_order
from benchmarks.pair.results.figures import Alone, Block, Cell, best_rose, kept, row
from benchmarks.pair.results.intervals import attainment_less_alone
from benchmarks.pair.results.report import figures, told
from benchmarks.pair.soak import lapped
from benchmarks.pair.stray import spell
from benchmarks.pair.traffic import Speeds, busy_s, lasting, speed_for
from ebbtide.demo.coserving.coserving_records import ServedAnswer
from ebbtide.demo.coserving.request_traffic import TrafficBursts, TrafficRequest, faster, made_up

ALONE = Alone(tokens_per_s=1000.0, step_s=0.008)
BOOKS = {"lost": 0, "twice": 0, "short": 0, "unfinished": 0}
PROXY = {"alone": {"first_token_p50_ms": {"added": 0.2}}, "proxied_closed_loop": {"per_s": 2000.0}}
SPEEDS = Speeds(fixed_s=0.01, prompt_s=0.0002, token_s=0.01)
ASKED = (
    "slo_attainment",
    "ttft_p99_over_alone",
    "ttft_p99_excess_ms",
    "tpot_p99_over_alone",
    "share_of_ideal_harvest_at_20",
    "share_of_ideal_harvest_at_50",
    "rollout_tokens_over_rose",
    "tokens_lost",
    "proxy_overhead_p50_ms",
)


def cell(policy: str, *, ttft_s: float = 0.1, token_s: float = 0.01, tokens: int = 0, count: int = 100) -> Cell:
    answers = [
        ServedAnswer(due=float(at), sent=at, first=at + ttft_s, last=at + ttft_s + 10 * token_s, prompt=100, output=11)
        for at in range(count)
    ]
    return Cell(policy=policy, blocks=[Block(policy=policy, seconds=float(count), answers=answers, harvested=tokens)])


def rows(*cells: Cell) -> list[dict[str, Any]]:
    return told("conv-20", "conv", 20, {one.policy: one for one in cells}, ALONE, Console(quiet=True))


def test_all_figures_that_are_asked_for_are_there() -> None:
    found = {
        "cells": rows(cell("alone"), cell("rose:60,1,0.2", tokens=40_000), cell("ours", tokens=70_000)),
        "books": BOOKS,
        "proxy": PROXY,
    }

    told_figures = figures(found)

    assert set(ASKED) <= set(told_figures)
    assert told_figures["share_of_ideal_harvest_at_20"] == pytest.approx(0.7 / 0.8)
    assert told_figures["rollout_tokens_over_rose"] == pytest.approx(70 / 40)
    assert all(told_figures["kept"]["conv-20"].values())


def test_a_cell_that_is_slower_harvests_too_little_or_less_than_rose_does_not_keep_its_promise() -> None:
    alone, ours, rose = rows(
        cell("alone"), cell("ours", ttft_s=0.2, token_s=0.012, tokens=30_000), cell("rose:60,1,0.2", tokens=60_000)
    )

    told_kept = kept(ours, [alone], rose)

    assert {name for name, good in told_kept.items() if good} == {"reclaim", "step"}


def test_the_reported_policy_is_taken_at_the_setting_that_keeps_its_slo_with_most_tokens() -> None:
    cells = rows(
        cell("alone"),
        cell("rose:60,1,0.2", tokens=40_000),
        cell("rose:60,2,0.2", tokens=50_000),
        cell("rose:600,1,0.2", ttft_s=0.5, tokens=90_000),
    )

    best = best_rose(cells)

    assert best is not None
    assert best["policy"] == "rose:60,2,0.2"


def test_a_p99_is_compared_with_the_mean_of_both_alone_and_their_noise_is_one_over_the_other() -> None:
    alone, again, ours = rows(cell("alone", ttft_s=0.10), cell("alone-again", ttft_s=0.14), cell("ours", ttft_s=0.12))

    assert ours["ttft_p99_over_alone"] == pytest.approx(1.0)
    assert (alone["slo_ms"], again["slo_ms"]) == (ours["slo_ms"], ours["slo_ms"])
    assert ours["slo_ms"][0] == pytest.approx(160)
    found = figures({"cells": [alone, again, ours], "books": BOOKS, "proxy": PROXY})
    assert found["noise_ttft_p99"] == [pytest.approx(1.4)]


def test_requests_that_queue_alone_are_left_out_of_what_is_said_of_the_others() -> None:
    def answers(slow: bool) -> Cell:
        made = []
        for at in range(100):
            first = 0.5 if at % 2 else 0.2 if slow else 0.1  # every other one comes while its predecessor is inside
            sent = at - 0.6 * (at % 2)
            made.append(ServedAnswer(due=sent, sent=sent, first=sent + first, last=sent + 0.5, prompt=100, output=11))
        policy = "ours" if slow else "alone"
        return Cell(policy=policy, blocks=[Block(policy=policy, seconds=100.0, answers=made)])

    found = row(answers(True), [answers(False)], ALONE)

    assert found["ttft_p99_over_alone"] == pytest.approx(1.0)
    assert found["ttft_p99_over_alone_unqueued"] == pytest.approx(2.0)


def test_a_replay_of_laps_is_told_lap_by_lap() -> None:
    whole = cell("ours", tokens=900, count=99).blocks[0]

    laps = lapped(whole, 3)

    assert [one.answers for one in laps] == [whole.answers[:33], whole.answers[33:66], whole.answers[66:]]
    assert [(one.seconds, one.harvested) for one in laps] == [(33.0, 300)] * 3


@pytest.mark.parametrize("policies", ["rose", "rose:60,1,0.2", "ours:foo", "alone/split:1", "theirs"])
def test_a_policy_without_its_setting_is_refused_before_anything_is_measured(
    policies: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--policies", policies])

    assert policies.rpartition("/")[2] in capsys.readouterr().err


def test_tokens_of_aborted_rollouts_are_no_harvest() -> None:
    ours = cell("rose:60,1,0.2", tokens=1000)
    ours.blocks[0].wasted, ours.blocks[0].again = 400, 700

    found = row(ours, [cell("alone")], ALONE)

    assert (found["rollout_tokens_per_s"], found["tokens_generated_twice"]) == (6.0, 700)


def test_a_block_is_found_again_under_the_same_setting_alone(tmp_path: Path) -> None:
    block = cell("ours").blocks[0]
    Keeping(tmp_path, {"slots": 16}).keep_block("ours-0", [1.0], block)

    assert Keeping(tmp_path, {"slots": 16}).block("ours-0", [1.0]) == block
    assert Keeping(tmp_path, {"slots": 16}).block("ours-0", [2.0]) is None
    assert Keeping(tmp_path, {"slots": 32}).block("ours-0", [1.0]) is None


def test_speeds_once_probed_stay_so_that_arrivals_do(tmp_path: Path) -> None:
    assert Keeping(tmp_path, {}).speeds() is None
    Keeping(tmp_path, {}).keep_speeds(SPEEDS)

    assert Keeping(tmp_path, {}).speeds() == SPEEDS


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_a_trace_is_replayed_at_the_speed_that_loads_the_engine_as_wanted(load: float) -> None:
    requests = made_up(TrafficBursts(), 600.0, 0)
    at = faster(requests, speed_for(requests, load, SPEEDS))

    assert busy_s(at, SPEEDS) / at[-1].at == pytest.approx(load, rel=0.02)
    assert lasting(requests, load, SPEEDS, 60.0)[-1].at <= 60.0


def test_blocks_hold_each_request_once() -> None:
    requests = [TrafficRequest(float(at), 10, 4) for at in range(300)]
    blocks = Scene(name="s", requests=requests).blocks(100.0)

    assert [len(block) for block in blocks] == [100, 100, 100]
    assert all(0 <= one.at < 100 for block in blocks for one in block)


def test_the_simulation_has_a_row_for_each_policy_and_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    simulated.main(["--span-s", "15", "--load", "0.4", "--rose", "rose:600,1,0.2,0.5", "--aim-tpot", "0.15", "0.3"])

    told_text = capsys.readouterr().out
    assert told_text.startswith("SIMULATION")
    for policy in ("alone", "alone again", "unguarded", "rose:600,1,0.2,0.5", "idle-only", "ours:0.15", "ours:0.3"):
        assert told_text.count(f"\n{policy} ") >= 2, "one for each of two scenes"


def test_no_policy_is_always_measured_last() -> None:
    orders = [block_order(("alone-again", "rose", "ours"), number) for number in range(6)]

    assert orders[1] == orders[0][::-1]
    assert {order[-1] for order in orders} == {"alone-again", "rose", "ours"}
    assert all(sorted(order) == ["alone-again", "ours", "rose"] for order in orders)


def test_a_quick_cell_has_more_than_one_block() -> None:
    requests = [TrafficRequest(float(at), 10, 4) for at in range(int(QUICK_S))]

    assert len(Scene(name="s", requests=requests).blocks(QUICK_BLOCK_S)) == 2


def test_beside_noise_the_attainment_is_compared_with_that_of_serving_alone_beside_it() -> None:
    slow, fast = cell("ours", ttft_s=0.3, count=99), cell("alone-again", ttft_s=0.1, count=99)

    found = attainment_less_alone(slow, fast, 0.2, 1.0)

    assert found["attainment_less_alone"] == -1.0
    assert attainment_less_alone(fast, fast, 0.2, 1.0)["attainment_less_alone"] == 0.0
    assert attainment_less_alone(slow, slow, 0.2, 1.0)["attainment_less_alone_interval"] == (0.0, 0.0)


def compared_row(policy: str, tokens: float, p99: float) -> dict[str, Any]:
    interval = (0.9 * tokens, 1.1 * tokens)
    latencies = {"ttft_p99_ms": p99, "tpot_p99_ms": p99 / 10}
    return {"scene": "s", "policy": policy, "rollout_tokens_per_s": tokens, **latencies} | {
        "rollout_tokens_per_s_interval": interval
    }


def test_only_settings_of_rose_that_are_as_gentle_count() -> None:
    cells = [compared_row("ours", 100, 100), compared_row("rose:a", 80, 104), compared_row("rose:b", 300, 110)]

    assert real_tokens_over_rose(cells) == pytest.approx(1.25)
    assert real_tokens_over_rose(cells[:1]) is None
    assert [one.counts for one in comparisons(cells)] == [True, False]


@pytest.mark.parametrize(("tokens", "holds"), [(90, True), (105, True), (140, False)])
def test_a_tie_within_the_intervals_holds(tokens: float, holds: bool) -> None:
    (found,) = comparisons([compared_row("ours", 100, 100), compared_row("rose:a", tokens, 100)])

    assert found.holds == holds
    assert found.interval is not None
    assert found.interval[0] < found.ratio < found.interval[1]


@pytest.mark.alone
def test_the_stray_process_takes_its_share_of_a_core() -> None:
    began, before_s = time.monotonic(), time.process_time()
    spell(0.2, 0.5, Random(1))

    assert 0.05 <= (time.process_time() - before_s) / (time.monotonic() - began) <= 0.35
