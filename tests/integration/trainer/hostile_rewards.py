"""Reward functions that do as the response says: what broken or hostile ones would do."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def _loop() -> float:
    while True:
        time.sleep(0)


def _hoard() -> float:
    hoard = []
    while True:
        hoard.append(bytearray(16 << 20))


def _raise() -> float:
    raise KeyError("boom")


def _crash() -> float:
    os.abort()


def _recurse() -> float:
    return _recurse()


_DEEDS: dict[str, Callable[[], Any]] = {
    "leave": lambda: sys.exit(0),
    "leave at once": lambda: os._exit(0),
    "loop": _loop,
    "hoard": _hoard,
    "raise": _raise,
    "crash": _crash,
    "recurse": _recurse,
    "huge": lambda: 1e300,
    "verbose": lambda: {"reward": 1.0, "x" * (1 << 20): 1.0},
    "nan": lambda: float("nan"),
    "text": lambda: "1.0",
    "nothing": lambda: None,
    "large": lambda: {"reward": 1.0, "x" * (20 << 20): 1.0},
}


def reward(response: str, answer: Any, row: Mapping[str, Any]) -> Any:
    return _DEEDS[response]() if response in _DEEDS else float(response == answer)
