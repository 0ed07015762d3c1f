"""Starts, re-queues and ends attempts, in the store and in the mirror.

Invariant: the store changes first, and the mirror follows under the run's lock. So a process that dies halfway leaves
in the store what had been done, and the next one reads it.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import chain
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.rules.placement import Placement, dead_letter_message
from ebbtide.coordinator.state.attempt_records import draft_group, due_orphans, queued_again, started
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_messages import Assignment
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import LeaseSuperseded, NotFound, StoreUnavailable
from ebbtide.rpc.run_endings import EndedRun
from ebbtide.store.records import UNEXPECTED, EndedAttempt, PlacedRollout, RequeuedRollout, WritesRefused
from ebbtide.store.runs import EndedHistory
from ebbtide.store.store import Store
from ebbtide.types.fleet import AttemptRef, EndReason
from ebbtide.types.ids import new_fence
from ebbtide.types.run import LeaseRef, RunStatus
from ebbtide.types.tokens import token_count

log = telemetry.get_logger(__name__)
T = TypeVar("T")
#: Rollouts that one script ends or queues again: others wait for it, here and in the store.
_AT_ONCE: Final = 128
#: An orphan whose run's writes the store refuses is looked at again after so long.
_REFUSED_S: Final = 0.2


class ClientWrites:
    """Carries out the writes of clients' calls, also when the client leaves in the middle.

    A call that is cancelled may have reached the store. If its write were cut off there, the mirror would miss it, and
    the whole run would have to be read again. So a write that has begun goes on to its end, and the mirror follows.

    Invariant: a write begins when it has its lock, which one write has at a time. A client that leaves while it waits
    for the lock leaves nothing behind. So there are no more writes without a client than there are locks. Writes that
    are under way when the process dies may or may not be done.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._locks = WeakValueDictionary[tuple[str, str], asyncio.Lock]()  # each as long as somebody uses it

    @property
    def under_way(self) -> int:
        """Writes that have not ended; most of them wait for their lock."""
        return len(self._tasks)

    async def carry_out(self, lock: AbstractAsyncContextManager[None], write: Callable[[], Awaitable[T]]) -> T:
        """Enter `lock`, then do `write`. From then on it goes on to its end, even if the caller is cancelled."""
        begun = False

        async def whole() -> T:
            nonlocal begun
            async with lock:
                begun = True
                return await write()

        task = asyncio.create_task(whole(), name="client write")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not begun:
                task.cancel()
            raise
        finally:
            del task  # it holds the error, which refers to this frame: together they would be a cycle

    def lock(self, kind: str, name: str) -> asyncio.Lock:
        """The lock of writes that need none of the state: one at a time of each kind and name."""
        return self._locks.setdefault((kind, name), asyncio.Lock())

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("write failed", reason=str(error))  # its caller has the error, unless it left

    async def settle(self, longest_s: float) -> None:
        """Wait for the writes that are under way, `longest_s` at most. Call when no client can begin another."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=longest_s)

    async def close(self) -> None:
        """Cut off what is still under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def changing(run: RunState) -> AsyncIterator[None]:
    """Hold a run's lock for one store call; an unknown outcome makes the mirror stale."""
    async with run.mirror.lock:
        if run.ended:
            raise LeaseSuperseded(f"run {run.run_id} has ended; step down")
        try:
            yield
        except WritesRefused:
            raise  # nothing was done
        except (StoreUnavailable, asyncio.CancelledError):
            run.mirror.set_stale(True)  # read again in the next round
            raise
        except UNEXPECTED as error:
            run.mirror.pause(error)
            raise


