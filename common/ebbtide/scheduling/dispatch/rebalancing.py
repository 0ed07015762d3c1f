"""Which running rollouts move to another worker, because they would end sooner there.

After RLBoost (arXiv 2510.19225, Algorithm 2, section on load balancing): work that waits in one engine goes to one
that has nothing waiting; and what an engine runs beyond the batch size at which its throughput flattens goes to one
with room. Three things differ. It decides per rollout. It does not wait for an engine to fall idle, but compares what
a rollout would gain, by the speed learnt of each worker, with what the move costs: a prefill, which also holds up
those that run there, and the hand-over. And among an engine's rollouts it takes those that gain most, which are those
with most tokens still to come. A borrowed worker counts for the share of its time that it has, and what a rollout may
lose to a reclaim is part of the cost: so long work leaves it, and little but short work goes there.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from statistics import fmean, median
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide.scheduling.dispatch.host_view import HostView, may_take
from ebbtide.scheduling.dispatch.move_costs import COSTS, MoveCosts
from ebbtide.scheduling.dispatch.reclaim_risk import risk_s
from ebbtide.scheduling.dispatch.response_lengths import ResponseLengths
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout
from ebbtide.scheduling.dispatch.throughput import WorkerThroughput

#: A rollout waits for others in its worker if it has not started so long after all before it, and it, could have.
_STUCK_S: Final = 1.0
#: A worker that seems to be this much slower than the fastest was held up while it was observed: it is not believed.
_INCREDIBLE: Final = 0.01


class RunningRollout(Struct, frozen=True, kw_only=True):
    """An attempt at `waiting` that a worker was given at `since`. `length`: tokens of prompt and response so far,
    `made`: of the response; `budget`: tokens that it may still make. `stays`: it is not to be moved now.
    """

    attempt_id: str
    waiting: QueuedRollout
    length: int
    made: int
    budget: int
    since: float
    started: bool
    stays: bool = False


class EngineLoad(Struct, frozen=True, kw_only=True):
    """A worker: `host.running` counts also what is on its way to it, and no more what was told to leave it. `context`:
    mean tokens of prompt and response of what it runs; `rollouts`: all that it has, in the order in which it got them,
    but for those that were told to leave it; asked for only if some will move.
    """

    host: HostView
    speed: WorkerThroughput
    context: float
    rollouts: Callable[[], Iterable[RunningRollout]]


class RolloutMove(NamedTuple):
    """The attempt goes from worker `source` to `target` (keys of their hosts), and is to end `gain_s` sooner there."""

    attempt_id: str
    source: str
    target: str
    gain_s: float


def rebalance(
    engines: Sequence[EngineLoad],
    lengths: ResponseLengths,
    *,
    now: float,
    costs: MoveCosts = COSTS,
    unstarted: bool = True,
) -> list[RolloutMove]:
    """The moves to make now. Ask only when nobody in line could take the free slots. `unstarted` off leaves out those
    that wait in an engine (for comparisons).
    """
    if len(engines) < 2:
        return []
    sides = _sides(engines)
    moves = _moved_waiting(sides, now, costs) if unstarted else []
    while len(moves) < costs.at_once:
        move = _best(sides, lengths, now, costs)
        if move is None:
            break
        moves.append(move)
    return moves


class _Side:
    """A worker as the moves decided so far leave it."""

    def __init__(self, engine: EngineLoad, typical: Callable[[int], float]) -> None:
        self.engine = engine
        self.key = engine.host.worker_id
        self.running = engine.host.running
        self.pending = engine.host.pending
        self.arriving = 0  # of those that wait elsewhere, in this round
        self.prefill_s = 0.0
        self.spent = False
        self._typical = typical
        self._rollouts: list[RunningRollout] | None = None
        self.refresh()

    def refresh(self) -> None:
        started = max(0, self.running - self.pending)
        self.now_rate = self.rate(started) if started else 0.0
        host = self.engine.host
        room = self.running < host.slots and not self.pending and not host.held and not host.shut
        self.next_rate = self.rate(started + 1) if room else 0.0

    def rate(self, running: int) -> float:
        """Tokens/s of one of `running`; of a worker of which nothing credible is known, those of a typical one. Of a
        borrowed one they are made in its share of the time.
        """
        known, typical = self.engine.speed.rate(running, self.engine.context), self._typical(running)
        return self.engine.host.share * (known if known >= _INCREDIBLE * typical else typical)

    def risk_s(self, one: RunningRollout, rest: float, rate: float, costs: MoveCosts) -> float:
        """What the rollout may yet lose here to a reclaim; `rate`: its tokens/s."""
        host = self.engine.host
        return risk_s(one.length, rest, rate=rate / (host.share or 1.0), spell_s=host.spell_s, costs=costs)

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

    @cache
    def typical(running: int) -> float:
        known = [rate for engine in engines if (rate := engine.speed.rate(running, context))]
        return median(rate for rate in known if rate >= _INCREDIBLE * max(known)) if known else 0.0

    return [_Side(engine, typical) for engine in engines]


def _moved_waiting(sides: list[_Side], now: float, costs: MoveCosts) -> list[RolloutMove]:
    """From the engine in which most wait to one in which none do and there is room, until none such is left.

    Only behind another one does a rollout wait: the first in an engine is being prefilled, and would be so anywhere.
    """
    moves: list[RolloutMove] = []
    queues = [side for side in sides if side.pending > 1]
    while queues and len(moves) < costs.at_once:
        source = max(queues, key=lambda side: (side.pending, side.key))
        rooms = [side for side in sides if side.next_rate > 0.0 and side.arriving + 1 < source.pending]
        found = _stuck(source, rooms, now, costs)
        if found is None:
            queues.remove(source)
            continue
        one, target = found
        moves.append(RolloutMove(one.attempt_id, source.key, target.key, now - one.since))
        source.pending -= 1
        target.arriving += 1
        source.give(one, target, 0.0)
        if source.pending <= 1:
            queues.remove(source)
    return moves


def _stuck(source: _Side, rooms: list[_Side], now: float, costs: MoveCosts) -> tuple[RunningRollout, _Side] | None:
    """The last in the engine's queue that somebody has room for, and who is fastest of them."""
    if not rooms:
        return None
    queue = sorted((one for one in source.rollouts() if not one.started), key=lambda one: one.since)
    prefilled_s = [tokens / costs.prefill_tokens_per_s for tokens in accumulate(one.length for one in queue)]
    for one, prefill_s in list(zip(queue, prefilled_s, strict=True))[:0:-1]:
        if one.stays or now - one.since < _STUCK_S + prefill_s:
            continue
        fit = [side for side in rooms if may_take(one.waiting, side.engine.host)]
        if fit:
            return one, max(fit, key=lambda side: (side.next_rate, side.key))
    return None


