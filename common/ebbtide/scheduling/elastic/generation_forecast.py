"""Forecasts when the groups of a step will be complete, with a trainer's devices up to a moment and without them after.

Engines are taken as one pool in which all running rollouts make tokens equally fast, since placement and moves keep it
so. Then completion is counted in tokens first: a rollout ends once each running one has made what that rollout lacks.
Times follow from the learnt pace of a typical engine at each load and length of contexts. As the queue runs dry the
load falls and the rest goes faster, but less is made in all: this is the tail, which the plain quotient of work and
speeds does not have. Meanwhile contexts grow, and the rest goes slower again.

What happens before the devices return is the same for all moments at which they may. It is forecast once.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ebbtide.scheduling.elastic.engine_pace import EnginePace

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.intp]


#: Of a rollout of which nobody knows where it runs.
_UNKNOWN: Final = -1


class EngineTerms(Struct, frozen=True, kw_only=True):
    """What engines can do, in units of a typical one. Times in seconds."""

    remote: float  # speeds of all engines but the trainer's, together
    local: float  # those of the trainer's engines that generate, or would
    held: float  # those of the trainer's engines that run rollouts now
    batch: float  # rollouts that a typical engine runs at once
    pace: EnginePace  # of a typical engine
    read_s: float = 0.0  # to prefill one token


class ForecastRollout(NamedTuple):
    """A rollout, or one that stands for several."""

    rest: float  # tokens to come
    group: int  # counted from 0
    context: float  # tokens that another engine must read first
    running: bool
    lent: bool | None = None  # it runs on one of the trainer's devices; None: that is not known


class GroupEnds(NamedTuple):
    """When each group's last sample ends, in seconds from now, in order of time; inf: nobody generates what is left.

    Both have one entry for each group.
    """

    end_s: Floats
    group: Numbers


class _Course(NamedTuple):
    """The rollouts that end, in order. A level is the number of tokens that each running rollout has made since now."""

    rollout: Numbers
    end_s: Floats
    level: Floats


class GenerationForecast:
    """`weight`: so many rollouts does each one stand for.

    Invariant: once `_whole` is there, `_ends`, `_bases`, `_begun` and `_rank` have its level at each rollout's end, its
    context less the level, the number of ends before its start, and its place among the ends.
    """

    def __init__(self, rollouts: Sequence[ForecastRollout], terms: EngineTerms, *, weight: float = 1.0) -> None:
        self._terms, self._weight = terms, weight
        self._rests = np.array([one.rest for one in rollouts], dtype=np.float64)
        self._contexts = np.array([one.context for one in rollouts], dtype=np.float64)
        self._groups = np.array([one.group for one in rollouts], dtype=np.intp)
        self._runs = np.array([one.running for one in rollouts], dtype=np.bool_)
        known = [one.lent for one in rollouts]
        self._lent = np.array([_UNKNOWN if one is None else int(one) for one in known], dtype=np.int8)
        self._count = int(self._groups.max()) + 1 if rollouts else 0
        size = len(rollouts)
        self._ends, self._bases = self._rests.copy(), self._contexts.copy()
        self._begun, self._rank = np.zeros(size, dtype=np.intp), np.full(size, size, dtype=np.intp)
        self._whole: _Course | None = None
        self._remote_pace = terms.pace.by_running(size, terms.remote, weight)

    def groups(self, cut_s: float) -> GroupEnds:
        """Completions, if the trainer's engines end at `cut_s` (0: they do not generate)."""
        if cut_s <= 0.0:
            terms, before = self._terms, _none()
            held = terms.held / max(1e-9, terms.remote + terms.held)
            after = self._without(np.flatnonzero(self._runs), np.flatnonzero(~self._runs), 0.0, 0.0, held)
        else:
            whole = self._together()
            passed = int(np.searchsorted(whole.end_s, cut_s, side="right"))
            before = _Course(whole.rollout[:passed], whole.end_s[:passed], whole.level[:passed])
            after = self._after(whole, passed, cut_s) if passed < len(whole.rollout) else _none()
        return self._complete(before, after)

    def _together(self) -> _Course:
        """What happens if the trainer's engines generate until the end."""
        if self._whole is None:
            terms = self._terms
            engines = terms.remote + terms.local
            pace = terms.pace.by_running(len(self._rests), engines, self._weight)
            pool = _Pool(self._ends, self._bases, self._begun, pace, self._room(engines))
            self._whole = pool.run(np.flatnonzero(self._runs), np.flatnonzero(~self._runs), 0.0, 0.0)
            self._rank[self._whole.rollout] = np.arange(len(self._whole.rollout))
        return self._whole

    def _after(self, whole: _Course, passed: int, cut_s: float) -> _Course:
        """What happens behind the cut."""
        from_s, from_level = (whole.end_s[passed - 1], whole.level[passed - 1]) if passed else (0.0, 0.0)
        share = (cut_s - from_s) / max(1e-9, whole.end_s[passed] - from_s)
        level = float(from_level + share * (whole.level[passed] - from_level))
        begun = self._begun <= passed
        terms = self._terms
        return self._without(
            np.flatnonzero(begun & (self._rank >= passed)),
            np.flatnonzero(~begun),
            cut_s,
            level,
            terms.local / max(1e-9, terms.remote + terms.local),
        )

    def _without(self, running: Numbers, queue: Numbers, now_s: float, level: float, share: float) -> _Course:
        """Take the trainer's engines away: what runs there is read again elsewhere, and takes its place in the order of
        the queue, which has older groups first. Where it is not known what runs there, it is taken to be a share of
        all, of whole groups: the trainer's engines have its weights first, and so the first groups.
        """
        terms, room = self._terms, self._room(self._terms.remote)
        if terms.remote <= 0.0:
            return _none()
        leaves = self._lent[running] == 1
        unknown = np.flatnonzero(self._lent[running] == _UNKNOWN)
        leaves[unknown[: round(share * len(unknown))]] = True
        cut, kept = running[leaves], running[~leaves]
        ends, bases = self._rests.copy(), self._contexts.copy()
        ends[running], bases[running] = self._ends[running], self._bases[running]
        now_s += float((bases[cut] + level).sum()) * terms.read_s * self._weight / terms.remote
        waiting = np.concatenate([cut, kept[room:]])
        ends[waiting] -= level  # the rest, as of those that never ran
        bases[waiting] += level
        pool = _Pool(ends, bases, None, self._remote_pace, room)
        return pool.run(kept[:room], np.sort(np.concatenate([waiting, queue])), now_s, level)

    def _room(self, engines: float) -> int:
        return max(1, round(self._terms.batch * engines / self._weight)) if engines > 0 else 0

    def _complete(self, before: _Course, after: _Course) -> GroupEnds:
        index, end_s = np.concatenate([before.rollout, after.rollout]), np.concatenate([before.end_s, after.end_s])
        last = np.zeros(self._count)
        last[self._groups[index]] = end_s  # in order of time: the last one stays
        if len(index) < len(self._groups):
            last[np.delete(self._groups, index)] = inf
        order = np.argsort(last, kind="stable")
        return GroupEnds(last[order], order)


