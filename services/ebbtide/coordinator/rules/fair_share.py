"""Divides the fleet among runs: the share that each is due, who gets which worker, and what each is still owed.

Shares follow from weights, floors, ceilings, priorities, and what each run can use: weighted max-min fairness by
filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2), with lower and upper bounds, one priority class
after the other. The floors of lower classes are reserved for them. Capacity that no run can use is divided once more
among all, limited only by ceilings: that costs no run anything.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from math import exp, inf
from operator import attrgetter
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide.errors import NotReady

#: Shares that differ by less are equal: they are floats.
EPSILON: Final = 1e-9


class Demand(Struct, frozen=True, kw_only=True):
    """A run with work. `weight`, `floor`, `ceiling`, `priority`: see `ShareSpec`."""

    run_id: str
    weight: float = 1.0
    floor: float = 0.0
    ceiling: float | None = None
    priority: int = 0
    wants: float = inf  # workers that its rollouts would fill
    owed_s: float = 0.0  # worker-seconds; below 0: that it owes
    work_s: float = inf  # worker-seconds that its rollouts would take
    starved_s: float = 0.0  # for how long it has had work and no worker
    architecture: str = ""  # of its weights, once known


class _Part(NamedTuple):
    run_id: str
    weight: float
    low: float
    high: float


def entitled(demands: Iterable[Demand], workers: int) -> dict[str, float]:
    """Each run's share of a fleet of so many workers. The sum is 1, or less if ceilings limit all runs."""
    if not workers:
        return {}
    runs = sorted(demands, key=lambda one: -one.priority)
    usable = {one.run_id: min(_ceiling(one), one.wants / workers) for one in runs}
    floors = {one.run_id: min(one.floor, usable[one.run_id]) for one in runs}
    shares = _by_class(runs, floors, usable)
    if sum(shares.values()) < 1.0 - EPSILON:
        shares = _by_class(runs, shares, {one.run_id: _ceiling(one) for one in runs})
    return shares


def check_floor(run_id: str, floor: float, floors: Mapping[str, float]) -> None:
    """Raises `NotReady` if the fleet cannot promise `floor` to a run beside the `floors` of the other live runs."""
    others = {name: value for name, value in floors.items() if value > 0.0 and name != run_id}
    left = 1.0 - sum(others.values())
    if floor <= left + EPSILON:
        return
    held = ", ".join(f"{name} ({value:g})" for name, value in sorted(others.items(), key=lambda item: -item[1])[:5])
    raise NotReady(
        f"share.floor: {floor:g} of the fleet cannot be promised: live runs have floors of {1.0 - left:g} in all: "
        f"{held}; ask for at most {max(0.0, left):.3g}, or wait until one of them has ended"
    )


def _by_class(runs: Sequence[Demand], low: Mapping[str, float], high: Mapping[str, float]) -> dict[str, float]:
    """`runs`: highest priority first. Each class gets what higher classes, and the `low` of lower ones, leave."""
    shares: dict[str, float] = {}
    left, reserved = 1.0, sum(low.values())
    for _, members in groupby(runs, key=lambda one: one.priority):
        parts = [_Part(one.run_id, one.weight, low[one.run_id], high[one.run_id]) for one in members]
        reserved -= sum(part.low for part in parts)
        given = _filled(left - reserved, parts)
        left -= sum(given.values())
        shares |= given
    return shares


def _filled(room: float, parts: Sequence[_Part]) -> dict[str, float]:
    """Divide `room` among `parts` in proportion to their weights within their bounds; exact, bound by bound."""
    lows = sum(part.low for part in parts)
    if lows >= room - EPSILON:  # nothing is left to share
        return {part.run_id: part.low for part in parts}
    if sum(part.high for part in parts) <= room:
        return {part.run_id: part.high for part in parts}
    events = sorted(
        event
        for part in parts
        for event in ((part.low / part.weight, part.weight), (part.high / part.weight, -part.weight))
    )
    level, total, slope = 0.0, lows, 0.0
    for at, change in events:
        if slope > EPSILON and total + slope * (at - level) >= room:
            break
        total, level, slope = total + slope * (at - level), at, slope + change
    level += (room - total) / slope if slope > EPSILON else 0.0
    return {part.run_id: min(part.high, max(part.low, level * part.weight)) for part in parts}


