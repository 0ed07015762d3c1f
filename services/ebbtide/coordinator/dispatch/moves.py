"""Moves running rollouts to workers where the step that they belong to would end sooner.

As in RLBoost (arXiv 2510.19225, Algorithm 2, section on load balancing), rollouts that wait in one engine go to an
engine where none wait, and running ones leave crowded engines for those with room. Three things differ. Rollouts move
one by one. No engine has to be idle. And a move has to pay: the expected end of the step, over what all rollouts on
both engines win and lose (`step_finish.py`), must come sooner by more than the hand-over and the reading cost the
fleet, and the rollout itself must end clearly sooner, by more than speeds are known. A borrowed worker counts for its
share of the time. What a likely reclaim or loss of a worker would cost is part of it: so long rollouts leave such
workers, and mostly short ones go there.

The work of a round is bounded, whatever the size of the fleet: it looks at a few sources in vain, and the next round
goes on after them (`MoveSearch`); of more than `_SAMPLE` engines some stand for the others in the expected end.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush, nlargest, nsmallest
from itertools import accumulate
from math import inf
from statistics import median
from typing import Final, NamedTuple, Protocol, cast

import numpy as np
from msgspec import Struct

from ebbtide.coordinator.dispatch.speeds import LOADS
from ebbtide.coordinator.dispatch.step_finish import EngineTerms, StepFinish
from ebbtide.coordinator.forecasts.length_learner import LengthCurve
from ebbtide.coordinator.rules.move_costs import COSTS, MoveCosts, risk_s
from ebbtide.coordinator.rules.placement import pending_limit
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.rules.worker_view import WorkerView, may_take

#: A rollout is stuck if it starts so much later than its prefill, and those before it, would take.
_STUCK_S: Final = 1.0
#: An engine has stalled that made no token for so long, though it had work and was not held (as in ROSE, arXiv
#: 2605.06534). Then the rollout that it prefills counts as stuck, too.
_STALLED_S: Final = 2.0
#: Sources that a round looks at in vain: each means to look at all of its rollouts.
_LOOKS: Final = 16
#: Engines over which the end of a step is estimated; in a larger fleet some of them stand for others.
_SAMPLE: Final = 32
#: After a round in which no rollout was worth moving, running ones are looked at again after so long: what is known of
#: them changes slowly; or once the fleet has changed.
_LOOK_AGAIN_S: Final = 3.0
#: A move has paid back, and is judged, at the first of these at which its rollout should be so many tokens ahead of
#: where it would be; else at the last.
_JUDGED_AFTER_S: Final = (30.0, 60.0, 120.0, 240.0)
_CLEAR_LEAD: Final = 64.0
#: Rollouts that move in a round to an engine with a load at which none was seen: they show how fast it is.
_TRIES: Final = 2
#: The least share of the time for which a borrowed worker counts.
_LEAST_SHARE: Final = 1e-3
#: Of so many targets the first one is taken that may take some rollout of the source, and is not so many times slower
#: to read it than a usual engine.
_TARGETS: Final = 6
_SLOW_READER: Final = 3.0
#: Times as long does a rollout stay with each attempt, up to so many of them.
_LONGER: Final = 4.0
_MOST_LONGER: Final = 4
#: Rollouts of a source that a look compares: evenly picked by what they have made.
_COMPARED: Final = 6


class RunningRollout(Struct, frozen=True, kw_only=True, gc=False):
    attempt_id: str
    rollout: QueuedRollout
    length: int  # tokens of prompt and response so far
    made: int  # of the response
    budget: int  # tokens that it may still make
    since: float  # when its worker got it
    started: bool
    stays: bool = False  # it must not move now
    cached: int = 0  # of `length`, what its worker had when it came
    attempts: int = 1  # so far


class EngineSpeed(Protocol):
    """What is known of an engine's speed."""

    def rate(self, running: float, context: float) -> float:
        """Tokens/s of each of `running` rollouts of a mean `context`; 0.0: nothing is known."""
        ...


