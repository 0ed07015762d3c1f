"""Environments: what a run's episodes are about. They run in the episode driver's process and know nothing of it.

A source makes environments. It is deterministic in (seed, split, index), and an environment in what it is told, so that
a driver that died in the middle of an episode rebuilds it by making it again and stepping it through the stored turns.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from ebbtide.errors import InvalidRequest
from ebbtide.types.parse import parse

#: `train` is trained on; `check` is for decisions while training (when to stop); `eval` is for what is reported.
Split = Literal["train", "check", "eval"]
P = TypeVar("P", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `role` as in chat templates (`system`, `user`, `assistant`)."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that `tokenizer.apply_chat_template` takes."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What follows a response: the messages that the environment adds (none when done), and the turn's reward.

    An episode's reward is the sum over its turns; `None` is a turn without one. `info` holds numbers to be logged;
    environments that ask questions say in it how many were `right` of how many `asked`.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. What it raises fails this episode alone, with a recorded reason, and is never a reward of zero."""

    def reset(self) -> list[Message]:
        """Begin (again), and return the opening messages; at least one."""
        ...

    def step(self, response: str) -> StepResult:
        """Take the policy's response, without its end token, to all messages so far."""
        ...


class EnvironmentSource(Protocol):
    """Makes environments. `identity` changes whenever what they ask may change: it keys caches and checkpoints."""

    identity: str

    def make(self, split: Split, index: int) -> Environment:
        """The environment with this number, from 0. Raises `InvalidRequest` when the split has none."""
        ...


@runtime_checkable
class ExampleSource(Protocol):
    """A source that knows a right response to each opening, for supervised training and for tests."""

    identity: str

    def make(self, split: Split, index: int) -> Environment: ...

    def example(self, split: Split, index: int) -> tuple[list[Message], str]:
        """The opening messages of `make(split, index)`, and a response that earns the full reward."""
        ...


def load_source(name: str, params: Mapping[str, Any], seed: int) -> EnvironmentSource:
    """The source `name`: a built-in one, or `package.module:factory`, called as `factory(params, seed)`.

    Whoever may submit a run may thereby call any factory that is importable where the driver runs.
    Raises `InvalidRequest` naming `environment.name` or `environment.params.<key>`.
    """
    if name == "reasoning_gym":
        from ebbtide.environments.reasoning_gym import ReasoningGymSource

        return ReasoningGymSource(params, seed)
    if name == "number_guessing":
        from ebbtide.environments.number_guessing import NumberGuessingSource

        return NumberGuessingSource(params, seed)
    if ":" not in name:
        raise InvalidRequest(
            f"unknown environment {name!r}; use reasoning_gym, number_guessing, or package.module:factory",
            field="environment.name",
        )
    return _import_factory(name)(params, seed)


def parse_params(kind: type[P], params: Mapping[str, Any]) -> P:
    """`params` as the record `kind`. Raises `InvalidRequest` naming `environment.params.<key>`."""
    try:
        return parse(kind, params)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), field=f"environment.params.{error.field}".rstrip(".")) from None


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