def _ceiling(one: Demand) -> float:
    return 1.0 if one.ceiling is None else one.ceiling


#: A worker changes only between runs that are apart by so much more than one worker: fractional shares would otherwise
#: be rounded up and down all the time.
_MARGIN: Final = 0.25
#: A turn lasts so many times its change, so that changes take a tenth of the time at most.
_TURNS: Final = 10.0
#: A worker stays for at least this part of `timeslice_s` after a change; also for a turn or, if a run permanently lacks
#: a whole worker, for so many times the cost of the change.
_LEAST_STAY: Final = 0.25
_WORTH: Final = 2.0
#: Workers that change by one decision: each is sought among all of a run's, and others change by the next decision.
_AT_ONCE: Final = 32


class WorkerPost(Struct, frozen=True, kw_only=True, gc=False):
    session_id: str
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


def turn_s(timeslice_s: float, cost_s: float) -> float:
    """How long a worker serves a run at least, on average, if a change takes `cost_s` and others wait."""
    return max(timeslice_s, _TURNS * cost_s)


def allot(
    posts: Sequence[WorkerPost], demands: Sequence[Demand], *, now: float, timeslice_s: float, rest_owed_s: float = 0.0
) -> dict[str, str]:
    """The run of each worker; one that no run wants stays. `rest_owed_s`: `Demand.owed_s` of the run "".

    A worker holds the weights of one run at a time, so runs share workers, not slots.

    Each run is due a number of workers, usually a fraction: its share of the fleet, corrected by the tokens that it is
    owed or owes (`ShareAccounts`). Workers change from the run furthest above its due to the run furthest below, if
    that brings both nearer by more than a margin; the remainder is corrected over time. This is weighted fair queueing
    in the manner of start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with tokens for bytes, as in the
    virtual token counter of Sheng et al. (OSDI 2024), but with few, slow servers that are costly to change. So the
    longer a change takes, the less a debt counts: turns last about `timeslice_s`, or ten times the change.

    The run "" stands for rest: workers that ceilings keep from every run. They get nothing.
    """
    if not posts or not demands:
        return {post.session_id: post.run_id for post in posts}
    return _Allotment(posts, demands, now, timeslice_s, rest_owed_s).decided()


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
        self, posts: Sequence[WorkerPost], demands: Sequence[Demand], now: float, timeslice_s: float, rest_owed_s: float
    ) -> None:
        self._now, self._timeslice_s = now, timeslice_s
        self._wanted = {demand.run_id: demand for demand in demands}
        shares = entitled(demands, len(posts))
        self._short = {run_id: share * len(posts) for run_id, share in shares.items()}  # workers that it lacks
        self._owed_s = _usable_debts(demands, self._short)
        if (rest := 1.0 - sum(shares.values())) > EPSILON:
            self._short[""], self._owed_s[""] = rest * len(posts), rest_owed_s
        self._runs = {post.session_id: post.run_id for post in posts}
        self._held: dict[str, list[WorkerPost]] = {run_id: [] for run_id in self._short}
        free: list[WorkerPost] = []
        for post in posts:
            if post.run_id in self._held and post.run_id not in post.unfit:
                self._give(post, post.run_id)
            else:
                free.append(post)
        self._free = free
        for held in self._held.values():
            held.sort(key=attrgetter("running", "session_id"))

    def decided(self) -> dict[str, str]:
        for post in sorted(self._free, key=lambda one: (one.has not in self._short, one.running, one.session_id)):
            self._place(post)
        for _ in range(_AT_ONCE):
            if not self._change():
                break
        return self._runs

    def _give(self, post: WorkerPost, run_id: str) -> None:
        self._runs[post.session_id] = run_id
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
        most = max(self._distance(run_id, self._timeslice_s) for run_id in fit)
        near = [run_id for run_id in fit if self._distance(run_id, self._timeslice_s) > most - _MARGIN]
        run_id = min(near, key=lambda one: (one != post.has, -self._distance(one, self._timeslice_s), one))
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
        ranked = sorted(self._short, key=lambda run_id: (-self._distance(run_id, self._timeslice_s), run_id))
        for to in ranked:
            for source in reversed(ranked):
                apart = self._distance(to, self._timeslice_s) - self._distance(source, self._timeslice_s)
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
        turn = turn_s(self._timeslice_s, cost_s)
        return self._distance(to, turn) - self._distance(source, turn) > 1.0 + _MARGIN

    def _may_leave(self, post: WorkerPost, source: str, to: str, cost_s: float) -> bool:
        if to in post.unfit or not self._worth(post, to):
            return False
        lacking = self._short[to] - self._short[source] > 1.0 + _MARGIN
        stays_s = max(_LEAST_STAY * self._timeslice_s, (_WORTH if lacking else _TURNS) * cost_s)
        return self._now - post.since >= stays_s