class EngineLoad(Struct, frozen=True, kw_only=True):
    worker: WorkerView  # `running` counts requested moves as done
    speed: EngineSpeed
    context: float  # mean tokens of prompt and response
    quiet_s: float = 0.0  # since it made a token, while it had work and was not held
    #: Its rollouts in the order of arrival, without those asked back; called only if some may move.
    rollouts: Callable[[], Iterable[RunningRollout]]
    arriving: Sequence[RunningRollout] = ()  # those on their way from other engines
    seen_from: float = 0.0  # the smallest load at which such engines were seen


class MovePromise(NamedTuple):
    """How many tokens a running rollout should have made so many seconds after its move, by when the move should have
    paid back.
    """

    after_s: float
    tokens: float


class RolloutMove(NamedTuple):
    attempt_id: str
    source: str  # session of the worker
    target: str
    gain_s: float  # by which the step ends sooner; of a rollout that waits: for which it has waited
    promise: MovePromise | None = None  # of a running rollout


class MoveSearch:
    """Remembers which sources were looked at in vain, until all that may gain have been looked at. Small fleets are
    looked at whole in each round.
    """

    def __init__(self) -> None:
        self.waiting = set[str]()  # keys of engines with unstarted rollouts
        self.slow = set[str]()
        self.looks_at = -inf  # at running rollouts, unless the fleet is another one than then:
        self.known = (0, 0)  # engines, and lessons on their speeds


def rebalance(
    engines: Sequence[EngineLoad],
    lengths: LengthCurve,
    *,
    now: float,
    costs: MoveCosts = COSTS,
    running: int | None = None,
    search: MoveSearch | None = None,
    lesson: int = 0,
) -> list[RolloutMove]:
    """The moves to make now. Call only when no queued rollout could take the free slots. `running`: how many running
    ones may move; None: as many as pay. `search`: the caller's, kept from round to round; it is updated. `lesson`:
    grows when more is known of speeds.
    """
    if len(engines) < 2:
        return []
    sides, search = [_Side(engine) for engine in engines], search or MoveSearch()
    moves = _moved_waiting(sides, now, costs, search.waiting)
    known = (len(engines), lesson)
    if moves or (now < search.looks_at and search.known == known):
        return moves
    most = costs.at_once if running is None else min(running, costs.at_once)
    if not most:
        return moves
    moves = _moved_slow(sides, lengths, now, costs, search.slow, most)
    search.known = known
    search.looks_at = now + _LOOK_AGAIN_S if not moves and not search.slow else -inf
    return moves


