"""Takes recorded decisions again: `python -m ebbtide.simulator.decision_replay FILE` plays what a coordinator's
decisions were handed into a fresh state, and compares what the rounds decide there with what was decided live.

Decisions differ after a change of the code that decides; or because something that decisions depend on was not
recorded, which is a defect. The state follows the record, so that one difference is not the cause of all later ones.
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import asdict

from ebbtide.coordinator.decision_log import CallRecord, LogHead, read_log
from ebbtide.coordinator.dispatch.dispatch_round import SlotFill
from ebbtide.coordinator.recording import (
    CALLS,
    AttemptInFile,
    RecordedRounds,
    RecordedState,
    RecordedTrust,
    Recorder,
    name_of,
    parts_of,
)
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.coordinator.run_events import SilentRunEvents
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import EbbtideError, Internal, InvalidRequest

#: What a record that contradicts the state makes the state raise.
_CONTRADICTIONS: Final = (
    EbbtideError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_WORDS: Final = {
    **dict.fromkeys(("RunState", "RunMirror", "RunVersions", "RunEpisodes"), "run"),
    **dict.fromkeys(("WorkerSession", "SessionAppends"), "session"),
    "RunningAttempt": "attempt",
}
#: Calls that begin a round, take a step of it, and place a batch.
BEGIN, STEP, PLACE = "RecordedRounds.begin", "RecordedRounds.step", "SlotFill.place"


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
    decisions: int = 0  # others, as recorded: runs of workers, installs, moves, hand-backs, ends
    decisions_equal: int = 0
    decisions_added: int = 0
    first_difference: DecisionDifference | None = None

    @property
    def equal(self) -> bool:
        """Whether all decisions are."""
        return self.first_difference is None


class ReplayedCoordinator:
    """A state without store, streams and workers, which follows one record."""

    def __init__(self) -> None:
        self.report = ReplayReport()
        #: What records name, by the name of its class and its own; runs beyond their end, too.
        self._named: dict[tuple[str, str | int], Any] = {}
        self._fill: SlotFill | None = None  # the action under way
        self._at, self._readings = 0.0, iter(tuple[float, ...]())
        self._decided: list[Any] = []  # by the replayed call

    def play(self, path: Path) -> ReplayReport:
        """Play a whole file. Raises `InvalidRequest` with the file and the number of a record that contradicts those
        before it.
        """
        began: float | None = None
        for number, record in read_log(path, self._begin):
            began = record.at if began is None else began
            self.report.records = number
            try:
                self._repeat(record)
            except msgspec.MsgspecError as error:
                what = f"record {number} ({record.method}) has other arguments than this release records"
                raise InvalidRequest(f"{path}: {what} ({error}); replay it with a release that wrote it") from None
            except _CONTRADICTIONS as error:
                what = f"record {number} ({record.method}) contradicts those before it"
                raise InvalidRequest(f"{path}: {what}: {error!r}; record again") from error
            self._compare(record, record.at - began)
        return self.report

    def _begin(self, head: LogHead) -> None:
        recorder = Recorder(self._note, lambda: next(self._readings, self._at))
        state = RecordedState(recorder)
        trust = RecordedTrust(state)
        rounds = RecordedRounds(
            state,
            trust,
            _no_key,
            SilentRunEvents(),
            timeslice_s=head.timeslice_s,
            balance=head.rebalance,
            interactive_slots=head.interactive_slots,
        )
        self._named = {("CoordinatorState", ""): state, ("WorkerTrust", ""): trust, ("RecordedRounds", ""): rounds}

    def _note(self, record: CallRecord) -> None:
        self._decided = msgspec.msgpack.decode(msgspec.msgpack.encode(record.decided))  # as a file has it

    def _repeat(self, record: CallRecord) -> None:
        """Do a recorded call again."""
        if (call := CALLS.get(record.method)) is None:
            raise InvalidRequest("no such method is recorded")
        given = msgspec.convert(record.given, call.given, dec_hook=self._argument)
        self._at, self._readings, self._decided = record.at, iter(record.readings), []
        if call.owner != "SlotFill":
            owner = self._called(call.owner, record.owner)
        elif (owner := self._fill) is None or owner.run.run_id != record.owner:
            return  # the replay came to another action: it places nothing of this run now
        result = getattr(owner, call.method.__name__)(**asdict(given))
        if call.name == STEP:
            self._fill = next((action for action in result if isinstance(action, SlotFill)), None)
        for kind in (RunState, WorkerSession, RunningAttempt):
            if isinstance(result, kind):
                self._named[kind.__name__, name_of(result)] = result
        self._named |= {(kind, name_of(part)): part for kind, part in parts_of(result)}

    def _called(self, kind: str, name: str | int) -> Any:
        if (one := self._named.get((kind, name))) is None:
            raise InvalidRequest(f"no {_WORDS.get(kind, kind)} {name} was recorded")
        return one

    def _argument(self, kind: type, said: Any) -> Any:
        """What a record means by what it says of an argument."""
        if kind is Exception:
            return Internal(said)
        if kind is RolloutQueue:
            queue = RolloutQueue()
            for rollout in msgspec.convert(said, list[QueuedRollout]):
                queue.add(rollout)
            return queue
        return self._called("RunningAttempt" if kind is AttemptInFile else kind.__name__, said)

    def _compare(self, record: CallRecord, at_s: float) -> None:
        """Count the decisions that were taken again, and note the first that differs."""
        report, recorded, mine = self.report, record.decided, self._decided
        report.rounds += record.method == BEGIN
        if not recorded and not mine:
            return
        equal = (Counter(map(msgspec.msgpack.encode, recorded)) & Counter(map(msgspec.msgpack.encode, mine))).total()
        added = max(0, len(mine) - len(recorded))
        if record.method == PLACE:
            report.placements += len(recorded)
            report.placements_equal += equal
            report.placements_added += added
        else:
            report.decisions += len(recorded)
            report.decisions_equal += equal
            report.decisions_added += added
        if report.first_difference is None and recorded != mine:
            pairs = enumerate(zip_longest(recorded, mine, fillvalue="none"), 1)
            number, (one, other) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            what = f"placement of run {record.owner}" if record.method == PLACE else "decision"
            report.first_difference = DecisionDifference(
                record=report.records,
                at_s=at_s,
                what=f"{what}, number {number} of {len(recorded)}",
                recorded=str(one),
                replayed=str(other),
            )


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
