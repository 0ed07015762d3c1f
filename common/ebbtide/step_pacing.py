"""Limits how far generation runs ahead of training, and which policy versions may make a step's tokens.

Step s trains the weights after s optimiser steps and yields those after s + 1. So generation for step s may start once
the weights of step s - max_staleness are announced. `versions` maps a step to the version announced first for it: a
resumed trainer that announces the step again changes nothing, so that a restarted driver asks for the same rollouts
with the same bounds.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ebbtide.errors import VersionUnavailable


class VersionBounds(NamedTuple):
    """The versions that may make a rollout's tokens; 0: no bound."""

    minimum: int
    maximum: int


def first_announced(versions: Mapping[int, int], announced: tuple[int, int]) -> Mapping[int, int]:
    """`versions` with `announced` (version, step) added, unless its step is known."""
    version, step = announced
    return versions if step in versions else {**versions, step: version}


def open_steps(versions: Mapping[int, int], *, steps: int, max_staleness: int) -> range:
    """The steps whose groups may be submitted now: a prefix of range(steps), empty before the first version."""
    if not versions:
        return range(0)
    return range(min(steps, max(versions) + max_staleness + 1))


def training_bounds(versions: Mapping[int, int], *, step: int, max_staleness: int) -> VersionBounds:
    """Bounds of the rollouts of `step`, one of the open steps.

    With max_staleness 0 only the step's version makes them. Above 0 there is only a floor, so that generation continues
    across updates: no token is older than max_staleness versions when its step is trained.
    Raises `VersionUnavailable` if the step is not open.
    """
    if max_staleness == 0:
        return pinned(versions, step=step)
    return VersionBounds(_version_of(versions, max(0, step - max_staleness)), 0)


def continued(versions: Mapping[int, int], *, step: int) -> VersionBounds:
    """Bounds of rollouts that begin with the announced `step` and may end in a later one. Raises `VersionUnavailable`
    if it is not announced.
    """
    return VersionBounds(_version_of(versions, step), 0)


def pinned(versions: Mapping[int, int], *, step: int) -> VersionBounds:
    """Bounds that let only the weights of `step` answer, as for an evaluation. Raises `VersionUnavailable`."""
    version = _version_of(versions, step)
    return VersionBounds(version, version)


def evaluation_steps(*, steps: int, every: int) -> tuple[int, ...]:
    """Weights to evaluate, by step: before the first step, every `every` steps (0: none between), after the last."""
    between = range(every, steps, every) if every else ()
    return (0, *between, steps)


def _version_of(versions: Mapping[int, int], step: int) -> int:
    """The version announced for `step`, or for the next announced step if the trainer skipped it."""
    known = [candidate for candidate in versions if candidate >= step]
    if not known:
        raise VersionUnavailable(f"no policy version of step {step} was announced yet; the trainer publishes it")
    return versions[min(known)]
