"""Decides whose turn it is on a device that several runs share, and forecasts what turns cost each of them.

A run alternates between a rollout, on the unit of rollout nodes where its engines' state is resident, and a training
phase on the group's trainer devices. The order is work-conserving, but for one case: a device that somebody waits for
idles only while a run is due whose bound the waiting one's phase would break, and never beyond the turns of
`MOST_PASSED` others. Of several that wait, those of the highest priority go first; of these, a run whose lag would
break its bound if it waited once more (the least slack first). Where no bound is near, the order that finishes the
waiting runs' next phases soonest, in relation to their rounds, decides: so short rounds pass long ones, and the long
ones are laid under them. A run that was passed over often enough goes next, so nobody starves. Strict round robin, as
in RollMux (arXiv 2512.11306, section 4), gives each run the longest round.

Once most responses of a rollout are there, the rest fits into a share of its unit, and what is freed goes to the next
run that waits (tail merging: JigsawRL, arXiv 2604.23838; the migration of RollMux).

Called by the simulator (`lab/ebbtide/simulator/shared_devices.py`) as the coordinator's keeper of turns is to call it:
`whose_turn` when a device falls free or somebody begins to wait for one that is, or leaves. `play` is called by
`run_groups.py`, which so plans by the very rule that decides the turns later.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf, sqrt
from typing import Final, NamedTuple

from msgspec import Struct

#: After so many turns of others on a device a run that waits for it goes first.
MOST_PASSED: Final = 3
#: A forecast plays so many rounds of each run after its first, and no more phases than these in all.
_ROUNDS: Final = 8
_MOST_PHASES: Final = 400
_CREDIT_ROUNDS: Final = 2.0


class PhaseForecast(Struct, frozen=True):
    """How long a phase will take."""

    seconds: tuple[float, ...]  # equally likely values, in no order that means anything; at least one
    mean: float
    error: float = 0.0  # of the mean, as the standard deviation of its logarithm

    @classmethod
    def of(cls, *seconds: float, error: float = 0.0) -> "PhaseForecast":
        """Of equally likely values."""
        return cls(seconds, sum(seconds) / len(seconds), error)


class TailMerging(Struct, frozen=True):
    """The end of a rollout, in which few responses are left. With `share` 0 there is none."""

    share: float = 0.0  # of the rollout's time, 0 to below 1
    kept: float = 1.0  # of the unit, 0 to 1: what the tail still needs when others wait

    @property
    def occupied(self) -> float:
        """How much of its rollout's time a run keeps its unit from others."""
        return 1.0 - self.share * (1.0 - self.kept)


NO_MERGING: Final = TailMerging()


class Waiter(NamedTuple):
    """A run that waits for a device. Times in seconds; the forecasts are means."""

    slack: float  # by which its rounds may still be later without breaking its bound; inf: it has none
    waited: float
    passed: int  # turns of others since it began to wait
    own: float  # that its phase will take here
    after: float  # that its next phase will take elsewhere
    place: int  # the device of its next phase: equal for runs that share it
    place_free: float  # until that device falls free
    round: float  # of one of its rounds alone
    priority: int = 0  # higher ones go first


class Returning(NamedTuple):
    """A run that will want a device again, and computes or waits elsewhere. Times in seconds."""

    due: float  # until it will
    slack: float  # see `Waiter`
    own: float  # that its phase will take here


def whose_turn(waiters: Sequence[Waiter], returning: Sequence[Returning] = ()) -> int | None:
    """The place in `waiters`, at least one, of the one to go first. Among equals the one that waited longest, and then
    the first in the sequence. None: the device waits for one of `returning`. Ask again when a run begins to wait for
    it, or leaves the group.
    """
    if not (returning or waiters[1:]):
        return 0
    passed = [at for at, one in enumerate(waiters) if one.passed >= MOST_PASSED]
    if passed:
        return max(passed, key=lambda at: (waiters[at].waited, -at))
    allowed = [at for at, one in enumerate(waiters) if not _in_the_way(one, returning)]
    highest = max((waiters[at].priority for at in allowed), default=0)
    allowed = [at for at in allowed if waiters[at].priority == highest]
    if len(allowed) <= 1:
        return allowed[0] if allowed else None
    urgent = [at for at in allowed if waiters[at].slack < _longest_other(waiters, at)]
    if urgent:
        return min(urgent, key=lambda at: (waiters[at].slack, -waiters[at].waited, at))
    by_wait = sorted(allowed, key=lambda at: -waiters[at].waited)
    return min(by_wait, key=lambda first: _lateness(waiters, first, by_wait))


def _in_the_way(one: Waiter, returning: Sequence[Returning]) -> bool:
    """Whether the phase of a run would break the bound of one that is due before its end, and can wait for it."""
    return any(
        one.own - other.due > other.slack and one.slack > other.due + other.own and other.slack < one.slack
        for other in returning
    )


