"""Responses are scored beside other steps: slow ones cost their own episode."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.driver.environment_processes import EnvironmentProcesses, ProcessEpisode
from ebbtide.driver.environments import EnvironmentFailed, EpisodeClock
from ebbtide.driver.host_process import TookTooLong, host_plan
from ebbtide.driver.scoring import LEARNT, CpuWaits, OutOfTime
from ebbtide.driver.settings import DriverSettings, EnvironmentSettings
from ebbtide.environments import StepResult
from ebbtide.types.run import EnvironmentSpec, RunSpec, TailSpec
from tests.support.waiting import wait_until

LIMIT_S = 60.0
PLAIN = TailSpec()
STUCK = "sleep 3600"
Make = Callable[..., EnvironmentProcesses]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[EnvironmentProcesses] = []

    def processes(*, scoring: int = 1, places: int = 1, tail: TailSpec = PLAIN, **params: Any) -> EnvironmentProcesses:
        settings = DriverSettings(
            environment_threads=places,
            scoring_processes=scoring,
            environments=EnvironmentSettings(paths=(str(Path(__file__).parent),), memory_mib=512, trust=True),
        )
        environment = EnvironmentSpec(name="scored_environments:ScoredSource", params=params)
        spec = RunSpec(name="run", model="model", environment=environment, tail=tail)
        made.append(EnvironmentProcesses(spec, settings, host_plan(settings)))
        return made[-1]

    yield processes
    await asyncio.gather(*(one.close() for one in made))


async def opened(environments: EnvironmentProcesses, index: int = 0, split: str = "train") -> ProcessEpisode:
    episode = environments.episode(split, index)  # type: ignore[arg-type]
    await episode.reset(EpisodeClock(LIMIT_S))
    return episode


async def scored(environments: EnvironmentProcesses, response: str, index: int = 0, split: str = "train") -> StepResult:
    episode = await opened(environments, index, split)
    try:
        return await episode.step(EpisodeClock(LIMIT_S), response, last=True)
    finally:
        episode.close()


async def cancelled(task: "asyncio.Task[Any]") -> None:
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stuck_scorer_holds_up_neither_turns_nor_other_scorings(make: Make) -> None:
    environments = make(scoring=2)
    stuck = asyncio.create_task(scored(environments, STUCK))
    assert (await scored(environments, "burn 0 0.5")).reward == 0.5
    episode = await opened(environments)
    assert (await episode.step(EpisodeClock(LIMIT_S), "turn 0")).messages[0].content == "turn"
    assert (await episode.step(EpisodeClock(LIMIT_S), "burn 0", last=True)).info["turns"] == 2
    await cancelled(stuck)
    assert environments.scorings() == {"scored": 2.0}


async def test_scorings_take_the_processes_that_are_free_in_the_order_of_arrival(make: Make) -> None:
    environments = make(scoring=2)
    stuck = asyncio.create_task(scored(environments, STUCK))
    results = await asyncio.gather(*(scored(environments, "burn 0.01") for _ in range(8)))
    assert len({one.info["pid"] for one in results}) == 1
    await cancelled(stuck)


async def test_steps_that_always_end_their_episodes_are_scored_apart_once_that_is_known(make: Make) -> None:
    environments = make()
    where = []
    for _ in range(LEARNT + 2):
        episode = await opened(environments)
        where.append((await episode.step(EpisodeClock(LIMIT_S), "burn 0")).info["pid"])
        episode.close()
    assert len(set(where[:LEARNT])) == 1
    assert where[LEARNT] != where[0]
    episode = await opened(environments)
    assert (await episode.step(EpisodeClock(LIMIT_S), "turn 0")).messages  # taken for a scoring, and it was none
    assert (await episode.step(EpisodeClock(LIMIT_S), "turn 0")).messages[0].content == "turn turn"


async def test_a_scoring_out_of_time_gets_the_environments_reward_or_fails_its_episode(make: Make) -> None:
    tail = TailSpec(reward_timeout_s=0.3)
    paying = make(tail=tail, reward_out_of_time=-0.5)
    cut = await scored(paying, STUCK)
    assert (cut.reward, cut.done, cut.info) == (-0.5, True, {"out_of_time": 1.0})
    assert (await scored(paying, "burn 0")).reward == 1.0
    assert paying.scorings() == {"out_of_time": 1.0, "scored": 1.0}
    silent = make(tail=tail)
    with pytest.raises(OutOfTime, match=r"the reward took more than 0\.3"):
        await scored(silent, STUCK)


async def test_without_a_limit_of_its_own_a_scoring_has_the_episodes_time(make: Make) -> None:
    environments = make()
    episode = await opened(environments)
    with pytest.raises(TookTooLong) as cut:
        await episode.step(EpisodeClock(0.2), STUCK, last=True)
    assert not isinstance(cut.value, OutOfTime)


async def test_a_crash_fails_its_own_scoring_alone(make: Make) -> None:
    environments = make()
    assert (await scored(environments, "burn 0")).reward == 1.0
    with pytest.raises(EnvironmentFailed, match="status 3"):
        await scored(environments, "exit 0")
    assert (await scored(environments, "burn 0")).reward == 1.0


async def test_waits_for_a_cpu_are_told_from_computing() -> None:
    """Two processes that share one CPU each wait about half of the time; one that sleeps does not wait."""
    code = "import os, time\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint('at', flush=True)\n"
    busy = [await _python(code + "while True: pass") for _ in range(2)]
    idle = await _python(code + "time.sleep(3600)")
    try:
        waits = {one: CpuWaits(one.pid) for one in (*busy, idle)}
        if not waits[busy[0]]._before:
            pytest.skip("this host does not tell how long tasks wait for a CPU")
        await wait_until(lambda: min(waits[one].since_s() for one in busy) > 0.2)
        assert waits[idle].since_s() < 0.2
    finally:
        for one in (*busy, idle):
            one.kill()
            await one.wait()


async def _python(code: str) -> asyncio.subprocess.Process:
    import sys

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    return process
