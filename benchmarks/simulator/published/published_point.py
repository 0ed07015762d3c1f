"""Records what papers published, and what simulations make of it."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import NamedTuple, Protocol

from msgspec import Struct


class PointKind(StrEnum):
    """How a point is judged."""

    VALUE = "value"  # by its relative error
    SHARE = "share"  # of a whole: by the difference, in percentage points
    COUNT = "count"  # of preemptions: by the factor between them


class Use(StrEnum):
    """What a point is for."""

    FITTED = "fitted"
    JUDGED = "judged"
    LEFT_OUT = "left out"


class PublishedPoint(Struct, frozen=True, kw_only=True):
    """One published number. A reason says why it is left out: what it needs is not modelled, or not published."""

    key: str  # of the simulated value
    where: str  # figure, table or section
    what: str
    value: float
    kind: PointKind = PointKind.VALUE
    use: Use = Use.JUDGED
    reason: str = ""


class UnstatedValue(Struct, frozen=True, kw_only=True):
    """What a paper does not state: the one value that serves all its points, fitted to some of them, and the range in
    which it was sought.
    """

    name: str
    value: float
    low: float
    high: float
    what: str


class Paper(Protocol):
    """One paper's points."""

    name: str
    unstated: Sequence[UnstatedValue]
    points: Sequence[PublishedPoint]

    def simulated(self, unstated: Mapping[str, float], keys: frozenset[str] | None = None) -> dict[str, float]:
        """What simulations say, by the points' keys; only what `keys` need, if given."""
        ...


class JudgedPoint(NamedTuple):
    paper: str
    point: PublishedPoint
    simulated: float | None

    @property
    def error(self) -> float | None:
        """Relative error; of a share the difference; of a count the factor, less one. None if it is left out."""
        if self.simulated is None:
            return None
        published = self.point.value
        if self.point.kind is PointKind.SHARE:
            return self.simulated - published
        if self.point.kind is PointKind.COUNT:
            more, less = max(self.simulated, published), min(self.simulated, published)
            return more / less - 1.0 if less > 0 else float("inf")
        return self.simulated / published - 1.0


def judge(paper: Paper) -> list[JudgedPoint]:
    """Simulate a paper's points."""
    found = paper.simulated({one.name: one.value for one in paper.unstated})
    return [
        JudgedPoint(paper.name, point, None if point.use is Use.LEFT_OUT else found[point.key])
        for point in paper.points
    ]


def figures(judged: Sequence[JudgedPoint]) -> dict[str, float | None]:
    """Sum up the judged points. Shares and counts have bounds of their own, so the largest difference and the largest
    factor are figures, too.
    """
    values, shares, counts = (_errors(judged, kind) for kind in PointKind)
    left_out = sum(one.point.use is Use.LEFT_OUT for one in judged)
    return {
        "error_vs_published_median": median(values) if values else None,
        "error_vs_published_worst": max(values, default=None),
        "shares_vs_published_worst": max(shares, default=None),
        "counts_vs_published_worst_factor": max(counts) + 1.0 if counts else None,
        "published_points_left_out_share": left_out / len(judged) if judged else None,
    }


def _errors(judged: Sequence[JudgedPoint], kind: PointKind) -> list[float]:
    return [abs(one.error or 0.0) for one in judged if one.point.use is Use.JUDGED and one.point.kind is kind]
