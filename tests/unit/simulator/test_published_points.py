"""Published points that simulations are judged by."""

import pytest

from benchmarks.simulator.published.published_point import JudgedPoint, Paper, PointKind, PublishedPoint, Use, figures
from benchmarks.simulator.published.rlboost_points import RLBoostPaper
from benchmarks.simulator.published.rollpacker_points import RollPackerPaper
from benchmarks.simulator.published.rose_points import RosePaper
from benchmarks.simulator.published.seer_points import SeerPaper

PAPERS = (RLBoostPaper(), RollPackerPaper(), RosePaper(), SeerPaper())


def judged(value: float, simulated: float | None, **terms: object) -> JudgedPoint:
    point = PublishedPoint(key="k", where="w", what="w", value=value, **terms)  # type: ignore[arg-type]
    return JudgedPoint("paper", point, simulated)


def test_rollpackers_rollouts_with_one_half_more_prompts_take_as_long_as_published() -> None:
    paper = RollPackerPaper()
    (point,) = [one for one in paper.points if one.key == "8k 1.5 1"]
    assert point.use is Use.JUDGED
    found = paper.simulated({one.name: one.value for one in paper.unstated}, frozenset([point.key]))
    assert found[point.key] == pytest.approx(point.value, rel=0.25)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_at_most_half_of_a_papers_points_are_fitted_and_each_left_out_one_says_why(paper: Paper) -> None:
    used = [one for one in paper.points if one.use is not Use.LEFT_OUT]
    assert 2 * sum(one.use is Use.FITTED for one in used) <= len(used)
    assert all(bool(one.reason) is (one.use is Use.LEFT_OUT) for one in paper.points)
    keys = [one.key for one in used]
    assert len(keys) == len(set(keys))


def test_a_third_of_the_points_at_most_is_left_out() -> None:
    points = [point for paper in PAPERS for point in paper.points]
    assert 3 * sum(one.use is Use.LEFT_OUT for one in points) <= len(points)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_what_a_paper_does_not_state_is_chosen_within_the_range_that_is_swept(paper: Paper) -> None:
    assert all(one.low < one.value < one.high for one in paper.unstated)


def test_figures_are_of_judged_points_and_each_kind_has_its_own() -> None:
    found = figures(
        [
            judged(100.0, 90.0),
            judged(10.0, 12.0),
            judged(1.0, 9.0, use=Use.FITTED),
            judged(0.5, 0.44, kind=PointKind.SHARE),
            judged(100.0, 50.0, kind=PointKind.COUNT),
            judged(3.0, None, use=Use.LEFT_OUT, reason="needs what is not modelled"),
        ]
    )
    assert found["error_vs_published_median"] == pytest.approx(0.15)
    assert found["error_vs_published_worst"] == pytest.approx(0.2)
    assert found["shares_vs_published_worst"] == pytest.approx(0.06)
    assert found["counts_vs_published_worst_factor"] == pytest.approx(2.0)
    assert found["published_points_left_out_share"] == pytest.approx(1 / 6)


def test_without_a_judged_point_there_is_no_error() -> None:
    assert figures([])["error_vs_published_median"] is None
