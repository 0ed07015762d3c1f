"""Decisions are recorded with all that they depend on, into a file that is bounded and refused where it is damaged."""

import contextlib
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import pytest
from structlog.testing import capture_logs

from ebbtide.coordinator import decision_log
from ebbtide.coordinator.decision_log import FORMAT, CallRecord, DecisionLog, LogHead, packed, read_log
from ebbtide.coordinator.dispatch.dispatch_round import DispatchRound
from ebbtide.coordinator.fleet.worker_health import WorkerTrust
from ebbtide.coordinator.recording import (
    CALLS,
    RecordedAppends,
    RecordedAttempt,
    RecordedRunEpisodes,
    RecordedRunMirror,
    RecordedRunState,
    RecordedRunVersions,
    RecordedSession,
    RecordedState,
    RecordedTrust,
    Recorder,
)
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_episodes import RunEpisodes
from ebbtide.coordinator.state.run_mirror import RunMirror
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.run_versions import RunVersions
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import SessionAppends, WorkerSession
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.decision_replay import PLACE, STEP, ReplayedCoordinator, ReplayReport, main
from ebbtide.types.run import EnvironmentSpec, RunSpec
from tests.unit.coordinator.model_fleet import ENGINE, rollout
from tests.unit.coordinator.virtual_fleet import VirtualFleet, balanced, lived, ordered