class _Pool:
    """Runs rollouts to their ends. `ends`: the level at which each running one ends, and what is left of each waiting
    one; `bases`: contexts less the level, and of waiting ones contexts; `begun`: the number of ends before each start.
    Those of a rollout that begins are set then. `pace`: see `EnginePace.by_running`; `room`: the most that run at once.
    """

    def __init__(
        self, ends: Floats, bases: Floats, begun: Numbers | None, pace: tuple[Floats, Floats], room: int
    ) -> None:
        self._ends, self._bases, self._begun, self._room = ends, bases, begun, room
        self._fixed, self._by_context = pace

    def run(self, running: Numbers, queue: Numbers, now_s: float, level: float) -> _Course:
        first = max(0, self._room - len(running))
        self._begin(queue[:first], level, 0)
        running, queue = np.concatenate([running, queue[:first]]), queue[first:]
        if not len(running):
            return _none()
        if len(queue):
            head, running, now_s, level = self._while_some_wait(running, queue, now_s, level)
            tail = self._drain(running, now_s, level)
            return _Course(*(np.concatenate(both) for both in zip(head, tail, strict=True)))
        return self._drain(running, now_s, level)

    def _begin(self, which: Numbers, level: float, ended: int) -> None:
        self._ends[which] += level
        self._bases[which] -= level
        if self._begun is not None:
            self._begun[which] = ended

    def _while_some_wait(
        self, running: Numbers, queue: Numbers, now_s: float, level: float
    ) -> tuple[_Course, Numbers, float, float]:
        """Something begins whenever something ends, until nothing waits."""
        rests, bases = self._ends.tolist(), self._bases.tolist()
        heap = [(rests[index], index) for index in running.tolist()]
        heapify(heap)
        base = sum(bases[index] for _, index in heap)
        ended, end_s, levels = list[int](), list[float](), list[float]()
        begun = list[int]()
        fixed, by_context = self._fixed.tolist(), self._by_context.tolist()
        waiting = iter(queue.tolist())
        left = len(queue)
        while left:
            size = len(heap)
            until, index = heappop(heap)
            context = base / size + 0.5 * (level + until)
            now_s += (until - level) * (fixed[size] + by_context[size] * context)
            level = until
            base -= bases[index]
            ended.append(index)
            end_s.append(now_s)
            levels.append(level)
            if size <= self._room:
                new = next(waiting)
                left -= 1
                rests[new] += level
                bases[new] -= level
                base += bases[new]
                heappush(heap, (rests[new], new))
                begun.append(len(ended))
        self._ends[:], self._bases[:] = rests, bases
        if self._begun is not None:
            self._begun[queue] = begun
        course = _Course(np.array(ended, dtype=np.intp), np.array(end_s), np.array(levels))
        return course, np.array([index for _, index in heap], dtype=np.intp), now_s, level

    def _drain(self, running: Numbers, now_s: float, level: float) -> _Course:
        """Nothing waits: the load falls from end to end."""
        order = running[np.argsort(self._ends[running], kind="stable")]
        until = self._ends[order]
        since = np.concatenate([[level], until[:-1]])
        size = np.arange(len(order), 0, -1)
        context = np.cumsum(self._bases[order][::-1])[::-1] / size + 0.5 * (since + until)
        seconds = (until - since) * (self._fixed[size] + self._by_context[size] * context)
        return _Course(order, now_s + np.cumsum(seconds), until)


def _none() -> _Course:
    return _Course(np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros(0))
