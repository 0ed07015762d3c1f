"""A trainer whose last rank does not find the first run's files, and runs out of memory in its third step, as
`ebbtide.trainer` is started:

python short_of_memory.py ebbtide.trainer --once ...
"""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ebbtide.errors import InvalidRequest
from ebbtide.trainer.__main__ import main
from ebbtide.trainer.learning import local_learning, network
from ebbtide.trainer.learning.learner import Learner

step, steps = Learner.step, itertools.count(1)
load, loads = network.load_tokenizer, itertools.count(1)
is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1


def short(self: Learner, *args: Any) -> Any:
    if next(steps) == 3 and is_last:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")
    return step(self, *args)


def gone(directory: Path) -> Any:
    if next(loads) == 1 and is_last:
        raise InvalidRequest(f"{str(directory)!r} is gone here", field="model")
    return load(directory)


if __name__ == "__main__":
    local_learning.load_tokenizer = gone  # type: ignore[attr-defined]
    Learner.step = short  # type: ignore[method-assign, assignment]
    main(sys.argv[2:])
