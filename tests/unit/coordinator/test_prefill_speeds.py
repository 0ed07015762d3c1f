"""The coordinator learns each worker's prefill from its heartbeats."""

import pytest

from ebbtide.coordinator.dispatch.speeds import PrefillSpeeds
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.worker_reports import AttachReport, HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.fleet import PROTOCOL_VERSION, EngineInfo, WorkerKind


class Fleet:
    """Workers that say in each heartbeat what they have read since their start."""

    def __init__(self) -> None:
        self.state, self.speeds = CoordinatorState(), PrefillSpeeds()
        self._said: dict[str, list[float]] = {}

    def attach(self, name: str, kind: WorkerKind = WorkerKind.RESERVED) -> WorkerSession:
        engine = EngineInfo(model="m", vocab_size=100, max_model_len=10_000)
        hello = AttachReport(worker_id=name, kind=kind, protocol_version=PROTOCOL_VERSION, slots=64, engine=engine)
        session = self.state.new_session(name, hello, 0.0)
        self.state.attach(session)
        self._said[name] = [0, 0, 0.0]
        return session

    def read(self, session: WorkerSession, token_s: float, beats: int = 40) -> None:
        for number in range(beats):
            reads, tokens, seconds = self._said[session.session_id]
            more = 100 + 900 * (number % 3)
            said = self._said[session.session_id] = [reads + 1, tokens + more, seconds + more * token_s]
            beat = HeartbeatReport(prompt_reads=int(said[0]), prompt_tokens=int(said[1]), prompt_s=said[2])
            session.hear(beat, 0.0)
            self.speeds.learn(self.state.sessions.values())


def test_each_worker_has_its_own_speed_and_a_new_one_that_of_the_others() -> None:
    fleet = Fleet()
    fast, slow = fleet.attach("fast"), fleet.attach("slow")
    assert fleet.speeds.rate(fast) == 0.0
    fleet.read(fast, 1e-4)
    fleet.read(slow, 1e-3)
    assert fleet.speeds.rate(fast) == pytest.approx(10_000.0, rel=0.1)
    assert fleet.speeds.rate(slow) == pytest.approx(1_000.0, rel=0.1)
    new = fleet.attach("new")
    assert fleet.speeds.rate(slow) < fleet.speeds.rate(new) < fleet.speeds.rate(fast)


def test_what_a_borrowed_worker_waits_for_its_host_is_no_reading() -> None:
    fleet = Fleet()
    lent = fleet.attach("lent", WorkerKind.BORROWED)
    fleet.read(lent, 1.0)
    assert fleet.speeds.rate(lent) == 0.0


def test_workers_that_say_nothing_of_prompts_teach_nothing() -> None:
    fleet = Fleet()
    old = fleet.attach("old")
    for number in range(3):
        old.hear(HeartbeatReport(tokens_generated=number), 0.0)
        fleet.speeds.learn(fleet.state.sessions.values())
    assert fleet.speeds.rate(old) == 0.0
