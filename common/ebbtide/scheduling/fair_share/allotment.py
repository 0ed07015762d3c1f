"""Assigns a run to each worker. A worker holds the weights of one run at a time, so runs share workers, not slots.

Each run is due a number of workers, usually a fraction: its share of the fleet, corrected by the tokens that it is owed
or owes (`share_accounts`). Workers change from the run furthest above its due to the run furthest below, if that brings
both nearer by more than a margin; the remainder is corrected over time. This is weighted fair queueing in the manner of
start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with tokens for bytes, as in the virtual token counter of
Sheng et al. (OSDI 2024), but with few, slow servers that are costly to change. So the longer a change takes, the less a
debt counts: turns last about `slice_s`, or ten times the change.

The run "" stands for rest: workers that ceilings keep from every run. They get nothing.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.fair_share.shares import EPSILON, Demand, entitled

#: A worker changes only between runs that are apart by so much more than one worker: fractional shares would otherwise
#: be rounded up and down all the time.
_MARGIN: Final = 0.25
#: A turn lasts so many times its change, so that changes take a tenth of the time at most.
_TURNS: Final = 10.0
#: A worker stays for at least this part of `slice_s` after a change; also for a turn or, if a run permanently lacks a
#: whole worker, for so many times the cost of the change.
_LEAST_STAY: Final = 0.25
_WORTH: Final = 2.0


#: Workers that change by one decision: each is sought among all of a run's, and others change by the next decision.
_AT_ONCE: Final = 32


class WorkerPost(Struct, frozen=True, kw_only=True, gc=False):
    worker_id: str
    run_id: str  # the run it serves; "": none
    since: float
    running: int
    has: str = ""  # the run whose weights are installed
    unfit: frozenset[str] = frozenset()  # runs that it cannot serve
    architecture: str = ""
    change_s: float = 0.0  # to another run of its architecture
    restart_s: float = 0.0  # to a run of another architecture

    def cost_s(self, to: Demand | None) -> float:
        """Seconds without service if it changes."""
        if to is None or to.run_id == self.has:
            return 0.0
        return self.restart_s if to.architecture and to.architecture != self.architecture else self.change_s


def turn_s(slice_s: float, cost_s: float) -> float:
    """How long a worker serves a run at least, on average, if a change takes `cost_s` and others wait."""
    return max(slice_s, _TURNS * cost_s)


def allot(
    posts: Sequence[WorkerPost], demands: Sequence[Demand], *, now: float, slice_s: float, rest_owed_s: float = 0.0
) -> dict[str, str]:
    """The run of each worker; one that no run wants stays. `rest_owed_s`: `Demand.owed_s` of the run ""."""
    if not posts or not demands:
        return {post.worker_id: post.run_id for post in posts}
    return _Allotment(posts, demands, now, slice_s, rest_owed_s).decided()


def _usable_debts(demands: Sequence[Demand], due: Mapping[str, float]) -> dict[str, float]:
    """What runs are owed and owe, without the credit of those that are due all the workers that they want.

    In a step's tail a run wants few workers and its credit grows, as others make more tokens. It could use no more, so
    neither may its credit keep workers from them, nor what they owe it.
    """
    credit = {one.run_id: one.owed_s for one in demands if one.owed_s > 0.0}
    usable = {one.run_id for one in demands if one.run_id in credit and one.wants > due[one.run_id] + EPSILON}
    part = sum(credit[one] for one in usable) / sum(credit.values()) if credit else 1.0
    return {
        one.run_id: one.owed_s * part if one.owed_s < 0.0 else one.owed_s if one.run_id in usable else 0.0
        for one in demands
    }


class _Allotment:
    def __init__(
        self, posts: Sequence[WorkerPost], demands: Sequence[Demand], now: float, slice_s: float, rest_owed_s: float
    ) -> None:
        self._now, self._slice_s = now, slice_s
        self._wanted = {demand.run_id: demand for demand in demands}
        shares = entitled(demands, len(posts))
        self._short = {run_id: share * len(posts) for run_id, share in shares.items()}  # workers that it lacks
        self._owed_s = _usable_debts(demands, self._short)
        if (rest := 1.0 - sum(shares.values())) > EPSILON:
            self._short[""], self._owed_s[""] = rest * len(posts), rest_owed_s
        self._runs = {post.worker_id: post.run_id for post in posts}
        self._held: dict[str, list[WorkerPost]] = {run_id: [] for run_id in self._short}
        free: list[WorkerPost] = []
        for post in posts:
            if post.run_id in self._held and post.run_id not in post.unfit:
                self._give(post, post.run_id)
            else:
                free.append(post)
        self._free = free
        for held in self._held.values():
            held.sort(key=attrgetter("running", "worker_id"))

    def decided(self) -> dict[str, str]:
        for post in sorted(self._free, key=lambda one: (one.has not in self._short, one.running, one.worker_id)):
            self._place(post)
        for _ in range(_AT_ONCE):
            if not self._change():
                break
        return self._runs

    def _give(self, post: WorkerPost, run_id: str) -> None:
        self._runs[post.worker_id] = run_id
        self._held[run_id].append(post)
        self._short[run_id] -= 1.0

    def _distance(self, run_id: str, turn: float) -> float:
        """Workers that the run lacks if its debt is to be paid within two turns."""
        return self._short[run_id] + self._owed_s[run_id] / (2.0 * turn)

    def _place(self, post: WorkerPost) -> None:
        """Give a free worker to the run that lacks most, if that is worth the change."""
        fit = [run_id for run_id in self._short if run_id not in post.unfit]
        if not fit:
            return
        most = max(self._distance(run_id, self._slice_s) for run_id in fit)
        near = [run_id for run_id in fit if self._distance(run_id, self._slice_s) > most - _MARGIN]
        run_id = min(near, key=lambda one: (one != post.has, -self._distance(one, self._slice_s), one))
        if self._worth(post, run_id):
            self._give(post, run_id)

    def _worth(self, post: WorkerPost, run_id: str) -> bool:
        """Whether the run's work, debt or wait exceeds the cost of the change."""
        demand = self._wanted.get(run_id)
        cost_s = post.cost_s(demand)
        if demand is None or cost_s <= 0.0:
            return True
        return demand.work_s > cost_s or demand.starved_s > cost_s or demand.owed_s > cost_s

    def _change(self) -> bool:
        """Change one worker; False if none should."""
        ranked = sorted(self._short, key=lambda run_id: (-self._distance(run_id, self._slice_s), run_id))
        for to in ranked:
            for source in reversed(ranked):
                apart = self._distance(to, self._slice_s) - self._distance(source, self._slice_s)
                if apart <= 1.0 + _MARGIN or source == to:
                    break
                if (post := self._leaver(source, to)) is not None:
                    self._held[source].remove(post)
                    self._short[source] += 1.0
                    self._give(post, to)
                    return True
        return False

    def _leaver(self, source: str, to: str) -> WorkerPost | None:
        """The source's worker with the cheapest change; of equals, one with little to hand over."""
        best: WorkerPost | None = None
        best_s = 0.0
        far = dict[float, bool]()  # by cost, which most workers have alike
        for post in self._held[source]:
            cost_s = post.cost_s(self._wanted.get(to))
            if (pays := far.get(cost_s)) is None:
                pays = far[cost_s] = self._far(source, to, cost_s)
            if pays and (best is None or cost_s < best_s) and self._may_leave(post, source, to, cost_s):
                best, best_s = post, cost_s
                if cost_s <= 0.0:
                    break
        return best

    def _far(self, source: str, to: str, cost_s: float) -> bool:
        """Whether the runs are so far apart that a worker changes at such a cost."""
        turn = turn_s(self._slice_s, cost_s)
        return self._distance(to, turn) - self._distance(source, turn) > 1.0 + _MARGIN

    def _may_leave(self, post: WorkerPost, source: str, to: str, cost_s: float) -> bool:
        if to in post.unfit or not self._worth(post, to):
            return False
        lacking = self._short[to] - self._short[source] > 1.0 + _MARGIN
        stays_s = max(_LEAST_STAY * self._slice_s, (_WORTH if lacking else _TURNS) * cost_s)
        return self._now - post.since >= stays_s
