"""The work of a decision follows what has changed, not the size of the fleet."""

import gc
from itertools import pairwise
from typing import Any

import pytest

from ebbtide.coordinator.attempt_transitions import AttemptTransitions, ClientWrites
from ebbtide.coordinator.dispatch import worker_allocator
from ebbtide.coordinator.dispatch.dispatch_round import WorkerViews, gather_s
from ebbtide.coordinator.dispatch.installs import EngineChanges, InstallSender
from ebbtide.coordinator.dispatch.rebalancer import Rebalancer
from ebbtide.coordinator.dispatch.speeds import PrefillSpeeds
from ebbtide.coordinator.dispatch.worker_allocator import WorkerAllocator
from ebbtide.coordinator.fleet.worker_health import SuspectWorker, WorkerTrust
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.run_events import SilentRunEvents
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.attempt_records import _bounds
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.state.running_attempt import OrphanedAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.store.records import EndedAttempt, RequeuedRollout
from ebbtide.types.fleet import EndCause, EndReason
from tests.unit.coordinator.model_fleet import ModelFleet, rollout

WORKERS = 200


class Store:
    """Takes every rollout back and every dead letter, and remembers how many came at once."""

    def __init__(self) -> None:
        self.rollouts = self
        self.sizes: list[int] = []
        self.noticed: list[float | None] = []

    async def requeue(self, run_id: str, attempts: list[EndedAttempt], why: EndReason) -> list[RequeuedRollout]:
        self.sizes.append(len(attempts))
        self.noticed.append(why.noticed_s)
        return [RequeuedRollout(0, 0, "", frozenset()) for _ in attempts]

    async def dead_letter(self, run_id: str, letters: list[Any]) -> int:
        self.sizes.append(len(letters))
        return len(letters)


