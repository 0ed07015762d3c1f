"""Predicts how long responses will be, from all that is known of them: the one learner of a run's lengths.

It combines the run's lengths (`length_marginal`), how alike the samples of a prompt are (`length_correlation`), the
prompt's former epochs (`prompt_history`), the siblings that ended, and what the others have made (`shared_part`): a
sibling that runs at 20,000 tokens proves 20,000. Seer (arXiv 2511.14617, section 2.2 of its scheduling) takes the
longest finished sibling, and the cap without one.

Only groups that ended teach, with their stopped samples: of a step under way the short responses are known first. Until
a group ended, the open ones stand in, counted as stopped.

Invariant: `_groups` has the newest groups, and the model follows from them. Once `_fitted`, `_imputed` has an entry for
each. Lost with the process; one step teaches it again, but for the prompts' former epochs.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.long_tail.length_correlation import ScoredGroup, group_share
from ebbtide.scheduling.long_tail.length_forecast import LengthForecast
from ebbtide.scheduling.long_tail.length_marginal import LengthMarginal, log_normal, product_limit
from ebbtide.scheduling.long_tail.prompt_history import PromptHistory
from ebbtide.scheduling.long_tail.shared_part import SharedPrior, shared_part

#: Groups that are remembered: two steps or more of usual sizes.
_MEMORY: Final = 512
#: Of a run of which nothing is known: RollPacker's mathematical responses have a median of 660 tokens, Seer's means are
#: 7,600 to 39,000. The spread covers both.
_MEDIAN_TOKENS, _SPREAD = 2_048.0, 1.5
#: Quantiles that stand for the length of a stopped sample: the middles of equal shares.
_IMPUTED: Final = (1 / 6, 1 / 2, 5 / 6)
#: Imputation begins with so many rounds; later each step has one.
_FIRST_ROUNDS: Final = 3
#: How alike samples are until a group ended. Papers report a strong correlation, and no coefficient.
_ALIKE: Final = 0.5


class EndedGroup(Struct, frozen=True, kw_only=True, gc=False):
    """A group of which no sample goes on. Lengths in tokens."""

    lengths: Sequence[int]  # of the responses that ended by themselves
    stopped: Sequence[int] = ()  # made by the others: they came to their cap, or were not needed any more
    prompt: str = ""  # of the data set, equal in each epoch; "": it is not known


class UnfinishedGroup(Struct, frozen=True, kw_only=True, gc=False):
    """A group of which some samples have not ended. Lengths in tokens."""

    finished: Sequence[int] = ()  # whole responses
    stopped: Sequence[int] = ()  # made by those that came to their cap
    made: Sequence[int] = ()  # made so far by the others, whether they run or wait
    prompt: str = ""
    cap: int = 1 << 20  # the longest response


class LengthLearner:
    def __init__(self) -> None:
        self._groups: deque[EndedGroup] = deque(maxlen=_MEMORY)
        self._imputed: deque[list[float]] = deque(maxlen=_MEMORY)  # likely lengths of the stopped samples, by group
        self._history = PromptHistory()
        self._fitted = False
        self._marginal: LengthMarginal = log_normal(_MEDIAN_TOKENS, _SPREAD)
        self.alike = _ALIKE  # share of the scores' variance that the samples of a group have in common

    @property
    def known(self) -> bool:
        """Whether a response that ended has taught anything."""
        return self._fitted

    def groups_ended(self, groups: Iterable[EndedGroup]) -> None:
        """Learn from whole groups: best from all of a step together, since the first ones to end are short."""
        new = list(groups)
        self._groups.extend(new)
        self._fit(new)
        for group in new:
            self._remember(group)

    def groups_open(self, groups: Iterable[UnfinishedGroup]) -> None:
        """Take what is open for the lengths of the run. Does nothing once whole groups have taught some."""
        if self._fitted:
            return
        ended, stopped = list[int](), list[int]()
        for group in groups:
            ended += group.finished
            stopped += (*group.stopped, *group.made)
        # The prior's own quantiles count as a few more responses: the first ones to end are too alike.
        prior = [self._first.tokens(-1.5 + 0.5 * place) for place in range(7)]
        self._marginal = product_limit([*ended, *prior], stopped) or self._marginal

    def forecast(self, group: UnfinishedGroup) -> LengthForecast:
        """What to expect of a group's samples."""
        score = self._marginal.score
        beyond = [score(one) for one in (*group.stopped, *group.made) if one > 0]
        within = sqrt(1.0 - self.alike)
        part = shared_part(self.prior(group.prompt), within, [*map(score, group.finished)], beyond)
        return LengthForecast(self._marginal, part, within, group.cap)

    def prior(self, prompt: str) -> SharedPrior:
        """What is expected of a group before any of its samples. `prompt`: as in `UnfinishedGroup`."""
        return self._history.prior(prompt, self.alike)

    _first: Final = log_normal(_MEDIAN_TOKENS, _SPREAD)

    def _fit(self, new: Sequence[EndedGroup]) -> None:
        """Learn the curve of lengths, and how alike samples are.

        What stopped samples would have made is imputed from their groups: a sample that was stopped since enough
        siblings had ended was one of a short group, or of a long one. The product-limit estimate, which knows no
        groups, is only the beginning.
        """
        if self._fitted:
            self._imputed.extend(map(self._likely, new))
            self._draw_curve()
            return
        lengths = (one for group in self._groups for one in group.lengths)
        first = product_limit(lengths, (one for group in self._groups for one in group.stopped))
        if first is None:
            return
        self._marginal, self._fitted = first, True
        self.alike = group_share([self._scored(group) for group in self._groups])
        for _ in range(_FIRST_ROUNDS):
            self._imputed.clear()
            self._imputed.extend(map(self._likely, self._groups))
            self._draw_curve()
            if not any(self._imputed):
                return

    def _draw_curve(self) -> None:
        lengths: list[float] = [one for group in self._groups for one in group.lengths]
        imputed = [one for likely in self._imputed for one in likely]
        if imputed:
            lengths = lengths * len(_IMPUTED) + imputed
        self._marginal = product_limit(lengths) or self._marginal
        self.alike = group_share([self._scored(group) for group in self._groups])

    def _likely(self, group: EndedGroup) -> list[float]:
        """Likely lengths of the stopped samples, `_IMPUTED` of each."""
        if not group.stopped:
            return []
        forecast = self.forecast(UnfinishedGroup(finished=group.lengths, made=group.stopped, prompt=group.prompt))
        lengths = {made: [forecast.length(made, share) for share in _IMPUTED] for made in set(group.stopped)}
        return [one for made in group.stopped for one in lengths[made]]

    def _scored(self, group: EndedGroup) -> ScoredGroup:
        score = self._marginal.score
        return ScoredGroup([*map(score, group.lengths)], [*map(score, group.stopped)])

    def _remember(self, group: EndedGroup) -> None:
        """Take the group's shared part, as far as its own samples tell it, into the prompt's history."""
        if not group.prompt:
            return
        scored, alike = self._scored(group), self.alike
        if not scored.stopped:
            count = len(scored.ended)
            if count:
                self._history.ended(group.prompt, alike, sum(scored.ended) / count, (1.0 - alike) / count)
            return
        part = shared_part(SharedPrior(0.0, alike), sqrt(1.0 - alike), scored.ended, scored.stopped)
        mean, variance = part.moments
        precision = 1.0 / variance - 1.0 / alike  # without the prior's
        if precision > 0.0:
            self._history.ended(group.prompt, alike, mean / variance / precision, 1.0 / precision)
