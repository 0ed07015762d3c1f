"""Models a live run: its queue, its attempts and its versions, mirrored from the store.

Invariant: only its own methods, and those of its attempts, change a run. They are called after the store changed, by
the holder of the run's lock; and, for one attempt, by the call that saw the store end it. Each wakes the dispatcher if
there may be something new to decide. A call with an unknown outcome makes the mirror `stale`; it is read again before
it is used to place. Lost with the process, and read back by `RunRecovery`.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, contextmanager
from typing import ClassVar, Final

from ebbtide import telemetry
from ebbtide.coordinator.rules.move_costs import MoveLedger
from ebbtide.coordinator.rules.rollout_queue import GroupPlaces, QueuedRollout, RolloutQueue
from ebbtide.coordinator.rules.turn_routing import CachedPrefixes, Prefixes
from ebbtide.coordinator.state.dispatch_wakeups import DispatchWakeups
from ebbtide.coordinator.state.run_tail import RunTail
from ebbtide.coordinator.state.running_attempt import (
    FinishedAttempt,
    OrphanedAttempt,
    RunningAttempt,
    UnconfirmedAttempt,
)
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import LeaseSuperseded, StoreUnavailable
from ebbtide.scheduling.elastic.ended_responses import EndedResponses
from ebbtide.store.rollout_rows import EndReason
from ebbtide.store.unexpected_data import UNEXPECTED, WritesRefused
from ebbtide.types.end_cause import EndCause
from ebbtide.types.run import RunShare, RunSpec
from ebbtide.types.weights import PolicyVersion

log = telemetry.get_logger(__name__)
#: Finishes per run that are remembered; the worker of an older one asks for it by itself.
_FINISHES: Final = 1 << 16
#: Episodes per run that may go on although their newest rollout was acknowledged: the newest ones are remembered.
_ACKNOWLEDGED: Final = 1 << 12
#: So many failed installs make an old version unavailable.
_INSTALL_FAILURES: Final = 3
#: Its decisions rest for so long once the store refused its writes: the first time, and at most.
_REFUSED_S, _LONGEST_REFUSED_S = 0.2, 5.0


#: A pause takes so long: the first time, and at most. A new fault within `_SOON_S` of the last pause doubles it.
_PAUSE_S, _LONGEST_PAUSE_S, _SOON_S = 1.0, 60.0, 10.0


class FaultPause:
    """Leaves one run alone for a while when the store gives an unexpected reply for it, and logs each such pause."""

    def __init__(self, run_id: str, first_s: float = _PAUSE_S, longest_s: float = _LONGEST_PAUSE_S) -> None:
        self._run_id, self._first_s, self._longest_s = run_id, first_s, longest_s
        self._pause_s, self._until = 0.0, -math.inf

    def lasts(self, now: float) -> bool:
        return now < self._until

    def begin(self, error: Exception, now: float) -> float:
        """Pause, unless a pause lasts already. Returns for how many seconds from now."""
        if not self.lasts(now):
            again = now < self._until + _SOON_S
            self._pause_s = min(self._longest_s, 2 * self._pause_s) if again else self._first_s
            self._until = now + self._pause_s
            log.error("run paused", run_id=self._run_id, seconds=self._pause_s, reason=str(error))
        return self._until - now


class RunState:
    """A live run."""

    #: What its attempts are made of.
    attempt_class: ClassVar[type[RunningAttempt]] = RunningAttempt

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        wakeups: DispatchWakeups,
        clock: Callable[[], float],
    ) -> None:
        self.run_id, self.spec, self.wakeups, self.clock = run_id, spec, wakeups, clock
        self.lock: Final = asyncio.Lock()
        self.stale = True  # until it is read
        self._doubts = 0  # how often it became stale
        self.ended = False
        self.queue: Final = self.new_queue()
        self._running: dict[str, RunningAttempt] = {}
        self._orphans: dict[str, RunningAttempt] = {}
        self.running: Final[Mapping[str, RunningAttempt]] = self._running
        self.orphans: Final[Mapping[str, RunningAttempt]] = self._orphans  # those of `running` without a worker
        #: The store's present incarnation knows all live attempts except the unconfirmed ones. Until then appends
        #: wait, so that no worker is told SUPERSEDED because the store forgot.
        self.reconciled: Final = asyncio.Event()
        #: Appends need not wait: the run is reconciled, or its data is broken and its attempts are over.
        self.answerable: Final = asyncio.Event()
        self._unconfirmed: dict[str, UnconfirmedAttempt] = {}
        #: By rollout. Their appends are answered as stored, with 0 tokens, and not sent to the store; the worker sends
        #: them again once the rollout is known (`WorkerSession.send_again`).
        self.unconfirmed: Final[Mapping[str, UnconfirmedAttempt]] = self._unconfirmed
        #: Finishes that the store may still forget, the newest ones.
        self._volatile_finishes: deque[FinishedAttempt] = deque(maxlen=_FINISHES)
        self._versions: dict[int, PolicyVersion] = {}
        self.versions: Final[Mapping[int, PolicyVersion]] = self._versions  # announced, and available
        self.newest = 0  # of these; 0: none
        self._prefixes = CachedPrefixes()
        self.prefixes: Final[Prefixes] = self._prefixes.by_episode  # by session
        self._responses = EndedResponses()
        #: Training's episodes whose newest response ended and that are not complete, by group place.
        self.responses: Final[Mapping[int, AbstractSet[str]]] = self._responses.by_group
        self._places = GroupPlaces()
        self._acknowledged: dict[str, None] = {}  # episodes, the newest at the end
        self._failed_installs: dict[int, int] = {}
        self._longest_context = 0  # tokens, of the engines that may serve it, so far
        self.moves: Final = MoveLedger()
        self.tail: Final = RunTail(run_id, spec)
        self.fitted = False  # some worker has installed a version
        self._misfits: Counter[str] = Counter()
        self.misfits: Final[Mapping[str, int]] = self._misfits  # refusals by architecture, until `fitted`
        self.architecture = ""  # of the weights, once known
        self.share = RunShare()
        self._made = 0  # tokens stored since the last share accounting
        self._resumes: list[float] = []
        self._asked_at = -math.inf
        self._ended_lately: set[str] | None = None  # rollouts that end while the mirror is being read again
        self._pause = FaultPause(run_id)
        self.refusals: Final = FaultPause(run_id, _REFUSED_S, _LONGEST_REFUSED_S)

    # What is asked of the store.

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Hold the lock for one store call; an unknown outcome makes the mirror stale."""
        async with self.lock:
            if self.ended:
                raise LeaseSuperseded(f"run {self.run_id} has ended; step down")
            try:
                yield
            except WritesRefused:
                raise  # nothing was done
            except (StoreUnavailable, asyncio.CancelledError):
                self.set_stale(True)  # read again in the next round
                raise
            except UNEXPECTED as error:
                self.pause(error)
                raise

    def set_stale(self, stale: bool) -> None:
        """Note whether the mirror may have missed something; nothing is placed by such a one."""
        self.stale = stale
        self._doubts += stale

    def mark_stale(self) -> None:
        """Have the mirror read again: the store said what it does not."""
        self.set_stale(True)
        self.wakeups.decide()

    def paused(self, now: float) -> bool:
        """Whether the dispatcher leaves the run alone for now."""
        return self._pause.lasts(now)

    def pause(self, error: Exception, now: float | None = None) -> float:
        """Leave the run alone for a while, then read it again: the store gave an unexpected reply. Returns seconds."""
        self.set_stale(True)
        self.answerable.set()
        return self._pause.begin(error, self.clock() if now is None else now)

    def new_queue(self) -> RolloutQueue:
        """An empty queue, to be filled for `reread`."""
        return RolloutQueue(self.spec.evaluation.priority, self.spec.requests.priority)

    @contextmanager
    def rereading(self) -> Iterator[AbstractSet[str]]:
        """Entered while the mirror is read again. Yields the rollouts that end meanwhile. It stays stale if the reading
        fails, or if it missed something that happened meanwhile.
        """
        ended: set[str] = set()
        doubts, self._ended_lately = self._doubts, ended
        if not self.reconciled.is_set():
            self.answerable.clear()
        try:
            yield ended
            if self._doubts == doubts:
                self.set_stale(False)
        except BaseException:
            if self.paused(self.clock()):
                self.answerable.set()
            raise
        finally:
            self._ended_lately = None

    def reread(
        self, versions: Mapping[int, PolicyVersion], queue: RolloutQueue, running: Mapping[str, RunningAttempt]
    ) -> list[RunningAttempt]:
        """Take over what the store has; `queue` is not to be used again. `running`: by rollout. Returns the attempts
        that it does not have.
        """
        kept = {v: one for v, one in versions.items() if v in self._versions or v not in self._failed_installs}
        self._versions.clear()
        self._versions.update(kept)
        self.newest = max(kept, default=0)
        lost = [one for name, one in self._running.items() if running.get(name) is not one]
        self._running.clear()
        self._running.update(running)
        self._orphans.clear()
        self._orphans.update((name, one) for name, one in self._running.items() if one.orphaned is not None)
        self.queue.replace(queue)
        self.tail.reread(self.queue, running.values())
        self.wakeups.decide()
        self.wakeups.reap()
        return lost

    # Its rollouts.

    @property
    def context(self) -> int:
        """Tokens of prompt and response at which its responses end, on whichever worker; 0: not known yet."""
        return self.spec.max_model_len or self._longest_context

    def note_context(self, tokens: int) -> None:
        """Note a context that engines offer it now. It never shrinks: else a response's length would be decided by who
        is attached.
        """
        self._longest_context = max(self._longest_context, tokens)

    @property
    def asked_at(self) -> float:
        """When an interactive rollout was queued last."""
        return self._asked_at

    def admit(self, one: QueuedRollout) -> None:
        """Queue a rollout."""
        self._responses.forget(one.episode_id)
        self.queue.add(one, self.tail.queued(one))
        if one.interactive:
            self._asked_at = max(self._asked_at, one.since)
        self.wakeups.decide()

    def take_queued(self, rollout_id: str) -> QueuedRollout | None:
        """Take a rollout that is being placed out of the queue; None if it is not queued."""
        return self.queue.take(rollout_id)

    def new_attempt(
        self,
        attempt_id: str,
        rollout: QueuedRollout,
        *,
        start: int,
        max_tokens: int,
        number: int = 0,
        given: float = 0.0,
        orphaned: OrphanedAttempt | None = None,
        group_id: str = "",
    ) -> RunningAttempt:
        """An attempt at one of its rollouts, which does not run yet. See the fields of `RunningAttempt`."""
        return self.attempt_class(
            run=self,
            attempt_id=attempt_id,
            rollout=rollout,
            start=start,
            max_tokens=max_tokens,
            number=number,
            given=given,
            orphaned=orphaned,
            group_id=group_id,
        )

    def start(self, attempt: RunningAttempt, session: WorkerSession) -> bool:
        """Give a rollout that the store placed to its worker. False if that has left: the rollout is an orphan."""
        self._running[attempt.rollout.rollout_id] = attempt
        self.tail.started(attempt, self.queue)
        episode_id, version = attempt.rollout.episode_id, session.version_of(self.run_id)
        self._acknowledged.pop(episode_id, None)
        tokens = attempt.rollout.length
        attempt.note_cached(self._prefixes.began(episode_id, session.session_id, version=version, tokens=tokens))
        if session.gone:
            left = EndReason(EndCause.NOT_HELD, "its worker left as the rollout was given to it")
            attempt.orphan(OrphanedAttempt(self.clock(), left))
            return False
        attempt.assign(session)
        return True

    def foresee(self, now: float, *, heard: bool = True) -> bool:
        """Make some forecasts of lengths anew, and order the queue by them if the run wants that. `heard`: some worker
        hears of them. Returns whether it is to be called again first: see `RunTail.renew`.
        """
        return self.tail.renew(self.queue, now, heard=heard)

    def put_back(self, attempt: RunningAttempt, queued: QueuedRollout | None) -> None:
        """Queue the rollout of an attempt that the store ended; None: the store had ended it before."""
        unseen = self._running.get(attempt.rollout.rollout_id) is attempt  # else it finished while the store was asked
        self._prefixes.left(attempt.rollout.episode_id, attempt.length)
        self._forget_attempt(attempt)
        if queued is not None:
            self.admit(queued)
        elif unseen:
            self.tail.over(attempt.rollout)
            self.mark_stale()

    def end(self, rollout_id: str, attempt_id: str = "") -> RunningAttempt | None:
        """Forget a rollout that the store ended (only if it runs as `attempt_id`, if given). Returns its attempt."""
        if self._ended_lately is not None:
            self._ended_lately.add(rollout_id)
        attempt = self._running.get(rollout_id)
        if attempt_id and (attempt is None or attempt.attempt_id != attempt_id):
            return None
        queued = self.queue.remove(rollout_id)
        if (over := attempt.rollout if attempt is not None else queued) is not None:
            self.tail.over(over)
        if attempt is not None:
            self._forget_attempt(attempt)
            attempt.unassign()
        return attempt

    def _forget_attempt(self, attempt: RunningAttempt) -> None:
        rollout_id = attempt.rollout.rollout_id
        if self._running.get(rollout_id) is attempt:
            del self._running[rollout_id]
            self._orphans.pop(rollout_id, None)

    def note_worker(self, attempt: RunningAttempt) -> None:
        """Note that an attempt got or lost its worker."""
        rollout_id = attempt.rollout.rollout_id
        if self._running.get(rollout_id) is not attempt:
            return  # unconfirmed: not re-queued
        if attempt.orphaned is None:
            self._orphans.pop(rollout_id, None)
        else:
            self._orphans[rollout_id] = attempt
            self.wakeups.reap()

    def finish(self, rollout_id: str, attempt_id: str, *, durable_before: float = math.inf) -> RunningAttempt | None:
        """Note that the store finished a rollout with this attempt. The store may still forget what was acknowledged
        since `durable_before`. None if known.
        """
        running = self._running.get(rollout_id)
        session = running.session if running else None
        if running is not None and running.attempt_id == attempt_id:
            self.tail.finished(running, context=self.context)  # before it is over
        attempt = self.end(rollout_id, attempt_id)
        if attempt is not None:
            self.moves.finished += 1
            if not (attempt.rollout.request or attempt.rollout.evaluation):
                self._responses.ended(attempt.rollout.episode_id, attempt.rollout.group)
            self._note_prefix(attempt, session)
            finishes = self._volatile_finishes
            while finishes and finishes[0].at < durable_before:
                finishes.popleft()
            if durable_before < math.inf and session is not None:
                finishes.append(FinishedAttempt(attempt, session, self.clock()))
        return attempt

    def _note_prefix(self, attempt: RunningAttempt, session: WorkerSession | None) -> None:
        """Note what the last worker of a finished rollout has of its episode. It may have come with the rollout."""
        episode_id = attempt.rollout.episode_id
        if session is None:
            return
        if session.session_id not in self.prefixes.get(episode_id, ()):
            version = session.version_of(self.run_id)
            self._prefixes.began(episode_id, session.session_id, version=version, tokens=attempt.length)
        self._prefixes.left(episode_id, attempt.length)

    def unfinish(self, durable_before: float) -> set[RunningAttempt]:
        """Treat attempts as running whose finish the store may have forgotten, and whose workers still have them.
        `durable_before`: finishes acknowledged before this time are not forgotten.
        """
        taken: set[RunningAttempt] = set()
        for attempt, session, at in self._volatile_finishes:
            if at >= durable_before and not session.gone and attempt.rollout.rollout_id not in self._running:
                attempt.assign(session)
                self._running[attempt.rollout.rollout_id] = attempt
                taken.add(attempt)
        self._volatile_finishes.clear()
        return taken

    def accept_tokens(self, attempts: Sequence[RunningAttempt | None], ends: Sequence[int]) -> None:
        """Note the tokens of one call that the store took, all as they were sent. `ends`: tokens of each rollout."""
        made = 0
        for attempt, end in zip(attempts, ends, strict=True):
            if attempt is not None:
                if end > attempt.stored:
                    made += end - attempt.stored
                attempt.stored = end
        self._made += made

    def siblings(self, one: QueuedRollout) -> set[str]:
        """The sessions that run samples of a rollout's group."""
        group = self.tail.forecasts.group(one.group)
        beside = (self._running.get(name) for name in group.running) if group is not None else ()
        return {attempt.session.session_id for attempt in beside if attempt is not None and attempt.session is not None}

    def take_made(self) -> int:
        """The tokens stored since the last call."""
        made, self._made = self._made, 0
        return made

    def note_resumed(self, seconds: float) -> None:
        """Note how long a rollout took from the queue to the first token of its next attempt."""
        self._resumes.append(seconds)

    def take_resumes(self) -> list[float]:
        """What was noted by `note_resumed` since the last call."""
        seen, self._resumes = self._resumes, []
        return seen

    def group_place(self, group_id: str, place: int) -> int:
        """The place of the group's first rollout: `place`, if this is the first."""
        return self._places.of(group_id, place)

    def acknowledged(self, episode_id: str) -> None:
        """Note that a finished rollout of the episode was acknowledged. Callers that acknowledge never say that an
        episode is over, so of too many the oldest one counts as over.
        """
        self._acknowledged.pop(episode_id, None)
        self._acknowledged[episode_id] = None
        if len(self._acknowledged) > _ACKNOWLEDGED:
            self.forget_episode(next(iter(self._acknowledged)))

    def forget_episode(self, episode_id: str) -> None:
        """Note that the episode has no further turn."""
        self._acknowledged.pop(episode_id, None)
        self._prefixes.forget(episode_id)
        group = self._responses.forget(episode_id)
        if group is not None and group not in self.responses and not self.tail.has_open(group):
            self._places.forget(group)

    # What a store that came back may have forgotten.

    def is_unconfirmed(self, rollout_id: str, attempt_id: str) -> bool:
        unconfirmed = self._unconfirmed.get(rollout_id)
        return unconfirmed is not None and unconfirmed.attempt.attempt_id == attempt_id

    def doubt(self) -> None:
        """Note that the store may know less than the mirror: appends wait until the run is reconciled."""
        self.reconciled.clear()
        if not self.paused(self.clock()):
            self.answerable.clear()

    def note_reconciled(self) -> None:
        self.reconciled.set()
        self.answerable.set()

    def unconfirm(self, attempt: RunningAttempt, due: float, *, newer: bool) -> None:
        """Let an attempt go on until `due`, though the store does not know its rollout. `newer`: see the record."""
        self._forget_attempt(attempt)
        self._unconfirmed[attempt.rollout.rollout_id] = UnconfirmedAttempt(attempt, due, newer)

    def confirm(self, rollout_id: str) -> None:
        """Resume an unconfirmed attempt if the store has it as running again."""
        held, attempt = self._unconfirmed[rollout_id].attempt, self._running.get(rollout_id)
        if attempt is not None and attempt.attempt_id == held.attempt_id and (session := held.session) is not None:
            del self._unconfirmed[rollout_id]
            held.unassign()
            attempt.assign(session)
            session.send_again()

    def drop_unconfirmed(self, attempt: RunningAttempt) -> None:
        """Stop the worker of an unconfirmed attempt. A repeat does nothing."""
        self._unconfirmed.pop(attempt.rollout.rollout_id, None)
        if (session := attempt.session) is not None:
            session.cancel([attempt.ref])
            attempt.unassign()

    # Its versions, and its share.

    def announce(self, version: PolicyVersion) -> None:
        self._versions[version.version] = version
        self.newest = max(self.newest, version.version)
        self.wakeups.decide()

    def note_installed(self, version: int, architecture: str) -> None:
        """Note that a worker with an engine of this architecture installed a version."""
        self._failed_installs.pop(version, None)
        self.fitted, self.architecture = True, architecture
        self._misfits.clear()

    def note_architecture(self, architecture: str) -> None:
        """Note what a worker that refused the weights says of them."""
        self.architecture = architecture

    def note_misfit(self) -> None:
        """Count a refusal by a worker of another architecture; it counts while no worker has installed a version."""
        if not self.fitted:
            self._misfits[self.architecture] += 1

    def note_failed_install(self, version: int) -> None:
        """Count a failed install. An old version that fails often is no longer available."""
        failures = self._failed_installs[version] = self._failed_installs.get(version, 0) + 1
        if failures >= _INSTALL_FAILURES and version < self.newest:
            self._versions.pop(version, None)

    def note_tokens_stored(self) -> None:
        """Note that it has tokens: some worker has installed a version."""
        self.fitted = True

    def note_share(self, share: RunShare) -> None:
        self.share = share

    def close(self) -> None:
        """Note that the run is over: appends that wait learn it."""
        self.ended = True
        self.note_reconciled()

    def clear(self) -> None:
        """Let go of the attempts of a run that is over. They refer to it, and would keep it in memory."""
        for attempts in (self._running, self._orphans, self._unconfirmed, self._volatile_finishes):
            attempts.clear()
        self.tail.clear()