class Scene(ModelFleet):
    def __init__(self, workers: int = WORKERS) -> None:
        super().__init__(workers)
        self.store = Store()
        store: Any = self.store
        kept: Any = {"keep_ended_s": 60.0, "keep_ended_bytes": 1 << 20}
        self.attempts = AttemptTransitions(self.state, store, Notifier(), ClientWrites(), no_progress_limit=3, **kept)
        trust = WorkerTrust(self.state)
        self.registry = WorkerRegistry(CoordinatorSettings(), self.state, trust, SilentRunEvents())
        self.installs = InstallSender(self.state, EngineChanges(self.state), lambda _: b"k" * 32)
        self.hosts = WorkerViews(self.state, trust, Rebalancer(self.state, on=True), PrefillSpeeds())

    @property
    def first(self) -> WorkerSession:
        return next(iter(self.state.sessions.values()))

    def install(self) -> None:
        """All workers install what they are told."""
        self.installs.send(self.run, 1.0)
        for session in self.state.sessions.values():
            session.note_installed("r", self.version(self.run.versions.newest))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The workers whose view was made, or whose version was decided, in order."""
    found: list[str] = []
    for owner, name in ((WorkerViews, "_view"), (InstallSender, "_served")):
        before = getattr(owner, name)

        def looked(self: Any, run: Any, session: WorkerSession, *, before: Any = before) -> Any:
            found.append(session.worker_id)
            return before(self, run, session)

        monkeypatch.setattr(owner, name, looked)
    return found


def test_a_worker_is_looked_at_again_only_if_it_has_changed(looks: list[str]) -> None:
    scene = Scene()
    scene.install()
    assert len(scene.hosts.of(scene.run, 1.0)) == WORKERS
    looks.clear()
    for _ in range(3):
        assert len(scene.hosts.of(scene.run, 1.0)) == WORKERS
        scene.installs.send(scene.run, 1.0)
    assert looks == []
    scene.begin("x", scene.first)
    assert [view.running for _, view in scene.hosts.of(scene.run, 1.0)] == [1] + [0] * (WORKERS - 1)
    assert looks == ["w0"]


def test_only_workers_without_the_newest_version_are_told_to_install(looks: list[str]) -> None:
    scene = Scene()
    scene.install()
    looks.clear()
    scene.first.distrust_version()
    scene.installs.send(scene.run, 1.0)
    assert looks == ["w0"]
    assert scene.first.target == ("r", 1)
    scene.run.versions.announce(scene.version(2))
    scene.installs.send(scene.run, 1.0)
    assert {session.target for session in scene.state.sessions.values()} == {("r", 2)}


def test_a_worker_stays_at_an_old_version_while_a_rollout_with_that_ceiling_waits() -> None:
    scene = Scene(3)
    scene.install()
    scene.run.versions.announce(scene.version(2))
    scene.install()
    scene.run.admit(rollout("old", bounds=(1, 1)))
    scene.installs.send(scene.run, 1.0)
    assert sorted(session.target or () for session in scene.state.sessions.values()) == [("r", 1), ("r", 2), ("r", 2)]


async def test_many_orphans_are_queued_again_a_few_at_a_time_and_their_loss_is_counted_once() -> None:
    scene = Scene(1)
    why = OrphanedAttempt(0.0, EndReason(EndCause.WORKER_LOST, "lost", noticed_s=2.0))
    for number in range(1_000):
        scene.begin(f"x{number}", scene.first).orphan(why)
    await scene.attempts.requeue_due(1.0)
    assert max(scene.store.sizes) <= 128
    assert sum(scene.store.sizes) == len(scene.run.queue) == 1_000
    assert [seconds for seconds in scene.store.noticed if seconds is not None] == [2.0]


async def test_many_dead_letters_are_written_a_few_at_a_time_and_only_of_what_still_waits() -> None:
    scene = Scene(1)
    for number in range(500):
        scene.run.admit(rollout(f"x{number}"))
    letters = [(f"x{number}", "why") for number in range(500)]
    scene.run.take_queued("x499")
    await scene.attempts.dead_letter(scene.run, letters)
    assert max(scene.store.sizes) <= 128
    assert sum(scene.store.sizes) == 499
    assert not scene.run.queue


def test_others_have_their_turn_while_half_of_the_fleet_is_found_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    silent = [SuspectWorker(name, "no heartbeat", 3.0) for name in list(scene.state.sessions)[: WORKERS // 2]]
    monkeypatch.setattr(scene.registry._health, "judge", lambda *_: silent)
    attached = [WORKERS] + [len(scene.state.sessions) for _ in scene.registry.judge(1.0)]
    lost = [before - after for before, after in pairwise(attached)]
    assert set(lost) == {1}
    assert len(scene.state.sessions) == WORKERS // 2


def test_others_have_their_turn_while_a_fleet_goes_over_to_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_allocator, "_LOOKED_AT_ONCE", 8)
    scene = Scene(8)
    sessions, moves = list(scene.state.sessions.values()), Rebalancer(scene.state, on=True)
    allocator = WorkerAllocator(
        scene.state, WorkerTrust(scene.state), moves, EngineChanges(scene.state), PrefillSpeeds(), SilentRunEvents(),
        timeslice_s=1.0,
    )  # fmt: skip
    for session in sessions:
        for number in range(4):
            scene.begin(f"{session.worker_id}.{number}", session)
        session.serve("another run", 1.0)
    sessions[0].serve("r", 2.0)  # it stays
    steps = allocator.hand_over(2.0)
    for asked in range(8, 25, 8):
        next(steps)
        assert sum(len(one.freed) for one in sessions) == asked
    scene.state.detach(sessions[-1])
    list(steps)
    assert [len(one.freed) for one in sessions] == [0] + [4] * 6 + [0]


def test_heartbeats_are_learnt_from_in_steps_between_which_others_have_their_turn() -> None:
    scene = Scene()
    moves = Rebalancer(scene.state, on=True)
    assert moves.due(1.0)
    steps = moves.learn(1.0)
    next(steps)
    assert 0 < len(moves._beats) < WORKERS
    assert moves.lesson == 0, "a round is not over before all workers were seen"
    assert 0 < len(list(steps)) <= WORKERS // 50
    assert len(moves._beats) == WORKERS
    assert moves.lesson == 1


def test_a_round_gathers_longer_in_a_larger_fleet() -> None:
    waits = [gather_s(workers) for workers in (0, 1, 64, 128, 1000, 10_000)]
    assert waits == [0.01, 0.01, 0.01, 0.02, 0.1, 0.1]


def test_the_collector_does_not_look_at_queued_rollouts() -> None:
    queued = rollout("x")
    assert not gc.is_tracked(queued)
    assert _bounds(1, 2) is _bounds(1, 2), "one object for all rollouts with these bounds"
