"""Places queued rollouts in queue order: at the worker that a move chose, else at the worker of the episode's last
turn, else where they will run fastest. Short rollouts prefer borrowed workers, long ones steady workers.

Delayed dispatch and the choice of the shortest queue follow RLBoost (arXiv 2510.19225, Algorithm 2). Unlike there,
rollouts are placed one by one and not by groups, on every event and not by polling, and workers are compared by their
learnt speeds instead of their queue lengths alone.
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
    """How many unstarted rollouts a worker may hold: enough to keep it busy until the next decision, without starving
    others. A worker on which nothing has started takes half its slots at once.
    """
    return max(8, host.slots // 4 if host.running > host.pending else host.slots // 2)


def place(
    queue: Iterable[QueuedRollout],
    hosts: Sequence[HostView],
    homes: Mapping[str, str],
    *,
    pending_limit: Callable[[HostView], int] = pending_limit,
    at_most: int | None = None,
    rest: Callable[[QueuedRollout], float] | None = None,
    borrowable: float = inf,
    now: float = -inf,
) -> list[Placement]:
    """Fill the hosts' free slots from the queue, with `at_most` placements. `homes`: episode -> worker of its last
    turn; `rest`: tokens that a rollout will probably still make; `borrowable`: most further rollouts on borrowed hosts.

    A worker may take a rollout if its version and target are within the rollout's bounds, and one more token fits into
    its context. A rollout that fits nowhere is skipped, so that it blocks no other. A worker with as many pending
    rollouts as `pending_limit` allows gets no more; the rest stays queued for the next free worker.

    A rollout goes to a worker that it avoids only if it avoids all `hosts` that could take it, full ones included. A
    rollout without progress in its last attempt goes only where no other such is pending, so that one that kills
    workers is told from its neighbours. A held worker gets only what no other has room for.

    With `rest`, the places of borrowed hosts go to the rollouts that risk least by a reclaim, among those placed and
    the next in the queue; a displaced rollout takes the other's place, or waits a while if a steady host could take it.
    """
    rooms = _Rooms(hosts, pending_limit, borrowable)
    kinds = queue.bounds() if isinstance(queue, RolloutQueue) else None
    shut: set[VersionBounds] = set()
    places: list[BorrowedPlace] = []
    behind = iter(queue)
    for one in behind:
        if not rooms.open or len(places) == at_most or (kinds is not None and len(shut) == len(kinds)):
            behind = chain((one,), behind)
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
        places = exchanged(places, behind, hosts, rest, now)
    return [Placement(one.rollout_id, host.worker_id) for one, host, _ in places]


def outsized(
    queue: Iterable[QueuedRollout], contexts: Sequence[int], *, manned: float, now: float, grace_s: float
) -> list[QueuedRollout]:
    """Rollouts too long for every attached worker, though one with a longer context had `grace_s` to attach. None
    without a worker. `contexts`: tokens, by worker; `manned`: since when there is a worker.
    """
    longest = max(contexts, default=0)
    if not longest or now - manned < grace_s:
        return []
    return [one for one in queue if one.length >= longest and now - one.since >= grace_s]


class _Room:
    """The places left at a host during a round."""

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
        self.probation += one.no_progress > 0
        self.score = self._score()

    def _score(self) -> tuple[float, float, str]:
        """Predicted rate, in steps of a tenth so that noise decides nothing; then the share of free slots; then the
        name, so that a decision can be repeated. Beyond the plateau all rollouts share its throughput.
        """
        host, load = self.host, self.host.running + self.given + 1
        rate = self.rate * max(host.running + 1, self.plateau) / max(load, self.plateau)
        return _tenths(rate), (host.slots - load + 1) / host.slots, host.worker_id


def _tenths(rate: float) -> float:
    step = 0.1 * 10.0 ** (len(str(int(rate))) - 1)
    return round(rate / step) * step


class _Rooms:
    """The hosts with room, by the version bounds that they serve."""

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
        """Those of `within` that may take `one`: usually all."""
        if one.length < self._context and not one.avoid and not one.no_progress:
            return within
        fit = [room for room in within if one.length < room.host.max_model_len]
        if one.avoid and any(may_take(one, host) and not host.shut for host in self._hosts):
            fit = [room for room in fit if room.host.name not in one.avoid]
        return [room for room in fit if not room.probation] if one.no_progress else fit

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
    """The room, and whether the rollout needs this very one, for its prefix cache or a move."""
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
