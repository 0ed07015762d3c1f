"""Simulates several runs on the same devices: phases, turns, resident states, moves, and what the nodes cost.

A job alternates between rollouts and training phases whose times are drawn before, so that every policy has the same
ones, and the time that they would take alone is known exactly. A policy seats jobs, gives turns and moves jobs at the
ends of their rounds; `TurnsPolicy` asks the coordinator's own decisions, and `benchmarks/jobs` has others. What is
modelled: exclusive phases, the switch to a resident state, the cold start in a new place, and tails of rollouts that
are merged. What is not: links, failures, finite clusters.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.coordinator.forecasts.phase_times import PhaseTimes
from ebbtide.coordinator.rules.phase_turns import (
    Returning,
    TailMerging,
    Waiter,
    rollout_ends,
    slack_s,
    whose_turn,
)
from ebbtide.coordinator.rules.run_groups import (
    GroupPlanner,
    Move,
    NotSeated,
    RunGroup,
    Seat,
    SharingRun,
    Terms,
    group_price,
    without,
)


class Job(Struct, frozen=True, kw_only=True):
    """A run of a trace. Times in seconds."""

    name: str
    arrive_s: float
    rollouts: tuple[float, ...]  # of each of its rounds, alone
    trains: tuple[float, ...]
    expected_rollout_s: float  # what its submitter expects
    expected_train_s: float
    max_slowdown: float
    width: int = 1  # nodes of each kind
    rollout_bytes: int = 0  # of host memory of a node
    train_bytes: int = 0
    rollout_switch_s: float = 0.0
    train_switch_s: float = 0.0
    cold_s: float = 0.0
    leave_s: float = inf  # when it leaves whatever it has done; its rounds then begin anew when they are used up

    @property
    def alone_s(self) -> float:
        """For all of its rounds, alone, with its start."""
        return self.cold_s + sum(self.rollouts) + sum(self.trains)


class JobEnd(NamedTuple):
    """What became of a job."""

    rounds: int
    took_s: float
    alone_s: float  # what the same rounds take alone
    moves: int

    @property
    def slowdown(self) -> float:
        return self.took_s / self.alone_s


class SharedOutcome(NamedTuple):
    price: float  # of all nodes that groups had, for as long as they had them
    ends: Mapping[str, JobEnd]
    finished_s: float
    refused: Sequence[str]


class DevicePolicy(Protocol):
    """Who sits where, and whose turn it is."""

    merging: TailMerging
    review_every_s: float  # inf: never

    def arrived(self, job: Job, groups: Mapping[str, RunGroup]) -> RunGroup | None:
        """The group with the job in it, which may be new; None refuses the job."""
        ...

    def left(self, name: str) -> None: ...

    def turn(self, waiters: Sequence[Waiter], returning: Sequence[Returning]) -> int | None:
        """The place in `waiters` of the one that begins; None: none does before another one waits or leaves."""
        ...

    def trained(self, name: str, rollout_s: float, train_s: float, alone_s: float, took_s: float) -> None:
        """A job ended a round, which had these times without waiting. The others are of all of its rounds."""
        ...

    def review(self, groups: Mapping[str, RunGroup], left: Sequence[str]) -> list[Move]:
        """The moves to make now. `left`: groups that a job left since the last review."""
        ...


class TurnsPolicy:
    """The coordinator's own decisions."""

    def __init__(self, terms: Terms, *, review_every_s: float = 900.0) -> None:
        self.planner, self.merging, self.review_every_s = GroupPlanner(terms), terms.merging, review_every_s
        self._times: dict[str, tuple[PhaseTimes, PhaseTimes]] = {}
        self._runs: dict[str, SharingRun] = {}
        self._names = count()
        self._due: list[str] = []

    def arrived(self, job: Job, groups: Mapping[str, RunGroup]) -> RunGroup | None:
        times = PhaseTimes(job.expected_rollout_s), PhaseTimes(job.expected_train_s)
        run = SharingRun(
            run_id=job.name,
            rollout=times[0].forecast(),
            train=times[1].forecast(),
            width=job.width,
            rollout_bytes=job.rollout_bytes,
            train_bytes=job.train_bytes,
            max_slowdown=job.max_slowdown,
            rollout_switch_s=job.rollout_switch_s,
            train_switch_s=job.train_switch_s,
            cold_s=job.cold_s,
        )
        found = self.planner.seat(run, groups.values(), self._runs, new_name=f"g{next(self._names)}")
        if isinstance(found, NotSeated):
            return None
        self._times[job.name], self._runs[job.name] = times, run
        return found.group

    def left(self, name: str) -> None:
        del self._times[name], self._runs[name]
        self.planner.forget(name)

    def turn(self, waiters: Sequence[Waiter], returning: Sequence[Returning]) -> int | None:
        return whose_turn(waiters, returning)

    def trained(self, name: str, rollout_s: float, train_s: float, alone_s: float, took_s: float) -> None:
        rollout, train = self._times[name]
        rollout.observe(rollout_s)
        train.observe(train_s)
        known = self._runs[name]
        self._runs[name] = replace(
            known, rollout=rollout.forecast(), train=train.forecast(), alone_s=alone_s, took_s=took_s
        )

    def review(self, groups: Mapping[str, RunGroup], left: Sequence[str]) -> list[Move]:
        """Groups that somebody left come first, then those that are at risk, then one of the others in turn."""
        for name in (*left, *self._next(groups)):
            if name in groups and (found := self.reviewed(groups[name], groups)):
                return found
        return []

    def reviewed(self, group: RunGroup, groups: Mapping[str, RunGroup]) -> list[Move]:
        """The moves that one group's review decides."""
        return self.planner.review(group, groups.values(), self._runs, new_name=f"g{next(self._names)}")

    def _next(self, groups: Mapping[str, RunGroup]) -> list[str]:
        risky = [name for name, group in groups.items() if self.planner.at_risk(group, self._runs) is not None]
        if not self._due:
            self._due = list(groups)
        return [*risky, *(self._due.pop() for _ in range(min(_REVIEWED, len(self._due))))]


