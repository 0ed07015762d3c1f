"""Plays rules of rounds on a toy model of lengths, and keeps what each of them trains on.

In the model a token takes one unit of time and no slot is short. It is fitted to the lengths of RollPacker's figure:
median about 660 tokens, 95th percentile about 4,200.

All of them train on `PROMPTS` prompts with `GROUP` samples in each step, and start a quarter more of what they race
over, as RollPacker does.
"""

from collections import deque
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from math import sqrt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ebbtide.driver.group_rounds import GroupRounds

Floats = NDArray[np.float64]

#: Log-length is normal, and has a heavier tail from this score on.
_LOG_MEDIAN, _LOG_SPREAD, _TAIL_SLOPE, _TAIL_FROM = 6.49, 0.78, 0.95, 1.05
_SHORTEST, _CAP = 5.0, 16_384.0
#: Scores over which the mean is computed: more change it by less than one in a million.
_GRID: Final = 200_001
PROMPTS, GROUP, EXCESS = 128, 8, 1.25
_STARTED: Final = int(PROMPTS * EXCESS)
_SAMPLES: Final = int(GROUP * EXCESS)
#: Steps by which a prompt may be late: as in RollPacker's period of four short rounds and a long one.
MAX_AGE: Final = 4
#: Share of a short round's prompts whose samples are all awaited, by the rule of unbiased slots.
_UNBIASED: Final = 0.25
NOTHING: Final = np.zeros(0)


class Responses(NamedTuple):
    """Arrays of shape (prompts, samples). `own`: the part of the score that is the response's own, of unit variance."""

    lengths: Floats
    scores: Floats
    own: Floats


def drawn(draw: np.random.Generator, prompts: int, samples: int, shared: float) -> Responses:
    """`shared`: share of the scores' variance that is the prompt's."""
    return of_prompts(draw, draw.standard_normal(prompts), samples, shared)


def of_prompts(draw: np.random.Generator, prompts: Floats, samples: int, shared: float) -> Responses:
    """Responses to prompts whose own scores are given, shape (prompts,)."""
    own = draw.standard_normal((len(prompts), samples))
    scores = sqrt(shared) * prompts[:, None] + sqrt(1.0 - shared) * own
    return Responses(tokens(scores), scores, own)


def tokens(scores: Floats) -> Floats:
    tail = np.where(scores > _TAIL_FROM, np.exp(_TAIL_SLOPE * (scores - _TAIL_FROM)), 1.0)
    lengths: Floats = np.clip(np.exp(_LOG_MEDIAN + _LOG_SPREAD * scores) * tail, _SHORTEST, _CAP)
    return lengths


@cache
def mean_tokens() -> float:
    """The true mean length, by the trapezoid rule."""
    scores = np.linspace(-8.0, 8.0, _GRID)
    weights = np.exp(-0.5 * scores**2)
    return float(np.sum(tokens(scores) * weights) / np.sum(weights))


class Trained(NamedTuple):
    """One step. Arrays have the shape (prompts, samples)."""

    lengths: Floats
    scores: Floats
    own: Floats
    duration: float  # in tokens of one slot
    made: float  # tokens, also those that are thrown away
    ended: Floats = NOTHING  # lengths of all responses of a race over fresh prompts that ended, trained or not
    aborted: Floats = NOTHING  # tokens of the others


Rule = Callable[[np.random.Generator, float, int], list[Trained]]


def no_rounds(draw: np.random.Generator, shared: float, steps: int) -> list[Trained]:
    """Each step waits for all samples of its prompts."""
    return [_whole_round(drawn(draw, PROMPTS, GROUP, shared)) for _ in range(steps)]


def race(draw: np.random.Generator, shared: float, steps: int) -> list[Trained]:
    """RollPacker's rule: short rounds race over prompts and samples, and drop what they abort."""
    return _raced(draw, shared, steps, _SAMPLES, 0.0)


def unbiased_slots(draw: np.random.Generator, shared: float, steps: int) -> list[Trained]:
    """The race, but a quarter of the prompts, chosen before, keeps its first `GROUP` samples however long they are."""
    return _raced(draw, shared, steps, _SAMPLES, _UNBIASED)