def _best(sides: list[_Side], lengths: ResponseLengths, now: float, costs: MoveCosts) -> RolloutMove | None:
    """From the slowest worker to the fastest, the rollout that gains most; None if no move is worth its cost."""
    while True:
        busy = [side for side in sides if side.now_rate > 0.0 and not side.spent]
        room = [side for side in sides if side.next_rate > 0.0]
        if not busy or not room:
            return None
        source = min(busy, key=lambda side: (side.now_rate, side.key))
        target = max(room, key=lambda side: (side.next_rate, -side.running, side.key))
        if target.next_rate < costs.advantage * source.now_rate:
            return None
        found = _gainer(source, target, lengths, now, costs)
        if found is not None:
            one, gain_s, prefill_s = found
            source.give(one, target, prefill_s)
            return RolloutMove(one.attempt_id, source.key, target.key, gain_s)
        source.spent = True


def _gainer(
    source: _Side, target: _Side, lengths: ResponseLengths, now: float, costs: MoveCosts
) -> tuple[RunningRollout, float, float] | None:
    """Of the source's rollouts the one that gains most seconds by the move, with its gain and its prefill's seconds."""
    best: tuple[RunningRollout, float, float] | None = None
    saved_s = 1.0 / source.now_rate - 1.0 / target.next_rate
    for one in source.rollouts():
        if one.stays or not one.started or now - one.since < costs.settled_s:
            continue
        prefill_s = one.length / costs.prefill_tokens_per_s
        cost_s = costs.handover_s + target.prefill_s + prefill_s * (1 + target.running)
        rest = lengths.rest(one.made, one.budget)
        gain_s = rest * saved_s - cost_s
        if source.engine.host.borrowed or target.engine.host.borrowed:
            gain_s += source.risk_s(one, rest, source.now_rate, costs) - target.risk_s(
                one, rest, target.next_rate, costs
            )
        worth = gain_s > (costs.margin - 1.0) * cost_s
        if worth and (best is None or gain_s > best[1]) and may_take(one.waiting, target.engine.host):
            best = (one, gain_s, prefill_s)
    return best