def slack_s(alone_s: float, took_s: float, max_slowdown: float, round_s: float) -> float:
    """By how many seconds a run may still be later. `alone_s`: what its phases so far would have taken alone;
    `took_s`: what they took. Earlier speed counts for the slack of four rounds at most: a run that was alone for hours
    is not to be starved for hours.
    """
    if max_slowdown == inf:
        return inf
    return min(max_slowdown * alone_s - took_s, 4.0 * (max_slowdown - 1.0) * round_s)


def _longest_other(waiters: Sequence[Waiter], at: int) -> float:
    return max(one.own for number, one in enumerate(waiters) if number != at)


def _lateness(waiters: Sequence[Waiter], first: int, others: Sequence[int]) -> float:
    """When the waiting runs have finished their next phases if one goes first, each in relation to its round alone."""
    now, late = 0.0, 0.0
    free: dict[int, float] = {}
    for at in (first, *(one for one in others if one != first)):
        one = waiters[at]
        now += one.own
        end = max(now, free.get(one.place, one.place_free)) + one.after
        free[one.place] = end
        late += end / one.round
    return late


class TurnMember(Struct, frozen=True):
    """A run of a group, as `play` needs it."""

    rollout: tuple[float, ...]  # seconds, of successive rounds
    train: tuple[float, ...]
    unit: int  # of rollout nodes
    max_slowdown: float = inf
    rollout_switch_s: float = 0.0  # to bring its resident state back, where another run was in between
    train_switch_s: float = 0.0
    priority: int = 0


class PlayedRun(NamedTuple):
    """What became of a run."""

    slowdown: float  # seconds that its rounds took by seconds that they would have taken alone
    deviation: float  # of a round's slowdown, as a standard deviation


def play(members: Sequence[TurnMember], merging: TailMerging = NO_MERGING) -> list[PlayedRun]:
    """Forecast some rounds of each run, with phases of the given times in turns by `whose_turn`. The members' times
    repeat from the start when they are used up. It takes a millisecond or less of a core for a group of usual size.
    """
    if len(members) == 1:
        return [PlayedRun(1.0, 0.0)]
    return _Play(members, merging).run()


_TRAINER: Final = -1
_MAIN, _TAIL, _TRAINED = range(3)


class _Device:
    __slots__ = ("busy", "ends", "last", "tail_ends", "waiting")

    def __init__(self) -> None:
        self.busy = False
        self.ends = 0.0
        self.last = -1  # the run whose state is on the device
        self.tail_ends = 0.0
        self.waiting: list[int] = []


