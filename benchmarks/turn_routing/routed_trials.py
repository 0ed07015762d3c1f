"""Plays all policies on the same sessions, each as well tuned as its settings allow, and compares them."""

import logging
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.rivals.policies import COMPARED
from benchmarks.turn_routing.routed_fleet import SEQUENCES, RoutedFleet, TrialFigures, TrialSetting
from ebbtide.simulator.scenario.scenario import PolicyChoice
from ebbtide.simulator.simulate import policy_of

Tell = Callable[[str], None]
#: More turns than a worker ever has in these trials: the engine's own queue holds what it cannot run yet.
_ALL: Final = 256


class TunedPolicy(Struct, frozen=True, kw_only=True):
    """A policy with one choice of its settings. `slots`: turns that a worker is given, as its operator would set it."""

    name: str
    slots: int
    params: dict[str, bool | int | float | str] = {}

    @property
    def label(self) -> str:
        more = [f"{key} {value}" for key, value in self.params.items()]
        return ", ".join([self.name, f"slots {self.slots}", *more])


#: What is tried of each policy; the one with the highest mean throughput in the base setting stands for it.
CANDIDATES: Final = {
    "ebbtide": [TunedPolicy(name="ebbtide", slots=slots) for slots in (SEQUENCES, 40, 64)],
    "least_loaded": [TunedPolicy(name="least_loaded", slots=slots) for slots in (SEQUENCES, 40)],
    "sticky": [TunedPolicy(name="sticky", slots=slots) for slots in (SEQUENCES, _ALL)],
    "rose_turns": [
        TunedPolicy(name="rose_turns", slots=_ALL, params={"cap": cap, "keeps": True})
        for cap in (16, SEQUENCES, 64, 128)
    ],
}
BASE: Final = TrialSetting(sessions=400)
#: By what differs from the base setting.
SWEEP: Final = {
    "200 sessions": replace(BASE, sessions=200),
    "300 sessions": replace(BASE, sessions=300),
    "800 sessions": replace(BASE, sessions=800),
    "300 sessions, answers after 1 s": replace(BASE, sessions=300, wait_s=1.0),
    "800 sessions, answers after 20 s": replace(BASE, sessions=800, wait_s=20.0),
    "caches for half of the sessions that wait": replace(BASE, kv_tokens=100_000),
}
LOSSES: Final = replace(BASE, losses_per_hour=4.0, counted_s=900.0)


class Played(Struct, frozen=True, kw_only=True):
    """A policy's figures, seed by seed."""

    policy: TunedPolicy
    figures: list[TrialFigures]

    @property
    def tokens_per_s(self) -> float:
        return fmean(one.tokens_per_s for one in self.figures)


class Ratio(Struct, frozen=True, kw_only=True):
    """A ratio of the same seeds' figures."""

    mean: float
    least: float
    most: float


def play(policy: TunedPolicy, setting: TrialSetting, seeds: Sequence[int], tell: Tell) -> Played:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    found: list[TrialFigures] = []
    began = time.monotonic()
    for seed in seeds:
        choice = PolicyChoice(name=policy.name, params=policy.params)
        fleet = RoutedFleet(replace(setting, slots=policy.slots), seed, policy_of(choice, COMPARED).decider)
        found.append(fleet.run())
    played = Played(policy=policy, figures=found)
    hits, turn_s = fmean(one.hits for one in found), fmean(one.turn_s for one in found)
    took_s = time.monotonic() - began
    tell(
        f"  {policy.label:<52} {played.tokens_per_s:9,.0f} tokens/s, hits {hits:.3f}, "
        f"turns of {turn_s:.1f} s ({took_s:.0f} s)"
    )
    return played


def tuned(setting: TrialSetting, seeds: Sequence[int], tell: Tell) -> tuple[dict[str, Played], list[Played]]:
    """The best of each policy's candidates, and all of them."""
    tried = {name: [play(one, setting, seeds, tell) for one in some] for name, some in CANDIDATES.items()}
    best = {name: max(played, key=lambda one: one.tokens_per_s) for name, played in tried.items()}
    return best, [one for played in tried.values() for one in played]


def throughput_ratio(ours: Played, theirs: Played) -> Ratio:
    return _ratio(
        [one.tokens_per_s / other.tokens_per_s for one, other in zip(ours.figures, theirs.figures, strict=True)]
    )


def hits_ratio(ours: Played, theirs: Played) -> Ratio:
    return _ratio([one.hits / other.hits for one, other in zip(ours.figures, theirs.figures, strict=True)])


def _ratio(values: Sequence[float]) -> Ratio:
    return Ratio(mean=fmean(values), least=min(values), most=max(values))
