"""Runs verifiers in processes that have none of the driver's rights, as they may crash, hang or be hostile.

Invariant: a process serves one call at a time, and loads one verifier for its whole life. One that failed in any other
way than by an exception is ended. All of them die with the driver; sessions without a verdict come again. A session is
dropped for what happens during its call, never because the driver's host has no process for it: it waits for one.
"""

import asyncio
import contextlib
from collections import defaultdict
from typing import Final

from ebbtide import telemetry
from ebbtide.driver.environment_calls import LOADING_S
from ebbtide.driver.environment_threads import TookTooLong
from ebbtide.driver.host_process import HostEnded, HostProcess, IsolationRefused
from ebbtide.driver.isolation.host_messages import BranchText, HostPlan, HostReply, LoadVerifier, VerifySession
from ebbtide.driver.settings import DriverSettings
from ebbtide.environments.session_verifiers import checked_reward
from ebbtide.errors import InvalidRequest
from ebbtide.rpc.backoff import pauses
from ebbtide.types.rollout import DropReason

log = telemetry.get_logger(__name__)
#: Pauses between tries to start a process. A host that lacks memory or processes for a moment has them soon; one that
#: lacks them for long is not kept busy.
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 30.0
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
        """What a verifier gives a session. Raises `VerdictFailed`, also after `limit_s` seconds of its call. Waits
        while no process can be started.
        """
        if name not in self._verifiers:
            raise VerdictFailed(f"the run has no verifier {name!r}")
        if sum(len(text) for branch in branches for text, _ in branch.passages) > MOST_TEXT // 4:
            raise VerdictFailed(f"the session has more than {MOST_TEXT // 4} characters, the most that a verifier gets")
        session = VerifySession(tuple(branches), data)
        for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                async with self._places:
                    return await self._judged(name, session, limit_s)
            except InvalidRequest as error:  # it could be loaded when the run began
                log.warning("a session waits for a process of its verifier", verifier=name, why=str(error))
            await asyncio.sleep(pause_s)
        raise AssertionError("pauses do not end")

    async def close(self) -> None:
        idle = [process for processes in self._idle.values() for process in processes]
        self._idle.clear()
        await asyncio.gather(*(process.end() for process in idle))

    async def _judged(self, name: str, session: VerifySession, limit_s: float) -> float:
        """Raises `VerdictFailed`, and `InvalidRequest` if no process can be started."""
        if self._idle[name]:
            # The host may have killed it while it was idle, so its end does not tell of this session.
            with contextlib.suppress(HostEnded):
                return await self._asked(name, self._idle[name].pop(), session, limit_s)
        process = await self._start(name)
        try:
            return await self._asked(name, process, session, limit_s)
        except HostEnded as error:
            raise VerdictFailed(str(error)) from None

    async def _asked(self, name: str, process: HostProcess, session: VerifySession, limit_s: float) -> float:
        try:
            reply = await process.call(session, timeout_s=limit_s)
        except TookTooLong:
            await process.end()
            raise VerdictFailed(f"it took more than {limit_s:g} s", DropReason.VERIFIER_TIMEOUT) from None
        return await self._told(name, process, reply)

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
