"""Records what decisions were handed, and what was decided, so that a replay can take them again.

The state's classes have recorded ones beside them, which list the methods that decisions depend on. The outermost call
of such a method is one record: whose method it is, its arguments, the clock readings in it, and what it decided, if it
is a step of a round. Runs, sessions and attempts stand in the file by their names.

Invariant: recorded calls do not wait, so one ends before the next begins, and the records stand in the order in which
the state changed. What a recorded call changes by further recorded calls is part of it, and not recorded again.
"""

import inspect
import operator
import time
import weakref
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from functools import reduce, wraps
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Final, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from ebbtide.coordinator.decision_log import FORMAT, CallRecord, DecisionLog, LogHead
from ebbtide.coordinator.dispatch.dispatch_round import Action, DispatchRound, SlotFill
from ebbtide.coordinator.dispatch.unserved_work import DeadLetters, RunFailure
from ebbtide.coordinator.fleet.worker_health import WorkerTrust
from ebbtide.coordinator.rules.rollout_queue import RolloutQueue
from ebbtide.coordinator.run_events import RunEvents
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_episodes import RunEpisodes
from ebbtide.coordinator.state.run_mirror import RunMirror
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.run_versions import RunVersions
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_messages import Install
from ebbtide.coordinator.state.worker_reports import AttachReport
from ebbtide.coordinator.state.worker_session import SessionAppends, WorkerSession
from ebbtide.types.run import RunSpec

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class Recorder:
    """Sees the calls, and hands each to `write` when it is over. `clock`: of the recorded state."""

    def __init__(self, write: Callable[[CallRecord], None], clock: Callable[[], float]) -> None:
        self._write, self._read_clock = write, clock
        self.inside = False  # a recorded call
        self._readings: list[float] = []
        self._decided: list[Any] | None = None  # in a step of a round
        self._attempts = 0

    def clock(self) -> float:
        """The clock of the recorded state."""
        now = self._read_clock()
        if self.inside:
            self._readings.append(now)
        return now

    def new_serial(self) -> int:
        """The serial number of an attempt that is made, from 1 on."""
        self._attempts += 1
        return self._attempts

    def call(self, call: "RecordedCall", owner: Any, given: Any, work: Callable[[], T]) -> T:
        """Do the work of an outermost call."""
        self.inside = True
        decided = self._decided = [] if call.decides else None
        try:
            result = work()
            if isinstance(result, list):
                self.decide(*result)
            return result
        finally:
            readings, self._readings = self._readings, []
            self.inside, self._decided = False, None
            record = CallRecord(self._read_clock(), call.name, name_of(owner), given, tuple(readings), decided or [])
            self._write(record)

    def decide(self, *decisions: Any) -> None:
        """Note decisions, if a round is under way."""
        if self._decided is not None:
            self._decided += decisions


class AttemptInFile(ABC):  # noqa: B024 - it has no instances of its own
    """Stands for attempts where arguments are read: hooks of `msgspec` see no structs, which attempts are."""


AttemptInFile.register(RunningAttempt)
#: What has another form in the file, where types of arguments mention it.
_IN_OTHER_FORM: Final = (RunningAttempt, RunState, WorkerSession, RolloutQueue, Exception, Install)


def name_of(one: Any) -> str | int:
    """The name of a part of the state among those of its class; "" for what there is one of."""
    match one:
        case RecordedAttempt():
            return one.serial
        case WorkerSession() | SessionAppends():
            return one.session_id
        case RunState() | RunMirror() | RunVersions() | RunEpisodes():
            return one.run_id
        case SlotFill():
            return one.run.run_id
    return ""


def parts_of(one: Any) -> list[tuple[str, Any]]:
    """The parts of a run or a session, whose calls are recorded too, each with the name of its class in the state."""
    match one:
        case RunState():
            return [("RunMirror", one.mirror), ("RunVersions", one.versions), ("RunEpisodes", one.episodes)]
        case WorkerSession():
            return [("SessionAppends", one.append_stream)]
    return []


