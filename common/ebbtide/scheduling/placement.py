"""Which queued rollout goes to which worker: in line order, to the worker of the episode's last turn, else to the
emptiest.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ebbtide.scheduling.line import Waiting
from ebbtide.scheduling.pacing import Bounds


class Host(Struct, frozen=True, kw_only=True):
    """A worker that serves the run. It has `installed` and is on its way to `target`, which may be the same version."""

    worker_id: str
    slots: int
    running: int
    installed: int
    target: int
    max_model_len: int


class Placement(NamedTuple):
    rollout_id: str
    worker_id: str


def place(line: Iterable[Waiting], hosts: Sequence[Host], homes: Mapping[str, str]) -> list[Placement]:
    """Fill the hosts' free slots from the line. `homes`: episode -> worker of its last turn.

    A worker may take a rollout if every version that it has on its way is within the rollout's bounds, and one more
    token fits into its context. A rollout that fits nowhere is passed over, so that it holds up nobody.
    """
    free = {host.worker_id: host.slots - host.running for host in hosts if host.slots > host.running}
    open_hosts = {host.worker_id: host for host in hosts if host.worker_id in free}
    passed: set[tuple[Bounds, bool]] = set()
    placements = []
    for one in line:
        if not free:
            break
        kind = (one.bounds, one.length < min(host.max_model_len for host in open_hosts.values()))
        if kind in passed:
            continue
        fit = [worker_id for worker_id in free if _fits(one, open_hosts[worker_id])]
        if not fit:
            if kind[1]:  # only its bounds can be why, and they shut out all like it
                passed.add(kind)
            continue
        home = homes.get(one.episode_id)
        chosen = home if home in fit else max(fit, key=lambda worker_id: _room(free, open_hosts[worker_id]))
        placements.append(Placement(one.rollout_id, chosen))
        free[chosen] -= 1
        if not free[chosen]:
            del free[chosen], open_hosts[chosen]
    return placements


def outsized(
    line: Iterable[Waiting], contexts: Sequence[int], *, manned: float, now: float, grace_s: float
) -> list[Waiting]:
    """Rollouts that no context attached leaves room for, though a worker with a longer one had `grace_s` to come.

    `contexts`: tokens, of each worker; `manned`: since when there is one. Without a worker nothing is known.
    """
    longest = max(contexts, default=0)
    if not longest or now - manned < grace_s:
        return []
    return [one for one in line if one.length >= longest and now - one.since >= grace_s]


def _fits(one: Waiting, host: Host) -> bool:
    within = admits(one.bounds, host.installed) and admits(one.bounds, host.target)
    return within and one.length < host.max_model_len


def _room(free: Mapping[str, int], host: Host) -> tuple[float, str]:
    """The share of the worker's slots that is free; ties by name, so that a decision can be repeated."""
    return free[host.worker_id] / host.slots, host.worker_id


def admits(bounds: Bounds, version: int) -> bool:
    """Whether a token made by `version` is within `bounds`. Version 0 is none, and within nothing."""
    return version >= max(1, bounds.minimum) and (not bounds.maximum or version <= bounds.maximum)
