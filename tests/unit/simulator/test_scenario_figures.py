"""Figures of simulated scenarios: each is worked out by hand, and none of them needs a finished step."""

import json

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.scenario_figures import figures, figures_file, ratios, step_times
from tests.fakes.simulated_outcomes import empty_outcome, outcome, step


def test_every_figure_of_an_outcome_is_as_worked_out_by_hand() -> None:
    found = figures([outcome()])
    medians = {name: one.median for name, one in found.whole.items() if one}
    assert medians == {
        "tokens_per_s": pytest.approx(2000 / 3600),
        "steps": 2.0,
        "step_s_median": 15.0,
        "step_s_p90": pytest.approx(19.0),
        "idle_share": pytest.approx((3240 + 2700) / 10800),
        "cost_per_hour": 10.0,
        "cost_per_step": 5.0,
        "cost_per_million_tokens": 5000.0,
        "tokens_generated": 2200.0,
        "tokens_kept": 2000.0,
        "tokens_lost": 100.0,
        "tokens_twice": 110.0,
        "tokens_moved": 300.0,
        "tokens_reread": 50.0,
        "tokens_dropped": 0.0,
        "twice_share": 0.05,
        "moves": 3.0,
        "resumes": 4.0,
        "preemptions": 0.0,
        "losses": 2.0,
        "drains": 1.0,
        "installs": 5.0,
        "weight_bytes": 1e9,
        "unfinished": 0.0,
    }
    assert found.notes == []


def test_pools_and_runs_have_figures_of_their_own() -> None:
    found = figures([outcome()])
    assert list(found.pools) == ["spot", "trainer", "absent"]
    shares = {pool: one["idle_share"] for pool, one in found.pools.items()}
    assert shares["spot"] is not None
    assert shares["spot"].median == pytest.approx(0.45)
    assert shares["absent"] is None
    run = {name: one.median for name, one in found.runs["math"].items() if one}
    assert run["step_s_median"] == 15.0
    assert run["generation_s_median"] == 13.0
    assert run["tail_s_median"] == 1.5


def test_a_figure_spreads_over_the_seeds() -> None:
    found = figures([outcome(2, slower=2.0), outcome(0), outcome(1)])
    assert found.seeds == [0, 1, 2]
    one = found.whole["step_s_median"]
    assert one is not None
    assert (one.median, one.low, one.high, one.seeds) == (15.0, 15.0, 30.0, 3)


def test_steps_that_overlap_count_from_end_to_end_and_runs_apart() -> None:
    overlapping = [step(1, 0.0, 18.0), step(0, 0.0, 10.0), step(2, 8.0, 30.0)]
    assert step_times(overlapping) == [10.0, 8.0, 12.0]
    assert step_times([]) == []


def test_a_scenario_without_a_finished_step_says_so_and_has_no_null_division() -> None:
    found = figures([empty_outcome(3), outcome(4)])
    assert any("seed 3" in note and "No step was finished" in note for note in found.notes)
    cost = found.whole["cost_per_step"]
    assert cost is not None
    assert cost.seeds == 1
    nothing = figures([empty_outcome()])
    assert {name: nothing.whole[name] for name in ("tokens_per_s", "step_s_p90", "cost_per_hour", "idle_share")} == {
        "tokens_per_s": None, "step_s_p90": None, "cost_per_hour": None, "idle_share": None,
    }  # fmt: skip


def test_no_outcome_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        figures([])


def test_ratios_compare_medians_and_leave_out_what_the_first_has_not() -> None:
    first, other = figures([outcome()]), figures([outcome(slower=2.0)])
    found = ratios(first.whole, other.whole)
    assert (found["step_s_median"], found["tokens_per_s"], found["preemptions"]) == (2.0, 1.0, None)
    assert ratios(figures([empty_outcome()]).whole, other.whole)["step_s_median"] is None


def test_the_file_has_all_figures_and_the_same_bytes_whatever_the_order_of_seeds() -> None:
    scenarios = [[outcome(0), outcome(1, slower=3.0)], [empty_outcome()]]
    data = figures_file(scenarios)
    assert data == figures_file([[outcome(1, slower=3.0), outcome(0)], [empty_outcome()]])
    read = json.loads(data)
    assert (read["format"], read["kind"]) == (1, "simulation")
    first, second = read["scenarios"]
    assert (first["scenario"], first["seeds"], second["seeds"]) == ("six spot machines", [0, 1], [0])
    assert first["whole"]["step_s_median"]["median"] == 30.0
    assert set(first["ratios_to_first"].values()) <= {1.0, None}
    assert first["outcomes"][1]["steps"][0]["trained_s"] == 30.0
    assert "spans" not in first["outcomes"][0]
    assert second["whole"]["cost_per_step"] is None