def _in_file(value: Any) -> Any:
    match value:
        case RunningAttempt() | WorkerSession() | RunState():
            return name_of(value)
        case list() | tuple() | RolloutQueue():
            return [_in_file(one) for one in value]
        case Mapping():
            return {key: _in_file(one) for key, one in value.items()}
        case Exception():
            return str(value)
        case Install():
            return value.version.version
    return value


def _mentions_any(kind: Any, sought: tuple[type, ...]) -> bool:
    return kind in sought or any(_mentions_any(one, sought) for one in get_args(kind))


def _read_as(kind: Any) -> Any:
    """The type as which an argument is read."""
    if not _mentions_any(kind, (RunningAttempt,)):
        return kind
    if kind is RunningAttempt:
        return AttemptInFile
    args = tuple(map(_read_as, get_args(kind)))
    return reduce(operator.or_, args) if get_origin(kind) is UnionType else get_origin(kind)[args]


class RecordedCall:
    """A method whose calls are recorded. `given`: the struct of its arguments."""

    def __init__(self, method: Callable[..., Any], *, decides: bool = False) -> None:
        self.method, self.decides = method, decides
        self.name: Final = method.__qualname__
        self.owner: Final = self.name.partition(".")[0]  # the class of the state
        classes = {one.__name__: one for one in (RunState, WorkerSession)}  # which attempts name, and do not import
        types = get_type_hints(method, localns=classes, include_extras=True)
        parameters = list(inspect.signature(method).parameters.values())[1:]
        fields = [
            (one.name, _read_as(types[one.name]), *([] if one.default is one.empty else [one.default]))
            for one in parameters
        ]
        self.given: Final = msgspec.defstruct(method.__name__, fields, forbid_unknown_fields=True)
        self._formed = [one.name for one in parameters if _mentions_any(types[one.name], _IN_OTHER_FORM)]

    def arguments(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The arguments as they stand in the file."""
        given = self.given(*args, **named)
        if not self._formed:
            return given
        return msgspec.structs.replace(given, **{name: _in_file(getattr(given, name)) for name in self._formed})


#: By their names in the file. A replay calls these methods and no others.
CALLS: Final[dict[str, RecordedCall]] = {}


def recorded(method: Method, *, late: bool = True, decides: bool = False) -> Method:
    """The method, whose calls are recorded. `late`: also those of a run that is over."""
    call = CALLS[method.__qualname__] = RecordedCall(method, decides=decides)

    @wraps(method)
    def record(self: Any, *args: Any, **named: Any) -> Any:
        recorder: Recorder = self.recorder
        if recorder.inside or (not late and self.ended):
            return method(self, *args, **named)
        return recorder.call(call, self, call.arguments(args, named), lambda: method(self, *args, **named))

    return cast("Method", record)


def recorded_live(method: Method) -> Method:
    """The method of a run, whose calls are recorded while it lives: nothing depends on those that come late."""
    return recorded(method, late=False)


def deciding(method: Method) -> Method:
    """The method, whose calls are recorded. What workers are told in it, and a list that it returns, are decisions."""
    return recorded(method, decides=True)


def told(method: Method) -> Method:
    """The method, whose calls are decisions of the round that is under way."""
    call = RecordedCall(method)

    @wraps(method)
    def note(self: Any, *args: Any, **named: Any) -> Any:
        self.recorder.decide((call.name, name_of(self), call.arguments(args, named)))
        return method(self, *args, **named)

    return cast("Method", note)


# The recorded state.


class RecordedAttempt(RunningAttempt, kw_only=True, eq=False):
    serial: int = 0  # its place among all attempts made, from 1 on

    move_to = told(RunningAttempt.move_to)
    begin = recorded(RunningAttempt.begin)
    believe_stored = recorded(RunningAttempt.believe_stored)
    assign = recorded(RunningAttempt.assign)
    unassign = recorded(RunningAttempt.unassign)
    orphan = recorded(RunningAttempt.orphan)
    set_due = recorded(RunningAttempt.set_due)
    leave = recorded(RunningAttempt.leave)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.serial = self.recorder.new_serial()

    @property
    def recorder(self) -> Recorder:
        return cast("RecordedRunState", self.run).recorder


class _OfRun:
    """A part of a run. It does not keep the run: the coordinator collects no cycles."""

    recorder: Recorder
    _run: "weakref.ref[RecordedRunState]"

    def belong_to(self, run: "RecordedRunState") -> None:
        self.recorder, self._run = run.recorder, weakref.ref(run)

    @property
    def ended(self) -> bool:
        run = self._run()
        return run is None or run.ended


class RecordedRunMirror(RunMirror, _OfRun):
    set_stale = recorded_live(RunMirror.set_stale)
    pause = recorded_live(RunMirror.pause)
    doubt = recorded_live(RunMirror.doubt)
    note_reconciled = recorded_live(RunMirror.note_reconciled)


class RecordedRunVersions(RunVersions, _OfRun):
    announce = recorded_live(RunVersions.announce)
    note_installed = recorded_live(RunVersions.note_installed)
    note_architecture = recorded_live(RunVersions.note_architecture)
    note_misfit = recorded_live(RunVersions.note_misfit)
    note_failed_install = recorded_live(RunVersions.note_failed_install)
    note_tokens_stored = recorded_live(RunVersions.note_tokens_stored)


class RecordedRunEpisodes(RunEpisodes, _OfRun):
    forget = recorded_live(RunEpisodes.forget)


class RecordedRunState(RunState):
    attempt_class: ClassVar[type[RunningAttempt]] = RecordedAttempt
    recorder: Recorder

    mirror_class: ClassVar[type[RunMirror]] = RecordedRunMirror
    versions_class: ClassVar[type[RunVersions]] = RecordedRunVersions
    episodes_class: ClassVar[type[RunEpisodes]] = RecordedRunEpisodes

    new_attempt = recorded(RunState.new_attempt)
    reread = recorded_live(RunState.reread)
    note_context = recorded_live(RunState.note_context)
    admit = recorded_live(RunState.admit)
    take_queued = recorded_live(RunState.take_queued)
    start = recorded_live(RunState.start)
    put_back = recorded_live(RunState.put_back)
    end = recorded_live(RunState.end)
    finish = recorded_live(RunState.finish)
    unfinish = recorded_live(RunState.unfinish)
    accept_tokens = recorded_live(RunState.accept_tokens)
    unconfirm = recorded_live(RunState.unconfirm)
    confirm = recorded_live(RunState.confirm)
    drop_unconfirmed = recorded_live(RunState.drop_unconfirmed)


class RecordedAppends(SessionAppends):
    recorder: Recorder

    def belong_to(self, session: "RecordedSession") -> None:
        self.recorder = session.recorder

    message_came = recorded(SessionAppends.message_came)
    tokens_came = recorded(SessionAppends.tokens_came)
    message_answered = recorded(SessionAppends.message_answered)


class RecordedSession(WorkerSession):
    appends_class: ClassVar[type[SessionAppends]] = RecordedAppends
    recorder: Recorder

    serve = told(WorkerSession.serve)
    install = told(WorkerSession.install)
    free = told(WorkerSession.free)
    tell_borrowed = told(WorkerSession.tell_borrowed)
    hear = recorded(WorkerSession.hear)
    drain = recorded(WorkerSession.drain)
    keep_serving = recorded(WorkerSession.keep_serving)
    note_installed = recorded(WorkerSession.note_installed)
    note_install_failed = recorded(WorkerSession.note_install_failed)
    note_restarted = recorded(WorkerSession.note_restarted)
    distrust_version = recorded(WorkerSession.distrust_version)
    bar = recorded(WorkerSession.bar)
    refuse = recorded(WorkerSession.refuse)


class RecordedState(CoordinatorState):
    add_run = recorded(CoordinatorState.add_run)
    drop_run = recorded(CoordinatorState.drop_run)
    new_session = recorded(CoordinatorState.new_session)
    attach = recorded(CoordinatorState.attach)
    detach = recorded(CoordinatorState.detach)
    shed = recorded(CoordinatorState.shed)
    note_changeover = recorded(CoordinatorState.note_changeover)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.clock)
        self.recorder: Final = recorder

    def _make_run(self, run_id: str, spec: RunSpec) -> RunState:
        run = RecordedRunState(run_id, spec, self.wakeups, self.clock)
        run.recorder = self.recorder
        for _, part in parts_of(run):
            part.belong_to(run)
        return run

    def _make_session(self, session_id: str, hello: AttachReport, now: float) -> WorkerSession:
        session = RecordedSession(session_id, hello, now, self.wakeups, self._index)
        session.recorder = self.recorder
        for _, part in parts_of(session):
            part.belong_to(session)
        return session


class _OfState:
    """A part of the coordinator that shows its state."""

    _state: CoordinatorState

    @property
    def recorder(self) -> Recorder:
        return cast("RecordedState", self._state).recorder


class RecordedTrust(WorkerTrust, _OfState):
    attached = recorded(WorkerTrust.attached)
    left = recorded(WorkerTrust.left)
    lost = recorded(WorkerTrust.lost)


class RecordedFill(SlotFill, _OfState):
    due = recorded(SlotFill.due)
    note_turn = recorded(SlotFill.note_turn)
    place = deciding(SlotFill.place)


class RecordedRounds(DispatchRound, _OfState):
    fill_class: ClassVar[type[SlotFill]] = RecordedFill
    _steps: Iterator[Action] = iter(())

    def steps(self, now: float) -> Iterator[Action]:
        self.begin(now)
        while actions := self.step():
            yield from actions

    @recorded
    def begin(self, now: float) -> None:
        self._steps = super().steps(now)

    @deciding
    def step(self) -> tuple[Action, ...]:
        """The next action; none if the round is over. What ends runs and rollouts is a decision, too."""
        actions = tuple(islice(self._steps, 1))
        for action in actions:
            if isinstance(action, DeadLetters):
                self.recorder.decide(("DeadLetters", name_of(action.run), list(action.letters)))
            elif isinstance(action, RunFailure):
                self.recorder.decide(("RunFailure", name_of(action.run), action.message))
        return actions


class DecidingParts:
    """The state, the trust in workers and the rounds of one coordinator, or of a simulated one: recorded ones if
    `record_decisions` is set, else plain ones, which cost no more.
    """

    def __init__(self, settings: CoordinatorSettings, clock: Callable[[], float] | None = None) -> None:
        """`clock`: see `CoordinatorState`. Raises `InvalidRequest` if `record_decisions` cannot be written."""
        self._settings = settings
        self._log: DecisionLog | None = None
        if settings.record_decisions:
            head = LogHead(
                FORMAT, version("ebbtide"), settings.timeslice_s, settings.rebalance, settings.interactive_slots
            )
            path, most_bytes = Path(settings.record_decisions), settings.record_decisions_bytes
            self._log = DecisionLog(path, head, most_bytes=most_bytes)
            self.state: CoordinatorState = RecordedState(Recorder(self._log.write, clock or time.monotonic))
            self.trust: WorkerTrust = RecordedTrust(self.state)
        else:
            self.state = CoordinatorState(clock)
            self.trust = WorkerTrust(self.state)

    def new_rounds(self, public_key: Callable[[str], bytes], run_events: RunEvents) -> DispatchRound:
        """`public_key`: see `DispatchRound`."""
        settings = self._settings
        made = DispatchRound if self._log is None else RecordedRounds
        return made(
            self.state,
            self.trust,
            public_key,
            run_events,
            timeslice_s=settings.timeslice_s,
            balance=settings.rebalance,
            interactive_slots=settings.interactive_slots,
        )

    def close(self) -> None:
        """End the recording."""
        if self._log is not None:
            self._log.close()
