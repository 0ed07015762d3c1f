"""Computes what a played pair came to: latencies of served requests, attainment of the SLO, and harvest."""

from typing import Final

from msgspec import Struct

from benchmarks.pair.virtual.pair_costs import PairCosts
from benchmarks.pair.virtual.serving_pair import ServingPair
from benchmarks.pair.virtual.serving_policies import latency_percentile, served_tpot, served_ttft

_PERCENTILES: Final = (50.0, 95.0, 99.0)


class ServingFigures(Struct, frozen=True, kw_only=True):
    """One policy's figures. Latencies are 50th, 95th and 99th percentiles, in milliseconds."""

    policy: str
    requests: int
    load: float  # share of the time with a request inside
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    attained: float  # share of requests with both latencies within the targets
    tokens_per_s: float  # of rollouts, without those of aborted ones
    share_of_ideal: float  # of the tokens that the time without a request inside could make
    reread: int  # tokens whose keys and values rollouts gave up
    reclaim_p99_ms: float


def serving_figures(
    policy: str, pair: ServingPair, costs: PairCosts, targets: tuple[float, float], idle_s: float
) -> ServingFigures:
    """The figures of a pair that has played. `targets`: of TTFT and TPOT, in seconds; `idle_s`: time without a request
    inside when serving is alone."""
    calls, seconds = pair.done, max(pair.now, 1e-9)
    ttft, tpot = served_ttft(calls), served_tpot(calls)
    ideal = costs.tokens_per_s * idle_s
    return ServingFigures(
        policy=policy,
        requests=len(calls),
        load=pair.busy_s / seconds,
        ttft_ms=tuple(1e3 * latency_percentile(ttft, at) for at in _PERCENTILES),
        tpot_ms=tuple(1e3 * latency_percentile(tpot, at) for at in _PERCENTILES),
        attained=sum(one.meets(*targets) for one in calls) / max(1, len(calls)),
        tokens_per_s=pair.harvested / seconds,
        share_of_ideal=pair.harvested / ideal if ideal else 0.0,
        reread=pair.batch.reread,
        reclaim_p99_ms=1e3 * latency_percentile(pair.reclaims, 99.0),
    )
