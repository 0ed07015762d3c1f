"""The model keeps its indexes and wakes the dispatcher, whatever happens in whatever order."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from ebbtide.coordinator.attempt_transitions import changing
from ebbtide.coordinator.dispatch.dispatch_round import WorkerViews
from ebbtide.coordinator.dispatch.rebalancer import Rebalancer
from ebbtide.coordinator.dispatch.speeds import PrefillSpeeds
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.running_attempt import OrphanedAttempt
from ebbtide.coordinator.state.worker_messages import Install, ReleaseReason
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.errors import Internal
from ebbtide.types.fleet import EndCause, EndReason
from tests.unit.coordinator.model_fleet import ENGINE, ModelFleet, rollout

LOST = OrphanedAttempt(0.0, EndReason(EndCause.WORKER_LOST, "lost"))


def check(fleet: ModelFleet) -> None:
    state = fleet.state
    for run_id in (*state.runs, ""):
        serving = {one.session_id for one in state.sessions.values() if one.run_id == run_id}
        assert {one.session_id for one in state.serving(run_id)} == serving
        room = any(len(state.sessions[name].attempts) < fleet.slots for name in serving)
        assert state.has_room(run_id) is room
    for run in state.runs.values():
        assert dict(run.orphans) == {name: one for name, one in run.running.items() if one.orphaned is not None}
        assert all((one.session is None) is (one.orphaned is not None) for one in run.running.values())
    for session in state.sessions.values():
        assert all(one.session is session for one in session.attempts.values())
        assert session.pending.keys() == {name for name, one in session.attempts.items() if not one.started}
        assert session.freed.keys() <= session.attempts.keys()
        assert sum(session.held.values()) == len(session.attempts)


class Happening(ModelFleet):
    """A fleet to which random things happen. `number` names what is new."""

    def __init__(self, seed: int) -> None:
        super().__init__(3, slots=2)
        self.draw, self.number = random.Random(seed), 0
        self.views = self.fresh_views()

    def fresh_views(self) -> WorkerViews:
        trusting: Any = SimpleNamespace(quarantined=lambda _: set())
        return WorkerViews(self.state, trusting, Rebalancer(self.state, on=True), PrefillSpeeds())

    def happen(self) -> None:
        self.number += 1
        self.session = self.draw.choice(list(self.state.sessions.values()))
        self.some = self.draw.choice(list(self.state.runs.values()))
        events = [
            self.attach_one, self.detach, self.serve, self.start, self.begin_run, self.end_run,
            self.install, self.installed, self.not_installed, self.report,
        ]  # fmt: skip
        if self.some.running:
            self.attempt = self.draw.choice(list(self.some.running.values()))
            events += [self.orphan, self.adopt, self.end, self.put_back, self.free, self.make_tokens, self.reread]
        self.draw.choice(events)()

    def attach_one(self) -> None:
        self.attach(f"w{self.number}")

    def detach(self) -> None:
        if len(self.state.sessions) > 1:
            self.state.detach(self.session)
            for one in list(self.session.attempts.values()):
                one.orphan(LOST, lost=1)

    def serve(self) -> None:
        self.session.serve(self.draw.choice([*self.state.runs, ""]), 0.0)

    def start(self) -> None:
        if len(self.session.attempts) < self.slots:
            self.begin(f"x{self.number}", self.session, self.some)

    def install(self) -> None:
        if run_id := self.session.run_id:
            message = Install(version=self.version(1), run_id=run_id, model="m", publisher=b"")
            self.session.install(run_id, message, 0.0, restart=False)

    def installed(self) -> None:
        self.session.note_installed(self.session.run_id, self.version(1))

    def not_installed(self) -> None:
        """It fails to, or turns out not to have it, or starts its engine anew."""
        events: list[Callable[[], object]] = [
            self.session.note_install_failed,
            self.session.distrust_version,
            lambda: self.session.note_restarted(ENGINE),
        ]
        self.draw.choice(events)()

    def report(self) -> None:
        events: list[Callable[[], object]] = [
            lambda: self.session.hear(HeartbeatReport(held=self.draw.random() < 0.5), 0.0),
            lambda: self.session.learn_plateau(self.draw.randrange(9)),
            lambda: self.session.drain("why"),
            lambda: self.session.tell_borrowed(wanted=self.draw.random() < 0.5, reason="why"),
        ]
        self.draw.choice(events)()

    def begin_run(self) -> None:
        if len(self.state.runs) < 3:
            self.add_run(f"r{self.number}")

    def end_run(self) -> None:
        if len(self.state.runs) > 1:
            self.state.drop_run(self.some)

    def orphan(self) -> None:
        self.attempt.orphan(LOST)

    def adopt(self) -> None:
        self.attempt.assign(self.session)

    def end(self) -> None:
        self.some.end(self.attempt.rollout.rollout_id)

    def put_back(self) -> None:
        self.attempt.orphan(LOST)
        self.some.put_back(self.attempt, self.attempt.rollout)

    def free(self) -> None:
        self.attempt.assign(self.session)
        self.session.free([self.attempt.ref], ReleaseReason.ANOTHER_RUN, 0.0)

    def make_tokens(self) -> None:
        self.attempt.begin(0.0)

    def reread(self) -> None:
        attempts = list(self.some.running.items())
        kept = dict(self.draw.sample(attempts, len(attempts) // 2))
        queue = self.some.new_queue()
        queue.add(rollout("q"))
        for one in self.some.reread(self.some.versions.available, queue, kept):
            one.unassign()


@pytest.mark.parametrize("seed", range(20))
def test_the_indexes_are_right_whatever_happened(seed: int) -> None:
    fleet = Happening(seed)
    for _ in range(300):
        fleet.happen()
        check(fleet)
        fresh = fleet.fresh_views()
        assert all(fleet.views.of(run, 0.0) == fresh.of(run, 0.0) for run in fleet.state.runs.values())


def _started(fleet: ModelFleet) -> None:
    fleet.run.admit(rollout("waits"))
    fleet.state.wakeups._decide.clear()
    fleet.run.running["x"].begin(1.0)


EVENTS: dict[str, Callable[[ModelFleet], object]] = {
    "a rollout is queued": lambda fleet: fleet.run.admit(rollout("a")),
    "a rollout ends": lambda fleet: fleet.run.end("x"),
    "a worker hands a rollout back": lambda fleet: fleet.run.running["x"].orphan(LOST),
    "a rollout begins while others wait": _started,
    "a version is announced": lambda fleet: fleet.run.versions.announce(fleet.version(2)),
    "a version is installed": lambda fleet: fleet.attach("w").note_installed("r", fleet.version(1)),
    "an install fails": lambda fleet: next(iter(fleet.state.sessions.values())).note_install_failed(),
    "an engine restarts": lambda fleet: next(iter(fleet.state.sessions.values())).note_restarted(ENGINE),
    "a mirror is stale": lambda fleet: fleet.run.mirror.mark_stale(),
    "a worker attaches": lambda fleet: fleet.attach("new"),
    "a worker leaves": lambda fleet: fleet.state.detach(next(iter(fleet.state.sessions.values()))),
    "a run ends": lambda fleet: fleet.state.drop_run(fleet.run),
}


@pytest.mark.parametrize("what", EVENTS)
def test_what_may_change_a_decision_wakes_the_dispatcher(what: str) -> None:
    fleet = ModelFleet(1)
    fleet.begin("x", next(iter(fleet.state.sessions.values())))
    fleet.state.wakeups._decide.clear()
    EVENTS[what](fleet)
    assert fleet.state.wakeups._decide.is_set()


def test_an_orphan_and_an_ended_run_wake_the_reaper_and_a_heartbeat_wakes_nobody() -> None:
    fleet = ModelFleet(1)
    session = next(iter(fleet.state.sessions.values()))
    attempt, wakeups = fleet.begin("x", session), fleet.state.wakeups
    events: list[tuple[Callable[[], object], bool]] = [
        (lambda: session.hear(HeartbeatReport(), 1.0), False),
        (lambda: attempt.orphan(LOST), True),
        (lambda: attempt.set_due(9.0), False),
        (lambda: attempt.set_due(1.0), True),
        (lambda: fleet.state.sweep(["r"]), True),
    ]
    for happens, wakes in events:
        wakeups._reap.clear()
        wakeups._decide.clear()
        happens()
        assert wakeups._reap.is_set() is wakes
        assert wakes or not wakeups._decide.is_set()


def test_a_run_that_fails_again_soon_pauses_for_twice_as_long_and_later_for_the_first_time_again() -> None:
    run, now, pauses = ModelFleet().run, 100.0, list[float]()
    fault = Internal("broken")
    for _ in range(8):
        pauses.append(run.mirror.pause(fault, now))
        assert run.mirror.pause(fault, now + pauses[-1] / 2) == pauses[-1] / 2  # it pauses already
        assert run.mirror.stale
        assert run.mirror.paused(now)
        now += pauses[-1]
        assert not run.mirror.paused(now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert run.mirror.pause(fault, now + 3600) == 1


async def test_each_pause_is_logged_once_also_if_a_clients_call_causes_it() -> None:
    run = ModelFleet().run
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(Internal):
                async with changing(run):
                    raise Internal("broken")
    assert [(one["event"], one["run_id"], one["seconds"]) for one in logs] == [("run paused", run.run_id, 1)]


def test_runs_that_were_swept_are_swept_again_once_a_store_that_may_have_forgotten_it_is_back() -> None:
    state = CoordinatorState()
    state.sweep(["a", "b"])
    state.swept("a")
    state.replace_incarnation("next", 1.0, 30.0)
    assert state.ended == {"a", "b"}
    state.swept("a")
    state.swept("b")
    assert not state.ended


def test_only_engines_that_are_to_serve_a_run_and_stay_have_its_context() -> None:
    fleet = ModelFleet(2)
    assert fleet.state.longest_context("r", ENGINE.architecture) == ENGINE.max_model_len
    assert fleet.state.longest_context("r", "another") == 0
    first, second = fleet.state.sessions.values()
    first.serve("another run", 0.0)
    second.drain("asked to leave")
    assert fleet.state.longest_context("r", ENGINE.architecture) == 0
