"""A coordinator's model with a run and workers of it, without a store and without streams."""

from collections.abc import Callable

from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_reports import AttachReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import PROTOCOL_VERSION, EngineInfo, WorkerKind
from ebbtide.types.run import EnvironmentSpec, RunSpec
from ebbtide.types.weights import PolicyVersion

ENGINE = EngineInfo(model="m", architecture="a", vocab_size=100, max_model_len=10_000)


class ModelFleet:
    def __init__(self, workers: int = 0, *, slots: int = 4, clock: Callable[[], float] | None = None) -> None:
        self.state, self.slots = CoordinatorState(clock), slots
        self.run = self.add_run("r")
        for number in range(workers):
            self.attach(f"w{number}")

    def add_run(self, run_id: str) -> RunState:
        """A run with version 1."""
        run = self.state.add_run(run_id, RunSpec(name=run_id, model="m", environment=EnvironmentSpec(name="e")))
        run.versions.announce(self.version(1, run))
        with run.mirror.rereading():
            run.mirror.note_reconciled()
        return run

    def version(self, number: int, run: RunState | None = None) -> PolicyVersion:
        return PolicyVersion(policy=(run or self.run).spec.policy, version=number, root=b"r" * 32)

    def attach(self, name: str) -> WorkerSession:
        """A worker that serves the run, and has installed nothing."""
        hello = AttachReport(
            worker_id=name, kind=WorkerKind.SPOT, protocol_version=PROTOCOL_VERSION, slots=self.slots, engine=ENGINE
        )
        session = self.state.new_session(f"session of {name}", hello, 0.0)
        session.serve(self.run.run_id, 0.0)
        self.state.attach(session)
        return session

    def begin(self, name: str, session: WorkerSession, run: RunState | None = None) -> RunningAttempt:
        attempt = RunningAttempt(
            run=run or self.run, attempt_id=f"a-{name}", rollout=rollout(name), start=0, max_tokens=9
        )
        attempt.run.start(attempt, session)
        return attempt


def rollout(name: str, *, length: int = 100, bounds: tuple[int, int] = (0, 0), place: int = 0) -> QueuedRollout:
    return QueuedRollout(rollout_id=name, episode_id=name, bounds=VersionBounds(*bounds), length=length, place=place)
