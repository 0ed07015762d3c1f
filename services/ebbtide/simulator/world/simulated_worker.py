"""Models a worker: a machine that boots, attaches, generates, installs versions, and leaves or is lost.

Invariant: from its attach to its end a worker has one session, and its engine holds exactly the attempts that the
session lists, except for what is on its way between the two. A token counts as stored once it was flushed. What a lost
worker had not flushed is generated again.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from msgspec import Struct

from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_reports import (
    AttachReport,
    DrainNotice,
    HeartbeatReport,
    InstalledReport,
    ReleasedReport,
)
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.simulated_engine import EventKind, SimulatedEngine
from ebbtide.simulator.world.books import GONE, SimulationBooks
from ebbtide.simulator.world.virtual_time import Alarm, VirtualTime
from ebbtide.types.end_cause import EndCause
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, EngineInfo, WorkerKind, WorkerState
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import fleet_pb2
from ebbtide.wire.record_conversion import from_proto

#: As `outbox.py`: a finish and an attempt's first token wait so long for others.
_URGENT_S: Final = 0.02
#: A released attempt ends with the engine's step under way, and is stored before it is handed back.
_HAND_BACK_S: Final = 0.05


class WorkerTerms(Struct, frozen=True, kw_only=True):
    """What all workers of a pool have in common. Times in seconds."""

    pool: str
    kind: WorkerKind
    profile: EngineProfile
    model: str
    max_model_len: int
    slots: int
    boot_s: float
    flush_s: float = 0.25
    flush_tokens: int = 32
    heartbeat_s: float = 1.0
    message_s: float = 0.001  # from the coordinator to the worker, or back
    site: str = ""


class WorkersCoordinator(Protocol):
    """What a worker says to its coordinator."""

    def attach(self, worker: "SimulatedWorker", hello: AttachReport) -> WorkerSession: ...
    def hear(self, session: WorkerSession, report: Struct) -> None: ...
    def stored(self, session: WorkerSession, attempts: Sequence[RunningAttempt], ends: Sequence[int]) -> None: ...
    def finished(self, attempt: RunningAttempt) -> None: ...
    def stream_broke(self, session: WorkerSession, reason: str) -> None: ...
    def length_of(self, attempt: RunningAttempt) -> tuple[int, int, str]: ...
    def pull_s(self, worker: "SimulatedWorker", run_id: str, version: int) -> float: ...


class SimulatedWorker:
    def __init__(
        self,
        name: str,
        terms: WorkerTerms,
        time: VirtualTime,
        coordinator: WorkersCoordinator,
        books: SimulationBooks,
        *,
        speed: float = 1.0,
    ) -> None:
        """`speed`: of its engine, relative to the profile's."""
        self.name, self.terms = name, terms
        self._time, self._coordinator, self._books = time, coordinator, books
        self.engine = SimulatedEngine(terms.profile, slots=terms.slots, now=time.now, speed=speed)
        self.session: WorkerSession | None = None
        self.gone = False
        self.versions: dict[str, int] = {}  # run -> version that its host has
        self._installed: tuple[str, PolicyVersion] | None = None
        self._wanted: tuple[str, PolicyVersion] | None = None
        self._holds: set[str] = set()
        self._attempts: dict[str, RunningAttempt] = {}
        self._first: dict[str, None] = {}  # attempts whose first token is to be reported
        self._ended: dict[str, None] = {}
        self._interval_s = terms.flush_s
        self._began = time.now
        self._made_at = time.now
        self._drains = self._frozen = False
        self._engine_due = Alarm(time, self._engine_event)
        self._flush_due = Alarm(time, self._flush)
        self._urgent_due = Alarm(time, self._flush_urgent)
        self._beat_due = Alarm(time, self._beat)

    # Its life.

    def boot(self, boot_s: float) -> None:
        """Start the machine: it attaches after so many seconds."""
        self._books.enter(self.name, self.terms.pool, "booting", self._time.now)
        self._time.after(boot_s, self._attach)

    def _attach(self) -> None:
        if self.gone:
            return
        terms, now = self.terms, self._time.now
        installed = (self._installed[1],) if self._installed else ()
        hello = AttachReport(
            worker_id=self.name,
            kind=terms.kind,
            protocol_version=PROTOCOL_VERSION,
            slots=terms.slots,
            engine=EngineInfo(model=terms.model, vocab_size=1 << 17, max_model_len=terms.max_model_len, architecture=terms.model),
            site=terms.site,
            capabilities=("flush_interval",),
            installed=installed,
            flush_tokens=terms.flush_tokens,
            run_id=self._installed[0] if self._installed else "",
            flush_interval_s=terms.flush_s,
        )
        self._began = now
        self.session = self._coordinator.attach(self, hello)
        self._show()
        self._beat()

    def notice(self, deadline_s: float) -> None:
        """The machine will be taken: hand everything over."""
        if self.session is None or self.session.gone or self._drains:
            return
        self._drains = True
        self._say(DrainNotice(deadline_s=deadline_s, reason="preempted"))
        self._hand_back(list(self._attempts), EndCause.WORKER_LEAVES, "preempted")

    def leave(self) -> None:
        """End in order, once everything was handed over."""
        self._end("it left", lost=bool(self._attempts))

    def vanish(self, *, silently: bool) -> None:
        """Lose the machine. `silently`: its connections stay open, as when power fails; else they break at once."""
        self._end("" if silently else "its stream broke", lost=True)

    def _end(self, reason: str, *, lost: bool) -> None:
        if self.gone:
            return
        self.gone = True
        self._advance()
        for key, made in self.engine.clear(self._time.now):
            attempt = self._attempts.get(key)
            if attempt is not None:
                self._books.tokens.twice += max(0, made - attempt.stored)
        self._attempts.clear()
        for alarm in (self._engine_due, self._flush_due, self._urgent_due, self._beat_due):
            alarm.set(float("inf"))
        self._books.lose(self.terms.pool, drained=not lost)
        self._books.enter(self.name, self.terms.pool, GONE, self._time.now)
        if self.session is not None and not self.session.gone and reason:
            self._coordinator.stream_broke(self.session, reason)

    def freeze(self) -> None:
        """Stop the whole machine: nothing is generated and nothing is said until `thaw`."""
        if not self.gone:
            self._advance()
            self._frozen = True
            self.hold("frozen")

    def thaw(self) -> None:
        if self.gone or not self._frozen:
            return
        self._frozen = False
        self.go_on("frozen")
        if self.session is not None and self.session.gone:  # it was given up meanwhile: what it holds is over
            self._drop(list(self._attempts))
            self._attach()
        elif self.session is not None:
            self._beat()

    # What it is told.

    def assign(self, attempts: Iterable[RunningAttempt]) -> None:
        """Take attempts from the coordinator."""
        coming = list(attempts)
        self._time.after(self.terms.message_s, lambda: self._take(coming))

    def _take(self, attempts: Sequence[RunningAttempt]) -> None:
        if self.gone:
            return
        if self._drains:
            self._say(ReleasedReport(attempts=tuple(one.ref for one in attempts), reason="preempted", cause=EndCause.WORKER_LEAVES))
            return
        now = self._time.now
        self._advance()
        for one in attempts:
            if one.session is not self.session:
                continue  # taken back meanwhile
            prompt, length, prefix = self._coordinator.length_of(one)
            self._attempts[one.attempt_id] = one
            self.engine.admit(one.attempt_id, prompt=prompt, made=one.start, length=length, now=now, prefix=prefix)
            self._books.tokens.moved += one.start
        self._plan()

    def obey(self) -> None:
        """Do what the coordinator has sent since the last call."""
        session = self.session
        while session is not None and not session.outbox.empty():
            message = session.outbox.get_nowait()
            if message is not None and not self.gone:
                self._time.after(self.terms.message_s, lambda message=message: self._obey(message))

    def _obey(self, message: fleet_pb2.CoordinatorMessage) -> None:
        if self.gone or self._frozen:
            return
        match message.WhichOneof("kind"):
            case "install":
                version = from_proto(message.install.version, PolicyVersion)
                self._want(message.install.run_id, version)
            case "release":
                self._hand_back([ref.attempt_id for ref in message.release.attempts], EndCause.MOVED, message.release.reason)
            case "cancel":
                self._drop([ref.attempt_id for ref in message.cancel.attempts])
            case "flush_interval":
                self._interval_s = max(self.terms.flush_s, message.flush_interval.least_s)
            case _:
                pass  # forget, drain and borrow change nothing that is modelled here

    # Versions.

    def _want(self, run_id: str, version: PolicyVersion) -> None:
        self._wanted = (run_id, version)
        pull_s = self._coordinator.pull_s(self, run_id, version.version)
        self._time.after(pull_s, lambda: self._pulled(run_id, version, pull_s))

    def _pulled(self, run_id: str, version: PolicyVersion, pull_s: float) -> None:
        if self.gone or self._wanted != (run_id, version):
            return
        self.versions[run_id] = version.version
        self.hold("installing")
        pause_s = self.terms.profile.install_s
        self._time.after(pause_s, lambda: self._install(run_id, version, pull_s, pause_s))

    def _install(self, run_id: str, version: PolicyVersion, pull_s: float, pause_s: float) -> None:
        if self.gone or self._wanted != (run_id, version):
            return
        self._installed = (run_id, version)
        self._books.installs += 1
        self.go_on("installing")
        self._say(InstalledReport(version=version, run_id=run_id, pull_s=pull_s, pause_s=pause_s))

    # Its engine.

    def hold(self, reason: str) -> None:
        """Keep the engine from stepping until `go_on` is called with the same reason."""
        if self.gone:
            return
        if not self._holds:
            self._advance()
            self.engine.hold(self._time.now)
        self._holds.add(reason)
        self._plan()
        self._show()

    def go_on(self, reason: str) -> None:
        if self.gone or reason not in self._holds:
            return
        self._holds.discard(reason)
        if not self._holds:
            self.engine.go_on(self._time.now)
            self._made_at = self._time.now
        self._plan()
        self._show()

    def _advance(self) -> None:
        """Bring the engine to the present, and take in what happened in it."""
        now, before = self._time.now, self.engine.generated
        for event in self.engine.advance(now):
            if event.kind is EventKind.STARTED:
                self._first[event.key] = None
            elif event.kind is EventKind.FINISHED:
                self._ended[event.key] = None
        if self._first or self._ended:
            self._urgent_due.set(now + _URGENT_S)
        if self.engine.generated > before:
            self._made_at = now

    def _engine_event(self) -> None:
        self._advance()
        self._plan()

    def _plan(self) -> None:
        """Plan the next event of the engine, and the next flush."""
        self._engine_due.set(self.engine.next_event() if not self.gone else float("inf"))
        if self.engine.running and not self._holds and not self._flush_planned:
            self._flush_planned = True
            self._flush_due.set(self._time.now + self._interval_s)
        self._show()

    _flush_planned = False

    def _show(self) -> None:
        """Keep the books on what the machine does."""
        if self.gone or self.session is None:
            return
        state, run = "idle", self._installed[0] if self._installed else ""
        if "installing" in self._holds:
            state = "installing"
        elif self._holds:
            state = "held"
        elif self.engine.running or self.engine.waiting:
            state = "generating"
        self._books.enter(self.name, self.terms.pool, state, self._time.now, run)

    # What it reports.

    def _say(self, report: Struct) -> None:
        """Report to the coordinator, if there is a session."""
        session = self.session
        if session is not None and not session.gone and not self._frozen:
            self._coordinator.hear(session, report)

    def _beat(self) -> None:
        if self.gone or self._frozen or self.session is None or self.session.gone:
            return
        now, engine = self._time.now, self.engine
        self._advance()
        self._plan()
        state = WorkerState.INSTALLING if "installing" in self._holds else WorkerState.READY
        works = engine.running > 0 and not self._holds
        self._say(
            HeartbeatReport(
                state=WorkerState.DRAINING if self._drains else state,
                tokens_per_s=self._rate(now),
                tokens_generated=engine.generated,
                busy_s=engine.busy_s,
                uptime_s=now - self._began,
                held=bool(self._holds),
                quiet_s=max(0.0, now - self._made_at) if works else 0.0,
            )
        )
        self._beat_due.set(now + self.terms.heartbeat_s)

    def _rate(self, now: float) -> float:
        """Tokens/s since the last heartbeat."""
        made, since = self._last_beat
        self._last_beat = (self.engine.generated, now)
        return (self.engine.generated - made) / (now - since) if now > since else 0.0

    _last_beat = (0, 0.0)

    def _flush(self) -> None:
        self._flush_planned = False
        if self.gone or self._frozen or self.session is None or self.session.gone:
            return
        self._advance()
        self._flush_urgent()
        running = [one for one in self._attempts.values() if one.started and one.session is self.session]
        made = self.engine.made
        self._coordinator.stored(self.session, running, [made(one.attempt_id) for one in running])
        self._plan()

    def _flush_urgent(self) -> None:
        """Report first tokens and finishes."""
        session = self.session
        if self.gone or self._frozen or session is None or session.gone:
            return
        first, self._first = self._first, {}
        ended, self._ended = self._ended, {}
        begun = [one for key in first if (one := self._attempts.get(key)) and one.session is session]
        if begun:
            self._coordinator.stored(session, begun, [max(one.stored, self._made(one)) for one in begun])
        for key in ended:
            attempt = self._attempts.pop(key, None)
            if attempt is not None and attempt.session is session:
                self._coordinator.finished(attempt)

    def _made(self, attempt: RunningAttempt) -> int:
        if attempt.attempt_id in self._ended:
            return self._coordinator.length_of(attempt)[1]
        return self.engine.made(attempt.attempt_id)

    def _hand_back(self, keys: Sequence[str], cause: EndCause, text: str) -> None:
        """Stop attempts, store what they have made, and hand them back."""
        self._time.after(_HAND_BACK_S, lambda: self._released(keys, cause, text))

    def _released(self, keys: Sequence[str], cause: EndCause, text: str) -> None:
        session = self.session
        if self.gone or self._frozen or session is None:
            return
        self._advance()
        refs: list[AttemptRef] = []
        for key in keys:
            attempt = self._attempts.get(key)
            if attempt is None or key in self._ended:
                continue
            made = self.engine.remove(key, self._time.now)
            del self._attempts[key]
            self._first.pop(key, None)
            if attempt.session is session:
                self._coordinator.stored(session, [attempt], [made])
                refs.append(attempt.ref)
        self._plan()
        if refs:
            self._say(ReleasedReport(attempts=tuple(refs), reason=text, cause=cause))

    def _drop(self, keys: Iterable[str]) -> None:
        """Stop attempts that are over, or another worker's."""
        self._advance()
        for key in keys:
            attempt = self._attempts.pop(key, None)
            self._first.pop(key, None)
            if attempt is not None and self._ended.pop(key, "") == "":
                made = self.engine.remove(key, self._time.now)
                self._books.tokens.twice += max(0, made - attempt.stored)
        self._plan()
