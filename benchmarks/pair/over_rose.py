"""Compares our tokens with those of each setting of ROSE's policy that is as gentle to users.

    python -m benchmarks.pair.over_rose [RESULT]

RESULT is a file of `benchmarks/coserving.py`. A setting counts if neither of its 99th percentiles is above ours by more
than a twentieth: one that takes more from users may well make more tokens.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

_DEFAULT: Final = Path(__file__).parents[1] / "results" / "coserving.json"
_AS_GENTLE: Final = 1.05
#: Standard deviations from the middle to an end of a 95 % interval.
_DEVIATIONS: Final = 1.96


class RoseComparison(Struct, frozen=True, kw_only=True):
    """Our tokens over those of one setting in one scene. `interval`: 95 %, where both were measured for long enough."""

    scene: str
    setting: str
    ratio: float
    interval: tuple[float, float] | None
    ttft_p99: float  # the setting's over ours
    tpot_p99: float

    @property
    def counts(self) -> bool:
        return max(self.ttft_p99, self.tpot_p99) <= _AS_GENTLE

    @property
    def holds(self) -> bool:
        """Whether ours makes as many tokens; an interval that contains 1 is a tie."""
        return self.ratio >= 1.0 or (self.interval is not None and self.interval[1] >= 1.0)


def comparisons(cells: Sequence[dict[str, Any]]) -> list[RoseComparison]:
    """One for each setting of each scene that has ours too. `cells`: rows of a result."""
    ours = {one["scene"]: one for one in cells if one["policy"] == "ours"}
    roses = [one for one in cells if one["policy"].startswith("rose") and one["scene"] in ours]
    return [_compared(ours[rose["scene"]], rose) for rose in roses]


def real_tokens_over_rose(cells: Sequence[dict[str, Any]]) -> float | None:
    """The least ratio over all settings that count; None if none does."""
    return min((one.ratio for one in comparisons(cells) if one.counts), default=None)


def _compared(ours: dict[str, Any], rose: dict[str, Any]) -> RoseComparison:
    ratio = ours["rollout_tokens_per_s"] / max(1.0, rose["rollout_tokens_per_s"])
    return RoseComparison(
        scene=rose["scene"],
        setting=rose["policy"],
        ratio=ratio,
        interval=_ratio_interval(ratio, ours, rose),
        ttft_p99=rose["ttft_p99_ms"] / ours["ttft_p99_ms"],
        tpot_p99=rose["tpot_p99_ms"] / ours["tpot_p99_ms"],
    )


def _ratio_interval(ratio: float, *rows: dict[str, Any]) -> tuple[float, float] | None:
    """Of a quotient of two independent figures with intervals of their own, by the variances of their logarithms."""
    intervals = [one.get("rollout_tokens_per_s_interval") for one in rows]
    if not all(one and one[0] > 0 for one in intervals):
        return None
    variance = sum((math.log(high / low) / (2 * _DEVIATIONS)) ** 2 for low, high in filter(None, intervals))
    factor = math.exp(_DEVIATIONS * math.sqrt(variance))
    return ratio / factor, ratio * factor


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pair.over_rose", description=__doc__)
    parser.add_argument("result", type=Path, nargs="?", default=_DEFAULT)
    cells = json.loads(parser.parse_args(argv).result.read_text())["cells"]
    for one in comparisons(cells):
        said = "counts" if one.counts else "takes more from users"
        low, high = one.interval or (math.nan, math.nan)
        gentle = f"p99 TTFT x {one.ttft_p99:.2f}, TPOT x {one.tpot_p99:.2f} of ours"
        tokens = f"tokens of ours x {one.ratio:.2f} ({low:.2f} to {high:.2f})"
        print(f"{one.scene} {one.setting:<24} {tokens}; {gentle}: {said}")
    worst = real_tokens_over_rose(cells)
    print("no setting is as gentle as ours" if worst is None else f"real_tokens_over_rose {worst:.3f}")


if __name__ == "__main__":
    main()
