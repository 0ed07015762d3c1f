"""Reports the elastic demo: who had the trainer's device, throughput and money of both pools, and their ratios."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.demo.demo_report import DemoReport
from ebbtide.demo.elastic.spot_machines import MachineStay
from ebbtide.types.device_turns import HELD, LENT, RETURNING, DeviceTurn

_HOUR_S: Final = 3600.0
#: From this share of the cores on, the report mentions other programs.
_DISTURBING: Final = 0.05
#: Names of the two pools.
ELASTIC, FIXED = "elastic", "fixed"


class MachinePrices(Struct, frozen=True, kw_only=True):
    """Assumed, of a machine per hour."""

    reserved: float
    spot: float


class PoolRun(Struct, frozen=True, kw_only=True):
    """One run as it went. Times are seconds since its submission."""

    name: str
    report: DemoReport
    step_at_s: dict[int, float]  # when each step was reported
    step_tokens: dict[int, int]  # that each step was trained on
    turns: list[DeviceTurn]  # of the trainer's device; none: it lent nothing
    stays: list[MachineStay]  # of spot machines
    reserved: int  # reserved machines, with the trainer's
    others: float  # share of the cores that foreign programs took

    @property
    def counted(self) -> tuple[float, float]:
        """From when to when the run is measured: without the first step, which waits for the first weights."""
        return self.step_at_s[1], self.step_at_s[max(self.step_at_s)]


class PoolFigures(Struct, frozen=True, kw_only=True):
    """What a pool did in the time that is counted."""

    steps: int
    seconds: float
    step_s: float
    tokens: int  # trained on
    tokens_per_s: float
    device: dict[str, float]  # shares of the time by who had the trainer's device
    trainer_idle: float  # share of the time in which the trainer waited for rollouts or for its device
    reserved_s: float  # seconds of reserved machines, the trainer's among them
    spot_s: float  # seconds of spot machines
    spot_idle_s: float  # of these, seconds in which their workers booted
    lost: int  # spot machines
    money: float
    tokens_per_money: float
    tokens_twice: int  # in the whole run
    others: float


class ElasticReport(Struct, frozen=True, kw_only=True):
    """The contents of `report.json`."""

    machines: str  # the trace, for people
    notice_s: float
    prices: MachinePrices
    elastic: PoolFigures
    fixed: PoolFigures
    throughput_over_fixed: float
    tokens_per_money_over_fixed: float
    runs: list[PoolRun]


def elastic_report(
    elastic: PoolRun, fixed: PoolRun, prices: MachinePrices, *, machines: str, notice_s: float
) -> ElasticReport:
    """Compares two runs of at least two steps each."""
    ours, theirs = pool_figures(elastic, prices), pool_figures(fixed, prices)
    return ElasticReport(
        machines=machines,
        notice_s=notice_s,
        prices=prices,
        elastic=ours,
        fixed=theirs,
        throughput_over_fixed=_ratio(ours.tokens_per_s, theirs.tokens_per_s),
        tokens_per_money_over_fixed=_ratio(ours.tokens_per_money, theirs.tokens_per_money),
        runs=[elastic, fixed],
    )


def pool_figures(run: PoolRun, prices: MachinePrices) -> PoolFigures:
    begin_s, end_s = run.counted
    seconds, steps = end_s - begin_s, max(run.step_at_s) - 1
    tokens = sum(count for step, count in run.step_tokens.items() if step > 1)
    spot_s = sum(within(stay.begin_s, stay.end_s, run.counted) for stay in run.stays)
    booting_s = sum(within(stay.begin_s, _ready_s(stay), run.counted) for stay in run.stays)
    money = spent(run, prices, begin_s, end_s)
    return PoolFigures(
        steps=steps,
        seconds=seconds,
        step_s=_ratio(seconds, steps),
        tokens=tokens,
        tokens_per_s=_ratio(tokens, seconds),
        device=device_shares(run.turns, begin_s, end_s),
        trainer_idle=run.report.idle_share["trainer"],
        reserved_s=run.reserved * seconds,
        spot_s=spot_s,
        spot_idle_s=booting_s,
        lost=sum(stay.end_s is not None and begin_s <= stay.end_s < end_s for stay in run.stays),
        money=money,
        tokens_per_money=_ratio(tokens, money),
        tokens_twice=run.report.tokens_generated_twice,
        others=run.others,
    )


def spent(run: PoolRun, prices: MachinePrices, begin_s: float, end_s: float) -> float:
    """Money for all machines between two times: reserved ones always, spot ones from their arrival to their loss."""
    spot_s = sum(within(stay.begin_s, stay.end_s, (begin_s, end_s)) for stay in run.stays)
    return (prices.reserved * run.reserved * (end_s - begin_s) + prices.spot * spot_s) / _HOUR_S


def device_shares(turns: Sequence[DeviceTurn], begin_s: float, end_s: float) -> dict[str, float]:
    """state -> its share of the time. A device that is never lent is held for all of it."""
    if not turns:
        return {HELD: 1.0, LENT: 0.0, RETURNING: 0.0}
    seconds = dict.fromkeys((HELD, LENT, RETURNING), 0.0)
    for turn in turns:
        seconds[turn.state] += within(turn.begin_s, turn.end_s, (begin_s, end_s))
    return {state: _ratio(spent_s, end_s - begin_s) for state, spent_s in seconds.items()}


def within(begin_s: float, end_s: float | None, part: tuple[float, float]) -> float:
    """Seconds from `begin_s` to `end_s` (None: without an end) that lie in a part of the time."""
    low, high = part
    return max(0.0, min(high, high if end_s is None else end_s) - max(low, begin_s))


def elastic_summary(report: ElasticReport, path: Path) -> Iterator[tuple[str, str]]:
    """Tells the report in lines of a name and a text."""
    ours, theirs = report.elastic, report.fixed
    yield "steps", f"{_steps(ours)} elastic, {_steps(theirs)} fixed; the first of each run is not counted"
    rates = f"{ours.tokens_per_s:,.0f} trained tokens/s elastic, {theirs.tokens_per_s:,.0f} fixed"
    yield "throughput", f"{rates}: {report.throughput_over_fixed:.2f} times"
    money = f"{ours.money:.3f} elastic, {theirs.money:.3f} fixed"
    yield "money", f"{money}: {report.tokens_per_money_over_fixed:.2f} times the tokens for the same money"
    prices = report.prices
    yield "prices", f"assumed: {prices.reserved:g} for a reserved machine per hour, {prices.spot:g} for a spot one"
    yield "machines", f"{_machine_time(ours)} elastic, {_machine_time(theirs)} fixed; a machine is a core"
    shares = ours.device
    owned = f"generated {shares[LENT]:.0%} of the time, trained {shares[HELD]:.0%}, came back {shares[RETURNING]:.0%}"
    yield "trainer's device", f"{owned} (elastic); its trainer waited {theirs.trainer_idle:.0%} of the time (fixed)"
    notice = f"with a notice of {report.notice_s:g} s" if report.notice_s else "without notice"
    yield "spot machines", f"{ours.lost} lost {notice}, {ours.spot_idle_s:.0f} s of booting; by {report.machines}"
    for run in report.runs:
        yield f"{run.name} run", _run(run)
    disturbed = max(ours.others, theirs.others)
    if disturbed > _DISTURBING:
        taken = f"{ours.others:.0%} of the cores during elastic, {theirs.others:.0%} during fixed"
        yield "disturbed", f"foreign programs took {taken}, which changes all figures"
    yield "report", f"{path}, {path.with_suffix('.png')}"


def _run(run: PoolRun) -> str:
    found = run.report
    sums = "the sums agree" if found.rollouts_accounted_for else "THE SUMS DO NOT AGREE"
    dropped = sum(found.rollouts_dropped.values())
    counts = f"{found.rollouts_submitted:,} rollouts = {found.rollouts_trained:,} trained + {dropped:,} dropped: {sums}"
    tokens = f"{found.tokens_generated:,} tokens generated, {found.tokens_generated_twice:,} of them regenerated"
    ends = f"reward {found.rewards[0]:.2f} to {found.rewards[-1]:.2f}" if found.rewards else "no reward"
    return f"{counts}; {tokens}; {found.rollouts_resumed_midway:,} resumed midway; {ends}"


def _steps(figures: PoolFigures) -> str:
    return f"{figures.steps} in {figures.seconds:.0f} s ({figures.step_s:.1f} s each)"


def _machine_time(figures: PoolFigures) -> str:
    spot = f" and {figures.spot_s:.0f} s of spot ones" if figures.spot_s else ""
    return f"{figures.reserved_s:.0f} s of reserved machines{spot}"


def _ready_s(stay: MachineStay) -> float | None:
    return stay.end_s if stay.ready_s is None else stay.ready_s


def _ratio(value: float, of: float) -> float:
    return value / of if of else 0.0


def step_tokens(steps: Mapping[int, Mapping[str, float]]) -> dict[int, int]:
    """step -> tokens that it was trained on, from the steps' events."""
    return {step: int(values.get("tokens", 0)) for step, values in steps.items()}
