"""Where rivals place rollouts, and which they move."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from benchmarks.rivals.rlboost.group_sweeps import GroupSweeps
from benchmarks.rivals.rlboost.pending_balance import PendingBalance
from benchmarks.rivals.rollpacker_policy import FewestResponses
from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.attempt_records import started
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.worker_reports import AttachReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.world.rival_policies import GroupTurns
from ebbtide.simulator.world.virtual_coordinator import VirtualCoordinator
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import PROTOCOL_VERSION, EngineInfo, WorkerKind
from ebbtide.types.run import EnvironmentSpec, RunSpec
from ebbtide.types.weights import PolicyVersion

VERSION = PolicyVersion(policy="policy", version=1, parent=0, step=0)


class Coordinator:
    """A coordinator's state with one run and some engines that have its version."""

    def __init__(self, engines: int, slots: int = 64) -> None:
        self.state = CoordinatorState(lambda: 0.0)
        self.run = self.state.add_run("r", RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e")))
        with self.run.mirror.rereading():
            self.run.reread({1: VERSION}, self.run.new_queue(), {})
        self.engines = [self._attach(f"w{index}-1.0", slots) for index in range(engines)]
        self.reading = set[str]()  # rollouts that their engines have begun to read

    def worker(self, session_id: str) -> SimpleNamespace:
        """What a rival sees of a worker: which rollouts its engine runs."""
        return SimpleNamespace(host=SimpleNamespace(engine=SimpleNamespace(runs=self.reading.__contains__)))

    def rollout(self, rollout_id: str) -> SimpleNamespace:
        """A rollout as the store has it. Its ID begins with its group."""
        return SimpleNamespace(rollout_id=rollout_id, step=0, group=int(rollout_id.partition(".")[0]), stored=0)

    def _attach(self, name: str, slots: int) -> WorkerSession:
        engine = EngineInfo(model="m", vocab_size=8, max_model_len=4096, architecture="m")
        hello = AttachReport(
            worker_id=name, kind=WorkerKind.SPOT, protocol_version=PROTOCOL_VERSION, slots=slots, engine=engine
        )
        session = self.state.new_session(f"s-{name}", hello, 0.0)
        self.state.attach(session)
        session.serve("r", 0.0)
        session.installed = ("r", VERSION)
        return session

    def queue(self, groups: int, size: int) -> None:
        for group in range(groups):
            for one in range(size):
                place = group * size + one
                self.run.admit(
                    QueuedRollout(
                        rollout_id=f"{group}.{one}",
                        episode_id=f"{group}.{one}",
                        bounds=VersionBounds(1, 1),
                        length=10,
                        place=place,
                        group=group * size,
                    )
                )

    def start(self, placements: Sequence[Placement], *, begun: bool = True) -> None:
        for rollout_id, session_id in placements:
            queued = self.run.take_queued(rollout_id)
            assert queued is not None
            attempt = started(self.run, queued, f"a{rollout_id}", stored=0, number=1, max_tokens=100, now=0.0)
            self.run.start(attempt, self.state.sessions[session_id])
            if begun:
                attempt.begin(0.0)

    def asked_back(self) -> dict[str, str]:
        return {one.rollout.rollout_id: one.target for one in self.run.running.values() if one.target}

    def as_virtual(self) -> VirtualCoordinator:
        return cast("VirtualCoordinator", self)


def per_engine(placements: Sequence[Placement]) -> Counter[str]:
    return Counter(one.session_id for one in placements)


def balance(fleet: Coordinator, *, keeps: bool = True, pending_limit: int = 8, sweep: int = 64) -> PendingBalance:
    return PendingBalance(fleet.as_virtual(), keeps=keeps, pending_limit=pending_limit, sweep=sweep, balance=True)


def test_verl_deals_complete_groups_in_turn_however_many_an_engine_has() -> None:
    fleet = Coordinator(3, slots=4)
    fleet.queue(groups=7, size=4)
    placements = GroupTurns(fleet.as_virtual()).place(fleet.run, fleet.engines, 0.0)
    assert [per_engine(placements)[one.session_id] for one in fleet.engines] == [12, 8, 8]
    for group in range(7):
        homes = {one.session_id for one in placements if one.rollout_id.startswith(f"{group}.")}
        assert homes == {fleet.engines[group % 3].session_id}


def test_verl_deals_a_lost_engines_group_again() -> None:
    fleet = Coordinator(2)
    fleet.queue(groups=2, size=2)
    turns = GroupTurns(fleet.as_virtual())
    first = turns.place(fleet.run, fleet.engines, 0.0)
    again = turns.place(fleet.run, fleet.engines[1:], 1.0)
    assert per_engine(first)[fleet.engines[1].session_id] == 2
    assert set(per_engine(again)) == {fleet.engines[1].session_id}


def test_rlboosts_code_sends_so_many_complete_groups_a_second_to_engines_in_turn() -> None:
    fleet = Coordinator(3)
    fleet.queue(groups=6, size=4)
    placing = GroupSweeps(fleet.as_virtual(), keeps=True, sweep=16)
    placements = placing.place(fleet.run, fleet.engines, 0.0)
    assert sorted(per_engine(placements).values()) == [4, 4, 8]
    for group in range(4):
        assert len({one.session_id for one in placements if one.rollout_id.startswith(f"{group}.")}) == 1
    fleet.start(placements)
    assert placing.place(fleet.run, fleet.engines, 0.5) == []
    assert len(placing.place(fleet.run, fleet.engines, 1.0)) == 8


def test_rlboosts_code_sends_nothing_to_an_engine_in_which_something_waits() -> None:
    fleet = Coordinator(2)
    fleet.queue(groups=4, size=4)
    placing = GroupSweeps(fleet.as_virtual(), keeps=True, sweep=8)
    fleet.start(placing.place(fleet.run, fleet.engines, 0.0)[:4], begun=False)
    again = placing.place(fleet.run, fleet.engines, 1.0)
    assert set(per_engine(again)) == {fleet.engines[1].session_id}


def test_rlboost_sends_to_the_engine_where_the_fewest_wait() -> None:
    fleet = Coordinator(2)
    fleet.queue(groups=1, size=6)
    placing = balance(fleet)
    placements = placing.place(fleet.run, fleet.engines, 0.0)
    assert set(per_engine(placements).values()) == {3}
    fleet.start(placements[:1], begun=False)
    fleet.start(placements[1:2])
    rest = placing.place(fleet.run, fleet.engines, 0.0)
    assert rest[0].session_id == fleet.engines[1].session_id


def test_rlboost_holds_what_would_wait_beyond_theta() -> None:
    fleet = Coordinator(2)
    fleet.queue(groups=2, size=8)
    placements = balance(fleet, pending_limit=3).place(fleet.run, fleet.engines, 0.0)
    assert set(per_engine(placements).values()) == {3}


def test_rlboost_sends_no_more_between_two_looks_than_a_sweep_has() -> None:
    fleet = Coordinator(2)
    fleet.queue(groups=2, size=8)
    placing = balance(fleet, sweep=6)
    first = placing.place(fleet.run, fleet.engines, 0.0)
    fleet.start(first)
    assert len(first) == 6
    assert not placing.place(fleet.run, fleet.engines, 0.5)
    assert len(placing.place(fleet.run, fleet.engines, 1.0)) == 6


def test_rollpacker_sends_each_response_to_the_engine_with_the_fewest_whatever_its_group() -> None:
    fleet = Coordinator(3)
    fleet.queue(groups=1, size=8)
    placing = FewestResponses(fleet.as_virtual(), keeps=False)
    first = placing.place(fleet.run, fleet.engines, 0.0)
    assert sorted(per_engine(first).values()) == [2, 3, 3]
    fleet.start(first[:1])
    again = placing.place(fleet.run, fleet.engines, 0.0)
    assert again[0].session_id != first[0].session_id


def test_rlboost_counts_only_instances_that_get_work() -> None:
    fleet = Coordinator(3)
    placing = balance(fleet)
    assert placing.remote() == 3
    placing.most = 2
    assert placing.remote() == 2
    fleet.queue(groups=1, size=6)
    assert len(per_engine(placing.place(fleet.run, fleet.engines, 0.0))) == 2


def test_rlboost_moves_one_that_waits_to_an_engine_where_none_does() -> None:
    fleet = Coordinator(2)
    fleet.queue(groups=1, size=4)
    session = fleet.engines[0].session_id
    fleet.start([Placement(f"0.{index}", session) for index in range(4)], begun=False)
    placing = balance(fleet)
    placing.move(fleet.run, fleet.engines, 5.0)
    assert fleet.asked_back() == {"0.3": "w1-1.0"}
    placing.move(fleet.run, fleet.engines, 6.0)
    assert len(fleet.asked_back()) == 1  # the receiver has one coming


def test_rlboost_lets_a_rollout_stay_that_an_engine_reads() -> None:
    fleet = Coordinator(2)
    fleet.queue(groups=1, size=2)
    session = fleet.engines[0].session_id
    fleet.start([Placement(f"0.{index}", session) for index in range(2)], begun=False)
    fleet.reading.add("0.1")
    placing = balance(fleet)
    placing.move(fleet.run, fleet.engines, 5.0)
    assert fleet.asked_back() == {"0.0": "w1-1.0"}


def test_rlboost_lets_running_rollouts_stay_while_no_table_shows_a_plateau() -> None:
    fleet = Coordinator(2)
    fleet.queue(groups=1, size=8)
    session = fleet.engines[0].session_id
    fleet.start([Placement(f"0.{index}", session) for index in range(8)])
    placing = balance(fleet)
    placing.move(fleet.run, fleet.engines, 5.0)
    assert not fleet.asked_back()


def test_rlboost_moves_what_an_engine_executes_beyond_the_plateau_to_one_without_work() -> None:
    fleet = Coordinator(2)
    fleet.queue(groups=1, size=8)
    session = fleet.engines[0].session_id
    fleet.start([Placement(f"0.{index}", session) for index in range(8)])
    for keeps, moved in ((False, 0), (True, 5)):  # without stored tokens a move would cost them all
        placing = balance(fleet, keeps=keeps)
        for running in range(1, 9):
            placing.table.observe(running, 10.0, 100 * min(running, 3), 1.0)
        placing.move(fleet.run, fleet.engines, 5.0)
        assert len(fleet.asked_back()) == moved


def test_rlboost_uses_no_more_remote_engines_than_help() -> None:
    fleet = Coordinator(3)
    fleet.queue(groups=1, size=6)
    placing = balance(fleet)
    placing.local, placing.most = "w0", 1
    placements = placing.place(fleet.run, fleet.engines, 0.0)
    assert set(per_engine(placements)) == {one.session_id for one in fleet.engines[:2]}
