"""Predicts how long responses will be, from all that is known of them: the one learner of a run's lengths.

It combines the run's lengths (`length_marginal`), how alike the samples of a prompt are (`length_correlation`), the
prompt's former epochs (`prompt_history`), the siblings that ended, and what the others have made (`shared_part`): a
sibling that runs at 20,000 tokens proves 20,000. Seer (arXiv 2511.14617, section 2.2 of its scheduling) takes the
longest finished sibling, and the cap without one.

Only groups that ended teach, with their stopped samples: of a step under way the short responses are known first. Until
a group ended, the open ones stand in, counted as stopped.

To learn takes some tenths of a second. So a lesson is made apart, from what nothing changes meanwhile, and taken over
once it is there.

Invariant: the model follows from the newest lesson's groups. Lost with the process; one step teaches it again, but for
the prompts' former epochs.
"""

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide.scheduling.long_tail.length_correlation import ScoredGroup, evenly, group_share
from ebbtide.scheduling.long_tail.length_forecast import LengthForecast
from ebbtide.scheduling.long_tail.length_marginal import LengthMarginal, log_normal, product_limit
from ebbtide.scheduling.long_tail.prompt_history import PromptHistory
from ebbtide.scheduling.long_tail.shared_part import SharedPrior, shared_part

#: Groups that are remembered: two steps or more of usual sizes, and of a larger step so many of its groups.
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


class LengthModel(NamedTuple):
    """`alike`: the share of the scores' variance that the samples of a group have in common."""

    marginal: LengthMarginal
    alike: float


class KeptGroup(NamedTuple):
    """An ended group that is remembered. `likely`: lengths that its stopped samples would probably have had."""

    ended: EndedGroup
    likely: Sequence[float] = ()


class PromptLesson(NamedTuple):
    """The shared part of a prompt's group: an estimate that is free of priors, and its variance."""

    prompt: str
    mean: float
    noise: float


class LengthLesson(NamedTuple):
    """What a learner takes over. `kept`: the groups of each former lesson, the newest one first; `fitted`: a response
    that ended has taught the model.
    """

    kept: Sequence[Sequence[KeptGroup]]
    model: LengthModel
    fitted: bool
    prompts: Sequence[PromptLesson] = ()


