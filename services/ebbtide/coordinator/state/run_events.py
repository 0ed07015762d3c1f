"""Defines what decisions say to runs' watchers, and says it to nobody where there are none."""

from typing import Protocol

from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_reports import InstalledReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.run import RunEvent


class RunEvents(Protocol):
    """Takes events for runs' watchers; none of its methods waits or raises."""

    def of_worker(self, session: WorkerSession, text: str, state: str, **values: float) -> None:
        """Something happened to a worker: `text` for people, its `state` in a word."""

    def installed(self, run: RunState, session: WorkerSession, message: InstalledReport) -> None:
        """A worker installed a version of the run."""

    def write(self, run: RunState, event: RunEvent) -> None:
        """Anything else about one run."""


class SilentRunEvents(RunEvents):
    """Drops all events: nobody watches runs of a simulator or a replay."""

    def of_worker(self, session: WorkerSession, text: str, state: str, **values: float) -> None:
        pass

    def installed(self, run: RunState, session: WorkerSession, message: InstalledReport) -> None:
        pass

    def write(self, run: RunState, event: RunEvent) -> None:
        pass
