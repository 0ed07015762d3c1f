"""Which queued rollout goes to which worker: in line order, to the worker that a move chose, else to that of the
episode's last turn, else to where it will run fastest. Where some go to borrowed workers and some do not, short work
and cheap moves go to the borrowed ones, long work to the steady ones.

Delayed dispatch and the choice of the shortest queue follow RLBoost (arXiv 2510.19225, Algorithm 2). What differs: it
decides per rollout and not per group, on every event and not by polling, and compares workers by the speed learnt of
each instead of by the length of their queues alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from ebbtide.scheduling.dispatch.borrowed_places import BorrowedPlace, exchanged
from ebbtide.scheduling.dispatch.host_view import HostView, may_take, serves
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.scheduling.steps.step_pacing import VersionBounds


class Placement(NamedTuple):
    rollout_id: str
    worker_id: str


def pending_limit(host: HostView) -> int:
    """How many rollouts that have not started a worker may hold: enough to keep it busy until the next decision, and
    not so many that others lack them. One on which nothing has started takes half its slots at once.
    """
    return max(8, host.slots // 4 if host.running > host.pending else host.slots // 2)


def place(
    line: Iterable[QueuedRollout],
    hosts: Sequence[HostView],
    homes: Mapping[str, str],
    *,
    pending_limit: Callable[[HostView], int] = pending_limit,
    at_most: int | None = None,
    rest: Callable[[QueuedRollout], float] | None = None,
    borrowable: float = inf,
    now: float = -inf,
) -> list[Placement]:
    """Fill the hosts' free slots from the line, with `at_most` placements. `homes`: episode -> worker of its last turn;
    `rest`: tokens that a rollout will probably still make; `borrowable`: so many more at most on borrowed hosts.

    A worker may take a rollout if every version that it has on its way is within the rollout's bounds, and one more
    token fits into its context. A rollout that fits nowhere is passed over, so that it holds up nobody. A worker that
    holds as many pending rollouts as `pending_limit` allows gets no more: the rest waits in line, for whoever is next.

    A rollout never goes to a worker that it is to avoid, unless it must avoid all of `hosts` that could take it, the
    full ones among them. One whose last attempt was barren goes only to where no other such is pending, so that a
    rollout that kills workers is told from its neighbours. One that is held gets what no other has room for.

    With `rest`, the places of borrowed hosts go to those who risk least by a reclaim, of all that are placed and some
    behind them; who gives way takes the other's place, or waits a while if a steady host could take it.
    """
    rooms = _Rooms(hosts, pending_limit, borrowable)
    kinds = line.bounds() if isinstance(line, RolloutQueue) else None
    shut: set[VersionBounds] = set()
    places: list[BorrowedPlace] = []
    queue = iter(line)
    for one in queue:
        if not rooms.open or len(places) == at_most or (kinds is not None and len(shut) == len(kinds)):
            queue = chain((one,), queue)
            break
        if one.bounds in shut:
            continue
        within = rooms.within(one.bounds)
        if not within:
            shut.add(one.bounds)
            continue
        fit = rooms.fit(one, within)
        if fit:
            room, bound = _chosen(one, rooms.at_work(fit), homes)
            places.append(BorrowedPlace(one, room.host, bound))
            rooms.take(room, one)
    if rest is not None and any(place.host.borrowed for place in places):
        places = exchanged(places, queue, hosts, rest, now)
    return [Placement(one.rollout_id, host.worker_id) for one, host, _ in places]


def outsized(
    line: Iterable[QueuedRollout], contexts: Sequence[int], *, manned: float, now: float, grace_s: float
) -> list[QueuedRollout]:
    """Rollouts that no context attached leaves room for, though a worker with a longer one had `grace_s` to come.

    `contexts`: tokens, of each worker; `manned`: since when there is one. Without a worker nothing is known.
    """
    longest = max(contexts, default=0)
    if not longest or now - manned < grace_s:
        return []
    return [one for one in line if one.length >= longest and now - one.since >= grace_s]


class _Room:
    """What is left of a host while places are given away."""

    def __init__(self, host: HostView, limit: int, rate: float, plateau: float) -> None:
        self.host = host
        self.rate, self.plateau = (host.rate or rate) * host.share, host.plateau or plateau
        self.given = 0
        self.left = 0 if host.shut else min(host.slots - host.running, limit - host.pending)
        self.probation = host.probation
        self.score = self._score()

    def take(self, one: QueuedRollout) -> None:
        self.given += 1
        self.left -= 1
        self.probation += one.barren > 0
        self.score = self._score()

    def _score(self) -> tuple[float, float, str]:
        """Predicted rate, in steps of a tenth so that noise decides nothing; then the share of its slots that is free;
        ties by name, so that a decision can be repeated. Beyond the plateau all that run share what it makes.
        """
        host, load = self.host, self.host.running + self.given + 1
        rate = self.rate * max(host.running + 1, self.plateau) / max(load, self.plateau)
        return _tenths(rate), (host.slots - load + 1) / host.slots, host.worker_id


def _tenths(rate: float) -> float:
    step = 0.1 * 10.0 ** (len(str(int(rate))) - 1)
    return round(rate / step) * step


class _Rooms:
    """The hosts with room, by the bounds that they serve."""

    def __init__(self, hosts: Sequence[HostView], limit: Callable[[HostView], int], borrowable: float) -> None:
        self._hosts = hosts
        self._borrowable = borrowable
        rate = median([host.rate for host in hosts if host.rate] or [0.0])
        plateau = median([host.plateau for host in hosts if host.plateau] or [0])
        self.open = [room for host in hosts if (room := _Room(host, limit(host), rate, plateau)).left > 0]
        self._within: dict[VersionBounds, list[_Room]] = {}
        if self._borrowable <= 0:
            self._shut_borrowed()
        self._context = min((host.max_model_len for host in hosts), default=0)
        self._held = any(room.host.held for room in self.open)

    def within(self, bounds: VersionBounds) -> list[_Room]:
        found = self._within.get(bounds)
        if found is None:
            found = self._within[bounds] = [room for room in self.open if serves(bounds, room.host)]
        return found

    def fit(self, one: QueuedRollout, within: list[_Room]) -> list[_Room]:
        """Those of `within` that may take `one`: nearly always all."""
        if one.length < self._context and not one.avoid and not one.barren:
            return within
        fit = [room for room in within if one.length < room.host.max_model_len]
        if one.avoid and any(may_take(one, host) and not host.shut for host in self._hosts):
            fit = [room for room in fit if room.host.name not in one.avoid]
        return [room for room in fit if not room.probation] if one.barren else fit

    def at_work(self, fit: list[_Room]) -> list[_Room]:
        """Those that are not held; all of them if all are."""
        return ([room for room in fit if not room.host.held] or fit) if self._held else fit

    def take(self, room: _Room, one: QueuedRollout) -> None:
        room.take(one)
        if room.left <= 0:
            self._shut(room)
        if room.host.borrowed:
            self._borrowable -= 1
            if self._borrowable <= 0:
                self._shut_borrowed()

    def _shut(self, room: _Room) -> None:
        self.open.remove(room)
        for rooms in self._within.values():
            if room in rooms:
                rooms.remove(room)

    def _shut_borrowed(self) -> None:
        for room in [room for room in self.open if room.host.borrowed]:
            self._shut(room)


def _chosen(one: QueuedRollout, fit: list[_Room], homes: Mapping[str, str]) -> tuple[_Room, bool]:
    """The room, and whether it is for the sake of what the rollout has, or was promised, there."""
    if one.prefer:
        for room in fit:
            if one.prefer in (room.host.worker_id, room.host.name):
                return room, True
    home = homes.get(one.episode_id)
    if home is not None:
        for room in fit:
            if room.host.worker_id == home:
                return room, True
    return max(fit, key=attrgetter("score")), False
