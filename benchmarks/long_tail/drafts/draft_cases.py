"""Draws cases in which two classes of running samples share a budget of draft tokens, and judges both rules on them."""

from random import Random
from typing import Final, NamedTuple

from benchmarks.rivals.seer_draft_rule import ClassDrafts, DraftClasses, printed_split
from ebbtide.scheduling.long_tail.drafts.draft_lengths import DraftSlot, drafts_within, expected_worth

#: The longest draft that Seer prints.
LONGEST: Final = 8
#: Rounding of sums in another order.
_EQUAL: Final = 1e-9


class DraftCase(NamedTuple):
    """`slots`: the probes first."""

    classes: DraftClasses
    budget: int
    slots: tuple[DraftSlot, ...]


class DraftVerdict(NamedTuple):
    """`ratio`: the worth of a step's tokens by the greedy over that by the printed rule."""

    printed: ClassDrafts
    printed_worth: float
    worth: float

    @property
    def ratio(self) -> float:
        return self.worth / self.printed_worth

    @property
    def below(self) -> bool:
        return self.ratio < 1.0 - _EQUAL


def alike_case(
    probes: int, others: int, survival: tuple[float, ...], budget: int, preference: float = 2.0
) -> DraftCase:
    """A case whose samples all accept drafts alike, as the printed rule takes them to."""
    classes = DraftClasses(probes=probes, others=others, survival=survival, preference=preference)
    slots = [DraftSlot(survival, preference)] * probes + [DraftSlot(survival)] * others
    return DraftCase(classes, budget, tuple(slots))


def drawn_case(seed: int) -> DraftCase:
    """A case that the seed decides. In every second one each sample accepts drafts in its own way; the printed rule is
    told the mean, which is what it measures.
    """
    draw = Random(f"draft {seed}")
    probes, others = (
        draw.choice((0, 1, 4, 16, 48)) + draw.randrange(4),
        draw.choice((1, 8, 48, 128)) + draw.randrange(4),
    )
    preference, longest = draw.uniform(1.0, 4.0), draw.randint(1, LONGEST)
    budget = draw.randint(0, longest * (probes + others))
    if seed % 2:
        return alike_case(probes, others, _survival(draw, longest), budget, preference)
    own = [_survival(draw, longest) for _ in range(probes + others)]
    mean = tuple(sum(each) / len(own) for each in zip(*own, strict=True))
    classes = DraftClasses(probes=probes, others=others, survival=mean, preference=preference)
    slots = (DraftSlot(one, preference if at < probes else 1.0) for at, one in enumerate(own))
    return DraftCase(classes, budget, tuple(slots))


def judged(case: DraftCase) -> DraftVerdict:
    """Both rules on a case. Raises `ValueError` if one of them takes more than the budget."""
    printed = printed_split(case.classes, case.budget)
    by_rule = [printed.probes] * case.classes.probes + [printed.others] * case.classes.others
    ours = drafts_within(case.slots, case.budget)
    if max(sum(by_rule), sum(ours)) > case.budget:
        raise ValueError(f"a rule took more than {case.budget} draft tokens: {sum(by_rule)} and {sum(ours)}")
    return DraftVerdict(printed, expected_worth(case.slots, by_rule), expected_worth(case.slots, ours))


def _survival(draw: Random, longest: int) -> tuple[float, ...]:
    """Shares of the tokens that are accepted after the one before, multiplied."""
    base, survival, found = draw.uniform(0.1, 0.95), 1.0, list[float]()
    for _ in range(longest):
        survival *= min(1.0, max(0.0, base + draw.uniform(-0.3, 0.3)))
        found.append(survival)
    return tuple(found)
