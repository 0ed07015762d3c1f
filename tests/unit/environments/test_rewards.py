"""Ready rewards, and what a function of a user may return."""

import time
from typing import Any

import numpy as np
import pytest

from ebbtide.environments import MAX_INFO_BYTES, StepResult, checked_result
from ebbtide.environments.rewards import checked_reward, load_reward

EXACT = {"ignore_case": True}


@pytest.mark.parametrize(
    ("reward", "params", "response", "answer", "wanted"),
    [
        ("exact", {}, " cat\n", "cat", 1.0),
        ("exact", {}, "Cat", "cat", 0.0),
        ("exact", EXACT, "Cat", "cat", 1.0),
        ("exact", {}, "b", ["a", "b"], 1.0),
        ("exact", {}, "3", 3, 1.0),
        ("number", {}, "So 5 + 1,067 = 1,072.", "Long. #### 1072", 1.0),
        ("number", {}, "about -3.50", -3.5, 1.0),
        ("number", {}, "1, 2, 3", "3", 1.0),
        ("number", {}, "no idea", "3", 0.0),
        ("number", {}, "3.14", "3.1416", 0.0),
        ("number", {"tolerance": 0.001}, "3.14", "3.1416", 1.0),
        ("number", {}, "9" * 5000, "3", 0.0),
        ("number", {}, "1,234,5", "5", 1.0),
        ("regex", {"pattern": "<answer>(.*?)</answer>"}, "<answer>1</answer><answer> 7 </answer>", "7", 1.0),
        ("regex", {"pattern": "<answer>(.*?)</answer>"}, "7", "7", 0.0),
        ("regex", {"pattern": r"\d{3}"}, "abc 123", None, 1.0),
        ("regex", {"pattern": r"\d{3}"}, "abc", None, 0.0),
    ],
)
def test_ready_rewards(reward: str, params: dict[str, Any], response: str, answer: Any, wanted: float) -> None:
    assert load_reward(reward, params)(response, answer, {}) == wanted


def test_the_time_of_finding_a_number_grows_with_the_response_and_not_with_its_square() -> None:
    function, response = load_reward("number", {}), "1" + ",111" * 40_000 + ","
    begun = time.process_time()
    assert function(response, "111", {}) == 1.0
    assert time.process_time() - begun < 1.0  # minutes, if each comma begins a search to the end


def test_an_answer_without_a_number_is_an_error_and_no_reward_of_zero() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        load_reward("number", {})("3", "three", {})


def test_a_function_of_a_user_gets_response_answer_row_and_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    module = ModuleType("their_rewards")
    module.score = lambda response, answer, row, scale: len(response) * scale + row["n"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_rewards", module)
    assert load_reward("their_rewards:score", {"scale": 2})("abc", "x", {"n": 1}) == 7


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.int64(2)])
def test_a_number_of_any_kind_is_a_reward(value: Any) -> None:
    assert checked_reward(value) == (float(value), {})


def test_a_mapping_brings_numbers_to_log() -> None:
    assert checked_reward({"reward": 0.5, "right": 2, "asked": 4}) == (0.5, {"right": 2.0, "asked": 4.0})


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "1.0", b"1", None, [1.0], {"score": 1.0}, {"reward": "1"}]
)
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        checked_reward(value)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (StepResult(reward=-1e16), "largest that can be learned"),
        (StepResult(reward=1.0, info={"x" * MAX_INFO_BYTES: 1.0}), "bytes of numbers to log"),
        (StepResult(reward=1.0, info={str(number): 1.0 for number in range(4000)}), "bytes of numbers to log"),
        (StepResult(reward=1.0, info={"x": float("nan")}), "not finite"),
    ],
)
def test_what_would_harm_more_than_its_episode_is_refused(result: StepResult, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        checked_result(result)
    assert checked_result(StepResult(reward=1e15, info={"x": 1.0})).info == {"x": 1.0}
