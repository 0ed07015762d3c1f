import re
import sys
from types import ModuleType

import pytest

from ebbtide.environments import Message, StepResult, load_source
from ebbtide.environments.problem_splits import split_of
from ebbtide.environments.reasoning_gym import Questions, ReasoningGymSource
from ebbtide.errors import InvalidRequest

WORDS = {
    "dataset": "spell_backward",
    "dataset_params": {"min_word_len": 4, "max_word_len": 5},
    "questions_per_prompt": 3,
    "payload_key": "word",
    "separator": " ",
}


def asked(environment: Questions) -> set[str]:
    return {entry["question"] for entry in environment.entries}


def test_a_question_of_the_eval_split_is_never_asked_in_another_whatever_the_seed() -> None:
    sources = [ReasoningGymSource(WORDS, seed) for seed in (0, 1)]
    seen = {
        split: {question.casefold() for s in sources for i in range(200) for question in asked(s.make(split, i))}
        for split in ("train", "check", "eval")
    }
    assert len(seen["eval"]) > 900
    assert not seen["eval"] & (seen["train"] | seen["check"])
    assert not seen["train"] & seen["check"]


def test_letter_case_and_white_space_do_not_move_a_question_to_another_split() -> None:
    words = [f"word {number}" for number in range(200)]
    assert [split_of(word) for word in words] == [split_of(f"  {word.upper()}\n") for word in words]
    assert {split_of(word) for word in words} == {"train", "check", "eval"}


def test_eval_prompts_share_no_question() -> None:
    source = ReasoningGymSource(WORDS, 5)
    questions = [question for index in range(100) for question in asked(source.make("eval", index))]
    assert len(questions) == len(set(questions)) == 300


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_environment_can_be_rebuilt_in_another_process(split: str) -> None:
    first, second = ReasoningGymSource(WORDS, 3), ReasoningGymSource(WORDS, 3)
    forward = [first.make(split, index).reset() for index in range(8)]  # type: ignore[arg-type]
    backward = [second.make(split, index).reset() for index in reversed(range(8))]  # type: ignore[arg-type]
    assert forward == backward[::-1]
    assert forward != [ReasoningGymSource(WORDS, 4).make(split, index).reset() for index in range(8)]  # type: ignore[arg-type]


def test_the_reward_is_the_share_of_questions_right() -> None:
    source = ReasoningGymSource(WORDS, 0)
    messages, answer = source.example("train", 0)
    payloads = messages[0].content.split(" ")
    assert [word[::-1] for word in answer.split(" ")] == payloads
    environment = source.make("train", 0)
    assert environment.step(answer) == StepResult(reward=1.0, done=True, info={"right": 3.0, "asked": 3.0})
    first, second, third = answer.split(" ")
    assert environment.step(f"{first} {second[::-1]}x {third}").reward == pytest.approx(2 / 3)
    assert environment.step(first).info == {"right": 1.0, "asked": 3.0}
    assert environment.step("").reward == 0.0


def test_an_answer_with_something_added_is_wrong_for_every_word_length() -> None:
    """The verifier of spell_backward scores some of these a hair above 1."""
    for length in range(3, 11):
        params = {"dataset": "spell_backward", "dataset_params": {"min_word_len": length, "max_word_len": length}}
        source = ReasoningGymSource({**params, "payload_key": "word"}, 0)
        _, answer = source.example("train", 0)
        assert source.make("train", 0).step(answer).info["right"] == 1.0
        assert source.make("train", 0).step(answer + "q").info["right"] == 0.0


def test_partial_credit_rewards_the_mean_score_and_still_counts_only_what_is_right() -> None:
    source = ReasoningGymSource({**WORDS, "partial_credit": True}, 0)
    _, answer = source.example("train", 0)
    first, second, third = answer.split(" ")
    result = source.make("train", 0).step(f"{first} {second[:-1]}# {third}")
    assert result.reward is not None
    assert 2 / 3 < result.reward < 1.0
    assert result.info["right"] == 2.0


def test_full_questions_are_answered_in_tags_and_the_last_ones_count() -> None:
    source = ReasoningGymSource({"dataset": "chain_sum", "questions_per_prompt": 2}, 0)
    messages, reference = source.example("eval", 1)
    assert "Question 2:" in messages[0].content
    environment = source.make("eval", 1)
    assert environment.step(f"<answer>7</answer> no, wait.\n{reference}").reward == 1.0
    assert environment.step(reference.replace("answer", "b")).reward == 0.0
    single = ReasoningGymSource({"dataset": "chain_sum"}, 0)
    opening, answer = single.example("train", 0)
    assert opening[0].content.endswith("Give your answer between <answer> and </answer>.")
    assert single.make("train", 0).step(f"I think {answer}").reward == 1.0


