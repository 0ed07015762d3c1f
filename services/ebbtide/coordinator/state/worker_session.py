"""Models one attachment of a worker: what it reported, the attempts that it holds, and what its append streams bring.

Invariant: only its own methods, and those of its attempts and parts, change a session; those that tell the worker
something note it too. `attempts` are those whose `session` this is; `held` counts them by run and bounds, `pending` and
`freed` are among them. A freed slot, and a report that a decision depends on, wake the dispatcher. `revision` grows
with each change that decisions on placement and versions depend on. Lost with the process: the worker attaches again,
with its attempts.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final, NamedTuple

import msgspec

from ebbtide.coordinator.rules.move_costs import LentHost
from ebbtide.coordinator.state.notifier import DispatchWakeups
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_messages import Borrow, Install, ReleaseReason, SessionOutbox
from ebbtide.coordinator.state.worker_reports import AttachReport, HeartbeatReport
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import AttemptRef, EngineInfo, FlushPace, FlushWindow, WorkerKind, WorkerState
from ebbtide.types.weights import PolicyVersion


class SessionIndex:
    """Finds the attached sessions that serve a run, and whether one of them has a free slot.

    Invariant: exactly the attached sessions are here, each under its `run_id`. Sessions keep it up to date themselves.
    """

    def __init__(self) -> None:
        self._by_run: defaultdict[str, dict[str, WorkerSession]] = defaultdict(dict)
        self._with_room: defaultdict[str, set[str]] = defaultdict(set)

    def serving(self, run_id: str) -> "Collection[WorkerSession]":
        """The sessions that are to serve the run; with "", those that serve none."""
        found = self._by_run.get(run_id)
        return found.values() if found else ()

    def has_room(self, run_id: str) -> bool:
        """Whether a session that serves the run has a free slot."""
        return bool(self._with_room.get(run_id))

    def add(self, session: "WorkerSession") -> None:
        self._by_run[session.run_id][session.session_id] = session
        self.count(session)

    def remove(self, session: "WorkerSession") -> None:
        self._forget(session, session.run_id)

    def moved(self, session: "WorkerSession", former: str) -> None:
        """Note that a session serves another run than the `former`."""
        if session.session_id in self._by_run.get(former, ()):
            self._forget(session, former)
            self.add(session)

    def count(self, session: "WorkerSession") -> None:
        """Note that a session has become full, or is full no longer."""
        if session.session_id not in self._by_run.get(session.run_id, ()):
            return
        if len(session.attempts) < session.slots:
            self._with_room[session.run_id].add(session.session_id)
        else:
            self._with_room[session.run_id].discard(session.session_id)

    def _forget(self, session: "WorkerSession", run_id: str) -> None:
        """Remove a session; a run without sessions leaves nothing behind."""
        sessions, room = self._by_run[run_id], self._with_room[run_id]
        sessions.pop(session.session_id, None)
        room.discard(session.session_id)
        if not sessions:
            del self._by_run[run_id], self._with_room[run_id]


class SessionAppends:
    """What one worker's append streams bring.

    Invariant: `storing` counts the messages that the store has not answered, and `drained` is set while no stream is
    open: all that the worker sent was handled. Lost with the process: the worker sends again what is not durable.
    """

    def __init__(self, session_id: str, now: float) -> None:
        self.session_id = session_id
        #: Set to end the stream, so that the worker sends again what is not durable; cleared by the next stream.
        self.resend: Final = asyncio.Event()
        self.progressed = now  # when its last tokens arrived, stored or not
        self.storing = 0
        self._streams = 0
        self.drained: Final = asyncio.Event()
        self.drained.set()

    def message_came(self) -> None:
        self.storing += 1

    def tokens_came(self, now: float) -> None:
        self.progressed = now

    def message_answered(self) -> None:
        self.storing -= 1

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Marks a stream as open: the worker's attempts are not re-queued meanwhile."""
        self._streams += 1
        self.drained.clear()
        try:
            yield
        finally:
            self._streams -= 1
            if not self._streams:
                self.drained.set()

    def send_again(self) -> None:
        """End the stream, so that the worker sends again what is not durable."""
        self.resend.set()

    def stream_opened(self) -> None:
        """Note that a stream begins, which sends all that is not durable."""
        self.resend.clear()


