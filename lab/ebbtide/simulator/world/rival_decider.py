"""Gives a rival what all of them need: workers that serve the one run, versions, and rounds in virtual time.

Rivals know one run. Their rules are handed the coordinator's state, and change it by its own methods.
"""

from collections.abc import Sequence
from typing import Final

from ebbtide.coordinator.dispatch.installs import EngineChanges, InstallSender
from ebbtide.coordinator.rules.host_view import admits
from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: How often a rival looks without a change: RLBoost's public code polls its engines about as often.
POLL_S: Final = 1.0
#: How often rivals look that do nothing without a change, in case that one was missed.
IDLE_POLL_S: Final = 10.0
#: Changes are gathered for so long, as few messages would be.
_GATHER_S: Final = 0.01


class RivalDecider(Decider):
    """`keeps`: whether what a lost worker had stored goes on elsewhere."""

    #: The longest pause between two rounds. Rivals that move nothing only wait for changes.
    poll_s = POLL_S

    def __init__(self, coordinator: VirtualCoordinator, *, keeps: bool) -> None:
        self._coordinator, self._state, self.keeps = coordinator, coordinator.state, keeps
        self._installs = InstallSender(self._state, EngineChanges(self._state), lambda _: b"")

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        """Where queued rollouts go now. `engines` have the newest version, in the order of their names."""
        raise NotImplementedError

    def move(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> None:
        """Ask for rollouts that shall go on elsewhere. Most rivals move none."""

    def round(self, now: float) -> float:
        runs = list(self._state.runs.values())
        if len(runs) > 1:
            raise InvalidRequest("knows one run; choose ebbtide, or leave the others out", field="policy")
        for run in runs:
            for session in self._state.sessions.values():
                if session.run_id != run.run_id:
                    session.serve(run.run_id, now)
            self._installs.send(run, now)
            engines = self._ready(run)
            if engines and run.queue and (placements := self.place(run, engines, now)):
                self._coordinator.start(run, placements)
            self.move(run, engines, now)
        return self.poll_s

    def gather_s(self) -> float:
        return _GATHER_S

    def _ready(self, run: RunState) -> list[WorkerSession]:
        newest = run.newest
        sessions = self._state.serving(run.run_id)
        ready = [one for one in sessions if newest and one.version_of(run.run_id) == newest and not one.draining]
        return sorted(ready, key=lambda one: (len(one.worker_id), one.worker_id))


def fits(one: QueuedRollout, engine: WorkerSession, run: RunState) -> bool:
    """Whether the engine's version may make the rollout's tokens."""
    return admits(one.bounds, engine.version_of(run.run_id))


def ask_back(source: WorkerSession, target: WorkerSession, attempts: Sequence[RunningAttempt]) -> None:
    """Ask a worker for attempts that shall go on at another one."""
    for attempt in attempts:
        attempt.move_to(target.worker_id)
    source.ask_back([attempt.ref for attempt in attempts])
