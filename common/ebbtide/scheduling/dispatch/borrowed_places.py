"""Who gets the places of borrowed hosts: of those that are given places in a round, and some that wait behind them, the
ones that risk least by a reclaim. Long work goes to steady hosts, or waits for one: it would be the dearest to move.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from ebbtide.scheduling.dispatch.host_view import HostView, may_take
from ebbtide.scheduling.dispatch.reclaim_risk import risk_s
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout

#: So many of those that wait behind the last one placed are looked at for a borrowed worker's places.
_BEHIND: Final = 32
#: Who gives way waits for a steady worker's next place, but no longer than this: the longest decide when a step ends.
_PATIENCE_S: Final = 10.0
#: Who risks less than this share of what another does, by at least so many seconds, takes its place.
_LESS: Final = 0.8
_LESS_S: Final = 0.05


class BorrowedPlace(NamedTuple):
    """`bound`: it goes to this very host for the sake of what it has there."""

    one: QueuedRollout
    host: HostView
    bound: bool


def exchanged(
    places: Sequence[BorrowedPlace],
    behind: Iterator[QueuedRollout],
    hosts: Sequence[HostView],
    rest: Callable[[QueuedRollout], float],
    now: float,
) -> list[BorrowedPlace]:
    """The places, with those on borrowed hosts given to who risks least there. Each host gets as many as before."""
    made = list(places)
    lent = [at for at, place in enumerate(places) if place.host.borrowed and _free(place)]
    if not lent:
        return made
    common = places[lent[0]].host
    steady = [host for host in hosts if not host.borrowed and not host.shut]
    risks = {at: _risk_s(places[at].one, common, rest) for at in lent}
    others: list[tuple[float, int, QueuedRollout]] = [
        (_risk_s(place.one, common, rest), at, place.one)
        for at, place in enumerate(places)
        if not place.host.borrowed and _free(place)
    ]
    if steady:
        first = len(places)
        waiting = (one for one in islice(behind, _BEHIND) if not one.barren and not one.prefer)
        others += [(_risk_s(one, common, rest), first + number, one) for number, one in enumerate(waiting)]
    others.sort(key=lambda item: item[:2])
    for at in sorted(lent, key=lambda at: (-risks[at], at)):
        patient = now - places[at].one.since < _PATIENCE_S
        found = _taker(places[at], risks[at], others, places, steady if patient else [])
        if found is None:
            continue
        _, number, one = others.pop(found)
        made[at] = BorrowedPlace(one, places[at].host, bound=False)
        if number < len(places):
            made[number] = BorrowedPlace(places[at].one, places[number].host, bound=False)
    return made


def _taker(
    place: BorrowedPlace,
    risk: float,
    others: Sequence[tuple[float, int, QueuedRollout]],
    places: Sequence[BorrowedPlace],
    steady: Sequence[HostView],
) -> int | None:
    """Who is to have the place instead: the least at risk of `others` that may, if that is worth it. `steady`: hosts
    for which who has it now may wait.
    """
    for found, (less, number, one) in enumerate(others):
        if less > _LESS * risk or risk - less < _LESS_S:
            return None
        if not may_take(one, place.host):
            continue
        if number < len(places):
            if may_take(place.one, places[number].host):
                return found
        elif one.priority == place.one.priority and any(may_take(place.one, host) for host in steady):
            return found
    return None


def _free(place: BorrowedPlace) -> bool:
    return not place.bound and not place.one.barren


def _risk_s(one: QueuedRollout, host: HostView, rest: Callable[[QueuedRollout], float]) -> float:
    return risk_s(one.length, rest(one), rate=host.rate, spell_s=host.spell_s)
