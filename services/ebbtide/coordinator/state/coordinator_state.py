"""What a coordinator remembers: live runs, as the store has them, and attached workers.

Invariant: of a run, the store is the truth and this its mirror. A mirror changes only behind the store: `changing`
holds the run's lock over a store call and the change that follows it. Where a call's outcome is unknown the mirror is
`stale`, and is read anew before it is used to place. When the store came back it may know less than the mirror: then
the run is not `settled` until `recovery` has told the store of the attempts that live on. Who may write: the holder of
the run's lock, and, for one attempt, whoever saw the store end it. All of it is lost with the process; `recovery` reads
the runs back, and workers attach again with the attempts that they have.
"""

import asyncio
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
from ebbtide.types.fleet import AttemptRef, WorkerKind, WorkerState
from ebbtide.types.run import RunShare, RunSpec
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import fleet_pb2
from ebbtide.wire.record_conversion import to_proto

#: Episodes whose last worker is remembered, per run: a prefix cache older than so many episodes is gone anyway.
_HOMES: Final = 1 << 16
#: Groups whose place is remembered, per run: of more, those that were idle longest stand where they come next.
_GROUPS: Final = 1 << 16


class OrphanedAttempt(Struct, frozen=True):
    """An attempt without its worker: re-queued at `due` unless the worker comes back."""

    due: float
    why: EndReason


class RunningAttempt(Struct, kw_only=True, eq=False):
    """One running rollout, from token `start` on. Exactly one of `session` and `orphaned` is set.

    `leaving`: the store was asked to end it, so that its worker can no longer go on with it. `stored`: tokens of the
    rollout that the store has, as acknowledged last; `started`: a token of this attempt has arrived; `number`: how many
    attempts the rollout has had with it (0: not known); `given`: when a worker was given it; `lost`: tokens that went
    with its worker, at most; `target`: the worker that it is on its way to, if the coordinator moves it.
    """

    run_id: str
    attempt_id: str
    waiting: QueuedRollout
    start: int
    max_tokens: int
    leaving: bool = False
    stored: int = 0
    started: bool = False
    number: int = 0
    given: float = 0.0
    lost: int = 0
    target: str = ""
    session: "WorkerSession | None" = None
    orphaned: OrphanedAttempt | None = None

    def __post_init__(self) -> None:
        self.stored = max(self.stored, self.start)

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(self.run_id, self.waiting.rollout_id, self.attempt_id)

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.waiting.length + self.stored - self.start

    def begun(self, now: float) -> None:
        """Its first tokens came, stored or not yet."""
        self.started = True
        if (session := self.session) is not None:
            session.pending.pop(self.attempt_id, None)
            if self.number > 1:
                session.resumes.append((self.run_id, now - self.waiting.since))

    def orphan(self, orphaned: OrphanedAttempt) -> None:
        self.part()
        self.orphaned = orphaned

    def give(self, session: "WorkerSession") -> None:
        self.part()
        self.session, self.orphaned = session, None
        session.attempts[self.attempt_id] = self
        session.held[self.run_id, self.waiting.bounds] += 1
        if not self.started:
            session.pending[self.attempt_id] = self

    def part(self) -> None:
        """Take it from its session, if it has one."""
        session, self.session = self.session, None
        if session is None or session.attempts.pop(self.attempt_id, None) is None:
            return
        session.pending.pop(self.attempt_id, None)
        kind = (self.run_id, self.waiting.bounds)
        session.held[kind] -= 1
        if not session.held[kind]:
            del session.held[kind]


class StoreIncarnation:
    """One incarnation of the store. It is `over` once the store came back or was replaced: the next one may know less.

    `name`: see `StoreConnection.incarnation`. `durable_after_s`: within one incarnation, a write is durable so long
    after it was acknowledged; 0: at once. "Durable" may be answered only if the incarnation is not over then.
    """

    def __init__(self, name: str = "", durable_after_s: float = 0.0) -> None:
        self.name, self.durable_after_s = name, durable_after_s
        self.over = asyncio.Event()

    def durable(self) -> bool:
        """Whether what was just acknowledged in this life survives it."""
        return not self.durable_after_s and not self.over.is_set()


