"""Reward functions and programs of a run's data set: whatever they do, they cost their own episode alone."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebbtide.driver.environment_processes import EnvironmentProcesses, ProcessEpisode
from ebbtide.driver.environments import EnvironmentFailed, EpisodeClock
from ebbtide.driver.host_process import HostProcess, IsolationRefused, TookTooLong
from ebbtide.driver.service import environment_plan
from ebbtide.driver.settings import DriverSettings, EnvironmentSettings
from ebbtide.environments.dataset import with_local_rows
from ebbtide.environments.problem_splits import split_of
from ebbtide.errors import InvalidRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec

LIMIT_S = 30.0
QUESTIONS = [question for question in map(str, range(40)) if split_of(question) == "train"]


async def processes(
    tmp_path: Path, answer: Any = "yes", way: str = "another user", **params: Any
) -> EnvironmentProcesses:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": question, "answer": answer}) + "\n" for question in QUESTIONS))
    environment = EnvironmentSpec(name="dataset", params=with_local_rows({"data": str(data), **params}))
    spec = RunSpec(name="run", model="model", environment=environment)
    settings = DriverSettings(
        environment_threads=1,
        environments=EnvironmentSettings(paths=(str(Path(__file__).parent),), memory_mib=768),
    )
    plan = environment_plan(spec, settings)
    if way == "a user namespace":
        plan = msgspec.structs.replace(plan, user="")
    try:
        await (await HostProcess.start(settings, plan)).end()
    except IsolationRefused as refused:
        pytest.skip(f"this host allows no isolation: {refused}")
    return EnvironmentProcesses(spec, settings, plan)


@pytest.fixture
async def rewarding(tmp_path: Path) -> AsyncIterator[EnvironmentProcesses]:
    made = await processes(tmp_path, reward="hostile_rewards:reward")
    yield made
    await made.close()


async def opened(environments: EnvironmentProcesses, index: int = 0) -> ProcessEpisode:
    episode = environments.episode("train", index)
    assert (await episode.reset(EpisodeClock(LIMIT_S)))[0].content in QUESTIONS
    return episode


async def scored(episode: ProcessEpisode, response: str, limit_s: float = LIMIT_S, *, last: bool = False) -> Any:
    return (await episode.step(EpisodeClock(limit_s), response, last=last)).reward


@pytest.mark.parametrize("apart", [False, True])
async def test_each_way_to_fail_fails_its_episode_and_those_beside_it_get_their_rewards(
    rewarding: EnvironmentProcesses, apart: bool
) -> None:
    """With `apart` in the processes that score last responses, else in the one that has all episodes."""
    failing = ["leave", "leave at once", "hoard", "raise", "crash", "recurse", "huge", "verbose", "nan", "text"]
    failing += ["nothing", "large"]
    for index, deed in enumerate(failing):
        hostile, other = await opened(rewarding, index), await opened(rewarding, index)
        with pytest.raises(EnvironmentFailed):
            await scored(hostile, deed, last=apart)
        assert await scored(other, "yes", last=apart) == 1.0
    looping, other = await opened(rewarding), await opened(rewarding)
    with pytest.raises(TookTooLong):
        await scored(looping, "loop", limit_s=0.3, last=apart)
    assert await scored(other, "no", last=apart) == 0.0


async def test_a_pattern_that_never_ends_is_cut(tmp_path: Path) -> None:
    made = await processes(tmp_path, reward="regex", reward_params={"pattern": "(a|a)*b"})
    try:
        with pytest.raises(TookTooLong):
            await scored(await opened(made), "a" * 64, limit_s=0.5)
        assert await scored(await opened(made), "yesb") == 0.0
    finally:
        await made.close()


@pytest.mark.parametrize("way", ["another user", "a user namespace"])
async def test_programs_are_tested_and_neither_read_nor_end_what_scores_others(tmp_path: Path, way: str) -> None:
    tests, limits = ["assert f(1) == 2"], {"timeout_s": 3.0, "memory_mib": 256}
    made = await processes(tmp_path, tests, way, reward="code", reward_params=limits)
    good = "def f(x): return x + 1"
    try:
        other = await opened(made)
        assert await scored(await opened(made), good) == 1.0
        for reaching in (
            "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
            "import socket; socket.create_connection(('1.1.1.1', 53))",
            "open('/etc/passwd', 'a')",
        ):
            assert await scored(await opened(made), f"{reaching}\n{good}") == 0.0
        assert await scored(await opened(made), f"while True: pass\n{good}") == 0.0
        with pytest.raises(EnvironmentFailed):
            await scored(await opened(made), f"import os\nos.kill(os.getppid(), 9)\n{good}")
        assert await scored(other, good) == 1.0
    finally:
        await made.close()


async def test_a_process_sees_the_rows_of_its_run_and_no_file_beside_them(tmp_path: Path) -> None:
    (tmp_path / "beside.jsonl").write_text('{"prompt": "0", "answer": "0"}\n')
    made = await processes(tmp_path, reward="hostile_rewards:reward")
    try:
        assert await scored(await opened(made), "yes") == 1.0
        spec = msgspec.structs.replace(made._spec.environment, params={"data": str(tmp_path / "beside.jsonl")})
        made._spec = msgspec.structs.replace(made._spec, environment=spec)
        with pytest.raises(InvalidRequest, match="is no file that can be read"):
            await made.start()
    finally:
        await made.close()
