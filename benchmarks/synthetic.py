"""Spot traces and response lengths made from stated parameters, for where there are no recorded ones.

They have the formats of recorded ones: `t_s,event,node` and `quantile,output_tokens`.
"""

import math
import random
from pathlib import Path
from statistics import NormalDist
from typing import Final

from msgspec import Struct

_HOUR_S: Final = 3600.0


class Churn(Struct, frozen=True, kw_only=True):
    """`nodes` are wanted. Each draws losses at `losses_per_hour`; a share of them takes `burst` nodes at once. What was
    lost is replaced after `refill_s` in the mean, exponentially."""

    nodes: int
    hours: float
    losses_per_hour: float
    burst_share: float
    burst: int
    refill_s: float
    seed: int

    @property
    def told(self) -> str:
        return (
            f"{self.nodes} nodes, {self.losses_per_hour:g} losses per node-hour, {self.burst_share:.0%} of them in "
            f"bursts of {self.burst}, refilled after {self.refill_s:g} s, seed {self.seed}"
        )


CALM: Final = Churn(nodes=48, hours=8, losses_per_hour=0.1, burst_share=0.1, burst=8, refill_s=900, seed=1)
CHURNY: Final = Churn(nodes=24, hours=8, losses_per_hour=0.6, burst_share=0.2, burst=4, refill_s=600, seed=2)
#: Lognormal response lengths: median, shape and cap, in tokens.
MEDIAN: Final = 800
SIGMA: Final = 1.2
CAP: Final = 32768


def write_trace(churn: Churn, path: Path) -> Path:
    """A trace of `add` and `remove` events, simultaneous ones with the same second."""
    draw = random.Random(churn.seed)
    names = iter(f"node{number}" for number in range(1, 1 << 30))
    events: list[tuple[float, str, str]] = []
    due = [0.0] * churn.nodes  # when missing nodes come
    alive: list[str] = []
    now, end = 0.0, churn.hours * _HOUR_S
    while now < end:
        rate = len(alive) * churn.losses_per_hour / _HOUR_S
        loss = now + draw.expovariate(rate) if rate else math.inf
        arrival = min(due, default=math.inf)
        now = min(loss, arrival)
        if now >= end:
            break
        if arrival <= loss:
            due.remove(arrival)
            alive.append(next(names))
            events.append((now, "add", alive[-1]))
            continue
        count = churn.burst if draw.random() < churn.burst_share else 1
        for _ in range(min(count, len(alive))):
            events.append((now, "remove", alive.pop(draw.randrange(len(alive)))))
            due.append(now + draw.expovariate(1 / churn.refill_s))
    lines = [f"{at:.1f},{event},{node}" for at, event, node in events]
    path.write_text("\n".join(["t_s,event,node", *lines, ""]))
    return path


def write_lengths(path: Path) -> Path:
    """Quantiles of a lognormal distribution of response lengths."""
    normal = NormalDist()
    shares = [number / 1000 for number in range(1, 1000)]
    lengths = [min(CAP, round(MEDIAN * math.exp(SIGMA * normal.inv_cdf(share)))) for share in shares]
    lines = [f"{share},{length}" for share, length in zip(shares, lengths, strict=True)]
    path.write_text("\n".join(["quantile,output_tokens", *lines, ""]))
    return path
