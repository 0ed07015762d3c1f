"""Moves running rollouts to workers where they would end sooner.

As in RLBoost (arXiv 2510.19225, Algorithm 2, section on load balancing), rollouts that wait in one engine go to an
engine where none wait, and those beyond the batch size at which throughput flattens go to one with room. Three things
differ. Rollouts move one by one. No engine has to be idle: a rollout's gain, by the learnt speeds, is compared with the
cost, which is the hand-over and a prefill that also delays the target's rollouts. And the rollout with the largest gain
moves, which is one with many tokens to come. A borrowed worker counts for its share of the time. What a likely reclaim
or loss of a worker would cost is part of the cost: so long rollouts leave such workers, and mostly short ones go there.

The work of a round is bounded, whatever the size of the fleet: it looks at a few sources in vain, and the next round
goes on after them (`MoveSearch`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate
from statistics import fmean, median
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from ebbtide.scheduling.dispatch.host_view import HostView, may_take
from ebbtide.scheduling.dispatch.move_costs import COSTS, MoveCosts
from ebbtide.scheduling.dispatch.reclaim_risk import risk_s
from ebbtide.scheduling.dispatch.response_lengths import ResponseLengths
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout

#: A rollout is stuck if it starts so much later than its prefill, and those before it, would take.
_STUCK_S: Final = 1.0
#: An engine has stalled that made no token for so long, though it had work and was not held (as in ROSE, arXiv
#: 2605.06534). Then the rollout that it prefills counts as stuck, too.
_STALLED_S: Final = 2.0
#: Sources that a round looks at in vain: each means to look at all of its rollouts.
_LOOKS: Final = 16
#: Engines, evenly picked, that stand for a larger fleet where a typical rate is asked for.
_SAMPLE: Final = 64
#: A rate below this share of the fastest is not believed: the worker was held up while it was observed.
_INCREDIBLE: Final = 0.01


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


class EngineSpeed(Protocol):
    """What is known of an engine's speed."""

    def rate(self, running: float, context: float) -> float:
        """Tokens/s of each of `running` rollouts of a mean `context`; 0.0: nothing is known."""
        ...


class EngineLoad(Struct, frozen=True, kw_only=True):
    host: HostView  # `running` counts requested moves as done
    speed: EngineSpeed
    context: float  # mean tokens of prompt and response
    quiet_s: float = 0.0  # since it made a token, while it had work and was not held
    #: Its rollouts in the order of arrival, without those asked back; called only if some may move.
    rollouts: Callable[[], Iterable[RunningRollout]]


class RolloutMove(NamedTuple):
    attempt_id: str
    source: str  # key of the host
    target: str
    gain_s: float


class MoveSearch:
    """Remembers which sources were looked at in vain, until all that may gain have been looked at. Small fleets are
    looked at whole in each round.
    """

    def __init__(self) -> None:
        self.waiting = set[str]()  # keys of engines with unstarted rollouts
        self.slow = set[str]()


def rebalance(
    engines: Sequence[EngineLoad],
    lengths: ResponseLengths,
    *,
    now: float,
    costs: MoveCosts = COSTS,
    unstarted: bool = True,
    search: MoveSearch | None = None,
) -> list[RolloutMove]:
    """The moves to make now. Call only when no queued rollout could take the free slots. Without `unstarted`, rollouts
    that wait in an engine stay (for comparisons). `search`: the caller's, kept from round to round; it is updated.
    """
    if len(engines) < 2:
        return []
    sides, search = _sides(engines), search or MoveSearch()
    moves = _moved_waiting(sides, now, costs, search.waiting) if unstarted else []
    return moves + _moved_slow(sides, lengths, now, costs, search.slow, costs.at_once - len(moves))


class _Side:
    """A worker after the moves decided so far."""

    def __init__(self, engine: EngineLoad, typical: Callable[[int], float]) -> None:
        self.engine = engine
        self.key = engine.host.worker_id
        self.running = engine.host.running
        self.pending = engine.host.pending
        self.arriving = 0  # unstarted rollouts that move here in this round
        self.prefill_s = 0.0
        self.stalled = engine.quiet_s >= _STALLED_S
        self._typical = typical
        self._rollouts: list[RunningRollout] | None = None
        self.refresh()

    @property
    def waiting(self) -> int:
        """Its unstarted rollouts, without the first one while it makes tokens: that is being prefilled, as it would be
        anywhere.
        """
        return self.pending if self.stalled else max(0, self.pending - 1)

    def refresh(self) -> None:
        started = max(0, self.running - self.pending)
        self.now_rate = self.rate(started) if started else 0.0
        host = self.engine.host
        closed = host.held or host.shut or self.stalled
        room = self.running < host.slots and not self.pending and not closed
        self.next_rate = self.rate(started + 1) if room else 0.0

    def rate(self, running: int) -> float:
        """Tokens/s of one of `running` rollouts; a typical worker's if none is known, or not credible. A borrowed
        worker's is scaled by its share of the time.
        """
        known, typical = self.engine.speed.rate(running, self.engine.context), self._typical(running)
        return self.engine.host.share * (known if known >= _INCREDIBLE * typical else typical)

    def risk_s(self, one: RunningRollout, rest: float, rate: float, costs: MoveCosts) -> float:
        """Seconds that the rollout may lose here to a reclaim or a loss; `rate`: its tokens/s."""
        host = self.engine.host
        rate /= host.share or 1.0
        return risk_s(
            one.length,
            rest,
            rate=rate,
            spell_s=host.spell_s,
            prefill=host.prefill,
            found_s=host.found_s,
            costs=costs,
        )

    def rollouts(self) -> list[RunningRollout]:
        if self._rollouts is None:
            self._rollouts = list(self.engine.rollouts())
        return self._rollouts

    def give(self, one: RunningRollout, target: "_Side", prefill_s: float) -> None:
        self.rollouts().remove(one)
        self.running -= 1
        target.running += 1
        target.prefill_s += prefill_s
        self.refresh()
        target.refresh()


