"""Decides as simpler systems do: restarts lost work, or deals whole groups to engines in turn.

Rivals know one run. Their rules are handed the coordinator's state, and change it by its own methods.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from ebbtide.coordinator.dispatch.installs import EngineChanges, InstallSender
from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.rules.worker_view import admits
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.ebbtide_policy import EbbtideDecider
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
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
        newest = run.versions.newest
        sessions = self._state.serving(run.run_id)
        ready = [one for one in sessions if newest and one.version_of(run.run_id) == newest and not one.draining]
        return sorted(ready, key=lambda one: (len(one.worker_id), one.worker_id))


def fits(one: QueuedRollout, engine: WorkerSession, run: RunState) -> bool:
    """Whether the engine's version may make the rollout's tokens."""
    return admits(one.bounds, engine.version_of(run.run_id))


def request_release(source: WorkerSession, target: WorkerSession, attempts: Sequence[RunningAttempt]) -> None:
    """Ask a worker for attempts that shall go on at another one."""
    for attempt in attempts:
        attempt.move_to(target.worker_id)
    source.outbox.request_release([attempt.ref for attempt in attempts])


class GroupTurns(RivalDecider):
    """Each group goes to the next engine, whole and at once; the engine queues what it cannot run yet. Invariant: a
    group's engine is in `_engines`, until that engine is lost."""

    poll_s = IDLE_POLL_S

    def __init__(self, coordinator: VirtualCoordinator, *, keeps: bool = False) -> None:
        super().__init__(coordinator, keeps=keeps)
        self._engines: dict[int, str] = {}  # group -> session
        self._turn = self._newest = 0

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        del now
        if run.versions.newest != self._newest:  # another step's groups
            self._newest, self._engines, self._turn = run.versions.newest, {}, 0
        present = {engine.session_id for engine in engines}
        placements = []
        for one in list(run.queue):
            if not fits(one, engines[0], run):
                continue
            engine = self._engines.get(one.group)
            if engine not in present:
                engine = engines[self._turn % len(engines)].session_id
                self._engines[one.group] = engine
                self._turn += 1
            placements.append(Placement(one.rollout_id, engine))
        return placements


class VerlPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """veRL as others measured it (Seer, arXiv 2511.14617, section 2; RLBoost, arXiv 2510.19225, section 7): co-located
    and synchronous, complete groups in turn, nothing moves, lost rollouts start again. It does not know lengths, tokens
    made, or the load and speed of engines. It takes scenarios of one run. Pools of kind `"trainer"` without a window
    are its engines.
    """

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return GroupTurns(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)


class RestartPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ebbtide's placement without moves and without stored tokens: what a lost worker had is generated again. It knows
    learnt speeds for placement, as Ebbtide does, and does not know how many tokens rollouts have.
    """

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return EbbtideDecider(coordinator, balance=False, keeps=False)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
