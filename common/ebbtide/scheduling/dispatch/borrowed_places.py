"""Gives the places of risky hosts, which are borrowed or often lost, to the rollouts that risk least, among those
placed in a round and the next in the queue. Long rollouts go to steady hosts, or wait for one: they are most likely to
be interrupted, and cost most to move.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from ebbtide.scheduling.dispatch.host_view import HostView, may_take
from ebbtide.scheduling.dispatch.reclaim_risk import risk_s
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout

#: Queued rollouts after the last placed one that are considered.
_BEHIND: Final = 32
#: A displaced rollout waits no longer than this for a steady worker: the longest rollouts decide when a step ends.
_PATIENCE_S: Final = 10.0
#: A rollout takes another's place if its risk is below this share of the other's, by at least so many seconds.
_LESS: Final = 0.8
_LESS_S: Final = 0.05


class BorrowedPlace(NamedTuple):
    one: QueuedRollout
    host: HostView
    bound: bool  # it needs this very host, for its prefix cache or a move


def exchanged(
    places: Sequence[BorrowedPlace],
    behind: Iterator[QueuedRollout],
    hosts: Sequence[HostView],
    rest: Callable[[QueuedRollout], float],
    now: float,
) -> list[BorrowedPlace]:
    """The places, with those on risky hosts given to the least at risk. Each host gets as many as before."""
    made = list(places)
    lent = [at for at, place in enumerate(places) if place.host.risky and _free(place)]
    if not lent:
        return made
    common = places[lent[0]].host
    steady = [host for host in hosts if not host.risky and not host.shut]
    risks = {at: _risk_s(places[at].one, common, rest) for at in lent}
    others: list[tuple[float, int, QueuedRollout]] = [
        (_risk_s(place.one, common, rest), at, place.one)
        for at, place in enumerate(places)
        if not place.host.risky and _free(place)
    ]
    if steady:
        first = len(places)
        waiting = (one for one in islice(behind, _BEHIND) if not one.no_progress and not one.prefer)
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
    """The rollout (index of `others`) to take the place, if worth it. `steady`: where the present one may wait."""
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
    return not place.bound and not place.one.no_progress


def _risk_s(one: QueuedRollout, host: HostView, rest: Callable[[QueuedRollout], float]) -> float:
    rate, prefill = host.rate, host.prefill
    return risk_s(one.length, rest(one), rate=rate, spell_s=host.spell_s, prefill=prefill, found_s=host.found_s)
