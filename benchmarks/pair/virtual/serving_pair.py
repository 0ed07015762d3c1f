"""Plays a served engine and a borrowed rollout engine on one device in virtual time, under a guard's policies.

While steps of both engines overlap, each goes on at its part of its own speed, and likewise beside a stray process. The
same requests, costs and seed give the same history. Left out: the proxy's and the network's delays, engines that
disobey (the guard's enforcer), several served models, answers that are not streamed, clients that leave, and the served
engine's own preemption.

Invariant: `_serving` and `_rolling` are the seconds of device time that the steps under way still need, at the engine's
own speed; `inf` where none is under way.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Final

from benchmarks.pair.virtual.pair_costs import PairCosts
from benchmarks.pair.virtual.rollout_batch import RolloutBatch, RolloutShape
from benchmarks.pair.virtual.served_engine import ServedCall, ServedEngine
from benchmarks.pair.virtual.step_noise import StepNoise, StrayBursts
from benchmarks.pair.virtual.virtual_guard import RolloutUse, VirtualGuard
from ebbtide.demo.coserving.request_traffic import TrafficRequest
from ebbtide.serving_guard.borrowers import AllowedMemory
from ebbtide.serving_guard.governor.budget_decider import BudgetDecider
from ebbtide.serving_guard.governor.memory import CUT
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.types.grants import Residency

#: From a budget's being written to the first step of an engine that waits for one.
_WAKE_S: Final = 0.0005
#: The pause after a step that could use none of its budget, as `BudgetedScheduler` makes it.
_FRUITLESS_S: Final = 0.01
#: Less of a step than this is left by rounding alone.
_NOTHING_S: Final = 1e-9
_MIB: Final = 1 << 20


class ServingPair:
    """Both engines and the guard between them. `done`: served requests; `busy_s`: time with a request inside."""

    def __init__(
        self,
        requests: Sequence[TrafficRequest],
        costs: PairCosts,
        decider: BudgetDecider,
        *,
        memory: MemoryBudget | None = None,
        aborts: bool = False,
        shape: RolloutShape | None = None,
        seed: int = 0,
    ) -> None:
        """`requests` in order of arrival. `memory`: divides `costs.memory`; None: memory never lacks. `aborts`: a cut
        of memory aborts whole rollouts, as ROSE does; otherwise its victims keep their tokens."""
        self._requests, self._costs = deque(requests), costs
        # Each engine has its own noise, so that served requests meet the same under each policy, as far as they can.
        self._served_noise = StepNoise(costs, Random(f"{seed} served noise"))
        self._rolled_noise = StepNoise(costs, Random(f"{seed} rollout noise"))
        self._stray = StrayBursts(costs.stray, Random(f"{seed} stray process"))
        self._engine = ServedEngine(costs)
        self.batch = RolloutBatch(costs, shape or RolloutShape(), Random(f"{seed} rollouts"))
        self.guard = VirtualGuard(decider, memory if costs.memory.limit_mib else None, costs)
        self._aborts, self._cut = aborts, False
        self._allowed: AllowedMemory | None = None  # what the last grant says, until it is done
        self._residency, self._awake_at = Residency.AWAKE, inf
        self._held: deque[tuple[float, float, ServedCall]] = deque()  # (until, arrival, request)
        self._serving = self._rolling = inf
        self._tokens, self._began = 0, 0.0
        self._may_begin = 0.0
        self._named = 0
        self.now = self.busy_s = 0.0
        self.done: list[ServedCall] = []
        #: Called when a rollout step has ended, with its begin, its end and the tokens that it made.
        self.stepped: Callable[[float, float, int], None] = lambda _began, _now, _made: None

    def run(self, until: float = inf) -> None:
        """Play to that time, or until the last request is answered."""
        while self._requests or self._held or len(self._engine):
            at = self._next()
            if at > until:
                self._advance(until)
                return
            self._advance(at)
            self._events()
            self._begin()

    def rest(self, until: float) -> None:
        """Play on to that time without further requests; call it after `run`."""
        while (at := self._next()) <= until:
            self._advance(at)
            self._events()
            self._begin()
        self._advance(until)

    @property
    def harvested(self) -> int:
        """Tokens of rollouts that were made and not thrown away."""
        return self.batch.made - self.batch.wasted

    @property
    def asleep(self) -> bool:
        """Whether the rollout engine's weights are not on the device."""
        return self._residency is not Residency.AWAKE

    @property
    def reclaims(self) -> list[float]:
        """Seconds from the arrival of a request that took the budget to the end of the step that it met."""
        return self.guard.reclaims

    def _next(self) -> float:
        now = self.now
        serving, rolling = self._speeds()
        steps = now + self._serving / serving, now + self._rolling / rolling
        at = min(*steps, self._stray.until, self.guard.next_at, self._awake_at)
        if self._requests:
            at = min(at, self._requests[0].at)
        if self._held:
            at = min(at, self._held[0][0])
        if self._may_begin > now:
            at = min(at, self._may_begin)
        return max(now, at)

    def _advance(self, until: float) -> None:
        passed = until - self.now
        serving, rolling = self._speeds()
        self._serving -= passed * serving
        self._rolling -= passed * rolling
        if self._held or len(self._engine):
            self.busy_s += passed
        self.now = until

    def _speeds(self) -> tuple[float, float]:
        """At which part of its own speed a step of the served engine goes on, and one of the rollouts."""
        serving, rolling = self._stray.serving, self._stray.rollouts
        if self._serving < inf and self._rolling < inf:
            return serving * self._costs.serving_beside, rolling * self._costs.rollouts_beside
        return serving, rolling

    def _events(self) -> None:
        now = self.now
        if self._stray.until <= now:
            self._stray.turn(now)
        if self._rolling <= _NOTHING_S:
            self._end_rollout_step()
        while self._requests and self._requests[0].at <= now:
            self._arrive(self._requests.popleft())
        while self._held and self._held[0][0] <= now:
            self._engine.take(self._held.popleft()[2])
        if self._serving <= _NOTHING_S:
            self._end_served_step()
        if self._awake_at <= now:
            self._awake_at, self._residency = inf, Residency.AWAKE
        if self.guard.next_at <= now:
            self._fire()

    def _arrive(self, asked: TrafficRequest) -> None:
        self._named += 1
        call = ServedCall(str(self._named), asked, asked.prompt)
        since = self._began if self._rolling < inf else None
        hold_s = self.guard.arrived(self.now, call.name, asked.prompt, since)
        if hold_s > 0.0:
            self._held.append((self.now + hold_s, self.now, call))
        else:
            self._engine.take(call)

    def _end_rollout_step(self) -> None:
        now = self.now
        self._rolling = inf
        made = self.batch.end()
        self.guard.stepped(now, self._tokens, now - self._began)
        self._obey()
        self._may_begin = max(self._may_begin, now + self._costs.between_s)
        if self._held:
            self._held = deque(
                (min(until, self.guard.released(now, arrived)), arrived, call) for until, arrived, call in self._held
            )
        self.stepped(self._began, now, made)

    def _end_served_step(self) -> None:
        self._serving = inf
        for call in self._engine.end(self.now):
            last = call.made >= call.asked.output
            self.guard.produced(self.now, call.name, last=last)
            if last:
                self.done.append(call)
        self._decide()

    def _fire(self) -> None:
        before = self.guard.budget
        if self.guard.fire(self.now, self._rolling < inf):
            self._look_at_memory()
        self._woken(before.tokens > 0 and before.until >= self.now)

    def _decide(self) -> None:
        before = self.guard.budget
        self.guard.decide(self.now)
        self._woken(before.tokens > 0 and before.until >= self.now)

    def _woken(self, could: bool) -> None:
        """An engine that could not step before wakes up first."""
        if not could and self.guard.budget.tokens:
            self._may_begin = max(self._may_begin, self.now + _WAKE_S)

    def _look_at_memory(self) -> None:
        """Take the next grant's word on memory."""
        block = self._costs.memory.block_tokens * self._costs.memory.rollout_token_bytes
        use = RolloutUse(self.batch.running, self.batch.blocks * block, self._residency)
        self._allowed = self.guard.tick(self.now, self._engine.tokens_inside, use)
        if self._rolling == inf:
            self._obey()

    def _obey(self) -> None:
        """Between steps, give memory back at once, and begin to load weights that are wished awake."""
        allowed, self._allowed = self._allowed, None
        if allowed is None:
            return
        memory = self._costs.memory
        block = memory.block_tokens * memory.rollout_token_bytes
        if allowed.residency is not self._residency:
            if allowed.residency is not Residency.AWAKE:
                self._residency, self._awake_at = allowed.residency, inf
                self.batch.lose_cache()
            elif self._awake_at == inf:
                self._awake_at = self.now + self._costs.wake_s
        cut = allowed.phase == CUT
        if self._aborts and cut and not self._cut:
            self.batch.abort(allowed.kv_bytes // block)
        self._cut = cut
        self.batch.fit(min(allowed.kv_bytes, memory.rollout_kv_mib * _MIB) // block)

    def _begin(self) -> None:
        now = self.now
        if self._serving == inf and len(self._engine) and (seconds := self._engine.begin()):
            self._serving = seconds * self._served_noise.draw()
        budget = self.guard.budget
        if self._rolling == inf and budget.tokens and self._may_begin <= now < budget.until:
            if self._residency is not Residency.AWAKE:
                return
            self._tokens = self.batch.begin(budget.tokens, budget.sequences)
            if not self._tokens:
                self._may_begin = now + _FRUITLESS_S
                return
            costs = self._costs
            seconds = costs.step_s + costs.step_token_s * self._tokens
            self._began, self._rolling = now, seconds * self._rolled_noise.draw()
