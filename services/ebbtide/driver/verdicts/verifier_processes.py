"""Runs verifiers in processes that have none of the driver's rights, as they may crash, hang or be hostile.

Invariant: a process serves one call at a time, and loads one verifier for its whole life. One that failed in any other
way than by an exception is ended. All of them die with the driver; sessions without a verdict come again.
"""

import asyncio
from collections import defaultdict
from typing import Final

from ebbtide.driver.environment_calls import LOADING_S
from ebbtide.driver.environment_threads import TookTooLong
from ebbtide.driver.host_process import HostEnded, HostProcess, IsolationRefused
from ebbtide.driver.isolation.host_messages import BranchText, HostPlan, HostReply, LoadVerifier, VerifySession
from ebbtide.driver.settings import DriverSettings
from ebbtide.environments.session_verifiers import checked_reward
from ebbtide.errors import InvalidRequest
from ebbtide.types.rollout import DropReason

#: What a session's texts may take, so that they fit into a frame.
MOST_TEXT: Final = 12 << 20


class VerdictFailed(Exception):
    """No reward came of a session; `reason` is why it is dropped."""

    def __init__(self, text: str, reason: str = DropReason.VERIFIER_FAILED) -> None:
        super().__init__(text)
        self.reason = reason


class VerifierProcesses:
    """Runs a run's verifiers in at most `environment_threads` processes."""

    def __init__(self, verifiers: dict[str, str], settings: DriverSettings, plan: HostPlan) -> None:
        """`verifiers`: name -> `package.module:function`. `plan`: how processes are made."""
        self._verifiers, self._settings, self._plan = verifiers, settings, plan
        self._places = asyncio.Semaphore(settings.environment_threads)
        self._idle: defaultdict[str, list[HostProcess]] = defaultdict(list)

    async def load(self) -> None:
        """Start a process of each verifier. Raises `InvalidRequest` for one that cannot be loaded."""
        for name in self._verifiers:
            async with self._places:
                self._idle[name].append(await self._start(name))
                await self._shrink()

    async def reward(self, name: str, branches: list[BranchText], data: bytes, limit_s: float) -> float:
        """What a verifier gives a session. Raises `VerdictFailed`, also after `limit_s` seconds."""
        if name not in self._verifiers:
            raise VerdictFailed(f"the run has no verifier {name!r}")
        if sum(len(text) for branch in branches for text, _ in branch.passages) > MOST_TEXT // 4:
            raise VerdictFailed(f"the session has more than {MOST_TEXT // 4} characters, the most that a verifier gets")
        async with self._places:
            process = self._idle[name].pop() if self._idle[name] else await self._started(name)
            try:
                reply = await process.call(VerifySession(tuple(branches), data), timeout_s=limit_s)
            except TookTooLong:
                await process.end()
                raise VerdictFailed(f"it took more than {limit_s:g} s", DropReason.VERIFIER_TIMEOUT) from None
            except HostEnded as error:
                raise VerdictFailed(str(error)) from None
            return await self._told(name, process, reply)

    async def close(self) -> None:
        idle = [process for processes in self._idle.values() for process in processes]
        self._idle.clear()
        await asyncio.gather(*(process.end() for process in idle))

    async def _told(self, name: str, process: HostProcess, reply: HostReply) -> float:
        if reply.exhausted:
            await process.end()
            raise VerdictFailed(f"{reply.error}: the verifier needs more than environments.memory_mib allows")
        self._idle[name].append(process)
        await self._shrink()
        if reply.error:
            raise VerdictFailed(reply.error)
        try:  # the process is not trusted
            return checked_reward(reply.reward)
        except (TypeError, ValueError) as error:
            raise VerdictFailed(f"it gave no reward: {error}") from None

    async def _started(self, name: str) -> HostProcess:
        try:
            return await self._start(name)
        except InvalidRequest as error:
            raise VerdictFailed(str(error)) from None

    async def _start(self, name: str) -> HostProcess:
        field = f"environment.verifiers.{name}"
        try:
            process = await HostProcess.start(self._settings, self._plan)
        except IsolationRefused as error:
            text = f"has to run isolated, and the driver's host does not allow it ({error}); let it, or see "
            raise InvalidRequest(f"{text}environments.trust of the driver", field=field) from None
        except (HostEnded, TookTooLong, OSError) as error:
            raise InvalidRequest(f"no process could be started: {error}", field=field) from None
        try:
            reply = await process.call(LoadVerifier(self._verifiers[name]), timeout_s=LOADING_S)
        except (HostEnded, TookTooLong) as error:
            await process.end()
            raise InvalidRequest(f"cannot be loaded: {error or 'it takes too long'}", field=field) from None
        except BaseException:
            await process.end()
            raise
        if reply.error:
            await process.end()
            raise InvalidRequest(f"cannot be loaded: {reply.error}", field=field)
        return process

    async def _shrink(self) -> None:
        """Ends idle processes beyond as many as may work at once."""
        while sum(map(len, self._idle.values())) > self._settings.environment_threads:
            fullest = max(self._idle, key=lambda name: len(self._idle[name]))
            await self._idle[fullest].pop(0).end()
