"""The verdict of the co-serving demo: what users noticed of a run beside them, and what the run got out of it."""

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

#: From this share of the cores on, other programs are worth a line.
_DISTURBING: Final = 0.05
#: An SLO that names no other: a hundredth of the requests may miss it.
ENOUGH: Final = 0.99


class LatencyFigures(Struct, frozen=True, kw_only=True):
    """Of one part of a replay; milliseconds. `load`: share of its time with a request inside; `others`: of the
    cores, what programs took that have no part in it."""

    requests: int
    failed: int
    seconds: float
    load: float
    others: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    tpot_p99_ms: float
    attained: float


class CoservingReport(Struct, frozen=True, kw_only=True):
    """`slo_attained`: as large a share of requests as asked for was within both targets beside rollouts, or as large a
    share as alone. `idle_used`: share of the time without a request inside in which rollout steps ran; `trainer_cpu_s`:
    processor time of the trainer meanwhile. `tokens_lost`: generated, and then generated again."""

    traffic: str
    ttft_target_ms: float
    tpot_target_ms: float
    alone: LatencyFigures
    beside: LatencyFigures
    slo_attained: bool
    tokens_harvested: int
    harvested_per_s: float
    tokens_lost: int
    idle_s: float
    rollout_steps_s: float
    idle_used: float
    trainer_cpu_s: float
    reclaims: int
    reclaim_p50_ms: float
    reclaim_p99_ms: float
    stops: int
    client_late_ms: float


class HarvestFigures(Struct, frozen=True, kw_only=True):
    """What the run made beside the traffic, as its books say."""

    generated: int
    lost: int
    steps_s: float
    trainer_cpu_s: float


def make_coserving(traffic: str, replay: ReplayRecord, harvest: HarvestFigures, status: GuardStatus) -> CoservingReport:
    """The figures of a replay with two stretches: serving alone, and serving beside the run."""
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
    """Of what was sent in this part; the targets in seconds."""
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
    """Lines of a name and what is to be said of it, the verdict first."""
    alone, beside = found.alone, found.beside
    verdict = "ATTAINED" if found.slo_attained else "MISSED"
    targets = f"TTFT {found.ttft_target_ms:,.0f} ms and TPOT {found.tpot_target_ms:,.1f} ms"
    kept = f"{beside.attained:.2%} of {beside.requests:,} requests beside the run within {targets}"
    yield "SLO", f"{verdict}: {kept} (alone {alone.attained:.2%} of {alone.requests:,}); {beside.failed} failed"
    yield "traffic", f"{found.traffic}; load {alone.load:.0%} alone, {beside.load:.0%} beside"
    for name in ("TTFT", "TPOT"):
        pairs = [[getattr(one, f"{name.lower()}_p{share}_ms") for one in (alone, beside)] for share in (50, 95, 99)]
        shares = [f"p{share} {_ms(a)} → {_ms(b)}" for share, (a, b) in zip((50, 95, 99), pairs, strict=True)]
        yield name, f"{', '.join(shares)} ms (alone → beside)"
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
        taken = f"{alone.others:.0%} of the cores alone, {beside.others:.0%} beside"
        yield "disturbed", f"programs that have no part in this took {taken}: all figures tell of them too"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
