"""Predicts how long responses will be, from all that is known of them: the one learner of a run's lengths.

It keeps the share of the responses that are longer than each of some lengths, which grow by a tenth. A group has a
level, a standard normal value that its samples share, and each level has shares of its own: those of a Gaussian copula,
in which the learnt part of the variance of scores is the group's: their intraclass correlation. A score is the standard
normal value that has the same share above it as a length, so that lengths may have any distribution. What a group's
samples tell is one sum over levels: an ended one tells its length, and one that runs, waits or was stopped tells that
it is longer than what it made. So a sibling that runs at 20,000 tokens proves 20,000. Seer (arXiv 2511.14617, section
2.2 of its scheduling) takes the longest finished sibling, and the cap without one.

The shares are learnt by expectation and maximization (Dempster, Laird and Rubin, JRSS B 39, 1977): stopped samples
count with the lengths that they would probably have had in their group. Without groups this is the product-limit
estimate of Kaplan and Meier. Only whole groups teach: of a step under way the short responses are known first. Until a
group ended, the open ones stand in.

A prompt that comes again is known by the levels of its former epochs. They are relative to the lengths of their time,
so a policy whose responses grow does not make them misleading.

Invariant: shares and the correlation follow from the groups in `_kept`. Lost with the process; one step teaches them
again, but for the prompts' former epochs.
"""

from collections.abc import Iterable, Sequence
from math import erfc, log, sqrt
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
T = TypeVar("T")

#: Lengths at which shares are kept, in tokens: up to some four millions.
EDGES: Final[Floats] = np.power(1.1, np.arange(161, dtype=np.float64))
_BINS: Final = len(EDGES) - 1
#: What is assumed of a run: a response is expected to have as many tokens to come as it has, and so many more (a Pareto
#: tail). It weighs as much as so many responses.
_MORE_TOKENS, _PRIOR = 1_024.0, 4.0
_ASSUMED: Final[Floats] = (_MORE_TOKENS / (_MORE_TOKENS + EDGES - 1.0)) ** 2
#: Levels of groups, in deviations, and the logarithms of their weights.
_LEVELS: Final[Floats] = np.linspace(-4.0, 4.0, 65)
_NORMAL: Final[Floats] = -0.5 * _LEVELS**2
#: One response in a hundred is independent of its group, as one that falls into a loop. An assumption: it keeps one
#: such sample from deciding for its siblings.
_STRAY: Final = 0.01
#: The intraclass correlation until a group ended (papers report a strong correlation, and no coefficient), and what is
#: tried then, as logits (0.02 to 0.98): equal lengths of a group cannot be told from nearly equal ones.
_CORRELATION: Final = 0.5
_TRIED: Final[Floats] = np.linspace(-3.9, 3.9, 14)
#: Groups that are remembered: two steps or more of usual sizes, and of a larger step so many of its groups.
_MEMORY: Final = 512
#: Of these, groups that tell the intraclass correlation.
_COMPARED: Final = 256
#: Rounds of a first lesson, and of each later one.
_FIRST_ROUNDS, _ROUNDS = 8, 2
#: The share of the lengths within which a sample is expected to end: one of five is longer.
LONGEST_SHARE: Final = 0.8
_SHARES: Final = (0.1, 0.5, LONGEST_SHARE, 0.9)
#: Prompts that are remembered, with some 300 bytes each, and epochs of a prompt; the share of the variance of levels
#: that lasts until pairs of epochs tell, its weight in pairs, and the most that lasts.
_PROMPTS, _EPOCHS = 65_536, 3
_LASTING, _PRIOR_PAIRS, _MOST_LASTING = 0.5, 16.0, 0.98
_PAIRS: Final = 4_096.0  # all weights are halved then

_LEAST: Final = 1e-12  # of a probability
_SCORES: Final[Floats] = np.linspace(-7.0, 7.0, 2_801)
_BEYOND: Final[Floats] = np.array([0.5 * erfc(one / sqrt(2.0)) for one in _SCORES])


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


class LengthQuantiles(NamedTuple):
    """Tokens that a sample has still to come: the mean, and quantiles. They are at least 1 below the cap."""

    expected: float
    tenth: float
    half: float
    longest: float  # not exceeded with probability `LONGEST_SHARE`
    ninth: float  # nine in ten samples make no more


