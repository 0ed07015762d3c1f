"""Compares what was simulated with what was measured: step times, and tokens that were made twice or moved."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from msgspec import Struct

from benchmarks.simulator.measured import Measured
from ebbtide.simulator.outcome import Outcome

#: Fewer kills and drains say little of their sums.
LEAST_INTERRUPTIONS: Final = 20
#: Interruptions that take a worker away.
GONE: Final = ("kill", "drain")


class StepTimes(Struct, frozen=True, kw_only=True):
    """Seconds of a setting's steps, without the first one, in which a new run's programs warm up."""

    median: float
    least: float
    most: float
    steps: int


class SettingError(Struct, frozen=True, kw_only=True):
    """One setting, real and simulated."""

    setting: str
    real: StepTimes
    simulated: StepTimes
    error: float  # of the median step time, relative to the real one
    twice: tuple[int, int]  # tokens, real and simulated
    moved: tuple[int, int]
    interruptions: int  # kills and drains


class InterruptionError(Struct, frozen=True, kw_only=True):
    """Tokens over all settings with kills and drains, real and simulated."""

    interruptions: int
    twice: tuple[int, int]
    moved: tuple[int, int]

    @property
    def twice_error(self) -> float | None:
        return relative(*self.twice)

    @property
    def moved_error(self) -> float | None:
        return relative(*self.moved)


def relative(real: float, simulated: float) -> float | None:
    """The relative error; None where nothing was measured to compare with."""
    return abs(simulated - real) / real if real else None


def compare_setting(measured: Measured, outcome: Outcome) -> SettingError:
    """Compares one setting. Raises `ValueError` if too few steps can be compared, or not the same ones."""
    name = measured.setting.name
    if len(outcome.steps) != len(measured.steps):
        raise ValueError(f"{name}: {len(measured.steps)} steps were measured and {len(outcome.steps)} simulated")
    real = step_times([step.seconds for step in measured.steps[1:]], name)
    simulated = step_times(simulated_seconds(outcome), name)
    return SettingError(
        setting=name,
        real=real,
        simulated=simulated,
        error=abs(simulated.median - real.median) / real.median,
        twice=(measured.tokens.twice, outcome.tokens.twice),
        moved=(measured.tokens.moved, outcome.tokens.moved),
        interruptions=sum(one.kind in GONE for one in measured.interruptions),
    )


def simulated_seconds(outcome: Outcome) -> list[float]:
    """Returns the seconds from one step's end to the next one's.

    Publication takes every version equally long, so these are the times from one announcement to the next. Openings
    say less: with `max_staleness` above 0, several steps are opened by the first version.
    """
    ends = sorted(step.trained_s for step in outcome.steps)
    return [after - before for before, after in pairwise(ends)]


def step_times(seconds: Sequence[float], what: str) -> StepTimes:
    """Sums up step times. Raises `ValueError` if there is none."""
    if not seconds:
        raise ValueError(f"{what}: one step is too few to compare; two are the least")
    return StepTimes(median=median(seconds), least=min(seconds), most=max(seconds), steps=len(seconds))


def over_interruptions(found: Sequence[SettingError]) -> InterruptionError:
    """Sums tokens over the settings in which workers were killed or drained."""
    disturbed = [one for one in found if one.interruptions]
    return InterruptionError(
        interruptions=sum(one.interruptions for one in disturbed),
        twice=(sum(one.twice[0] for one in disturbed), sum(one.twice[1] for one in disturbed)),
        moved=(sum(one.moved[0] for one in disturbed), sum(one.moved[1] for one in disturbed)),
    )
