"""Chooses each worker's policy version: the newest, with two exceptions.

A worker that holds rollouts with a ceiling below the newest stays until they end. While rollouts with such a ceiling
wait, one worker per ceiling stays at, or returns to, a version that may serve them.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.dispatch.host_view import admits
from ebbtide.scheduling.steps.step_pacing import VersionBounds

#: Refusals per worker of another architecture's weights before the run fails: time for a fitting worker to attach.
_REFUSALS: Final = 3


class ServedVersion(Struct, frozen=True, kw_only=True):
    """A worker of the run."""

    worker_id: str
    installed: int  # version of this run; 0: none
    running: int
    held: frozenset[VersionBounds] = frozenset()  # bounds of its rollouts


def target_versions(
    workers: Sequence[ServedVersion], waiting: Iterable[VersionBounds], announced: Iterable[int]
) -> dict[str, int]:
    """Each worker's version, of the available ones (`announced`). Empty before the first."""
    versions = sorted(announced)
    if not versions:
        return {}
    newest = versions[-1]
    targets = {one.worker_id: newest for one in workers}
    for one in workers:
        if not all(admits(bounds, newest) for bounds in one.held):
            targets[one.worker_id] = one.installed
    pinned: set[str] = set()
    for bounds in sorted({b for b in waiting if b.maximum and b.maximum < newest}, key=lambda b: b.maximum):
        if any(admits(bounds, targets[worker_id]) for worker_id in pinned):
            continue
        keeper = _keeper([one for one in workers if one.worker_id not in pinned], bounds)
        within = [version for version in versions if admits(bounds, version)]
        if keeper is None or not within:
            continue
        pinned.add(keeper.worker_id)
        targets[keeper.worker_id] = keeper.installed if admits(bounds, keeper.installed) else within[-1]
    return targets


def _keeper(workers: Sequence[ServedVersion], bounds: VersionBounds) -> ServedVersion | None:
    """The worker that should serve `bounds`: one with such a version, else the idlest whose rollouts allow a change."""
    having = [one for one in workers if admits(bounds, one.installed)]
    if having:
        return min(having, key=lambda one: (one.running, one.worker_id))
    movable = [one for one in workers if all(admits(held, bounds.maximum) for held in one.held)]
    return min(movable, key=lambda one: (one.running, one.worker_id), default=None)


def unservable(bounds: VersionBounds, announced: Iterable[int]) -> bool:
    """Whether no version within `bounds` is available any more, since all later ones are above the ceiling."""
    versions = list(announced)
    newest = max(versions, default=0)
    return bool(bounds.maximum) and bounds.maximum < newest and not any(admits(bounds, v) for v in versions)


def fits_nowhere(architecture: str, attached: Sequence[str], refusals: int) -> bool:
    """Whether no attached worker can install weights of `architecture`. `attached`: their models' architectures;
    `refusals`: how often such weights were refused.
    """
    return bool(attached) and architecture not in attached and refusals >= _REFUSALS * len(attached)
