"""Chooses between the worker that has a turn's prefix in its cache and the worker that is fastest now.

A turn goes to the worker with its prefix while that is nearly as fast as the fastest one; as in consistent hashing with
bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018), a bound on load limits affinity. Beyond the bound, the
earlier expected end decides, where what is missing is prefilled as fast as a typical worker was seen to prefill.

Turns do not weigh one worker's speed of prefill against another's. Each turn would gain by it, and all together lose:
sessions would leave slow workers, to be re-prefilled at the fast ones and crowd them, and new ones would take their
places.

If the worker with the prefix has no room, the turn waits for it, as in delay scheduling (Zaharia et al., EuroSys 2010),
but no longer than a re-prefill of the prefix elsewhere would cost: so it loses at most twice what the better choice
costs. Meanwhile others take the free slots.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final, Protocol, TypeVar

from msgspec import Struct

from ebbtide.coordinator.rules.move_costs import COSTS, MoveCosts, risk_s
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.rules.worker_view import WorkerView, may_take

#: Episodes whose workers are remembered: no prefix cache lasts longer.
_EPISODES: Final = 1 << 16
#: Workers of an episode that are remembered.
_WORKERS: Final = 8


class CachedPrefix(Struct, frozen=True, gc=False):
    version: int  # of the weights that prefilled it: an engine with others finds nothing
    tokens: int  # from the first one of the episode on


#: By episode, then by session.
Prefixes = Mapping[str, Mapping[str, CachedPrefix]]


class CachedPrefixes:
    """Remembers which workers have keys and values of an episode's tokens, and of how many.

    It is a belief: engines evict what they need room for, and say nothing of it. A wrong belief costs a prefill.

    Invariant: of each episode the last workers are known, the latest one last. Lost with the process: each episode's
    next turn is prefilled again, wherever it goes.
    """

    def __init__(self) -> None:
        self._episodes: dict[str, dict[str, CachedPrefix]] = {}
        self.by_episode: Final[Prefixes] = self._episodes

    def began(self, episode_id: str, session_id: str, *, version: int, tokens: int) -> int:
        """Note that a worker prefills so many tokens of the episode. Returns how many of them it had."""
        known = self._episodes.pop(episode_id, None) or {}
        before = known.pop(session_id, None)
        known[session_id] = CachedPrefix(version, tokens)
        if len(known) > _WORKERS:
            del known[next(iter(known))]
        self._episodes[episode_id] = known
        if len(self._episodes) > _EPISODES:
            del self._episodes[next(iter(self._episodes))]
        return min(before.tokens, tokens) if before is not None and before.version == version else 0

    def left(self, episode_id: str, tokens: int) -> None:
        """Note that the episode's last worker stopped with so many tokens of a turn."""
        known = self._episodes.get(episode_id)
        if known:
            session_id = next(reversed(known))
            known[session_id] = CachedPrefix(known[session_id].version, tokens)

    def forget(self, episode_id: str) -> None:
        """Note that the episode has no further turn."""
        self._episodes.pop(episode_id, None)


class TurnTerms(Struct, frozen=True, kw_only=True):
    """How far a turn goes for its prefix."""

    #: A re-prefill counts so often: it holds up turns that wait for slots, too, and only one turn gains by it.
    #: Simulated fleets of unlike speeds of prefill made 2 % more tokens with 3 than with 1, and like ones as many.
    reading: float = 3.0
    near: float = 0.8  # a worker at so much of the fastest one's speed is near enough to it
    wait_most_s: float = 10.0  # a turn waits no longer for its worker, whatever its prefix would cost
    waiting_most: int = 256  # turns of a run that wait at a time: the search among them is part of each round


TERMS: Final = TurnTerms()


class Seat(Protocol):
    """A place at a worker, for one rollout more."""

    @property
    def worker(self) -> WorkerView: ...

    @property
    def beside(self) -> int:
        """Rollouts that it would have beside it."""
        ...

    @property
    def speed(self) -> float:
        """Tokens/s of each of them then; 0.0: not known."""
        ...


S = TypeVar("S", bound=Seat)


