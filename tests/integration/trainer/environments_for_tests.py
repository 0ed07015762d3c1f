"""Environments with rewards that differ, several turns, and failures, crashes and stalls on demand."""

import ctypes
import time
import zlib
from collections.abc import Mapping
from itertools import count
from typing import Any

from ebbtide.environments import Message, Split, StepResult


class Source:
    """Params: `turns`, whether later prompts `vary` between samples of a problem, and the indices of train problems
    that `crash`, `segfault`, `stall` or are `slow`."""

    identity = "for tests"

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.params, self._numbers = params, count()

    def make(self, split: Split, index: int) -> "Scored":
        return Scored(self.params, split, index, next(self._numbers) if self.params.get("vary") else 0)


class Scored:
    """Rewards a response by its checksum, so that samples of one group differ and the same tokens score the same."""

    def __init__(self, params: Mapping[str, Any], split: Split, index: int, number: int) -> None:
        self._params, self._split, self._index, self._turn, self._number = params, split, index, 0, number

    def reset(self) -> list[Message]:
        self._turn = 0
        return [Message("user", f"{self._split} {self._index}")]

    def step(self, response: str) -> StepResult:
        self._turn += 1
        if self._split == "train" and self._index in self._params.get("crash", ()):
            raise RuntimeError(f"problem {self._index} is broken")
        if self._split == "train" and self._index in self._params.get("segfault", ()):
            ctypes.string_at(0)
        if self._split == "train" and self._index in self._params.get("stall", ()):
            time.sleep(60)
        if self._split == "train" and self._index in self._params.get("slow", ()):
            time.sleep(1)
        score = zlib.crc32(response.encode()) % 5 / 4
        if self._turn < self._params.get("turns", 1):
            return StepResult((Message("user", f"go on {self._turn} {self._number}"),))
        return StepResult(reward=score, done=True, info={"right": score, "asked": 1.0})


def make_source(params: Mapping[str, Any], seed: int) -> Source:
    return Source(params)
