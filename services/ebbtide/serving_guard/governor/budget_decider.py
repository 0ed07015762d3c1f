"""Declares what a decider is, which says how much rollout work may run beside a serving engine, and asks those of many
models.

The governor is such a decider, and so are the policies that it is compared with.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from msgspec import Struct

from ebbtide.types.grants import Budget, Forecast

#: The slack while nothing is inside.
NOTHING_INSIDE: Final = -1.0


class LatencyTargets(Struct, frozen=True, kw_only=True):
    """The SLO of one served model, and how far rollouts may use it up."""

    ttft_s: float = 0.0  # target for the time to the first token; 0: `ttft_factor` applies
    tpot_s: float = 0.0  # target for a request's mean time per later token; 0: `tpot_factor` applies
    ttft_factor: float = 1.6  # target as a multiple of that percentile of the unloaded latency, which is learnt
    tpot_factor: float = 1.27
    percentile: float = 99.0  # the share of requests that meet the targets
    aim_ttft: float = 0.0  # part of the TTFT target that rollouts may use; 0: none run while a request waits for it
    aim_tpot: float = 0.15  # part of the room between unloaded TPOT and target that rollouts may use; 0: idle time only
    aim_gap: float = 2.0  # longest single pause beside rollouts, as a multiple of the TPOT target
    #: Highest mean TPOT beside rollouts, as a multiple of the unloaded one, however much room the target leaves. A
    #: request that decodes for longer meets more prompts, which then wait for it. With 1.5, in virtual time at loads of
    #: 20 to 80 %, with and without a stray process, at most 0.005 fewer of the requests met the SLO than alone.
    aim_slowed: float = 1.5


class StepLimits(Struct, frozen=True, kw_only=True):
    """Limits of the borrowing engine's steps."""

    tokens: int = 256
    sequences: int = 64
    first_tokens: int = 16  # of a step while nothing is known, and the least that is worth a step
    step_share: float = 0.1  # part of the TTFT target that one step may take
    quiet_s: float = 0.01  # without rollouts after the last request left, at first; later between the next two
    quiet_least_s: float = 0.002
    quiet_most_s: float = 0.05
    hold_s: float = 0.02  # longest wait of an arrived request for the step under way


class BudgetDecision(Struct, frozen=True):
    """What the next rollout step may take, and why."""

    budget: Budget
    state: str  # idle, shared, quiet or reclaimed; where no decider is asked, blind or closed
    slack_s: float  # least of all requests inside; `NOTHING_INSIDE` if there are none
    review_at: float  # when to decide again if there is no event before


class LearntCosts(Struct, frozen=True, kw_only=True):
    """What a policy knows by now, for status and grants. Seconds; 0: unknown."""

    ttft_target_s: float = 0.0
    tpot_target_s: float = 0.0
    unloaded_ttft_s: float = 0.0
    unloaded_tpot_s: float = 0.0
    step_s: float = 0.0  # the longest that a rollout step takes
    forecast: Forecast = Forecast()


class BudgetDecider(Protocol):
    """A policy, which a guard calls at each event. `now` is in seconds of the monotonic clock and never goes back."""

    def arrived(self, now: float, request: str, prompt_tokens: int, *, streamed: bool = True) -> None:
        """A request came; `prompt_tokens` may be an estimate. Without `streamed` its first token is seen only at its
        end, so it counts as waiting all the time, and its latency is not learnt."""

    def produced(self, now: float, request: str, tokens: int) -> None:
        """The request made `tokens` more; the first call is for its first token."""

    def ended(self, now: float, request: str, ok: bool) -> None:
        """The request ended, was cancelled or failed. Unknown requests are ignored."""

    def elsewhere(self, now: float, inside: int) -> None:  # noqa: ARG002 - not all policies use it
        """This many requests of models with another policy are inside. Latencies meanwhile are not unloaded ones."""
        return

    def observed(self, now: float, inside: int, waiting: int) -> None:
        """Replaces the calls for single requests if they are unknown: so many are inside, and so many of them have no
        first token."""

    def stepped(self, now: float, tokens: int, seconds: float) -> None:
        """A rollout step took `seconds`; it ended at `now` or shortly before."""

    def decide(self, now: float) -> BudgetDecision:
        """What the next rollout step may take, from now on until the next decision."""
        ...

    def hold_s(self, now: float, stepping_since: float | None) -> float:
        """How long an arrived request waits for the rollout step under way since then; 0: not at all."""
        ...

    def learnt(self, now: float) -> LearntCosts:
        """What is known by now."""
        ...

    def pays(self, now: float, wake_s: float) -> bool:
        """Whether the expected idle time pays for waking a sleeping engine, which takes `wake_s`."""
        ...


Makes = Callable[[LatencyTargets, StepLimits], BudgetDecider]


class MultiModelGovernor:
    """Combines the governors of the models that one engine serves: rollouts may do what all of them allow. `targets`:
    by model; "" for models without targets of their own.

    Invariant: each request is reported to its model's governor only; the others know the number of such requests.
    """

    def __init__(self, makes: Makes, targets: Mapping[str, LatencyTargets], limits: StepLimits) -> None:
        self._of = {model: makes(of, limits) for model, of in targets.items()}
        self._all = list(self._of.values())
        self._inside = dict.fromkeys(self._all, 0)

    def of(self, model: str) -> BudgetDecider:
        return self._of.get(model) or self._of[""]

    def came(self, now: float, decider: BudgetDecider) -> None:
        """Count a request of `decider`'s model."""
        self._count(now, decider, 1)

    def went(self, now: float, decider: BudgetDecider) -> None:
        self._count(now, decider, -1)

    def _count(self, now: float, decider: BudgetDecider, more: int) -> None:
        self._inside[decider] += more
        inside = sum(self._inside.values())
        for other in self._all:
            if other is not decider:
                other.elsewhere(now, inside - self._inside[other])

    def decide(self, now: float) -> BudgetDecision:
        """The strictest of all decisions."""
        if len(self._all) == 1:
            return self._all[0].decide(now)
        made = [one.decide(now) for one in self._all]
        least = min(made, key=lambda decision: (decision.budget.tokens, decision.budget.until))
        budgets = [decision.budget for decision in made]
        return BudgetDecision(
            Budget(
                min(budget.tokens for budget in budgets),
                min(budget.sequences for budget in budgets),
                min(budget.until for budget in budgets),
            ),
            least.state,
            min((decision.slack_s for decision in made if decision.slack_s != -1), default=-1.0),
            min(decision.review_at for decision in made),
        )

    def stepped(self, now: float, tokens: int, seconds: float) -> None:
        for one in self._all:
            one.stepped(now, tokens, seconds)

    def observed(self, now: float, inside: int, waiting: int) -> None:
        self._of[""].observed(now, inside, waiting)

    def pays(self, now: float, wake_s: float) -> bool:
        return all(one.pays(now, wake_s) for one in self._all)

    def learnt(self, now: float, model: str) -> LearntCosts:
        return self.of(model).learnt(now)
