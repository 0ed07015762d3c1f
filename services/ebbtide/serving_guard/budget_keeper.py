"""Asks the deciders at each event of user traffic, and keeps what they decided in force in the borrowers' pages.

Invariant: after each event the pages hold what was decided at it, or less. An arrival is written before
anything else is done for the request. Without events the budget is decided again at the time that the decision names
and before it runs out. So if this process stands still, the budget runs out by itself. An observation from outside
holds for a limited time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final

from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.borrowers import BorrowerTable
from ebbtide.serving_guard.governor.budget_decider import (
    NOTHING_INSIDE,
    BudgetDecider,
    BudgetDecision,
    LearntCosts,
    MultiModelGovernor,
)
from ebbtide.serving_guard.slo_stats import SloStats
from ebbtide.types.grants import Budget

#: How often pages are read while steps may run, and while the end of a step is awaited.
_LOOK_S: Final = 0.01
_WATCH_S: Final = 0.002
#: How often a held request looks whether the step has ended.
_HELD_S: Final = 0.001
#: A review is never sooner or later than this, whatever the governor says.
_LEAST_S: Final = 0.0005
_MOST_S: Final = 0.1
#: What a governor has learnt is computed at most this often.
_LEARNT_S: Final = 0.25
#: Models whose learnt figures are kept. Clients choose the names, so the number is bounded.
_MODELS: Final = 64
_NOTHING: Final = BudgetDecision(Budget(), "blind", -1.0, inf)
_CLOSED: Final = BudgetDecision(Budget(), "closed", -1.0, inf)


class BudgetKeeper:
    """A `TrafficListener` of the proxy. Starts with the first event or review, and belongs to that event loop."""

    def __init__(
        self,
        deciders: MultiModelGovernor,
        borrowers: BorrowerTable,
        stats: SloStats,
        *,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deciders, self._borrowers, self._stats = deciders, borrowers, stats
        self._model, self._clock = model, clock
        self._inside: dict[str, tuple[BudgetDecider, bool]] = {}  # each request's decider, and whether it streams
        self._decision = _NOTHING
        self._blind = False
        self._seen_until = inf  # the last observation holds until then
        self._closed = False
        self._soon = False
        self._review: asyncio.TimerHandle | None = None
        self._review_at = 0.0
        self._look: asyncio.TimerHandle | None = None
        self._learnt: dict[str, tuple[float, LearntCosts]] = {}
        borrowers.subscribe(self.review)

    @property
    def decision(self) -> BudgetDecision:
        return self._decision

    @property
    def granting(self) -> bool:
        """Whether there is a budget."""
        return self._decision.budget.tokens > 0

    @property
    def step_s(self) -> float:
        """The longest that a rollout step takes, as far as known."""
        return self.learnt().step_s

    def close(self) -> None:
        """Take everything back, for good."""
        self._closed, self._decision = True, _CLOSED
        for timer in (self._review, self._look):
            if timer is not None:
                timer.cancel()
        now = self._clock()
        for loan in self._borrowers.all():
            loan.write(Budget(), now)

    # Traffic: events from the proxy.

    def arrived(self, request: str, model: str, prompt_tokens: int, now: float, streamed: bool) -> None:
        decider = self._deciders.of(model or self._model)
        self._inside[request] = decider, streamed
        self._deciders.came(now, decider)
        decider.arrived(now, request, prompt_tokens, streamed=streamed)
        self._take_back(now)
        self._stats.arrived(request, model or self._model, prompt_tokens, now, streamed=streamed)

    def ready(self, request: str) -> Awaitable[None] | None:
        since = self.stepping_since()
        if since is None or (known := self._inside.get(request)) is None:
            return None
        hold_s = known[0].hold_s(self._clock(), since)
        return self._hold(hold_s) if hold_s > 0 else None

    def produced(self, request: str, tokens: int, now: float) -> None:
        decider, streamed = self._inside.get(request, (None, False))
        if decider is None or not streamed:  # an answer in one piece does not show when its first token was made
            return
        decider.produced(now, request, tokens)
        self._stats.produced(request, tokens, now)
        self._decide_soon()

    def ended(self, request: str, ok: bool, now: float) -> None:
        decider, _ = self._inside.pop(request, (None, False))
        if decider is None:
            return
        decider.ended(now, request, ok)
        self._deciders.went(now, decider)
        model = self._stats.model(request)
        self._stats.ended(request, self.learnt(model), now, ok=ok)
        self._decide_soon()

    # Mode observe: counts from the engine's metrics.

    def observed(self, inside: int, waiting: int, now: float, *, holds_s: float = inf) -> None:
        """`inside` requests are in the engine, `waiting` of them without a first token. Without another observation the
        traffic is unknown after `holds_s`."""
        self._blind, self._seen_until = False, now + holds_s
        before = self._decision.budget.tokens
        self._deciders.observed(now, inside, waiting)
        self._stats.observed(inside, waiting, now)
        if before and inside:
            self._take_back(now)
        else:
            self._decide(now)

    def lose_sight(self) -> None:
        """The traffic is unknown: there is no budget until the next observation."""
        self._blind = True
        self._decide(self._clock())

    # The rest of the guard.

    def review(self) -> None:
        """Decide now."""
        self._decide(self._clock())

    def learnt(self, model: str | None = None) -> LearntCosts:
        """What the model's governor has learnt, at most `_LEARNT_S` old; None: the model in the guard's settings."""
        now, model = self._clock(), self._model if model is None else model
        known = self._learnt.get(model)
        if known is None or now - known[0] > _LEARNT_S:
            if len(self._learnt) > _MODELS:
                self._learnt.clear()
            known = self._learnt[model] = now, self._deciders.learnt(now, model)
        return known[1]

    def idle_s(self, wake_s: float = 0.0) -> float:
        """How long borrowing will probably be possible from now on; 0: it is not, or does not pay for a wake-up."""
        if not self._decision.budget.tokens or (wake_s and not self._deciders.pays(self._clock(), wake_s)):
            return 0.0
        return self.learnt().forecast.spell_s

    def stepping_since(self) -> float | None:
        """When the oldest step under way began; None: no step is under way."""
        return min((at for loan in self._borrowers.all() if (at := loan.stepping_since()) is not None), default=None)

    def _take_back(self, now: float) -> None:
        """Decide at an arrival, and measure how long engines that lost their budget go on."""
        had = [loan for loan in self._borrowers.all() if loan.budget.tokens]
        self._decide(now)
        for loan in had:
            if not loan.budget.tokens:
                loan.reclaimed(now)

    async def _hold(self, hold_s: float) -> None:
        began = self._clock()
        while self.stepping_since() is not None and self._clock() - began < hold_s:  # noqa: ASYNC110 - another process sets it
            await asyncio.sleep(_HELD_S)
        metrics.HELD_SECONDS.observe(self._clock() - began)

    def _decide_soon(self) -> None:
        """Decide once for all events of this turn of the event loop."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._decide_now)

    def _decide_now(self) -> None:
        self._soon = False
        self.review()

    def _review_due(self) -> None:
        self._review = None
        self.review()

    def _decide(self, now: float) -> None:
        if self._closed:
            return
        decision = _NOTHING if self._blind or now > self._seen_until else self._deciders.decide(now)
        self._share(decision, now)
        if decision.state != self._decision.state:
            metrics.DECISIONS.labels(decision.state).inc()
        self._decision = decision
        wait_s = min(_MOST_S, max(_LEAST_S, decision.review_at - now))
        loop = asyncio.get_running_loop()
        if self._review is None or now + wait_s < self._review_at:
            if self._review is not None:
                self._review.cancel()
            self._review_at = now + wait_s
            self._review = loop.call_later(wait_s, self._review_due)
        if self._look is None and self._borrowers.all():
            self._look = loop.call_later(_LOOK_S, self._look_at_pages)

    def _share(self, decision: BudgetDecision, now: float) -> None:
        """Split the budget among the borrowers that may have one; those with work for it go first."""
        loans, budget = self._borrowers.all(), decision.budget
        fit = [loan for loan in loans if loan.granted(now)]
        takers = [loan for loan in fit if loan.wanted] or fit
        for loan in loans:
            if loan not in takers:
                loan.write(Budget(), now)
        for number, loan in enumerate(takers):
            tokens, more = divmod(budget.tokens, len(takers))
            sequences, others = divmod(budget.sequences, len(takers))
            own = Budget(tokens + (number < more), sequences + (number < others), budget.until)
            loan.write(own, now, idle=decision.slack_s == NOTHING_INSIDE)

    def _look_at_pages(self) -> None:
        """Report each step to the governor, and look again as long as steps are possible."""
        self._look = None
        now, busy, watched, stepped = self._clock(), False, False, False
        for loan in self._borrowers.all():
            steps = list(loan.new_steps())
            ran_s = sum(seconds for _, _, seconds in steps)
            for ended, tokens, seconds in steps:
                stepped = True
                # A step that was stopped on its way does not show how long steps take.
                if not any(ended - ran_s <= at <= ended for at in loan.account.strikes):
                    self._deciders.stepped(max(now, ended), tokens, seconds)
            watched = watched or loan.yielding
            busy = busy or bool(loan.budget.tokens) or loan.stepping_since() is not None
        if stepped:
            self._decide(now)
        if self._look is None and not self._closed and (busy or watched):
            self._look = asyncio.get_running_loop().call_later(_WATCH_S if watched else _LOOK_S, self._look_at_pages)
