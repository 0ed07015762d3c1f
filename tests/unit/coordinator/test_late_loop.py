"""A coordinator whose event loop is late loses no worker by its own lateness, and still finds those that died."""

import pytest

from ebbtide.coordinator.fleet.worker_health import WorkerTrust
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.run_events import SilentRunEvents
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from tests.unit.coordinator.model_fleet import ModelFleet

#: Turns of the loop until a message that has come is taken in.
TURNS = 4


class LateFleet(ModelFleet):
    """Workers with a heartbeat each second, at a coordinator whose loop takes `turn_s` for a turn."""

    def __init__(self, workers: int, turn_s: float) -> None:
        self.now = 100.0
        super().__init__(workers, clock=lambda: self.now)
        self.registry = WorkerRegistry(CoordinatorSettings(), self.state, WorkerTrust(self.state), SilentRunEvents())
        self.turn_s, self.sent, self.judged = turn_s, dict[str, float](), -1.0
        self.dead = set[str]()
        for session in self.state.sessions.values():  # until now the loop was on time
            self.registry.hear(session, HeartbeatReport())

    def pass_time(self, seconds: float) -> None:
        sessions = list(self.state.sessions.values())
        until = self.now + seconds
        while self.now < until:
            self.now += max(self.turn_s, 0.05)
            self.state.overload.ticked(self.now)
            for session in sessions:
                sent = self.sent.setdefault(session.session_id, self.now)
                if session.session_id not in self.dead and self.now - sent >= 1.0 + TURNS * self.turn_s:
                    self.sent[session.session_id] = self.now - TURNS * self.turn_s
                    if not session.gone:
                        self.registry.hear(session, HeartbeatReport())
            if self.now - self.judged >= self.registry.judge_every_s:
                self.judged = self.now
                list(self.registry.judge(self.now))


@pytest.mark.parametrize("workers", [5, 50])  # where many fall silent at once that alone gives them more time
def test_no_worker_is_lost_because_its_heartbeats_wait_in_the_coordinator(workers: int) -> None:
    fleet = LateFleet(workers, turn_s=0.9)
    fleet.pass_time(60.0)
    assert len(fleet.state.sessions) == workers


def test_a_worker_that_died_is_found_within_ten_seconds_although_the_loop_is_late() -> None:
    fleet = LateFleet(50, turn_s=0.4)
    fleet.pass_time(20.0)
    dead = next(iter(fleet.state.sessions))
    fleet.dead.add(dead)
    fleet.pass_time(10.0)
    assert dead not in fleet.state.sessions
    assert len(fleet.state.sessions) == 49
