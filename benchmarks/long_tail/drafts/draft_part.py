"""Compares lengths of drafts with those of Seer's printed rule, at the same budgets of draft tokens."""

from collections.abc import Callable
from statistics import median
from typing import Any, Final

from benchmarks.long_tail.drafts.draft_cases import alike_case, drawn_case, judged

#: Probabilities that at least 1, 2, ... 8 draft tokens are accepted: of suffix trees over responses drawn from phrase
#: books that a group shares, with mean accept lengths within 0.12 of those that Seer prints for 0, 1, 5, 15 siblings.
SURVIVAL: Final = (0.52, 0.40, 0.30, 0.14, 0.11, 0.07, 0.05, 0.04)
#: Running probes and others, and the budgets that are promised something: with 2 and 4 draft tokens a sample.
_PROBES, _OTHERS, _BUDGETS = 16, 48, (128, 256)
#: Cases that are drawn, in a quick run too: they take seconds.
_DRAWN: Final = 10_000


def draft_part(tell: Callable[[str], None]) -> dict[str, Any]:
    """The ratio of both rules' objectives: in the stated settings, and the least of the drawn cases. Computed, so the
    same on every machine.
    """
    stated = {budget: judged(alike_case(_PROBES, _OTHERS, SURVIVAL, budget)) for budget in _BUDGETS}
    for budget, found in stated.items():
        tell(f"drafts: budget {budget}: {found.worth:.1f} over {found.printed_worth:.1f} is {found.ratio:.4f}")
    drawn = [judged(drawn_case(seed)) for seed in range(_DRAWN)]
    ratios = [one.ratio for one in drawn]
    below = sum(one.below for one in drawn)
    tell(f"drafts: {_DRAWN} drawn cases: least {min(ratios):.6f}, median {median(ratios):.4f}, {below} below 1")
    return {
        "figures": {"draft_objective_over_printed_rule": min(one.ratio for one in stated.values())},
        "stated": {
            str(budget): {
                "objective": found.worth,
                "printed_objective": found.printed_worth,
                "printed_lengths": list(found.printed),
                "ratio": found.ratio,
            }
            for budget, found in stated.items()
        },
        "drawn": {"cases": _DRAWN, "below": below, "least_ratio": min(ratios), "median_ratio": median(ratios)},
    }
