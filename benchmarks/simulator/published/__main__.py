"""Compares simulations with published points, and prints the figures: `python -m benchmarks.simulator.published`."""

import argparse
import json
from collections.abc import Sequence
from typing import Final

from benchmarks.simulator.published.published_point import (
    JudgedPoint,
    Paper,
    PointKind,
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
    options = parser.parse_args()
    judged: list[JudgedPoint] = []
    for name in options.papers:
        paper = PAPERS[name]
        print(f"{paper.name} does not state:", flush=True)
        for one in paper.unstated:
            print(f"  {one.name} = {one.value:g}: {one.what}; {one.low:g} to {one.high:g} would be plausible")
        found = judge(paper)
        print_points(found)
        judged += found
    print(json.dumps(figures(judged), indent=2))


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


if __name__ == "__main__":
    main()