#: Stands for the capacity that ceilings keep from every run.
REST: Final = ""
#: Time constants: of tokens per worker, of the debts of runs without work, and of the reported shares.
_RATE_S: Final = 10.0
_FORGOTTEN_S: Final = 5.0
_LATELY_S: Final = 30.0
#: Largest credit or debt, in turns of the workers that the run is due.
_DEBT_TURNS: Final = 8.0
#: Largest credit of a run that does not wait for workers, in turns of one worker.
_SPARED: Final = 0.5
#: Assumed time to install another run's weights, until one is measured.
CHANGE_S: Final = 1.0
#: A run's lower demand is believed after so many times the cost of a change (the rent-or-buy rule: by then waiting has
#: cost as much as changing and back), within these bounds.
_PATIENCE: Final = 2.0
_PATIENCE_S: Final = (0.25, 30.0)


class RunDue(Struct, frozen=True):
    share: float  # of the fleet
    waits: bool  # it has queued rollouts, and is not held back from starting them


class ShareAccounts:
    """Accounts the tokens that each run was due against those that it got.

    Invariant: each `tick` divides the tokens made for runs with work by what each was due; a run that got less is owed
    the difference. So debts add up to zero, except where bounds cut them off. A run that does not wait for workers
    could not have used more: it is owed almost nothing, and the others get what it left. Runs without work lose credit
    and debt within seconds: idle runs accrue no credit, and using spare capacity incurs no debt. Lost with the process:
    no run is owed anything then.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._owed: dict[str, float] = {}  # run -> tokens
        self._tokens = self._worked_s = 0.0  # lately, of all workers: what they made in how long
        self._lately: dict[str, float] = {}

    @property
    def rate(self) -> float:
        """Tokens/s of a working worker; 0.0 while nothing is known."""
        return self._tokens / self._worked_s if self._worked_s > EPSILON else 0.0

    def owed_s(self, run_id: str) -> float:
        """Worker-seconds that the run is owed; below 0: that it owes."""
        return self._owed.get(run_id, 0.0) / self.rate if self.rate else 0.0

    def lately(self, run_id: str) -> float:
        """The run's share of the tokens made within half a minute or so."""
        total = sum(self._lately.values())
        return self._lately.get(run_id, 0.0) / total if total > EPSILON else 0.0

    def tick(
        self,
        made: Mapping[str, int],
        due: Mapping[str, RunDue],
        *,
        workers: int,
        resting: int,
        turn_s: float,
        now: float,
    ) -> None:
        """Account for the time since the last call. `made`: tokens by run; `due`: of the runs with work; of `workers`
        that worked or rested, so many were `resting`.
        """
        span_s, self._at = max(0.0, now - self._at), now
        self._learn(made, span_s, workers - resting)
        got = {run_id: float(made.get(run_id, 0)) for run_id in due}
        shares = {run_id: one.share for run_id, one in due.items()}
        if (rest := 1.0 - sum(shares.values())) > EPSILON and due:
            shares[REST], got[REST] = rest, resting * span_s * self.rate
        least = _SPARED * turn_s * self.rate
        spared = {run_id for run_id, one in due.items() if not one.waits}
        for run_id, paid in self._paid(shares, got, spared, least).items():
            most = _DEBT_TURNS * turn_s * self.rate * max(1.0, shares[run_id] * workers)
            self._owed[run_id] = max(-most, min(most, self._owed.get(run_id, 0.0) + paid - got[run_id]))
        self._forget(shares, span_s)

    def _paid(
        self, shares: Mapping[str, float], got: Mapping[str, float], spared: Collection[str], least: float
    ) -> dict[str, float]:
        """The tokens due to each run. A `spared` run that is owed `least` is due what it got."""
        even: set[str] = set()
        while True:
            rest = {run_id: share for run_id, share in shares.items() if run_id not in even}
            pool, total = sum(got[run_id] for run_id in rest), sum(rest.values())
            part = pool / total if total > EPSILON else 0.0
            paid = {run_id: got[run_id] if run_id in even else part * share for run_id, share in shares.items()}
            more = {
                run_id
                for run_id in rest
                if run_id in spared and self._owed.get(run_id, 0.0) + paid[run_id] - got[run_id] > least
            }
            if not more:
                return paid
            even |= more

    def _learn(self, made: Mapping[str, int], span_s: float, working: int) -> None:
        fade, fade_lately = exp(-span_s / _RATE_S), exp(-span_s / _LATELY_S)
        self._tokens = fade * self._tokens + sum(made.values())
        self._worked_s = fade * self._worked_s + working * span_s
        for run_id in self._lately.keys() | made.keys():
            self._lately[run_id] = fade_lately * self._lately.get(run_id, 0.0) + made.get(run_id, 0)
        self._lately = {run_id: tokens for run_id, tokens in self._lately.items() if tokens > 0.5}

    def _forget(self, working: Collection[str], span_s: float) -> None:
        fade = exp(-span_s / _FORGOTTEN_S)
        for run_id in self._owed.keys() - working:
            self._owed[run_id] *= fade
            if abs(self._owed[run_id]) < 1.0:
                del self._owed[run_id]


