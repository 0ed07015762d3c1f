"""Holds what a coordinator remembers: live runs, mirrored from the store, and attached workers.

Invariant: the store holds the truth about a run. `RunState` mirrors it and changes only after the store: `changing`
holds the run's lock over a store call and the change that follows. A store that came back may know less than the
mirror: the run is not `reconciled` until `RunRecovery` has told the store of its live attempts. Only the methods of
these classes change them, and they wake the dispatcher. All of it is lost with the process; `RunRecovery` reads the
runs back, and workers attach again with their attempts.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from ebbtide.coordinator.rules.fair_share import ChangeoverTimes
from ebbtide.coordinator.rules.liveness import Returning
from ebbtide.coordinator.rules.overload import Overload, Work
from ebbtide.coordinator.state.notifier import DispatchWakeups
from ebbtide.coordinator.state.run_mirror import FaultPause
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_reports import AttachReport
from ebbtide.coordinator.state.worker_session import SessionIndex, WorkerSession
from ebbtide.rpc.run_endings import RunEndings
from ebbtide.types.run import RunSpec

#: Ended runs that are remembered after their data was deleted. A store forgets what happened in some seconds.
_SWEPT: Final = 1024


class StoreIncarnation:
    """One incarnation of the store, from one start of its server to the next."""

    def __init__(self, name: str = "", durable_after_s: float = 0.0) -> None:
        self.name = name  # of the server and its data, as `StoreConnection.incarnation`
        #: The store may forget an acknowledged write for at least so long; 0: never. See `DurabilityWatch`.
        self.durable_after_s = durable_after_s
        #: Set once the store came back, or another took its place: that one may know less.
        self.over: Final = asyncio.Event()

    def durable(self) -> bool:
        """Whether what was just acknowledged survives this incarnation."""
        return not self.durable_after_s and not self.over.is_set()


class CoordinatorState:
    """The live runs in the order of their submission, and the sessions. `clock` gives seconds that only rise, to all
    who decide by them: `time.monotonic`, or virtual time. `wakeups` hear of changes.
    """

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        wakeups: DispatchWakeups | None = None,
    ) -> None:
        self.clock: Final = clock or time.monotonic
        self._runs: dict[str, RunState] = {}
        self._sessions: dict[str, WorkerSession] = {}
        self._ended: set[str] = set()
        self.runs: Final[Mapping[str, RunState]] = self._runs
        self.sessions: Final[Mapping[str, WorkerSession]] = self._sessions
        self.ended: Final[AbstractSet[str]] = self._ended  # ended runs whose data is still to be deleted
        self._swept: deque[str] = deque(maxlen=_SWEPT)  # those whose data was deleted last
        self._skipped: dict[str, FaultPause] = {}
        #: Live runs that could not be read at take-over because the store gave an unexpected reply. They are tried
        #: again after each pause, and never deleted.
        self.skipped: Final[Mapping[str, FaultPause]] = self._skipped
        self.changes: Final = ChangeoverTimes()
        self.overload: Final = Overload()
        self.returning: Final = Returning()
        self.shedding = 0  # so many kinds of work give way now
        self.incarnation = StoreIncarnation()  # of the store, at present
        self.wakeups: Final = wakeups or DispatchWakeups()
        self._index = SessionIndex()
        self.endings: Final = RunEndings()
        self.doubt_until = 0.0  # until then the store may lack what workers and leases send again

    def shed(self, level: int) -> None:
        """Have so many kinds of work give way: see `Work`."""
        self.shedding = level

    def sheds(self, work: Work) -> bool:
        """Whether the work gives way now."""
        return self.shedding >= work

    @property
    def doubtful(self) -> bool:
        return self.clock() < self.doubt_until

    def add_run(self, run_id: str, spec: RunSpec) -> RunState:
        """The mirror of a live run, which is new and stale unless there is one."""
        if (run := self._runs.get(run_id)) is None:
            run = self._runs[run_id] = self._make_run(run_id, spec)
        self._skipped.pop(run_id, None)
        return run

    def skip_run(self, run_id: str, error: Exception) -> None:
        """Leave a live run without a mirror for a while: the store gave an unexpected reply."""
        self._skipped.setdefault(run_id, FaultPause(run_id)).begin(error, self.clock())

    def at_work(self, now: float) -> list[RunState]:
        """The live runs, but for those that are paused."""
        return [run for run in self._runs.values() if not run.mirror.paused(now)]

    def drop_run(self, run: RunState) -> None:
        """Forget a run that is over, here and at its workers. Its data in the store is deleted later."""
        run.close()
        self._runs.pop(run.run_id, None)
        for session in self._sessions.values():
            session.forget(run.run_id)
        self.sweep([run.run_id])
        self.wakeups.decide()

    def sweep(self, run_ids: Iterable[str]) -> None:
        """Have the data of ended runs deleted. Skipped runs have not ended."""
        self._ended.update(run_id for run_id in run_ids if run_id not in self._skipped)
        self.wakeups.reap()

    def swept(self, run_id: str) -> None:
        """Note that the data of an ended run is deleted."""
        self._ended.discard(run_id)
        self._swept.append(run_id)

    def new_session(self, session_id: str, hello: AttachReport, now: float) -> WorkerSession:
        """A session that is not attached yet."""
        return self._make_session(session_id, hello, now)

    def episode_over(self, run: RunState, episode_id: str) -> None:
        """Note that an episode has no further turn, for the workers that have some of it cached, too."""
        for session_id in run.episodes.prefixes.get(episode_id, ()):
            if (session := self.sessions.get(session_id)) is not None:
                session.outbox.note_ended(episode_id)
        run.episodes.forget(episode_id)

    def attach(self, session: WorkerSession) -> None:
        self._sessions[session.session_id] = session
        self._index.add(session)
        self.wakeups.decide()

    def serving(self, run_id: str) -> Collection[WorkerSession]:
        """The sessions that are to serve the run."""
        return self._index.serving(run_id)

    def has_room(self, run_id: str) -> bool:
        """Whether a session that is to serve the run has a free slot."""
        return self._index.has_room(run_id)

    def longest_context(self, run_id: str, architecture: str) -> int:
        """Tokens of the longest context among the engines of an architecture that are to serve the run and stay. Others
        do not count: the run may never get them.
        """
        engines = (session.hello.engine for session in self.serving(run_id) if not session.draining)
        return max((one.max_model_len for one in engines if one.architecture == architecture), default=0)

    def detach(self, session: WorkerSession) -> None:
        """End a session. Its attempts are the caller's to orphan."""
        session.close()
        if self._sessions.pop(session.session_id, None) is not None:
            self._index.remove(session)
        self.wakeups.decide()

    def _make_run(self, run_id: str, spec: RunSpec) -> RunState:
        return RunState(run_id, spec, self.wakeups, self.clock)

    def _make_session(self, session_id: str, hello: AttachReport, now: float) -> WorkerSession:
        return WorkerSession(session_id, hello, now, self.wakeups, self._index)

    def note_changeover(self, worker_id: str, seconds: float) -> None:
        """Note how long a worker took to change to another run, without an engine restart."""
        self.changes.learn(worker_id, seconds)

    def begin_incarnation(self, name: str, durable_after_s: float) -> None:
        """Note the store's incarnation at the start."""
        self.incarnation = StoreIncarnation(name, durable_after_s)

    def replace_incarnation(self, name: str, durable_after_s: float, doubt_s: float) -> None:
        """Note that the store came back, and may know less: workers send again what was not durable."""
        former, self.incarnation = self.incarnation, StoreIncarnation(name, durable_after_s)
        former.over.set()
        self.doubt(doubt_s)
        for run in self._runs.values():
            run.mirror.doubt()
        self.sweep(self._swept)  # the store may have forgotten that
        self._swept.clear()
        self.send_again()  # answers begun before are not durable, and would not be confirmed

    def learn_durability(self, durable_after_s: float) -> bool:
        """Note how soon the store makes writes durable now. Whether it began or ceased to do so at once: then workers
        send again, because an append stream confirms durability in the way it was opened with.
        """
        was, self.incarnation.durable_after_s = self.incarnation.durable_after_s, durable_after_s
        if changed := bool(was) is not bool(durable_after_s):
            self.send_again()
        return changed

    def doubt(self, seconds: float) -> None:
        """Expect for so long that the store lacks what workers and leases send again, if it can forget anything."""
        if self.incarnation.durable_after_s:
            self.doubt_until = self.clock() + seconds

    def send_again(self) -> None:
        """Have all workers send again what is not durable."""
        for session in self._sessions.values():
            session.append_stream.send_again()

    def mark_stale(self) -> None:
        """Have all mirrors read again: calls lost with the former link may or may not have been done."""
        for run in self._runs.values():
            run.mirror.mark_stale()
        self.wakeups.decide()
