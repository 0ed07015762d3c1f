"""Moves running members from engines with many to engines with few, once nothing waits any more."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ebbtide.simulator.engines.engine_profile import StepCosts
from ebbtide.simulator.rivals.tail.step_members import EngineView, StepMember

#: A move must make its member so much faster: keys and values are copied, and it loses a round's pause.
_WORTH: Final = 1.05
#: Members that move in one round, over all engines.
_AT_ONCE: Final = 64
#: A member stays at its engine for so long, seconds.
_STAY_S: Final = 30.0


class _Load:
    """One engine after the moves decided so far."""

    def __init__(self, view: EngineView, costs: StepCosts) -> None:
        self.view, self._costs = view, costs
        self.count = len(view.members)
        self.context = sum(one.context for one in view.members)
        self.free = view.kv_tokens - view.leaving - sum(one.prompt + one.until for one in view.members)

    def step_s(self, more: int = 0, context: int = 0) -> float:
        return self._costs.step_s(batch=max(1, self.count + more), context=self.context + context)

    def change(self, one: StepMember, sign: int) -> None:
        self.count += sign
        self.context += sign * one.context
        self.free -= sign * (one.prompt + one.until)


class BalancedMove(NamedTuple):
    member: StepMember
    source: EngineView
    target: EngineView


def balanced_moves(
    views: Sequence[EngineView], costs: StepCosts, rest: Callable[[StepMember], float], now: float
) -> list[BalancedMove]:
    """The moves to make now: of the slowest engine's members those with the most to come, while they gain."""
    loads, moves = [_Load(view, costs) for view in views], list[BalancedMove]()
    stuck = set[int]()
    while len(moves) < _AT_ONCE and len(loads) - len(stuck) > 1:
        source = max((at for at in range(len(loads)) if at not in stuck), key=lambda at: loads[at].step_s())
        target = min(range(len(loads)), key=lambda at: loads[at].step_s())
        move = _best(loads[source], loads[target], rest, now, {id(one.member) for one in moves})
        if move is None:
            stuck.add(source)
            continue
        moves.append(move)
        loads[source].change(move.member, -1)
        loads[target].change(move.member, 1)
    return moves


def _best(
    source: _Load, target: _Load, rest: Callable[[StepMember], float], now: float, moved: set[int]
) -> BalancedMove | None:
    able = [
        one
        for one in source.view.members
        if id(one) not in moved
        and now - one.since >= _STAY_S
        and one.prompt + one.until <= target.free
        and source.step_s() > _WORTH * target.step_s(1, one.context)
    ]
    if target.count >= target.view.slots or not able:
        return None
    return BalancedMove(max(able, key=rest), source.view, target.view)
