"""What the coordinator learns of workers that differ: kinds, memory, losses."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from ebbtide.coordinator.dispatch.capacity import SlotLimits
from ebbtide.coordinator.dispatch.speeds import FleetSpeeds
from ebbtide.coordinator.forecasts.length_learner import EndedGroup
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_reports import AttachReport, HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import PROTOCOL_VERSION, EngineInfo, WorkerKind
from ebbtide.types.run import EnvironmentSpec, RunSpec

HOUR = 3600.0


class Fleet:
    """Workers that a test attaches, and one run that they serve."""

    def __init__(self) -> None:
        self.state = CoordinatorState()
        self.run = self.state.add_run("r", RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e")))
        self.now = 100.0

    def attach(self, name: str, *, kind: WorkerKind = WorkerKind.SPOT, slots: int = 64, **engine: Any) -> WorkerSession:
        known: dict[str, Any] = {"model": "m", "vocab_size": 100, "max_model_len": 10_000}
        hello = AttachReport(
            worker_id=name,
            kind=kind,
            protocol_version=PROTOCOL_VERSION,
            slots=slots,
            engine=EngineInfo(**(known | engine)),
            site="here",
        )
        session = self.state.new_session(f"session of {name} at {self.now}", hello, self.now)
        session.serve("r", self.now)
        self.state.attach(session)
        return session

    def begin(self, session: WorkerSession, name: str, *, prompt: int = 100, made: int = 0) -> None:
        waiting = QueuedRollout(rollout_id=name, episode_id=name, bounds=VersionBounds(0, 0), length=prompt, place=0)
        attempt = RunningAttempt(
            run=self.run, attempt_id=name, rollout=waiting, start=0, max_tokens=10_000, started=True, stored=made
        )
        attempt.assign(session)

    def learn(self, *lengths: int) -> None:
        """As many responses of each length have ended."""
        self.run.lengths.forecasts.learner.groups_ended([EndedGroup(lengths=lengths)] * 500)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def offered(fleet: Fleet, session: WorkerSession, offers: SlotLimits, **beat: Any) -> int:
    """What the worker offers after its next heartbeat."""
    fleet.now += 3.0
    session.hear(msgspec.structs.replace(HeartbeatReport(), uptime_s=fleet.now, **beat), fleet.now)
    list(offers.update(fleet.now))
    return session.slots


def test_a_worker_offers_the_slots_that_its_memory_holds(fleet: Fleet) -> None:
    fleet.learn(2000)
    offers = SlotLimits(fleet.state)
    small, large = fleet.attach("small", kv_tokens=21_000), fleet.attach("large", kv_tokens=1_000_000)
    silent = fleet.attach("silent")
    assert (offered(fleet, large, offers), silent.slots) == (64, 64)
    assert offered(fleet, small, offers) == pytest.approx(0.95 * 21_000 / 2000, rel=0.15)


def test_a_worker_where_rollouts_wait_for_memory_offers_no_further_slot(fleet: Fleet) -> None:
    fleet.learn(500)
    offers, session = SlotLimits(fleet.state), fleet.attach("w", kv_tokens=58_000)
    for number in range(3):
        fleet.begin(session, f"a{number}")
    assert offered(fleet, session, offers) > 3
    assert offered(fleet, session, offers, unadmitted=1) == 3
    assert offered(fleet, session, offers) > 3


def test_a_worker_with_long_rollouts_offers_fewer_slots_and_more_again_when_they_end(fleet: Fleet) -> None:
    fleet.learn(500, 8000)
    offers, session = SlotLimits(fleet.state), fleet.attach("w", kv_tokens=58_000)
    at_first = offered(fleet, session, offers)
    for number in range(7):
        fleet.begin(session, f"a{number}", made=7500)
    assert offered(fleet, session, offers) == 7
    assert not fleet.state.has_room("r")
    for attempt in list(session.attempts.values()):
        attempt.unassign()
    assert fleet.state.has_room("r")
    assert offered(fleet, session, offers) == pytest.approx(at_first, abs=2)


def test_a_worker_is_looked_at_only_after_a_heartbeat(fleet: Fleet) -> None:
    fleet.learn(2000)
    offers, session = SlotLimits(fleet.state), fleet.attach("w", kv_tokens=21_000)
    list(offers.update(fleet.now))
    before = session.revision
    for _ in range(8):
        list(offers.update(fleet.now))
    assert session.revision == before


def learnt(tokens_per_s: float) -> WorkerThroughput:
    speed = WorkerThroughput()
    speed.observe(8, 100.0, round(8 * tokens_per_s * 10), 10.0)
    return speed


def fit(fleet: FleetSpeeds, sessions: Iterable[WorkerSession], seen: dict[str, WorkerThroughput], now: float) -> bool:
    """Whether the speeds were fitted anew."""
    steps = fleet.fit(sessions, seen, {}, now)
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return bool(over.value)


def test_a_new_worker_counts_as_fast_as_others_on_its_device(fleet: Fleet) -> None:
    for name, device in (("f1", "fast"), ("f2", "fast"), ("s1", "slow"), ("x1", "")):
        fleet.attach(name, device=device)
    speeds = {"f1": learnt(90), "f2": learnt(90), "s1": learnt(30), "x1": learnt(60)}
    fleet_speeds = FleetSpeeds()
    assert fit(fleet_speeds, fleet.state.sessions.values(), speeds, fleet.now)
    rates = {}
    for device in ("fast", "slow", "new", ""):
        curve = fleet_speeds.curve(fleet.attach(f"new on {device}", device=device))
        rates[device] = curve.rate(8) if curve is not None else 0.0
    assert rates == pytest.approx({"fast": 90, "slow": 30, "new": 75, "": 60}, rel=0.03)


def test_a_kind_is_remembered_while_no_machine_of_it_is_there_but_not_without_end(fleet: Fleet) -> None:
    fleet_speeds, session = FleetSpeeds(), fleet.attach("f1", device="fast")
    fit(fleet_speeds, [session], {"f1": learnt(90)}, fleet.now)
    fit(fleet_speeds, [], {}, fleet.now + 100.0)
    curve = fleet_speeds.curve(session)
    assert curve is not None
    assert curve.rate(8) == pytest.approx(90, rel=0.01)
    for number in range(300):
        fleet.now += 10.0
        other = fleet.attach(f"o{number}", device=f"device {number}")
        fit(fleet_speeds, [other], {f"o{number}": learnt(9)}, fleet.now + 100.0)
    assert len(fleet_speeds._kinds) == 256
    curve = fleet_speeds.curve(session)
    assert curve is None or curve.rate(8) == pytest.approx(9, rel=0.01)


def test_others_have_their_turn_after_each_kind_and_the_former_curves_hold_until_all_are_fitted(fleet: Fleet) -> None:
    sessions = [fleet.attach(f"w{number}", device=f"device {number}") for number in range(3)]
    fleet_speeds = FleetSpeeds()
    fit(fleet_speeds, sessions, {one.worker_id: learnt(90) for one in sessions}, fleet.now)

    def rates() -> list[float]:
        return [curve.rate(8) for one in sessions if (curve := fleet_speeds.curve(one)) is not None]

    steps = fleet_speeds.fit(sessions, {one.worker_id: learnt(30) for one in sessions}, {}, fleet.now + 10.0)
    held = [rates() for _ in steps]
    assert len(held) == 3
    assert all(one == pytest.approx([90] * 3, rel=0.01) for one in held)
    assert rates() == pytest.approx([30] * 3, rel=0.01)


def test_the_speeds_of_a_fleet_are_fitted_every_few_seconds_alone(fleet: Fleet) -> None:
    fleet_speeds, session = FleetSpeeds(), fleet.attach("f1")
    assert fleet_speeds.curve(session) is None
    assert fit(fleet_speeds, [session], {"f1": learnt(90)}, fleet.now)
    assert not fit(fleet_speeds, [session], {"f1": learnt(30)}, fleet.now + 1.0)
    assert fit(fleet_speeds, [session], {"f1": learnt(30)}, fleet.now + 6.0)