class UnconfirmedAttempt(Struct, frozen=True):
    """An attempt whose rollout the store forgot: its worker goes on until `due`, and the rollout may come again.

    `newer`: the attempt is known to be newer than any that the store has.
    """

    attempt: RunningAttempt
    due: float
    newer: bool = False


class FinishedAttempt(NamedTuple):
    """An attempt that finished at this session; the store may forget it `until` then (seconds, monotonic)."""

    attempt: RunningAttempt
    session: "WorkerSession"
    until: float


class RunState:
    """A live run.

    `settled`: the store's present life knows of all attempts that live on, but for the `widows` (by rollout): until
    then appends wait, so that no worker is told SUPERSEDED because the store forgot. An append for a widow is not sent
    to the store but answered as stored, with 0 tokens; the worker sends again once the rollout is known
    (`WorkerSession.resend`). `ending`: finished attempts whose finish the store may still forget.

    `versions`: the announced ones that can be had; `homes`: episode -> session of its last turn; `groups`: group ->
    place in line of its first rollout; `fitted`: whether some worker ever installed a version; `misfits`: before that,
    how often versions of an architecture were refused by workers of another; `architecture`: of the weights, once
    known; `lengths`: of its finished responses; `made`: tokens stored since `sharing` looked last; `share`: what it has
    of the fleet.
    """

    def __init__(self, run_id: str, spec: RunSpec) -> None:
        self.run_id = run_id
        self.spec = spec
        self.lock = asyncio.Lock()
        self.stale = True
        self.ended = False
        self.line = RolloutQueue(spec.evaluation.priority)
        self.running: dict[str, RunningAttempt] = {}
        self.settled = asyncio.Event()
        self.widows: dict[str, UnconfirmedAttempt] = {}
        self.ending: deque[FinishedAttempt] = deque()
        self.versions: dict[int, PolicyVersion] = {}
        self.homes: dict[str, str] = {}
        self.groups: dict[str, int] = {}
        self.failed_installs: dict[int, int] = {}
        self.lengths = ResponseLengths()
        self.fitted = False
        self.misfits: Counter[str] = Counter()
        self.architecture = ""
        self.made = 0
        self.share = RunShare()
        self.ended_lately: set[str] | None = None  # rollouts that end while the mirror is being read anew

    def is_widow(self, ref: AttemptRef) -> bool:
        widow = self.widows.get(ref.rollout_id)
        return widow is not None and widow.attempt.attempt_id == ref.attempt_id

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Hold the lock for one store call; if its outcome stays unknown, the mirror is stale."""
        async with self.lock:
            if self.ended:
                raise LeaseSuperseded(f"run {self.run_id} has ended; step down")
            try:
                yield
            except (StoreUnavailable, asyncio.CancelledError):
                self.stale = True
                raise

    def end(self, rollout_id: str, attempt_id: str = "") -> RunningAttempt | None:
        """The store ended a rollout (or only if it runs as `attempt_id`): forget it. Returns its attempt if it ran."""
        if self.ended_lately is not None:
            self.ended_lately.add(rollout_id)
        attempt = self.running.get(rollout_id)
        if attempt_id and (attempt is None or attempt.attempt_id != attempt_id):
            return None
        self.line.remove(rollout_id)
        if attempt is not None:
            del self.running[rollout_id]
            attempt.part()
        return attempt

    def finish(self, rollout_id: str, attempt_id: str, *, durable_after_s: float = 0.0) -> RunningAttempt | None:
        """The store finished a rollout with the tokens of this attempt, and may forget it for so long. None if that was
        known already.
        """
        running = self.running.get(rollout_id)
        session = running.session if running else None
        attempt = self.end(rollout_id, attempt_id)
        if attempt is not None:
            self.lengths.finished(attempt.stored)
            if durable_after_s and session is not None:
                now = time.monotonic()
                while self.ending and self.ending[0].until <= now:
                    self.ending.popleft()
                self.ending.append(FinishedAttempt(attempt, session, now + durable_after_s))
        return attempt

    def group_place(self, group_id: str, place: int) -> int:
        """The place of the group's first rollout; that is `place`, if it is the first."""
        found = self.groups[group_id] = self.groups.pop(group_id, place)
        if len(self.groups) > _GROUPS:
            del self.groups[next(iter(self.groups))]
        return found

    def settle_at(self, episode_id: str, session_id: str) -> None:
        """Remember which attached worker had an episode's last turn."""
        self.homes.pop(episode_id, None)
        self.homes[episode_id] = session_id
        if len(self.homes) > _HOMES:
            del self.homes[next(iter(self.homes))]