class AttemptTransitions:
    """`no_progress_limit`: `max_stalled_attempts` of the settings; `keep_ended_s`, `keep_ended_bytes`: see there."""

    def __init__(
        self,
        state: CoordinatorState,
        store: Store,
        notifier: Notifier,
        writes: ClientWrites,
        *,
        no_progress_limit: int,
        keep_ended_s: float,
        keep_ended_bytes: int,
    ) -> None:
        self._state, self._store, self._notifier, self._writes = state, store, notifier, writes
        self._no_progress_limit, self._keep_ended_s = no_progress_limit, keep_ended_s
        self._histories = EndedHistories(store, most_bytes=keep_ended_bytes, keep_s=keep_ended_s)

    async def start(
        self, run: RunState, placements: Sequence[Placement], sessions: Mapping[str, WorkerSession]
    ) -> None:
        """Assign queued rollouts to workers; those for which the store's answer has no room stay queued. Call with the
        run's lock held.
        """
        chosen = [(one.rollout_id, new_fence(), sessions[one.session_id]) for one in placements]
        if not run.context:  # `UnservedWork` notes longer ones that come later, and warns of them
            for architecture in {session.hello.engine.architecture for _, _, session in chosen}:
                run.note_context(self._state.longest_context(run.run_id, architecture))
        rows = [(rollout_id, attempt_id, session.worker_id) for rollout_id, attempt_id, session in chosen]
        placed = await self._store.rollouts.place(run.run_id, rows)
        batches: dict[WorkerSession, list[Assignment]] = defaultdict(list)
        now = self._state.clock()
        for (rollout_id, attempt_id, session), given in zip(chosen, placed, strict=False):
            queued = run.take_queued(rollout_id)
            if queued is None:
                continue
            if given is None:
                run.mirror.mark_stale()  # the store no longer has it as queued
                continue
            attempt = started(
                run,
                queued,
                attempt_id,
                stored=token_count(given.partial),
                number=given.attempts,
                max_tokens=given.request.sampling.max_tokens,
                now=now,
                group_id=draft_group(run, given.request),
            )
            _record(attempt, given, session, now)
            if run.start(attempt, session):
                batches[session].append(_assignment(attempt, given, run))
        for session, assignments in batches.items():
            session.outbox.assign(assignments)
        if any(given is not None and given.attempts > 1 for given in placed):  # the store tells of these alone
            self._notifier.notify("events", run.run_id)

    async def requeue_due(self, now: float) -> float:
        """Put orphans that are due back into the queue. Returns when the next one is due; inf: none is."""
        next_due = math.inf
        for run in self._state.at_work(now):
            if run.mirror.stale:  # who reads it has its lock for long, and wakes this loop at the end
                continue
            if self.refused(run, now):
                next_due = min(next_due, now + _REFUSED_S)
                continue
            more_s = max(self._state.overload.late_s(now), self._state.returning.more_s(now))
            due, later = due_orphans(run, now, more_s)
            next_due = min(next_due, later)
            async with self.while_it_lives(run):
                for orphaned, attempts in due.items():
                    why = orphaned.why
                    for page in _pages(attempts):
                        await self._requeue(run, page, why)
                        why = msgspec.structs.replace(why, noticed_s=None)  # one loss is counted once
        return next_due

    async def _requeue(self, run: RunState, attempts: Sequence[RunningAttempt], why: EndReason) -> None:
        async with changing(run):
            attempts = [one for one in attempts if run.running.get(one.rollout.rollout_id) is one]  # others have ended
            if not attempts:
                return
            lost = [EndedAttempt(one.rollout.rollout_id, one.attempt_id, one.lost) for one in attempts]
            found = await self._store.rollouts.requeue(run.run_id, lost, why)
            rows = [(one, row) for one, row in zip(attempts, found, strict=True) if self._put_back(run, one, row)]
            for attempt, row in rows:
                log.info(
                    "requeued",
                    run_id=run.run_id,
                    rollout_id=attempt.rollout.rollout_id,
                    offset=row.stored if row else 0,
                    cause=why.cause.name,
                    reason=why.text,
                )
            if rows:
                metrics.count_requeued(why, len(rows), sum(attempt.lost for attempt, _ in rows))
            letters = [
                (attempt.rollout.rollout_id, message)
                for attempt, row in rows
                if row and (message := dead_letter_message(row.barren, row.evidence, limit=self._no_progress_limit))
            ]
            await self._write_dead_letters(run, letters)

    def _put_back(self, run: RunState, attempt: RunningAttempt, row: RequeuedRollout | None) -> bool:
        """Queue the rollout of an attempt for which the store answered `row`; False if the attempt had finished."""
        if row is None:
            run.put_back(attempt, None)
            return False
        now = self._state.clock()
        queued = queued_again(attempt, stored=row.stored, avoid=row.avoid, no_progress=row.barren, now=now)
        run.put_back(attempt, queued)
        return True

    async def dead_letter(self, run: RunState, letters: Sequence[tuple[str, str]]) -> None:
        """Turn rollouts into dead letters that are still queued, as (rollout, evidence); a few at a time."""
        for page in _pages(letters):
            async with changing(run):
                await self._write_dead_letters(run, [letter for letter in page if letter[0] in run.queue])

    async def _write_dead_letters(self, run: RunState, letters: Sequence[tuple[str, str]]) -> None:
        """Turn queued rollouts into dead letters. Call with the run's lock held."""
        if not letters:
            return
        ended = await self._store.rollouts.dead_letter(run.run_id, letters)
        metrics.dead_letters.inc(ended)
        for rollout_id, message in letters:
            log.warning("dead letter", run_id=run.run_id, rollout_id=rollout_id, evidence=message)
            run.end(rollout_id)
            self._notifier.notify("tokens", run.run_id, rollout_id)
        self._notifier.notify("finished", run.run_id)
        self._notifier.notify("events", run.run_id)

    def over(self, run: RunState, ended: Iterable[tuple[str, str]]) -> None:
        """Stop the workers of running rollouts (rollout, attempt) that the store ended."""
        for rollout_id, attempt_id in ended:
            attempt = run.running.get(rollout_id)
            session = attempt.session if attempt and attempt.attempt_id == attempt_id else None
            run.end(rollout_id)
            if session is not None:
                session.outbox.cancel([AttemptRef(run.run_id, rollout_id, attempt_id)])

    async def end_run(
        self, run_id: str, status: RunStatus, message: str, *, drop: str, lease: LeaseRef | None = None
    ) -> None:
        """End a run and all its attempts, even if the caller is cancelled meanwhile: the store may have ended it by
        then, and everything that the run uses must be freed. Raises `NotReady`: see `Runs.end`.
        """
        lock = self._writes.lock("end", run_id)
        await self._writes.carry_out(lock, lambda: self._end_run(run_id, status, message, drop, lease))

    async def _end_run(self, run_id: str, status: RunStatus, message: str, drop: str, lease: LeaseRef | None) -> None:
        try:
            await self._store.runs.end(run_id, status, message, drop=drop, lease=lease, keep_s=self._keep_ended_s)
        except WritesRefused:
            raise
        except StoreUnavailable:
            if (run := self._state.runs.get(run_id)) is not None:  # it may have ended all the same: read it again
                run.mirror.mark_stale()
            raise
        log.info("run ended", run_id=run_id, status=status.name, reason=message)
        await self.run_over(run_id, status)

    @asynccontextmanager
    async def while_it_lives(self, run: RunState) -> AsyncIterator[None]:
        """Keep a run's end or fault from the other runs. A run that the store has ended or lost leaves the mirror; one
        for which the store gives an unexpected reply pauses; one whose writes it refuses for now has a rest.
        """
        try:
            yield
        except (LeaseSuperseded, NotFound) as error:
            log.info("run is over", run_id=run.run_id, reason=str(error))
            await self.run_over(run.run_id)
        except WritesRefused as error:
            run.mirror.refusals.begin(error, self._state.clock())
        except UNEXPECTED as error:
            run.mirror.pause(error)

    def refused(self, run: RunState, now: float) -> bool:
        """Whether the store refused writes of the run lately, so that none is tried again yet."""
        return run.mirror.refusals.lasts(now)

    async def run_over(self, run_id: str, status: RunStatus | None = None) -> None:
        """Drop a run that the store ended (or, without a `status`, may have lost). A repeat does nothing."""
        if (run := self._state.runs.get(run_id)) is not None:
            async with run.mirror.lock:
                self._drop_run(run)
            with suppress(NotFound, StoreUnavailable, *UNEXPECTED):
                status = status or (await self._store.runs.read(run_id)).status
            if status is not None and status.ended:  # of a lost run, others keep their data
                self._state.endings.tell(EndedRun(run_id, status))

    def _drop_run(self, run: RunState) -> None:
        self._state.drop_run(run)
        for topic in ("events", "finished", "trajectories"):
            self._notifier.notify(topic, run.run_id)
        self._notifier.notify_all("tokens", run.run_id, chain(run.running, (one.rollout_id for one in run.queue)))
        run.clear()

    async def tally(self) -> None:
        """Count the resume times seen since the last call; those that cannot be counted now are dropped."""
        for run, seen in [(run, run.take_resumes()) for run in self._state.runs.values()]:
            for seconds in seen:
                metrics.resume_seconds.observe(seconds)
            if seen and not run.ended:
                async with self.while_it_lives(run):
                    await self._store.rollouts.tally(run.run_id, [("resume", seconds) for seconds in seen])

    async def sweep_ended(self) -> None:
        """Delete the data of ended runs, and the histories of the oldest beyond what all may keep."""
        if not self._state.ended:
            return
        for run_id in list(self._state.ended):
            try:
                while await self._store.runs.sweep(run_id):
                    pass
                await self._histories.add(run_id)
            except UNEXPECTED as error:  # the next coordinator tries again
                log.error("ended run not deleted", run_id=run_id, reason=str(error))  # noqa: TRY400 - the reason says all
            self._state.swept(run_id)
        await self._histories.bound()


