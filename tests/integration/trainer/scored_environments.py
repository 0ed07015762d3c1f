"""An environment whose scoring does as the response says: what verifiers of code do, right, slow or stuck."""

import os
import time
from collections.abc import Mapping
from typing import Any

from ebbtide.environments import Message, Split, StepResult


def _burn(cpu_s: float) -> None:
    """Computes for so many seconds of CPU time, whatever else the host does."""
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass


class Scored:
    """`DEED SECONDS [REWARD]`: `burn` computes, `sleep` waits, `turn` asks for another response, `exit` ends all."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.heard: list[str] = []

    def reset(self) -> list[Message]:
        return [Message("user", f"problem {self.index}")]

    def step(self, response: str) -> StepResult:
        deed, seconds, reward = [*response.split(), "1"][:3]
        self.heard.append(deed)
        if deed == "exit":
            os._exit(3)
        (_burn if deed == "burn" else time.sleep)(float(seconds))
        if deed == "turn":
            return StepResult((Message("user", " ".join(self.heard)),))
        return StepResult(reward=float(reward), done=True, info={"pid": float(os.getpid()), "turns": len(self.heard)})


class ScoredSource:
    """`reward_out_of_time` of the parameters is that of responses whose scoring is cut."""

    identity = "scored"

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        if "reward_out_of_time" in params:
            self.reward_out_of_time = params["reward_out_of_time"]

    def make(self, split: Split, index: int) -> Scored:
        return Scored(index)
