"""Tells from a run's counters what became of its rollouts and tokens."""

import math
from collections.abc import Iterator, Mapping

from msgspec import Struct
from rich.table import Table

from ebbtide.cli.views.tables import clock, fact_table
from ebbtide.types.run import Run, RunMoves, RunOutlook


class Histogram(Struct, frozen=True):
    """Counts observations by bucket."""

    buckets: tuple[tuple[float, int], ...]  # (upper bound, observations); bounds ascend, the last may be infinite

    @property
    def count(self) -> int:
        return sum(count for _, count in self.buckets)

    def at_most(self, share: float) -> float | None:
        """The bound of the bucket that this share of the observations does not exceed; None without observations."""
        wanted, seen = share * self.count, 0
        for bound, count in self.buckets:
            seen += count
            if count and seen >= wanted:
                return bound
        return None


def histogram(counters: Mapping[str, int], name: str) -> Histogram:
    """Reads the counters `NAME:le:BOUND`; each counts what lies between the previous bound and its own."""
    prefix = f"{name}:le:"
    found = {float(key.removeprefix(prefix)): count for key, count in counters.items() if key.startswith(prefix)}
    return Histogram(tuple(sorted(found.items())))


def finite(bound: float | None) -> float | None:
    """The bound unless it is infinite, which JSON cannot express."""
    return bound if bound is not None and math.isfinite(bound) else None


def detail_table(run: Run) -> Table:
    """Tabulates all that is known of the run."""
    return fact_table(_lines(run))


def _lines(run: Run) -> Iterator[tuple[str, str]]:
    counts = run.counters
    yield "run", f"{run.run_id}, {run.status.name.lower()} after {clock(run.age_s)}"
    if run.message:
        yield "", run.message
    if run.newest is not None:
        yield "policy", f"version {run.newest.version}, step {run.newest.step} of {run.spec.trainer.steps}"
    yield "share", _share(run)
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(run.dropped.items()) if count) or "none"
    count = {name: counts.get(name, 0) for name in ("submitted", "trained", "queued", "running", "finished")}
    yield "rollouts", f"{count['submitted']:,} submitted, {count['trained']:,} trained; dropped: {dropped}"
    yield "now", f"{count['queued']:,} wait, {count['running']:,} run, {count['finished']:,} finished"
    yield from _expected(run.outlook)
    yield from _served(counts)
    yield from _cut_scorings(counts)
    yield from _migration(counts, run.moves)
    yield from sorted(run.holders.items())


def _share(run: Run) -> str:
    share, spec = run.share, run.spec.share
    bounds = f"weight {spec.weight:g}, priority {spec.priority}, floor {spec.floor:.0%}"
    bounds += "" if spec.ceiling is None else f", ceiling {spec.ceiling:.0%}"
    if share is None:
        return bounds
    return f"{share.lately:.1%} of the tokens lately, {share.due:.1%} due, {share.workers:,} workers ({bounds})"


def _expected(outlook: RunOutlook | None) -> Iterator[tuple[str, str]]:
    """When its open rollouts end, as far as that is known."""
    if outlook is None:
        return
    if outlook.half_s:
        tail = f"{outlook.tail:.0%} of it while none waits"
        yield "open ones end", f"in {clock(outlook.half_s)}, nine times in ten within {clock(outlook.ninth_s)}; {tail}"
    for one in outlook.longest:
        rest = f"{one.expected_tokens:,} more expected, at most {one.longest_tokens:,} four times in five"
        yield "may end last", f"{one.rollout_id}: {one.stored:,} tokens, {rest}"
    if outlook.forecast:
        held = f"{outlook.covered / outlook.forecast:.1%} of {outlook.forecast:,} responses"
        yield (
            "forecasts",
            f"{held} ended within their interval for 80 %; groups share {outlook.alike:.0%} of the variance",
        )


def _served(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """What its gateways' clients asked for, if they did."""
    names = ("requests_submitted", "requests_completed", "sessions_opened", "sessions_completed", "sessions_dropped")
    asked, ended, opened, trajectories, dropped = (counts.get(name, 0) for name in names)
    if asked:
        yield "requests", f"{asked:,} submitted, {ended:,} ended"
    if opened:
        yield "sessions", f"{opened:,} opened, {trajectories:,} became trajectories, {dropped:,} dropped"


def _cut_scorings(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """What the limit of scorings cut, if anything."""
    if cut := counts.get("rewards_out_of_time", 0):
        yield "rewards", f"{cut:,} scored out of time"


def _migration(counts: Mapping[str, int], moves: RunMoves | None) -> Iterator[tuple[str, str]]:
    yield "attempts", f"{counts.get('attempts', 0):,}{_attempts_per_rollout(counts)}"
    moved, midway = counts.get("moved", 0), counts.get("resumed_midway", 0)
    yield "migrated", f"{midway:,} resumed midway; {moved:,} moved to balance the fleet"
    if moves is not None and moves.moves:
        yield "balanced", _balanced(moves)
    saved, lost = counts.get("tokens_resumed", 0), counts.get("tokens_lost_at_most", 0)
    yield "tokens", f"{counts.get('tokens_stored', 0):,} stored"
    yield "saved", f"{saved:,} tokens that were not generated again"
    yield "lost", f"at most {lost:,} tokens, with workers that died without notice"
    for name, what in (("detection", "from a worker's silence or loss to its notice"), ("resume", "until it goes on")):
        found = histogram(counts, name)
        if found.count:
            shares = ", ".join(f"p{share} {_bound(found.at_most(share / 100))}" for share in (50, 90, 99))
            yield name, f"{shares} ({found.count:,} observed, {what})"


def _balanced(moves: RunMoves) -> str:
    """What the moves of running rollouts promised, and what came of them."""
    told = f"{moves.moves:,} running rollouts moved"
    told += f", {moves.moves / moves.finished:.2f} for each finished one" if moves.finished else ""
    if moves.judged:
        told += (
            f"; {moves.judged:,} judged: {moves.made_tokens:,.0f} tokens made of {moves.promised_tokens:,.0f} promised"
        )
    return told + ("; stopped, as that is too little" if moves.stopped else "")


def _attempts_per_rollout(counts: Mapping[str, int]) -> str:
    found = histogram(counts, "attempts")
    if not found.count:
        return ""
    below = [0.0, *(bound for bound, _ in found.buckets)]
    told = [
        f"{count:,} had {_numbers(low, high)}"
        for low, (high, count) in zip(below, found.buckets, strict=False)
        if count
    ]
    return f"; of finished rollouts {', '.join(told)}"


def _numbers(below: float, last: float) -> str:
    """The whole numbers above `below` up to `last`."""
    if not math.isfinite(last):
        return "more"
    return f"{last:g}" if last == below + 1 else f"{below + 1:g}-{last:g}"


def _bound(value: float | None) -> str:
    return "beyond all bounds" if value is None or not math.isfinite(value) else f"≤ {value:g} s"
