"""Gives the longest of the rollouts that are placed in one round to the fastest of their workers.

A step ends with its last rollout, so a slow worker gets no long work where a faster one has a place: of two rollouts
that change places, the later end comes sooner. Only clear differences count: expected lengths are means of wide
distributions, and rollouts of which nothing is known yet all look alike.
"""

from collections.abc import Callable, Sequence
from typing import Final

from ebbtide.scheduling.dispatch.borrowed_places import BorrowedPlace
from ebbtide.scheduling.dispatch.host_view import HostView, may_take
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout

#: A worker is faster, and a rollout longer, if it is so by this factor.
_CLEARLY: Final = 1.25


def matched(places: Sequence[BorrowedPlace], rest: Callable[[QueuedRollout], float]) -> list[BorrowedPlace]:
    """The places, where longer rollouts have taken those of shorter ones at faster workers. Each worker gets as many
    as before. `rest`: tokens that a rollout will probably still make.

    Rollouts that need their very worker stay, and interactive ones.
    """
    made = list(places)
    free = [at for at, place in enumerate(places) if _free(place)]
    speeds = {at: _speed(places[at].host) for at in free}
    if not free or max(speeds.values()) <= _CLEARLY * min(speeds.values()):
        return made
    rests = {at: rest(places[at].one) for at in free}
    slow = sorted(free, key=lambda at: (-rests[at], at))
    short = sorted(free, key=lambda at: (rests[at], at))
    moved = set[int]()
    for at in slow:
        if at in moved:
            continue
        for other in short:
            if rests[at] <= _CLEARLY * rests[other]:
                break
            if other in moved or speeds[other] <= _CLEARLY * speeds[at]:
                continue
            if may_take(places[at].one, places[other].host) and may_take(places[other].one, places[at].host):
                made[at] = BorrowedPlace(places[other].one, places[at].host, bound=False)
                made[other] = BorrowedPlace(places[at].one, places[other].host, bound=False)
                moved |= {at, other}
                break
    return made


def _free(place: BorrowedPlace) -> bool:
    one = place.one
    return not (place.bound or one.no_progress or one.interactive)


def _speed(host: HostView) -> float:
    return host.rate * host.share