def whole_anew(draw: np.random.Generator, shared: float, steps: int) -> list[Trained]:
    """A race over prompts alone; those that are deferred begin again from nothing in long rounds."""
    return _raced(draw, shared, steps, GROUP, 0.0)


def routed(draw: np.random.Generator, shared: float, steps: int) -> list[Trained]:
    """No race: of each short round's prompts those with the longest expected responses go to a long round at once. The
    prompt's own part of the length is taken for known, which no forecast can better.
    """
    queue, made = deque[float](), list[Trained]()
    while len(made) < steps:
        if len(queue) >= PROMPTS:
            prompts = np.array([queue.popleft() for _ in range(PROMPTS)])
        else:
            prompts = np.sort(draw.standard_normal(_STARTED))
            queue.extend(prompts[PROMPTS:].tolist())
            prompts = prompts[:PROMPTS]
        made.append(_whole_round(of_prompts(draw, prompts, GROUP, shared)))
    return made


def whole_groups(draw: np.random.Generator, shared: float, steps: int) -> list[Trained]:
    """Ebbtide's rule, `GroupRounds`: a race over prompts alone; the others go on behind the step."""
    rounds = GroupRounds(groups_per_step=PROMPTS, steps=steps, max_age=MAX_AGE, excess=EXCESS)
    all_of_them = drawn(draw, PROMPTS * steps, GROUP, shared)
    longest = all_of_them.lengths.max(axis=1)
    ends, now, made = list[tuple[float, int]](), 0.0, list[Trained]()
    for step in range(steps):
        begun = now
        for group in rounds.open(step):
            heappush(ends, (now + float(longest[group]), group))
        taken = list(rounds.take())
        while not rounds.complete:
            now, group = heappop(ends)
            rounds.whole(group)
            taken += rounds.take()
        made.append(_trained(all_of_them, np.array(taken), now - begun))
    return made


def _raced(draw: np.random.Generator, shared: float, steps: int, samples: int, unbiased: float) -> list[Trained]:
    queue, made = deque[float](), list[Trained]()
    while len(made) < steps:
        if len(queue) >= PROMPTS:
            prompts = np.array([queue.popleft() for _ in range(PROMPTS)])
            made.append(_whole_round(of_prompts(draw, prompts, GROUP, shared)))
            continue
        prompts = draw.standard_normal(_STARTED)
        responses = of_prompts(draw, prompts, samples, shared)
        awaited = np.arange(_STARTED) < round(unbiased * PROMPTS)
        done = np.where(
            awaited, responses.lengths[:, :GROUP].max(axis=1), np.sort(responses.lengths, axis=1)[:, GROUP - 1]
        )
        order = np.lexsort((done, ~awaited))[:PROMPTS]  # awaited prompts are not deferred
        duration = float(done[order].max())
        queue.extend(np.delete(prompts, order).tolist())
        kept = np.argsort(responses.lengths, axis=1)[:, :GROUP]
        kept[awaited] = np.arange(GROUP)
        picked = Responses(*(np.take_along_axis(part, kept, axis=1) for part in responses))
        until = np.full(_STARTED, duration)
        until[order] = done[order]
        seen = np.minimum(responses.lengths, until[:, None])
        whole = responses.lengths <= until[:, None]
        if unbiased:  # responses that were never started
            seen[awaited, GROUP:] = 0.0
            whole[awaited, GROUP:] = False
        step = _trained(picked, order, duration)
        made.append(step._replace(made=float(seen.sum()), ended=seen[whole], aborted=seen[~whole]))
    return made


def _whole_round(responses: Responses) -> Trained:
    return _trained(responses, np.arange(len(responses.lengths)), float(responses.lengths.max()))


def _trained(responses: Responses, groups: "np.ndarray[tuple[int], np.dtype[np.int64]]", duration: float) -> Trained:
    lengths = responses.lengths[groups]
    return Trained(lengths, responses.scores[groups], responses.own[groups], duration, float(lengths.sum()))
