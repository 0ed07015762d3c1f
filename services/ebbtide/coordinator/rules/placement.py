"""Places queued rollouts in queue order: at the worker that a move chose, else by what workers' caches have of the
episode (`turn_routing.py`), else where they will run fastest. Long rollouts prefer steady workers to those
that are borrowed.

After a loss the cost is the re-prefill. Such rollouts are spread by the tokens that each engine has still to prefill,
those with most tokens to come first; where a sibling runs, their prompt need not be prefilled (`siblings`).

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

from ebbtide.coordinator.rules.move_costs import COSTS, MoveCosts, risk_s
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.coordinator.rules.turn_routing import TERMS, Prefixes, TurnRouter, TurnTerms
from ebbtide.coordinator.rules.worker_view import WorkerView, fits, may_take, serves
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import EndCause
from ebbtide.types.ids import MAX_EVENT_BYTES, shortened


class Placement(NamedTuple):
    rollout_id: str
    session_id: str


def pending_limit(worker: WorkerView) -> int:
    """How many unstarted rollouts a worker may hold: enough to keep it busy until the next decision, without starving
    others. A worker on which nothing has started takes half its slots at once.
    """
    return max(8, worker.slots // 4 if worker.running > worker.pending else worker.slots // 2)


def place(
    queue: Iterable[QueuedRollout],
    workers: Sequence[WorkerView],
    prefixes: Prefixes,
    *,
    pending_limit: Callable[[WorkerView], int] = pending_limit,
    at_most: int | None = None,
    rest: Callable[[QueuedRollout], float] | None = None,
    borrowable: float = inf,
    batch_slots: float = inf,
    now: float = -inf,
    costs: MoveCosts = COSTS,
    terms: TurnTerms = TERMS,
    siblings: Callable[[QueuedRollout], Collection[str]] = lambda _: (),
) -> list[Placement]:
    """Fill the workers' free slots from the queue, with `at_most` placements. `prefixes`: what workers have cached;
    `rest`: tokens that a rollout will probably still make; `borrowable`: most further rollouts on borrowed workers;
    `batch_slots`: most placements of others than interactive rollouts; `siblings`: the sessions of workers that run
    samples of a rollout's group.

    A worker may take a rollout if its version and target are within the rollout's bounds, one more token fits into its
    context, and its engine can do what the rollout asks for. A rollout that fits nowhere, or waits for
    the worker with its prefix, blocks no other. A worker with as many pending rollouts as `pending_limit` allows gets
    no more; the rest stays queued for the next free worker.

    A rollout goes to a worker that it avoids only if it avoids all `workers` that could take it, full ones included. A
    rollout without progress in its last attempt goes only where no other such is pending, so that one that kills
    workers is told from its neighbours. A held worker gets only what no other has room for.

    With `rest`, a rollout prefers workers whose context has room for all of it. Then the places of borrowed workers go
    to the rollouts that risk least by a reclaim, among those placed and the next in the queue; a displaced rollout
    takes the other's place, or waits a while if a steady worker could take it.
    """
    router = TurnRouter(prefixes, workers, rest=rest, now=now, costs=costs, terms=terms)
    rooms = _Rooms(workers, pending_limit, borrowable, router, siblings, costs, rest)
    kinds = len(queue.bounds()) if isinstance(queue, RolloutQueue) else None
    filling = _Filling(rooms, kinds=kinds, at_most=at_most, batch_slots=batch_slots)
    behind = filling.fill(iter(queue))
    if filling.keeps and isinstance(queue, RolloutQueue):
        placed = {chosen.one.rollout_id for chosen in filling.places}
        filling.fill(one for one in queue.interactive() if one.rollout_id not in placed)
    places = filling.places
    if rest is not None:
        if any(chosen.worker.borrowed for chosen in places):
            places = exchanged(places, behind, workers, rest, now)
        places.sort(key=lambda chosen: _urgency(chosen.one, rest))
    return [Placement(one.rollout_id, worker.session_id) for one, worker, _ in places]


def _urgency(one: QueuedRollout, rest: Callable[[QueuedRollout], float]) -> float:
    """In which order workers get what was placed, the least first: engines prefill in the order of arrival. Interactive
    rollouts, then those that are re-prefilled, by what they have still to make, then new ones.
    """
    return -inf if one.interactive else -rest(one) if one.made else 0.0


class _Filling:
    """The placements of one round, in the order of the queue."""

    def __init__(self, rooms: "_Rooms", *, kinds: int | None, at_most: int | None, batch_slots: float) -> None:
        """`kinds`: distinct bounds in the queue, if known."""
        self._rooms = rooms
        self._kinds, self._at_most, self._batch_left = kinds, at_most, batch_slots
        self._shut: set[VersionBounds] = set()
        self.places: list[ChosenPlace] = []

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
            self.places.append(ChosenPlace(one, room.worker, bound))
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
#: Differences of prefill below this decide nothing.
_READ_STEP_S: Final = 1.0
#: A shorter prompt is prefilled anywhere.
_SHARED_TOKENS: Final = 256
#: A tenth of each power of ten up to beyond the tokens/s of any engine, and where each power's numbers end.
_STEPS: Final = tuple(0.1 * 10.0**digits for digits in range(20))
_TENS: Final = tuple(10.0**digits for digits in range(1, 20))


class _Room:
    """The places left at a worker during a round. `at`: its place in the order of names."""

    def __init__(self, worker: WorkerView, at: int, limit: int, rate: float, plateau: float, read_s: float) -> None:
        """`read_s`: seconds that it needs for what it has not prefilled yet."""
        self.worker, self._at, self.read_s = worker, at, read_s
        self.rate, self.plateau = (worker.rate or rate) * worker.share, worker.plateau or plateau
        self.given = 0
        self.left = min(worker.slots - worker.running, limit - worker.pending)
        self.probation = worker.probation
        self.rank = self._rank()

    def take(self, one: QueuedRollout, read_s: float) -> None:
        self.given += 1
        self.left -= 1
        self.read_s += read_s
        self.probation += one.no_progress > 0
        self.rank = self._rank()

    @property
    def beside(self) -> int:
        return self.worker.running + self.given

    @property
    def speed(self) -> float:
        """Beyond the plateau all rollouts share its throughput."""
        if not self.given:
            return self.rate
        return self.rate * max(self.worker.running + 1, self.plateau) / max(self.beside + 1, self.plateau)

    def _rank(self) -> _Rank:
        """The least is best: the predicted rate, in steps of a tenth so that noise decides nothing; then what is still
        to be prefilled, in whole seconds; then the share of free slots; then the order of names, so that a decision can
        be repeated.
        """
        slots = self.worker.slots
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
        self.open = {room.worker.session_id: room for room in rooms}
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
        if room.worker.session_id not in self.open:
            return
        if room.left > 0:
            self._by_rank[room.rank] = room
            heappush(self._best, room.rank)
        else:
            del self.open[room.worker.session_id]


class _Rooms:
    """The workers with room, by the version bounds that they serve."""

    def __init__(
        self,
        workers: Sequence[WorkerView],
        limit: Callable[[WorkerView], int],
        borrowable: float,
        router: TurnRouter,
        siblings: Callable[[QueuedRollout], Collection[str]],
        costs: MoveCosts,
        rest: Callable[[QueuedRollout], float] | None,
    ) -> None:
        self._workers, self._router, self._rest = workers, router, rest
        self._siblings, self._costs = siblings, costs
        self._borrowable = borrowable
        rate = median([worker.rate for worker in workers if worker.rate] or [0.0])
        plateau = median([worker.plateau for worker in workers if worker.plateau] or [0])
        free = [worker for worker in workers if worker.running < worker.slots and not worker.shut]
        free = sorted((one for one in free if borrowable > 0 or not one.borrowed), key=attrgetter("session_id"))
        rooms = [
            _Room(
                worker,
                at,
                limit(worker),
                rate,
                plateau,
                costs.read_s(worker.unread, worker.prefill),
            )
            for at, worker in enumerate(free)
        ]
        self.open = {room.worker.session_id: room for room in rooms if room.left > 0}
        self._within: dict[VersionBounds, _Within] = {}
        contexts = {worker.max_model_len for worker in workers}
        self._context, self._unlike = min(contexts, default=0), len(contexts) > 1
        self._held = any(room.worker.held for room in self.open.values())

    def within(self, bounds: VersionBounds) -> _Within:
        found = self._within.get(bounds)
        if found is None:
            versions = {(room.worker.installed, room.worker.target): room.worker for room in self.open.values()}
            fit = {pair for pair, worker in versions.items() if serves(bounds, worker)}
            rooms = (room for room in self.open.values() if (room.worker.installed, room.worker.target) in fit)
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
        fit = [room for room in rooms.values() if fits(one, room.worker)]
        if one.avoid and any(may_take(one, worker) and not worker.shut for worker in self._workers):
            fit = [room for room in fit if room.worker.worker_id not in one.avoid]
        if one.no_progress:
            fit = [room for room in fit if not room.probation]
        if self._held:
            fit = [room for room in fit if not room.worker.held] or fit
        return {room.worker.session_id: room for room in fit}

    def _roomy(self, one: QueuedRollout, rooms: dict[str, _Room]) -> dict[str, _Room]:
        """Those in whose context all fits that the rollout will probably make, or all `rooms` if it is too long for
        them: it is handed back where it fills one.
        """
        if not self._unlike or self._rest is None or (whole := one.length + self._rest(one)) <= self._context:
            return rooms
        return {key: room for key, room in rooms.items() if whole <= room.worker.max_model_len} or rooms

    def _beside_sibling(self, one: QueuedRollout, fit: Mapping[str, _Room], best: _Room) -> _Room:
        """A room where a sibling of a rollout to re-prefill runs, if it is as fast there and prefilled no later."""
        prompt = one.length - one.made
        if not one.made or one.scores or prompt < _SHARED_TOKENS:
            return best
        near = [room for key in self._siblings(one) if (room := fit.get(key)) is not None and room.left > 0]
        near = [room for room in near if room.rank[0] <= best.rank[0]]
        beside = min(near, key=attrgetter("read_s"), default=None)
        if beside is None or beside.read_s > best.read_s + self._costs.read_s(prompt, beside.worker.prefill):
            return best
        return beside

    def take(self, room: _Room, one: QueuedRollout) -> None:
        cached = (self._router.cached(one) or {}).get(room.worker.session_id)
        unread = one.length - (cached.tokens if cached is not None and cached.version == room.worker.installed else 0)
        room.take(one, self._costs.read_s(max(0, unread), room.worker.prefill))
        self._changed(room)
        if room.worker.borrowed:
            self._borrowable -= 1
            if self._borrowable <= 0:
                for other in [other for other in self.open.values() if other.worker.borrowed]:
                    other.left = 0
                    self._changed(other)

    def _changed(self, room: _Room) -> None:
        if room.left <= 0:
            del self.open[room.worker.session_id]
        for within in self._within.values():
            within.changed(room)


def _moved_to(one: QueuedRollout, fit: Mapping[str, _Room]) -> _Room | None:
    """The room that a move chose."""
    if not one.prefer:
        return None
    return next((room for room in fit.values() if one.prefer in (room.worker.session_id, room.worker.worker_id)), None)


#: Queued rollouts after the last placed one that are considered.
_BEHIND: Final = 32
#: A displaced rollout waits no longer than this for a steady worker: the longest rollouts decide when a step ends.
_PATIENCE_S: Final = 10.0
#: A rollout takes another's place if its risk is below this share of the other's, by at least so many seconds.
_LESS: Final = 0.8
_LESS_S: Final = 0.05


class ChosenPlace(NamedTuple):
    """Where a rollout goes in this round."""

    one: QueuedRollout
    worker: WorkerView
    bound: bool  # it needs this very worker, for its prefix cache or a move


def exchanged(
    places: Sequence[ChosenPlace],
    behind: Iterator[QueuedRollout],
    workers: Sequence[WorkerView],
    rest: Callable[[QueuedRollout], float],
    now: float,
) -> list[ChosenPlace]:
    """The places, with those on borrowed workers given to the least at risk. Each worker gets as many as before.

    Candidates are the rollouts placed in a round and the next in the queue. Long rollouts go to steady workers, or
    wait for one: they are most likely to be interrupted, and cost most to move.
    """
    made = list(places)
    lent = [at for at, chosen in enumerate(places) if chosen.worker.borrowed and _free(chosen)]
    if not lent:
        return made
    common = places[lent[0]].worker
    steady = [worker for worker in workers if not worker.borrowed and not worker.shut]
    risks = {at: _risk_s(places[at].one, common, rest) for at in lent}
    others: list[tuple[float, int, QueuedRollout]] = [
        (_risk_s(chosen.one, common, rest), at, chosen.one)
        for at, chosen in enumerate(places)
        if not chosen.worker.borrowed and _free(chosen)
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
        made[at] = ChosenPlace(one, places[at].worker, bound=False)
        if number < len(places):
            made[number] = ChosenPlace(places[at].one, places[number].worker, bound=False)
    return made


def _taker(
    chosen: ChosenPlace,
    risk: float,
    others: Sequence[tuple[float, int, QueuedRollout]],
    places: Sequence[ChosenPlace],
    steady: Sequence[WorkerView],
) -> int | None:
    """The rollout (index of `others`) to take the place, if worth it. `steady`: where the present one may wait."""
    for found, (less, number, one) in enumerate(others):
        if less > _LESS * risk or risk - less < _LESS_S:
            return None
        if not may_take(one, chosen.worker):
            continue
        if number < len(places):
            if may_take(chosen.one, places[number].worker):
                return found
        elif one.priority == chosen.one.priority and any(may_take(chosen.one, worker) for worker in steady):
            return found
    return None


def _free(chosen: ChosenPlace) -> bool:
    return not chosen.bound and not chosen.one.no_progress


def _risk_s(one: QueuedRollout, worker: WorkerView, rest: Callable[[QueuedRollout], float]) -> float:
    rate, prefill = worker.rate, worker.prefill
    return risk_s(one.length, rest(one), rate=rate, spell_s=worker.spell_s, prefill=prefill)


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
