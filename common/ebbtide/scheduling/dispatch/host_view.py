"""Workers as decisions see them, and which rollouts each may take."""

from math import inf

from msgspec import Struct

from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout
from ebbtide.scheduling.steps.step_pacing import VersionBounds


class HostView(Struct, frozen=True, kw_only=True):
    """A worker that serves the run. It has `installed` and is on its way to `target`, which may be the same version.

    `worker_id` is the key that a placement names; `name` is the worker's own. `running`: all that it was given,
    `pending`: of those, the ones that have not started; `probation`: of those, the ones whose last attempt was barren.
    `rate`: tokens/s that each of its rollouts would make with one more, `plateau`: up to how many rollouts that holds
    (0: not known, taken for typical). `held`: it makes no tokens now, and takes only what nobody else can; `shut`: it
    takes nothing at all. `borrowed`: its host, which serves users, lends itself for a `share` of the time, and now for
    another `spell_s` on average; `rate` is that while it does.
    """

    worker_id: str
    slots: int
    running: int
    installed: int
    target: int
    max_model_len: int
    name: str = ""
    pending: int = 0
    probation: int = 0
    rate: float = 0.0
    plateau: int = 0
    held: bool = False
    shut: bool = False
    borrowed: bool = False
    share: float = 1.0
    spell_s: float = inf


def admits(bounds: VersionBounds, version: int) -> bool:
    """Whether a token made by `version` is within `bounds`. Version 0 is none, and within nothing."""
    return version >= max(1, bounds.minimum) and (not bounds.maximum or version <= bounds.maximum)


def serves(bounds: VersionBounds, host: HostView) -> bool:
    """Whether all versions that the worker has on its way are within `bounds`."""
    return admits(bounds, host.installed) and admits(bounds, host.target)


def may_take(one: QueuedRollout, host: HostView) -> bool:
    """Whether the worker could take the rollout if it had room, and is none that it avoids."""
    return serves(one.bounds, host) and one.length < host.max_model_len and host.name not in one.avoid
