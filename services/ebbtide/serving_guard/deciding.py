"""Governors of several served models behind one engine, asked as one.

Invariant: each request is known to the governor of its model alone, and rollouts may do what all of them allow.
"""

from collections.abc import Callable, Mapping

from ebbtide.scheduling.governor import Decides, Decision, Learnt, Limits, Targets
from ebbtide.types.grants import Budget

Makes = Callable[[Targets, Limits], Decides]


class Panel:
    """`targets` by model; "" for those that have none of their own."""

    def __init__(self, makes: Makes, targets: Mapping[str, Targets], limits: Limits) -> None:
        self._of = {model: makes(of, limits) for model, of in targets.items()}
        self._all = list(self._of.values())

    def of(self, model: str) -> Decides:
        return self._of.get(model) or self._of[""]

    def decide(self, now: float) -> Decision:
        """The tightest of all."""
        if len(self._all) == 1:
            return self._all[0].decide(now)
        made = [one.decide(now) for one in self._all]
        least = min(made, key=lambda decision: (decision.budget.tokens, decision.budget.until))
        budgets = [decision.budget for decision in made]
        return Decision(
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

    def learnt(self, now: float, model: str) -> Learnt:
        return self.of(model).learnt(now)
