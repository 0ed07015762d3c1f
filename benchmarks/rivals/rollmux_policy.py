"""RollMux's scheduler, written anew from arXiv 2512.11306: Algorithm 1 for groups, and a FIFO queue at each node.

A job that comes is tried in each group that is not saturated: on a rollout node that is there, and on a new one. It is
admitted where a simulated group keeps every member within its bound, and takes the place with the smallest added price,
a new group included. Groups are not packed again when jobs leave. Its paper plans with the longest responses; its
experiments, and so this, with measured means. Where the simulation merges tails, it moves those of rollouts away, and
plans with that.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Final

from ebbtide.coordinator.rules.phase_turns import NO_MERGING, Returning, TailMerging, Waiter, rollout_ends
from ebbtide.coordinator.rules.run_groups import Move, RunGroup, Seat, Terms
from ebbtide.simulator.shared_devices import Job, seated_alone

_ROUNDS: Final = 20
_TRAINER: Final = -1
_MAIN, _TAIL, _TRAINED = range(3)


class RollMuxPolicy:
    """`largest`: jobs of a group; `mixes`: narrow jobs join groups of wide ones, and are as much faster there;
    `prunes`: saturated groups take nobody, as in the paper. The published code does not look.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        merging: TailMerging = NO_MERGING,
        largest: int = 5,
        mixes: bool = False,
        prunes: bool = True,
    ) -> None:
        self.merging, self.review_every_s = merging, inf
        self._terms, self._largest, self._mixes, self._prunes = terms, largest, mixes, prunes
        self._jobs: dict[str, Job] = {}
        self._groups = 0

    def arrived(self, job: Job, groups: Mapping[str, RunGroup]) -> RunGroup:
        self._jobs[job.name] = job
        open_ = [group for group in groups.values() if self._open(job, group)]
        places = [(group, unit) for group in open_ for unit in group.units]
        places += [(group, 1 + max(group.units)) for group in open_]
        for group, unit in places:
            units = group.units if unit in group.units else (*group.units, unit)
            found = RunGroup(group.name, group.width, units, (*group.seats, Seat(job.name, unit)))
            if self._fits(found) and self._keeps_bounds(found):
                return found
        self._groups += 1
        return seated_alone(job.name, f"g{self._groups}", job.width)

    def left(self, name: str) -> None:
        del self._jobs[name]

    def turn(self, waiters: Sequence[Waiter], returning: Sequence[Returning]) -> int:  # noqa: ARG002
        return max(range(len(waiters)), key=lambda at: (waiters[at].waited, -at))

    def trained(self, name: str, rollout_s: float, train_s: float, alone_s: float, took_s: float) -> None:
        pass

    def review(self, groups: Mapping[str, RunGroup], left: Sequence[str]) -> list[Move]:  # noqa: ARG002
        return []

    def _open(self, job: Job, group: RunGroup) -> bool:
        if len(group.seats) >= self._largest or (
            group.width != job.width and not (self._mixes and job.width < group.width)
        ):
            return False
        if not self._prunes:
            return True
        members = [self._jobs[seat.run_id] for seat in group.seats]
        cycle = max(sum(_times(one, group.width)) for one in members)
        units = dict.fromkeys(group.units, 0.0)
        for seat in group.seats:
            units[seat.unit] += _times(self._jobs[seat.run_id], group.width)[0] * self.merging.occupied
        load = max(sum(_times(one, group.width)[1] for one in members), *units.values())
        return load < cycle

    def _fits(self, group: RunGroup) -> bool:
        units = dict.fromkeys(group.units, 0)
        for seat in group.seats:
            units[seat.unit] += self._jobs[seat.run_id].rollout_bytes
        trained = sum(self._jobs[seat.run_id].train_bytes for seat in group.seats)
        return max(units.values()) <= self._terms.rollout_memory and trained <= self._terms.train_memory

    def _keeps_bounds(self, group: RunGroup) -> bool:
        members = [self._jobs[seat.run_id] for seat in group.seats]
        slowdowns = fifo_slowdowns(
            [(*_times(one, group.width), one.rollout_switch_s, one.train_switch_s) for one in members],
            [seat.unit for seat in group.seats],
            self.merging,
        )
        return all(
            found * one.width / group.width <= one.max_slowdown for found, one in zip(slowdowns, members, strict=True)
        )


def _times(job: Job, nodes: int) -> tuple[float, float]:
    return job.expected_rollout_s * job.width / nodes, job.expected_train_s * job.width / nodes


def fifo_slowdowns(
    times: Sequence[tuple[float, float, float, float]], units: Sequence[int], merging: TailMerging = NO_MERGING
) -> list[float]:
    """How much longer each job's rounds are than alone, with FIFO queues. `times`: seconds of a rollout, of training,
    and of the switch before each where another job was in between; `units`: the rollout node of each.
    """
    queues: dict[int, list[int]] = {unit: [] for unit in (_TRAINER, *units)}
    busy: dict[int, int] = dict.fromkeys(queues, -1)
    last: dict[int, int] = dict.fromkeys(queues, -1)
    tails: dict[int, float] = dict.fromkeys(queues, 0.0)
    events: list[tuple[float, int, int]] = []
    ends: list[list[float]] = [[] for _ in times]

    def start(now: float, place: int) -> None:
        if busy[place] >= 0 or not queues[place]:
            return
        at = queues[place].pop(0)
        kind = _TRAINED if place == _TRAINER else _MAIN
        begin = now + (times[at][3 if kind else 2] if last[place] not in (at, -1) else 0.0)
        busy[place] = last[place] = at
        if kind == _TRAINED:
            heappush(events, (begin + times[at][1], _TRAINED, at))
            return
        main, end = rollout_ends(begin, times[at][0], max(0.0, tails[place] - begin), merging)
        tails[place] = end if main < end else tails[place]
        heappush(events, (main, _MAIN, at))
        heappush(events, (end, _TAIL, at))

    for at, unit in enumerate(units):
        queues[unit].append(at)
    for unit in set(units):
        start(0.0, unit)
    while min(len(one) for one in ends) <= _ROUNDS:
        now, kind, at = heappop(events)
        place, following = (units[at], _TRAINER) if kind != _TRAINED else (_TRAINER, units[at])
        if kind != _TAIL:
            busy[place] = -1
        if kind != _MAIN:
            queues[following].append(at)
        if kind == _TRAINED:
            ends[at].append(now)
        start(now, place)
        start(now, following)
    return [(one[-1] - one[0]) / (len(one) - 1) / (took[0] + took[1]) for one, took in zip(ends, times, strict=True)]