class LengthCurve:
    """The shares of a run's responses that are longer than each of `EDGES`, whatever their groups."""

    def __init__(self, shares: Floats) -> None:
        self.shares: Floats = np.maximum(shares, _LEAST)
        between = np.diff(EDGES) * 0.5 * (self.shares[1:] + self.shares[:-1])
        beyond = np.cumsum([EDGES[-1] * self.shares[-1], *between[::-1]])[::-1]
        self._rests = beyond / self.shares

    def rest(self, made: float, budget: int | None = None) -> float:
        """Expected tokens still to come of a response that has `made`; at most `budget`."""
        found = float(np.interp(made, EDGES, self._rests))
        return found if budget is None else min(found, float(budget))

    def outlasting(self, made: Sequence[float]) -> list[float]:
        """The shares of responses that are longer than each of these."""
        found: list[float] = np.interp(np.log(np.maximum(made, 1.0)), np.log(EDGES), self.shares).tolist()
        return found

    def survival(self) -> tuple[Floats, Floats]:
        """Rising lengths in tokens, and the share of responses that are at least as long as each."""
        return EDGES, self.shares


class LengthModel:
    """Shares by level. `longer`: of samples beyond each of `EDGES`; `within`: that end between two of them."""

    def __init__(self, shares: Floats, correlation: float) -> None:
        self.curve, self.intraclass_correlation = LengthCurve(shares), correlation
        scores = np.interp(-shares, -_BEYOND, _SCORES)
        own = (scores - sqrt(correlation) * _LEVELS[:, None]) / sqrt(1.0 - correlation)
        self.longer = np.maximum((1.0 - _STRAY) * _beyond(own) + _STRAY * _beyond(scores), _LEAST)
        self.within = np.maximum(self.longer[:, :-1] - self.longer[:, 1:], _LEAST)
        self._log_longer, self._log_within = np.log(self.longer[:, :-1]), np.log(self.within)

    def likelihoods(self, ended: Floats, open_: Floats) -> Floats:
        """Logarithms of how likely levels make samples: a row for each group. `ended`: of each group, how many ended in
        each bin; `open_`: how many made so much, at least.
        """
        found: Floats = ended @ self._log_within.T + open_ @ self._log_longer.T
        return found


class GroupForecast:
    """Of one group. A sample is asked about by the tokens that it has made: those of the open group that was asked
    about, or 0.
    """

    def __init__(self, model: LengthModel, weights: Floats, cap: int) -> None:
        self._model, self._weights, self._cap = model, weights, float(cap)

    def length(self, made: int, share: float) -> float:
        """The whole length, in tokens, that the sample does not exceed with probability `share` (0 to 1, both
        excluded). It is at least one more than `made`, and at most the cap.
        """
        at = np.array([float(made)])
        return float(self._bounded(at, _quantiles(self._chances(at), at, share))[0])

    def rest(self, made: int) -> float:
        """The mean of the tokens to come, at least 1 below the cap."""
        return self.quantiles(made).expected

    def quantiles(self, made: int) -> LengthQuantiles:
        return self.quantiles_of([made])[0]

    def quantiles_of(self, made: Sequence[int]) -> list[LengthQuantiles]:
        """Mean and quantiles of the tokens to come, of each of some samples."""
        at = np.array(made, dtype=float)
        chances = self._chances(at)
        lengths = (at + _means(chances, at, self._cap), *(_quantiles(chances, at, share) for share in _SHARES))
        rests = (self._bounded(at, one) - at for one in lengths)
        return [LengthQuantiles(*one) for one in zip(*(one.tolist() for one in rests), strict=True)]

    def _chances(self, made: Floats) -> Floats:
        longer = self._model.longer
        known = np.where(made > 0.0, longer[:, _bins(made)], 1.0)
        return _from_now((self._weights[:, None] / known).T @ longer, made)

    def _bounded(self, made: Floats, tokens: Floats) -> Floats:
        found: Floats = np.maximum(np.minimum(np.maximum(tokens, made + 1.0), self._cap), made)
        return found