#: Methods of the state that are not recorded, by the reason.
UNRECORDED: Final = {
    "it changes nothing": (
        "CoordinatorState.at_work", "CoordinatorState.serving", "CoordinatorState.has_room",
        "CoordinatorState.longest_context", "CoordinatorState.sheds", "RunMirror.paused", "RunState.new_queue",
        "RunState.is_unconfirmed", "RunState.siblings", "WorkerSession.lent", "WorkerSession.version_of",
        "WorkerTrust.trusts", "WorkerTrust.quarantined", "WorkerTrust.quarantined_s", "WorkerTrust.lacking",
    ),
    "only rounds call it": (
        "RunState.take_made", "RunState.note_share", "RunState.foresee", "RunningAttempt.give_up_move",
        "RunningAttempt.foresee", "WorkerSession.learn_plateau", "WorkerSession.learn_prefill",
        "WorkerSession.learn_rate", "WorkerSession.offer",
    ),
    "it is part of recorded calls, or made of them": (
        "CoordinatorState.mark_stale", "CoordinatorState.replace_incarnation", "CoordinatorState.episode_over",
        "RunEpisodes.acknowledged", "RunEpisodes.queued", "RunEpisodes.started", "RunEpisodes.put_back",
        "RunEpisodes.finished", "RunMirror.mark_stale", "RunMirror.rereading", "RunMirror.note_ended",
        "RunState.note_worker", "RunState.close", "RunVersions.reread", "RunningAttempt.note_cached",
        "WorkerSession.hold", "WorkerSession.begun", "WorkerSession.let_go", "WorkerSession.forget",
        "WorkerSession.close",
    ),
    "no decision depends on it": (
        "CoordinatorState.send_again", "CoordinatorState.skip_run", "CoordinatorState.sweep", "CoordinatorState.swept",
        "CoordinatorState.begin_incarnation", "CoordinatorState.learn_durability", "CoordinatorState.doubt",
        "RunEpisodes.group_place", "RunState.note_resumed", "RunState.take_resumes", "RunState.clear",
        "RunningAttempt.news", "SessionAppends.streaming", "SessionAppends.send_again", "SessionAppends.stream_opened",
        "WorkerSession.pace_flushes",
    ),
}  # fmt: skip
HEAD: Final = LogHead(FORMAT, "test")
SPEC: Final = RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e"))
#: A rollout that was placed once, in the first batch.
ONCE: Final = "x6"
RECORDED: Final = {
    CoordinatorState: RecordedState,
    RunState: RecordedRunState,
    RunMirror: RecordedRunMirror,
    RunVersions: RecordedRunVersions,
    RunEpisodes: RecordedRunEpisodes,
    RunningAttempt: RecordedAttempt,
    WorkerSession: RecordedSession,
    SessionAppends: RecordedAppends,
    WorkerTrust: RecordedTrust,
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "decisions"
    lived(record_decisions=str(path)).parts.close()
    return path


def rewritten(source: Path, target: Path, change: Callable[[CallRecord], CallRecord | None]) -> Path:
    """The file with each record as `change` makes it; None drops one."""
    heads: list[LogHead] = []
    records = [change(record) for _, record in read_log(source, heads.append)]
    target.write_bytes(b"".join(packed(one) for one in [*heads, *records] if one is not None))
    return target


def framed(head: dict[str, object]) -> bytes:
    data = msgspec.msgpack.encode(head)
    return len(data).to_bytes(4, "big") + data


def played(path: Path) -> ReplayReport:
    return ReplayedCoordinator().play(path)


def test_what_lived_in_virtual_time_is_decided_again(recorded: Path) -> None:
    report = played(recorded)
    assert report.equal
    assert report.placements == report.placements_equal == len(lived().placed)
    assert report.decisions == report.decisions_equal > 0
    assert report.placements_added == report.decisions_added == 0


def test_moves_are_decided_again_by_the_speeds_that_workers_reported(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    fleet = balanced(record_decisions=str(path))
    fleet.parts.close()
    told = [decision[0] for _, record in read_log(path) if record.method == STEP for decision in record.decided]
    assert "RunningAttempt.move_to" in told
    assert {worker for _, _, worker in fleet.placed[4:]} == {"fast"}
    assert played(path).equal

    def unheard(record: CallRecord) -> CallRecord | None:
        return None if record.method == "WorkerSession.hear" else record

    assert not played(rewritten(path, tmp_path / "changed", unheard)).equal


def test_starts_by_forecasts_of_lengths_are_decided_again(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    fleet = ordered(record_decisions=str(path))
    fleet.parts.close()
    last = [int(name.removeprefix("x")) for _, name, _ in fleet.placed[-64:]]
    assert last != sorted(last)
    assert played(path).equal


def test_rollouts_that_end_as_dead_letters_are_decided_again(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    fleet = VirtualFleet(record_decisions=str(path))
    small = fleet.attach("small")
    fleet.submit(1, length=ENGINE.max_model_len)
    while not fleet.letters:
        fleet.round(1.0)
        fleet.beat(small)
    fleet.parts.close()
    assert any(decision[0] == "DeadLetters" for _, record in read_log(path) for decision in record.decided)
    assert played(path).equal

    def spared(record: CallRecord) -> CallRecord:
        return msgspec.structs.replace(record, decided=[one for one in record.decided if one[0] != "DeadLetters"])

    assert not played(rewritten(path, tmp_path / "changed", spared)).equal


def test_the_first_placement_that_differs_is_told_with_both_sides(recorded: Path, tmp_path: Path) -> None:
    def elsewhere(record: CallRecord) -> CallRecord:
        if record.method != PLACE:
            return record
        moved = [(name, "nowhere" if name == ONCE else worker) for name, worker in record.decided]
        return msgspec.structs.replace(record, decided=moved)

    report = played(rewritten(recorded, tmp_path / "changed", elsewhere))
    assert report.placements - report.placements_equal == 1
    found = report.first_difference
    assert found is not None
    assert found.what == "placement of run r, number 7 of 8"
    assert "nowhere" in found.recorded
    assert ONCE in found.replayed


def test_a_placement_that_only_the_replay_makes_is_counted_and_told(recorded: Path, tmp_path: Path) -> None:
    def without_it(record: CallRecord) -> CallRecord:
        if record.method != PLACE:
            return record
        return msgspec.structs.replace(record, decided=[one for one in record.decided if one[0] != ONCE])

    report = played(rewritten(recorded, tmp_path / "changed", without_it))
    assert report.placements == report.placements_equal
    assert report.placements_added == 1
    assert not report.equal


def test_a_record_that_contradicts_those_before_it_is_named(recorded: Path, tmp_path: Path) -> None:
    def without_runs(record: CallRecord) -> CallRecord | None:
        return None if record.method == "CoordinatorState.add_run" else record

    path = rewritten(recorded, tmp_path / "changed", without_runs)
    said = r"changed: record 1 \(RunMirror.note_reconciled\) contradicts .*no run r was recorded"
    with pytest.raises(InvalidRequest, match=said):
        played(path)


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("CoordinatorState.sweep", {"run_ids": []}, "contradicts .*no such method is recorded"),
        ("CoordinatorState.__init__", {}, "contradicts .*no such method is recorded"),
        ("WorkerSession.serve", {"run_id": "r", "now": 1.0}, "contradicts .*no such method is recorded"),
        ("CoordinatorState.shed", {}, "has other arguments .*missing required field `level`"),
        ("CoordinatorState.shed", {"level": "1"}, "has other arguments .*Expected `int`, got `str` - at `.*level`"),
        ("CoordinatorState.shed", {"level": 1, "more": 1}, "has other arguments .*unknown field `more`"),
        ("CoordinatorState.attach", {"session": "s"}, "contradicts .*no session s was recorded"),
    ],
)
def test_only_recorded_methods_are_called_with_their_own_arguments(
    tmp_path: Path, method: str, given: dict[str, object], said: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(packed(HEAD) + packed(CallRecord(1.0, method, "", given)))
    with pytest.raises(InvalidRequest, match=rf"file: record 1 \({method}\) {said}"):
        played(path)


def test_a_process_that_was_killed_leaves_a_file_that_can_be_replayed(recorded: Path, tmp_path: Path) -> None:
    data, path, before = recorded.read_bytes(), tmp_path / "cut", 0
    for size in range(200, len(data), 997):
        path.write_bytes(data[:size])
        report = played(path)
        assert report.equal
        assert report.records >= before
        before = report.records
    path.write_bytes(data[:3])
    with pytest.raises(InvalidRequest, match="record 0 is damaged"):
        played(path)


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_file_is_refused_or_replayed_and_nothing_else(recorded: Path, tmp_path: Path, seed: int) -> None:
    draw, data, path = random.Random(seed), recorded.read_bytes(), tmp_path / "damaged"
    replayed = 0
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 8))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(InvalidRequest):
            played(path)
            replayed += 1
    assert 0 < replayed < 60


def test_what_is_no_recording_is_refused_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    files = {
        b"{}": "record 0 is damaged, or no file of record_decisions",
        b"\xff" * 64: "record 0 would have 4294967295 bytes",
        packed(
            LogHead(FORMAT + 1, "9.9")
        ): f"has format {FORMAT + 1} of release 9.9; this release reads format {FORMAT}",
        framed({"format": 1, "release": "0.2.0"}): f"has format 1 of release 0.2.0; this release reads format {FORMAT}",
        framed({"format": 9, "release": "9.9", "further": 1}): "has format 9 of release 9.9",
        packed(LogHead(FORMAT, "0")) + (3).to_bytes(4, "big") + b"abc": "record 1 is damaged",
    }
    for data, message in files.items():
        path.write_bytes(data)
        with pytest.raises(InvalidRequest, match=message):
            played(path)
    assert main([str(tmp_path / "absent")]) == 2
    assert "absent: cannot be read (No such file or directory); name a file" in capsys.readouterr().err


def test_a_record_larger_than_any_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "_MOST_RECORD_BYTES", 96)
    path = tmp_path / "file"
    path.write_bytes(packed(LogHead(FORMAT, "0")) + (97).to_bytes(4, "big") + b"x" * 97)
    with pytest.raises(InvalidRequest, match="record 1 would have 97 bytes, more than the 96 of any"):
        played(path)


