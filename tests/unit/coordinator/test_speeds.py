"""What the coordinator learns of a worker's speed from its heartbeats, and when it learns nothing."""

from typing import Any

import msgspec
import pytest

from ebbtide.coordinator.dispatch.rebalancer import Rebalancer
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.rules.worker_view import WorkerView
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_messages import Release
from ebbtide.coordinator.state.worker_reports import AttachReport, HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import PROTOCOL_VERSION, EngineInfo, WorkerKind, WorkerState
from ebbtide.types.run import EnvironmentSpec, RunSpec

RUNNING = 8
RATE = 30


class Scene:
    """A worker with rollouts that have started, seen four times a second, with a heartbeat a second."""

    def __init__(self) -> None:
        self.state = CoordinatorState()
        self.run = self.state.add_run("r", RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e")))
        self.run.mirror.note_reconciled()
        self.moves = Rebalancer(self.state, on=True)
        self.now = 100.0
        self.session = self.attach("w1")
        for number in range(RUNNING):
            self.begin(f"a{number}")

    def attach(self, name: str) -> WorkerSession:
        engine = EngineInfo(model="m", vocab_size=100, max_model_len=10_000)
        hello = AttachReport(
            worker_id=name, kind=WorkerKind.SPOT, protocol_version=PROTOCOL_VERSION, slots=64, engine=engine
        )
        session = self.state.new_session(f"session of {name}", hello, self.now)
        session.serve("r", self.now)
        self.state.attach(session)
        return session

    def begin(self, name: str, *, started: bool = True, given: float | None = None) -> None:
        waiting = QueuedRollout(rollout_id=name, episode_id=name, bounds=VersionBounds(0, 0), length=100, place=0)
        attempt = RunningAttempt(
            run=self.run, attempt_id=name, rollout=waiting, start=0, max_tokens=10_000, started=started,
            given=self.now if given is None else given,
        )  # fmt: skip
        self.run.start(attempt, self.session)

    def end(self, name: str) -> None:
        self.session.attempts[name].unassign()

    def beat(self, tokens: int = RUNNING * RATE, seconds: float = 1.0, **more: Any) -> None:
        """What a heartbeat says after so long."""
        last = self.session.beat
        said: dict[str, Any] = {
            "state": WorkerState.READY, "tokens_generated": last.tokens_generated + tokens,
            "busy_s": last.busy_s + seconds, "uptime_s": last.uptime_s + seconds, "held": False, "quiet_s": 0.0,
        }  # fmt: skip
        self.session.hear(msgspec.structs.replace(HeartbeatReport(), **(said | more)), self.now)

    def look(self, times: int = 4) -> None:
        for _ in range(times):
            self.now += 0.26
            if not self.session.append_stream.storing:
                self.session.append_stream.tokens_came(self.now)
            assert self.moves.due(self.now)
            list(self.moves.learn(self.now))

    def rate(self) -> float:
        return self.moves._speeds["w1"].rate(RUNNING, 100.0) if "w1" in self.moves._speeds else 0.0


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.look()
    made.beat()
    made.look()
    return made


def test_a_speed_is_learnt_of_a_steady_second(scene: Scene) -> None:
    scene.beat()
    scene.look()
    assert scene.rate() == pytest.approx(RATE)


@pytest.mark.parametrize("said", [{"held": True}, {"state": WorkerState.INSTALLING}, {"quiet_s": 0.8}, {"busy_s": 1.2}])
def test_nothing_is_learnt_while_a_worker_is_held_installs_or_its_engine_rests(scene: Scene, said: Any) -> None:
    scene.beat(1, **said)
    scene.look()
    assert scene.rate() == 0.0
    if "quiet_s" not in said and "busy_s" not in said:
        scene.beat(2)  # in this one it was let go
        scene.look()
        assert scene.rate() == 0.0
    scene.beat()
    scene.look()
    assert scene.rate() == pytest.approx(RATE)


@pytest.mark.parametrize("when", [0, 2])
def test_nothing_is_learnt_while_the_store_is_waited_for(scene: Scene, when: int) -> None:
    scene.look(when)
    scene.run.mirror.doubt()
    scene.look(1)
    scene.run.mirror.note_reconciled()
    scene.beat(3)
    scene.look()
    assert scene.rate() == 0.0
    scene.session.append_stream.message_came()
    scene.look(2)
    scene.session.append_stream.message_answered()
    scene.beat(3)
    scene.look()
    assert scene.rate() == 0.0
    scene.beat()
    scene.look()
    assert scene.rate() == pytest.approx(RATE)


def test_nothing_is_learnt_of_a_time_in_which_nobody_looked(scene: Scene) -> None:
    """The loop that looks waits for the store too, and misses heartbeats that said `held`."""
    scene.now += 20.0
    scene.beat(5, 20.0)
    scene.look()
    assert scene.rate() == 0.0


def test_nothing_is_learnt_where_as_many_ended_as_began(scene: Scene) -> None:
    for number in range(2):
        scene.end(f"a{number}")
        scene.begin(f"b{number}")
    scene.beat(40)
    scene.look()
    assert scene.rate() == 0.0


@pytest.mark.parametrize("gone", ["w1", "w2", ""])
def test_a_worker_that_left_since_it_was_looked_at_is_neither_asked_nor_chosen(scene: Scene, gone: str) -> None:
    for name in ("p", "q"):
        scene.begin(name, started=False, given=scene.now - 9)
    other = scene.attach("w2")
    scene.beat()
    scene.look()
    scene.beat()
    scene.look()

    def worker(session: WorkerSession) -> WorkerView:
        return WorkerView(
            session_id=session.session_id, worker_id=session.worker_id, slots=64, running=len(session.attempts),
            pending=len(session.pending), installed=1, target=1, max_model_len=10_000,
        )  # fmt: skip

    workers = [(session, worker(session)) for session in (scene.session, other)]
    for session, _ in workers:
        if session.worker_id == gone:
            scene.state.detach(session)
    scene.moves.decide(scene.run, workers, scene.now)
    sent = scene.session.outbox.take()
    asked = [ref.rollout_id for message in sent if isinstance(message, Release) for ref in message.attempts]
    assert asked == ([] if gone else ["q"])


def test_nothing_is_learnt_of_a_span_in_which_heartbeats_are_missing(scene: Scene) -> None:
    scene.look(60)
    scene.beat(int(15.0) * RUNNING * RATE // 4, 15.0)
    scene.look()
    assert scene.rate() == 0.0


def test_workers_that_have_long_been_gone_are_forgotten(scene: Scene) -> None:
    """Each spot machine has a name of its own."""
    for number in range(50):
        session = scene.attach(f"spot{number}")
        scene.moves._speeds[session.worker_id] = WorkerThroughput()
        scene.look(1)
        scene.state.detach(session)
    assert len(scene.moves._speeds) >= 50
    scene.now += 300.0
    scene.look(1)
    assert len(scene.moves._speeds) >= 50  # they may come back
    scene.now += 301.0
    scene.look(1)
    assert set(scene.moves._speeds) <= {"w1"}
    assert set(scene.moves._seen) == {"w1"}


def test_the_time_that_prompts_take_to_be_read_does_not_count(scene: Scene) -> None:
    """A read takes 0.6 s of the second; the step that does it makes a token of each rollout, too."""
    read: dict[str, Any] = {"prompt_reads": 1, "prompt_tokens": 6_000, "prompt_s": 0.6}
    scene.beat(round(0.4 * RUNNING * RATE) + RUNNING, **read)
    scene.look()
    assert scene.rate() == pytest.approx(RATE, rel=0.7)  # nothing better is known
    scene.beat(**read)
    scene.look()
    assert scene.rate() == pytest.approx(RATE, rel=0.5)
    known = scene.rate()
    for number in range(20):
        more: dict[str, Any] = {
            "prompt_reads": 2 + number,
            "prompt_tokens": 12_000,
            "prompt_s": 0.6 + 0.3 * (number + 1),
        }
        scene.beat(round(0.7 * RUNNING * RATE) + RUNNING, **more)
        scene.look()
    assert known < scene.rate() <= 1.05 * RATE


def test_a_prompt_that_is_being_read_counts_once_it_has_been_read(scene: Scene) -> None:
    """Else its beginning would make the worker look slow, and its end fast."""
    scene.beat()
    scene.look()
    scene.begin("late", started=False)
    scene.beat(RUNNING * RATE // 4)  # three quarters of the second were spent reading
    scene.look()
    assert scene.rate() == pytest.approx(RATE)
    scene.session.attempts["late"].begin(scene.now)
    scene.beat(round(0.5 * RUNNING * RATE) + RUNNING, prompt_reads=1, prompt_tokens=9_000, prompt_s=1.25)
    scene.look()
    assert scene.rate() == pytest.approx(RATE, rel=0.1)


def crowd(scene: Scene) -> list[tuple[WorkerSession, WorkerView]]:
    """A worker that makes a token of each of its rollouts in a second, and an idle one on which one alone makes 30."""
    idle = scene.attach("w2")
    for name, load, tokens in (("w1", RUNNING, RUNNING), ("w2", 1, 30)):
        scene.moves._speeds[name] = WorkerThroughput()
        scene.moves._speeds[name].observe(load, 100.0, 60 * tokens, 60.0)
    scene.now += 60.0
    scene.look(1)
    return [
        (
            session,
            WorkerView(
                session_id=session.session_id, worker_id=session.worker_id, slots=64, running=len(session.attempts),
                installed=1, target=1, max_model_len=20_000,
            ),
        )
        for session in (scene.session, idle)
    ]  # fmt: skip


def asked(scene: Scene) -> list[str]:
    sent = scene.session.outbox.take()
    return [ref.rollout_id for message in sent if isinstance(message, Release) for ref in message.attempts]


def test_running_rollouts_leave_a_crowded_worker_and_are_counted(scene: Scene) -> None:
    workers = crowd(scene)
    scene.moves.decide(scene.run, workers, scene.now)
    gone = asked(scene)
    assert gone
    assert scene.run.moves.take_moves() == len(gone) == scene.run.moves.moves
    scene.moves.decide(scene.run, workers, scene.now)
    assert not set(asked(scene)) & set(gone)  # none is asked for twice


def test_no_running_rollout_moves_to_slots_that_the_queue_will_fill(scene: Scene) -> None:
    workers = crowd(scene)
    queued = QueuedRollout(rollout_id="q", episode_id="q", bounds=VersionBounds(0, 0), length=100, place=9)
    scene.run.queue.add(queued)
    scene.moves.decide(scene.run, workers, scene.now)
    assert asked(scene) == []
    scene.moves.decide(scene.run, workers, scene.now, reserved_slots=2 * 64)  # they are not for such rollouts
    assert asked(scene)


def test_a_rule_that_promised_too_much_moves_one_rollout_a_minute(scene: Scene) -> None:
    workers = crowd(scene)
    for _ in range(20):
        scene.run.moves.judge(100.0, 10.0)
    scene.moves.decide(scene.run, workers, scene.now)
    assert len(asked(scene)) == 1
    scene.now += 30.0
    scene.moves.decide(scene.run, workers, scene.now)
    assert asked(scene) == []
