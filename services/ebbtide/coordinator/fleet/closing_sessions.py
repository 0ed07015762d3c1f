"""Waits for the last tokens of lost workers before their attempts end.

Invariant: a session is here from its loss until its append stream has ended, `DRAIN_S` at most; its append stream is
served meanwhile. Lost with the process: the workers send again.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ebbtide.coordinator.state.running_attempt import OrphanedAttempt, RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession

#: How long a lost worker's last tokens may take to be stored before its attempts end.
DRAIN_S: Final = 0.1


class ClosingSessions:
    def __init__(self) -> None:
        self._closing: dict[str, WorkerSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, session_id: str) -> WorkerSession | None:
        """A session that is over, with tokens still to be stored."""
        return self._closing.get(session_id)

    def add(
        self, session: WorkerSession, lost: Sequence[RunningAttempt], orphaned: OrphanedAttempt, due: float
    ) -> None:
        """Let the `lost` attempts be `due` once the append stream of their worker has ended."""
        self._closing[session.session_id] = session
        task = asyncio.create_task(self._drain(session, lost, orphaned, due), name=f"drain {session.worker_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(
        self, session: WorkerSession, lost: Sequence[RunningAttempt], orphaned: OrphanedAttempt, due: float
    ) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await session.drained.wait()
        self._closing.pop(session.session_id, None)
        for attempt in lost:
            if attempt.orphaned is orphaned:
                attempt.set_due(due)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
