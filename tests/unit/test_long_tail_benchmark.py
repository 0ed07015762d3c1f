"""The long tail's benchmark draws what it says, and its figures are those that are promised."""

import json
from math import log
from pathlib import Path
from random import Random
from statistics import correlation
from typing import Any

import numpy as np
import pytest

from benchmarks.long_tail import __main__ as benchmark
from benchmarks.long_tail.admission.admission_part import preemptions_share, summed
from benchmarks.long_tail.admission.admitted_work import (
    BLOCK,
    MEMORY,
    drawn_work,
    memory_blocks,
    packed_works,
    unpacked_works,
)
from benchmarks.long_tail.bias_part import biases, censoring_weights
from benchmarks.long_tail.lengths.length_marginals import known_marginals
from benchmarks.long_tail.lengths.lengths_part import LengthSetting, coverage
from benchmarks.long_tail.lengths.played_lengths import held_back
from benchmarks.long_tail.lengths.recorded_groups import recorded_coverage, recorded_groups
from benchmarks.long_tail.order.decision_part import FullFleet
from benchmarks.long_tail.order.order_part import compared, step_time
from benchmarks.long_tail.order.slot_rules import InOrder, PublishedSeer, RuleMaker, TrueLengths
from benchmarks.long_tail.tail_figures import figure_rows, missing, promised_figures
from benchmarks.long_tail.toy_rounds import GROUP, PROMPTS, Rule, race, whole_groups
from ebbtide.errors import InvalidRequest

NOWHERE = Path("/nonexistent")


@pytest.mark.parametrize("wanted", [0.2, 0.9])
def test_the_logarithms_of_lengths_have_the_stated_correlation(wanted: float) -> None:
    groups = known_marginals(NOWHERE)[0].groups(Random(1), 6_000, 2, wanted)
    found = correlation([log(one) for one, _ in groups], [log(other) for _, other in groups])
    assert found == pytest.approx(wanted, abs=0.04)


def test_a_step_is_played_to_the_moment_at_which_a_share_has_ended() -> None:
    groups = [[100, 200], [300, 50]]
    both = {tuple(one.truth): one.group for one in held_back(groups, 2, 0.5, 1_000)}
    # On two slots they start at 0, 0, 100 and 200; 100 and 200 end first, and at 200 the third one has made 100.
    assert both[(300, 50)].made == [100, 0]
    assert len(both) == 1
    at_once = list(held_back(groups, 4, 0.5, 1_000))
    assert [one.group.finished for one in at_once] == [[100], [50]]
    assert [one.group.made for one in at_once] == [[100], [100]]


def test_responses_at_the_cap_are_not_taken_as_whole() -> None:
    (one,) = held_back([[10, 20, 40]], 3, 0.67, 20)
    assert (one.group.finished, one.group.stopped, one.group.made) == ([10], [20], [20])


def test_intervals_cover_what_they_promise_in_a_setting() -> None:
    setting = LengthSetting(marginal="rollpacker_math_fit", correlation=0.6, size=4, load=12)
    found = coverage(setting, 2, NOWHERE)
    assert 0.72 <= found.covered <= 0.88
    assert found.asked > 500


def test_figures_without_a_part_are_null_with_a_reason() -> None:
    figures = promised_figures({"interval_coverage": 0.8})
    reasons = missing(figures, {"bias": "ValueError: no budget"})
    assert figures["interval_coverage"] == 0.8
    assert reasons["bias_cured_over_uncured"] == "part bias failed: ValueError: no budget"
    assert set(reasons) == {name for name, value in figures.items() if value is None}
    assert len(figure_rows(figures, reasons)) == 7


def test_a_part_that_fails_leaves_what_the_others_found_and_the_benchmark_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> dict[str, Any]:
        raise RuntimeError("no slots")

    monkeypatch.setattr(benchmark, "order_part", breaks)
    monkeypatch.setattr(benchmark, "bias_part", lambda *_, **__: {"figures": {"bias_cured_over_uncured": 0.1}})
    out = tmp_path / "tail.json"
    status = benchmark.main(["--parts", "order", "bias", "--traces", str(NOWHERE), "--out", str(out)])
    told = json.loads(out.read_text())
    assert status == 1
    assert told["failed"] == {"order": "RuntimeError: no slots"}
    assert told["figures"]["bias_cured_over_uncured"] == 0.1
    assert told["missing"]["interval_coverage"] == "part lengths was not run"