class ReleaseRequest(Struct):
    """An attempt that was asked for at `first`, and again at `last`."""

    reason: str
    first: float
    last: float


class RunChange(NamedTuple):
    """A worker was told `at` to install weights of another run, for which its engine has to be `restarted`."""

    run_id: str
    at: float
    restarted: bool


class WorkerSession:
    """One attachment of a worker. `resend`: set to end its append stream, so that it sends again what is not durable;
    cleared with the next stream. `run_id`: the run it is to serve ("": none), `since` when; `changing`: to another
    run's weights, as it was told; `target`: the version that it was last told; `pending`: the attempts that have not
    started; `held`: how many it has of each run and bounds; `plateau`: see `Worker`; `beat`: its last heartbeat, which
    `hear` takes in.

    Of a borrowed worker: `standing`: its host has itself back, as far as is known; `turned`: when that began or ended;
    `given_up`: why its host is not borrowed now; `wanted`: whether it is, as the worker was told; `freed`: attempts
    that it was asked for because its host has itself back, or is given up, and has not handed back.
    """

    def __init__(self, session_id: str, hello: AttachReport, now: float, resumes: list[tuple[str, float]]) -> None:
        """`resumes`: of the `CoordinatorState`, which is told there how long rollouts took to go on."""
        self.session_id = session_id
        self.hello = hello
        self.state = WorkerState.READY
        self.beat = HeartbeatReport()
        self.attempts: dict[str, RunningAttempt] = {}  # by attempt id
        self.pending: dict[str, RunningAttempt] = {}
        self.held: Counter[tuple[str, VersionBounds]] = Counter()
        self.resumes = resumes
        self.plateau = 0
        self.outbox: asyncio.Queue[fleet_pb2.CoordinatorMessage | None] = asyncio.Queue()
        self.run_id = ""
        self.attached = self.since = now
        self.installed: tuple[str, PolicyVersion] | None = None
        self.target: tuple[str, int] | None = None
        self.changing: RunChange | None = None
        self.unfit: dict[str, float] = {}  # run -> until when
        self.refused: dict[str, float] = {}  # architectures that its engine could not be started for -> until when
        self.draining = self.gone = False
        self.reason = ""  # why it drains
        self.resend = asyncio.Event()
        self.progressed = now  # when tokens of it arrived last, stored or not
        self.storing = 0  # messages that the store was asked to take, and has not answered
        self.borrowed = hello.kind is WorkerKind.BORROWED
        self.standing, self.turned = self.borrowed, now  # until it says that it has a grant
        self.given_up = ""
        self.wanted: bool | None = None
        self.freed: dict[str, ReleaseRequest] = {}  # by attempt id
        self._streams = 0
        self.drained = asyncio.Event()  # it has no append stream open: all that came of it was seen to
        self.drained.set()

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    def hear(self, beat: HeartbeatReport, now: float) -> bool:
        """Take in a heartbeat. Whether the worker's host took itself back with it, or gave itself again."""
        self.beat = beat
        if not self.borrowed:
            return False
        # A worker that is held for less than it takes to say so is as good as granted all the time.
        standing = beat.borrowed is None or (beat.held and not beat.borrowed.granted)
        turned, self.standing = standing is not self.standing, standing
        self.turned = now if turned else self.turned
        return turned

    def lent(self, now: float) -> LentHost | None:
        """The grant of a borrowed worker, as it says."""
        said = self.beat.borrowed
        if not self.borrowed:
            return None
        return LentHost(
            standing=self.standing,
            lasted_s=now - self.turned,
            spell_s=said.spell_s if said else 0.0,
            asleep=said.asleep if said else False,
        )

    def version_of(self, run_id: str) -> int:
        """The version of the run that is installed; 0 for none."""
        return self.installed[1].version if self.installed and self.installed[0] == run_id else 0

    @contextmanager
    def appending(self) -> Iterator[None]:
        """Hold this while an append stream of the worker is open: its attempts are not re-queued yet."""
        self._streams += 1
        self.drained.clear()
        try:
            yield
        finally:
            self._streams -= 1
            if not self._streams:
                self.drained.set()

    def forget(self, run_id: str) -> None:
        """A run is over: have the worker give back what it keeps for it."""
        mine = [attempt for attempt in self.attempts.values() if attempt.run_id == run_id]
        self.cancel(attempt.ref for attempt in mine)
        for attempt in mine:
            attempt.part()
        self.unfit.pop(run_id, None)
        self.changing = None if self.changing and self.changing.run_id == run_id else self.changing
        # What it came with lies there until something else is installed, whatever it serves or is told meanwhile.
        has = self.installed[0] if self.installed else self.hello.run_id
        kept = {self.run_id, has, self.target[0] if self.target else ""}
        if run_id not in kept and not mine:
            return
        self.run_id = "" if self.run_id == run_id else self.run_id
        self.installed = None if self.installed and self.installed[0] == run_id else self.installed
        self.target = None if self.target and self.target[0] == run_id else self.target
        self.say_over(run_id)

    def say_over(self, run_id: str) -> None:
        """Tell of a run that is not among the live ones. These were all read before any worker could attach, so it has
        ended, or the store lost it; told twice, a worker finds nothing left to give back."""
        if not self.gone:
            self.outbox.put_nowait(fleet_pb2.CoordinatorMessage(forget=fleet_pb2.Forget(run_id=run_id)))

    def cancel(self, attempts: Iterable[AttemptRef]) -> None:
        """Have the worker forget these: they are over, or another worker's."""
        if (batch := _messages(attempts)) and not self.gone:
            self.outbox.put_nowait(fleet_pb2.CoordinatorMessage(cancel=fleet_pb2.CancelBatch(attempts=batch)))

    def take(self, attempts: Iterable[AttemptRef], reason: str = "") -> None:
        """Have the worker hand these back, for another one to go on with."""
        text = (
            f"moved: {reason}" if reason else "moved"
        )  # a worker of the former release sends nothing but the text back
        release = fleet_pb2.Release(attempts=_messages(attempts), reason=text)
        self.outbox.put_nowait(fleet_pb2.CoordinatorMessage(release=release))


def _messages(attempts: Iterable[AttemptRef]) -> list[fleet_pb2.AttemptRef]:
    return [to_proto(ref, fleet_pb2.AttemptRef) for ref in attempts]


class CoordinatorState:
    """The live runs in the order of their submission, and the sessions."""

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self.sessions: dict[str, WorkerSession] = {}
        self.resumes: list[tuple[str, float]] = []  # run, and seconds until a rollout went on; until they are counted
        self.ended: set[str] = set()  # ended runs whose data is still to be deleted
        self.changes = ChangeoverTimes()
        self.life = StoreIncarnation()  # the store's present one
        self.doubt_until = 0.0  # until then the store may have forgotten what workers and leases still send again
        self.wake = asyncio.Event()  # something to decide
        self.reap = asyncio.Event()  # an attempt lost its worker
        self.endings = RunEndings()

    @property
    def doubtful(self) -> bool:
        return time.monotonic() < self.doubt_until