class _Play:
    def __init__(self, members: Sequence[TurnMember], merging: TailMerging) -> None:
        self.members, self.merging = members, merging
        self.devices = {unit: _Device() for unit in (_TRAINER, *{one.unit for one in members})}
        self.events: list[tuple[float, int, int, int]] = []
        self.order = count()
        number = len(members)
        self.rounds, self.since, self.passed = [0] * number, [0.0] * number, [0] * number
        self.alone, self.began = [0.0] * number, [0.0] * number
        self.first_end, self.last_end = [0.0] * number, [0.0] * number
        self.counted, self.ratios = [0.0] * number, [list[float]() for _ in members]
        self.means = [(sum(one.rollout) / len(one.rollout), sum(one.train) / len(one.train)) for one in members]
        self.place, self.due = [one.unit for one in members], [0.0] * number  # until a phase ends that was begun
        # As if each had had some rounds alone before.
        self.credit = [
            0.0 if one.max_slowdown == inf else _CREDIT_ROUNDS * (one.max_slowdown - 1.0) * sum(means)
            for one, means in zip(members, self.means, strict=True)
        ]

    def run(self) -> list[PlayedRun]:
        for at, one in enumerate(self.members):
            self.devices[one.unit].waiting.append(at)
        for unit in {one.unit for one in self.members}:
            self._start(unit, 0.0)
        phases = 0
        while phases < _MOST_PHASES and min(self.rounds) <= _ROUNDS:
            now, _, kind, at = heappop(self.events)
            phases += 1
            self._end(now, kind, at)
        return [self._played(at) for at in range(len(self.members))]

    def _played(self, at: int) -> PlayedRun:
        if not self.counted[at]:  # it did not get through two rounds
            return PlayedRun(inf, inf)
        slowdown = (self.last_end[at] - self.first_end[at]) / self.counted[at]
        ratios = self.ratios[at]
        spread = sqrt(sum((one - slowdown) ** 2 for one in ratios) / len(ratios))
        return PlayedRun(slowdown, spread)

    def _times(self, at: int) -> tuple[float, float]:
        one, number = self.members[at], self.rounds[at]
        return one.rollout[number % len(one.rollout)], one.train[number % len(one.train)]

    def _end(self, now: float, kind: int, at: int) -> None:
        unit = self.members[at].unit
        if kind == _MAIN:
            self.devices[unit].busy = False
            if (self.devices[unit].tail_ends > now) and self.devices[unit].waiting:
                self._start(unit, now)
            return
        if kind == _TAIL:
            self._wait(_TRAINER, at, now)
            self._start(unit, now)
            self._start(_TRAINER, now)
            return
        self.devices[_TRAINER].busy = False
        rollout, train = self._times(at)
        if self.rounds[at]:
            self.counted[at] += rollout + train
            self.ratios[at].append((now - self.last_end[at]) / (rollout + train))
            self.last_end[at] = now
        else:
            self.first_end[at] = self.last_end[at] = now
        self.alone[at] += rollout + train
        self.rounds[at] += 1
        self._wait(unit, at, now)
        self._start(_TRAINER, now)
        self._start(unit, now)

    def _wait(self, place: int, at: int, now: float) -> None:
        self.devices[place].waiting.append(at)
        self.place[at], self.since[at], self.passed[at] = place, now, 0

    def _start(self, place: int, now: float) -> None:
        """Let the next run that waits for a device begin, if it is free."""
        device = self.devices[place]
        if device.busy or not device.waiting:
            return
        chosen = self._chosen(place, device, now)
        if chosen is None:
            return
        device.waiting.remove(chosen)
        for other in device.waiting:
            self.passed[other] += 1
        device.busy = True
        one = self.members[chosen]
        rollout, train = self._times(chosen)
        other_state = device.last not in (chosen, -1)
        device.last = chosen
        if place == _TRAINER:
            self.due[chosen] = device.ends = now + train + (one.train_switch_s if other_state else 0.0)
            heappush(self.events, (device.ends, next(self.order), _TRAINED, chosen))
            return
        switch = one.rollout_switch_s if other_state else 0.0
        main, ends = rollout_ends(now + switch, rollout, max(0.0, device.tail_ends - now - switch), self.merging)
        device.ends, self.due[chosen] = main, ends
        if main < ends:
            device.tail_ends = ends
        heappush(self.events, (main, next(self.order), _MAIN, chosen))
        heappush(self.events, (ends, next(self.order), _TAIL, chosen))

    def _chosen(self, place: int, device: _Device, now: float) -> int | None:
        waiters = [self._waiter(place, at, now) for at in device.waiting]
        found = whose_turn(waiters, [self._returning(place, at, now) for at in self._elsewhere(place)])
        return device.waiting[found] if found is not None else None

    def _elsewhere(self, place: int) -> list[int]:
        """Runs with a bound that will want a device after what they do now."""
        return [
            at
            for at, one in enumerate(self.members)
            if self.place[at] != place and place in (_TRAINER, one.unit) and one.max_slowdown < inf
        ]

    def _returning(self, place: int, at: int, now: float) -> Returning:
        here = 1 if place == _TRAINER else 0
        before, own = self.means[at][1 - here], self.means[at][here]
        waits = at in self.devices[self.place[at]].waiting
        due = before if waits else max(0.0, self.due[at] - now)
        return Returning(due, self._slack(at, now + due, before), own)

    def _slack(self, at: int, now: float, more: float = 0.0) -> float:
        """`more`: seconds of phases, alone, that end until `now` and are not counted yet."""
        one = self.members[at]
        done = self.alone[at] + (self._times(at)[0] if self.place[at] == _TRAINER else 0.0) + more
        return slack_s(done, now - self.credit[at], one.max_slowdown, sum(self.means[at]))

    def _waiter(self, place: int, at: int, now: float) -> Waiter:
        one, (rollout, train) = self.members[at], self.means[at]
        elsewhere = one.unit if place == _TRAINER else _TRAINER
        other = self.devices[elsewhere]
        return Waiter(
            slack=self._slack(at, now),
            waited=now - self.since[at],
            passed=self.passed[at],
            own=train if place == _TRAINER else rollout * self.merging.occupied,
            after=rollout if place == _TRAINER else train,
            place=elsewhere,
            place_free=max(0.0, other.ends - now) if other.busy else 0.0,
            round=rollout + train,
            priority=one.priority,
        )


def rollout_ends(begin: float, rollout_s: float, beside_s: float, merging: TailMerging) -> tuple[float, float]:
    """When a rollout has its unit no more for itself, and when its last response is there. `beside_s`: for how long
    from `begin` another run's tail keeps its share of the unit.

    The rollout is slower beside the tail. A tail that would meet another one stays where it is: then both are equal.
    """
    main, tail = rollout_s * (1.0 - merging.share), rollout_s * merging.share
    speed = 1.0 - merging.kept
    if beside_s > 0.0:
        main = main / speed if main <= speed * beside_s else main + merging.kept * beside_s
    end = begin + main + tail
    return (end, end) if tail <= 0.0 or main < beside_s else (begin + main, end)
