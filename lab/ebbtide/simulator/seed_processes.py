"""Simulates seeds side by side, each in a process of its own, and collects their outcomes in order.

Invariant: no simulation outlives `simulate_seeds`, however that ends; and none outlives this process.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Final, TypeAlias

from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.runtime import die_with_parent
from ebbtide.simulator.outcome import Outcome, SimulationProgress
from ebbtide.simulator.simulate import SeedTask, simulate_task

Say: TypeAlias = Callable[[SimulationProgress], None]
Simulate: TypeAlias = Callable[[SeedTask, Say], Outcome]
#: Seconds between two messages on progress: a person sees no more.
_EVERY_S: Final = 0.2
#: Fresh interpreters: the threads and open files of this process stay its own.
_SPAWN: Final = get_context("spawn")


def simulate_seeds(
    tasks: Sequence[SeedTask],
    *,
    jobs: int,
    say: Callable[[int, SimulationProgress], None],
    simulate: Simulate = simulate_task,
) -> list[Outcome]:
    """Simulate `tasks`, `jobs` at a time, and return the outcomes in their order.

    `say` gets a task's index with its progress. `simulate` is a module's function, for the processes import it.
    Raises `InvalidRequest` for refused input, and `EbbtideError` if a process fails; its stderr is this process's.
    """
    waiting = list(reversed(list(enumerate(tasks))))
    running: dict[Connection, tuple[int, SpawnProcess]] = {}
    outcomes: dict[int, Outcome] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, task = waiting.pop()
                _start(task, number, simulate, running)
            for heard in wait(list(running)):
                assert isinstance(heard, Connection)  # noqa: S101 - `running` has no others
                number, process = running[heard]
                match _next(heard, process, tasks[number]):
                    case SimulationProgress() as progress:
                        say(number, progress)
                    case Outcome() as outcome:
                        outcomes[number] = outcome
                        process.join()
                        del running[heard]
                        heard.close()
    finally:
        for connection, (_, process) in running.items():
            process.kill()
            process.join()
            connection.close()
    return [outcomes[number] for number in range(len(tasks))]


def _start(
    task: SeedTask, number: int, simulate: Simulate, running: dict[Connection, tuple[int, SpawnProcess]]
) -> None:
    heard, told = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_simulate, args=(task, simulate, told), daemon=True)
    with _deaf_to_interrupts():
        process.start()
        running[heard] = number, process
    told.close()  # the process has its own: now the pipe ends with it


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that start within do not get Ctrl-C, which is for this process alone: it ends them."""
    resource_tracker.ensure_running()  # which lets interrupts through again when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _next(heard: Connection, process: SpawnProcess, task: SeedTask) -> SimulationProgress | Outcome:
    try:
        message = heard.recv()
    except EOFError:
        process.join()
        what = f"{task.scenario or task.recording} with seed {task.seed}"
        told = f"the simulation of {what} ended with status {process.exitcode} and without an outcome"
        raise EbbtideError(told) from None
    if isinstance(message, str):
        raise InvalidRequest(message)
    found: SimulationProgress | Outcome = message
    return found


def _simulate(task: SeedTask, simulate: Simulate, told: Connection) -> None:
    """Send progress now and then, and at last the outcome, or a text: what is wrong with the input."""
    parent = parent_process()
    assert parent is not None  # noqa: S101 - it was started by one
    assert parent.pid is not None  # noqa: S101 - as it runs
    die_with_parent(parent.pid)
    os.dup2(2, 1)  # what a library prints is no part of what the command prints
    telemetry.configure("simulation", level="error")  # the coordinator's code logs what happens, by the wall clock
    sent = -_EVERY_S

    def say(progress: SimulationProgress) -> None:
        nonlocal sent
        if (now := time.monotonic()) - sent >= _EVERY_S:
            sent = now
            told.send(progress)

    try:
        outcome = simulate(task, say)
        told.send(outcome if task.spans else replace(outcome, spans=[]))
    except InvalidRequest as error:
        told.send(str(error))
