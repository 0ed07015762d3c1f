"""Runs `ebbtide simulate`: simulates each scenario with each seed, and shows and writes what came of it."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.cli.views.simulation_table import SimulationScreen, print_simulation
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.simulator.outcome import Outcome, SimulationProgress
from ebbtide.simulator.report.figures_file import figures_file
from ebbtide.simulator.report.scenario_figures import figures
from ebbtide.simulator.seed_processes import Simulate, simulate_seeds
from ebbtide.simulator.simulate import SeedTask, scenario_name, simulate_task

INTERRUPTED: Final = 130


class SimulateOptions(Struct, frozen=True, kw_only=True):
    scenario: Path | None = None
    compare: tuple[Path, ...] = ()
    recording: Path | None = None  # without a scenario its own fleet comes first
    seed: int = 0
    seeds: int = 1
    jobs: int | None = None  # None: one per core
    json: Path | None = None
    png: Path | None = None

    def tasks(self) -> list[list[SeedTask]]:
        """The tasks of each fleet, one for each seed. Raises `InvalidRequest` if no fleet is named."""
        if self.scenario is None and self.recording is None:
            raise InvalidRequest("name a scenario file, or a recorded run with --from", field="SCENARIO.toml")
        first = "" if self.scenario is None else str(self.scenario)
        return [
            [self._task(fleet, seed) for seed in range(self.seed, self.seed + self.seeds)]
            for fleet in (first, *map(str, self.compare))
        ]

    def _task(self, fleet: str, seed: int) -> SeedTask:
        drawn = self.png is not None and seed == self.seed
        return SeedTask(scenario=fleet, recording=str(self.recording or ""), seed=seed, spans=drawn)


def run(
    options: SimulateOptions,
    *,
    simulate: Simulate = simulate_task,
    name_of: Callable[[SeedTask], str] = scenario_name,
) -> int:
    """Returns the exit status. Raises `InvalidRequest` for faulty input, before anything is simulated.

    `simulate` simulates a seed; `name_of` reads a task's scenario and returns its name.
    """
    tasks = options.tasks()
    _need_installed("redis", "ebbtide simulate")
    if options.png is not None:
        _need_installed("matplotlib", "--png")
    names = [name_of(of_fleet[0]) for of_fleet in tasks]
    for path, field in ((options.json, "--json"), (options.png, "--png")):
        if path is not None:
            _check_writable(path, field)
    try:
        outcomes = _simulate(tasks, names, options.jobs or len(os.sched_getaffinity(0)), simulate)
    except KeyboardInterrupt:
        print("Interrupted; nothing was written.", file=sys.stderr)  # noqa: T201 - a command
        return INTERRUPTED
    print_simulation([figures(of_fleet) for of_fleet in outcomes])
    _write(options, outcomes)
    return 0


def _simulate(
    tasks: Sequence[Sequence[SeedTask]], names: Sequence[str], jobs: int, simulate: Simulate
) -> list[list[Outcome]]:
    """The outcomes of each fleet, in the order of its seeds."""
    flat = [(fleet, task) for fleet, of_fleet in enumerate(tasks) for task in of_fleet]
    heard: list[dict[int, SimulationProgress]] = [{} for _ in tasks]
    with SimulationScreen(names) as screen:

        def say(number: int, progress: SimulationProgress) -> None:
            fleet, task = flat[number]
            heard[fleet][task.seed] = progress
            screen.show(fleet, heard[fleet], of=len(tasks[fleet]))

        outcomes = simulate_seeds([task for _, task in flat], jobs=jobs, say=say, simulate=simulate)
    found: list[list[Outcome]] = [[] for _ in tasks]
    for (fleet, _), outcome in zip(flat, outcomes, strict=True):
        found[fleet].append(outcome)
    return found


def _write(options: SimulateOptions, outcomes: Sequence[Sequence[Outcome]]) -> None:
    """Writes what was asked for. The picture shows each scenario with its first seed."""
    if options.json is not None:
        with _named(options.json):
            options.json.write_bytes(figures_file(outcomes))
    if options.png is not None:
        from ebbtide.simulator.report.outcome_picture import write_outcome_picture

        with _named(options.png):
            write_outcome_picture([of_fleet[0] for of_fleet in outcomes], options.png)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file that cannot be written. A full disk's error does not."""
    try:
        yield
    except OSError as error:
        told = f"cannot be written ({error.strerror}); name another file, or make room"
        raise InvalidRequest(told, field=str(path)) from None


def _need_installed(module: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise EbbtideError(f"{what} needs {module}, which is not installed: install ebbtide[simulate]")


def _check_writable(path: Path, field: str) -> None:
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidRequest(f"{str(path)!r} cannot be written; name a file in a folder that is there", field=field)