#: Groups that are looked at in turn in one review.
_REVIEWED: Final = 3
_TRAINER: Final = -1
_ARRIVE, _READY, _MAIN, _TAIL, _TRAINED, _REVIEW, _LEAVE = range(7)


class _Device:
    __slots__ = ("busy", "ends", "last", "tail_ends", "waiting")

    def __init__(self) -> None:
        self.busy = ""  # the job that has it
        self.ends = 0.0
        self.last = ""  # the job whose state is on it
        self.tail_ends = 0.0
        self.waiting: list[_Running] = []


class _Running:
    """A job that has arrived and not left."""

    __slots__ = (
        "alone_s",
        "began_s",
        "due",
        "group",
        "job",
        "means",
        "moves",
        "passed",
        "place",
        "rounds",
        "scale",
        "since",
        "target",
        "unit",
    )

    def __init__(self, job: Job, group: RunGroup, unit: int) -> None:
        self.job, self.group, self.unit = job, group.name, unit
        self.scale = job.width / group.width
        self.target: tuple[str, int] | None = None  # where it goes at the end of its round
        self.rounds = self.moves = self.passed = 0
        self.since = 0.0
        self.began_s, self.alone_s = job.arrive_s, job.cold_s
        self.means = job.expected_rollout_s * self.scale, job.expected_train_s * self.scale
        self.place = unit  # where it computes or waits
        self.due = 0.0  # until its phase ends, if it computes

    def began(self, now: float, place: int) -> None:
        """A phase, of which is known how long it takes on average."""
        self.due = now + self.means[1 if place == _TRAINER else 0]

    def alone(self) -> tuple[float, float]:
        """Seconds of its round's phases on its own nodes."""
        at = self.rounds % len(self.job.rollouts)
        return self.job.rollouts[at], self.job.trains[at]

    def times(self) -> tuple[float, float]:
        """The same on the nodes that it has: on twice as many in half the time."""
        rollout, train = self.alone()
        return rollout * self.scale, train * self.scale


