"""Which run each worker serves. A worker holds the weights of one run at a time, so runs share workers, not slots.

Runs with work share the fleet evenly. A worker stays where it is while its run may keep it; where runs outnumber
workers, each worker goes on after `slice_s` to the run that has waited longest.
"""

from collections.abc import Sequence

from msgspec import Struct


class Demand(Struct, frozen=True, kw_only=True):
    """A run with queued or running rollouts and a version to make them with. `served`: when it last had a worker."""

    run_id: str
    served: float


class Post(Struct, frozen=True, kw_only=True):
    """A worker: the run it serves ("" for none) since when, and runs whose weights it could not install."""

    worker_id: str
    run_id: str
    since: float
    running: int
    unfit: frozenset[str] = frozenset()


def allot(posts: Sequence[Post], demands: Sequence[Demand], *, now: float, slice_s: float) -> dict[str, str]:
    """Run of each worker; one that no run wants stays where it is."""
    wanted = {demand.run_id: demand for demand in demands}
    runs = {post.worker_id: post.run_id for post in posts}
    if not wanted:
        return runs
    held: dict[str, list[Post]] = {run_id: [] for run_id in wanted}
    for post in posts:
        if post.run_id in held and post.run_id not in post.unfit:
            held[post.run_id].append(post)
    keep = _kept(held, len(posts), now, slice_s)
    free = [post for post in posts if post.worker_id not in keep]
    count = {run_id: sum(keep.get(p.worker_id) == run_id for p in posts) for run_id in wanted}
    for post in sorted(free, key=lambda one: (one.running, one.worker_id)):
        fit = [demand for demand in wanted.values() if demand.run_id not in post.unfit]
        if fit:
            chosen = min(fit, key=lambda one: (count[one.run_id], one.served, one.run_id))
            count[chosen.run_id] += 1
            keep[post.worker_id] = chosen.run_id
    return runs | keep


def _kept(held: dict[str, list[Post]], workers: int, now: float, slice_s: float) -> dict[str, str]:
    """Worker -> run of the workers that stay: an even share of each run, rounded up for those that hold the most."""
    share, extra = divmod(workers, len(held))
    keep: dict[str, str] = {}
    waiting = any(not posts for posts in held.values())
    for run_id, posts in sorted(held.items(), key=lambda item: (-len(item[1]), item[0])):
        stay = sorted(posts, key=lambda one: (-one.running, one.worker_id))
        if not share and waiting:  # fewer workers than runs: those whose time is up go on
            stay = [post for post in stay if now - post.since < slice_s]
        allowed = share + (1 if extra > 0 else 0)
        extra -= 1 if len(stay) > share else 0
        keep.update({post.worker_id: run_id for post in stay[:allowed]})
    return keep