class WorkerDemand:
    """Smooths how many workers runs want: a run between two steps still wants some."""

    def __init__(self) -> None:
        self._believed: dict[str, float] = {}
        self._fell: dict[str, tuple[float, float]] = {}  # run -> since when it wants less, and the most since then

    def believed(self, wanted: Mapping[str, float], *, change_s: float, now: float) -> dict[str, float]:
        """The believed demands, from the present ones; without runs that have wanted nothing for long."""
        least, most = _PATIENCE_S
        patience_s = min(most, max(least, _PATIENCE * change_s))
        for run_id in self._believed.keys() - wanted.keys():
            del self._believed[run_id]
            self._fell.pop(run_id, None)
        for run_id, wants in wanted.items():
            if wants >= self._believed.get(run_id, 0.0):
                self._believed[run_id] = wants
                self._fell.pop(run_id, None)
                continue
            since, highest = self._fell.get(run_id, (now, wants))
            self._fell[run_id] = since, max(highest, wants)
            if now - since >= patience_s:
                self._believed[run_id] = max(highest, wants)
                self._fell[run_id] = now, wants
        return {run_id: wants for run_id, wants in self._believed.items() if wants > 0.0}


class ChangeoverTimes:
    """Learns how long workers take to change runs, without engine restarts; unknown ones get a typical time."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}  # by worker
        self._typical = CHANGE_S

    def learn(self, worker_id: str, seconds: float) -> None:
        """Note the time that a worker's change took."""
        self._typical = 0.5 * ((self._typical if self._known else seconds) + seconds)
        self._known[worker_id] = 0.5 * (self._known.get(worker_id, seconds) + seconds)

    def typical(self) -> float:
        return self._typical

    def estimate(self, worker_id: str) -> float:
        return self._known.get(worker_id, self._typical)

    def keep(self, workers: Collection[str]) -> None:
        """Forget all workers but these."""
        if len(self._known) > 2 * len(workers) + 16:
            self._known = {key: value for key, value in self._known.items() if key in workers}


class LeftRun(Struct, frozen=True):
    """What a run has to do at the moment of a change."""

    waiting: int  # rollouts
    running: int


def change_reason(left: LeftRun | None) -> str:
    """The reason of a change. `left`: the run that the worker leaves, None if it has ended or there was none.

    Rollouts that run while none waits are a step's tail: they need fewer workers than the run has.
    """
    if left is None:
        return "no run had it"
    if left.waiting:
        return "by their shares"
    if left.running:
        return f"the last {left.running} rollouts of a step need fewer workers"
    return "no rollout is left between two steps"
