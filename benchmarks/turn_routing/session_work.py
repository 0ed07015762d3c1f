"""Draws the turns of sessions: each has the tokens of all turns before it in its prompt.

With these means, 80 % of all tokens are prompt, and 80 % of the prompts' tokens repeat earlier turns: of T turns with a
first prompt x, responses r and additions a, the prompts have T x + T (T - 1) / 2 (r + a) tokens, of which x + (T - 1) a
are new. T is uniform from 2 to 6, so the means of T and T (T - 1) / 2 are 4 and 7.
"""

from collections.abc import Sequence
from math import exp
from random import Random
from typing import Final

from msgspec import Struct

from ebbtide.simulator.scenario.workload import Turn

#: Tokens, on average: of a response, of a first prompt, and of what the environment adds to a turn.
RESPONSE: Final = 512.0
OPENING: Final = 0.92 * RESPONSE
ADDED: Final = 0.76 * RESPONSE
_LEAST_TURNS: Final = 2
_MOST_TURNS: Final = 6
#: Sigma of log-normal lengths and waits.
_SPREAD: Final = 0.6
_WAIT_SPREAD: Final = 0.8


class SessionWork(Struct, frozen=True, kw_only=True):
    """The sessions of a seed. `wait_s`: of an environment, on average; also before a session begins. `scale`: of all
    lengths.
    """

    seed: int
    wait_s: float
    scale: float = 1.0

    def turns(self, place: int, number: int) -> Sequence[Turn]:
        """The turns of a place's session with this number. They are the same under all policies."""
        draw = Random(f"{self.seed} session {place} {number}")
        context, turns = self._tokens(draw, OPENING), list[Turn]()
        for _ in range(draw.randint(_LEAST_TURNS, _MOST_TURNS)):
            response, wait_s = self._tokens(draw, RESPONSE), _log_normal(draw, self.wait_s, _WAIT_SPREAD)
            turns.append(Turn(context, response, wait_s))
            context += response + self._tokens(draw, ADDED)
        return turns

    def begins_s(self, place: int, over_s: float) -> float:
        """When a place's first session begins: at a moment within `over_s`."""
        return Random(f"{self.seed} begin {place}").random() * over_s

    def _tokens(self, draw: Random, mean: float) -> int:
        return max(1, round(_log_normal(draw, self.scale * mean, _SPREAD)))


def _log_normal(draw: Random, mean: float, sigma: float) -> float:
    return mean * exp(sigma * draw.gauss() - sigma * sigma / 2) if mean else 0.0


def mean_context() -> float:
    """Tokens that a decoding turn attends to, on average over its response."""
    prompt = (4 * OPENING + 7 * (RESPONSE + ADDED)) / 4
    return prompt + RESPONSE / 2
