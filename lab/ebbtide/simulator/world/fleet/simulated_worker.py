"""Models a worker: a machine that boots, attaches, installs versions, does what it is told, and leaves or is lost.

Invariant: from its attach to its end a worker has one session. What the coordinator sends arrives `message_s` later.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from random import Random
from typing import Final, Protocol

from msgspec import Struct

from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_messages import CancelBatch, CoordinatorMessage, Install, Release
from ebbtide.coordinator.state.worker_reports import (
    AttachReport,
    DrainNotice,
    HeartbeatReport,
    InstalledReport,
    ReleasedReport,
)
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.simulated_engine import SimulatedEngine
from ebbtide.simulator.outcome import GONE, SimulationBooks
from ebbtide.simulator.world.fleet.attempt_host import AttemptHost, AttemptStore, FlushTerms
from ebbtide.simulator.world.virtual_time import Alarm, VirtualTime
from ebbtide.types.fleet import (
    PROTOCOL_VERSION,
    AttemptRef,
    BorrowedState,
    EndCause,
    EngineInfo,
    FlushPace,
    WorkerKind,
    WorkerState,
)
from ebbtide.types.weights import PolicyVersion

#: A released attempt ends with the engine's step under way, and its last tokens are stored before it goes back.
_HAND_BACK_S: Final = 0.05
#: A worker whose stream ended attaches again after so long.
_REATTACH_S: Final = 0.1
_PREEMPTED: Final = "preempted"


class WorkerTerms(Struct, frozen=True, kw_only=True):
    """What all workers of a pool have in common. Times in seconds."""

    pool: str
    kind: WorkerKind
    profile: EngineProfile
    max_model_len: int
    slots: int
    flush: FlushTerms = FlushTerms(0.25, 32)
    heartbeat_s: float = 1.0
    message_s: float = 0.001  # between worker and coordinator, one way
    link_bytes_per_s: float = inf
    seed: int = 0  # of what differs between workers


class WorkersCoordinator(AttemptStore, Protocol):
    """What a worker says to its coordinator, and asks of the relay."""

    def attach(self, worker: "SimulatedWorker", hello: AttachReport) -> WorkerSession: ...

    def hear(self, session: WorkerSession, report: Struct) -> None: ...

    def stream_broke(self, session: WorkerSession, reason: str) -> None: ...

    def pull(
        self, worker: "SimulatedWorker", run_id: str, version: int, done: Callable[[], None]
    ) -> Callable[[], None]:
        """Begin to pull a version; `done` is called at the end. Returns what stops the pull."""
        ...


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
        self.name, self.terms, self._speed = name, terms, speed
        self._slowed = self._share = 1.0  # of its speed: a fault, and the users of its host
        #: What a borrowed worker knows of its host.
        self.borrowed: Callable[[], BorrowedState | None] = lambda: None
        self._time, self._coordinator, self._books = time, coordinator, books
        phase = Random(f"{terms.seed} flush {name}").random()
        engine = SimulatedEngine(terms.profile, slots=terms.slots, now=time.now, speed=speed)
        self.host = AttemptHost(engine, time, coordinator, books.tokens, terms.flush, self._show, phase)
        self.gone = False
        self.versions: dict[str, int] = {}  # run -> version that its host has
        self._installed: tuple[str, PolicyVersion] | None = None
        self._wanted: tuple[str, PolicyVersion] | None = None
        self._leaves = False
        self._doomed = False  # its machine will be taken: it attaches no more
        self._began = time.now
        self._counted = (0, time.now)  # tokens generated, when the last heartbeat was sent
        self._busy_before = 0.0  # of the engine, when the worker attached
        self._thaws_s = 0.0
        self._waiting: list[Callable[[], None]] = []  # what is done once the machine is no longer frozen
        self._installing = False
        self._pulled_next: Callable[[], None] | None = None  # an install that waits for the one under way
        self._stop_pull: Callable[[], None] = lambda: None
        self._beat_due = Alarm(time, self.beat)

    @property
    def speed(self) -> float:
        """Of its engine now, relative to the profile's."""
        return self._speed * self._slowed * self._share

    @property
    def frozen(self) -> bool:
        return "frozen" in self.host.holds

    # Its life.

    def boot(self, boot_s: float) -> None:
        """Start the machine, which takes so many seconds, and then the engine: the worker attaches."""
        self._books.enter(self.name, self.terms.pool, "booting", self._time.now)
        self._time.after(boot_s + self.terms.profile.delays.start_s, self.attach)

    def attach(self) -> None:
        """Open a session, without any attempts."""
        if self.gone or self._doomed:
            return
        terms = self.terms
        self._leaves = False
        self._began, self._counted = self._time.now, (self.host.engine.generated, self._time.now)
        self._busy_before = self.host.engine.busy_s
        hello = AttachReport(
            worker_id=self.name,
            kind=terms.kind,
            protocol_version=PROTOCOL_VERSION,
            slots=terms.slots,
            site=terms.pool,
            engine=EngineInfo(
                model=terms.profile.model,
                vocab_size=1 << 17,
                max_model_len=terms.max_model_len,
                architecture=terms.profile.model,
                kv_tokens=terms.profile.kv.tokens,
                device=f"{terms.profile.gpus} x {terms.profile.device}" if terms.profile.device else "",
            ),
            capabilities=("flush_interval",),
            installed=(self._installed[1],) if self._installed else (),
            flush_tokens=terms.flush.tokens,
            run_id=self._installed[0] if self._installed else "",
            flush_interval_s=terms.flush.interval_s,
        )
        self.host.session = self._coordinator.attach(self, hello)
        self._show()
        self.beat()

    def doom(self, deadline_s: float) -> None:
        """The machine will be taken: hand everything over, and do not attach again."""
        self._doomed = True
        self.notice(deadline_s)

    def session_over(self) -> None:
        """The coordinator ended the session, because it thought the worker stuck: attach again, without attempts."""
        if not self.gone and not self.frozen and self.host.session is not None and self.host.session.gone:
            self.host.session = None
            self._beat_due.set(inf)
            self.host.drop(self.host.held)
            self._time.after(_REATTACH_S, self.attach)

    def notice(self, deadline_s: float) -> None:
        """Hand everything over."""
        if self.host.session is not None and not self._leaves and not self.gone:
            self._leaves = True
            self._say(DrainNotice(deadline_s=deadline_s, reason=_PREEMPTED))
            refs = self.host.held
            self._time.after(_HAND_BACK_S, lambda: self._released(refs, EndCause.WORKER_LEAVES, _PREEMPTED))

    def detach(self) -> None:
        """Leave the coordinator in order, once everything was handed over; the machine stays."""
        session, self.host.session = self.host.session, None
        self._beat_due.set(inf)
        self.host.drop(self.host.held)
        if session is not None and not session.gone:
            self._coordinator.stream_broke(session, "it left")
        self._show()

    def vanish(self, *, silently: bool) -> None:
        """Lose the machine. `silently`: its connections stay open, as when its power fails; else they break at once."""
        if self.gone:
            return
        lost = not (self._leaves or self._doomed) or bool(self.host.held)
        self.host.end()
        self.gone = True
        self._beat_due.set(inf)
        self._stop_pull()
        self._books.retire(self.host.engine)
        self._books.lose(self.terms.pool, drained=not lost)
        self._books.enter(self.name, self.terms.pool, GONE, self._time.now)
        session, self.host.session = self.host.session, None
        if session is not None and not session.gone and (self._leaves or not silently):
            self._coordinator.stream_broke(session, "it left" if self._leaves else "its stream broke")

    def freeze(self, seconds: float) -> None:
        """Stop the whole machine for a while: nothing is generated, and nothing is said. What was sent to it waits."""
        if not self.gone:
            self._thaws_s = max(self._thaws_s, self._time.now + seconds)
            self.host.hold("frozen")
            self._time.after(seconds, self._thaw)

    def slow_down(self, factor: float, seconds: float) -> None:
        """Work at so many times the machine's speed for a while."""
        self._slowed *= factor
        self.pace(self._share)
        self._time.after(seconds, lambda: self._quicken(factor))

    def _quicken(self, factor: float) -> None:
        self._slowed /= factor
        self.pace(self._share)

    def pace(self, share: float) -> None:
        """Work at a share of the machine's speed: the rest is its host's users'."""
        self._share = share
        if not self.gone:
            self.host.engine.pace(self.speed, self._time.now)
            self.host.look()

    def _thaw(self) -> None:
        if self.gone or self._time.now < self._thaws_s:
            return
        self.host.go_on("frozen")
        session, (waiting, self._waiting) = self.host.session, (self._waiting, [])
        if session is not None and session.gone:  # it was given up meanwhile, and what it holds is over
            self.host.drop(self.host.held)
            self.attach()
        elif session is not None:
            for action in waiting:
                action()
            self.beat()

    # What it is told.

    def assign(self, attempts: list[RunningAttempt]) -> None:
        self._time.after(self.terms.message_s, lambda: self._take(attempts))

    def _take(self, attempts: list[RunningAttempt]) -> None:
        if self.gone or self.host.session is None:
            return
        if self._leaves:
            mine = tuple(one.ref for one in attempts if one.session is self.host.session)
            self._say(ReleasedReport(attempts=mine, reason=_PREEMPTED, cause=EndCause.WORKER_LEAVES))
            return
        self.host.engine.forget(self.host.session.outbox.take_ended())
        self.host.take(attempts)

    def obey(self) -> None:
        """Do what the coordinator has sent since the last call."""
        session = self.host.session
        for message in session.outbox.take() if session is not None else ():
            self._time.after(self.terms.message_s, partial(self._obey, message))

    def _obey(self, message: CoordinatorMessage) -> None:
        if self.gone or self.host.session is None:
            return
        if self.frozen:
            self._waiting.append(partial(self._obey, message))
            return
        match message:
            case Install():
                self._install(message.run_id, message.version)
            case Release(attempts, reason):
                self._time.after(_HAND_BACK_S, lambda: self._released(list(attempts), EndCause.MOVED, reason))
            case CancelBatch(attempts):
                self.host.abandon(list(attempts))
            case FlushPace(least_s):
                self.host.pace(least_s)
            case _:
                pass  # nothing else changes what is modelled

    def _released(self, refs: list[AttemptRef], cause: EndCause, text: str) -> None:
        if self.gone or self.host.session is None:
            return
        if self.frozen:
            self._waiting.append(lambda: self._released(refs, cause, text))
            return
        back = self.host.hand_back(refs)
        if back:
            self._say(ReleasedReport(attempts=back, reason=text, cause=cause))

    # Versions.

    def _install(self, run_id: str, version: PolicyVersion) -> None:
        self._wanted = (run_id, version)
        began = self._time.now
        self._stop_pull()
        self._stop_pull = self._coordinator.pull(
            self, run_id, version.version, lambda: self._pulled(run_id, version, began)
        )

    def _pulled(self, run_id: str, version: PolicyVersion, began: float) -> None:
        if self.gone or self._wanted != (run_id, version):
            return
        if self._installing:
            self._pulled_next = lambda: self._pulled(run_id, version, began)
            return
        pull_s = self._time.now - began
        self.versions[run_id] = version.version
        if self._installed == (run_id, version):
            self._say(InstalledReport(version=version, run_id=run_id))
            return
        pause_s = self.terms.profile.install_pause_s()
        self._installing = True
        self.host.hold("installing")
        self._time.after(pause_s, lambda: self._done(run_id, version, pull_s, pause_s))

    def _done(self, run_id: str, version: PolicyVersion, pull_s: float, pause_s: float) -> None:
        if self.gone:
            return
        self._installing = False
        self._installed = (run_id, version)
        self.host.engine.new_weights(self._time.now)
        self.host.go_on("installing")
        self._books.installs += 1
        self._say(InstalledReport(version=version, run_id=run_id, pull_s=pull_s, pause_s=pause_s))
        following, self._pulled_next = self._pulled_next, None
        if following is not None:
            following()

    # What it reports.

    def _say(self, report: Struct) -> None:
        session = self.host.session
        if self.frozen:
            self._waiting.append(lambda: self._say(report))
        elif session is not None and not session.gone:
            self._coordinator.hear(session, report)

    def beat(self) -> None:
        """Send a heartbeat now, and from now on regularly."""
        session = self.host.session
        if self.gone or self.frozen or session is None or session.gone:
            return
        host, now = self.host, self._time.now
        host.report()
        generated = host.engine.generated
        made, since = self._counted
        self._counted = (generated, now)
        reads, tokens, read_s = host.engine.reads
        self._say(
            HeartbeatReport(
                state=self._state(),
                tokens_per_s=(generated - made) / (now - since) if now > since else 0.0,
                tokens_generated=generated,
                busy_s=host.engine.busy_s - self._busy_before,
                uptime_s=now - self._began,
                held=bool(host.holds),
                quiet_s=now - host.made_at if host.works else 0.0,
                prompt_reads=reads,
                prompt_tokens=tokens,
                prompt_s=read_s,
                borrowed=self.borrowed(),
            )
        )
        self._beat_due.set(now + self.terms.heartbeat_s)

    def _state(self) -> WorkerState:
        if self._leaves:
            return WorkerState.DRAINING
        return WorkerState.INSTALLING if "installing" in self.host.holds else WorkerState.READY

    def _show(self) -> None:
        """Keep the books on what the machine does."""
        if self.gone or (self.host.session is None and not self._installed):
            return
        holds = self.host.holds
        state = "generating" if self.host.works else "idle"
        if holds:
            state = "installing" if "installing" in holds else "held" if "reclaimed" in holds else "idle"
        run = self._installed[0] if self._installed else ""
        self._books.enter(self.name, self.terms.pool, state, self._time.now, run)