def test_recorded_lengths_are_read_by_group(tmp_path: Path) -> None:
    path, draw = tmp_path / "mine.csv", Random(1)
    rows = [f"{group},{sample},{round(draw.lognormvariate(7, 1)) + 1}" for group in range(60) for sample in range(3)]
    path.write_text("\n".join(["group,sample,output_tokens", *rows]))
    groups = recorded_groups(path)
    assert [len(one) for one in groups] == [3] * 60
    few, many = recorded_coverage("mine", groups)
    assert 0.6 < few.covered < 0.95
    assert few.setting.load != many.setting.load


def test_a_file_with_too_few_groups_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("group,sample,output_tokens\na,0,5\n")
    with pytest.raises(InvalidRequest, match="at least 50"):
        recorded_groups(path)


@pytest.mark.parametrize("make", [lambda _: InOrder(), lambda _: TrueLengths(), lambda _: PublishedSeer(16_384)])
def test_every_sample_runs_once_and_no_step_is_shorter_than_its_longest_sample(make: RuleMaker) -> None:
    groups = known_marginals(NOWHERE)[0].groups(Random(2), 12, 4, 0.6)
    lengths = [one for group in groups for one in group]
    least = max(*lengths, sum(lengths) / 6)
    assert least <= step_time(groups, 6, make) <= sum(lengths)


def test_forecasts_make_steps_shorter_than_the_order_of_submission() -> None:
    setting = LengthSetting(marginal="rollpacker_math_fit", correlation=0.9, size=8, load=4)
    found = compared(setting, 1, NOWHERE)
    assert 0.99 <= found.over_true_lengths["live_queue"] < found.over_true_lengths["in_order"]
    assert found.bound <= 1.0


def test_the_memory_of_the_admission_part_holds_the_stated_part_of_all_final_contexts() -> None:
    works = [drawn_work(seed, 12) for seed in range(2)]
    tokens = sum(len(item.prompt) + item.length for work in works for item in work)
    assert memory_blocks(works) * BLOCK == pytest.approx(MEMORY * tokens / 2, rel=0.01)
    assert unpacked_works(packed_works(works)) == works
    assert drawn_work(0, 12) != drawn_work(1, 12)


def test_preemptions_are_compared_with_those_without_admission_and_not_with_none() -> None:
    def done(name: str, preemptions: int, again: int | None) -> dict[str, Any]:
        counts = {"tokens": 100, "seconds": 2.0, "parked": 1, "handed_back": 0, "made": 100}
        return {"arrangement": name, "preemptions": preemptions, "read_again": again, **counts}

    sums = summed([done("none", 40, None), done("chunks", 1, 5), done("none", 60, None), done("chunks", 0, 15)])
    assert preemptions_share(sums) == 0.01
    assert sums["chunks"]["read_again_share"] == 0.1
    assert sums["none"]["read_again_share"] is None
    assert sums["chunks"]["throughput"] == 1.0
    assert preemptions_share(summed([done("none", 0, None), done("chunks", 0, 5)])) is None


def test_weights_for_censoring_restore_a_distribution_whose_censoring_is_independent() -> None:
    draw = np.random.default_rng(1)
    lengths, limits = draw.exponential(1000.0, 40_000), draw.exponential(1500.0, 40_000)
    ended = lengths[lengths <= limits]
    (weights,) = censoring_weights([ended], ended, limits[lengths > limits])
    assert float(ended.mean()) < 700.0
    assert float((ended * weights).sum() / weights.sum()) == pytest.approx(1000.0, rel=0.05)


def test_the_race_shortens_what_is_trained_on_and_complete_groups_do_not() -> None:
    rows = {row.rule: row for row in biases(0.3, 3)}
    assert rows["race"].length < -0.2
    assert rows["race"].gradient < -0.2
    assert abs(rows["whole_groups"].length) < 0.04
    assert abs(rows["whole_groups"].gradient) < 0.02
    assert rows["whole_groups"].extra == 0.0
    assert rows["race"].extra > 0.3
    assert rows["whole_groups"].speedup > 2.0


@pytest.mark.parametrize("rule", [race, whole_groups])
def test_each_step_of_the_toy_model_trains_on_as_many_complete_groups(rule: Rule) -> None:
    steps = rule(np.random.default_rng(2), 0.5, 12)
    assert all(one.lengths.shape == (PROMPTS, GROUP) for one in steps)


@pytest.mark.parametrize("order", ["lengths", "submitted"])
def test_decisions_are_timed_while_a_full_fleet_starts_and_ends_rollouts(order: str) -> None:
    fleet = FullFleet(order, workers=2, queued=160)
    times = fleet.times_ms(40.0)
    assert len(times) > 800  # rounds of 0.05 s, each with a part at least
    assert all(one >= 0.0 for one in times)
    assert len(fleet.run.running) == 32
    assert len(fleet.run.queue) < 128  # some had ended, and others began in their places
