"""One user's environments at their limits of memory and time, while another user's play on."""

import asyncio
from pathlib import Path

import pytest

from ebbtide.driver.environment_processes import EnvironmentProcesses
from ebbtide.driver.environments import EnvironmentFailed, EpisodeClock
from ebbtide.driver.host_process import TookTooLong, host_plan
from tests.integration.trainer.test_isolated_environments import LIMIT_S, SPEC, done, opened, settings

ROUNDS = 3


def environments(folder: Path) -> EnvironmentProcesses:
    folder.mkdir()
    made = settings(folder, trust=True)
    return EnvironmentProcesses(SPEC, made, host_plan(made))


async def test_a_user_whose_environments_are_at_their_limits(tmp_path: Path) -> None:
    greedy, other = environments(tmp_path / "greedy"), environments(tmp_path / "other")
    try:
        playing = await opened(other)
        for number in range(ROUNDS):
            hoarding, looping = await opened(greedy), await opened(greedy)
            with pytest.raises(EnvironmentFailed, match=r"MemoryError.*environments\.memory_mib"):
                await done(hoarding, "hoard")
            looped = asyncio.create_task(done(looping, "loop", limit_s=0.5))
            await asyncio.sleep(0)  # the loop is asked for
            said = (await playing.step(EpisodeClock(LIMIT_S), "count")).messages[1].content
            assert said == str(number + 1)
            with pytest.raises(TookTooLong):
                await looped
    finally:
        await greedy.close()
        await other.close()
