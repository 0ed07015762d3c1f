"""What becomes of attempts whose rollouts the store forgot."""

import time
from typing import Any

from ebbtide.coordinator.run_recovery import StoreIncarnations
from ebbtide.coordinator.state.attempt_records import keep_unconfirmed
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_reports import AttachReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.store.records import AdoptedAttempt, AttemptStatus
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, EngineInfo, WorkerKind
from ebbtide.types.run import EnvironmentSpec, RunSpec


class Store:
    """It knows a rollout to be over, and is asked for what was to be known while it thinks."""

    def __init__(self) -> None:
        self.rollouts = self
        self.meanwhile: Any = lambda: None

    async def adopt(self, run_id: str, names: list[Any], *, newer: bool) -> list[AdoptedAttempt]:
        self.meanwhile()
        return [AdoptedAttempt(AttemptStatus.OVER, 0) for _ in names]


def scene() -> tuple[CoordinatorState, RunState, WorkerSession]:
    """A run, and a worker that shows up with an attempt of it just after store and coordinator came back together."""
    state = CoordinatorState()
    state.begin_incarnation("one", durable_after_s=1.0)
    state.doubt(30.0)
    run = state.add_run("r", RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e")))
    engine = EngineInfo(model="m", vocab_size=100, max_model_len=100)
    hello = AttachReport(worker_id="w", kind=WorkerKind.SPOT, protocol_version=PROTOCOL_VERSION, slots=4, engine=engine)
    session = state.new_session("s", hello, time.monotonic())
    assert keep_unconfirmed(state, run, AttemptRef("r", "a", "attempt"), session)
    return state, run, session


def test_an_unconfirmed_attempt_does_not_seem_to_have_waited_for_ever() -> None:
    before = time.monotonic()
    _, _, session = scene()
    assert session.attempts["attempt"].given >= before


async def test_an_unconfirmed_attempt_may_expire_while_the_store_is_asked_for_it() -> None:
    state, run, session = scene()
    store: Any = Store()
    incarnations = StoreIncarnations(state, store, lease_ttl_s=10.0)

    def expire() -> None:
        run.unconfirmed["a"].attempt.unassign()  # its worker left
        incarnations.expire_unconfirmed(run)

    store.meanwhile = expire
    await incarnations.confirm(run)
    assert (run.unconfirmed, session.attempts) == ({}, {})
