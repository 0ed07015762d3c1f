"""Code of environments that are not built in: it reaches no token, and ends nothing but its own episode."""

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.driver.environment_processes import EnvironmentProcesses, ProcessEpisode
from ebbtide.driver.environments import EnvironmentFailed, EpisodeClock
from ebbtide.driver.host_process import HostProcess, IsolationRefused, TookTooLong, host_plan
from ebbtide.driver.settings import DriverSettings, EnvironmentSettings
from ebbtide.errors import InvalidRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec

TOKEN = "the-token-of-the-driver"
#: Any integer may come in a spec.
PARAMS = {"large": 1 << 100}
SPEC = RunSpec(
    name="run", model="model", environment=EnvironmentSpec(name="isolation_probe:ProbeSource", params=PARAMS)
)
#: Starts of Python included.
LIMIT_S = 20.0


def settings(tmp_path: Path, **environments: Any) -> DriverSettings:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    paths = (str(Path(__file__).parent),)
    return DriverSettings(
        security=ClientSecurity(token_file=str(token)),
        environment_threads=1,
        environments=EnvironmentSettings(paths=paths, memory_mib=512, **environments),
    )


async def isolated(made: DriverSettings, way: str) -> EnvironmentProcesses:
    """Environments isolated in this way, or a skip where this host does not allow it."""
    plan = host_plan(made)
    if way == "a user namespace":
        plan = msgspec.structs.replace(plan, user="")
    elif not plan.user:
        pytest.skip("only root may become another user")
    try:
        await (await HostProcess.start(made, plan)).end()
    except IsolationRefused as refused:
        pytest.skip(f"this host does not allow {way}: {refused}")
    return EnvironmentProcesses(SPEC, made, plan)


