"""Plays a served engine and a borrowed rollout engine on one device in virtual time, under a guard's policies.

While steps of both engines overlap, each goes on at its part of its own speed, and likewise beside a stray process. The
same requests, costs and seed give the same history. Left out: the proxy's and the network's delays, engines that
disobey (the guard's enforcer), several served models, answers that are not streamed, clients that leave, and the served
engine's own preemption.

Invariant: `_serving` and `_rolling` are the seconds of device time that the steps under way still need, at the engine's
own speed; `inf` where none is under way.
"""

from collections import deque
from collections.abc import Sequence
from itertools import chain
from math import inf
from random import Random
from typing import Final, Protocol

from ebbtide.serving_guard.borrowers import AllowedMemory
from ebbtide.serving_guard.governor.budget_decider import BudgetDecider
from ebbtide.serving_guard.governor.memory import CUT
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.simulator.serving.pair_costs import PairCosts
from ebbtide.simulator.serving.request_traffic import TrafficRequest
from ebbtide.simulator.serving.rollout_batch import RolloutBatch, RolloutShape
from ebbtide.simulator.serving.served_engine import ServedCall, ServedEngine
from ebbtide.simulator.serving.step_noise import StepNoise, StrayBursts
from ebbtide.simulator.serving.virtual_guard import RolloutUse, VirtualGuard
from ebbtide.types.grants import Residency

#: From a budget's being written to the first step of an engine that waits for one.
_WAKE_S: Final = 0.0005
#: The pause after a step that could use none of its budget, as `BudgetedScheduler` makes it.
_FRUITLESS_S: Final = 0.01
#: The observer's heartbeats, as often as a worker's.
BEAT_S: Final = 1.0
#: Less of a step than this is left by rounding alone.
_NOTHING_S: Final = 1e-9
#: Once nothing was inside for `_CALM_S`, rollouts coast: alike steps are taken at once, in their mean time, until
#: `_NEAR_S` before the next arrival. By then memory has long returned, and the governor's ramp is at its top.
_CALM_S: Final = 1.0
_NEAR_S: Final = 0.5
_MIB: Final = 1 << 20


class PairObserver(Protocol):
    """Follows a pair that plays. Times are in seconds of virtual time."""

    def stepped(self, began: float, now: float, made: int) -> None:
        """A rollout step ended and made so many tokens."""
        ...

    def served(self, now: float, call: ServedCall) -> None:
        """A request got its last token."""
        ...

    def beat(self, now: float, *, asleep: bool) -> None:
        """A second has passed. `asleep`: the rollout engine's weights are not on the device."""
        ...


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
        observer: PairObserver | None = None,
    ) -> None:
        """`requests` in order of arrival. `memory`: divides `costs.memory`; None: memory never lacks. `aborts`: a cut
        of memory aborts whole rollouts, as ROSE does; otherwise its victims keep their tokens."""
        self._requests, self._costs, self.observer = deque(requests), costs, observer
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
        self._coasting = 0  # steps of the stretch under way; 0: it is a single step
        self._idle_since = 0.0  # when the last request left
        self._may_begin = 0.0
        self._beat_at = BEAT_S
        self._named = 0
        self.now = self.busy_s = 0.0
        self.done: list[ServedCall] = []

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
    def reclaims(self) -> list[float]:
        """Seconds from the arrival of a request that took the budget to the end of the step that it met."""
        return self.guard.reclaims

    def _next(self) -> float:
        now = self.now
        serving, rolling = self._speeds()
        steps = now + self._serving / serving, now + self._rolling / rolling
        at = min(*steps, self._stray.until, self.guard.next_at, self._awake_at, self._beat_at)
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
        if self._beat_at <= now:
            self._beat_at += BEAT_S
            if self.observer is not None:
                self.observer.beat(now, asleep=self._residency is not Residency.AWAKE)

    def late(self, ttft_s: float, tpot_s: float) -> int:
        """How many requests under way have missed these targets already."""
        waiting = sum(one.at < self.now - ttft_s for one in self._requests)
        inside = chain(self._engine.calls(), (call for *_, call in self._held))
        return waiting + sum(call.is_late(self.now, ttft_s, tpot_s) for call in inside)

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
        if self._coasting:
            made, self._coasting = self.batch.coast(self._coasting), 0
        else:
            made = self.batch.end()
            self.guard.stepped(now, self._tokens, now - self._began)
        self._obey()
        self._may_begin = max(self._may_begin, now + self._costs.between_s)
        if self._held:
            self._held = deque(
                (min(until, self.guard.released(now, arrived)), arrived, call) for until, arrived, call in self._held
            )
        if self.observer is not None:
            self.observer.stepped(self._began, now, made)

    def _end_served_step(self) -> None:
        self._serving = inf
        for call in self._engine.end(self.now):
            last = call.made >= call.asked.output
            self.guard.produced(self.now, call.name, last=last)
            if last:
                self.done.append(call)
                self._idle_since = self.now
                if self.observer is not None:
                    self.observer.served(self.now, call)
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
            if self._residency is not Residency.AWAKE or self._coast():
                return
            self._tokens = self.batch.begin(budget.tokens, budget.sequences)
            if not self._tokens:
                self._may_begin = now + _FRUITLESS_S
                return
            costs = self._costs
            seconds = costs.step_s + costs.step_token_s * self._tokens
            self._began, self._rolling = now, seconds * self._rolled_noise.draw()

    def _coast(self) -> bool:
        """Begin a stretch of alike steps if nothing can happen in it."""
        now, costs, batch = self.now, self._costs, self.batch
        if now - self._idle_since < _CALM_S or self._held or len(self._engine) or not batch.calm:
            return False
        if self._stray.until < inf:  # then steps are not alike
            return False
        budget = self.guard.budget
        if min(budget.tokens, budget.sequences) < batch.running:
            return False
        until = min(self._beat_at, self._requests[0].at - _NEAR_S if self._requests else inf)
        step_s = self._rolled_noise.mean * (costs.step_s + costs.step_token_s * batch.running) + costs.between_s
        steps = min(batch.calm, int((until - now) / step_s))
        if steps < 2:
            return False
        self._coasting, self._began, self._rolling = steps, now, steps * step_s
        self.guard.rest(now + self._rolling)
        return True
