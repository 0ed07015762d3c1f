"""Tells runs' watchers what happens: through the store, in the background, with no guarantee. Simulators tell none."""

import asyncio
from typing import TYPE_CHECKING, Protocol

from ebbtide import telemetry
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_reports import InstalledReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import EbbtideError
from ebbtide.types.run import RunEvent, WorkerChange

if TYPE_CHECKING:  # simulators have silent events, and no store
    from ebbtide.store.store import Store

log = telemetry.get_logger(__name__)


class RunEvents(Protocol):
    """Takes events for runs' watchers; none of its methods waits or raises."""

    def of_worker(self, session: WorkerSession, text: str, change: WorkerChange, **values: float) -> None:
        """Something happened to a worker; `text` is for people."""

    def installed(self, run: RunState, session: WorkerSession, message: InstalledReport) -> None:
        """A worker installed a version of the run."""

    def write(self, run: RunState, event: RunEvent) -> None:
        """Anything else about one run."""


class SilentRunEvents(RunEvents):
    """Drops all events: nobody watches runs of a simulator or a replay."""

    def of_worker(self, session: WorkerSession, text: str, change: WorkerChange, **values: float) -> None:
        pass

    def installed(self, run: RunState, session: WorkerSession, message: InstalledReport) -> None:
        pass

    def write(self, run: RunState, event: RunEvent) -> None:
        pass


class RunEventWriter(RunEvents):
    """Writes events to the store, in the background. Those that it has not written are lost with the process."""

    def __init__(self, state: CoordinatorState, store: "Store", notifier: Notifier) -> None:
        self._state, self._store, self._notifier = state, store, notifier
        self._tasks: set[asyncio.Task[None]] = set()

    def of_worker(self, session: WorkerSession, text: str, change: WorkerChange, **values: float) -> None:
        """Write it to the run that the worker serves, or to every run if it serves none yet."""
        event = RunEvent(
            kind="worker", message=text, values=values, labels={"worker": session.worker_id, "state": change.value}
        )
        mine = self._state.runs.get(session.run_id)
        for run in [mine] if mine else list(self._state.runs.values()):
            self.write(run, event)

    def installed(self, run: RunState, session: WorkerSession, message: InstalledReport) -> None:
        """Write how long a worker took to install a version, and how long it paused for that."""
        version = message.version.version
        values = {"version": float(version), "pull_s": message.pull_s, "pause_s": message.pause_s}
        text = f"worker {session.worker_id} installed version {version}"
        self.write(run, RunEvent(kind="installed", message=text, values=values, labels={"worker": session.worker_id}))

    def write(self, run: RunState, event: RunEvent) -> None:
        task = asyncio.create_task(self._write(run, event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, run: RunState, event: RunEvent) -> None:
        try:
            await self._store.events.note(run.run_id, event)
        except EbbtideError as error:
            log.warning("event lost", run_id=run.run_id, event_kind=event.kind, reason=str(error))
        self._notifier.notify("events", run.run_id)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
