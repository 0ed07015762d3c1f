"""Runs a process for each seed, so many at a time, and collects their outcomes.

Invariant: no process outlives `simulate_seeds`, however that ends; and none outlives this process.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.simulator.outcome import Outcome, SimulationProgress
from ebbtide.simulator.parallel.seed_messages import (
    HEAD_BYTES,
    Ended,
    Refused,
    SeedMessage,
    SeedTask,
    Told,
    length,
    message,
)

PROGRAM: Final = (sys.executable, "-m", "ebbtide.simulator.parallel")


async def simulate_seeds(
    tasks: Sequence[SeedTask],
    *,
    jobs: int,
    say: Callable[[int, SimulationProgress], None],
    program: Sequence[str] = PROGRAM,
) -> list[Outcome]:
    """Returns the outcomes in the order of the tasks; `say` gets a task's index with its progress.

    Raises `InvalidRequest` for refused input, and `EbbtideError` if a process fails; its stderr is this process's.
    """
    places = asyncio.Semaphore(jobs)

    async def simulate(number: int, task: SeedTask) -> Outcome:
        async with places:
            return await _simulate(task, lambda progress: say(number, progress), program)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(simulate(number, task)) for number, task in enumerate(tasks)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first; it ended the others
    return [task.result() for task in running]


async def _simulate(task: SeedTask, say: Callable[[SimulationProgress], None], program: Sequence[str]) -> Outcome:
    # In a session of its own, so that Ctrl-C reaches this process alone, which ends it.
    process = await asyncio.create_subprocess_exec(
        *program,
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - asked for above
    try:
        process.stdin.write(msgspec.json.encode(task))
        process.stdin.close()
        while (heard := await _next(process)) is not None:
            match heard:
                case Told(progress):
                    say(progress)
                case Refused(text):
                    raise InvalidRequest(text)
                case Ended(outcome):
                    return outcome
        status = await process.wait()
        raise EbbtideError(f"the simulation of {_name(task)} ended with status {status} and without an outcome")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # until its pipes have ended, too: else the loop may close before they are let go


async def _next(process: asyncio.subprocess.Process) -> SeedMessage | None:
    """The process's next message; None if it ended before that."""
    assert process.stdout is not None  # noqa: S101 - asked for by `_simulate`
    try:
        body = await process.stdout.readexactly(length(await process.stdout.readexactly(HEAD_BYTES)))
    except asyncio.IncompleteReadError:
        return None
    return message(body)


def _name(task: SeedTask) -> str:
    return f"{task.scenario or task.recording} with seed {task.seed}"
