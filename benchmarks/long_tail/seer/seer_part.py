"""Compares policies in Seer's settings, on the simulator: with each other, and with what Seer published."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import sqrt
from statistics import NormalDist, fmean, median, stdev
from typing import Any, Final

import msgspec

from benchmarks.long_tail.seer.published_ratios import (
    PUBLISHED,
    SEER,
    SEER_OVER_VERL,
    VERL,
    PublishedRatio,
    Variant,
)
from benchmarks.long_tail.seer.seer_work import ORACLE, OURS, UNTOLD, PlayedPhase, SeerWork, played
from benchmarks.simulator.published.seer_points import SETTINGS

#: Seeds of the figures that are promised, and of a quick run, whose fleets and steps have a half of the size.
_SEEDS, _QUICK_SEEDS, _QUICK_SCALE = 3, 1, 2
#: Where forecasts are compared with true lengths: a correlation of lengths, and few slots and many.
_ALIKE, _SLOTS = 0.9, (0.25, 1.0)
#: Where forecasts must not harm: groups whose samples tell little of each other, on small fleets.
_UNLIKE, _UNLIKE_SEEDS, _UNLIKE_SCALE = 0.2, 20, 4
_SWEPT: Final = (0.2, 0.6, 0.9)
_MODEL: Final = "qwen"

Phases = Mapping[SeerWork, PlayedPhase]
Tell = Callable[[str], None]


def seer_part(tell: Tell, *, quick: bool, jobs: int, recorded: tuple[tuple[int, ...], ...] = ()) -> dict[str, Any]:
    """All figures of Seer's settings. `recorded`: lengths by group, to be played on Qwen2-VL-72B's engines, too."""
    plan = _Plan(quick=quick)
    works = dict.fromkeys((*plan.settings(), *plan.published(), *plan.told(), *plan.swept(), *plan.unlike()))
    works |= dict.fromkeys(_recorded(recorded, plan))
    with ProcessPoolExecutor(jobs) as pool:
        phases = dict(zip(works, pool.map(played, works), strict=True))
    settings, judged = _settings(plan, phases, tell), _judged(plan, phases, tell)
    told = {str(slots): _over(plan.told_at(slots, OURS), plan.told_at(slots, ORACLE), phases) for slots in _SLOTS}
    tell(f"seer: over true lengths at {_ALIKE}, by slots: {told}")
    errors = [abs(one["error"]) for one in judged if not one["fitted"]]
    return {
        "figures": {
            "throughput_over_verl": min(one["over_published"] for one in settings),
            "throughput_over_seer": min(one["over_seer"] for one in settings),
            "share_of_true_lengths": min(told.values()),
            "error_vs_published_median": median(errors),
        },
        "simulated": True,
        "scale": plan.scale,
        "seeds": plan.seeds,
        "settings": settings,
        "published": judged,
        "share_of_true_lengths_by_slots": told,
        "by_correlation": _by_correlation(plan, phases, tell),
        "forecasts_over_none_at_0.2": None if quick else _harmless(plan, phases, tell),
        "recorded": _recorded_ratios(recorded, plan, phases, tell),
        "phases": [{"work": _plain(work), **msgspec.to_builtins(phase)} for work, phase in phases.items()],
    }


class _Plan:
    """What is simulated for which figure."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.seeds = _QUICK_SEEDS if quick else _SEEDS
        self.scale = _QUICK_SCALE if quick else 1

    def of(self, model: str, variant: Variant, **terms: Any) -> list[SeerWork]:
        return [
            SeerWork(model=model, variant=variant, seed=seed, scale=self.scale, **terms) for seed in range(self.seeds)
        ]

    def settings(self) -> Iterable[SeerWork]:
        for model, group in SEER_OVER_VERL:
            for variant in (VERL, SEER, OURS):
                yield from self.of(model, variant, group=group)

    def published(self) -> Iterable[SeerWork]:
        for point in PUBLISHED:
            for variant in (VERL, point.variant):
                yield from self.of(point.model, variant, group=SETTINGS[point.model].group)

    def told_at(self, slots: float, variant: Variant) -> list[SeerWork]:
        return self.of(_MODEL, variant, correlation=_ALIKE, slots=slots)

    def told(self) -> Iterable[SeerWork]:
        for slots in _SLOTS:
            for variant in (OURS, ORACLE):
                yield from self.told_at(slots, variant)

    def swept(self) -> Iterable[SeerWork]:
        for correlation in () if self.quick else _SWEPT:
            for variant in (VERL, SEER, OURS):
                yield from self.of(_MODEL, variant, correlation=correlation)

    def unlike_of(self, variant: Variant) -> list[SeerWork]:
        terms = {"correlation": _UNLIKE, "scale": _UNLIKE_SCALE}
        return [SeerWork(model=_MODEL, variant=variant, seed=seed, **terms) for seed in range(_UNLIKE_SEEDS)]  # type: ignore[arg-type]

    def unlike(self) -> Iterable[SeerWork]:
        return () if self.quick else [*self.unlike_of(OURS), *self.unlike_of(UNTOLD)]


def _over(works: Sequence[SeerWork], others: Sequence[SeerWork], phases: Phases) -> float:
    """Throughput over that of others, means over seeds."""
    return fmean(phases[one].tokens_per_s for one in works) / fmean(phases[one].tokens_per_s for one in others)