class SharedDevices:
    """One simulation. `prices` are those of the policy's terms: of nodes and hours."""

    def __init__(self, jobs: Sequence[Job], policy: DevicePolicy, terms: Terms) -> None:
        self._policy, self._terms = policy, terms
        self._merging = policy.merging
        self._events: list[tuple[float, int, int, str]] = []
        self._order = count()
        self._jobs = {job.name: job for job in jobs}
        self._running: dict[str, _Running] = {}
        self._groups: dict[str, RunGroup] = {}  # as planned: a job that is to move sits where it will be
        self._devices: dict[tuple[str, int], _Device] = {}
        self._members: dict[str, list[_Running]] = {}  # who computes where now
        self._ends: dict[str, JobEnd] = {}
        self._refused: list[str] = []
        self._left: list[str] = []
        self._price = self._rate = self._billed_s = 0.0
        for job in jobs:
            self._push(job.arrive_s, _ARRIVE, job.name)

    def run(self) -> SharedOutcome:
        if self._policy.review_every_s < inf:
            self._push(self._policy.review_every_s, _REVIEW, "")
        now = 0.0
        while self._events and (self._running or len(self._ends) + len(self._refused) < len(self._jobs)):
            now, _, kind, name = heappop(self._events)
            if kind == _ARRIVE:
                self._arrive(now, self._jobs[name])
            elif kind == _REVIEW:
                self._review(now)
                self._push(now + self._policy.review_every_s, _REVIEW, "")
            elif (one := self._running.get(name)) is not None:
                self._happened(now, kind, one)
        self._bill(now)
        return SharedOutcome(self._price, self._ends, now, self._refused)

    def _push(self, at: float, kind: int, name: str) -> None:
        heappush(self._events, (at, next(self._order), kind, name))

    # Coming, moving, going.

    def _arrive(self, now: float, job: Job) -> None:
        group = self._policy.arrived(job, self._groups)
        if group is None:
            self._refused.append(job.name)
            return
        (unit,) = (seat.unit for seat in group.seats if seat.run_id == job.name)
        self._groups[group.name] = group
        one = self._running[job.name] = _Running(job, group, unit)
        self._members.setdefault(group.name, []).append(one)
        self._rebill(now)
        self._push(now + job.cold_s, _READY, job.name)
        if job.leave_s < inf:
            self._push(job.leave_s, _LEAVE, job.name)

    def _review(self, now: float) -> None:
        left, self._left = self._left, []
        moves = self._policy.review(self._groups, left)
        if any(self._running[move.seated.seat.run_id].target is not None for move in moves):
            return  # each move counts on the ones before it, and this one has still to be made
        for move in moves:
            one = self._running[move.seated.seat.run_id]
            self._unseat(one.group, one.job.name)
            self._groups[move.seated.group.name] = move.seated.group
            one.target = move.seated.group.name, move.seated.seat.unit
        self._rebill(now)

    def _unseat(self, group: str, name: str) -> None:
        rest = without(self._groups[group], name)
        if rest is None:
            del self._groups[group]
        else:
            self._groups[group] = rest

    def _leave(self, now: float, one: _Running) -> None:
        name = one.job.name
        self._unseat(one.target[0] if one.target is not None else one.group, name)
        for place in (one.unit, _TRAINER):
            device = self._device(one.group, place)
            device.waiting = [other for other in device.waiting if other is not one]
            if device.busy == name:
                device.busy = ""
            if one.place == place:
                device.tail_ends = now
        del self._running[name]
        self._members[one.group].remove(one)
        self._ends[name] = JobEnd(one.rounds, now - one.began_s, one.alone_s, one.moves)
        self._policy.left(name)
        self._left.append(one.group)
        self._rebill(now)
        for place in (one.unit, _TRAINER):
            self._start(now, one.group, place)

    # Phases.

    def _happened(self, now: float, kind: int, one: _Running) -> None:
        if kind == _LEAVE:
            self._leave(now, one)
        elif kind == _READY:
            self._wait(now, one, one.unit)
            self._start(now, one.group, one.unit)
        elif kind == _MAIN:
            device = self._device(one.group, one.unit)
            device.busy = ""
            self._start(now, one.group, one.unit)
        elif kind == _TAIL:
            one.alone_s += one.alone()[0]
            self._wait(now, one, _TRAINER)
            self._start(now, one.group, one.unit)
            self._start(now, one.group, _TRAINER)
        else:
            self._trained(now, one)

    def _trained(self, now: float, one: _Running) -> None:
        rollout, train = one.alone()
        group = one.group
        self._device(group, _TRAINER).busy = ""
        one.alone_s += train
        one.rounds += 1
        had = one.means
        one.means = (0.9 * had[0] + 0.1 * rollout * one.scale, 0.9 * had[1] + 0.1 * train * one.scale)
        self._policy.trained(one.job.name, rollout, train, one.alone_s, now - one.began_s)
        if one.rounds >= len(one.job.rollouts) and one.job.leave_s == inf:
            self._leave(now, one)
            return
        if one.target is not None:
            self._members[group].remove(one)
            left = one.unit
            one.group, one.unit = one.target
            one.place, one.target = one.unit, None
            self._members.setdefault(one.group, []).append(one)
            one.moves += 1
            self._rebill(now)
            self._push(now + one.job.cold_s, _READY, one.job.name)
            self._start(now, group, left)  # which may have waited for it
        else:
            self._wait(now, one, one.unit)
            self._start(now, group, one.unit)
        self._start(now, group, _TRAINER)

    def _wait(self, now: float, one: _Running, place: int) -> None:
        one.since, one.passed, one.place = now, 0, place
        self._device(one.group, place).waiting.append(one)

    def _start(self, now: float, group: str, place: int) -> None:
        device = self._device(group, place)
        if device.busy or not device.waiting:
            return
        waiters = [self._waiter(now, one, place) for one in device.waiting]
        at = self._policy.turn(waiters, self._returning(now, group, place))
        if at is None:
            return
        one = device.waiting.pop(at)
        for other in device.waiting:
            other.passed += 1
        name = one.job.name
        switched = device.last not in (name, "")
        device.busy = device.last = name
        rollout, train = one.times()
        if place == _TRAINER:
            device.ends = now + train + (one.job.train_switch_s if switched else 0.0)
            one.began(now, place)
            self._push(device.ends, _TRAINED, name)
            return
        begin = now + (one.job.rollout_switch_s if switched else 0.0)
        main, ends = rollout_ends(begin, rollout, max(0.0, device.tail_ends - begin), self._merging)
        one.began(now, place)
        device.ends = main
        if main < ends:
            device.tail_ends = ends
        self._push(main, _MAIN, name)
        self._push(ends, _TAIL, name)

    def _waiter(self, now: float, one: _Running, place: int) -> Waiter:
        rollout, train = one.means
        elsewhere = one.unit if place == _TRAINER else _TRAINER
        other = self._device(one.group, elsewhere)
        return Waiter(
            slack=slack_s(one.alone_s, now - one.began_s, one.job.max_slowdown, rollout + train),
            waited=now - one.since,
            passed=one.passed,
            own=train if place == _TRAINER else rollout * self._merging.occupied,
            after=rollout if place == _TRAINER else train,
            place=elsewhere,
            place_free=max(0.0, other.ends - now) if other.busy else 0.0,
            round=rollout + train,
        )

    def _returning(self, now: float, group: str, place: int) -> list[Returning]:
        """Runs with a bound that will want a device after what they do now."""
        found = []
        for one in self._members.get(group, ()):
            if one.place != place and place in (_TRAINER, one.unit) and one.job.max_slowdown < inf:
                here = 1 if place == _TRAINER else 0
                before, own = one.means[1 - here], one.means[here]
                waits = one in self._device(group, one.place).waiting
                due = before if waits else max(0.0, one.due - now)
                slack = slack_s(one.alone_s + before, now + due - one.began_s, one.job.max_slowdown, sum(one.means))
                found.append(Returning(due, slack, own))
        return found

    def _device(self, group: str, place: int) -> _Device:
        found = self._devices.get((group, place))
        if found is None:
            found = self._devices[group, place] = _Device()
        return found

    # Money.

    def _bill(self, now: float) -> None:
        self._price += self._rate * (now - self._billed_s) / 3600.0
        self._billed_s = now

    def _rebill(self, now: float) -> None:
        """Pay what was had until now, and take the price of what is had from now on: of the nodes of planned groups,
        and of those that jobs which are to move still use.
        """
        self._bill(now)
        self._rate = sum(group_price(group, self._terms) for group in self._groups.values())
        still: dict[str, tuple[int, set[int]]] = {}
        for one in self._running.values():
            if one.target is not None:
                still.setdefault(one.group, (one.job.width, set()))[1].add(one.unit)
        for name, (width, units) in still.items():
            there = self._groups.get(name)
            more = len(units - set(there.units)) if there is not None else len(units)
            self._rate += width * (more * self._terms.rollout_price + (0.0 if there else self._terms.train_price))


def seated_alone(name: str, group: str, width: int) -> RunGroup:
    """A group of one job."""
    return RunGroup(group, width, (0,), (Seat(name, 0),))
