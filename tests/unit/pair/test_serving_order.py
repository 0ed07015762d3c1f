"""Whether the virtual pair is judged by the order of policies on the engines that were measured."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from benchmarks.pair.results.figures import Alone, Block, Cell
from benchmarks.pair.results.intervals import intervals
from benchmarks.pair.results.report import alone_run, told
from benchmarks.pair.virtual.compared_policies import serving_policy
from benchmarks.pair.virtual.pair_costs import PairCosts, PairMemory, read_pair_costs
from benchmarks.pair.virtual.pair_costs_fit import StepSample
from benchmarks.simulator.measured_pair import FITTED_ON, fitted_beside, read_result
from benchmarks.simulator.serving_order import judge, main, modelled, ordered_pairs
from ebbtide.demo.coserving.coserving_records import BudgetMoment, ServedAnswer
from ebbtide.demo.coserving.request_traffic import TrafficBursts, made_up
from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

QUIET = Console(quiet=True)
#: The "real" pair: one whose costs are known.
COSTS = PairCosts(
    prefill_s=0.02,
    decode_s=0.012,
    slots=8,
    step_tokens=32,
    serving_beside=0.6,
    rollouts_beside=0.6,
    memory=PairMemory(
        limit_mib=28, serving_kv_mib=12, served_token_bytes=4096, rollout_kv_mib=64, rollout_token_bytes=4096
    ),
)
SETTING = {
    "slots": 8,
    "step_tokens": 32,
    "kv_mib": 64,
    "serving_kv_mib": 12,
    "memory_mib": 28,
    "token_bytes": 4096,
    "prompt": 64,
    "response": (512, 1920),
}
POLICIES = ("alone", "unguarded", "rose:600,1,0.2,1", "rose:600,1,0.2,0", "ours")


Judged = tuple[dict[str, Any], PairCosts]


class Page:
    """Looks at the rollout engine's page after each second in which it stepped."""

    def __init__(self) -> None:
        self.tokens = 0
        self.moments = [BudgetMoment(at_s=0.0)]

    def stepped(self, _began: float, now: float, made: int) -> None:
        while now > len(self.moments):
            self.moments.append(BudgetMoment(at_s=float(len(self.moments)), generated=self.tokens))
        self.tokens += made


def measured(policy: str) -> Cell:
    requests = made_up(TrafficBursts(prompt=300, output=16), 80.0, seed=1)
    page = Page()
    pair = serving_policy(policy, COSTS).play(requests, COSTS, LatencyTargets(ttft_s=0.4, tpot_s=0.03), seed=9)
    pair.stepped = page.stepped
    pair.run()
    answers = [
        ServedAnswer(
            due=one.asked.at,
            sent=one.asked.at,
            first=one.first,
            last=one.last,
            prompt=one.asked.prompt,
            output=one.made,
        )
        for one in sorted(pair.done, key=lambda one: one.asked.at)
    ]
    block = Block(policy=policy, seconds=pair.now, answers=answers, harvested=pair.harvested, moments=page.moments)
    return Cell(policy=policy, blocks=[block])


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step_s = COSTS.step_s + 8 * COSTS.step_token_s
    samples = [StepSample(10, 80, 10 * step_s), StepSample(10, 110, 10 * COSTS.step_s + 110 * COSTS.step_token_s)]
    alone = Alone(tokens_per_s=8 / step_s, step_s=step_s, samples=samples)
    cells = {policy: measured(policy) for policy in POLICIES}
    path = tmp_path_factory.mktemp("order") / "coserving.json"
    written = {
        "cells": told("conv-50", "conv", 50, cells, alone, QUIET),
        "alone_runs": {"conv-50": alone_run(cells["alone"], alone)},
        "pair": SETTING,
        "figures": {},
    }
    path.write_bytes(msgspec.json.encode(written))
    return path


@pytest.fixture(scope="module")
def judged(result: Path) -> Judged:
    """What the program writes of it, and the profile of the fitted costs."""
    out, profile = result.with_name("order.json"), result.with_name("pair.json")
    assert main([str(result), "--least", "50", "--seeds", "1", "--out", str(out), "--profile", str(profile)]) == 0
    return json.loads(out.read_text()), read_pair_costs(profile)


