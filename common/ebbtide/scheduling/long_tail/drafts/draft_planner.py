"""Plans the drafts of one engine, step by step: what was learnt of acceptance and cost decides lengths and the switch.

How far a draft is accepted depends most on how many tokens before it were found in its group (its match), and then on
the group. So acceptance is learnt by classes of matches over all groups, and from there for each group.

Invariant: what is learnt fades, and of a group that is forgotten nothing is kept. Lost with the process; some hundred
steps teach it again.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.long_tail.drafts.draft_acceptance import LONGEST_DRAFT, DraftAcceptance
from ebbtide.scheduling.long_tail.drafts.draft_lengths import DraftSlot, best_drafts, drafts_within
from ebbtide.scheduling.long_tail.drafts.speculation_switch import SpeculationMode, SpeculationSwitch
from ebbtide.scheduling.long_tail.drafts.verification_cost import VerificationCost, next_size

#: Classes of matches end below these lengths: drafts behind two tokens are guesses, behind twenty nearly copies.
_MATCH_CLASSES: Final = (2, 3, 5, 9, 17)
#: Draft tokens for each sample while costs are unknown, or in a try: enough to learn from, too few to hurt long.
_TRIED: Final = 2
#: While drafts do not pay, they are looked for in every so many steps: a search costs some microseconds for a sample.
_LOOK_EVERY: Final = 16
#: Steps between those with twice the drafts that seem best: costs beyond the largest step so far are only guessed.
_FURTHER_EVERY: Final = 64
#: The time of a search is a mean over about so many of the newest ones.
_SEARCHES: Final = 16
#: A step that takes so many times the expected was held up by something else.
_HELD_UP: Final = 5.0


class DraftOffer(Struct, frozen=True, gc=False):
    """A draft that a sample could get. `length`: its tokens, at most. `match`: the length of its context's match."""

    group: str
    match: int
    length: int


class DraftPlanner:
    """`longest`: tokens of a draft. `most`: draft tokens that a step of the engine takes."""

    def __init__(self, longest: int, most: int) -> None:
        self._longest, self._most = min(longest, LONGEST_DRAFT), most
        self._cost, self._switch = VerificationCost(), SpeculationSwitch()
        self._classes = [DraftAcceptance() for _ in range(len(_MATCH_CLASSES) + 1)]
        self._groups: dict[str, dict[int, DraftAcceptance]] = {}
        self._until_look = self._until_further = 0
        self._search_s = 0.0  # of a step in which drafts are looked for
        self.mode = SpeculationMode.ON  # of the newest step

    def looks(self) -> bool:
        """Whether drafts are to be looked for in this step. Call it once a step, and `lengths` next if it holds."""
        if self.mode is SpeculationMode.ON:
            return True
        self._until_look -= 1
        if self._until_look > 0:
            self.mode = self._switch.step(1.0)
            return self.mode is not SpeculationMode.OFF
        return True

    def lengths(self, offers: Sequence[DraftOffer], samples: int) -> list[int]:
        """Lengths of the drafts, in the offers' order. `samples`: that run, with or without an offer."""
        if not offers:
            return []  # which costs nothing, and tells nothing
        slots = [DraftSlot(self.survival(offer)) for offer in offers]
        tried = drafts_within(slots, min(_TRIED * samples, self._most))
        if self.mode is SpeculationMode.TRY:  # `looks` had the switch say so
            self.mode = SpeculationMode.OFF
            return tried
        if not self._cost.known:  # until steps with drafts and without were seen
            self._until_further = 1 - self._until_further
            return tried if self._until_further else [0] * len(slots)
        # Samples without an offer are part of the batch, and gain nothing.
        rest = [DraftSlot(()) for _ in range(samples - len(slots))]
        plan = best_drafts([*slots, *rest], self._cost.seconds, most=self._most)
        step_s = plan.step_s + self._search_s
        gain = plan.worth * self._cost.seconds(samples) / (samples * step_s) if samples and step_s else 1.0
        self.mode, self._until_look = self._switch.step(gain), _LOOK_EVERY
        if self.mode is SpeculationMode.TRY:
            self.mode = SpeculationMode.OFF
            return tried
        if self.mode is SpeculationMode.OFF:
            return [0] * len(slots)
        return self._further(slots, list(plan.lengths[: len(slots)]), samples)

    def _further(self, slots: Sequence[DraftSlot], lengths: list[int], samples: int) -> list[int]:
        """Now and then, and where the planned step is among the largest so far, twice the drafts, to learn what they
        cost. They are so many that the step is larger than those of its class: else few drafts would stay few.
        """
        planned = sum(lengths)
        self._until_further -= 1
        if planned == 0 or (self._until_further > 0 and not self._cost.reaches(samples + planned)):
            return lengths
        self._until_further = _FURTHER_EVERY
        wanted = max(2 * planned, next_size(samples + planned) - samples)
        return drafts_within(slots, min(wanted, self._most))

    def survival(self, offer: DraftOffer) -> list[float]:
        """Probabilities that at least 1, 2, ... tokens of the offered draft are accepted."""
        number = _match_class(offer.match)
        learner = self._groups.get(offer.group, {}).get(number, self._classes[number])
        return learner.survival(min(offer.length, self._longest))

    def drafted(self, group: str, match: int, length: int, accepted: int) -> None:
        """Note what became of a draft."""
        number = _match_class(match)
        wider = self._classes[number]
        learners = self._groups.setdefault(group, {})
        learners.setdefault(number, DraftAcceptance(wider)).observe(length, accepted)
        wider.observe(length, accepted)

    def stepped(self, tokens: int, seconds: float) -> None:
        """Note a step that only verified tokens, so many: one of each sample, and all drafts."""
        if self._cost.known and seconds > _HELD_UP * self._cost.seconds(tokens):
            return
        self._cost.observe(tokens, seconds)

    def searched(self, seconds: float) -> None:
        """Note how long the search for drafts made a step longer, whatever came of it."""
        self._search_s += (seconds - self._search_s) / _SEARCHES if self._search_s else seconds

    def forget(self, groups: Iterable[str]) -> None:
        """These groups are over."""
        for group in groups:
            self._groups.pop(group, None)


def _match_class(match: int) -> int:
    return sum(match >= bound for bound in _MATCH_CLASSES)
