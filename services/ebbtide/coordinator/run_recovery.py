"""Reads runs back from the store, at the start and whenever the mirror may have missed something.

A store that came back is first told which attempts are live (`StoreIncarnations`). Attempts that run in the store, but
at no attached worker, wait `grace_s` for their worker and are then re-queued like any orphan.
"""

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Set
from contextlib import aclosing
from functools import lru_cache
from typing import Final

import msgspec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ebbtide import telemetry
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.attempt_records import draft_group, new_entry, place_of_group
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import OrphanedAttempt, RunningAttempt
from ebbtide.errors import Internal, LeaseSuperseded, NotFound, NotReady
from ebbtide.store.records import UNEXPECTED, AttemptStatus, OpenRollout, RolloutState
from ebbtide.store.store import Store
from ebbtide.types.fleet import EndCause, EndReason
from ebbtide.types.run import Run
from ebbtide.types.weights import KEY_BYTES
from ebbtide.weights.manifest import Signer

#: Workers and leases send again within seconds what the store forgot; slow ones get this long.
DOUBT_S: Final = 30.0
_AT_ONCE: Final = 512


class StoreIncarnations:
    """Reconciles runs with a store that came back and may know less.

    Invariant: `state.incarnation` is the one that the last link found, and a run is `reconciled` only if that
    incarnation was told of its live attempts. Workers keep a rollout's whole output until its finish is durable, and
    leases keep what was acknowledged; so what the store forgot is sent again, and must not be taken for old. An attempt
    whose rollout the store does not know stays unconfirmed for a while: the lease that submitted it submits it again.
    All of this is lost with the process; the next coordinator reads from the store whether its incarnation was
    reconciled.
    """

    def __init__(self, state: CoordinatorState, store: Store, *, lease_ttl_s: float) -> None:
        self._state, self._store, self._lease_ttl_s = state, store, lease_ttl_s
        self._reconciled = ""  # the incarnation that all runs are reconciled with, as the store knows
        self._asked = ""  # the incarnation whose condition is known

    async def begin(self) -> None:
        """Find out at the coordinator's start, with the store's condition known, whether the store came back since."""
        link = self._store.link
        self._state.begin_incarnation(link.incarnation, link.durable_after_s)
        self._asked, self._reconciled = link.incarnation, await self._store.runs.reconciled_incarnation()
        if self._reconciled and self._reconciled != link.incarnation:
            self._state.doubt(DOUBT_S)

    def link_opened(self) -> None:
        """Make all mirrors stale: calls lost with the former link may or may not have been done."""
        state, link = self._state, self._store.link
        if link.incarnation != state.incarnation.name:
            state.replace_incarnation(link.incarnation, link.durable_after_s, DOUBT_S)
            log.warning("the store came back", at=link.where, runs=len(state.runs))
        state.mark_stale()

    def promise_changed(self) -> None:
        """End the append streams if the store becomes durable at once, or no longer is: they confirm otherwise."""
        lasts_s = self._store.link.durable_after_s
        if self._state.learn_durability(lasts_s):
            log.warning("the store's durability changed", durable_after_s=lasts_s)

    async def reconcile(self, run: RunState) -> bool:
        """Tell the store of the live attempts. False if the run is over. Call with the run's lock held."""
        now = self._state.incarnation
        if self._asked != now.name:
            await self._store.link.durability.look()  # `promise_changed`
            self._asked = now.name
            self._state.doubt(DOUBT_S)
        if self._reconciled != now.name and not await self._store.runs.settle(run.run_id, self._lease_ttl_s):
            return False
        ended = run.unfinish(self._store.link.durability.former_before)
        held = [one for one in run.running.values() if one.session is not None and not one.leaving]
        for attempt, status in await self._adopt(run, held, newer=True):
            if status is AttemptStatus.OVER and attempt in ended:
                run.end(attempt.rollout.rollout_id)  # the store has its finish; its worker will ask
            if status is AttemptStatus.UNKNOWN:
                run.unconfirm(attempt, self._state.clock() + DOUBT_S, newer=True)
        log.info("run settled", run_id=run.run_id, attempts=len(held), forgotten=len(run.unconfirmed))
        return True

    async def note_reconciled(self) -> None:
        """Note in the store when all runs are reconciled, so that the next coordinator need not repeat it. While a
        run's data is broken, they are not.
        """
        name, runs = self._state.incarnation.name, self._state.runs.values()
        if self._reconciled != name and not self._state.skipped and all(run.mirror.reconciled.is_set() for run in runs):
            await self._store.runs.keep_incarnation(name)
            self._reconciled = name

    async def confirm(self, run: RunState) -> None:
        """Ask whether unconfirmed rollouts came again. Call with the run's lock held, before its rollouts are read."""
        for newer in (True, False):
            held = [u.attempt for u in run.unconfirmed.values() if u.newer is newer and u.attempt.session is not None]
            for attempt, status in await self._adopt(run, held, newer=newer):
                if status is AttemptStatus.OVER:
                    run.drop_unconfirmed(attempt)

    async def _adopt(
        self, run: RunState, held: list[RunningAttempt], *, newer: bool
    ) -> list[tuple[RunningAttempt, AttemptStatus]]:
        found: list[tuple[RunningAttempt, AttemptStatus]] = []
        for at in range(0, len(held), _AT_ONCE):
            page = [(one, one.session.worker_id) for one in held[at : at + _AT_ONCE] if one.session is not None]
            names = [(one.rollout.rollout_id, one.attempt_id, worker_id) for one, worker_id in page]
            adopted = await self._store.rollouts.adopt(run.run_id, names, newer=newer)
            for (one, _), answer in zip(page, adopted, strict=True):
                one.believe_stored(answer.stored)
                found.append((one, answer.status))
        return found

    def resume_confirmed(self, run: RunState) -> None:
        """Resume unconfirmed attempts that the store has as running again. Call when the rollouts were read."""
        for rollout_id in list(run.unconfirmed):
            run.confirm(rollout_id)

    def expire_unconfirmed(self, run: RunState) -> None:
        """End the unconfirmed attempts whose rollouts did not come again."""
        now = self._state.clock()
        for unconfirmed in list(run.unconfirmed.values()):
            if unconfirmed.due <= now or unconfirmed.attempt.session is None:
                run.drop_unconfirmed(unconfirmed.attempt)


