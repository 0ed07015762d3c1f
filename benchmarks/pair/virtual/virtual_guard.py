"""Calls the policies of a serving-guard in virtual time, in the order and at the pace of the live guard.

As `BudgetKeeper` does, it decides at each arrival before anything else, once for all tokens of a moment, at reviews,
and after it has read the ended steps from the page of grants, which it does every 10 ms. As `Guard` and
`BorrowerTable` do, it tells the memory policy the tokens inside every 50 ms and the borrower's use every 100 ms.

Invariant: `budget` is what the page holds. Timers in the past have fired by the time `fire` returns.
"""

from math import ceil, inf
from typing import Final

from msgspec import Struct

from benchmarks.pair.virtual.pair_costs import PairCosts
from ebbtide.serving_guard.borrowers import UNREADABLE, AllowedMemory
from ebbtide.serving_guard.governor.budget_decider import BudgetDecider
from ebbtide.serving_guard.governor.memory import NORMAL
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.types.grants import GRANTS_VERSION, BorrowerReport, Budget, Forecast, Hello, Residency

#: Paces of the live guard: see the constants of the same value in `serving_guard` and `rollout_worker.guard_link`.
_LOOK_S: Final = 0.01
_WATCH_S: Final = 0.002
_HELD_S: Final = 0.001
_LEAST_S: Final = 0.0005
_MOST_S: Final = 0.1
_TICK_S: Final = 0.05
_TICKS_OF_REPORT: Final = 2
_WORKER: Final = "borrower"
_MIB: Final = 1 << 20


class RolloutUse(Struct, frozen=True):
    """A borrower's report."""

    running: int  # rollouts
    kv_bytes: int  # that they hold
    residency: Residency  # of its weights


class VirtualGuard:
    """`stepping_since`, in several methods: when the rollout step under way began; None: none is under way."""

    def __init__(self, decider: BudgetDecider, memory: MemoryBudget | None, costs: PairCosts) -> None:
        self._decider, self._memory, self._costs = decider, memory, costs
        self.decision = decider.decide(0.0)
        self.budget = Budget()
        self.allowed = AllowedMemory(0, NORMAL, Residency.AWAKE)
        self._awake = True
        self._review_at = self._look_at = inf
        self._tick_at, self._ticks = 0.0 if memory else inf, 0
        self._steps, self._scheduled, self._busy_s, self._ended = 0, 0, 0.0, 0.0
        self._arrivals: list[float] = []  # of requests that met a step which goes on
        self.reclaims: list[float] = []  # seconds from such an arrival to the end of the step
        if memory is not None:
            kv_bytes = costs.memory.rollout_kv_mib * _MIB
            memory.joined(
                _WORKER, Hello(protocol_version=GRANTS_VERSION, worker_id=_WORKER, slots=1, kv_bytes=kv_bytes)
            )
        self.decide(0.0)

    @property
    def next_at(self) -> float:
        """When the next timer is due."""
        return min(self._review_at, self._look_at, self._tick_at)

    def arrived(self, now: float, name: str, prompt: int, stepping_since: float | None) -> float:
        """A request came. Returns for how many seconds it is held at most, while the step under way lasts."""
        had = self.budget.tokens
        self._decider.arrived(now, name, prompt)
        self.decide(now)
        if had and not self.budget.tokens and stepping_since is not None:
            self._arrivals.append(now)
        return self._decider.hold_s(now, stepping_since) if stepping_since is not None else 0.0

    @staticmethod
    def released(now: float, arrived: float) -> float:
        """When a held request that arrived then notices that the step ended `now`: it looks every millisecond."""
        return arrived + ceil((now - arrived) / _HELD_S - 1e-9) * _HELD_S

    def produced(self, now: float, name: str, *, last: bool) -> None:
        """A request made a token. The caller calls `decide` after all tokens of this moment."""
        self._decider.produced(now, name, 1)
        if last:
            self._decider.ended(now, name, ok=True)

    def stepped(self, now: float, tokens: int, seconds: float) -> None:
        """A rollout step ended; the guard learns of it when it reads the page."""
        self._steps, self._scheduled, self._busy_s = self._steps + 1, self._scheduled + tokens, self._busy_s + seconds
        self._ended = now
        self.reclaims += [now - arrived for arrived in self._arrivals]
        self._arrivals.clear()

    def decide(self, now: float) -> None:
        """Ask the policy and write its budget into the page."""
        self.decision = decision = self._decider.decide(now)
        budget = decision.budget
        if budget.tokens and budget.sequences and self._awake:
            costs = self._costs
            tokens, sequences = min(budget.tokens, costs.step_tokens), min(budget.sequences, costs.slots)
            self.budget = Budget(tokens, sequences, budget.until)
        else:
            self.budget = Budget()
        wait_s = min(_MOST_S, max(_LEAST_S, decision.review_at - now))
        self._review_at = min(self._review_at, now + wait_s)
        if self._look_at == inf:
            self._look_at = now + _LOOK_S

    def fire(self, now: float, stepping: bool) -> bool:
        """Do what is due. Returns whether memory was looked at: then the caller reports by `reported`."""
        if self._look_at <= now:
            self._look(now, stepping)
        if self._review_at <= now:
            self._review_at = inf
            self.decide(now)
        if self._tick_at <= now:
            self._tick_at += _TICK_S
            return True
        return False

    def tick(self, now: float, tokens_inside: int, use: RolloutUse) -> AllowedMemory:
        """Tell the memory policy what both engines hold, and return what the borrower may hold."""
        memory = self._memory
        assert memory is not None  # noqa: S101 - only then a tick is due
        memory.tokens_inside(now, tokens_inside)
        if self._ticks % _TICKS_OF_REPORT == 0:
            report = BorrowerReport(
                running=use.running,
                kv_bytes_used=use.kv_bytes,
                residency=use.residency,
                wake_away_s=self._costs.wake_s,
            )
            memory.reported(now, _WORKER, report)
        self._ticks += 1
        self.allowed = memory.allowed(now, _WORKER, idle_s=self._idle_s(now, use.residency))
        awake = use.residency is Residency.AWAKE and self.allowed.phase != UNREADABLE
        if awake != self._awake:
            self._awake = awake
            self.decide(now)
        return self.allowed

    def forecast(self, now: float) -> Forecast:
        """What a grant of this moment tells the borrower."""
        return self._decider.learnt(now).forecast

    def _look(self, now: float, stepping: bool) -> None:
        """Report the steps since the last look by their means, as the page tells no more of them."""
        self._look_at = inf
        count = self._steps
        if count:
            tokens, seconds = self._scheduled // count, self._busy_s / count
            self._steps, self._scheduled, self._busy_s = 0, 0, 0.0
            for _ in range(count):
                self._decider.stepped(now, tokens, seconds)
            self.decide(now)
        watched = bool(self._arrivals)
        if self._look_at == inf and (watched or stepping or self.budget.tokens):
            self._look_at = now + (_WATCH_S if watched else _LOOK_S)

    def _idle_s(self, now: float, residency: Residency) -> float:
        """How long borrowing will probably be possible; 0: it is not, or it does not pay for a wake-up."""
        wake_s = 0.0 if residency is Residency.AWAKE else self._costs.wake_s
        if not self.decision.budget.tokens or (wake_s and not self._decider.pays(now, wake_s)):
            return 0.0
        return self._decider.learnt(now).forecast.spell_s