class LengthLearner:
    def __init__(self) -> None:
        self._model = LengthModel(_ASSUMED, _CORRELATION)
        self._kept: Sequence[EndedGroup] = ()
        self._history = _PromptHistory()
        self.known = False  # a response that ended has taught something

    @property
    def intraclass_correlation(self) -> float:
        """The share of the scores' variance that the samples of a group have in common."""
        return self._model.intraclass_correlation

    @property
    def curve(self) -> LengthCurve:
        """The lengths of the run, whatever their groups."""
        return self._model.curve

    def groups_ended(self, groups: Iterable[EndedGroup]) -> None:
        """Learn from whole groups: best from all of a step together, in the order in which they ended, since the first
        ones to end are short. For 512 groups of 16 it takes some 35 ms of a core, for
        8,192 some 170.
        """
        every = tuple(groups)
        # The long ones of a step end last, so any part of it is taken evenly from all of it.
        new = evenly(every, _MEMORY)
        self._kept = (*new, *evenly(self._kept, _MEMORY - len(new)))
        ended = _counts([one.lengths for one in self._kept])
        if not ended.any():
            return
        stopped = _counts([one.stopped for one in self._kept])
        start = self._model if self.known else LengthModel(_ASSUMED, _CORRELATION)
        shares = _fitted(start, ended, stopped, _ROUNDS if self.known else _FIRST_ROUNDS)
        self._model, self.known = LengthModel(shares, _likeliest_correlation(shares, ended, stopped)), True
        named = [one for one in every if one.prompt]
        told = self._model.likelihoods(_counts([one.lengths for one in named]), _counts([one.stopped for one in named]))
        for group, found in zip(named, told, strict=True):
            self._history.ended(group.prompt, found)

    def groups_open(self, groups: Iterable[UnfinishedGroup]) -> None:
        """Take what is open for the lengths of the run. Does nothing once whole groups have taught some."""
        some = tuple(groups)
        if not self.known and some:
            ended, open_ = _counts([one.finished for one in some]), _counts([(*one.stopped, *one.made) for one in some])
            start = LengthModel(_ASSUMED, _CORRELATION)
            self._model = LengthModel(_fitted(start, ended, open_, _FIRST_ROUNDS), _CORRELATION)

    def forecast(self, group: UnfinishedGroup) -> GroupForecast:
        """What to expect of a group's samples."""
        ended, open_ = _counts([group.finished]), _counts([(*group.stopped, *group.made)])
        told = self._model.likelihoods(ended, open_)[0]
        return GroupForecast(self._model, _normed(self._history.weights(group.prompt) + told), group.cap)

    def kind(self, prompt: str) -> tuple[float, float]:
        """What is expected of a group before any of its samples, roughly: equal ones have equal forecasts."""
        mean, variance = self._history.prior(prompt)
        return round(mean, 1), round(variance, 1)


class _PromptHistory:
    """What is known of the levels of prompts that came before: a part of each lasts over epochs, and one is new.

    Invariant: `_known` has the prompts that came last, each with the levels of its newest epochs, and the variances of
    these estimates.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[float, float], ...]] = {}
        self._products, self._pairs = _PRIOR_PAIRS * _LASTING, _PRIOR_PAIRS  # of levels of a prompt in two epochs

    def prior(self, prompt: str) -> tuple[float, float]:
        """Mean and variance of a group's level. "": no known prompt."""
        lasting = min(max(self._products / self._pairs, 0.0), _MOST_LASTING)
        if not (epochs := self._known.get(prompt)) or not lasting:
            return 0.0, 1.0
        new = 1.0 - lasting
        precision = 1.0 / lasting + sum(1.0 / (new + noise) for _, noise in epochs)
        return sum(level / (new + noise) for level, noise in epochs) / precision, 1.0 / precision + new

    def weights(self, prompt: str) -> Floats:
        """Logarithms of the levels' weights, but for a constant."""
        mean, variance = self.prior(prompt)
        found: Floats = -0.5 * (_LEVELS - mean) ** 2 / variance
        return found

    def ended(self, prompt: str, likelihoods: Floats) -> None:
        """Note a group that ended. `likelihoods`: see `LengthModel`."""
        weights = _normed(_NORMAL + likelihoods)
        mean = float(weights @ _LEVELS)
        precision = 1.0 / max(float(weights @ (_LEVELS - mean) ** 2), 1e-3)
        if precision <= 1.0:
            return  # its samples tell nothing
        told = precision - 1.0  # without what was assumed of it
        level, epochs = mean * precision / told, self._known.pop(prompt, ())
        if epochs:
            self._products, self._pairs = self._products + level * epochs[-1][0], self._pairs + 1.0
            if self._pairs > _PAIRS:
                self._products, self._pairs = 0.5 * self._products, 0.5 * self._pairs
        # The last one in the order of the dictionary.
        self._known[prompt] = (*epochs, (level, 1.0 / told))[-_EPOCHS:]
        if len(self._known) > _PROMPTS:
            del self._known[next(iter(self._known))]


