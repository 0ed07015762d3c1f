"""The parts of the benchmark: what each measures or computes, and which figures it brings.

A part that cannot run raises; its figures are then missing, with the reason beside them.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.simulator.comparison import (
    LEAST_INTERRUPTIONS,
    InterruptionError,
    SettingError,
    compare_setting,
    over_interruptions,
)
from benchmarks.simulator.published.__main__ import PAPERS, print_points
from benchmarks.simulator.published.published_point import figures as point_figures
from benchmarks.simulator.published.published_point import judge
from benchmarks.simulator.real_settings import RealSession, chosen, measure, read_session
from benchmarks.simulator.simulated_side import SessionSimulator
from benchmarks.simulator.speed import day_of_32_workers, half_hour_of_1000_workers
from ebbtide.errors import InvalidRequest

Tell = Callable[[str], None]


class PartOptions(Struct, frozen=True, kw_only=True):
    quick: bool
    seed: int
    measured: Path | None  # a session's file, to be judged in place of a new session
    real_out: Path  # where a new session is written
    tell: Tell


class PartResult(Struct, frozen=True, kw_only=True):
    """`figures` are among those that readers of the file rely on; `details` is all that the part found."""

    figures: dict[str, float | None]
    details: Any
    table: list[tuple[str, ...]] = []  # a head, then rows
    failures: list[str] = []  # with any, the part has failed, though it found something


async def real(options: PartOptions) -> PartResult:
    """Compares simulated with real step times, over settings. Its figures are null unless all settings are judged."""
    session = await _session(options)
    found, failures = _judged(session)
    disturbed = over_interruptions(found)
    errors = [one.error for one in found]
    whole = bool(errors) and not failures
    return PartResult(
        figures={
            "error_vs_real_median": median(errors) if whole else None,
            "error_vs_real_worst": max(errors) if whole else None,
        },
        details={
            "settings": msgspec.to_builtins(found),
            "interruptions": msgspec.to_builtins(disturbed)
            | {"twice_error": disturbed.twice_error, "moved_error": disturbed.moved_error},
            "enough_interruptions": disturbed.interruptions >= LEAST_INTERRUPTIONS,
            "conditions": session.conditions,
        },
        table=[*_settings_table(found), _interruptions_row(disturbed)],
        failures=failures or ([] if found else ["the session has no setting"]),
    )


def _judged(session: RealSession) -> tuple[list[SettingError], list[str]]:
    """What the settings' comparison found, and why others cannot be compared."""
    found: list[SettingError] = []
    failures: list[str] = []
    simulator = SessionSimulator(session)
    for measured in session.settings:
        try:
            found.append(compare_setting(measured, simulator.setting(measured)))
        except (InvalidRequest, ValueError) as error:  # the other settings' errors are worth having
            failures.append(f"{measured.setting.name}: {error}")
    return found, failures


async def _session(options: PartOptions) -> RealSession:
    if options.measured is not None:
        return read_session(options.measured)
    settings = chosen(options.quick, (), None)
    return await measure(settings, quick=options.quick, seed=options.seed, out=options.real_out, tell=options.tell)


def _settings_table(found: list[SettingError]) -> list[tuple[str, ...]]:
    head = ("setting", "real step (least to most), s", "simulated", "error", "twice", "moved")
    return [head, *(_settings_row(one) for one in found)]


def _settings_row(one: SettingError) -> tuple[str, ...]:
    times = (f"{of.median:.2f} ({of.least:.2f} to {of.most:.2f})" for of in (one.real, one.simulated))
    return one.setting, *times, f"{one.error:.1%}", _pair(one.twice), _pair(one.moved)


def _interruptions_row(found: InterruptionError) -> tuple[str, ...]:
    counted = f"over {found.interruptions} kills and drains"
    return counted, "", "", "", _pair(found.twice), _pair(found.moved)


def _pair(tokens: tuple[int, int]) -> str:
    return f"{tokens[0]:,} / {tokens[1]:,}"


async def published(_: PartOptions) -> PartResult:
    """Compares simulated with published points that no setting was fitted to."""
    judged = [one for paper in PAPERS.values() for one in judge(paper)]
    print_points(judged)
    found = point_figures(judged)
    points = [{"paper": one.paper, "point": one.point.what, "simulated": one.simulated} for one in judged]
    return PartResult(figures={name: found[name] for name in FIGURES["published"]}, details=found | {"points": points})


async def speed(options: PartOptions) -> PartResult:
    """Times two large simulations. They are no part of a short benchmark."""
    if options.quick:
        return PartResult(figures=dict.fromkeys(FIGURES["speed"]), details="not part of a short benchmark")
    day, half_hour = day_of_32_workers(), half_hour_of_1000_workers()
    return PartResult(
        figures={"day_of_32_workers_s": day.seconds, "half_hour_of_1000_workers_s": half_hour.seconds},
        details={
            "day_of_32_workers": msgspec.to_builtins(day),
            "half_hour_of_1000_workers": msgspec.to_builtins(half_hour),
        },
    )


#: Part -> its figures. Each is in the file, with null where it was not measured.
FIGURES: Final = {
    "real": ("error_vs_real_median", "error_vs_real_worst"),
    "published": ("error_vs_published_median", "error_vs_published_worst", "published_points_left_out_share"),
    "speed": ("day_of_32_workers_s", "half_hour_of_1000_workers_s"),
}
PARTS: Final = {"real": real, "published": published, "speed": speed}
