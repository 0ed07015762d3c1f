"""The expected end of a step: what is known exactly, and what draws show."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from ebbtide.coordinator.dispatch.step_finish import EngineTerms, StepFinish
from ebbtide.coordinator.forecasts.length_learner import LengthCurve, LengthLearner
from tests.unit.coordinator.forecasts.drawn_lengths import known_lengths

RATE, PLATEAU = 30.0, 32


class Open(NamedTuple):
    made: int
    budget: int


def engine(rollouts: Sequence[Open], *, busy_s: float = 0.0, rate: float = RATE) -> EngineTerms:
    loads = np.array([1.0, PLATEAU, 10.0 * PLATEAU])
    token_s = np.maximum(1.0, loads / PLATEAU) / rate
    return EngineTerms(rollouts=rollouts, loads=loads, token_s=token_s, busy_s=busy_s)


def capped(tokens: int) -> LengthCurve:
    """All responses come to this length."""
    return known_lengths([tokens] * 20_000)


def drawn(mean: float, count: int = 20_000) -> tuple[LengthCurve, list[int]]:
    draw = random.Random(1)
    lengths = [max(1, round(draw.expovariate(1.0 / mean))) for _ in range(count)]
    return known_lengths(lengths), lengths


def test_responses_of_one_length_end_when_their_engine_has_made_them() -> None:
    step = StepFinish({"a": engine([Open(0, 8_000)] * 48), "b": engine([Open(0, 8_000)] * 16)}, capped(8_000))
    assert step.ends_s("a", 7_000) == pytest.approx(7_000 * 48 / (RATE * PLATEAU), rel=0.02)
    assert step.ends_s("b", 7_000) == pytest.approx(7_000 / RATE, rel=0.02)
    assert step.end_s == pytest.approx(8_000 * 48 / (RATE * PLATEAU), rel=0.15)


@pytest.mark.parametrize("count", [5, 20, 60, 120])
def test_the_expected_end_is_that_of_many_draws(count: int) -> None:
    """Processor sharing of exponential lengths, against a plain simulation of it."""
    known, lengths = drawn(2_000.0)
    step = StepFinish({"a": engine([Open(0, 1 << 16)] * count)}, known)
    draw, ends = random.Random(2), []
    for _ in range(400):
        left, now, before = sorted(draw.choice(lengths) for _ in range(count)), 0.0, 0
        for place, tokens in enumerate(left):
            now += (tokens - before) * max(1.0, (count - place) / PLATEAU) / RATE
            before = tokens
        ends.append(now)
    assert step.end_s == pytest.approx(sum(ends) / len(ends), rel=0.08)


def test_a_move_from_a_crowded_engine_gains_and_one_below_the_plateau_only_costs() -> None:
    known = capped(8_000)
    crowded = StepFinish({"a": engine([Open(0, 8_000)] * 48), "b": engine([Open(0, 8_000)] * 16)}, known)
    assert crowded.moved("a", "b", 0, read_s=0.5).gain_s > 3.0
    easy = StepFinish({"a": engine([Open(0, 8_000)] * 30), "b": engine([Open(0, 8_000)] * 10)}, known)
    assert easy.moved("a", "b", 0, read_s=0.5).gain_s < 0.0


def test_a_step_that_another_rollout_decides_gains_nothing() -> None:
    engines = {
        "a": engine([Open(0, 500)] * 48),
        "b": engine([Open(0, 500)] * 4),
        "c": engine([Open(0, 60_000)]),
    }
    step = StepFinish(engines, capped(60_000))
    assert abs(step.moved("a", "b", 0, read_s=0.1).gain_s) < 0.01
    assert step.weight("c", 0) > 0.9
    assert step.weight("a", 0) < 0.01


def test_what_an_engine_has_to_read_puts_its_rollouts_off() -> None:
    known = capped(8_000)
    at_once = StepFinish({"a": engine([Open(0, 8_000)] * 8)}, known)
    later = StepFinish({"a": engine([Open(0, 8_000)] * 8, busy_s=40.0)}, known)
    assert later.end_s - at_once.end_s == pytest.approx(40.0, rel=0.1)


def test_moves_that_were_made_count_in_the_next_ones() -> None:
    known, rollouts = capped(8_000), [Open(0, 8_000)] * 48
    step = StepFinish({"a": engine(rollouts), "b": engine([])}, known)
    gains = []
    for _ in range(30):
        gains.append(step.moved("a", "b", 0, read_s=1.0).gain_s)
        before = step.end_s
        step.give("a", "b", 0, read_s=1.0)
        assert before - step.end_s == pytest.approx(gains[-1], abs=1e-6)
    assert gains[0] > 3.0
    assert gains[-1] < 0.0
    assert len(step.rollouts("a")) == 18
    fresh = StepFinish({"a": engine(rollouts[:18]), "b": engine([Open(0, 8_000)] * 30, busy_s=30.0)}, known)
    assert step.end_s == pytest.approx(fresh.end_s, rel=0.02)


def test_an_engine_that_stands_for_others_counts_as_often() -> None:
    known, _ = drawn(2_000.0)
    alone = {f"w{number}": engine([Open(0, 1 << 16)] * 20) for number in range(8)}
    some = StepFinish({"w0": alone["w0"]}, known, weights={"w0": 8.0})
    assert some.end_s == pytest.approx(StepFinish(alone, known).end_s, rel=1e-6)


def test_one_certain_rollout_ends_when_it_has_made_its_tokens() -> None:
    """Of one alone the estimate is too early, so gains are taken for smaller than they are."""
    step = StepFinish({"a": engine([Open(0, 8_000)])}, capped(8_000))
    assert 0.55 < step.end_s / (8_000 / RATE) < 1.0


@pytest.mark.parametrize("odd", ["busy", "slow", "budget"])
def test_an_engine_far_beyond_the_others_hides_no_gain(odd: str) -> None:
    """As one that reads for hours, that is lent for a trifle of the time, or a rollout that may go on for ever."""
    known = capped(8_000)
    engines = {"a": engine([Open(0, 8_000)] * 48), "b": engine([Open(0, 8_000)] * 16)}
    plain = StepFinish(engines, known).moved("a", "b", 0, read_s=0.5).gain_s
    engines["odd"] = {
        "busy": engine([], busy_s=1e5),
        "slow": engine([], rate=0.01),
        "budget": engine([Open(0, 1 << 20)]),
    }[odd]
    assert StepFinish(engines, known).moved("a", "b", 0, read_s=0.5).gain_s == pytest.approx(plain, rel=0.35)


def test_a_step_without_rollouts_has_ended() -> None:
    assert StepFinish({"a": engine([])}, LengthLearner().curve).end_s == 0.0
    assert StepFinish({}, LengthLearner().curve).end_s == 0.0
