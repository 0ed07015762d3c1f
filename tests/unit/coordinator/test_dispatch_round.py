"""Rounds run in virtual time, without a store, an event loop or a clock, as a simulator runs them."""

import ast
import itertools
from pathlib import Path
from typing import Final

from ebbtide import coordinator
from ebbtide.coordinator.dispatcher.dispatch_round import DispatchRound
from ebbtide.coordinator.dispatcher.round_deeds import DeadLetters, SlotFill
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.fleet.worker_trust import WorkerTrust
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.attempt_records import due_orphans, new_entry, queued_again, started
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_events import SilentRunEvents
from ebbtide.coordinator.state.worker_reports import AttachReport, HeartbeatReport, InstalledReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.fleet import PROTOCOL_VERSION, WorkerKind, WorkerState
from ebbtide.types.rollout import RolloutKind, RolloutRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec, Sampling
from ebbtide.types.weights import PolicyVersion
from tests.unit.coordinator.model_fleet import ENGINE

ROOT: Final = Path(coordinator.__file__).parent
VERSION: Final = PolicyVersion(policy="policy", version=1, root=b"r" * 32)


class VirtualFleet:
    def __init__(self, *, slots: int = 4) -> None:
        self.now, self._slots, ids = 0.0, slots, itertools.count()
        self.state = CoordinatorState(lambda: self.now)
        trust, events, settings = WorkerTrust(self.state), SilentRunEvents(), CoordinatorSettings()
        self.registry = WorkerRegistry(settings, self.state, trust, events, new_id=lambda: f"s{next(ids)}")
        self.rounds = DispatchRound(self.state, trust, lambda _: b"k" * 32, events, slice_s=settings.slice_s)
        spec = RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e"))
        self.run = self.state.add_run("r", spec)
        with self.run.rereading():
            self.run.note_reconciled()
        self.run.announce(VERSION)
        self.placed: list[tuple[float, str, str]] = []
        self.letters: list[str] = []

    def attach(self, name: str) -> WorkerSession:
        """A worker that installs at once what it is told."""
        kind = WorkerKind.SPOT
        hello = AttachReport(
            worker_id=name, kind=kind, protocol_version=PROTOCOL_VERSION, slots=self._slots, engine=ENGINE
        )
        session, _, _ = self.registry.attach(hello)
        self.round()
        assert session.outbox.get_nowait().install.run_id == "r"  # type: ignore[union-attr]
        self.registry.hear(session, InstalledReport(version=VERSION, run_id="r"))
        return session

    def submit(self, count: int, *, max_version: int = 0) -> None:
        for number in range(count):
            request = RolloutRequest(
                rollout_id=f"x{number}",
                group_id="g",
                episode_id=f"e{number}",
                prompt_ids=b"",
                sampling=Sampling(max_tokens=64),
                kind=RolloutKind.TRAIN,
                max_version=max_version,
            )
            self.run.admit(new_entry(request, place=number, group=0, length=8, now=self.now))

    def round(self, passing_s: float = 0.1) -> None:
        self.now += passing_s
        for run in self.state.runs.values():
            for orphaned, attempts in due_orphans(run, self.now)[0].items():
                avoid = frozenset({"gone"} if orphaned.why.avoid else ())
                for one in attempts:
                    again = queued_again(one, stored=one.stored, avoid=avoid, no_progress=0, now=self.now)
                    run.put_back(one, again)
        for deed in self.rounds.turns(self.now):
            if isinstance(deed, SlotFill):
                self._fill(deed)
            elif isinstance(deed, DeadLetters):
                self.letters += [rollout_id for rollout_id, _ in deed.letters]

    def _fill(self, deed: SlotFill) -> None:
        while deed.due(self.now) and (placements := deed.place(self.now)):
            for rollout_id, session_id in placements:
                queued = deed.run.take_queued(rollout_id)
                assert queued is not None
                number, session = len(self.placed), self.state.sessions[session_id]
                self.placed.append((self.now, rollout_id, session.worker_id))
                made = queued.made
                attempt = started(deed.run, queued, f"a{number}", stored=made, number=1, max_tokens=64, now=self.now)
                deed.run.start(attempt, session)
            deed.note_turn(0.0, self.now)

    def beat(self, *sessions: WorkerSession) -> None:
        for session in sessions:
            self.registry.hear(session, HeartbeatReport(uptime_s=self.now))


def lived() -> VirtualFleet:
    """Two workers, of which one falls silent with its rollouts in the midst."""
    fleet = VirtualFleet()
    gone, stays = fleet.attach("gone"), fleet.attach("stays")
    fleet.submit(12)
    fleet.round()
    for attempt in list(fleet.run.running.values()):
        attempt.begin(fleet.now)
        fleet.run.accept_tokens([attempt], [5])
    while not gone.gone:
        fleet.round(0.25)
        fleet.beat(stays)
        for session in (gone, stays):
            session.tokens_came(fleet.now)
        for _ in fleet.registry.judge(fleet.now):
            pass
    for attempt in list(stays.attempts.values()):
        fleet.run.finish(attempt.rollout.rollout_id, attempt.attempt_id)
    fleet.round()
    return fleet


def test_rollouts_are_placed_lost_and_continued_without_a_store_or_an_event_loop() -> None:
    fleet = lived()
    before = [(rollout_id, worker) for at, rollout_id, worker in fleet.placed if at < 1.0]
    after = [(rollout_id, worker) for at, rollout_id, worker in fleet.placed if at > 1.0]
    assert len(before) == 8
    assert {worker for _, worker in after} == {"stays"}
    lost = {rollout_id for rollout_id, worker in before if worker == "gone"}
    assert {rollout_id for rollout_id, _ in after} == lost, "they are the first in the queue"
    assert all(fleet.run.running[name].start == 5 for name in lost), "behind their stored tokens"
    (listed,) = [one for one in fleet.registry.workers() if one.worker_id == "gone"]
    assert listed.state is WorkerState.SUSPECTED


def test_the_same_happenings_lead_to_the_same_decisions_at_the_same_times() -> None:
    assert lived().placed == lived().placed


def test_a_round_yields_the_dead_letters_of_rollouts_that_no_version_can_serve() -> None:
    fleet = VirtualFleet()
    fleet.attach("w")
    fleet.run.announce(PolicyVersion(policy="policy", version=2, root=b"r" * 32))
    for _ in range(3):
        fleet.run.note_failed_install(1)
    fleet.submit(2, max_version=1)
    fleet.round()
    assert fleet.letters == ["x0", "x1"]


def test_a_round_says_when_the_next_one_is_due_and_the_model_whether_it_is_due_at_once() -> None:
    fleet = VirtualFleet()
    fleet.round()
    assert fleet.rounds.pause_s(fleet.now) == 0.25
    fleet.round(0.01)
    assert fleet.rounds.pause_s(fleet.now) == 0.05, "workers' runs and versions were not looked at"
    fleet.state.wakeups.take_decide()
    assert not fleet.state.wakeups.take_decide()
    fleet.submit(1)
    assert fleet.state.wakeups.take_decide()


def test_what_decides_reads_no_clock_but_the_one_that_the_state_was_given() -> None:
    allowed = {
        "state/coordinator_state.py",  # where it is chosen
        "state/ended_histories.py",  # compares the wall clock with times in the store
    }
    readers = {
        path.relative_to(ROOT).as_posix()
        for room in ("state", "dispatcher", "fleet")
        for path in (ROOT / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) and any(name.name == "time" for name in node.names)
    }
    assert readers == allowed
