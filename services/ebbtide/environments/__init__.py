"""Defines environments, in which a run's episodes take place, and loads their sources.

A source makes environments, deterministically in (seed, split, index); an environment is deterministic in the responses
that it gets. So a restarted driver rebuilds an episode by stepping a new environment through the stored turns.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from ebbtide.errors import InvalidRequest
from ebbtide.types.parse import parse

#: `train` is for training, `check` for decisions while training (when to stop), `eval` for reported results.
Split = Literal["train", "check", "eval"]
P = TypeVar("P", bound=msgspec.Struct)
#: The built-in environment whose rows and reward function a run brings.
DATASET: Final = "dataset"
#: name -> factory. Their code is Ebbtide's own.
BUILT_IN: Final = {
    DATASET: "ebbtide.environments.dataset:DatasetSource",
    "number_guessing": "ebbtide.environments.number_guessing:NumberGuessingSource",
    "reasoning_gym": "ebbtide.environments.reasoning_gym:ReasoningGymSource",
}
#: Data sets of reasoning-gym whose verifiers evaluate the answer as Python (`eval`, or sympy's `parse_expr` by it).
EVALUATING: Final = frozenset({
    "binary_matrix", "composite", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
    "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
#: The square of a larger one would not fit float32, and a group's deviation would be no number.
MAX_REWARD: Final = 1e15
#: Names and numbers to log of a turn travel with its trajectory, which has to fit a message.
MAX_INFO_BYTES: Final = 32 << 10
_INFO_BYTES: Final = 16  # of a number and its place
_EXCERPT: Final = 2000
#: Rewards of `dataset` that run no code, in a time that the response's length bounds.
REWARDS_IN_THREADS: Final = frozenset({"exact", "number"})


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str  # as in chat templates: `system`, `user`, `assistant`
    content: str

    def as_dict(self) -> dict[str, str]:
        """Returns the form that `tokenizer.apply_chat_template` takes."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to a response."""

    messages: tuple[Message, ...] = ()  # that the environment adds; none when done
    reward: float | None = None  # of this turn (None: no reward); an episode's reward is the sum over its turns
    done: bool = False
    #: numbers to log; environments that ask questions report `right` and `asked` answers
    info: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. An exception fails only this episode, with a recorded reason; it never means a reward of zero."""

    def reset(self) -> list[Message]:
        """Begins (again), and returns the opening messages; at least one."""
        ...

    def step(self, response: str) -> StepResult:
        """Takes the policy's response, without its end token, to all messages so far."""
        ...


class EnvironmentSource(Protocol):
    """Makes environments."""

    identity: str  # keys caches and checkpoints; changes whenever the environments may change

    def make(self, split: Split, index: int) -> Environment:
        """Returns the environment with this number, from 0. Raises `InvalidRequest` if the split has none."""
        ...


@runtime_checkable
class CutScoringSource(Protocol):
    """A source whose environments give a reward where the scoring of a response is cut by its time limit."""

    reward_out_of_time: float


@runtime_checkable
class ExampleSource(Protocol):
    """A source that knows a right response to each opening: for supervised training and for tests."""

    identity: str

    def make(self, split: Split, index: int) -> Environment: ...

    def example(self, split: Split, index: int) -> tuple[list[Message], str]:
        """Returns the opening messages of `make(split, index)`, and a response that earns the full reward."""
        ...


def load_source(name: str, params: Mapping[str, Any], seed: int) -> EnvironmentSource:
    """Loads the source `name`: a built-in one, or `package.module:factory`, called as `factory(params, seed)`.

    It imports and calls whatever it is given: check a run's name before
    (`ebbtide.run_client`). Raises `InvalidRequest` naming the field.
    """
    if name not in BUILT_IN and ":" not in name:
        raise InvalidRequest(
            f"unknown environment {name!r}; use {', '.join(sorted(BUILT_IN))}, or package.module:factory",
            field="environment.name",
        )
    return _import_factory(BUILT_IN.get(name, name))(params, seed)


def checked_result(result: StepResult) -> StepResult:
    """Returns a result of plain types. Raises for a malformed one: that is the environment's failure."""
    reward = 0.0 if result.reward is None else float(result.reward)
    info = {str(name): float(value) for name, value in result.info.items()}
    if not all(math.isfinite(value) for value in (reward, *info.values())):
        raise ValueError(f"the environment gave numbers that are not finite: reward {reward}, info {info}"[:_EXCERPT])
    if abs(reward) > MAX_REWARD:
        raise ValueError(f"the environment gave the reward {reward}; the largest that can be learned is {MAX_REWARD}")
    if sum(len(name.encode()) + _INFO_BYTES for name in info) > MAX_INFO_BYTES:
        raise ValueError(f"the environment gave more than {MAX_INFO_BYTES} bytes of numbers to log; give fewer")
    return StepResult(tuple(result.messages), reward, bool(result.done), info)


def reward_out_of_time(source: EnvironmentSource) -> float | None:
    """The reward of a response whose scoring is cut by its time limit; None: its episode fails. Raises `ValueError` if
    it is not finite."""
    if not isinstance(source, CutScoringSource):
        return None
    if not math.isfinite(reward := float(source.reward_out_of_time)):
        raise ValueError(f"the environment's reward_out_of_time is not finite: {reward}")
    return reward


def needs_isolation(name: str, params: Mapping[str, Any]) -> bool:
    """Whether this environment brings code of others, such as its own, a reward function or responses that a verifier
    evaluates as Python; or a computation that no thread can be freed of."""
    if name == DATASET:
        return str(params.get("reward", "exact")) not in REWARDS_IN_THREADS
    return name not in BUILT_IN or (name == "reasoning_gym" and str(params.get("dataset")) in EVALUATING)


def parse_params(kind: type[P], params: Mapping[str, Any], *, within: str = "environment.params") -> P:
    """Reads `params` as a `kind`. Raises `InvalidRequest` naming `<within>.<key>`."""
    try:
        return parse(kind, params)
    except InvalidRequest as error:
        raise InvalidRequest(error.text, field=f"{within}.{error.field}".rstrip(".")) from None


def _import_factory(name: str) -> Callable[[Mapping[str, Any], int], EnvironmentSource]:
    module_name, _, attribute = name.partition(":")
    try:
        factory: Callable[[Mapping[str, Any], int], EnvironmentSource] = getattr(
            importlib.import_module(module_name), attribute
        )
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"cannot import {name!r} ({error}); install the package where the episode driver runs",
            field="environment.name",
        ) from error
    return factory
