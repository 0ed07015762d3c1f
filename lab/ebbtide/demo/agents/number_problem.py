"""Makes the agent's problems: a name leads to a number over other names, and only the tool knows the way. Pure.

Names and numbers are drawn for each problem, so nothing can be learnt by heart: each answer must come out of the
conversation. The same problems, cut into turns, are examples for the base model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from ebbtide.environments import Message, Split, StepResult
from ebbtide.environments.problem_splits import split_of

_CONSONANTS: Final = "bdfgklmnprstvz"
_VOWELS: Final = "aeiou"
_SYLLABLES: Final = 2
_DIGITS: Final = 3
#: Names on the way to a number: as many calls of the tool.
HOPS: Final = 2


@dataclass(frozen=True)
class NumberProblem:
    """`names` in the order in which the tool leads to `number`; the user asks for the first one."""

    names: tuple[str, ...]
    number: str

    def look(self, name: str) -> str:
        """The tool: says `see NAME`, `is NUMBER`, or `unknown`."""
        if name not in self.names:
            return "unknown"
        following = self.names.index(name) + 1
        return f"see {self.names[following]}" if following < len(self.names) else f"is {self.number}"

    def reward(self, conversation: Sequence[Mapping[str, Any]]) -> float:
        """1 for a conversation that ends with the number alone, else 0."""
        last = conversation[-1]
        return float(last["role"] == "assistant" and last.get("content") == self.number)


def number_problem(seed: int, split: Split, index: int) -> NumberProblem:
    """Returns the problem with this number. Those of two splits begin with different names."""
    random = Random(f"{seed}/{split}/{index}")
    first = _name(random)
    while split_of(first) != split:
        first = _name(random)
    names = [first]
    while len(names) < HOPS:
        if (name := _name(random)) not in names:
            names.append(name)
    return NumberProblem(tuple(names), "".join(random.choices("0123456789", k=_DIGITS)))


def _name(random: Random) -> str:
    return "".join(random.choice(_CONSONANTS) + random.choice(_VOWELS) for _ in range(_SYLLABLES))


class NumberTurns:
    """Single turns of the problems, each behind a right beginning, for `ebbtide base-model`."""

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        self._seed = seed
        self.identity = json.dumps(["agent_turns", dict(params), HOPS, _SYLLABLES, _DIGITS, seed])

    def make(self, split: Split, index: int) -> "NumberTurn":
        return NumberTurn(*self.example(split, index))

    def example(self, split: Split, index: int) -> tuple[list[Message], str]:
        """Returns the conversation before a turn, and its right answer as the model writes it."""
        number, turn = divmod(index, HOPS + 1)
        problem = number_problem(self._seed, split, number)
        messages = [Message("user", f"find {problem.names[0]}")]
        for name in problem.names[:turn]:
            messages += [Message("assistant", written_call(name)), Message("tool", problem.look(name))]
        return messages, written_call(problem.names[turn]) if turn < HOPS else problem.number


@dataclass(frozen=True)
class NumberTurn:
    """One turn as an environment: its response is right or wrong."""

    messages: list[Message]
    answer: str

    def reset(self) -> list[Message]:
        return list(self.messages)

    def step(self, response: str) -> StepResult:
        right = float(response == self.answer)
        return StepResult(reward=right, done=True, info={"right": right, "asked": 1.0})


def written_call(name: str) -> str:
    """Returns a call of the tool in the format that vLLM's parser `pythonic` reads."""
    return f'[look(at="{name}")]'
