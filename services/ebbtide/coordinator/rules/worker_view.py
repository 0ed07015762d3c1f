"""Describes workers as decisions see them, and checks which rollouts each may take."""

from math import inf

from msgspec import Struct

from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.step_pacing import VersionBounds


class WorkerView(Struct, frozen=True, kw_only=True, gc=False):
    """A worker that serves the run."""

    session_id: str  # the key that a placement names
    slots: int
    running: int  # rollouts assigned to it
    installed: int  # version
    target: int  # version that it is changing to, or `installed`
    max_model_len: int
    worker_id: str = ""  # its own, which outlives its session
    pending: int = 0  # of `running`, those that have not started
    unread: int = 0  # tokens of these, which it has to read first
    probation: int = 0  # of `pending`, those whose last attempt made no progress
    rate: float = 0.0  # tokens/s of each of its rollouts with one more, while its host lends itself
    plateau: int = 0  # number of rollouts up to which `rate` holds; 0: not known, taken for typical
    prefill: float = 0.0  # tokens/s that it reads of prompts, a typical one if that is not known; 0.0: no one's is
    held: bool = False  # makes no tokens now: takes only what no other worker can
    shut: bool = False  # takes nothing
    borrowed: bool = False  # its host also serves users
    share: float = 1.0  # of the time, in which the host lends itself
    spell_s: float = inf  # for how long it will lend itself now, on average
    scores: bool = False  # its engine scores prompts
    min_p: bool = False  # its engine samples with `min_p`


def admits(bounds: VersionBounds, version: int) -> bool:
    """Whether a token made by `version` is within `bounds`. Version 0 means none, and never is."""
    return version >= max(1, bounds.minimum) and (not bounds.maximum or version <= bounds.maximum)


def serves(bounds: VersionBounds, worker: WorkerView) -> bool:
    """Whether the worker's version and its target are within `bounds`."""
    return admits(bounds, worker.installed) and admits(bounds, worker.target)


def may_take(one: QueuedRollout, worker: WorkerView) -> bool:
    """Whether the worker could take the rollout if it had room, and the rollout does not avoid it."""
    return serves(one.bounds, worker) and fits(one, worker) and worker.worker_id not in one.avoid


def fits(one: QueuedRollout, worker: WorkerView) -> bool:
    """Whether the worker's engine can do what the rollout asks for."""
    able = (worker.scores or not one.scores) and (worker.min_p or not one.min_p)
    return able and one.length < worker.max_model_len