def _sides(engines: Sequence[EngineLoad]) -> list[_Side]:
    context = fmean(engine.context for engine in engines)

    sample = engines[:: -(-len(engines) // _SAMPLE)]

    @cache
    def typical(running: int) -> float:
        known = [rate for engine in sample if (rate := engine.speed.rate(running, context))]
        return median(rate for rate in known if rate >= _INCREDIBLE * max(known)) if known else 0.0

    return [_Side(engine, typical) for engine in engines]


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
        source.pending -= 1
        target.arriving += 1
        source.give(one, target, 0.0)
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
    reads_s = [costs.read_s(one.length - one.cached, source.engine.host.prefill) for one in queue]
    waiting = list(zip(queue, accumulate(reads_s), strict=True))[0 if source.stalled else 1 :]
    bound_s = _STALLED_S if source.stalled else _STUCK_S
    for one, prefill_s in reversed(waiting):
        late_s = now - one.since - prefill_s - bound_s
        if one.stays or late_s < 0.0:
            continue
        fit = [side for side in rooms if may_take(one.rollout, side.engine.host)]
        target = max(fit, key=lambda side: (side.next_rate, side.key), default=None)
        if target is None:
            continue
        again_s = costs.read_s(one.cached, target.engine.host.prefill) * (1 + target.running)
        if source.stalled or late_s >= again_s:
            return one, target
    return None


def _moved_slow(
    sides: list[_Side], lengths: ResponseLengths, now: float, costs: MoveCosts, passed: set[str], at_most: int
) -> list[RolloutMove]:
    """The moves with the largest gain from the slowest worker to the fastest, until none is worth its cost."""
    moves: list[RolloutMove] = []
    order, looks = _Order(sides, passed), 0
    while len(moves) < at_most:
        source, target = order.slowest(), order.fastest()
        if source is None or target is None or target.next_rate < costs.advantage * source.now_rate:
            break
        found = _gainer(source, target, lengths, now, costs)
        if found is None:
            passed.add(source.key)
            looks += 1
            if looks == _LOOKS:
                break
            continue
        one, gain_s, prefill_s = found
        source.give(one, target, prefill_s)
        order.changed(source)
        order.changed(target)
        moves.append(RolloutMove(one.attempt_id, source.key, target.key, gain_s))
    if looks < _LOOKS:
        passed.clear()
    return moves


class _Order:
    """The engines by their present rate, and by the rate of one rollout more.

    Invariant: the heaps have an entry for each engine's present rates. Entries with former ones are dropped when they
    come up.
    """

    def __init__(self, sides: list[_Side], passed: set[str]) -> None:
        self._passed = passed
        self._sides = sorted(sides, key=lambda side: side.key)
        self._at = {side.key: at for at, side in enumerate(self._sides)}
        self._slow = [(side.now_rate, at) for at, side in enumerate(self._sides) if side.now_rate > 0.0]
        self._fast = [
            (-side.next_rate, side.running, -at) for at, side in enumerate(self._sides) if side.next_rate > 0.0
        ]
        heapify(self._slow)
        heapify(self._fast)

    def slowest(self) -> _Side | None:
        """The engine whose rollouts are slowest, of those not `passed`; of equals, that with the first key."""
        while self._slow:
            rate, at = self._slow[0]
            side = self._sides[at]
            if rate == side.now_rate and side.key not in self._passed:
                return side
            heappop(self._slow)
        return None

    def fastest(self) -> _Side | None:
        """The engine where one rollout more is fastest; of equals, the emptiest; then that with the last key."""
        while self._fast:
            rate, running, at = self._fast[0]
            side = self._sides[-at]
            if -rate == side.next_rate and running == side.running:
                return side
            heappop(self._fast)
        return None

    def changed(self, side: _Side) -> None:
        """Note that an engine's rates have changed."""
        at = self._at[side.key]
        if side.now_rate > 0.0:
            heappush(self._slow, (side.now_rate, at))
        if side.next_rate > 0.0:
            heappush(self._fast, (-side.next_rate, side.running, -at))


def _gainer(
    source: _Side, target: _Side, lengths: ResponseLengths, now: float, costs: MoveCosts
) -> tuple[RunningRollout, float, float] | None:
    """The source's rollout that gains most by the move, its gain, and its prefill, in seconds."""
    best: tuple[RunningRollout, float, float] | None = None
    saved_s = 1.0 / source.now_rate - 1.0 / target.next_rate
    for one in source.rollouts():
        if one.stays or not one.started or now - one.since < costs.least_stay_s:
            continue
        prefill_s = costs.read_s(one.length, target.engine.host.prefill)
        cost_s = costs.handover_s + target.prefill_s + prefill_s * (1 + target.running)
        rest = lengths.rest(one.made, one.budget)
        gain_s = rest * saved_s - cost_s
        if source.engine.host.risky or target.engine.host.risky:
            gain_s += source.risk_s(one, rest, source.now_rate, costs) - target.risk_s(
                one, rest, target.next_rate, costs
            )
        worth = gain_s > (costs.margin - 1.0) * cost_s
        if worth and (best is None or gain_s > best[1]) and may_take(one.rollout, target.engine.host):
            best = (one, gain_s, prefill_s)
    return best