def test_a_full_file_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    path, most = tmp_path / "decisions", 1 << 16
    log = DecisionLog(path, HEAD, most_bytes=most)
    run = RecordedState(Recorder(log.write, lambda: 1.0)).add_run("r", SPEC)
    with capture_logs() as logs:
        for _ in range(5_000):
            run.admit(rollout("x"))
    assert [one["event"] for one in logs] == ["decisions no longer recorded: the file is full"]
    assert most - 1_000 < path.stat().st_size <= most
    assert len(list(read_log(path))) > 100


def test_the_file_is_its_owners_and_a_former_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    for _ in range(2):
        DecisionLog(path, HEAD, most_bytes=1 << 16).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "decisions.former").exists()
    with pytest.raises(InvalidRequest, match="cannot be written") as caught:
        DecisionLog(tmp_path / "absent" / "decisions", HEAD, most_bytes=1 << 16)
    assert caught.value.field == "record_decisions"


def test_a_coordinator_that_records_nothing_has_the_plain_model() -> None:
    fleet = lived()
    attempts = [type(one) for one in fleet.run.running.values()]
    made = {type(one) for one in (fleet.state, fleet.run, fleet.parts.trust, fleet.rounds)}
    assert made == {CoordinatorState, RunState, WorkerTrust, DispatchRound}
    assert set(attempts) == {RunningAttempt}


@pytest.mark.parametrize("plain", RECORDED)
def test_each_method_of_the_state_is_recorded_or_has_a_reason_not_to_be(plain: type) -> None:
    methods = {name for name, _ in inspect.getmembers(plain, inspect.isfunction) if not name.startswith("_")}
    own = {name for name in vars(RECORDED[plain]) if not name.startswith("_")}
    reasons = {name for names in UNRECORDED.values() for name in names}
    unrecorded = {f"{plain.__name__}.{name}" for name in methods - own}
    own_reasons = {name for name in reasons if name.startswith(f"{plain.__name__}.")}
    assert unrecorded == own_reasons, "list it in `recording`, or say here why not; drop reasons for what is gone"


def test_calls_that_come_after_a_runs_end_are_not_recorded_and_its_attempts_are() -> None:
    records: list[CallRecord] = []
    state = RecordedState(Recorder(records.append, lambda: 1.0))
    run = state.add_run("r", SPEC)
    state.drop_run(run)
    run.admit(rollout("x"))
    run.new_attempt("a", rollout("x"), start=0, max_tokens=1).leave()
    made = [record.method.partition(".")[2] for record in records]
    assert made == ["add_run", "drop_run", "new_attempt", "leave"]
    assert [record.owner for record in records] == ["", "", "r", 1]


def test_the_arguments_of_each_recorded_method_can_be_read() -> None:
    for call in CALLS.values():
        msgspec.msgpack.Decoder(call.given, dec_hook=lambda *_: None)