class LengthLearner:
    def __init__(self) -> None:
        self._history = PromptHistory()
        self._learnt = LengthLesson((), LengthModel(log_normal(_MEDIAN_TOKENS, _SPREAD), _ALIKE), fitted=False)

    @property
    def known(self) -> bool:
        """Whether a response that ended has taught anything."""
        return self._learnt.fitted

    @property
    def alike(self) -> float:
        """The share of the scores' variance that the samples of a group have in common."""
        return self._learnt.model.alike

    def groups_ended(self, groups: Iterable[EndedGroup]) -> None:
        """Learn from whole groups: best from all of a step together, since the first ones to end are short."""
        self.take(self.lesson(tuple(groups)))

    def groups_open(self, groups: Iterable[UnfinishedGroup]) -> None:
        """Take what is open for the lengths of the run. Does nothing once whole groups have taught some."""
        self.take(self.open_lesson(tuple(groups)))

    def take(self, lesson: LengthLesson) -> None:
        """Take over what a lesson found. It must be the only one that was made since the last call."""
        self._learnt = lesson._replace(prompts=())
        for prompt, mean, noise in lesson.prompts:
            self._history.ended(prompt, lesson.model.alike, mean, noise)

    def lesson(self, groups: Sequence[EndedGroup]) -> LengthLesson:
        """What whole groups teach, in the order in which they ended. It changes nothing, and may be made in another
        thread while forecasts are asked for.
        """
        learnt = self._learnt
        if learnt.fitted:
            # The long ones of a step end last, so any part of it is taken evenly from all of it.
            new = [KeptGroup(one, self._likely(learnt.model, one)) for one in evenly(groups, _MEMORY)]
            kept = _newest((new, *learnt.kept))
            model = self._drawn(learnt.model, kept)
        else:
            kept = _newest(([KeptGroup(one) for one in evenly(groups, _MEMORY)], *learnt.kept))
            ended = [one.ended for some in kept for one in some]
            lengths = (one for group in ended for one in group.lengths)
            first = product_limit(lengths, (one for group in ended for one in group.stopped))
            if first is None:
                return learnt._replace(kept=kept)
            model = LengthModel(first, group_share([_scored(first, group) for group in ended]))
            for _ in range(_FIRST_ROUNDS):
                kept = [[KeptGroup(one.ended, self._likely(model, one.ended)) for one in some] for some in kept]
                model = self._drawn(model, kept)
        prompts = (_of_prompt(model, group) for group in groups if group.prompt)
        return LengthLesson(kept, model, fitted=True, prompts=[one for one in prompts if one is not None])

    def open_lesson(self, groups: Sequence[UnfinishedGroup]) -> LengthLesson:
        """What open groups teach; as `lesson`."""
        learnt = self._learnt
        if learnt.fitted:
            return learnt
        ended, stopped = list[float](), list[int]()
        for group in groups:
            ended += group.finished
            stopped += (*group.stopped, *group.made)
        # The prior's own quantiles count as a few more responses: the first ones to end are too alike.
        first = log_normal(_MEDIAN_TOKENS, _SPREAD)
        ended += [first.tokens(-1.5 + 0.5 * place) for place in range(7)]
        marginal = product_limit(ended, stopped) or learnt.model.marginal
        return learnt._replace(model=learnt.model._replace(marginal=marginal))

    def forecast(self, group: UnfinishedGroup) -> LengthForecast:
        """What to expect of a group's samples."""
        return self._forecast(self._learnt.model, group)

    def prior(self, prompt: str) -> SharedPrior:
        """What is expected of a group before any of its samples. `prompt`: as in `UnfinishedGroup`."""
        return self._history.prior(prompt, self.alike)

    def _forecast(self, model: LengthModel, group: UnfinishedGroup) -> LengthForecast:
        score = model.marginal.score
        made = [one for one in (*group.stopped, *group.made) if one > 0]
        scores = {one: score(one) for one in set(made)}
        beyond = [scores[one] for one in made]
        within = sqrt(1.0 - model.alike)
        prior = self._history.prior(group.prompt, model.alike)
        part = shared_part(prior, within, [*map(score, group.finished)], beyond)
        return LengthForecast(model.marginal, part, within, group.cap)

    def _drawn(self, model: LengthModel, kept: Sequence[Sequence[KeptGroup]]) -> LengthModel:
        """Learn the curve of lengths, and how alike samples are.

        What stopped samples would have made is imputed from their groups: a sample that was stopped since enough
        siblings had ended was one of a short group, or of a long one. The product-limit estimate, which knows no
        groups, is only the beginning.
        """
        lengths: list[float] = [one for some in kept for group in some for one in group.ended.lengths]
        imputed = [one for some in kept for group in some for one in group.likely]
        if imputed:
            lengths = lengths * len(_IMPUTED) + imputed
        marginal = product_limit(lengths) or model.marginal
        return LengthModel(marginal, group_share([_scored(marginal, one.ended) for some in kept for one in some]))

    def _likely(self, model: LengthModel, group: EndedGroup) -> list[float]:
        """Likely lengths of the stopped samples, `_IMPUTED` of each."""
        if not group.stopped:
            return []
        open_ = UnfinishedGroup(finished=group.lengths, made=group.stopped, prompt=group.prompt)
        forecast = self._forecast(model, open_)
        lengths = {made: [forecast.length(made, share) for share in _IMPUTED] for made in set(group.stopped)}
        return [one for made in group.stopped for one in lengths[made]]


def _newest(lessons: Iterable[Sequence[KeptGroup]]) -> list[Sequence[KeptGroup]]:
    """As many groups as are remembered, the newest lesson's first; of the last one that has room, an even part."""
    kept, room = list[Sequence[KeptGroup]](), _MEMORY
    for lesson in lessons:
        some = evenly(lesson, room)
        room -= len(some)
        if some:
            kept.append(some)
    return kept


def _scored(marginal: LengthMarginal, group: EndedGroup) -> ScoredGroup:
    score = marginal.score
    return ScoredGroup([*map(score, group.lengths)], [*map(score, group.stopped)])


def _of_prompt(model: LengthModel, group: EndedGroup) -> PromptLesson | None:
    """The group's shared part, as far as its own samples tell it; None: they tell nothing."""
    scored, alike = _scored(model.marginal, group), model.alike
    if not scored.stopped:
        count = len(scored.ended)
        return PromptLesson(group.prompt, sum(scored.ended) / count, (1.0 - alike) / count) if count else None
    part = shared_part(SharedPrior(0.0, alike), sqrt(1.0 - alike), scored.ended, scored.stopped)
    mean, variance = part.moments
    precision = 1.0 / variance - 1.0 / alike  # without the prior's
    return PromptLesson(group.prompt, mean / variance / precision, 1.0 / precision) if precision > 0.0 else None