class _Side:
    """A worker after the moves decided so far."""

    def __init__(self, engine: EngineLoad) -> None:
        self.engine = engine
        self.key = engine.worker.session_id
        self.load = engine.worker.running
        self.unstarted = engine.worker.pending
        self.arriving = 0  # rollouts that move here in this round
        self.stalled = engine.quiet_s >= _STALLED_S
        self._rollouts: list[RunningRollout] | None = None
        self.refresh()

    @property
    def waiting(self) -> int:
        """Its unstarted rollouts, without the first one while it makes tokens: that is being prefilled, as it would be
        anywhere.
        """
        return self.unstarted if self.stalled else max(0, self.unstarted - 1)

    def refresh(self) -> None:
        started = max(0, self.load - self.unstarted)
        self.now_rate = self.rate(started) if started else 0.0
        worker = self.engine.worker
        closed = worker.held or worker.shut or self.stalled
        most = pending_limit(worker) if started + 1 >= self.engine.seen_from else _TRIES
        room = self.load < worker.slots and not self.unstarted and self.arriving < most and not closed
        self.next_rate = self.rate(started + 1) if room else 0.0

    def rate(self, running: int) -> float:
        """Tokens/s of each of `running` rollouts; a borrowed worker's is scaled by its share of the time."""
        return max(_LEAST_SHARE, self.engine.worker.share) * self.engine.speed.rate(running, self.engine.context)

    def risk_s(self, one: RunningRollout, rest: float, rate: float, costs: MoveCosts) -> float:
        """Seconds that the rollout may lose here to a reclaim; `rate`: its tokens/s."""
        worker = self.engine.worker
        rate /= worker.share or 1.0
        return risk_s(
            one.length,
            rest,
            rate=rate,
            spell_s=worker.spell_s,
            prefill=worker.prefill,
            costs=costs,
        )

    def rollouts(self) -> list[RunningRollout]:
        if self._rollouts is None:
            self._rollouts = list(self.engine.rollouts())
        return self._rollouts

    def terms(self, costs: MoveCosts) -> EngineTerms:
        """Its part in the step."""
        ours = [*self.rollouts(), *self.engine.arriving]
        unread = sum(one.length - one.cached for one in ours if not one.started)
        most = max(len(ours), self.engine.worker.slots)
        loads = [*(load for load in LOADS if load < most), most]
        token_s = [1.0 / rate if (rate := self.rate(load)) else 0.0 for load in loads]
        return EngineTerms(
            rollouts=ours,
            loads=np.array(loads, dtype=float),
            token_s=np.array(token_s),
            busy_s=costs.read_s(unread, self.engine.worker.prefill),
        )

    def give(self, one: RunningRollout, target: "_Side") -> None:
        self.rollouts().remove(one)
        self.load -= 1
        target.load += 1
        target.arriving += 1
        self.refresh()
        target.refresh()


def _moved_waiting(sides: list[_Side], now: float, costs: MoveCosts, passed: set[str]) -> list[RolloutMove]:
    """Moves from the engine where most rollouts wait to one with room where none waits, until there is no pair."""
    moves: list[RolloutMove] = []
    open_ = [side for side in sides if side.next_rate > 0.0]
    queues = [side for side in sides if side.waiting and side.key not in passed] if open_ else []
    looks = 0
    while queues and len(moves) < costs.at_once:
        source = max(queues, key=lambda side: (side.waiting, side.key))
        rooms = [side for side in open_ if side.next_rate > 0.0 and side.arriving < source.waiting]
        found = _stuck(source, rooms, now, costs)
        if found is None:
            queues.remove(source)
            passed.add(source.key)
            looks += 1
            if looks == _LOOKS:
                break
            continue
        one, target = found
        moves.append(RolloutMove(one.attempt_id, source.key, target.key, now - one.since))
        source.unstarted -= 1
        source.give(one, target)
        if not source.waiting:
            queues.remove(source)
    if looks < _LOOKS:
        passed.clear()
    return moves


def _stuck(source: _Side, rooms: list[_Side], now: float, costs: MoveCosts) -> tuple[RunningRollout, _Side] | None:
    """The last stuck rollout that another engine has room for, and the fastest such engine.

    What its engine has of it in the cache, the other one reads; so it stays for as long as that would cost, unless the
    engine has stalled.
    """
    if not rooms:
        return None
    queue = sorted((one for one in source.rollouts() if not one.started), key=lambda one: one.since)
    reads_s = [costs.read_s(one.length - one.cached, source.engine.worker.prefill) for one in queue]
    waiting = list(zip(queue, accumulate(reads_s), strict=True))[0 if source.stalled else 1 :]
    bound_s = _STALLED_S if source.stalled else _STUCK_S
    for one, prefill_s in reversed(waiting):
        late_s = now - one.since - prefill_s - bound_s
        if one.stays or late_s < 0.0:
            continue
        fit = [side for side in rooms if _fits(one, side.engine.worker)]
        target = max(fit, key=lambda side: (side.next_rate, side.key), default=None)
        if target is None:
            continue
        again_s = costs.read_s(one.cached, target.engine.worker.prefill) * (1 + target.load)
        if source.stalled or late_s >= again_s:
            return one, target
    return None