@pytest.mark.parametrize(
    ("name", "params", "field"),
    [
        ("nothing", {}, "environment.name"),
        ("no.such.module:factory", {}, "environment.name"),
        ("json:absent", {}, "environment.name"),
        ("reasoning_gym", {}, "environment.params.dataset"),
        ("reasoning_gym", {"dataset": "spell_backwards"}, "environment.params.dataset"),
        ("reasoning_gym", {"dataset": "chain_sum", "colour": 1}, "environment.params.colour"),
        (
            "reasoning_gym",
            {"dataset": "chain_sum", "questions_per_prompt": 0},
            "environment.params.questions_per_prompt",
        ),
        ("reasoning_gym", {"dataset": "chain_sum", "payload_key": "word"}, "environment.params.payload_key"),
        (
            "reasoning_gym",
            {"dataset": "chain_sum", "dataset_params": {"colour": 1}},
            "environment.params.dataset_params",
        ),
        (
            "reasoning_gym",
            {"dataset": "chain_sum", "dataset_params": {"min_terms": 9}},
            "environment.params.dataset_params",
        ),
        ("number_guessing", {"span": 1}, "environment.params.span"),
        ("number_guessing", {"span": 10, "max_low": 2}, "environment.params.max_low"),
    ],
)
def test_what_is_wrong_with_an_environment_is_named(name: str, params: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_source(name, params, 0)
    assert caught.value.field == field
    assert str(caught.value).count(field) == 1
    assert not caught.value.text.startswith(f"{field.rpartition('.')[2]}: ")  # the field once, in full


def test_an_unknown_data_set_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(InvalidRequest, match="did you mean spell_backward"):
        load_source("reasoning_gym", {"dataset": "spell_backwards"}, 0)


def test_a_split_with_too_few_questions_is_refused_and_not_waited_for() -> None:
    source = load_source("reasoning_gym", {"dataset": "coin_flip", "dataset_params": {"size": 20}}, 0)
    with pytest.raises(InvalidRequest, match="distinct eval questions"):
        source.make("eval", 50)


def test_users_bring_environments_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("their_package")
    made = []

    def factory(params: dict[str, int], seed: int) -> str:
        made.append((params, seed))
        return "their source"

    module.factory = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_package", module)
    assert load_source("their_package:factory", {"a": 1}, 7) == "their source"  # type: ignore[comparison-overlap]
    assert made == [({"a": 1}, 7)]


def bounds(opening: Message) -> tuple[int, int]:
    found = re.search(r"from (\d+) to (\d+)\.", opening.content)
    assert found is not None
    return int(found[1]), int(found[2])


def test_guessing_takes_several_turns_and_rewards_the_early_find() -> None:
    source = load_source("number_guessing", {"span": 64, "max_turns": 8}, 1)
    environment = source.make("eval", 3)
    (opening,) = environment.reset()
    low, high = bounds(opening)
    replies: list[str] = []
    result = StepResult()
    while not result.done:
        middle = (low + high) // 2
        result = environment.step(f"{middle}")
        replies += [message.content for message in result.messages]
        low, high = (middle + 1, high) if replies and replies[-1] == "higher" else (low, middle - 1)
    assert set(replies) <= {"higher", "lower"}
    assert result.info["right"] == 1.0
    assert result.info["turns"] == len(replies) + 1
    assert result.reward == pytest.approx(1.0 - len(replies) / 8)
    assert len(replies) >= 2


def test_guessing_ends_without_reward_when_the_turns_are_spent_and_starts_again_at_reset() -> None:
    environment = load_source("number_guessing", {"max_turns": 3}, 1).make("train", 0)
    for _ in range(2):
        low, _high = bounds(environment.reset()[0])
        assert environment.step("no idea").messages == (Message("user", "That is no number."),)
        assert environment.step(f"{low - 1}").messages == (Message("user", "higher"),)
        last = environment.step(f"{low - 1}")
        assert (last.done, last.reward, last.messages) == (True, 0.0, ())


def test_a_game_of_the_eval_split_is_never_played_in_training() -> None:
    games = {}
    for split in ("train", "eval"):
        made = [load_source("number_guessing", {}, seed).make(split, i) for seed in (0, 1) for i in range(500)]
        games[split] = {(game.low, game.high, game.secret) for game in made}  # type: ignore[attr-defined]
    assert not games["train"] & games["eval"]
