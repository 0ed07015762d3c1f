"""Settings that papers do not state are fitted to fitted points, and to no others."""

from collections.abc import Mapping

import pytest

from benchmarks.simulator.published.coordinate_search import CoordinateSearch, deviation
from benchmarks.simulator.published.published_point import Paper, PointKind, PublishedPoint, UnstatedValue, Use


def point(key: str, value: float, use: Use, kind: PointKind = PointKind.VALUE) -> PublishedPoint:
    return PublishedPoint(key=key, where="w", what="w", value=value, use=use, kind=kind)


class Products(Paper):
    """A paper whose fitted points follow from two values, and whose judged one asks for others."""

    name = "products"
    unstated = (
        UnstatedValue(name="a", value=1.0, low=0.0, high=8.0, what="a"),
        UnstatedValue(name="b", value=1.0, low=0.0, high=8.0, what="b"),
    )
    points = (point("product", 18.0, Use.FITTED), point("ratio", 2.0, Use.FITTED), point("judged", 100.0, Use.JUDGED))

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def simulated(self, unstated: Mapping[str, float], keys: frozenset[str] | None = None) -> dict[str, float]:
        self.asked |= keys or set()
        a, b = unstated["a"], unstated["b"]
        return {"product": a * b, "ratio": b / a, "judged": 1.0}


def test_a_search_finds_the_values_that_fit_and_never_asks_for_judged_points() -> None:
    paper = Products()
    told: list[str] = []
    found = CoordinateSearch(paper, told.append).run()
    assert (found["a"], found["b"]) == pytest.approx((3.0, 6.0), rel=0.1)
    assert paper.asked == {"product", "ratio"}
    assert len(told) > 1


def test_a_search_stays_within_the_range_that_is_swept() -> None:
    paper = Products()
    paper.points = (point("product", 1000.0, Use.FITTED), *paper.points[1:])
    found = CoordinateSearch(paper, lambda _: None).run()
    assert all(0.0 < value < 8.0 for value in found.values())


def test_a_tenth_of_a_value_counts_as_much_as_five_points_of_a_share_and_half_as_many_preemptions_again() -> None:
    assert deviation(point("v", 100.0, Use.FITTED), 110.5) == pytest.approx(1.0, abs=0.01)
    assert deviation(point("s", 0.4, Use.FITTED, PointKind.SHARE), 0.45) == pytest.approx(1.0)
    assert deviation(point("c", 100.0, Use.FITTED, PointKind.COUNT), 150.0) == pytest.approx(1.0)
