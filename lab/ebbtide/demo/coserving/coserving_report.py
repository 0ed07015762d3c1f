"""Reports the co-serving demo: the latencies of users beside a run, and the tokens that the run harvested."""

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from ebbtide.demo.coserving.coserving_records import (
    ReplayRecord,
    ServedAnswer,
    TimeStretch,
    idle_s,
    percentile,
    tpots,
    ttfts,
    within,
)
from ebbtide.types.grants import GuardStatus

#: From this share of the cores on, the report mentions other programs.
_DISTURBING: Final = 0.05
#: Share of the requests that must attain the SLO.
ENOUGH: Final = 0.99


class LatencyFigures(Struct, frozen=True, kw_only=True):
    """Latencies in one part of a replay."""

    requests: int
    failed: int
    seconds: float
    load: float  # share of the time with a request inside
    others: float  # share of the cores that foreign programs took
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    tpot_p99_ms: float
    attained: float


class CoservingReport(Struct, frozen=True, kw_only=True):
    traffic: str
    ttft_target_ms: float
    tpot_target_ms: float
    alone: LatencyFigures
    beside: LatencyFigures
    slo_attained: bool  # beside rollouts, enough requests, or as many as alone, were within both targets
    tokens_harvested: int
    harvested_per_s: float
    tokens_lost: int  # generated, and then generated again
    idle_s: float  # without a request inside
    rollout_steps_s: float
    idle_used: float  # share of the idle time in which rollout steps ran
    trainer_cpu_s: float
    reclaims: int
    reclaim_p50_ms: float
    reclaim_p99_ms: float
    stops: int
    client_late_ms: float


class HarvestFigures(Struct, frozen=True, kw_only=True):
    """Tokens and times of the run beside the traffic."""

    generated: int
    lost: int
    steps_s: float
    trainer_cpu_s: float


def make_coserving(traffic: str, replay: ReplayRecord, harvest: HarvestFigures, status: GuardStatus) -> CoservingReport:
    """Computes the figures of a replay with two stretches: serving alone, and serving beside the run."""
    alone, beside = replay.stretches
    quiet, busy = (within(replay.answers, part.begin_s, part.end_s) for part in (alone, beside))
    targets = (replay.ttft_s, replay.tpot_s)
    before, after = latencies(quiet, alone, *targets), latencies(busy, beside, *targets)
    idle, seconds = idle_s(busy, beside.begin_s, beside.end_s), beside.end_s - beside.begin_s
    borrowers = status.borrowers
    return CoservingReport(
        traffic=traffic,
        ttft_target_ms=1e3 * replay.ttft_s,
        tpot_target_ms=1e3 * replay.tpot_s,
        alone=before,
        beside=after,
        slo_attained=after.failed == 0 and after.attained >= min(ENOUGH, before.attained),
        tokens_harvested=harvest.generated,
        harvested_per_s=harvest.generated / seconds if seconds else 0.0,
        tokens_lost=harvest.lost,
        idle_s=idle,
        rollout_steps_s=harvest.steps_s,
        idle_used=harvest.steps_s / idle if idle else 0.0,
        trainer_cpu_s=harvest.trainer_cpu_s,
        reclaims=sum(one.reclaims for one in borrowers),
        reclaim_p50_ms=1e3 * max((one.reclaim_p50_s for one in borrowers), default=0.0),
        reclaim_p99_ms=1e3 * max((one.reclaim_p99_s for one in borrowers), default=0.0),
        stops=sum(one.stops for one in borrowers),
        client_late_ms=1e3 * percentile([one.sent - one.due for one in (*quiet, *busy)]),
    )


def latencies(answers: Sequence[ServedAnswer], part: TimeStretch, ttft_s: float, tpot_s: float) -> LatencyFigures:
    """Computes the latencies of requests that were sent in this part."""
    ttft, tpot, seconds = ttfts(answers), tpots(answers), part.end_s - part.begin_s
    whole = [one for one in answers if not one.failed]
    good = sum(one.ttft_s <= ttft_s and one.tpot_s <= tpot_s for one in whole)
    return LatencyFigures(
        requests=len(answers),
        failed=len(answers) - len(whole),
        seconds=seconds,
        load=1 - idle_s(answers, part.begin_s, part.end_s) / seconds if seconds else 0.0,
        others=part.others,
        ttft_p50_ms=1e3 * percentile(ttft, 0.5),
        ttft_p95_ms=1e3 * percentile(ttft, 0.95),
        ttft_p99_ms=1e3 * percentile(ttft),
        tpot_p50_ms=1e3 * percentile(tpot, 0.5),
        tpot_p95_ms=1e3 * percentile(tpot, 0.95),
        tpot_p99_ms=1e3 * percentile(tpot),
        attained=good / len(answers) if answers else 1.0,
    )


def told(found: CoservingReport) -> Iterator[tuple[str, str]]:
    """Describes the report for people, the verdict first."""
    alone, beside = found.alone, found.beside
    verdict = "ATTAINED" if found.slo_attained else "MISSED"
    targets = f"TTFT {found.ttft_target_ms:,.0f} ms and TPOT {found.tpot_target_ms:,.1f} ms"
    kept = f"{beside.attained:.2%} of {beside.requests:,} requests during the run within {targets}"
    yield "SLO", f"{verdict}: {kept} (alone {alone.attained:.2%} of {alone.requests:,}); {beside.failed} failed"
    yield "traffic", f"{found.traffic}; load {alone.load:.0%} alone, {beside.load:.0%} during the run"
    for name in ("TTFT", "TPOT"):
        pairs = [[getattr(one, f"{name.lower()}_p{share}_ms") for one in (alone, beside)] for share in (50, 95, 99)]
        shares = [f"p{share} {_ms(a)} → {_ms(b)}" for share, (a, b) in zip((50, 95, 99), pairs, strict=True)]
        yield name, f"{', '.join(shares)} ms (alone → during the run)"
    yield (
        "harvested",
        f"{found.tokens_harvested:,} tokens ({found.harvested_per_s:,.0f}/s), {found.tokens_lost:,} of them lost",
    )
    used = f"rollout steps ran in {found.rollout_steps_s:.0f} s of it ({found.idle_used:.0%})"
    trainer = f"the trainer took {found.trainer_cpu_s:.0f} core-seconds"
    yield "idle time", f"{found.idle_s:.0f} of {beside.seconds:.0f} s; {used}, {trainer}"
    times = f"{found.reclaims:,} times, p50 {found.reclaim_p50_ms:,.1f} ms, p99 {found.reclaim_p99_ms:,.1f} ms"
    yield "taken back", f"{times} from a request's arrival to the last rollout step's end; {found.stops} by force"
    if max(alone.others, beside.others) > _DISTURBING:
        taken = f"{alone.others:.0%} of the cores alone, {beside.others:.0%} during the run"
        yield "disturbed", f"foreign programs took {taken}, which changes all figures"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