log = telemetry.get_logger(__name__)
#: What reading one live run raises if its data is broken, or lost but for the fence.
_BROKEN: Final = (LeaseSuperseded, NotFound, NotReady, *UNEXPECTED)


class RunRecovery:
    """`over`: called for a live run of the mirror that has ended in the store."""

    def __init__(
        self,
        state: CoordinatorState,
        store: Store,
        incarnations: StoreIncarnations,
        over: Callable[[str], Awaitable[None]],
        *,
        grace_s: float,
    ) -> None:
        self._state, self._store, self._incarnations, self._over = state, store, incarnations, over
        self._grace_s = grace_s
        self._until = math.inf
        self._readings: dict[RunState, asyncio.Task[None]] = {}

    def serving(self) -> None:
        """Begin the grace: from now on workers can attach."""
        now = self._state.clock()
        self._state.returning.begin(now)
        before, self._until = self._until, now + self._grace_s
        for run in self._state.runs.values():
            for attempt in run.orphans.values():
                if attempt.orphaned is not None and attempt.orphaned.due == before:
                    attempt.set_due(self._until)

    async def take_over(self) -> None:
        """Take the store over, migrate its data, load every live run, and note ended ones for deletion."""
        taken = await self._store.runs.take_over()
        if steps := await self._store.schema.migrate():
            log.info("store migrated", schema=self._store.schema.newest, steps=steps)
        await self._incarnations.begin()
        for run_id, error in taken.broken.items():
            self._skip(run_id, error)
        for run_id in taken.live:
            await self._try(run_id)
        self._state.sweep(taken.ended)
        runs = self._state.runs.values()
        log.info(
            "took over",
            runs=len(runs),
            skipped=len(self._state.skipped),
            rollouts=sum(len(run.queue) + len(run.running) for run in runs),
        )

    async def _try(self, run_id: str) -> None:
        """Mirror a live run, or skip it for a while: the others are served."""
        try:
            await self.live(run_id)
        except _BROKEN as error:
            if (run := self._state.runs.get(run_id)) is not None:
                run.mirror.pause(error)
            else:
                self._skip(run_id, error)

    def _skip(self, run_id: str, error: Exception) -> None:
        self._store.runs.leave_alone(run_id)
        self._state.skip_run(run_id, error)

    async def try_skipped(self) -> None:
        """Mirror skipped runs whose pause is over and whose data was mended."""
        now = self._state.clock()
        for run_id in [name for name, pause in self._state.skipped.items() if not pause.lasts(now)]:
            await self._try(run_id)

    async def add(self, run: Run) -> RunState:
        """Mirror a live run."""
        found = self._state.add_run(run.run_id, run.spec)
        if run.counters.get("tokens_stored", 0):
            found.versions.note_tokens_stored()
        await self.refresh(found)
        return found

    async def live(self, run_id: str) -> RunState:
        """The live run. Raises `LeaseSuperseded` after its end, `NotFound` if there never was one."""
        if (run := self._state.runs.get(run_id)) is not None:
            return run
        record = await self._store.runs.read(run_id)
        if record.status.ended:
            raise LeaseSuperseded(f"run {run_id} has ended ({record.status.name.lower()}); step down")
        if run_id in self._state.skipped and not await self._store.runs.take_over_run(run_id):
            raise Internal(f"run {run_id} lost its fence in the store while it was broken; mend its keys")
        return await self.add(record)

    async def refresh(self, run: RunState) -> None:
        """Read a stale mirror again, after reconciling a store that came back. A caller that is cancelled does not stop
        it: others would begin anew.
        """
        self._incarnations.expire_unconfirmed(run)
        reading = self._reading(run)
        try:
            if reading is not None:
                await asyncio.shield(reading)
            if not run.mirror.stale or run.ended:
                return
            reading = self._reading(run) or self._begin_reading(run)
            await asyncio.shield(reading)
        finally:
            del reading  # it holds the error, which refers to this frame: together they would be a cycle

    def _reading(self, run: RunState) -> asyncio.Task[None] | None:
        """The task that reads the run; None if it has ended: what made the mirror stale since then was not read."""
        found = self._readings.get(run)
        return None if found is None or found.done() else found

    def _begin_reading(self, run: RunState) -> asyncio.Task[None]:
        reading = self._readings[run] = asyncio.create_task(self._reread(run), name=f"read {run.run_id}")
        reading.add_done_callback(lambda done: self._reading_ended(run, done))
        return reading

    def _reading_ended(self, run: RunState, done: asyncio.Task[None]) -> None:
        if self._readings.get(run) is done:
            del self._readings[run]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.debug("run not read", run_id=run.run_id, reason=str(error))  # who waits for it has the error

    async def close(self) -> None:
        """Stop reading."""
        readings = list(self._readings.values())
        for reading in readings:
            reading.cancel()
        await asyncio.gather(*readings, return_exceptions=True)

    async def _reread(self, run: RunState) -> None:
        async with run.mirror.lock:
            live = run.ended or await self._refresh(run)
        if not live:
            log.warning("run over or gone in the store", run_id=run.run_id)
            await self._over(run.run_id)
            return
        await self._incarnations.note_reconciled()

    async def _refresh(self, run: RunState) -> bool:
        incarnation = self._state.incarnation
        with run.mirror.rereading() as ended:
            known = run.mirror.reconciled.is_set()
            if not await (self._store.runs.lives(run.run_id) if known else self._incarnations.reconcile(run)):
                return False
            await self._incarnations.confirm(run)
            await self._read(run, ended)
        self._incarnations.resume_confirmed(run)
        if incarnation is self._state.incarnation:
            run.mirror.note_reconciled()
        return True

    async def _read(self, run: RunState, ended: Set[str]) -> None:
        known = await self._store.runs.versions(run.run_id)
        queue, running = run.new_queue(), dict[str, RunningAttempt]()
        async with aclosing(self._store.rollouts.open_rollouts(run.run_id)) as rows:
            async for row in rows:  # page by page: others have their turn
                group = place_of_group(run, row.request, row.place)
                if row.state is RolloutState.QUEUED:
                    waits = run.queue.get(row.request.rollout_id)  # patience is not begun anew
                    queue.add(stored_entry(row, group=group, now=waits.since if waits else self._state.clock()))
                else:
                    running[row.request.rollout_id] = self._attempt(row, run, group)
        # Nothing is awaited from here on: `ended` has what ended while rows were read.
        for rollout_id in ended:
            queue.remove(rollout_id)
            running.pop(rollout_id, None)
        for attempt in run.reread(known, queue, running):  # held by workers alone
            if attempt.session is not None:
                attempt.session.outbox.cancel([attempt.ref])
                attempt.unassign()

    def _attempt(self, row: OpenRollout, run: RunState, group: int) -> RunningAttempt:
        before = run.running.get(row.request.rollout_id)
        if before is not None and before.attempt_id == row.attempt_id:
            return before
        now = self._state.clock()
        due, reason = self._until, "its worker did not come back to the restarted coordinator"
        if not run.mirror.reconciled.is_set() and due < (later := now + self._grace_s):
            due, reason = later, "the store forgot how it continued, and its worker does not report it"
        return run.new_attempt(
            row.attempt_id,
            stored_entry(row, group=group, now=now),
            start=row.stored,
            max_tokens=row.request.sampling.max_tokens,
            given=now,  # not known; an earlier time would make its worker seem stalled
            orphaned=OrphanedAttempt(due, EndReason(EndCause.NOT_HELD, reason)),
            group_id=draft_group(run, row.request),
        )


