"""How many rollouts the coordinator sends to borrowed workers."""

from ebbtide.coordinator.dispatch.moves import RolloutMove
from ebbtide.coordinator.dispatch.rebalancer import Rebalancer
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_reports import AttachReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import PROTOCOL_VERSION, EngineInfo, WorkerKind
from ebbtide.types.run import BorrowSpec, EnvironmentSpec, RunSpec

ENGINE = EngineInfo(model="m", vocab_size=100, max_model_len=10_000)


def session(state: CoordinatorState, name: str, kind: WorkerKind) -> WorkerSession:
    hello = AttachReport(worker_id=name, kind=kind, protocol_version=PROTOCOL_VERSION, slots=64, engine=ENGINE)
    made = state.new_session(name, hello, 0.0)
    state.attach(made)
    return made


def begin(run: RunState, there: WorkerSession, name: str) -> None:
    waiting = QueuedRollout(rollout_id=name, episode_id=name, bounds=VersionBounds(0, 0), length=100, place=0)
    attempt = RunningAttempt(run=run, attempt_id=name, rollout=waiting, start=0, max_tokens=1000, started=True)
    run.start(attempt, there)


def test_rollouts_on_their_way_to_borrowed_workers_count_for_what_a_run_may_borrow() -> None:
    state = CoordinatorState()
    spec = RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e"), borrow=BorrowSpec(max_rollouts=3))
    run = state.add_run("r", spec)
    steady, lent = session(state, "steady", WorkerKind.SPOT), session(state, "lent", WorkerKind.BORROWED)
    begin(run, lent, "there")
    for number in range(4):
        begin(run, steady, f"a{number}")
    moves = Rebalancer(state, on=True)
    for at, names in enumerate([("a0",), ("a1", "a2"), ("a3",)]):
        wanted = [RolloutMove(attempt_id=name, source="steady", target="lent", gain_s=9.0) for name in names]
        moves._ask(run, wanted, state.sessions, 0.25 * at)
    asked = [one.target for one in steady.attempts.values()]
    assert asked == ["lent", "lent", "", ""], "two rounds may not send more than one"
