"""Plays a multi-turn game: the policy guesses a secret number, and hears `higher` or `lower`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ebbtide.environments import Message, Split, StepResult, parse_params
from ebbtide.environments.problem_splits import split_of
from ebbtide.errors import InvalidRequest


class NumberGuessingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Secrets lie in `span` consecutive numbers, the lowest of which is drawn from 0 to `max_low`."""

    span: Annotated[int, Meta(ge=2, le=10**6)] = 100
    max_low: Annotated[int, Meta(ge=0, le=10**9)] = 900
    max_turns: Annotated[int, Meta(ge=2, le=64)] = 8


class NumberGuessingSource:
    """Makes games from (seed, split, index), without state. A range and a secret define a game."""

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        """Raises `InvalidRequest` naming the parameter."""
        self.params = parse_params(NumberGuessingParams, params)
        self.seed = seed
        self.identity = json.dumps(["number_guessing", msgspec.to_builtins(self.params), seed], sort_keys=True)
        if self.params.span * (self.params.max_low + 1) < 1000:
            raise InvalidRequest(
                "fewer than 1,000 games are too few for several splits; raise max_low or span",
                field="environment.params.max_low",
            )

    def make(self, split: Split, index: int) -> "NumberGuessing":
        rng = Random(f"{self.seed}/{split}/{index}")
        while True:
            low = rng.randint(0, self.params.max_low)
            high = low + self.params.span - 1
            secret = rng.randint(low, high)
            if split_of(f"{low} {high} {secret}") == split:
                return NumberGuessing(low, high, secret, self.params.max_turns)


@dataclass
class NumberGuessing:
    """One game. Its last turn brings the reward: 1 for the first guess, less for each further turn, 0 after the last.

    A response without a number uses up its turn.
    """

    low: int
    high: int
    secret: int
    max_turns: int
    turn: int = 0

    def reset(self) -> list[Message]:
        self.turn = 0
        return [Message("user", f"Guess my number from {self.low} to {self.high}. Answer with the number alone.")]

    def step(self, response: str) -> StepResult:
        self.turn += 1
        found = re.search(r"-?\d{1,12}", response)
        guess = int(found.group()) if found else None
        if guess == self.secret:
            return self._end(reward=1.0 - (self.turn - 1) / self.max_turns, right=1.0)
        if self.turn >= self.max_turns:
            return self._end(reward=0.0, right=0.0)
        if guess is None:
            return StepResult((Message("user", "That is no number."),))
        return StepResult((Message("user", "higher" if guess < self.secret else "lower"),))

    def _end(self, *, reward: float, right: float) -> StepResult:
        return StepResult(reward=reward, done=True, info={"right": right, "asked": 1.0, "turns": float(self.turn)})
