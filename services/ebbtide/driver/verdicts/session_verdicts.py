"""Gives the sessions of a run that wait for their verdicts a reward, or drops them.

Invariant: the coordinator keeps a session until its verdict is posted, and drops it after a time. So a driver that dies
loses nothing: the next one reads all that wait again. A verdict that is posted twice counts once.
"""

import asyncio
from contextlib import aclosing
from typing import Final

from ebbtide import telemetry
from ebbtide.claimed_runs.conversation import Conversations
from ebbtide.client import Lease
from ebbtide.driver.verdicts.session_text import branch_texts, client_data
from ebbtide.driver.verdicts.verifier_processes import VerdictFailed, VerifierProcesses
from ebbtide.errors import NotFound
from ebbtide.runtime import race
from ebbtide.types.session import UnverifiedSession

log = telemetry.get_logger(__name__)
#: Sessions that are verified or wait for a process here. Further ones stay at the coordinator: each may take megabytes.
_AT_ONCE: Final = 16
VERDICTS = telemetry.counter(
    "driver_verdicts_total", "sessions that verifiers judged: ok, or why they were dropped", ("outcome",)
)


class SessionVerdicts:
    """Verifies the sessions of one run."""

    def __init__(
        self, lease: Lease, processes: VerifierProcesses, conversations: Conversations, *, limit_s: float
    ) -> None:
        """`limit_s`: of one verifier's call."""
        self._lease, self._processes, self._conversations = lease, processes, conversations
        self._limit_s = limit_s

    async def run(self) -> None:
        """Verifies sessions as they end, until the lease is lost or this is cancelled."""
        waiting: asyncio.Queue[UnverifiedSession] = asyncio.Queue(1)
        await race(self._read(waiting), *(self._work(waiting) for _ in range(_AT_ONCE)))

    async def _read(self, waiting: "asyncio.Queue[UnverifiedSession]") -> None:
        async with aclosing(self._lease.unverified()) as sessions:
            async for session in sessions:
                await waiting.put(session)
        await self._lease.lost.wait()  # the run has ended, which others see to

    async def _work(self, waiting: "asyncio.Queue[UnverifiedSession]") -> None:
        while True:
            await self._judge(await waiting.get())

    async def _judge(self, session: UnverifiedSession) -> None:
        try:
            branches = await asyncio.to_thread(branch_texts, session, self._conversations)
            data = client_data(session)
            reward = await self._processes.reward(session.verifier, branches, data, self._limit_s)
        except VerdictFailed as error:
            VERDICTS.labels(error.reason).inc()
            log.warning("a verifier failed", session_id=session.session_id, verifier=session.verifier, why=str(error))
            await self._post(session, drop_reason=error.reason)
        else:
            VERDICTS.labels("ok").inc()
            await self._post(session, reward=reward)

    async def _post(self, session: UnverifiedSession, *, reward: float | None = None, drop_reason: str = "") -> None:
        try:
            await self._lease.post_verdict(session.session_id, reward=reward, drop_reason=drop_reason)
        except NotFound:
            log.info("the session was forgotten before its verdict", session_id=session.session_id)
