"""What becomes of attempts whose rollouts the store forgot."""

import time
from typing import Any

from ebbtide.coordinator.lives import Lives, widowed
from ebbtide.coordinator.records import Attach
from ebbtide.coordinator.state import RunState, Session, State
from ebbtide.store.rows import Adopted, Fate
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, EngineInfo, WorkerKind
from ebbtide.types.run import EnvironmentSpec, RunSpec


class Store:
    """It knows a rollout to be over, and is asked for what was to be known while it thinks."""

    def __init__(self) -> None:
        self.rollouts = self
        self.meanwhile: Any = lambda: None

    async def adopt(self, run_id: str, names: list[Any], *, newer: bool) -> list[Adopted]:
        self.meanwhile()
        return [Adopted(Fate.OVER, 0) for _ in names]


def scene() -> tuple[State, RunState, Session]:
    """A run, and a worker that shows up with an attempt of it just after store and coordinator came back together."""
    state = State()
    state.doubt_until = time.monotonic() + 30.0
    run = state.runs["r"] = RunState("r", RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e")))
    engine = EngineInfo(model="m", vocab_size=100, max_model_len=100)
    hello = Attach(worker_id="w", kind=WorkerKind.SPOT, protocol_version=PROTOCOL_VERSION, slots=4, engine=engine)
    session = Session("s", hello, time.monotonic())
    assert widowed(state, run, AttemptRef("r", "a", "attempt"), session)
    return state, run, session


def test_a_widow_does_not_count_as_waiting_since_ever() -> None:
    before = time.monotonic()
    _, _, session = scene()
    assert session.attempts["attempt"].given >= before


async def test_a_widow_may_expire_while_the_store_is_asked_for_it() -> None:
    state, run, session = scene()
    store: Any = Store()
    lives = Lives(state, store, lease_ttl_s=10.0)

    def expire() -> None:
        run.widows["a"].attempt.part()  # its worker left
        lives.expire(run)

    store.meanwhile = expire
    await lives.remarry(run)
    assert (run.widows, session.attempts) == ({}, {})
