"""What the driver's host does to verifiers' processes costs no session; what happens during a call drops it."""

from collections.abc import Sequence
from typing import Any, Final

import pytest

from ebbtide.driver import verdicts
from ebbtide.driver.environment_host import BranchText, HostReply, LoadVerifier
from ebbtide.driver.host_process import HostEnded, HostProcess
from ebbtide.driver.settings import DriverSettings
from ebbtide.driver.verdicts import VerdictFailed, VerifierProcesses

SESSION: Final = [BranchText((("x", True),), truncated=False)]


class ScriptedHost:
    """Starts processes that can be killed, unless it is told what a start or a load meets."""

    def __init__(self, *faults: Exception) -> None:
        self.faults, self.crashes = list(faults), False
        self.started: list[ScriptedProcess] = []

    async def start(self, _settings: Any, _plan: Any) -> "ScriptedProcess":
        if self.faults and isinstance(self.faults[0], OSError):
            raise self.faults.pop(0)
        self.started.append(ScriptedProcess(self))
        return self.started[-1]


class ScriptedProcess:
    def __init__(self, host: ScriptedHost) -> None:
        self.host, self.dead, self.sessions = host, False, 0

    async def call(self, request: Any, *, timeout_s: float) -> HostReply:
        if isinstance(request, LoadVerifier):
            if self.host.faults:
                raise self.host.faults.pop(0)
            return HostReply()
        self.sessions += 1
        if self.dead or self.host.crashes:
            raise HostEnded("the environment's process ended with SIGKILL")
        return HostReply(reward=1.0)

    async def end(self) -> int:
        self.dead = True
        return 0


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ScriptedHost:
    made = ScriptedHost()
    monkeypatch.setattr(HostProcess, "start", made.start)
    monkeypatch.setattr(verdicts, "_FIRST_PAUSE_S", 0.0)
    return made


async def loaded() -> VerifierProcesses:
    plan: Any = None
    processes = VerifierProcesses({"v": "a:b"}, DriverSettings(), plan)
    await processes.load()
    return processes


async def test_a_session_that_meets_a_process_killed_while_idle_is_judged_by_another(host: ScriptedHost) -> None:
    processes = await loaded()
    host.started[0].dead = True
    assert await processes.reward("v", SESSION, b"{}", 5.0) == 1.0
    assert await processes.reward("v", SESSION, b"{}", 5.0) == 1.0
    assert [one.sessions for one in host.started] == [1, 2]


@pytest.mark.parametrize(
    "faults",
    [
        (BlockingIOError(11, "Resource temporarily unavailable"), OSError(12, "Cannot allocate memory")),
        (HostEnded("the environment's process ended with SIGKILL"),),
    ],
)
async def test_a_session_waits_while_the_host_has_no_process(host: ScriptedHost, faults: Sequence[Exception]) -> None:
    processes = await loaded()
    host.started[0].dead, host.faults = True, list(faults)
    assert await processes.reward("v", SESSION, b"{}", 5.0) == 1.0
    assert not host.faults


async def test_a_verifier_that_ends_its_process_drops_the_session_after_one_more_try(host: ScriptedHost) -> None:
    processes = await loaded()
    host.crashes = True
    with pytest.raises(VerdictFailed, match="SIGKILL") as failed:
        await processes.reward("v", SESSION, b"{}", 5.0)
    assert failed.value.reason == "verifier_failed"
    assert [one.sessions for one in host.started] == [1, 1]
