"""Places queued rollouts in queue order: at the worker that a move chose, else by what workers' caches have of the
episode (`turn_routing.py`), else where they will run fastest. Long rollouts prefer steady workers to those
that are borrowed.

After a loss what is read again is the cost. Such rollouts are spread by what each engine has still to read, those with
most tokens to come first; where a sibling runs, its prompt need not be read (`siblings`).

Delayed dispatch and the choice of the shortest queue follow RLBoost (arXiv 2510.19225, Algorithm 2). Unlike there,
rollouts are placed one by one and not by groups, on every event and not by polling, and workers are compared by their
learnt speeds instead of their queue lengths alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import inf
from operator import attrgetter
from statistics import median
from typing import Final, NamedTuple, TypeAlias

from ebbtide.coordinator.rules.host_view import HostView, fits, may_take, serves
from ebbtide.coordinator.rules.move_costs import COSTS, MoveCosts, risk_s
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.coordinator.rules.turn_routing import TERMS, Prefixes, TurnRouter, TurnTerms
from ebbtide.scheduling.steps.step_pacing import VersionBounds
from ebbtide.types.end_cause import EndCause
from ebbtide.types.text_bounds import MAX_EVENT_BYTES, shortened


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
    prefixes: Prefixes,
    *,
    pending_limit: Callable[[HostView], int] = pending_limit,
    at_most: int | None = None,
    rest: Callable[[QueuedRollout], float] | None = None,
    borrowable: float = inf,
    batch_slots: float = inf,
    now: float = -inf,
    costs: MoveCosts = COSTS,
    terms: TurnTerms = TERMS,
    siblings: Callable[[QueuedRollout], Collection[str]] = lambda _: (),
) -> list[Placement]:
    """Fill the hosts' free slots from the queue, with `at_most` placements. `prefixes`: what hosts have cached; `rest`:
    tokens that a rollout will probably still make; `borrowable`: most further rollouts on borrowed hosts;
    `batch_slots`: most placements of others than interactive rollouts; `siblings`: the hosts that run samples of a
    rollout's group.

    A worker may take a rollout if its version and target are within the rollout's bounds, one more token fits into its
    context, and its engine can do what the rollout asks for. A rollout that fits nowhere, or waits for
    the worker with its prefix, blocks no other. A worker with as many pending rollouts as `pending_limit` allows gets
    no more; the rest stays queued for the next free worker.

    A rollout goes to a worker that it avoids only if it avoids all `hosts` that could take it, full ones included. A
    rollout without progress in its last attempt goes only where no other such is pending, so that one that kills
    workers is told from its neighbours. A held worker gets only what no other has room for.

    With `rest`, a rollout prefers hosts whose context has room for all of it. Then the places of borrowed hosts go to
    the rollouts that risk least by a reclaim, among those placed and the next in the queue; a displaced rollout takes
    the other's place, or waits a while if a steady host could take it.
    """
    router = TurnRouter(prefixes, hosts, rest=rest, now=now, costs=costs, terms=terms)
    rooms = _Rooms(hosts, pending_limit, borrowable, router, siblings, costs, rest)
    kinds = len(queue.bounds()) if isinstance(queue, RolloutQueue) else None
    filling = _Filling(rooms, kinds=kinds, at_most=at_most, batch_slots=batch_slots)
    behind = filling.fill(iter(queue))
    if filling.keeps and isinstance(queue, RolloutQueue):
        placed = {place.one.rollout_id for place in filling.places}
        filling.fill(one for one in queue.interactive() if one.rollout_id not in placed)
    places = filling.places
    if rest is not None:
        if any(place.host.borrowed for place in places):
            places = exchanged(places, behind, hosts, rest, now)
        places.sort(key=lambda place: _urgency(place.one, rest))
    return [Placement(one.rollout_id, host.worker_id) for one, host, _ in places]


def _urgency(one: QueuedRollout, rest: Callable[[QueuedRollout], float]) -> float:
    """In which order workers get what was placed, the least first: engines read in the order of arrival. Interactive
    rollouts, then those that are read again, by what they have still to make, then new ones.
    """
    return -inf if one.interactive else -rest(one) if one.made else 0.0


class _Filling:
    """The placements of one round, in the order of the queue."""

    def __init__(self, rooms: "_Rooms", *, kinds: int | None, at_most: int | None, batch_slots: float) -> None:
        """`kinds`: distinct bounds in the queue, if known."""
        self._rooms = rooms
        self._kinds, self._at_most, self._batch_left = kinds, at_most, batch_slots
        self._shut: set[VersionBounds] = set()
        self.places: list[BorrowedPlace] = []

    @property
    def keeps(self) -> bool:
        """Whether what is left is for interactive rollouts alone."""
        return self._batch_left <= 0

    def fill(self, queue: Iterator[QueuedRollout]) -> Iterator[QueuedRollout]:
        """Place what fits. Returns the rollouts that were not looked at."""
        for one in queue:
            if self._full() or (self.keeps and not one.interactive):
                return chain((one,), queue)
            if one.bounds not in self._shut:
                self._place(one)
        return iter(())

    def _full(self) -> bool:
        return not self._rooms.open or len(self.places) == self._at_most or len(self._shut) == self._kinds

    def _place(self, one: QueuedRollout) -> None:
        within = self._rooms.within(one.bounds)
        if not within.open:
            self._shut.add(one.bounds)
            return
        found = self._rooms.choose(one, within)
        if found is not None:
            room, bound = found
            self.places.append(BorrowedPlace(one, room.host, bound))
            self._rooms.take(room, one)
            self._batch_left -= not one.interactive


def outsized(
    queue: Iterable[QueuedRollout], longest: int, *, manned: float, now: float, grace_s: float
) -> list[QueuedRollout]:
    """Rollouts too long for every attached worker, though one with a longer context had `grace_s` to attach. None
    without a worker. `longest`: tokens of the longest context; `manned`: since when there is a worker.

    What has made tokens beyond `longest` is none of them: a worker with such a context was there, and may come back.
    """
    if not longest or now - manned < grace_s:
        return []
    too_long = (one for one in queue if one.length >= longest and not outlived(one, longest))
    return [one for one in too_long if now - one.since >= grace_s]


def outlived(one: QueuedRollout, longest: int) -> bool:
    """Whether a rollout has made tokens beyond the longest attached context."""
    return one.made > 0 and one.length > longest


_Rank: TypeAlias = tuple[float, int, float, int]
#: Differences of reading below this decide nothing.
_READ_STEP_S: Final = 1.0
#: A shorter prompt is read anywhere.
_SHARED_TOKENS: Final = 256
#: A tenth of each power of ten up to beyond the tokens/s of any engine, and where each power's numbers end.
_STEPS: Final = tuple(0.1 * 10.0**digits for digits in range(20))
_TENS: Final = tuple(10.0**digits for digits in range(1, 20))


class _Room:
    """The places left at a host during a round. `at`: its place in the order of names."""

    def __init__(self, host: HostView, at: int, limit: int, rate: float, plateau: float, read_s: float) -> None:
        """`read_s`: seconds that it needs for what it has not read yet."""
        self.host, self._at, self.read_s = host, at, read_s
        self.rate, self.plateau = (host.rate or rate) * host.share, host.plateau or plateau
        self.given = 0
        self.left = min(host.slots - host.running, limit - host.pending)
        self.probation = host.probation
        self.rank = self._rank()

    def take(self, one: QueuedRollout, read_s: float) -> None:
        self.given += 1
        self.left -= 1
        self.read_s += read_s
        self.probation += one.no_progress > 0
        self.rank = self._rank()

    @property
    def beside(self) -> int:
        return self.host.running + self.given

    @property
    def speed(self) -> float:
        """Beyond the plateau all rollouts share its throughput."""
        if not self.given:
            return self.rate
        return self.rate * max(self.host.running + 1, self.plateau) / max(self.beside + 1, self.plateau)

    def _rank(self) -> _Rank:
        """The least is best: the predicted rate, in steps of a tenth so that noise decides nothing; then what is still
        to be read, in whole seconds; then the share of free slots; then the name, so that a decision can be repeated.
        """
        slots = self.host.slots
        return -_tenths(self.speed), int(self.read_s / _READ_STEP_S), -(slots - self.beside) / slots, -self._at


def _tenths(rate: float) -> float:
    step = _STEPS[bisect_right(_TENS, rate)]
    return round(rate / step) * step


class _Within:
    """The rooms that serve one kind of version bounds.

    Invariant: `_best` has an entry for each open room's present rank. Entries with former ones are dropped when they
    come up.
    """

    def __init__(self, rooms: Iterable[_Room]) -> None:
        self.open = {room.host.worker_id: room for room in rooms}
        self.too_long = inf  # a rollout as long as this, without further wishes, fits none of them
        self._by_rank = {room.rank: room for room in self.open.values()}
        self._best = list(self._by_rank)
        heapify(self._best)

    def best(self) -> _Room:
        """The open room with the best rank. Call with one open."""
        while True:
            rank = self._best[0]
            room = self._by_rank[rank]
            if rank == room.rank and room.left > 0:
                return room
            del self._by_rank[heappop(self._best)]

    def changed(self, room: _Room) -> None:
        """Note that a rollout went to a room."""
        if room.host.worker_id not in self.open:
            return
        if room.left > 0:
            self._by_rank[room.rank] = room
            heappush(self._best, room.rank)
        else:
            del self.open[room.host.worker_id]


class _Rooms:
    """The hosts with room, by the version bounds that they serve."""

    def __init__(
        self,
        hosts: Sequence[HostView],
        limit: Callable[[HostView], int],
        borrowable: float,
        router: TurnRouter,
        siblings: Callable[[QueuedRollout], Collection[str]],
        costs: MoveCosts,
        rest: Callable[[QueuedRollout], float] | None,
    ) -> None:
        self._hosts, self._router, self._rest = hosts, router, rest
        self._siblings, self._costs = siblings, costs
        self._borrowable = borrowable
        rate = median([host.rate for host in hosts if host.rate] or [0.0])
        plateau = median([host.plateau for host in hosts if host.plateau] or [0])
        free = [host for host in hosts if host.running < host.slots and not host.shut]
        free = sorted((one for one in free if borrowable > 0 or not one.borrowed), key=attrgetter("worker_id"))
        rooms = [
            _Room(
                host,
                at,
                limit(host),
                rate,
                plateau,
                costs.read_s(host.unread, host.prefill),
            )
            for at, host in enumerate(free)
        ]
        self.open = {room.host.worker_id: room for room in rooms if room.left > 0}
        self._within: dict[VersionBounds, _Within] = {}
        contexts = {host.max_model_len for host in hosts}
        self._context, self._unlike = min(contexts, default=0), len(contexts) > 1
        self._held = any(room.host.held for room in self.open.values())

    def within(self, bounds: VersionBounds) -> _Within:
        found = self._within.get(bounds)
        if found is None:
            versions = {(room.host.installed, room.host.target): room.host for room in self.open.values()}
            fit = {pair for pair, host in versions.items() if serves(bounds, host)}
            rooms = (room for room in self.open.values() if (room.host.installed, room.host.target) in fit)
            found = self._within[bounds] = _Within(rooms)
        return found

    def choose(self, one: QueuedRollout, within: _Within) -> tuple[_Room, bool] | None:
        """The room for a rollout, if any, and whether it needs this very one, for its prefix cache, its context or a
        move.
        """
        plain = not (one.avoid or one.no_progress or one.scores or one.min_p)
        if plain and one.length >= within.too_long:
            return None
        fit = within.open
        if not plain or one.length >= self._context or self._held:
            fit = self._fit(one, fit)
            if not fit:
                within.too_long = min(within.too_long, one.length) if plain else within.too_long
                return None
        if (moved := _moved_to(one, fit)) is not None:
            return moved, True
        roomy = self._roomy(one, fit)
        bound, fit = len(roomy) < len(fit), roomy
        best = within.best() if fit is within.open else min(fit.values(), key=attrgetter("rank"))
        if one.scores or not (cached := self._router.cached(one)):
            return self._beside_sibling(one, fit, best), bound
        home = self._router.home(one, cached, fit, best)
        if self._router.waits(one, cached, fit, home or best):
            return None
        return home or best, bound or home is not None

    def _fit(self, one: QueuedRollout, rooms: Mapping[str, _Room]) -> dict[str, _Room]:
        """Those that may take `one`, of the `rooms` with its versions: those that are not held, or all if all are."""
        fit = [room for room in rooms.values() if fits(one, room.host)]
        if one.avoid and any(may_take(one, host) and not host.shut for host in self._hosts):
            fit = [room for room in fit if room.host.name not in one.avoid]
        if one.no_progress:
            fit = [room for room in fit if not room.probation]
        if self._held:
            fit = [room for room in fit if not room.host.held] or fit
        return {room.host.worker_id: room for room in fit}

    def _roomy(self, one: QueuedRollout, rooms: dict[str, _Room]) -> dict[str, _Room]:
        """Those in whose context all fits that the rollout will probably make, or all `rooms` if it is too long for
        them: it is handed back where it fills one.
        """
        if not self._unlike or self._rest is None or (whole := one.length + self._rest(one)) <= self._context:
            return rooms
        return {key: room for key, room in rooms.items() if whole <= room.host.max_model_len} or rooms

    def _beside_sibling(self, one: QueuedRollout, fit: Mapping[str, _Room], best: _Room) -> _Room:
        """A room where a sibling of a rollout that is read again runs, if it is as fast there and read no later."""
        prompt = one.length - one.made
        if not one.made or one.scores or prompt < _SHARED_TOKENS:
            return best
        near = [room for key in self._siblings(one) if (room := fit.get(key)) is not None and room.left > 0]
        near = [room for room in near if room.rank[0] <= best.rank[0]]
        beside = min(near, key=attrgetter("read_s"), default=None)
        if beside is None or beside.read_s > best.read_s + self._costs.read_s(prompt, beside.host.prefill):
            return best
        return beside

    def take(self, room: _Room, one: QueuedRollout) -> None:
        cached = (self._router.cached(one) or {}).get(room.host.worker_id)
        unread = one.length - (cached.tokens if cached is not None and cached.version == room.host.installed else 0)
        room.take(one, self._costs.read_s(max(0, unread), room.host.prefill))
        self._changed(room)
        if room.host.borrowed:
            self._borrowable -= 1
            if self._borrowable <= 0:
                for other in [other for other in self.open.values() if other.host.borrowed]:
                    other.left = 0
                    self._changed(other)

    def _changed(self, room: _Room) -> None:
        if room.left <= 0:
            del self.open[room.host.worker_id]
        for within in self._within.values():
            within.changed(room)


def _moved_to(one: QueuedRollout, fit: Mapping[str, _Room]) -> _Room | None:
    """The room that a move chose."""
    if not one.prefer:
        return None
    return next((room for room in fit.values() if one.prefer in (room.host.worker_id, room.host.name)), None)


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
    """The places, with those on borrowed hosts given to the least at risk. Each host gets as many as before.

    Candidates are the rollouts placed in a round and the next in the queue. Long rollouts go to steady hosts, or
    wait for one: they are most likely to be interrupted, and cost most to move.
    """
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
    return risk_s(one.length, rest(one), rate=rate, spell_s=host.spell_s, prefill=prefill)


#: Causes that may lie with the rollout itself.
_BLAMING: Final = frozenset({EndCause.FAILED, EndCause.WORKER_LOST, EndCause.WORKER_SUSPECTED})


def blames(cause: EndCause) -> bool:
    """Whether an attempt that ended for `cause`, without a new token, counts against its rollout."""
    return cause in _BLAMING


def dead_letter_message(no_progress: int, evidence: str, *, limit: int) -> str | None:
    """The message of the dead letter that a rollout becomes after `limit` attempts in a row without a new token."""
    if no_progress < limit:
        return None
    message = f"{no_progress} attempts in a row ended without a new token: {evidence.rstrip('; ')}"
    return shortened(message, MAX_EVENT_BYTES // 2)  # it travels in an event
