"""An environment for policies that learn nothing: prompts of a given length, and a reward that differs for nearly every
response, so that each sample has an advantage and costs the trainer what it costs a real one.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from random import Random
from string import ascii_lowercase
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, to_builtins

from ebbtide.environments import Message, Split, StepResult, parse_params

#: Name of the environment in a run's spec.
ENVIRONMENT: Final = f"{__name__}:RandomRewardSource"
#: Tokens that the chat template of the character tokenizer adds: the markers of the user's and the assistant's turn.
TEMPLATE_TOKENS: Final = 2


class RandomRewardParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt_tokens: Annotated[int, Meta(ge=3)] = 32  # with the template's


class RandomRewardSource:
    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        """Raises `InvalidRequest` naming the parameter."""
        self._params = parse_params(RandomRewardParams, params)
        self._seed = seed
        self.identity = json.dumps(["random_reward", to_builtins(self._params), seed], sort_keys=True)

    def make(self, split: Split, index: int) -> "RandomRewardEpisode":
        letters = Random(f"{self._seed}/{split}/{index}").choices(
            ascii_lowercase, k=self._params.prompt_tokens - TEMPLATE_TOKENS
        )
        return RandomRewardEpisode("".join(letters))


class RandomRewardEpisode:
    """One prompt with one response."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def reset(self) -> list[Message]:
        return [Message("user", self._prompt)]

    def step(self, response: str) -> StepResult:
        """Rewards the response with a number from 0 to 1 that its text determines."""
        digest = blake2b(f"{self._prompt}\0{response}".encode(), digest_size=4).digest()
        return StepResult(reward=int.from_bytes(digest, "big") / 2**32, done=True)
