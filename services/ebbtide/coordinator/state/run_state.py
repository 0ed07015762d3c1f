"""Models a live run: its queue and its attempts, mirrored from the store. Its parts know its versions and its episodes.

Invariant: only its own methods, and those of its attempts and parts, change a run. They are called after the store
changed, by the holder of the run's lock; and, for one attempt, by the call that saw the store end it. Each wakes the
dispatcher if there may be something new to decide. A call with an unknown outcome makes the mirror `stale`; it is read
again before it is used to place. Lost with the process, and read back by `RunRecovery`.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

from ebbtide.coordinator.forecasts.length_forecasts import LengthForecasts
from ebbtide.coordinator.rules.move_costs import MoveLedger
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.coordinator.state.notifier import DispatchWakeups
from ebbtide.coordinator.state.run_episodes import RunEpisodes
from ebbtide.coordinator.state.run_mirror import RunMirror
from ebbtide.coordinator.state.run_versions import RunVersions
from ebbtide.coordinator.state.running_attempt import (
    FinishedAttempt,
    OrphanedAttempt,
    RunningAttempt,
    UnconfirmedAttempt,
)
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.fleet import EndCause, EndReason
from ebbtide.types.run import RunShare, RunSpec
from ebbtide.types.weights import PolicyVersion

#: Finishes per run that are remembered; the worker of an older one asks for it by itself.
_FINISHES: Final = 1 << 16


class RunState:
    """A live run."""

    #: What its attempts and its parts are made of.
    attempt_class: ClassVar[type[RunningAttempt]] = RunningAttempt
    mirror_class: ClassVar[type[RunMirror]] = RunMirror
    versions_class: ClassVar[type[RunVersions]] = RunVersions
    episodes_class: ClassVar[type[RunEpisodes]] = RunEpisodes

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        wakeups: DispatchWakeups,
        clock: Callable[[], float],
    ) -> None:
        self.run_id, self.spec, self.wakeups, self.clock = run_id, spec, wakeups, clock
        self.mirror: Final = self.mirror_class(run_id, wakeups, clock)
        self.ended = False
        self.queue: Final = self.new_queue()
        self._running: dict[str, RunningAttempt] = {}
        self._orphans: dict[str, RunningAttempt] = {}
        self.running: Final[Mapping[str, RunningAttempt]] = self._running
        self.orphans: Final[Mapping[str, RunningAttempt]] = self._orphans  # those of `running` without a worker
        self._unconfirmed: dict[str, UnconfirmedAttempt] = {}
        #: By rollout. Their appends are answered as stored, with 0 tokens, and not sent to the store; the worker sends
        #: them again once the rollout is known (`SessionAppends.send_again`).
        self.unconfirmed: Final[Mapping[str, UnconfirmedAttempt]] = self._unconfirmed
        #: Finishes that the store may still forget, the newest ones.
        self._volatile_finishes: deque[FinishedAttempt] = deque(maxlen=_FINISHES)
        self.versions: Final = self.versions_class(run_id, wakeups)
        self._longest_context = 0  # tokens, of the engines that may serve it, so far
        self.moves: Final = MoveLedger()
        self.lengths: Final = LengthForecasts(run_id, spec)
        self.episodes: Final = self.episodes_class(run_id, self.lengths)
        self.share = RunShare()
        self._made = 0  # tokens stored since the last share accounting
        self._resumes: list[float] = []
        self._asked_at = -math.inf

    # What is asked of the store.

    def new_queue(self) -> RolloutQueue:
        """An empty queue, to be filled for `reread`."""
        return RolloutQueue(self.spec.evaluation.priority, self.spec.requests.priority)

    def reread(
        self, versions: Mapping[int, PolicyVersion], queue: RolloutQueue, running: Mapping[str, RunningAttempt]
    ) -> list[RunningAttempt]:
        """Take over what the store has; `queue` is not to be used again. `running`: by rollout. Returns the attempts
        that it does not have.
        """
        self.versions.reread(versions)
        lost = [one for name, one in self._running.items() if running.get(name) is not one]
        self._running.clear()
        self._running.update(running)
        self._orphans.clear()
        self._orphans.update((name, one) for name, one in self._running.items() if one.orphaned is not None)
        self.queue.replace(queue)
        self.lengths.reread(self.queue, running.values())
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
        self.episodes.queued(one)
        self.queue.add(one, self.lengths.queued(one))
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
        self.lengths.started(attempt, self.queue)
        attempt.note_cached(self.episodes.started(attempt.rollout, session))
        if session.gone:
            left = EndReason(EndCause.NOT_HELD, "its worker left as the rollout was given to it")
            attempt.orphan(OrphanedAttempt(self.clock(), left))
            return False
        attempt.assign(session)
        return True

    def foresee(self, now: float, *, heard: bool = True) -> bool:
        """Make some forecasts of lengths anew, and order the queue by them if the run wants that. `heard`: some worker
        hears of them. Returns whether it is to be called again first: see `LengthForecasts.renew`.
        """
        return self.lengths.renew(self.queue, now, heard=heard)

    def put_back(self, attempt: RunningAttempt, queued: QueuedRollout | None) -> None:
        """Queue the rollout of an attempt that the store ended; None: the store had ended it before."""
        unseen = self._running.get(attempt.rollout.rollout_id) is attempt  # else it finished while the store was asked
        self.episodes.put_back(attempt)
        self._forget_attempt(attempt)
        if queued is not None:
            self.admit(queued)
        elif unseen:
            self.lengths.over(attempt.rollout)
            self.mirror.mark_stale()

    def end(self, rollout_id: str, attempt_id: str = "") -> RunningAttempt | None:
        """Forget a rollout that the store ended (only if it runs as `attempt_id`, if given). Returns its attempt."""
        self.mirror.note_ended(rollout_id)
        attempt = self._running.get(rollout_id)
        if attempt_id and (attempt is None or attempt.attempt_id != attempt_id):
            return None
        queued = self.queue.remove(rollout_id)
        if (over := attempt.rollout if attempt is not None else queued) is not None:
            self.lengths.over(over)
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
            self.lengths.finished(running, context=self.context)  # before it is over
        attempt = self.end(rollout_id, attempt_id)
        if attempt is not None:
            self.moves.finished += 1
            self.episodes.finished(attempt, session)
            finishes = self._volatile_finishes
            while finishes and finishes[0].at < durable_before:
                finishes.popleft()
            if durable_before < math.inf and session is not None:
                finishes.append(FinishedAttempt(attempt, session, self.clock()))
        return attempt

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
        group = self.lengths.forecasts.group(one.group)
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

    # What a store that came back may have forgotten.

    def is_unconfirmed(self, rollout_id: str, attempt_id: str) -> bool:
        unconfirmed = self._unconfirmed.get(rollout_id)
        return unconfirmed is not None and unconfirmed.attempt.attempt_id == attempt_id

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
            session.append_stream.send_again()

    def drop_unconfirmed(self, attempt: RunningAttempt) -> None:
        """Stop the worker of an unconfirmed attempt. A repeat does nothing."""
        self._unconfirmed.pop(attempt.rollout.rollout_id, None)
        if (session := attempt.session) is not None:
            session.outbox.cancel([attempt.ref])
            attempt.unassign()

    # Its share, and its end.

    def note_share(self, share: RunShare) -> None:
        self.share = share

    def close(self) -> None:
        """Note that the run is over: appends that wait learn it."""
        self.ended = True
        self.mirror.note_reconciled()

    def clear(self) -> None:
        """Let go of the attempts of a run that is over. They refer to it, and would keep it in memory."""
        for attempts in (self._running, self._orphans, self._unconfirmed, self._volatile_finishes):
            attempts.clear()
        self.lengths.clear()
