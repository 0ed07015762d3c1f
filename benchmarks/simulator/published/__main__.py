"""Compares simulations with published points, and prints the figures: `python -m benchmarks.simulator.published`."""

import argparse
import json
from collections.abc import Sequence
from typing import Final

from benchmarks.simulator.published.coordinate_search import CoordinateSearch
from benchmarks.simulator.published.published_point import (
    JudgedPoint,
    Paper,
    PointKind,
    UnstatedValue,
    Use,
    figures,
    judge,
)
from benchmarks.simulator.published.rlboost_points import RLBoostPaper
from benchmarks.simulator.published.rollpacker_points import RollPackerPaper
from benchmarks.simulator.published.rose_points import RosePaper
from benchmarks.simulator.published.seer_points import SeerPaper

PAPERS: Final[dict[str, Paper]] = {
    "rlboost": RLBoostPaper(),
    "seer": SeerPaper(),
    "rollpacker": RollPackerPaper(),
    "rose": RosePaper(),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator.published", description=__doc__)
    parser.add_argument("--papers", nargs="+", choices=list(PAPERS), default=list(PAPERS), help="papers to compare")
    parser.add_argument("--fit", action="store_true", help="search what papers do not state by their fitted points")
    parser.add_argument("--sweep", action="store_true", help="also simulate both ends of what papers do not state")
    options = parser.parse_args()
    judged: list[JudgedPoint] = []
    for name in options.papers:
        paper = PAPERS[name]
        print(f"{paper.name} does not state:", flush=True)
        for one in paper.unstated:
            print(f"  {one.name} = {one.value:g}: {one.what}; swept from {one.low:g} to {one.high:g}")
        if options.fit:
            print(f"  fitted: {CoordinateSearch(paper, print_now).run()}", flush=True)
            continue
        found = judge(paper)
        print_points(found)
        judged += found
        if options.sweep:
            print_sweep(paper)
    if not options.fit:
        print(json.dumps(figures(judged), indent=2))


def print_now(text: str) -> None:
    print(f"  {text}", flush=True)


def print_points(judged: Sequence[JudgedPoint]) -> None:
    """Print a table, with a line for each point."""
    print(f"{'paper':<11}{'point':<66}{'published':>10}{'simulated':>10}{'error':>9}  use")
    for one in judged:
        point = one.point
        reason = f": {point.reason}" if point.use is Use.LEFT_OUT else ""
        simulated = "-" if one.simulated is None else f"{one.simulated:.4g}"
        print(
            f"{one.paper:<11}{point.what:<66}{point.value:>10.4g}{simulated:>10}{shown_error(one):>9}  "
            f"{point.use.value}{reason}",
            flush=True,
        )


def shown_error(one: JudgedPoint) -> str:
    """The error in the unit by which its kind is judged."""
    if one.error is None:
        return "-"
    match one.point.kind:
        case PointKind.SHARE:
            return f"{100 * one.error:+.0f} pp"
        case PointKind.COUNT:
            return f"x {one.error + 1.0:.2f}"
        case PointKind.VALUE:
            return f"{100 * one.error:+.0f} %"


def print_sweep(paper: Paper) -> None:
    """Print what the judged points become at both ends of each value that the paper does not state."""
    keys = frozenset(point.key for point in paper.points if point.use is Use.JUDGED)
    chosen = {one.name: one.value for one in paper.unstated}
    for one in paper.unstated:
        ends = [paper.simulated(chosen | {one.name: value}, keys) for value in _ends(one)]
        ranges = [f"{key} {low:.3g} to {ends[1][key]:.3g}" for key, low in ends[0].items()]
        print(f"  {paper.name}, {one.name} from {one.low:g} to {one.high:g}: {'; '.join(ranges)}", flush=True)


def _ends(one: UnstatedValue) -> tuple[float, float]:
    return one.low, one.high


if __name__ == "__main__":
    main()
