"""Seeds are simulated in processes of their own: in order, so many at a time, and none is left behind."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.simulator.outcome import Outcome, SimulationProgress
from ebbtide.simulator.parallel.seed_messages import SeedTask
from ebbtide.simulator.parallel.seed_processes import simulate_seeds
from tests.fakes.simulated_outcomes import outcome
from tests.support.waiting import wait_until

STUB = (sys.executable, "-m", "tests.fakes.stub_simulation")


async def simulated(*tasks: SeedTask, jobs: int = 2) -> tuple[list[Outcome], list[tuple[int, SimulationProgress]]]:
    told: list[tuple[int, SimulationProgress]] = []
    outcomes = await simulate_seeds(
        tasks, jobs=jobs, say=lambda number, progress: told.append((number, progress)), program=STUB
    )
    return outcomes, told


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_outcomes_come_in_the_order_of_the_tasks_and_progress_names_its_task() -> None:
    outcomes, told = await simulated(*(SeedTask(scenario="steps", seed=seed, spans=seed == 3) for seed in (3, 1, 2)))
    whole = [outcome(seed, scenario="steps", slower=1.0 + seed) for seed in (3, 1, 2)]
    assert outcomes == [whole[0], *(replace(one, spans=[]) for one in whole[1:])]
    assert {number for number, _ in told} == {0, 1, 2}
    assert {progress.share for _, progress in told} == {0.25}


async def test_a_talkative_simulation_is_heard_seldom_and_what_it_prints_is_no_message(
    capfd: pytest.CaptureFixture[str],
) -> None:
    (only,), told = await simulated(SeedTask(scenario="chatty"))
    assert capfd.readouterr() == ("", "a library prints this to stdout\n")
    assert only.seed == 0
    assert 1 <= len(told) < 1000


async def test_refused_input_is_refused_with_its_own_words_and_the_others_end() -> None:
    with pytest.raises(InvalidRequest, match=r"^x\.toml:3:1: must be above 0; write 1 or more$"):
        await simulated(SeedTask(scenario="refused"), SeedTask(scenario="steps"))


async def test_a_process_that_fails_is_named_with_its_status() -> None:
    with pytest.raises(EbbtideError, match="crash with seed 5 ended with status 7 and without an outcome"):
        await simulated(SeedTask(scenario="crash", seed=5))


@pytest.mark.parametrize("mode", ["endless", "deaf"])
async def test_a_cancelled_simulation_leaves_no_process_behind(tmp_path: Path, mode: str) -> None:
    tasks = [SeedTask(scenario=str(tmp_path / mode), seed=seed) for seed in range(3)]
    running = asyncio.create_task(simulated(*tasks, jobs=2))
    await wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, what="two of three processes")
    pids = [int(path.read_text()) for path in sorted(tmp_path.glob("*.pid"))]  # noqa: ASYNC240 - a small folder
    assert all(map(alive, pids))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(map(alive, pids))