class TurnRouter:
    """One round's routing of a run's turns. `workers`: all, full ones too; `rest`: tokens that a turn will probably
    make; `now`: seconds; -inf: nothing waits.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        workers: Sequence[WorkerView],
        *,
        rest: Callable[[QueuedRollout], float] | None,
        now: float,
        costs: MoveCosts = COSTS,
        terms: TurnTerms = TERMS,
    ) -> None:
        self._prefixes, self._workers, self._now = prefixes, workers, now
        self._rest, self._costs, self._terms = rest, costs, terms
        self._by_id: dict[str, WorkerView] | None = None
        self._waiting = 0
        self._prefill: float | None = None

    def cached(self, one: QueuedRollout) -> Mapping[str, CachedPrefix] | None:
        """What workers have of the turn's episode."""
        return self._prefixes.get(one.episode_id)

    def home(self, one: QueuedRollout, cached: Mapping[str, CachedPrefix], open_: Mapping[str, S], best: S) -> S | None:
        """The seat with a part of the prefix that the turn shall take instead of the `best` one; None for that."""
        rest = self._rest(one) if self._rest is not None else 0.0
        warm = [seat for name, prefix in cached.items() if (seat := open_.get(name)) and _valid(prefix, seat.worker)]
        if not warm:
            return None
        ends = [(self._end_s(one, cached, seat, rest), at) for at, seat in enumerate(warm)]
        end_s, at = min(ends)
        seat = warm[at]
        near = seat.speed >= self._terms.near * best.speed
        return seat if near or end_s <= self._end_s(one, cached, best, rest) else None

    def waits(
        self, one: QueuedRollout, cached: Mapping[str, CachedPrefix], open_: Mapping[str, Seat], seat: Seat
    ) -> bool:
        """Whether the turn waits for a full worker with its prefix, rather than take this seat."""
        waited_s = self._now - one.since
        if not 0.0 <= waited_s < self._terms.wait_most_s or self._waiting >= self._terms.waiting_most:
            return False
        here = _kept(cached, seat.worker)
        kept = max((_kept(cached, worker) for worker in self._full(one, cached, open_)), default=0)
        saved_s = self._read_s(min(kept, one.length) - here)
        waits = waited_s < saved_s * (1 + seat.beside)
        self._waiting += waits
        return waits

    def _read_s(self, tokens: int) -> float:
        if self._prefill is None:
            known = [worker.prefill for worker in self._workers if worker.prefill > 0.0]
            self._prefill = median(known) if known else 0.0
        return self._terms.reading * self._costs.read_s(tokens, self._prefill)

    def _full(
        self, one: QueuedRollout, cached: Mapping[str, CachedPrefix], open_: Mapping[str, Seat]
    ) -> list[WorkerView]:
        """Workers with a part of the prefix, which could take the turn if they had room."""
        if self._by_id is None:
            self._by_id = {worker.session_id: worker for worker in self._workers}
        known = [self._by_id[name] for name in cached if name in self._by_id and name not in open_]
        return [worker for worker in known if not worker.shut and not worker.held and may_take(one, worker)]

    def _end_s(self, one: QueuedRollout, cached: Mapping[str, CachedPrefix], seat: Seat, rest: float) -> float:
        """Seconds until the turn ends there. The prefill delays the rollouts beside it, and counts for each of them."""
        worker, speed = seat.worker, seat.speed
        read_s = self._read_s(max(0, one.length - _kept(cached, worker)))
        end_s = read_s * (1 + seat.beside) + (rest / speed if speed else 0.0)
        if worker.borrowed:
            rate = speed / (worker.share or 1.0)
            spell_s, prefill = worker.spell_s, worker.prefill
            end_s += risk_s(one.length, rest, rate=rate, spell_s=spell_s, prefill=prefill, costs=self._costs)
        return end_s


def _valid(prefix: CachedPrefix, worker: WorkerView) -> bool:
    return prefix.version == worker.installed


def _kept(cached: Mapping[str, CachedPrefix], worker: WorkerView) -> int:
    """Tokens that the worker finds in its cache, as far as is known."""
    prefix = cached.get(worker.session_id)
    return prefix.tokens if prefix is not None and _valid(prefix, worker) else 0