def _pages(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[at : at + _AT_ONCE] for at in range(0, len(items), _AT_ONCE))


def _record(attempt: RunningAttempt, given: PlacedRollout, session: WorkerSession, now: float) -> None:
    metrics.attempts.inc()
    metrics.placement_seconds.observe(now - attempt.rollout.since)
    if attempt.rollout.interactive:
        metrics.interactive_placement_seconds.observe(now - attempt.rollout.since)
    if given.attempts > 1:
        if given.partial:
            metrics.resumptions.inc()
            metrics.tokens_resumed.inc(token_count(given.partial))
        log.info(
            "resumed",
            run_id=attempt.run_id,
            rollout_id=attempt.rollout.rollout_id,
            worker_id=session.worker_id,
            offset=token_count(given.partial),
            attempt=given.attempts,
        )


def _assignment(attempt: RunningAttempt, given: PlacedRollout, run: RunState) -> Assignment:
    request = given.request
    expected = attempt.foresee()
    return Assignment(
        attempt=attempt.ref,
        policy=run.spec.policy,
        prompt_ids=request.prompt_ids,
        partial=given.partial,
        sampling=request.sampling,
        min_version=request.min_version,
        max_version=request.max_version,
        priority=request.priority,
        interactive=request.interactive,
        prompt_logprobs=request.prompt_logprobs,
        episode_id=request.episode_id,
        group_id=attempt.group_id,
        expected_tokens=expected.expected_tokens,
        longest_tokens=expected.longest_tokens,
        max_model_len=run.context,
    )


