"""Reconciles runs with a store that came back and may know less.

Invariant: `state.incarnation` is the one that the last link found, and a run is `reconciled` only if that incarnation
was told of its live attempts. Workers keep a rollout's whole output until its finish is durable, and leases keep what
was acknowledged; so what the store forgot is sent again, and must not be taken for old. An attempt whose rollout the
store does not know stays unconfirmed for a while: the lease that submitted it submits it again. All of this is lost
with the process; the next coordinator reads from the store whether its incarnation was reconciled.
"""

import time
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator.state.coordinator_state import (
    CoordinatorState,
    RunningAttempt,
    RunState,
    StoreIncarnation,
    UnconfirmedAttempt,
)
from ebbtide.store.rollout_rows import AttemptFate
from ebbtide.store.store import Store

log = telemetry.get_logger(__name__)
#: Workers and leases send again within seconds what the store forgot; slow ones get this long.
DOUBT_S: Final = 30.0
_AT_ONCE: Final = 512


class StoreIncarnations:
    def __init__(self, state: CoordinatorState, store: Store, *, lease_ttl_s: float) -> None:
        self._state, self._store, self._lease_ttl_s = state, store, lease_ttl_s
        self._reconciled = ""  # the incarnation that all runs are reconciled with, as the store knows
        self._asked = ""  # the incarnation whose condition is known

    async def begin(self) -> None:
        """Find out at the coordinator's start, with the store's condition known, whether the store came back since."""
        link = self._store.link
        self._state.incarnation = StoreIncarnation(link.incarnation, link.durable_after_s)
        self._asked, self._reconciled = link.incarnation, await self._store.runs.reconciled_incarnation()
        if self._reconciled and self._reconciled != link.incarnation:
            self._doubt()

    def _doubt(self) -> None:
        if self._state.incarnation.durable_after_s:
            self._state.doubt_until = time.monotonic() + DOUBT_S

    def link_opened(self) -> None:
        """Make all mirrors stale: calls lost with the former link may or may not have been done."""
        state, link = self._state, self._store.link
        if link.incarnation != state.incarnation.name:
            former, state.incarnation = state.incarnation, StoreIncarnation(link.incarnation, link.durable_after_s)
            former.over.set()
            self._doubt()
            for run in state.runs.values():
                run.reconciled.clear()
            for session in state.sessions.values():  # answers begun before are not durable, and would not be confirmed
                session.resend.set()
            log.warning("the store came back", at=link.where, runs=len(state.runs))
        for run in state.runs.values():
            run.stale = True
        state.wake.set()

    def promise_changed(self) -> None:
        """End the append streams if the store becomes durable at once, or no longer is: they confirm otherwise."""
        now, lasts_s = self._state.incarnation, self._store.link.durable_after_s
        was, now.durable_after_s = now.durable_after_s, lasts_s
        if bool(was) is not bool(lasts_s):
            log.warning("the store's durability changed", durable_after_s=lasts_s)
            for session in self._state.sessions.values():
                session.resend.set()

    async def reconcile(self, run: RunState) -> bool:
        """Tell the store of the live attempts. False if the run is over. Call with the run's lock held."""
        now = self._state.incarnation
        if self._asked != now.name:
            await self._store.link.durability.look()  # `promise_changed`
            self._asked = now.name
            self._doubt()
        if self._reconciled != now.name and not await self._store.runs.settle(run.run_id, self._lease_ttl_s):
            return False
        ended = self._unfinish(run)
        held = [one for one in run.running.values() if one.session is not None and not one.leaving]
        for attempt, fate in await self._adopt(run, held, newer=True):
            if fate is AttemptFate.OVER and attempt in ended:
                attempt.unassign()  # the store has its finish; its worker will ask
                del run.running[attempt.rollout.rollout_id]
            if fate is AttemptFate.UNKNOWN:
                del run.running[attempt.rollout.rollout_id]
                run.unconfirmed[attempt.rollout.rollout_id] = UnconfirmedAttempt(
                    attempt, time.monotonic() + DOUBT_S, newer=True
                )
        log.info("run settled", run_id=run.run_id, attempts=len(held), forgotten=len(run.unconfirmed))
        return True

    def _unfinish(self, run: RunState) -> set[RunningAttempt]:
        """Treat attempts as running whose finish may be forgotten and whose workers still have them."""
        taken: set[RunningAttempt] = set()
        durable_before = self._store.link.durability.former_before
        for attempt, session, at in run.volatile_finishes:
            if at >= durable_before and not session.gone and attempt.rollout.rollout_id not in run.running:
                attempt.assign(session)
                run.running[attempt.rollout.rollout_id] = attempt
                taken.add(attempt)
        run.volatile_finishes.clear()
        return taken

    async def note_reconciled(self) -> None:
        """Note in the store when all runs are reconciled, so that the next coordinator need not repeat it."""
        name = self._state.incarnation.name
        if self._reconciled != name and all(run.reconciled.is_set() for run in self._state.runs.values()):
            await self._store.runs.keep_incarnation(name)
            self._reconciled = name

    async def confirm(self, run: RunState) -> None:
        """Ask whether unconfirmed rollouts came again. Call with the run's lock held, before its rollouts are read."""
        for newer in (True, False):
            held = [u.attempt for u in run.unconfirmed.values() if u.newer is newer and u.attempt.session is not None]
            for attempt, fate in await self._adopt(run, held, newer=newer):
                if fate is AttemptFate.OVER:
                    self._drop(run, attempt)

    async def _adopt(
        self, run: RunState, held: list[RunningAttempt], *, newer: bool
    ) -> list[tuple[RunningAttempt, AttemptFate]]:
        found: list[tuple[RunningAttempt, AttemptFate]] = []
        for at in range(0, len(held), _AT_ONCE):
            page = [(one, one.session.worker_id) for one in held[at : at + _AT_ONCE] if one.session is not None]
            names = [(one.rollout.rollout_id, one.attempt_id, worker_id) for one, worker_id in page]
            adopted = await self._store.rollouts.adopt(run.run_id, names, newer=newer)
            for (one, _), answer in zip(page, adopted, strict=True):
                one.stored = answer.stored
                found.append((one, answer.fate))
        return found

    def resume_confirmed(self, run: RunState) -> None:
        """Resume unconfirmed attempts that the store has as running again. Call when the rollouts were read."""
        for rollout_id, unconfirmed in list(run.unconfirmed.items()):
            attempt, session = run.running.get(rollout_id), unconfirmed.attempt.session
            if attempt is not None and attempt.attempt_id == unconfirmed.attempt.attempt_id and session is not None:
                del run.unconfirmed[rollout_id]
                unconfirmed.attempt.unassign()
                attempt.assign(session)
                session.resend.set()

    def expire_unconfirmed(self, run: RunState) -> None:
        """End the unconfirmed attempts whose rollouts did not come again."""
        now = time.monotonic()
        for unconfirmed in list(run.unconfirmed.values()):
            if unconfirmed.due <= now or unconfirmed.attempt.session is None:
                self._drop(run, unconfirmed.attempt)

    def _drop(self, run: RunState, attempt: RunningAttempt) -> None:
        run.unconfirmed.pop(attempt.rollout.rollout_id, None)  # may be expired already, while `confirm` awaits
        if (session := attempt.session) is not None:
            session.cancel([attempt.ref])
            attempt.unassign()
