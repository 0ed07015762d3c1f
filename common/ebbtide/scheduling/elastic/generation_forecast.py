"""Forecasts when the groups of a step will be complete, with a trainer's devices up to a moment and without them after.

Engines are taken as one pool in which all running rollouts make tokens equally fast, since placement and moves keep it
so. Then completion is counted in tokens first: a rollout ends once each running one has made what that rollout lacks.
Times follow from the learnt speed of a typical engine at each load. As the queue runs dry the load falls and the rest
goes faster, but less is made in all: this is the tail, which the plain quotient of work and speeds does not have.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from operator import itemgetter
from typing import Final, NamedTuple

from msgspec import Struct

#: Nothing is generated without engines; loads below one rollout in each engine are as fast as one.
_LEAST_LOAD: Final = 1.0


class EngineTerms(Struct, frozen=True, kw_only=True):
    """What engines can do, in units of a typical one. Times in seconds."""

    remote: float  # speeds of all engines but the trainer's, together
    local: float  # those of the trainer's engines that generate, or would
    batch: float  # rollouts that a typical engine runs at once
    rate: Callable[[float], float]  # tokens/s of each of so many rollouts in a typical engine
    read_s: float = 0.0  # to prefill one token


class ForecastRollout(NamedTuple):
    """A rollout, or one that stands for several."""

    rest: float  # tokens to come
    group: int
    context: float  # tokens that another engine must read first
    running: bool


class CompletedGroup(NamedTuple):
    """When a group's last sample ends, in seconds from now, and by its number."""

    end_s: float
    group: int


def forecast_groups(
    rollouts: Sequence[ForecastRollout], terms: EngineTerms, *, cut_s: float, weight: float = 1.0
) -> list[CompletedGroup]:
    """Completions in order of time, if the trainer's engines end at `cut_s` (0: they do not generate). inf: nobody
    generates what is left. `weight`: so many rollouts does each one stand for.
    """
    return _Pool(rollouts, terms, weight).run(cut_s)


class _Pool:
    """Invariant: `_heap` has the running rollouts by the level, in tokens made by each since now, at which they end."""

    def __init__(self, rollouts: Sequence[ForecastRollout], terms: EngineTerms, weight: float) -> None:
        self._terms, self._weight = terms, weight
        self._left: dict[int, int] = {}
        for one in rollouts:
            self._left[one.group] = self._left.get(one.group, 0) + 1
        self._heap = [(one.rest, index) for index, one in enumerate(rollouts) if one.running]
        heapify(self._heap)
        self._rollouts = rollouts
        self._queue = [(one.rest, index) for index, one in enumerate(rollouts) if not one.running]
        self._queue.reverse()  # the first one last
        self._level = self._now_s = 0.0
        self._speeds: dict[float, float] = {}
        self._engines = 0.0

    def run(self, cut_s: float) -> list[CompletedGroup]:
        terms, done = self._terms, list[CompletedGroup]()
        cut = cut_s <= 0.0
        self._engines = terms.remote if cut else terms.remote + terms.local
        if cut:
            self._evict(0.0)
        self._fill()
        while self._heap:
            speed = self._speed()
            until_s = self._now_s + (self._heap[0][0] - self._level) / speed
            if not cut and until_s > cut_s:
                self._level += (cut_s - self._now_s) * speed
                self._now_s, cut = cut_s, True
                self._evict(terms.local / max(1e-9, self._engines))
                self._fill()
                continue
            self._level, index = heappop(self._heap)
            self._now_s = until_s
            self._ended(index, done)
            self._fill()
        done += [CompletedGroup(inf, group) for group, left in self._left.items() if left]
        return done

    def _ended(self, index: int, done: list[CompletedGroup]) -> None:
        group = self._rollouts[index].group
        self._left[group] -= 1
        if not self._left[group]:
            done.append(CompletedGroup(self._now_s, group))

    def _speed(self) -> float:
        """Tokens/s of each running rollout."""
        load = max(_LEAST_LOAD, min(self._terms.batch, len(self._heap) * self._weight / self._engines))
        key = round(load) if load < 16 else 4.0 * round(load / 4.0)  # speeds change little with the load
        found = self._speeds.get(key)
        if found is None:
            found = self._speeds[key] = max(1e-6, self._terms.rate(key))
        return found

    def _room(self) -> int:
        return max(1, round(self._terms.batch * self._engines / self._weight)) if self._engines > 0 else 0

    def _fill(self) -> None:
        room = self._room()
        while self._queue and len(self._heap) < room:
            rest, index = self._queue.pop()
            heappush(self._heap, (self._level + rest, index))

    def _evict(self, share: float) -> None:
        """Take the trainer's engines away: a share of what runs is read again elsewhere. It takes its place in the
        order of the queue, which has older groups first.
        """
        self._engines = self._terms.remote
        running = sorted(self._heap, key=itemgetter(1))
        moved = round(share * len(running))
        taken = {int(at * len(running) / moved) for at in range(moved)} if moved else set[int]()
        kept = [one for at, one in enumerate(running) if at not in taken]
        room = self._room()
        waiting = [running[at] for at in taken] + kept[room:]
        self._heap = kept[:room]
        heapify(self._heap)
        self._queue += [(level - self._level, index) for level, index in waiting]
        self._queue.sort(key=itemgetter(1), reverse=True)
        if moved and self._engines > 0:
            read = sum(self._rollouts[running[at][1]].context + self._level for at in taken)
            self._now_s += read * self._terms.read_s * self._weight / self._engines
