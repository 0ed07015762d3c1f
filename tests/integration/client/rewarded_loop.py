"""Runs examples/grpo_loop.py with rewards that come by turns: a scripted engine answers one prompt always alike."""

import itertools
import runpy
from collections.abc import Sequence
from pathlib import Path

_turns = itertools.cycle((0.0, 0.25, 0.5, 1.0))


def reward(_text: str, _answers: Sequence[str]) -> float:
    return next(_turns)


if __name__ == "__main__":
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "grpo_loop.py"), run_name="grpo_loop")
    example["main"].__globals__["reward"] = reward
    example["main"](example["parse"]())