def evenly(items: Sequence[T], most: int) -> Sequence[T]:
    """So many items at most, from all parts of the sequence alike."""
    count = len(items)
    return items if count <= most else [items[at * count // most] for at in range(most)]


def surely(made: int) -> int:
    """Tokens that were made at least, in steps that forecasts tell apart."""
    return int(EDGES[int(log(made) * _PER_BIN)]) if made > 1 else made


_PER_BIN: Final = 1.0 / log(1.1)


def _fitted(model: LengthModel, ended: Floats, stopped: Floats, rounds: int) -> Floats:
    """The shares that make lengths most likely, from those of a model on."""
    shares: Floats = model.curve.shares
    for _ in range(rounds):
        weights = _normed(_NORMAL + model.likelihoods(ended, stopped))
        beyond = weights.T @ stopped / model.longer[:, :-1]
        likely = ended.sum(axis=0) + (model.within * np.cumsum(beyond, axis=1)).sum(axis=0)
        longer = np.append(np.cumsum(likely[::-1])[::-1], 0.0) + _PRIOR * _ASSUMED
        shares = longer / longer[0]
        model = LengthModel(shares, model.intraclass_correlation)
    return shares


def _likeliest_correlation(shares: Floats, ended: Floats, stopped: Floats) -> float:
    """The likeliest intraclass correlation of groups: between what was tried, by a parabola. What is assumed has its
    mode at one half, and weighs as two samples.
    """
    several = evenly(np.flatnonzero((ended + stopped).sum(axis=1) > 1.0).tolist(), _COMPARED)
    ended, stopped = ended[several], stopped[several]
    found = []
    for correlation in 1.0 / (1.0 + np.exp(-_TRIED)):
        told = _NORMAL + LengthModel(shares, correlation).likelihoods(ended, stopped)
        most = told.max(axis=1, initial=-np.inf)
        found.append(
            np.sum(most + np.log(np.exp(told - most[:, None]).sum(axis=1))) + log(correlation * (1.0 - correlation))
        )
    at = min(max(int(np.argmax(found)), 1), len(found) - 2)
    before, here, after = found[at - 1 : at + 2]
    bend = before - 2.0 * here + after
    beside = 0.5 * (before - after) / bend if bend < 0.0 else 0.0  # the parabola's mode, in steps
    logit = _TRIED[at] + (_TRIED[1] - _TRIED[0]) * min(max(beside, -1.0), 1.0)
    return float(1.0 / (1.0 + np.exp(-logit)))


def _counts(groups: Sequence[Sequence[int]]) -> Floats:
    """How many lengths of each group are in each bin. Nothing made tells nothing."""
    rows = np.repeat(np.arange(len(groups)), [len(one) for one in groups])
    lengths = np.array([one for group in groups for one in group], dtype=float)
    some = lengths > 0.0
    found = np.bincount(rows[some] * _BINS + _bins(lengths[some]), minlength=len(groups) * _BINS)
    return found.reshape(-1, _BINS).astype(float)


def _bins(tokens: Floats) -> Places:
    found: Places = np.minimum(np.searchsorted(EDGES, np.maximum(tokens, 1.0), side="right") - 1, _BINS - 1)
    return found


def _beyond(scores: Floats) -> Floats:
    found: Floats = np.interp(scores, _SCORES, _BEYOND)
    return found


def _normed(logs: Floats) -> Floats:
    """Weights that sum up to 1 over levels."""
    weights: Floats = np.exp(logs - logs.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def _from_now(tails: Floats, made: Floats) -> Floats:
    """The chance that a sample becomes longer than each of `EDGES`, a row for each. `tails`: the same, not yet divided
    by that of being as long as it is.
    """
    at, rows = _bins(made), np.arange(len(made))
    part = np.minimum(np.log(np.maximum(made, 1.0) / EDGES[at]) * _PER_BIN, 1.0)
    now = tails[rows, at] + part * (tails[rows, at + 1] - tails[rows, at])
    found: Floats = np.minimum(tails / now[:, None], 1.0)
    return found


def _means(chances: Floats, made: Floats, cap: float) -> Floats:
    """Mean tokens to come."""
    tokens = np.minimum(np.maximum(EDGES, made[:, None]), max(cap, 1.0))
    between = (np.diff(tokens) * 0.5 * (chances[:, :-1] + chances[:, 1:])).sum(axis=1)
    found: Floats = between + np.maximum(1.0 - made, 0.0)
    return found


def _quantiles(chances: Floats, made: Floats, share: float) -> Floats:
    """Whole lengths that are not exceeded with a probability."""
    rows = np.arange(len(made))
    end = np.minimum(np.maximum((chances > 1.0 - share).sum(axis=1), 1), _BINS)
    before, after = chances[rows, end - 1], chances[rows, end]
    part = np.minimum((before - (1.0 - share)) / np.maximum(before - after, _LEAST), 1.0)
    begin = np.maximum(EDGES[end - 1], made)
    found: Floats = begin * (np.maximum(EDGES[end], begin) / begin) ** part
    return found