def _moved_slow(
    sides: list[_Side], lengths: LengthCurve, now: float, costs: MoveCosts, passed: set[str], most: int
) -> list[RolloutMove]:
    """The moves with the largest gain from the slowest worker to the fastest, until none is worth its cost."""
    moves: list[RolloutMove] = []
    order, looks = _Order(sides, passed), 0
    step: _StepMoves | None = None
    while len(moves) < most:
        source = order.slowest()
        if source is None:
            break
        least = costs.advantage * source.now_rate
        targets = nlargest(_TARGETS, (side for side in sides if side.next_rate >= least), key=_openness)
        if not targets:
            break
        step = step or _StepMoves(sides, lengths, costs, passed)
        target = next((target for target in targets if step.serves(source, target, now)), None)
        move = step.best_move(source, target, now) if target is not None else None
        if move is None or target is None:
            passed.add(source.key)
            looks += 1
            if looks == _LOOKS:
                break
            continue
        moves.append(move)
        order.changed(source)
        order.changed(target)
    if looks < _LOOKS:
        passed.clear()
    return step.with_promises(moves) if step is not None else moves


def _fits(one: RunningRollout, worker: WorkerView) -> bool:
    """Whether the engine could take the rollout as long as it is now."""
    return one.length < worker.max_model_len and may_take(one.rollout, worker)


def _openness(side: _Side) -> tuple[float, int, str]:
    """The more, the sooner a rollout goes there: where it is fastest; of equals, the emptiest; then the last key."""
    return side.next_rate, -side.load, side.key


class _Order:
    """The engines by their present rate.

    Invariant: the heap has an entry for each engine's present rate. Entries with former ones are dropped when they come
    up.
    """

    def __init__(self, sides: list[_Side], passed: set[str]) -> None:
        self._passed = passed
        self._sides = sorted(sides, key=lambda side: side.key)
        self._at = {side.key: at for at, side in enumerate(self._sides)}
        self._slow = [(side.now_rate, at) for at, side in enumerate(self._sides) if side.now_rate > 0.0]
        heapify(self._slow)

    def slowest(self) -> _Side | None:
        """The engine whose rollouts are slowest, of those not `passed`; of equals, that with the first key."""
        while self._slow:
            rate, at = self._slow[0]
            side = self._sides[at]
            if rate == side.now_rate and side.key not in self._passed:
                return side
            heappop(self._slow)
        return None

    def changed(self, side: _Side) -> None:
        """Note that an engine's rate has changed."""
        if side.now_rate > 0.0:
            heappush(self._slow, (side.now_rate, self._at[side.key]))