class ReleaseRequest(NamedTuple):
    reason: ReleaseReason
    first: float  # when the attempt was first asked back
    last: float


class RunChange(NamedTuple):
    """A worker's change to another run's weights."""

    run_id: str
    at: float  # when the worker was told
    restarted: bool  # its engine has to be restarted for it


class WorkerSession:
    """One attachment of a worker."""

    #: What its append streams are noted in.
    appends_class: ClassVar[type[SessionAppends]] = SessionAppends

    def __init__(
        self, session_id: str, hello: AttachReport, now: float, wakeups: DispatchWakeups, index: SessionIndex
    ) -> None:
        self.session_id, self._wakeups, self._index = session_id, wakeups, index
        self.revision = 0
        self.hello = hello
        self.slots = hello.slots  # that it offers now
        self.worker_id: Final = hello.worker_id
        self.state = WorkerState.READY
        self.beat = HeartbeatReport()  # the last one
        self._attempts: dict[str, RunningAttempt] = {}
        self._pending: dict[str, RunningAttempt] = {}
        self._held: Counter[tuple[str, VersionBounds]] = Counter()
        self._freed: dict[str, ReleaseRequest] = {}
        self.attempts: Final[Mapping[str, RunningAttempt]] = self._attempts  # by attempt id, as the next two
        self.pending: Final[Mapping[str, RunningAttempt]] = self._pending  # those that have not started
        self.freed: Final[Mapping[str, ReleaseRequest]] = self._freed  # those asked back and not handed back
        self.held: Final[Mapping[tuple[str, VersionBounds], int]] = self._held  # its attempts of each run and bounds
        self.plateau, self.prefill, self.rollout_tokens_per_s = 0, 0.0, 0.0  # see `Worker`
        self.outbox: Final = SessionOutbox()
        self.append_stream: Final = self.appends_class(session_id, now)
        self.run_id = ""  # the run it is to serve, `since` when
        self.attached = self.since = now
        self.installed: tuple[str, PolicyVersion] | None = None
        self.target: tuple[str, int] | None = None  # run and version that it was last told to install
        self.changing: RunChange | None = None
        self._unfit: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        self.unfit: Final[Mapping[str, float]] = self._unfit  # run -> until when
        #: Architectures that its engine could not be started for -> until when.
        self.refused: Final[Mapping[str, float]] = self._refused
        self.draining = self.gone = False
        self.reason = ""  # why it drains
        self.borrowed = hello.kind is WorkerKind.BORROWED
        #: Its host serves users now, since or until `turned`; a borrowed worker starts so, until it reports a grant.
        self.reclaimed, self.turned = self.borrowed, now
        self.given_up = ""  # why its host is not borrowed now
        self.wanted: bool | None = None  # whether its host is borrowed, as the worker was told
        self._flush_pace = FlushPace()  # as the worker was told
        self.interactive = 0  # of its attempts

    @property
    def flush_tokens(self) -> int:
        """So many of each rollout's newest tokens may be lost with the worker; 0: not known."""
        window = FlushWindow(self.hello.flush_tokens, self.hello.flush_interval_s)
        return window.stretched(self._flush_pace.least_s).tokens

    @property
    def flush_interval_s(self) -> float:
        """The least time between two of its flushes, as it was told; 0.0: its own."""
        return self._flush_pace.least_s

    @property
    def scores_prompts(self) -> bool:
        """Whether its engine scores prompts. Workers that cannot say nothing of it."""
        return "score" in self.hello.capabilities

    @property
    def samples_min_p(self) -> bool:
        """Whether its engine samples with `min_p`: not where it drafts."""
        return "min_p" in self.hello.capabilities

    # Its attempts: called by `RunningAttempt`.

    def hold(self, attempt: RunningAttempt) -> None:
        self._attempts[attempt.attempt_id] = attempt
        self._held[attempt.run_id, attempt.rollout.bounds] += 1
        self.interactive += attempt.rollout.interactive
        if not attempt.started:
            self._pending[attempt.attempt_id] = attempt
        self.revision += 1
        if len(self._attempts) == self.slots:
            self._index.count(self)

    def begun(self, attempt: RunningAttempt) -> None:
        self._pending.pop(attempt.attempt_id, None)
        self.revision += 1

    def let_go(self, attempt: RunningAttempt) -> None:
        if self._attempts.pop(attempt.attempt_id, None) is None:
            return
        self._pending.pop(attempt.attempt_id, None)
        self._freed.pop(attempt.attempt_id, None)
        self.interactive -= attempt.rollout.interactive
        kind = (attempt.run_id, attempt.rollout.bounds)
        self._held[kind] -= 1
        if not self._held[kind]:
            del self._held[kind]
        if len(self._attempts) == self.slots - 1:
            self._index.count(self)
        self._changed()

    def _let_go_of(self, run_id: str) -> bool:
        """Remove all attempts of a run. Whether there were any."""
        kinds = [kind for kind in self._held if kind[0] == run_id]
        for attempt in [one for one in self._attempts.values() if one.run_id == run_id] if kinds else ():
            attempt.session = None
            self.interactive -= attempt.rollout.interactive
            for mine in (self._attempts, self._pending, self._freed):
                mine.pop(attempt.attempt_id, None)
        for kind in kinds:
            del self._held[kind]
        self._index.count(self)
        self._changed()
        return bool(kinds)

    def _changed(self) -> None:
        """Have the dispatcher look at it again."""
        self.revision += 1
        self._wakeups.decide()

    # What it reports.

    def hear(self, beat: HeartbeatReport, now: float) -> bool:
        """Take in a heartbeat. Whether it says that the worker's host was reclaimed, or granted again."""
        self.beat = beat
        self.draining |= beat.state is WorkerState.DRAINING
        self.state = WorkerState.DRAINING if self.draining else beat.state
        self.revision += 1
        if not self.borrowed:
            return False
        # A pause shorter than a heartbeat counts as granted.
        reclaimed = beat.borrowed is None or (beat.held and not beat.borrowed.granted)
        if reclaimed is self.reclaimed:
            return False
        self.reclaimed, self.turned = reclaimed, now
        self._changed()
        return True

    def lent(self, now: float) -> LentHost | None:
        """The grant that a borrowed worker reports."""
        said = self.beat.borrowed
        if not self.borrowed:
            return None
        return LentHost(
            reclaimed=self.reclaimed,
            lasted_s=now - self.turned,
            spell_s=said.spell_s if said else 0.0,
            asleep=said.asleep if said else False,
            hand_over=said.hand_over if said else False,
        )

    def drain(self, reason: str) -> None:
        """Note that the worker leaves: it gets no more work."""
        self.draining, self.state = True, WorkerState.DRAINING
        self.reason = reason or self.reason
        self.revision += 1

    def learn_plateau(self, plateau: int) -> None:
        self.plateau = plateau
        self.revision += 1

    def learn_prefill(self, tokens_per_s: float) -> None:
        self.prefill = tokens_per_s
        self.revision += 1

    def learn_rate(self, tokens_per_s: float) -> None:
        """Note the tokens/s that each of its rollouts would make with one more."""
        self.rollout_tokens_per_s = tokens_per_s

    def offer(self, slots: int) -> None:
        """Have it offer so many slots: its memory holds no more rollouts, or holds more again."""
        if slots == self.slots:
            return
        more, self.slots = slots > self.slots, slots
        self.revision += 1
        self._index.count(self)
        if more:
            self._wakeups.decide()

    # Runs and their versions.

    def serve(self, run_id: str, now: float) -> None:
        """Note which run it is to serve from now on."""
        former, self.run_id, self.since = self.run_id, run_id, now
        self.revision += 1
        self._index.moved(self, former)

    def keep_serving(self, run_id: str, version: PolicyVersion) -> None:
        """Take the version of a worker that attaches with attempts of the run as installed."""
        self.serve(run_id, self.since)
        self.installed = (run_id, version)

    def version_of(self, run_id: str) -> int:
        """The version of the run that is installed; 0 for none."""
        return self.installed[1].version if self.installed and self.installed[0] == run_id else 0

    def install(self, run_id: str, message: Install, now: float, *, restart: bool) -> None:
        """Tell the worker to install a version. If it serves another run it changes: until it has installed, it serves
        none. `restart`: its engine has to be restarted for that.
        """
        self.target = (run_id, message.version.version)
        self.revision += 1
        if self.installed is not None and self.installed[0] == run_id:
            self.changing = None
        elif self.changing is None or self.changing.run_id != run_id:
            self.changing = RunChange(run_id, now, restart)
        change = self.changing is not None and self.changing.restarted
        self.outbox.send(msgspec.structs.replace(message, change=change))

    def note_installed(self, run_id: str, version: PolicyVersion) -> RunChange | None:
        """Note an installed version. Returns the change to the run that it completes, if any."""
        self.installed = (run_id, version)
        self._unfit.pop(run_id, None)
        self._changed()
        changing = self.changing
        if changing is None or changing.run_id != run_id:
            return None
        self.changing = None
        return changing

    def note_install_failed(self) -> RunChange | None:
        """Note that it did not install what it was told. Returns the change that failed, if any."""
        changing, self.target, self.changing = self.changing, None, None
        self._changed()
        return changing

    def note_restarted(self, engine: EngineInfo) -> None:
        """Note that its engine was restarted, and has no version."""
        self.hello = msgspec.structs.replace(self.hello, engine=engine)
        self.installed = None
        self._changed()

    def distrust_version(self) -> None:
        """Note that it has another version than was believed: it is told again."""
        self.installed = self.target = None
        self._changed()

    def bar(self, run_id: str, until: float) -> None:
        """Give it nothing of the run for a while: an install failed."""
        self._unfit[run_id] = until

    def refuse(self, architecture: str, until: float) -> None:
        """Note that its engine could not be started for an architecture."""
        self._refused[architecture] = until

    def forget(self, run_id: str) -> None:
        """Have the worker drop what it keeps for a run that is over, its attempts too."""
        mine = self._let_go_of(run_id)
        self._unfit.pop(run_id, None)
        self.changing = None if self.changing and self.changing.run_id == run_id else self.changing
        # What it attached with stays until something else is installed.
        has = self.installed[0] if self.installed else self.hello.run_id
        kept = {self.run_id, has, self.target[0] if self.target else ""}
        if run_id not in kept and not mine:
            return
        if self.run_id == run_id:
            self.serve("", self.since)
        self.installed = None if self.installed and self.installed[0] == run_id else self.installed
        self.target = None if self.target and self.target[0] == run_id else self.target
        self.revision += 1
        self.outbox.tell_run_ended(run_id)

    # What it is told.

    def close(self) -> None:
        """End the session."""
        self.gone = True
        self.outbox.close()

    def pace_flushes(self, pace: FlushPace, *, tell: bool = True) -> None:
        """Have the worker flush no more often than that, if it can be told."""
        if "flush_interval" not in self.hello.capabilities:
            return
        self._flush_pace = pace
        if tell:
            self.outbox.send(pace)

    def tell_borrowed(self, *, wanted: bool, reason: str) -> None:
        """Tell a borrowed worker whether its host is borrowed, or why not."""
        self.wanted, self.given_up = wanted, "" if wanted else reason
        self.outbox.send(Borrow(wanted, reason))
        self._changed()

    def free(self, attempts: Sequence[AttemptRef], reason: ReleaseReason, now: float) -> None:
        """Ask for attempts on account of the worker, and note since when they are awaited."""
        for ref in attempts:
            asked = self._freed.get(ref.attempt_id)
            self._freed[ref.attempt_id] = ReleaseRequest(reason, asked.first if asked else now, now)
        self.outbox.request_release(attempts, reason)
