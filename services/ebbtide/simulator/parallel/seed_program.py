"""Simulates one seed: takes a `SeedTask` as JSON from stdin, and writes `SeedMessage` frames to stdout."""

import os
import sys
import time
from collections.abc import Callable
from typing import BinaryIO, Final, Protocol

import msgspec
from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.runtime import die_with_parent
from ebbtide.simulator.outcome import Outcome, SimulationProgress
from ebbtide.simulator.parallel.seed_messages import Ended, Refused, SeedMessage, SeedTask, Told, frame

#: Seconds between two messages on progress: a person sees no more.
_EVERY_S: Final = 0.2
Say = Callable[[SimulationProgress], None]


class Simulate(Protocol):
    def __call__(self, task: SeedTask, say: Say) -> Outcome:
        """Simulates a task, and calls `say` as often as it likes. Raises `InvalidRequest` for faulty input."""
        ...


def serve_seed(simulate: Simulate) -> None:
    """Does the task on stdin. The process dies with the parent that started it, named by the first argument."""
    die_with_parent(int(sys.argv[1]))
    telemetry.configure("simulation", level="error")  # the coordinator's code logs what happens, by the wall clock
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything prints is no message
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=SeedTask)
    try:
        outcome = simulate(task, _seldom(out))
        answer: SeedMessage = Ended(outcome if task.spans else replace(outcome, spans=[]))
    except InvalidRequest as error:
        answer = Refused(str(error))
    _send(out, answer)
    out.close()


def _seldom(out: BinaryIO) -> Say:
    sent = -_EVERY_S

    def say(progress: SimulationProgress) -> None:
        nonlocal sent
        if (now := time.monotonic()) - sent >= _EVERY_S:
            sent = now
            _send(out, Told(progress))

    return say


def _send(out: BinaryIO, message: SeedMessage) -> None:
    out.write(frame(message))
    out.flush()
