"""The coordinator's own events for runs' watchers, written in the background: worth a try, and holding up nobody."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from ebbtide import telemetry
from ebbtide.coordinator.state.coordinator_state import CoordinatorState, RunState, WorkerSession
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.state.worker_reports import InstalledReport
from ebbtide.errors import EbbtideError
from ebbtide.store.store import Store
from ebbtide.types.run import RunEvent

log = telemetry.get_logger(__name__)


class RunEventWriter:
    def __init__(self, state: CoordinatorState, store: Store, bells: Notifier) -> None:
        self._state, self._store, self._bells = state, store, bells
        self._tasks: set[asyncio.Task[None]] = set()

    def of_worker(self, session: WorkerSession, text: str, state: str, **values: float) -> None:
        """Tell the run that the worker serves, or every run if it serves none yet."""
        event = RunEvent(
            kind="worker", message=text, values=values, labels={"worker": session.worker_id, "state": state}
        )
        mine = self._state.runs.get(session.run_id)
        for run in [mine] if mine else list(self._state.runs.values()):
            self.tell(run, event)

    def installed(self, run: RunState, session: WorkerSession, message: InstalledReport) -> None:
        """Tell the run how long a worker took to have a version, and stood still for it."""
        version = message.version.version
        values = {"version": float(version), "pull_s": message.pull_s, "pause_s": message.pause_s}
        text = f"worker {session.worker_id} installed version {version}"
        self.tell(run, RunEvent(kind="installed", message=text, values=values, labels={"worker": session.worker_id}))

    def tell(self, run: RunState, event: RunEvent) -> None:
        self.background(self._write(run, event))

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, which raises nothing, beside everything else; `close` ends it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, run: RunState, event: RunEvent) -> None:
        try:
            await self._store.events.note(run.run_id, event)
        except EbbtideError as error:
            log.warning("event lost", run_id=run.run_id, event_kind=event.kind, reason=str(error))
        self._bells.ring("events", run.run_id)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
