"""An environment whose scoring takes as long as its response says, and the times of sandboxes for code.

Times are drawn from RollPacker's figure of sandboxes (NSDI 2026): half under 0.36 s, 0.9 within 0.9 s, 0.94 within
2.3 s, and the rest runs until it is cut. Between these points the quantiles lie on straight lines.
"""

import time
from bisect import bisect_right
from collections.abc import Mapping
from random import Random
from typing import Any, Final

from ebbtide.environments import Message, Split, StepResult

#: Share of the scorings, and seconds. The figure begins near 0.
QUANTILES: Final = ((0.0, 0.02), (0.5, 0.36), (0.9, 0.9), (0.94, 2.3))
#: What never ends by itself.
STUCK_S: Final = 3600.0


def drawn_s(draw: Random) -> float:
    """The seconds of one scoring."""
    share = draw.random()
    at = bisect_right([one for one, _ in QUANTILES], share)
    if at == len(QUANTILES):
        return STUCK_S
    (low, begin), (high, end) = QUANTILES[at - 1], QUANTILES[at]
    return begin + (end - begin) * (share - low) / (high - low)


class _Response:
    def __init__(self, index: int) -> None:
        self._index = index

    def reset(self) -> list[Message]:
        return [Message("user", f"problem {self._index}")]

    def step(self, response: str) -> StepResult:
        time.sleep(float(response))  # a sandbox that is elsewhere
        return StepResult(reward=1.0, done=True)


class ScoredResponses:
    """A response is the seconds that its scoring takes."""

    identity = "scored responses"
    reward_out_of_time = 0.0

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        pass

    def make(self, split: Split, index: int) -> _Response:  # noqa: ARG002 - all splits are alike
        return _Response(index)