def _settings(plan: _Plan, phases: Phases, tell: Tell) -> list[dict[str, Any]]:
    found = []
    for (model, group), published in SEER_OVER_VERL.items():
        verl, seer, ours = (plan.of(model, variant, group=group) for variant in (VERL, SEER, OURS))
        over_verl, over_seer = _over(ours, verl, phases), _over(ours, seer, phases)
        tails = [fmean(phases[one].tail_s for one in some) for some in (verl, seer, ours)]
        made = sum(phases[one].generated for one in ours)
        found.append(
            {
                "model": model,
                "group": group,
                "over_verl": over_verl,
                "over_published": over_verl / published,
                "seer_over_verl": _over(seer, verl, phases),
                "published_seer_over_verl": published,
                "over_seer": over_seer,
                "tail_s": dict(zip(("verl", "seer", "ebbtide"), tails, strict=True)),
                "tail_reduction": 1.0 - tails[2] / tails[0],
                "bound_by_tail": 1.0 / (1.0 - tails[2] / fmean(phases[one].total_s for one in ours)),
                "preemptions": {
                    "verl": sum(phases[one].preemptions for one in verl),
                    "ebbtide": sum(phases[one].preemptions for one in ours),
                },
                "read_again_share": sum(phases[one].read_again for one in ours) / made,
            }
        )
        tell(
            f"seer: {model} groups of {group}: over veRL {over_verl:.2f} (Seer published {published}), "
            f"over Seer {over_seer:.3f}, tail {tails[2] / tails[0] - 1:+.0%}"
        )
    return found


def _judged(plan: _Plan, phases: Phases, tell: Tell) -> list[dict[str, Any]]:
    return [_judge(point, plan, phases, tell) for point in PUBLISHED]


def _judge(point: PublishedRatio, plan: _Plan, phases: Phases, tell: Tell) -> dict[str, Any]:
    """A published ratio and the simulated one. Of a tail's time, which may be next to nothing, the error is the
    difference; of throughput it is relative.
    """
    group = SETTINGS[point.model].group
    works, verl = (plan.of(point.model, one, group=group) for one in (point.variant, VERL))
    if point.tail:
        found = fmean(phases[one].tail_s for one in works) / fmean(phases[one].tail_s for one in verl)
        error = found - point.value
    else:
        found = _over(works, verl, phases)
        error = found / point.value - 1.0
    what = "tail" if point.tail else "throughput"
    tell(f"seer: {point.model} {what} of {_name(point.variant)} over veRL: {found:.2f}, published {point.value}")
    return {
        "model": point.model,
        "variant": _name(point.variant),
        "what": what,
        "published": point.value,
        "simulated": found,
        "error": error,
        "fitted": point.fitted,
    }


def _by_correlation(plan: _Plan, phases: Phases, tell: Tell) -> dict[str, dict[str, float]]:
    found = {}
    for correlation in () if plan.quick else _SWEPT:
        verl, seer, ours = (plan.of(_MODEL, one, correlation=correlation) for one in (VERL, SEER, OURS))
        over = {"over_verl": _over(ours, verl, phases), "over_seer": _over(ours, seer, phases)}
        tell(f"seer: {_MODEL} at correlation {correlation}: {over}")
        found[str(correlation)] = over
    return found


def _harmless(plan: _Plan, phases: Phases, tell: Tell) -> dict[str, float]:
    """Throughput with forecasts over that without any, seed by seed, where groups tell little."""
    pairs = zip(plan.unlike_of(OURS), plan.unlike_of(UNTOLD), strict=True)
    ratios = [phases[ours].tokens_per_s / phases[none].tokens_per_s for ours, none in pairs]
    half = NormalDist().inv_cdf(0.975) * stdev(ratios) / sqrt(len(ratios))
    found = {"mean": fmean(ratios), "low": fmean(ratios) - half, "high": fmean(ratios) + half, "seeds": len(ratios)}
    tell(f"seer: forecasts over none at correlation {_UNLIKE}: {found}")
    return found


def _recorded(recorded: tuple[tuple[int, ...], ...], plan: _Plan) -> list[SeerWork]:
    variants = (VERL, SEER, OURS, ORACLE) if recorded else ()
    return [one for variant in variants for one in _recorded_of(recorded, plan, variant)]


def _recorded_of(recorded: tuple[tuple[int, ...], ...], plan: _Plan, variant: Variant) -> list[SeerWork]:
    return plan.of(_MODEL, variant, lengths=recorded, group=min(map(len, recorded)))


def _recorded_ratios(
    recorded: tuple[tuple[int, ...], ...], plan: _Plan, phases: Phases, tell: Tell
) -> dict[str, float] | None:
    if not recorded:
        return None
    verl, seer, ours, oracle = (_recorded_of(recorded, plan, one) for one in (VERL, SEER, OURS, ORACLE))
    pairs = {"over_verl": verl, "over_seer": seer, "over_true_lengths": oracle}
    found = {name: _over(ours, others, phases) for name, others in pairs.items()}
    tell(f"seer: recorded lengths: {found}")
    return found


def _plain(work: SeerWork) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(work)
    return plain | {"variant": _name(work.variant), "lengths": len(work.lengths)}


def _name(variant: Variant) -> str:
    return "_".join((variant.policy, variant.order, "drafts" if variant.speculates else "no_drafts"))
