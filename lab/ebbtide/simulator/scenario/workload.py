"""Draws the work of a scenario's runs: prompts, turns, responses and waits, by their distributions.

Whatever the order in which samples are asked for, and whoever asks, they are the same. So two policies get the same
work.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate
from math import exp, gcd, inf, sqrt
from random import Random
from statistics import NormalDist
from typing import Final, TypeAlias

from msgspec import Struct

from ebbtide.simulator.scenario.input_tables import KnownTurns, QuantileTable
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun

#: Value of a standard normal `u`: it rises with `u`.
Curve: TypeAlias = Callable[[float], float]
_NORMAL: Final = NormalDist()
#: Shares at whose middles a mean is computed: with 4,096 of them the tail's share beyond the last is 1e-4.
_GRID: Final = 4096
#: A scale is found between these factors of the median.
_SCALES: Final = (1e-6, 1e6)
#: Of a log-normal whose spread nobody stated: that of RollPacker's responses without their tail.
_SIGMA: Final = 0.78


def curve(spec: QuantitySpec, tables: Mapping[str, QuantileTable], most: float | None = None) -> Curve:
    """Make the function. Values lie between `spec.least` and the lesser of `spec.most` and `most`."""
    cap = min(limit for limit in (spec.most, most, inf) if limit is not None)
    shape = _shape(spec, tables, cap)
    if isinstance(spec, LengthSpec) and spec.endless:
        shape = _with_endless(shape, spec.endless)
    scale = spec.stretch if spec.mean is None else _scale_of_mean(shape, spec.mean, spec.least, cap)
    least = spec.least

    def value(u: float) -> float:
        return min(cap, max(least, scale * shape(u)))

    return value


def mean_of(quantity: Curve) -> float:
    """The mean over a grid of shares."""
    return sum(quantity(u) for u in _GRID_NORMALS) / _GRID


_GRID_NORMALS: Final = tuple(_NORMAL.inv_cdf((index + 0.5) / _GRID) for index in range(_GRID))


def _shape(spec: QuantitySpec, tables: Mapping[str, QuantileTable], cap: float) -> Curve:
    if spec.value is not None:
        constant = spec.value
        return lambda _: constant
    if spec.file is not None:
        table, ends = tables[spec.file], None if cap == inf else cap / spec.stretch
        return lambda u: table.at(_NORMAL.cdf(u), ends)
    if spec.low is not None and spec.high is not None:
        low, width = spec.low, spec.high - spec.low
        return lambda u: low + width * _NORMAL.cdf(u)
    return _log_normal(spec)


def _with_endless(shape: Curve, share: float) -> Curve:
    """The greatest values are without end."""
    first = _NORMAL.inv_cdf(1.0 - share)
    return lambda u: shape(u) if u < first else inf


def _log_normal(spec: QuantitySpec) -> Curve:
    median, sigma = spec.median or 1.0, _SIGMA if spec.sigma is None else spec.sigma
    tail_sigma, tail_from = spec.tail_sigma, spec.tail_from
    return lambda u: median * exp(sigma * u + tail_sigma * max(0.0, u - tail_from))


def _scale_of_mean(shape: Curve, mean: float, least: float, cap: float) -> float:
    """Find the factor under which the values' mean between `least` and `cap` is `mean`, by bisection."""
    values = [shape(u) for u in _GRID_NORMALS]  # they rise with `u`
    sums = [0.0, *accumulate(values)]
    low, high = (factor * mean / max(values[_GRID // 2], 1e-9) for factor in _SCALES)
    while high / low > 1.0 + 1e-6:
        factor = sqrt(low * high)
        short, long = bisect_left(values, least / factor), bisect_left(values, cap / factor)
        found = short * least + factor * (sums[long] - sums[short]) + (_GRID - long) * min(cap, 1e300)
        low, high = (factor, high) if found < mean * _GRID else (low, factor)
    return sqrt(low * high)


class Turn(Struct, frozen=True, gc=False):
    """One request to an engine. Lengths in tokens."""

    prompt: int  # the whole context: the first prompt, earlier responses, and what the environment added
    response: int
    wait_s: float  # after the response: until the next turn, or until the reward of the last one


class Workload:
    """The work of all runs of a scenario."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        tables, known = scenario.tables.quantiles, scenario.tables.known
        self._runs: dict[str, RunWork | KnownWork] = {
            run.name: KnownWork(run, known[run.name]) if run.name in known else RunWork(run, tables, seed)
            for run in scenario.run
        }

    def turns(self, run: str, step: int, prompt: int, sample: int) -> tuple[Turn, ...]:
        """Return the turns of a sample. `prompt` counts within the step, `sample` within the group, all from 0."""
        return self._runs[run].turns(step, prompt, sample)

    def prompt_id(self, run: str, step: int, prompt: int) -> int:
        """Which prompt of the data set that is: equal ids are the same prompt in different epochs."""
        return self._runs[run].identity(step, prompt)[1]


class RunWork:
    """The work of one run."""

    def __init__(self, run: TrainingRun, tables: dict[str, QuantileTable], seed: int) -> None:
        self._run, self._seed = run, seed
        around = run.environment
        self._length = curve(run.lengths, tables, run.cap)
        self._prompt = curve(run.prompt_tokens, tables, run.context - 1)
        self._number = curve(around.turns, tables, 1000.0)
        self._added, self._wait, self._reward = (
            curve(spec, tables) for spec in (around.adds_tokens, around.wait_s, around.reward_s)
        )
        self._alone = around.turns.value == 1 and around.reward_s.value == 0
        self.normal = lru_cache(maxsize=4096)(self._normal)
        self._order = lru_cache(maxsize=16)(self._permutation)

    def identity(self, step: int, prompt: int) -> tuple[int, int]:
        """Epoch and number of a prompt in the data set. Each epoch has an order of its own."""
        index = step * self._run.prompts + prompt
        if not (size := self._run.dataset):
            return 0, index
        epoch, place = divmod(index, size)
        factor, offset = self._order(epoch)
        return epoch, (place * factor + offset) % size

    def turns(self, step: int, prompt: int, sample: int) -> tuple[Turn, ...]:
        epoch, number = self.identity(step, prompt)
        opening, z = self.normal(epoch, number)
        name = f"{self._run.name} {step} {prompt} {sample}"
        draw = Random(f"{self._seed} lengths {name}")
        if self._alone:
            return (Turn(opening, min(self._response(draw, z), self._run.context - opening), 0.0),)
        return tuple(self._episode(draw, z, opening, Random(f"{self._seed} environment {name}")))

    def _episode(self, draw: Random, z: float, opening: int, around: Random) -> list[Turn]:
        """Draw turns until their number is reached, or the context is full."""
        number = max(1, round(self._number(around.gauss())))
        context, turns = opening, list[Turn]()
        while True:
            response = min(self._response(draw, z), self._run.context - context)
            added, wait_s = round(self._added(around.gauss())), self._wait(around.gauss())
            following = context + response + added
            last = len(turns) + 1 >= number or following >= self._run.context
            turns.append(Turn(context, response, self._reward(around.gauss()) if last else wait_s))
            if last:
                return turns
            context = following

    def _response(self, draw: Random, z: float) -> int:
        share = self._run.lengths.correlation
        return max(1, round(self._length(sqrt(share) * z + sqrt(1.0 - share) * draw.gauss())))

    def _normal(self, epoch: int, number: int) -> tuple[int, float]:
        """The prompt's tokens, and its part of the standard normal in an epoch."""
        draw = Random(f"{self._seed} prompt {self._run.name} {number}")
        tokens, lasting = max(1, round(self._prompt(draw.gauss()))), draw.gauss()
        if not self._run.dataset:
            return tokens, lasting
        fresh = Random(f"{self._seed} epoch {self._run.name} {number} {epoch}").gauss()
        repeats = self._run.lengths.repeats
        return tokens, sqrt(repeats) * lasting + sqrt(1.0 - repeats) * fresh

    def _permutation(self, epoch: int) -> tuple[int, int]:
        """A factor without a common divisor with the data set's size, and an offset: an affine order of its prompts."""
        size, draw = self._run.dataset, Random(f"{self._seed} order {self._run.name} {epoch}")
        factor = draw.randrange(1, size + 1)
        while gcd(factor, size) != 1:
            factor = draw.randrange(1, size + 1)
        return factor, draw.randrange(size)


class KnownWork:
    """The work of a recorded run, whatever the seed.

    After the last recorded step the first one comes again. A step that had fewer groups than the run asks for repeats
    its first groups, and a group its first samples.
    """

    def __init__(self, run: TrainingRun, known: KnownTurns) -> None:
        self._run, self._steps = run, known.steps

    def identity(self, step: int, prompt: int) -> tuple[int, int]:
        """Epoch and number of a prompt: no prompt comes twice."""
        return 0, step * self._run.prompts + prompt

    def turns(self, step: int, prompt: int, sample: int) -> tuple[Turn, ...]:
        groups = self._steps[step % len(self._steps)]
        if all(len(group) == 1 for group in groups):  # the record knows no groups, or each has one sample
            samples = groups[(prompt * self._run.group + sample) % len(groups)]
        else:
            samples = groups[prompt % len(groups)]
        return tuple(Turn(*turn) for turn in samples[sample % len(samples)])
