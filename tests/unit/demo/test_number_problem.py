"""The agent's problems: only the tool knows the way to a number."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.demo.agents.number_agent import call_tool, find_number
from ebbtide.demo.agents.number_problem import HOPS, NumberProblem, NumberTurns, number_problem, written_call
from ebbtide.environments.problem_splits import split_of

PROBLEM = NumberProblem(("toma", "biko"), "407")


class ScriptedModel:
    """A client whose completions are written before; it keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **body: Any) -> Any:
        from openai.types.chat import ChatCompletionMessage

        self.asked.append({**body, "messages": list(body["messages"])})
        text = self.answers.pop(0)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if "=" in text:
            name, _, at = text.partition("=")
            function = {"name": name, "arguments": f'{{"at": "{at}"}}'}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call-{len(self.asked)}", "type": "function", "function": function}],
            }
        return SimpleNamespace(choices=[SimpleNamespace(message=ChatCompletionMessage.model_validate(message))])


def played(*answers: str) -> tuple[list[Any], ScriptedModel]:
    model = ScriptedModel(*answers)
    return asyncio.run(find_number(model, "run", PROBLEM.names[0], PROBLEM.look)), model  # type: ignore[arg-type]


def test_an_agent_that_follows_the_tool_to_the_number_is_rewarded() -> None:
    conversation, model = played("look=toma", "look=biko", "407")
    assert [one["content"] for one in conversation if one["role"] == "tool"] == ["see biko", "is 407"]
    assert PROBLEM.reward(conversation) == 1.0
    assert [len(one["messages"]) for one in model.asked] == [1, 3, 5]


@pytest.mark.parametrize("answers", [("407 ",), ("look=toma", "look=biko", "470"), ("look=toma", "biko")])
def test_any_other_last_answer_earns_nothing(answers: tuple[str, ...]) -> None:
    assert PROBLEM.reward(played(*answers)[0]) == 0.0


def test_an_agent_that_only_looks_ends_and_earns_nothing() -> None:
    conversation, model = played(*["look=biko"] * 9)
    assert (len(model.asked), PROBLEM.reward(conversation)) == (5, 0.0)


def test_the_agent_hears_what_is_wrong_with_a_call() -> None:
    conversation, _ = played("look=tomo", "lok=toma", "407")
    assert [one["content"] for one in conversation if one["role"] == "tool"] == ["unknown", "no such tool"]


@pytest.mark.parametrize("arguments", ["{}", '{"at": 7}'])
def test_a_call_without_a_name_is_answered(arguments: str) -> None:
    call = SimpleNamespace(function=SimpleNamespace(name="look", arguments=arguments))
    assert call_tool(call, PROBLEM.look) == "look at a name"


def test_problems_depend_on_seed_and_index_alone_and_keep_splits_apart() -> None:
    assert number_problem(3, "train", 5) == number_problem(3, "train", 5)
    found = {number_problem(seed, "train", index) for seed in range(2) for index in range(20)}
    assert len(found) == 40
    assert {split_of(one.names[0]) for one in found} == {"train"}
    assert all(len(set(one.names)) == HOPS for one in found)


def test_the_examples_of_the_base_model_are_the_turns_of_a_right_conversation() -> None:
    turns, problem = NumberTurns({}, 3), number_problem(3, "train", 2)
    examples = [turns.example("train", 2 * (HOPS + 1) + turn) for turn in range(HOPS + 1)]
    assert [answer for _, answer in examples] == [*map(written_call, problem.names), problem.number]
    assert [one.role for one in examples[-1][0]] == ["user", *["assistant", "tool"] * HOPS]
    assert turns.make("train", 0).step(turns.example("train", 0)[1]).reward == 1.0
    assert turns.make("train", 0).step("something else").reward == 0.0
