"""Holds what a coordinator remembers: live runs, mirrored from the store, and attached workers.

Invariant: the store holds the truth about a run. `RunState` mirrors it and changes only after the store: `changing`
holds the run's lock over a store call and the change that follows. A call with an unknown outcome makes the mirror
`stale`; it is read again before it is used to place. A store that came back may know less than the mirror: the run is
not `reconciled` until `RunRecovery` has told the store of its live attempts. Only the holder of the run's lock writes,
and, for one attempt, the call that saw the store end it. All of it is lost with the process; `RunRecovery` reads the
runs back, and workers attach again with their attempts.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide.coordinator.state.worker_reports import AttachReport, HeartbeatReport
from ebbtide.errors import LeaseSuperseded, StoreUnavailable
from ebbtide.rpc.run_endings import RunEndings
from ebbtide.scheduling.dispatch.reclaim_risk import LentHost
from ebbtide.scheduling.dispatch.response_lengths import ResponseLengths
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.scheduling.fair_share.share_accounts import ChangeoverTimes
from ebbtide.scheduling.steps.step_pacing import VersionBounds
from ebbtide.store.rollout_rows import EndReason
from ebbtide.types.fleet import AttemptRef, FlushWindow, WorkerKind, WorkerState
from ebbtide.types.run import RunShare, RunSpec
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import fleet_pb2
from ebbtide.wire.record_conversion import to_proto

#: Episodes per run whose last worker is remembered: no prefix cache lasts longer.
_HOMES: Final = 1 << 16
#: Groups per run whose place is remembered; groups idle for longer get a new place.
_GROUPS: Final = 1 << 16


class OrphanedAttempt(Struct, frozen=True):
    """An attempt without a worker."""

    due: float  # when it is re-queued, unless its worker comes back
    why: EndReason


class RunningAttempt(Struct, kw_only=True, eq=False):
    """One running rollout. Exactly one of `session` and `orphaned` is set."""

    run_id: str
    attempt_id: str
    rollout: QueuedRollout  # as it was queued
    start: int  # its first token
    max_tokens: int
    leaving: bool = False  # the store was asked to end it: its worker can no longer continue it
    stored: int = 0  # tokens of the rollout that the store has, as last acknowledged
    started: bool = False  # a token of this attempt has arrived
    number: int = 0  # of the rollout's attempts; 0: not known
    given: float = 0.0  # when a worker got it
    lost: int = 0  # tokens lost with its worker, at most
    target: str = ""  # the worker that the coordinator moves it to
    session: "WorkerSession | None" = None
    orphaned: OrphanedAttempt | None = None

    def __post_init__(self) -> None:
        self.stored = max(self.stored, self.start)

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(self.run_id, self.rollout.rollout_id, self.attempt_id)

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.rollout.length + self.stored - self.start

    def begun(self, now: float) -> None:
        """Note that its first tokens arrived, stored or not."""
        self.started = True
        if (session := self.session) is not None:
            session.pending.pop(self.attempt_id, None)
            if self.number > 1:
                session.resumes.append((self.run_id, now - self.rollout.since))

    def orphan(self, orphaned: OrphanedAttempt) -> None:
        self.unassign()
        self.orphaned = orphaned

    def assign(self, session: "WorkerSession") -> None:
        self.unassign()
        self.session, self.orphaned = session, None
        session.attempts[self.attempt_id] = self
        session.held[self.run_id, self.rollout.bounds] += 1
        if not self.started:
            session.pending[self.attempt_id] = self

    def unassign(self) -> None:
        """Remove it from its session, if it has one."""
        session, self.session = self.session, None
        if session is None or session.attempts.pop(self.attempt_id, None) is None:
            return
        session.pending.pop(self.attempt_id, None)
        kind = (self.run_id, self.rollout.bounds)
        session.held[kind] -= 1
        if not session.held[kind]:
            del session.held[kind]


class StoreIncarnation:
    """One incarnation of the store, from one start of its server to the next."""

    def __init__(self, name: str = "", durable_after_s: float = 0.0) -> None:
        self.name = name  # of the server and its data, as `StoreConnection.incarnation`
        #: The store may forget an acknowledged write for at least so long; 0: never. See `DurabilityWatch`.
        self.durable_after_s = durable_after_s
        #: Set once the store came back, or another took its place: that one may know less.
        self.over = asyncio.Event()

    def durable(self) -> bool:
        """Whether what was just acknowledged survives this incarnation."""
        return not self.durable_after_s and not self.over.is_set()


class UnconfirmedAttempt(Struct, frozen=True):
    """An attempt whose rollout the store forgot. Its worker continues, since the rollout may be submitted again."""

    attempt: RunningAttempt
    due: float  # when its worker must stop
    newer: bool = False  # known to be newer than any attempt in the store


class FinishedAttempt(NamedTuple):
    attempt: RunningAttempt
    session: "WorkerSession"
    at: float  # when the store had acknowledged it (seconds, monotonic)


class RunState:
    """A live run."""

    def __init__(self, run_id: str, spec: RunSpec) -> None:
        self.run_id = run_id
        self.spec = spec
        self.lock = asyncio.Lock()
        self.stale = True
        self.ended = False
        self.queue = RolloutQueue(spec.evaluation.priority)
        self.running: dict[str, RunningAttempt] = {}
        #: The store's present incarnation knows all live attempts except the unconfirmed ones. Until then appends
        #: wait, so that no worker is told SUPERSEDED because the store forgot.
        self.reconciled = asyncio.Event()
        #: By rollout. Their appends are answered as stored, with 0 tokens, and not sent to the store; the worker sends
        #: them again once the rollout is known (`WorkerSession.resend`).
        self.unconfirmed: dict[str, UnconfirmedAttempt] = {}
        self.volatile_finishes: deque[FinishedAttempt] = deque()  # finishes that the store may still forget
        self.versions: dict[int, PolicyVersion] = {}  # announced, and available
        self.homes: dict[str, str] = {}  # episode -> session of its last turn
        self.groups: dict[str, int] = {}  # group -> queue place of its first rollout
        self.failed_installs: dict[int, int] = {}
        self.lengths = ResponseLengths()
        self.fitted = False  # some worker has installed a version
        self.misfits: Counter[str] = Counter()  # refusals by workers of another architecture, until `fitted`
        self.architecture = ""  # of the weights, once known
        self.made = 0  # tokens stored since the last share accounting
        self.share = RunShare()
        self.ended_lately: set[str] | None = None  # rollouts that end while the mirror is being read again

    def is_unconfirmed(self, ref: AttemptRef) -> bool:
        unconfirmed = self.unconfirmed.get(ref.rollout_id)
        return unconfirmed is not None and unconfirmed.attempt.attempt_id == ref.attempt_id

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Hold the lock for one store call; an unknown outcome makes the mirror stale."""
        async with self.lock:
            if self.ended:
                raise LeaseSuperseded(f"run {self.run_id} has ended; step down")
            try:
                yield
            except (StoreUnavailable, asyncio.CancelledError):
                self.stale = True
                raise

    def end(self, rollout_id: str, attempt_id: str = "") -> RunningAttempt | None:
        """Forget a rollout that the store ended (only if it runs as `attempt_id`, if given). Returns its attempt."""
        if self.ended_lately is not None:
            self.ended_lately.add(rollout_id)
        attempt = self.running.get(rollout_id)
        if attempt_id and (attempt is None or attempt.attempt_id != attempt_id):
            return None
        self.queue.remove(rollout_id)
        if attempt is not None:
            del self.running[rollout_id]
            attempt.unassign()
        return attempt

    def finish(self, rollout_id: str, attempt_id: str, *, durable_before: float = math.inf) -> RunningAttempt | None:
        """Note that the store finished a rollout with this attempt. The store may still forget what was acknowledged
        since `durable_before`. None if known.
        """
        running = self.running.get(rollout_id)
        session = running.session if running else None
        attempt = self.end(rollout_id, attempt_id)
        if attempt is not None:
            self.lengths.finished(attempt.stored)
            while self.volatile_finishes and self.volatile_finishes[0].at < durable_before:
                self.volatile_finishes.popleft()
            if durable_before < math.inf and session is not None:
                self.volatile_finishes.append(FinishedAttempt(attempt, session, time.monotonic()))
        return attempt

    def group_place(self, group_id: str, place: int) -> int:
        """The place of the group's first rollout: `place`, if this is the first."""
        found = self.groups[group_id] = self.groups.pop(group_id, place)
        if len(self.groups) > _GROUPS:
            del self.groups[next(iter(self.groups))]
        return found

    def remember_home(self, episode_id: str, session_id: str) -> None:
        """Remember the worker of an episode's last turn."""
        self.homes.pop(episode_id, None)
        self.homes[episode_id] = session_id
        if len(self.homes) > _HOMES:
            del self.homes[next(iter(self.homes))]