@pytest.fixture(params=["another user", "a user namespace"])
async def environments(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[EnvironmentProcesses]:
    monkeypatch.setenv("EBBTIDE_TOKEN", TOKEN)
    made = await isolated(settings(tmp_path), request.param)
    yield made
    await made.close()


@pytest.fixture
async def trusted(tmp_path: Path) -> AsyncIterator[EnvironmentProcesses]:
    made = settings(tmp_path, trust=True)
    environments = EnvironmentProcesses(SPEC, made, host_plan(made))
    yield environments
    await environments.close()


async def opened(environments: EnvironmentProcesses) -> ProcessEpisode:
    episode = environments.episode("train", 0)
    assert [message.content for message in await episode.reset(EpisodeClock(LIMIT_S))] == ["begin"]
    return episode


async def done(episode: ProcessEpisode, deed: str, limit_s: float = LIMIT_S) -> str:
    return (await episode.step(EpisodeClock(limit_s), deed)).messages[0].content


async def test_the_token_is_in_no_file_variable_or_process_that_the_code_reaches(
    environments: EnvironmentProcesses, tmp_path: Path
) -> None:
    episode = await opened(environments)
    assert TOKEN in (tmp_path / "token").read_text()
    for deed in (f"read {tmp_path / 'token'}", f"read /proc/{os.getpid()}/environ", f"kill {os.getpid()}"):
        with pytest.raises(EnvironmentFailed, match=r"NotFound|PermissionError|ProcessLookup"):
            await done(episode, deed)
    for deed in ("variables", "search self", "search-all", f"search {os.getpid()}", f"search {os.getppid()}"):
        said = await done(episode, deed)
        assert TOKEN not in said
        assert "EBBTIDE" not in said


async def test_nothing_of_an_environments_folder_runs_before_the_isolation(tmp_path: Path) -> None:
    made = settings(tmp_path, trust=True)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    shown = msgspec.structs.replace(made.environments, paths=(str(folder), *made.environments.paths))
    made = msgspec.structs.replace(made, environments=shown)
    await (await HostProcess.start(made, host_plan(made))).end()
    assert not (tmp_path / "ran").exists()


async def test_a_token_in_a_folder_that_the_code_may_read_is_covered(tmp_path: Path) -> None:
    made = settings(tmp_path)
    named = made.environments.paths
    shown = msgspec.structs.replace(made.environments, paths=(*named, str(tmp_path)))
    environments = await isolated(msgspec.structs.replace(made, environments=shown), "a user namespace")
    try:
        assert not await done(await opened(environments), f"read {tmp_path / 'token'}")
    finally:
        await environments.close()


async def test_the_code_changes_no_file_and_reaches_no_port_of_the_host(environments: EnvironmentProcesses) -> None:
    episode = await opened(environments)
    for path in (__file__, "/etc/passwd", "/usr/lib/new"):
        with pytest.raises(EnvironmentFailed, match=r"OSError|PermissionError"):
            await done(episode, f"write {path}")
    assert await done(episode, "write /tmp/own") == "7"
    with pytest.raises(EnvironmentFailed, match=r"PermissionError|Invalid argument"):
        await done(episode, "root")
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(EnvironmentFailed, match="Refused"):
        await done(episode, "connect {}:{}".format(*server.getsockname()))


async def test_native_code_that_crashes_fails_its_own_episode_only(environments: EnvironmentProcesses) -> None:
    """All three share one process. What the others had played is played again in the next one."""
    first, crashing, last = [await opened(environments) for _ in range(3)]
    await done(first, "count")
    with pytest.raises(EnvironmentFailed, match="ended with SIGSEGV"):
        await done(crashing, "segfault")
    result = await first.step(EpisodeClock(LIMIT_S), "count")
    assert result.messages[1].content == "2"
    assert not await done(last, "count")


async def test_memory_and_time_are_limited_and_the_error_says_so(environments: EnvironmentProcesses) -> None:
    hoarding, looping, other = [await opened(environments) for _ in range(3)]
    with pytest.raises(EnvironmentFailed, match=r"MemoryError.*environments\.memory_mib"):
        await done(hoarding, "hoard")
    with pytest.raises(TookTooLong):
        await done(looping, "loop", limit_s=0.2)
    assert not await done(other, "count")


async def test_a_process_that_breaks_the_conversation_fails_its_episode(environments: EnvironmentProcesses) -> None:
    episode = await opened(environments)
    own = await done(episode, "sockets")
    with pytest.raises(EnvironmentFailed, match="the environment's process gave no answer"):
        await done(episode, f"talk {own}")


async def test_trusted_code_has_the_drivers_files_and_still_ends_nothing_but_its_episode(
    trusted: EnvironmentProcesses, tmp_path: Path
) -> None:
    episode, other = [await opened(trusted) for _ in range(2)]
    assert TOKEN in await done(episode, f"read {tmp_path / 'token'}")
    with pytest.raises(EnvironmentFailed, match="ended with SIGSEGV"):
        await done(episode, "segfault")
    with pytest.raises(EnvironmentFailed, match="MemoryError"):
        await done(episode, "hoard")
    assert not await done(other, "count")


async def test_what_code_leaves_behind_ends_with_its_process(trusted: EnvironmentProcesses, tmp_path: Path) -> None:
    """Without namespaces; with them the kernel does it."""
    orphan = int(await done(await opened(trusted), "orphan"))
    assert psutil.pid_exists(orphan)
    await trusted.close()
    assert not psutil.pid_exists(orphan)


@pytest.mark.parametrize(("network", "warned"), [(False, True), (True, False)])
async def test_where_the_network_stays_open_the_driver_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    network: bool,
    warned: bool,
) -> None:
    """As in a container, whose root may make no namespaces."""
    made = settings(tmp_path, network=network)
    if not host_plan(made).user or shutil.which("setpriv") is None:
        pytest.skip("only root may become another user, and gives up rights by setpriv")
    begin = subprocess.Popen

    def without_rights(command: list[str], **options: Any) -> Any:
        return begin(["setpriv", "--bounding-set", "-sys_admin", *command], **options)

    monkeypatch.setattr("ebbtide.driver.host_process.subprocess.Popen", without_rights)
    await (await HostProcess.start(made, host_plan(made))).end()
    assert ("environment code has this host's network" in capfd.readouterr().out) == warned


async def test_where_the_host_allows_no_isolation_the_error_names_the_setting(tmp_path: Path) -> None:
    made = settings(tmp_path)
    plan = msgspec.structs.replace(host_plan(made), user="no-such-user")
    environments = EnvironmentProcesses(SPEC, made, plan)
    with pytest.raises(InvalidRequest, match=r"environments\.trust = true") as refused:
        await environments.load()
    assert refused.value.field == "environment.name"
    await environments.close()


async def test_a_cancelled_call_leaves_no_process_that_answers_the_next_one_wrongly(
    trusted: EnvironmentProcesses,
) -> None:
    episode, other = [await opened(trusted) for _ in range(2)]
    looping = asyncio.create_task(done(episode, "loop"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(looping), 0.2)
    looping.cancel()
    await asyncio.wait({looping})
    assert not await done(other, "count")