class EndedHistories:
    """Bounds what ended runs keep of their past: beyond a number of bytes, those that ended first lose events and
    timeline.

    Invariant: `_kept` has the ended runs that were swept by this coordinator. A new one sweeps all of them again, and
    so learns them again. Records stay until they expire.
    """

    def __init__(self, store: Store, *, most_bytes: int, keep_s: float) -> None:
        """`most_bytes`: of all ended runs together; `keep_s`: seconds after which a record expires by itself."""
        self._store: Final = store
        self._most, self._keep_s = most_bytes, keep_s
        self._kept: dict[str, EndedHistory] = {}

    async def add(self, run_id: str) -> None:
        """Take in a run that has ended. Raises `StoreUnavailable`."""
        if (history := await self._store.runs.ended_history(run_id)) is not None:
            self._kept[run_id] = history

    async def bound(self) -> None:
        """Delete the oldest histories until the others fit. Raises `StoreUnavailable`."""
        expired = time.time() - self._keep_s
        self._kept = {run_id: one for run_id, one in self._kept.items() if one.ended > expired and one.size}
        total = sum(one.size for one in self._kept.values())
        for one in sorted(self._kept.values(), key=lambda one: one.ended):
            if total <= self._most:
                return
            del self._kept[one.run_id]
            total -= one.size
            try:
                await self._store.runs.drop_history(one.run_id)
            except UNEXPECTED as error:  # the next coordinator tries again
                log.error("history of an ended run not deleted", run_id=one.run_id, reason=str(error))  # noqa: TRY400 - the reason says all
            except StoreUnavailable:
                self._kept[one.run_id] = one
                raise
            else:
                log.info("history of an ended run deleted", run_id=one.run_id, bytes=one.size)