class ReleaseRequest(Struct):
    reason: str
    first: float  # when the attempt was first asked back
    last: float


class RunChange(NamedTuple):
    """A worker's change to another run's weights."""

    run_id: str
    at: float  # when the worker was told
    restarted: bool  # its engine has to be restarted for it


class WorkerSession:
    """One attachment of a worker."""

    def __init__(self, session_id: str, hello: AttachReport, now: float, resumes: list[tuple[str, float]]) -> None:
        self.session_id = session_id
        self.hello = hello
        self.state = WorkerState.READY
        self.beat = HeartbeatReport()  # the last one
        self.attempts: dict[str, RunningAttempt] = {}  # by attempt id
        self.pending: dict[str, RunningAttempt] = {}  # those that have not started
        self.held: Counter[tuple[str, VersionBounds]] = Counter()  # its attempts of each run and bounds
        self.resumes = resumes  # `CoordinatorState.resumes`
        self.plateau = 0  # see `Worker`
        self.outbox: asyncio.Queue[fleet_pb2.CoordinatorMessage | None] = asyncio.Queue()
        self.run_id = ""  # the run it is to serve, `since` when
        self.attached = self.since = now
        self.installed: tuple[str, PolicyVersion] | None = None
        self.target: tuple[str, int] | None = None  # run and version that it was last told to install
        self.changing: RunChange | None = None
        self.unfit: dict[str, float] = {}  # run -> until when
        self.refused: dict[str, float] = {}  # architectures that its engine could not be started for -> until when
        self.draining = self.gone = False
        self.reason = ""  # why it drains
        #: Set to end its append stream, so that it sends again what is not durable; cleared by the next stream.
        self.resend = asyncio.Event()
        self.progressed = now  # when its last tokens arrived, stored or not
        self.storing = 0  # messages that the store has not answered yet
        self.borrowed = hello.kind is WorkerKind.BORROWED
        #: Its host serves users now, since or until `turned`; a borrowed worker starts so, until it reports a grant.
        self.reclaimed, self.turned = self.borrowed, now
        self.given_up = ""  # why its host is not borrowed now
        self.wanted: bool | None = None  # whether its host is borrowed, as the worker was told
        self.freed: dict[str, ReleaseRequest] = {}  # attempts asked back and not handed back, by attempt id
        self._streams = 0
        self.drained = asyncio.Event()  # it has no open append stream: all that it sent was handled
        self.drained.set()
        self._flush_interval_s = 0.0  # the least, as the worker was told

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    def hear(self, beat: HeartbeatReport, now: float) -> bool:
        """Take in a heartbeat. Whether it says that the worker's host was reclaimed, or granted again."""
        self.beat = beat
        if not self.borrowed:
            return False
        # A pause shorter than a heartbeat counts as granted.
        reclaimed = beat.borrowed is None or (beat.held and not beat.borrowed.granted)
        turned, self.reclaimed = reclaimed is not self.reclaimed, reclaimed
        self.turned = now if turned else self.turned
        return turned

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
        )

    def version_of(self, run_id: str) -> int:
        """The version of the run that is installed; 0 for none."""
        return self.installed[1].version if self.installed and self.installed[0] == run_id else 0

    @contextmanager
    def appending(self) -> Iterator[None]:
        """Marks an append stream of the worker as open: its attempts are not re-queued meanwhile."""
        self._streams += 1
        self.drained.clear()
        try:
            yield
        finally:
            self._streams -= 1
            if not self._streams:
                self.drained.set()

    def forget(self, run_id: str) -> None:
        """Have the worker drop what it keeps for a run that is over."""
        mine = [attempt for attempt in self.attempts.values() if attempt.run_id == run_id]
        self.cancel(attempt.ref for attempt in mine)
        for attempt in mine:
            attempt.unassign()
        self.unfit.pop(run_id, None)
        self.changing = None if self.changing and self.changing.run_id == run_id else self.changing
        # What it attached with stays until something else is installed.
        has = self.installed[0] if self.installed else self.hello.run_id
        kept = {self.run_id, has, self.target[0] if self.target else ""}
        if run_id not in kept and not mine:
            return
        self.run_id = "" if self.run_id == run_id else self.run_id
        self.installed = None if self.installed and self.installed[0] == run_id else self.installed
        self.target = None if self.target and self.target[0] == run_id else self.target
        self.tell_run_ended(run_id)

    def tell_run_ended(self, run_id: str) -> None:
        """Tell the worker that a run is not live: live runs were read before any worker could attach, so this one has
        ended, or the store lost it. Harmless when repeated."""
        if not self.gone:
            self.outbox.put_nowait(fleet_pb2.CoordinatorMessage(forget=fleet_pb2.Forget(run_id=run_id)))

    def cancel(self, attempts: Iterable[AttemptRef]) -> None:
        """Have the worker drop attempts that are over, or another worker's."""
        if (batch := _messages(attempts)) and not self.gone:
            self.outbox.put_nowait(fleet_pb2.CoordinatorMessage(cancel=fleet_pb2.CancelBatch(attempts=batch)))

    @property
    def flush_tokens(self) -> int:
        """So many of each rollout's newest tokens may be lost with the worker; 0: not known."""
        window = FlushWindow(self.hello.flush_tokens, self.hello.flush_interval_s)
        return window.stretched(self._flush_interval_s).tokens

    def pace_flushes(self, least_s: float, *, tell: bool = True) -> None:
        """Have the worker flush no more often than every `least_s` seconds. Former releases flush as they are set."""
        if "flush_interval" not in self.hello.capabilities:
            return
        self._flush_interval_s = least_s
        if tell and not self.gone:
            message = fleet_pb2.FlushInterval(least_s=least_s)
            self.outbox.put_nowait(fleet_pb2.CoordinatorMessage(flush_interval=message))

    def ask_back(self, attempts: Iterable[AttemptRef], reason: str = "") -> None:
        """Have the worker hand attempts back, so that another worker can continue them."""
        text = f"moved: {reason}" if reason else "moved"  # a worker of the former release returns only the text
        release = fleet_pb2.Release(attempts=_messages(attempts), reason=text)
        self.outbox.put_nowait(fleet_pb2.CoordinatorMessage(release=release))


def _messages(attempts: Iterable[AttemptRef]) -> list[fleet_pb2.AttemptRef]:
    return [to_proto(ref, fleet_pb2.AttemptRef) for ref in attempts]


class CoordinatorState:
    """The live runs in the order of their submission, and the sessions."""

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self.sessions: dict[str, WorkerSession] = {}
        self.resumes: list[tuple[str, float]] = []  # run, and seconds until a rollout resumed; not counted yet
        self.ended: set[str] = set()  # ended runs whose data is still to be deleted
        self.changes = ChangeoverTimes()
        self.incarnation = StoreIncarnation()  # of the store, at present
        self.doubt_until = 0.0  # until then the store may lack what workers and leases send again
        self.wake = asyncio.Event()  # something to decide
        self.reap = asyncio.Event()  # an attempt lost its worker
        self.endings = RunEndings()

    @property
    def doubtful(self) -> bool:
        return time.monotonic() < self.doubt_until
