"""What a person sees of a run."""

import asyncio

import msgspec
import pytest

from ebbtide.cli.views import run
from ebbtide.cli.views.fleet import doing, worker_table
from ebbtide.cli.views.run import RunProgress, RunScreen, run_table, sparkline
from ebbtide.cli.views.tables import clock
from ebbtide.types.fleet import Worker, WorkerKind, WorkerState
from ebbtide.types.run import EnvironmentSpec, Run, RunEvent, RunSpec
from ebbtide.types.weights import PolicyVersion

SPEC = RunSpec(name="demo", model="m", environment=EnvironmentSpec(name="reasoning_gym"))


def worker(state: WorkerState, running: int = 0, version: int = 0) -> Worker:
    installed = (PolicyVersion(policy="policy", version=version),) if version else ()
    return Worker(
        uptime_s=9.0,
        worker_id="w1",
        kind=WorkerKind.SPOT,
        state=state,
        slots=8,
        running=running,
        installed=installed,
        tokens_per_s=81.2,
    )


def test_a_sparkline_runs_from_lowest_to_highest_and_fits() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5]) == "▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([float(value) for value in range(1000)], width=40)) == 40


@pytest.mark.parametrize(("seconds", "told"), [(0, "0:00"), (61.9, "1:01"), (3725, "1:02:05"), (200000, "2d 7h")])
def test_durations_read_like_a_clock(seconds: float, told: str) -> None:
    assert clock(seconds) == told


@pytest.mark.parametrize(
    ("state", "running", "version", "told"),
    [
        (WorkerState.READY, 3, 7, "generates 3 rollouts with version 7"),
        (WorkerState.READY, 0, 7, "waits for work with version 7"),
        (WorkerState.READY, 0, 0, "waits for work"),
        (WorkerState.INSTALLING, 3, 7, "installs new weights"),
        (WorkerState.LOST, 0, 7, "lost"),
    ],
)
def test_it_is_told_what_each_worker_is_doing(state: WorkerState, running: int, version: int, told: str) -> None:
    assert doing(worker(state, running, version)) == told


def test_tables_have_a_row_each() -> None:
    assert worker_table([worker(WorkerState.READY)]).row_count == 1
    assert run_table([Run(run_id="a", spec=SPEC), Run(run_id="b", spec=SPEC)]).row_count == 2


async def test_without_a_terminal_each_piece_of_news_is_one_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = RunScreen("a title")
    async with screen.shown():
        screen.phase("boot")
        screen.phase("run")
        progress = RunProgress("demo", run=Run(run_id="demo", spec=SPEC))
        progress.sample([worker(WorkerState.READY)])
        later = msgspec.structs.replace(worker(WorkerState.READY), uptime_s=11.0, tokens_generated=162)
        progress.sample([later])
        screen.attach(progress)
        screen.note("worker-2 is killed")
        progress.apply(RunEvent(kind="step", values={"step": 1.0, "reward": 0.25, "version": 2.0}))
        await asyncio.sleep(0)
        screen.phase("")
    lines = capsys.readouterr().out.splitlines()
    assert sum("worker-2 is killed" in line for line in lines[:4]) == 1
    assert any(line.endswith("step 1/100: reward 0.250, version 2; w1 81 tokens/s") for line in lines)
    assert list(screen.phases) == ["boot", "run"]


async def test_a_run_without_news_is_not_silent_where_the_output_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_QUIET_S", 0.1)
    screen = RunScreen("quiet-run")
    async with screen.shown():
        await asyncio.sleep(0.6)
    assert capsys.readouterr().err.startswith("ebbtide: waiting for news of quiet-run since ")
