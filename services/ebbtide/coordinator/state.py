"""What a coordinator remembers: live runs, as the store has them, and attached workers.

Invariant: of a run, the store is the truth and this its mirror. A mirror changes only behind the store: `changing`
holds the run's lock over a store call and the change that follows it. Where a call's outcome is unknown the mirror is
`stale`, and is read anew before it is used to place. Who may write: the holder of the run's lock, and, for one
attempt, whoever saw the store end it. All of it is lost with the process; `recovery` reads the runs back, and workers
attach again with the attempts that they have.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

from msgspec import Struct

from ebbtide.coordinator.records import Attach, Heartbeat
from ebbtide.errors import LeaseSuperseded, StoreUnavailable
from ebbtide.scheduling.line import Line, Waiting
from ebbtide.types.fleet import AttemptRef, WorkerState
from ebbtide.types.run import RunSpec
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import fleet_pb2

#: Episodes whose last worker is remembered, per run: a prefix cache older than so many episodes is gone anyway.
_HOMES: Final = 1 << 16


class Orphaned(Struct, frozen=True):
    """An attempt without its worker: re-queued at `due` unless the worker comes back. `blame`: see `scheduling`."""

    due: float
    reason: str
    blame: bool


class Attempt(Struct, kw_only=True, eq=False):
    """One running rollout, from token `start` on. Exactly one of `session` and `orphaned` is set.

    `leaving`: the store was asked to end it, so that its worker can no longer go on with it. `stored`: tokens of the
    rollout that the store has, as acknowledged last; `started`: a token of this attempt has arrived.
    """

    run_id: str
    attempt_id: str
    waiting: Waiting
    start: int
    max_tokens: int
    leaving: bool = False
    stored: int = 0
    started: bool = False
    session: "Session | None" = None
    orphaned: Orphaned | None = None

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(self.run_id, self.waiting.rollout_id, self.attempt_id)

    def orphan(self, orphaned: Orphaned) -> None:
        if self.session is not None:
            self.session.attempts.pop(self.attempt_id, None)
        self.session, self.orphaned = None, orphaned

    def give(self, session: "Session") -> None:
        if self.session is not None:
            self.session.attempts.pop(self.attempt_id, None)
        self.session, self.orphaned = session, None
        session.attempts[self.attempt_id] = self


class RunState:
    """A live run.

    `versions`: the announced ones that can be had; `homes`: episode -> session of its last turn; `busy`, `served`: when
    the run last had work, and a worker; `fitted`: whether some worker ever installed a version; `misfits`: before that,
    how often versions of an architecture were refused by workers of another.
    """

    def __init__(self, run_id: str, spec: RunSpec) -> None:
        self.run_id = run_id
        self.spec = spec
        self.lock = asyncio.Lock()
        self.stale = True
        self.ended = False
        self.line = Line()
        self.running: dict[str, Attempt] = {}
        self.versions: dict[int, PolicyVersion] = {}
        self.homes: dict[str, str] = {}
        self.failed_installs: dict[int, int] = {}
        self.fitted = False
        self.misfits: Counter[str] = Counter()
        self.busy = self.served = float("-inf")
        self.ended_lately: set[str] | None = None  # rollouts that end while the mirror is being read anew

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

    def end(self, rollout_id: str, attempt_id: str = "") -> Attempt | None:
        """The store ended a rollout (or only if it runs as `attempt_id`): forget it. Returns its attempt if it ran."""
        if self.ended_lately is not None:
            self.ended_lately.add(rollout_id)
        attempt = self.running.get(rollout_id)
        if attempt_id and (attempt is None or attempt.attempt_id != attempt_id):
            return None
        self.line.remove(rollout_id)
        if attempt is not None:
            del self.running[rollout_id]
            if attempt.session is not None:
                attempt.session.attempts.pop(attempt.attempt_id, None)
        return attempt

    def settle_at(self, episode_id: str, session_id: str) -> None:
        """Remember which attached worker had an episode's last turn."""
        self.homes.pop(episode_id, None)
        self.homes[episode_id] = session_id
        if len(self.homes) > _HOMES:
            del self.homes[next(iter(self.homes))]


class Session:
    """One attachment of a worker. `run_id`: the run it is to serve, `since` when; `target`: the version that it was
    last told."""

    def __init__(self, session_id: str, hello: Attach, now: float) -> None:
        self.session_id = session_id
        self.hello = hello
        self.state = WorkerState.READY
        self.beat = Heartbeat()
        self.attempts: dict[str, Attempt] = {}  # by attempt id
        self.outbox: asyncio.Queue[fleet_pb2.CoordinatorMessage | None] = asyncio.Queue()
        self.run_id = ""
        self.attached = self.since = now
        self.installed: tuple[str, PolicyVersion] | None = None
        self.target: tuple[str, int] | None = None
        self.unfit: dict[str, float] = {}  # run -> until when
        self.draining = self.gone = False
        self.progressed = now  # when tokens of it arrived last, stored or not

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    def version_of(self, run_id: str) -> int:
        """The version of the run that is installed; 0 for none."""
        return self.installed[1].version if self.installed and self.installed[0] == run_id else 0

    def cancel(self, attempts: Iterable[AttemptRef]) -> None:
        batch = [
            fleet_pb2.AttemptRef(run_id=a.run_id, rollout_id=a.rollout_id, attempt_id=a.attempt_id) for a in attempts
        ]
        if batch and not self.gone:
            self.outbox.put_nowait(fleet_pb2.CoordinatorMessage(cancel=fleet_pb2.CancelBatch(attempts=batch)))


class State:
    """The live runs in the order of their submission, and the sessions."""

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self.sessions: dict[str, Session] = {}
        self.ended: set[str] = set()  # ended runs whose data is still to be deleted
        self.wake = asyncio.Event()  # something to decide
        self.reap = asyncio.Event()  # an attempt lost its worker