def _weights(sides: Sequence[_Side], passed: Collection[str]) -> dict[str, float]:
    """The engines over which the end of a step is estimated, and for how many each stands: all of a small fleet; of a
    large one those that may give or get rollouts now, and an even sample of the others.
    """
    if len(sides) <= _SAMPLE:
        return {side.key: 1.0 for side in sides}
    slow = nsmallest(
        _LOOKS,
        (side for side in sides if side.now_rate > 0.0 and side.key not in passed),
        key=lambda side: (side.now_rate, side.key),
    )
    fast = nlargest(_LOOKS // 2, sides, key=_openness)
    weights = {side.key: 1.0 for side in (*slow, *fast)}
    others = [side.key for side in sides if side.key not in weights]
    picked = others[:: -(-len(others) // (_SAMPLE - len(weights)))]
    return weights | dict.fromkeys(picked, len(others) / len(picked))


class _StepMoves:
    """The step that the rollouts belong to, and the moves that make it end sooner."""

    def __init__(self, sides: Sequence[_Side], lengths: LengthCurve, costs: MoveCosts, passed: Collection[str]) -> None:
        self._costs = costs
        self._running = max(1, sum(side.load for side in sides))
        self._prefill = median(side.engine.worker.prefill for side in sides)
        weights = _weights(sides, passed)
        terms = {side.key: side.terms(costs) for side in sides if side.key in weights}
        self._finish = StepFinish(terms, lengths, weights=weights)
        self._moved = set[str]()

    def serves(self, source: _Side, target: _Side, now: float) -> bool:
        """Whether some rollout of the source could move to the target, and is not read there much more slowly than
        elsewhere.
        """
        if source.key not in self._finish or target.key not in self._finish:
            return False  # others stand for it in this round
        prefill = target.engine.worker.prefill or self._prefill
        return prefill * _SLOW_READER >= self._prefill and bool(self._candidates(source, target, now))

    def best_move(self, source: _Side, target: _Side, now: float) -> RolloutMove | None:
        """The move from the source to the target with the largest gain, made; None: none is worth its cost."""
        found: tuple[RolloutMove, int, float] | None = None
        for at in self._candidates(source, target, now):
            one = cast("RunningRollout", self._finish.rollouts(source.key)[at])
            read_s = self._costs.read_s(one.length, target.engine.worker.prefill)
            move = self._move(source, target, one, at, read_s)
            if move is not None and (found is None or move.gain_s > found[0].gain_s):
                found = move, at, read_s
        if found is None:
            return None
        move, at, read_s = found
        one = cast("RunningRollout", self._finish.rollouts(source.key)[at])
        self._finish.give(source.key, target.key, at, read_s=read_s)
        source.give(one, target)
        self._moved.add(one.attempt_id)
        return move

    def _candidates(self, source: _Side, target: _Side, now: float) -> list[int]:
        """Places of rollouts that may move, from those that have made least to those that have made most."""
        ours = cast("Sequence[RunningRollout]", self._finish.rollouts(source.key))
        stay_s, worker = self._costs.least_stay_s, target.engine.worker
        free = [
            at
            for at, one in enumerate(ours)
            if one.started
            and not one.stays
            and now - one.since >= stay_s * _LONGER ** min(_MOST_LONGER, one.attempts - 1)
            and one.attempt_id not in self._moved
            and _fits(one, worker)
        ]
        free.sort(key=lambda at: ours[at].made)
        if len(free) <= _COMPARED:
            return free
        return [free[place * (len(free) - 1) // (_COMPARED - 1)] for place in range(_COMPARED)]

    def _move(self, source: _Side, target: _Side, one: RunningRollout, at: int, read_s: float) -> RolloutMove | None:
        """The move of a rollout, if it pays."""
        costs, finish = self._costs, self._finish
        rest = finish.rest(source.key, at)
        moved = finish.moved(source.key, target.key, at, read_s=read_s)
        if finish.ends_s(source.key, rest) < costs.sooner * (costs.handover_s + moved.ends_s(rest)):
            return None
        gain_s = moved.gain_s
        if source.engine.worker.borrowed or target.engine.worker.borrowed:
            risk_s = source.risk_s(one, rest, source.now_rate, costs) - target.risk_s(
                one, rest, target.next_rate, costs
            )
            gain_s += finish.weight(source.key, at) * risk_s
        # Reading holds up those who run at the target: what that costs all rollouts on average has to come back, and a
        # part of what one rollout has on average of the time that is left, so that no move is made for a trifle.
        lost_s = (costs.handover_s + read_s * target.load) / self._running
        if not gain_s > max(costs.margin * lost_s, costs.least_part * finish.end_s / self._running):
            return None
        return RolloutMove(one.attempt_id, source.key, target.key, gain_s)

    def with_promises(self, moves: Sequence[RolloutMove]) -> list[RolloutMove]:
        """The moves with what they promise, now that all are known."""
        return [move._replace(promise=self._promise(move)) for move in moves]

    def _promise(self, move: RolloutMove) -> MovePromise:
        for after_s in _JUDGED_AFTER_S:
            tokens = self._finish.made(move.target, after_s - self._costs.handover_s)
            if tokens >= self._finish.made_before(move.source, after_s) + _CLEAR_LEAD:
                break
        return MovePromise(after_s, tokens)
