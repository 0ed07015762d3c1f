"""Takes recorded decisions again: `python -m ebbtide.simulator.decision_replay FILE` plays what a coordinator's
decisions were handed into a fresh model, and compares what the rounds decide there with what was decided live.

Decisions differ after a change of the code that decides; or because something that decisions depend on was not
recorded, which is a defect. The model follows the record, so that one difference is not the cause of all later ones.
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import asdict

from ebbtide.coordinator.dispatcher.round_deeds import Deed, SlotFill
from ebbtide.coordinator.fleet.worker_trust import WorkerTrust
from ebbtide.coordinator.recording.call_recorder import CallRecorder
from ebbtide.coordinator.recording.decisions import Decision
from ebbtide.coordinator.recording.journal_format import read_journal
from ebbtide.coordinator.recording.recorded_round import RecordedRounds
from ebbtide.coordinator.recording.recorded_state import RecordedState
from ebbtide.coordinator.recording.recorded_workers import RecordedTrust
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_events import SilentRunEvents
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.scheduling.dispatch.placement import Placement

#: What a record that contradicts the model makes the model raise.
_CONTRADICTIONS: Final = (
    EbbtideError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class DecisionDifference(Struct, frozen=True):
    """The first decision that differs."""

    record: int  # in the file, from 1 on
    at_s: float  # since the first record
    what: str
    recorded: str
    replayed: str


class ReplayReport(Struct):
    records: int = 0
    rounds: int = 0
    placements: int = 0  # as recorded
    placements_equal: int = 0  # of these: the same rollout in the same batch to the same worker
    placements_added: int = 0  # only the replay made them
    decisions: int = 0  # others, as recorded: runs of workers, installs, moves, hand-backs
    decisions_equal: int = 0
    decisions_added: int = 0
    first_difference: DecisionDifference | None = None

    @property
    def equal(self) -> bool:
        """Whether all decisions are."""
        return self.first_difference is None


class _ReplayClock(CallRecorder):
    """Gives the readings that were recorded."""

    def __init__(self) -> None:
        super().__init__(self._next)
        self.readings: Iterator[float] = iter(())
        self.at = 0.0

    def _next(self) -> float:
        return next(self.readings, self.at)


class ReplayedCoordinator:
    """A model without store, streams and workers, which follows a record. See `ReplayModel`."""

    def __init__(self) -> None:
        self._clock = _ReplayClock()
        self.state: CoordinatorState = RecordedState(self._clock)
        self.trust: WorkerTrust = RecordedTrust(self.state, self._clock)
        self.report = ReplayReport()
        self._runs: dict[str, RunState] = {}
        self._sessions: dict[str, WorkerSession] = {}
        self._attempts: list[RunningAttempt] = []
        self._rounds: RecordedRounds | None = None
        self._turns: Iterator[Deed] = iter(())
        self._deed: Deed = None
        self._record, self._began = 0, 0.0

    def play(self, path: Path) -> ReplayReport:
        """Play a whole file. Raises `InvalidRequest` with the file and the number of a record that contradicts those
        before it.
        """
        for number, record in read_journal(path):
            self._record = self.report.records = number
            self._began = self._began or record.at
            self._clock.at, self._clock.readings = record.at, iter(record.readings)
            try:
                record.call.apply(self)
            except _CONTRADICTIONS as error:
                what = type(record.call).__name__
                raise InvalidRequest(
                    f"{path}: record {number} ({what}) contradicts those before it: {error!r}; record again"
                ) from error
        return self.report

    # What the records name.

    def run(self, run_id: str) -> RunState:
        if (run := self._runs.get(run_id)) is None:
            raise InvalidRequest(f"no run {run_id} was recorded")
        return run

    def session(self, session_id: str) -> WorkerSession:
        if (session := self._sessions.get(session_id)) is None:
            raise InvalidRequest(f"no session {session_id} was recorded")
        return session

    def attempt(self, serial: int) -> RunningAttempt:
        if not 1 <= serial <= len(self._attempts):
            raise InvalidRequest(f"no attempt {serial} was recorded")
        return self._attempts[serial - 1]

    def keep_run(self, run: RunState) -> None:
        self._runs[run.run_id] = run

    def keep_session(self, session: WorkerSession) -> None:
        self._sessions[session.session_id] = session

    def keep_attempt(self, attempt: RunningAttempt) -> None:
        self._attempts.append(attempt)

    # Its rounds.

    def make_rounds(self, *, slice_s: float, balance: bool, interactive_slots: int) -> None:
        self._rounds = RecordedRounds(
            self.state,
            self.trust,
            _no_key,
            SilentRunEvents(),
            recorder=self._clock,
            slice_s=slice_s,
            balance=balance,
            interactive_slots=interactive_slots,
        )

    def begin_round(self, now: float) -> None:
        if self._rounds is None:
            raise InvalidRequest("the dispatcher was not recorded")
        self.report.rounds += 1
        self._turns, self._deed = self._rounds.turns(now), None

    def take_turn(self, decided: list[Decision]) -> None:
        self._clock.decided = []  # if the round is over already, it decides nothing
        self._deed = next(self._turns, None)
        mine, report = self._clock.decided, self.report
        report.decisions += len(decided)
        report.decisions_added += max(0, len(mine) - len(decided))
        report.decisions_equal += self._equal(decided, mine, "decision")

    def place(self, run_id: str, now: float, placed: list[Placement]) -> None:
        fill = self._fill()
        mine = fill.place(now) if fill is not None and fill.run.run_id == run_id else []
        report = self.report
        report.placements += len(placed)
        report.placements_added += max(0, len(mine) - len(placed))
        report.placements_equal += self._equal(placed, mine, f"placement of run {run_id}")

    def fill_over(self, now: float) -> None:
        if (fill := self._fill()) is not None:
            fill.due(now)

    def note_turn(self, turn_s: float, now: float) -> None:
        if (fill := self._fill()) is not None:
            fill.note_turn(turn_s, now)

    def _fill(self) -> SlotFill | None:
        return self._deed if isinstance(self._deed, SlotFill) else None

    def _equal(self, recorded: Sequence[Hashable], mine: Sequence[Hashable], what: str) -> int:
        """How many of the recorded decisions of one step were taken again. Notes the first difference."""
        if self.report.first_difference is None and list(recorded) != list(mine):
            pairs = enumerate(zip_longest(recorded, mine, fillvalue="none"), 1)
            number, (one, other) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            self.report.first_difference = DecisionDifference(
                record=self._record,
                at_s=self._clock.at - self._began,
                what=f"{what}, number {number} of {len(recorded)}",
                recorded=str(one),
                replayed=str(other),
            )
        return (Counter(recorded) & Counter(mine)).total()


def _no_key(_run_id: str) -> bytes:
    return b""  # nobody verifies what is installed


def main(argv: Sequence[str]) -> int:
    """Print the report as JSON. The exit status is 0 if all decisions are equal, 1 if not, and 2 for a bad file."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m ebbtide.simulator.decision_replay FILE\n")
        return 2
    try:
        report = ReplayedCoordinator().play(Path(argv[0]))
    except InvalidRequest as error:
        sys.stderr.write(f"{error}\n")
        return 2
    found = asdict(report)
    found["first_difference"] = asdict(report.first_difference) if report.first_difference else None
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0 if report.equal else 1


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # the report says all
    sys.exit(main(sys.argv[1:]))