def test_costs_are_fitted_to_the_runs_alone_and_to_the_unguarded_one(judged: Judged) -> None:
    _, costs = judged
    assert costs.prefill(300) == pytest.approx(COSTS.prefill(300), rel=0.05)
    assert costs.decode(2) == pytest.approx(COSTS.decode(2), rel=0.1)
    assert costs.step_s == pytest.approx(COSTS.step_s)
    assert costs.step_token_s == pytest.approx(COSTS.step_token_s)
    assert costs.memory == COSTS.memory
    assert costs.serving_beside == pytest.approx(COSTS.serving_beside, rel=0.1)
    # What rollouts harvest depends on which lengths were drawn, too.
    assert costs.rollouts_beside == pytest.approx(COSTS.rollouts_beside, rel=0.3)
    assert costs.residuals


def test_a_pair_like_the_measured_one_puts_policies_in_the_same_order(judged: Judged) -> None:
    found, _ = judged
    assert found["figures"]["serving_pairs_judged"] >= 5
    assert found["figures"]["serving_pairs_in_order_share"] == 1.0
    assert all(FITTED_ON in (one["lower"], one["higher"]) for one in found["pairs"] if not one["judged"])


def test_scenes_with_few_requests_are_not_judged(result: Path) -> None:
    found = judge(read_result(result), 1000, 1, QUIET)
    assert found["figures"] == {
        "serving_pairs_judged": 0,
        "serving_pairs_in_order": 0,
        "serving_pairs_in_order_share": None,
    }


def row(policy: str, low: float, high: float, **more: Any) -> dict[str, Any]:
    return {"policy": policy, "tpot_mean_ms_interval": [low, high], **more}


def figures(value: float) -> dict[str, float]:
    return dict.fromkeys(("tpot_mean_ms",), value)


def test_only_policies_whose_intervals_are_apart_are_put_in_order() -> None:
    rows = [row("alone", 1.0, 2.0), row("ours", 1.5, 2.5), row("rose:600,1,0.2,1", 3.0, 4.0)]
    simulated = {"alone": figures(1.0), "ours": figures(9.0), "rose:600,1,0.2,1": figures(5.0)}
    found, drifted = ordered_pairs("s", rows, simulated)
    assert [(one.lower, one.higher, one.agree) for one in found] == [
        ("alone", "rose:600,1,0.2,1", True),
        ("ours", "rose:600,1,0.2,1", False),
    ]
    assert not drifted


def test_no_figure_is_judged_for_which_serving_alone_is_apart_from_itself() -> None:
    rows = [row("alone", 1.0, 2.0), row("alone-again", 2.5, 3.0), row("ours", 5.0, 6.0)]
    found, drifted = ordered_pairs("s", rows, {"alone": figures(1.0), "ours": figures(0.5)})
    assert (found, drifted) == ([], ["tpot_mean_ms"])


def test_policies_without_a_twin_in_virtual_time_are_left_out() -> None:
    names = ["alone", "alone-again", "split", "observe", "ours", "ours:aim-ttft=0.1", "rose:600,1,0.2,0"]
    assert modelled([{"policy": name} for name in names]) == ["alone", "ours", "rose:600,1,0.2,0"]


def test_without_an_unguarded_run_both_engines_share_the_device_evenly(result: Path) -> None:
    found = read_result(result)
    found.cells[:] = [one for one in found.cells if one["policy"] != FITTED_ON]
    assert fitted_beside(found, "conv-50", PairCosts()) == PairCosts()


def test_a_file_without_runs_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"cells": []}')
    with pytest.raises(InvalidRequest, match="keeps its runs alone"):
        read_result(path)
    with pytest.raises(InvalidRequest, match="make bench-coserving"):
        read_result(tmp_path / "none.json")
    assert main([str(path)]) == 2
    assert "old.json" in capsys.readouterr().err


def test_intervals_hold_the_figures_and_few_requests_have_none() -> None:
    cell = measured("ours")
    found = intervals(cell, 0.4, 0.03)
    harvest, tpot = found["rollout_tokens_per_s_interval"], found["tpot_mean_ms_interval"]
    assert harvest[0] < cell.tokens / cell.seconds < harvest[1]
    assert tpot[0] < 1e3 * cell.tpot.mean() < tpot[1]
    cell.blocks[0].answers = cell.blocks[0].answers[:10]
    assert intervals(cell, 0.4, 0.03)["tpot_mean_ms_interval"] is None
