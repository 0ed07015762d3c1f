"""Rules for lengths of drafts: the greedy one, and Seer's split as printed."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Protocol

from benchmarks.rivals.seer_draft_rule import DraftClasses, printed_budget, printed_split
from ebbtide.scheduling.long_tail.drafts.draft_lengths import DraftSlot, best_drafts

#: Seconds of a step by the tokens that it verifies.
StepSeconds = Callable[[int], float]
Survival = Sequence[float]


class DraftRule(Protocol):
    def __call__(self, survivals: Sequence[Survival], probes: Sequence[bool], seconds: StepSeconds) -> Sequence[int]:
        """The draft tokens of each running sample. `probes`: which of them run ahead of their groups."""
        ...


def greedy_drafts(survivals: Sequence[Survival], probes: Sequence[bool], seconds: StepSeconds) -> Sequence[int]:
    """Ebbtide's. The model lets all samples of an engine advance alike, so all tokens are worth the same."""
    del probes
    longest = max(map(len, survivals))
    return best_drafts([DraftSlot(one) for one in survivals], seconds, most=longest * len(survivals)).lengths


def printed_drafts(survivals: Sequence[Survival], probes: Sequence[bool], seconds: StepSeconds) -> Sequence[int]:
    """Seer's: one mean acceptance for the budget, one mean survival for the split."""
    samples, ahead = len(survivals), sum(probes)
    mean = [fmean(each) for each in zip(*survivals, strict=True)]
    budget = printed_budget(samples, mean[0], lambda length: seconds(samples * (1 + length)), len(mean))
    split = printed_split(DraftClasses(probes=ahead, others=samples - ahead, survival=mean), budget)
    return [split.probes if probe else split.others for probe in probes]