#: Public keys remembered: each worker is told the run's key with every version.
_KEPT: Final = 1024


class PublisherKeys:
    """Derives the key that each run signs its weights with from one secret of the fleet. Call `keep` first.

    Invariant: a run's key depends only on the secret and the run's id. It survives restarts of the coordinator and of
    the store, and stays the same for a run that the store forgot and that is submitted again: relays and workers trust
    the first key that they saw. The store owns the secret; this copy is put back if the store lost it. It is lost with
    the process, and read again by the next. Only a run's trainer gets the run's seed, which reveals neither the secret
    nor other seeds; neither is logged.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._public = lru_cache(_KEPT)(lambda run_id: Signer(self._derive(run_id)).public)

    async def keep(self) -> None:
        """Take the store's secret, or give it this one. Raises `StoreUnavailable`."""
        found = await self._store.runs.secret(self._secret)
        if found != self._secret:
            self._secret = found
            self._public.cache_clear()

    async def seed(self, run_id: str) -> bytes:
        """The run's Ed25519 seed, final once a later write to the store is durable. Raises `StoreUnavailable`."""
        await self.keep()
        return self._derive(run_id)

    def public(self, run_id: str) -> bytes:
        """The public key that the run's manifests must be signed with."""
        return self._public(run_id)

    def _derive(self, run_id: str) -> bytes:
        """HKDF-Expand (RFC 5869, section 2.3): the secret is uniform, so the extract step is not needed."""
        return HKDFExpand(SHA256(), KEY_BYTES, b"ebbtide publisher " + run_id.encode()).derive(self._secret)


def stored_entry(row: OpenRollout, *, group: int, now: float) -> QueuedRollout:
    """The queue entry of a rollout that the store already has."""
    fresh = new_entry(row.request, place=row.place, group=group, length=row.prompt_len, now=now, step=row.step)
    budget = max(1, row.request.sampling.max_tokens - row.stored)
    length = row.prompt_len + row.stored
    return msgspec.structs.replace(
        fresh, length=length, avoid=row.avoid, no_progress=row.barren, made=row.stored, budget=budget
    )
