"""How many rollouts the coordinator sends to borrowed workers."""

from ebbtide.coordinator.moves import Moves
from ebbtide.coordinator.records import Attach
from ebbtide.coordinator.state import Attempt, RunState, Session, State
from ebbtide.scheduling.balance import Move
from ebbtide.scheduling.line import Waiting
from ebbtide.scheduling.pacing import Bounds
from ebbtide.types.fleet import PROTOCOL_VERSION, EngineInfo, WorkerKind
from ebbtide.types.run import BorrowSpec, EnvironmentSpec, RunSpec

ENGINE = EngineInfo(model="m", vocab_size=100, max_model_len=10_000)


def session(state: State, name: str, kind: WorkerKind) -> Session:
    hello = Attach(worker_id=name, kind=kind, protocol_version=PROTOCOL_VERSION, slots=64, engine=ENGINE)
    made = state.sessions[name] = Session(name, hello, 0.0)
    return made


def begin(run: RunState, there: Session, name: str) -> None:
    waiting = Waiting(rollout_id=name, episode_id=name, bounds=Bounds(0, 0), length=100, place=0)
    attempt = Attempt(run_id="r", attempt_id=name, waiting=waiting, start=0, max_tokens=1000, started=True)
    attempt.give(there)
    run.running[name] = attempt


def test_rollouts_on_their_way_to_borrowed_workers_count_for_what_a_run_may_borrow() -> None:
    state = State()
    spec = RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e"), borrow=BorrowSpec(max_rollouts=3))
    run = state.runs["r"] = RunState("r", spec)
    steady, lent = session(state, "steady", WorkerKind.SPOT), session(state, "lent", WorkerKind.BORROWED)
    begin(run, lent, "there")
    for number in range(4):
        begin(run, steady, f"a{number}")
    moves = Moves(state, on=True)
    for at, names in enumerate([("a0",), ("a1", "a2"), ("a3",)]):
        wanted = [Move(attempt_id=name, source="steady", target="lent", gain_s=9.0) for name in names]
        moves._ask(run, wanted, state.sessions, 0.25 * at)
    asked = [one.target for one in steady.attempts.values()]
    assert asked == ["lent", "lent", "", ""], "two rounds may not send more than one"
