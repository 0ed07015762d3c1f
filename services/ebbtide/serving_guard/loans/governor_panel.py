"""Combines the governors of several models served by one engine.

Invariant: each request is reported to its model's governor only; the other governors know the number of such requests.
Rollouts may do what all governors allow.
"""

from collections.abc import Callable, Mapping

from ebbtide.scheduling.coserving.budget_decider import (
    BudgetDecider,
    BudgetDecision,
    LatencyTargets,
    LearntCosts,
    StepLimits,
)
from ebbtide.types.grants import Budget

Makes = Callable[[LatencyTargets, StepLimits], BudgetDecider]


class GovernorPanel:
    """Asks all governors. `targets`: by model; "" for models without targets of their own."""

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
