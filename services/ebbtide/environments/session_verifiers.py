"""Defines what a verifier of agents' sessions gets, and loads one.

A verifier is a function of one played session. It returns the session's reward. It runs in a process of the driver that
has none of the driver's rights, and an exception drops the session.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ebbtide.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a branch: what the policy sampled, or what stood around that."""

    text: str  # with special tokens, but for the end token of what was sampled
    sampled: bool


@dataclass(frozen=True, slots=True)
class PlayedBranch:
    """One path through a session, from its first prompt to its last sampled token."""

    passages: tuple[Passage, ...]
    truncated: bool = False  # its last completion ended by its length

    @property
    def answer(self) -> str:
        """The last text that was sampled; empty if there is none."""
        return next((one.text for one in reversed(self.passages) if one.sampled), "")


@dataclass(frozen=True, slots=True)
class VerifiedSession:
    """A session that has ended."""

    branches: tuple[PlayedBranch, ...]  # at least one, in the order of their last turns
    data: Mapping[str, Any] = field(default_factory=dict)  # what its client gave with the end

    @property
    def answer(self) -> str:
        """The last text of the last branch."""
        return self.branches[-1].answer


Verifier = Callable[[VerifiedSession], float]


def load_verifier(name: str) -> Verifier:
    """Imports `package.module:function`. Check the name before. Raises `InvalidRequest` naming the field."""
    module_name, _, attribute = name.partition(":")
    try:
        verifier: Verifier = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"cannot import {name!r} ({error}); install the package where the episode driver runs",
            field="environment.verifiers",
        ) from error
    return verifier


def checked_reward(reward: Any) -> float:
    """A verifier's reward as a number. Raises for anything else: that is the verifier's failure."""
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the verifier gave {number}, which is no finite reward")
    return number
