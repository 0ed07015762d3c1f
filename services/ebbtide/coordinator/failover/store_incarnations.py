"""Reconciles runs with a store that came back and may know less.

Invariant: `state.incarnation` is the one that the last link found, and a run is `reconciled` only if that incarnation
was told of its live attempts. Workers keep a rollout's whole output until its finish is durable, and leases keep what
was acknowledged; so what the store forgot is sent again, and must not be taken for old. An attempt whose rollout the
store does not know stays unconfirmed for a while: the lease that submitted it submits it again. All of this is lost
with the process; the next coordinator reads from the store whether its incarnation was reconciled.
"""

from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
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
        for attempt, fate in await self._adopt(run, held, newer=True):
            if fate is AttemptFate.OVER and attempt in ended:
                run.end(attempt.rollout.rollout_id)  # the store has its finish; its worker will ask
            if fate is AttemptFate.UNKNOWN:
                run.unconfirm(attempt, self._state.clock() + DOUBT_S, newer=True)
        log.info("run settled", run_id=run.run_id, attempts=len(held), forgotten=len(run.unconfirmed))
        return True

    async def note_reconciled(self) -> None:
        """Note in the store when all runs are reconciled, so that the next coordinator need not repeat it. While a
        run's data is broken, they are not.
        """
        name, runs = self._state.incarnation.name, self._state.runs.values()
        if self._reconciled != name and not self._state.skipped and all(run.reconciled.is_set() for run in runs):
            await self._store.runs.keep_incarnation(name)
            self._reconciled = name

    async def confirm(self, run: RunState) -> None:
        """Ask whether unconfirmed rollouts came again. Call with the run's lock held, before its rollouts are read."""
        for newer in (True, False):
            held = [u.attempt for u in run.unconfirmed.values() if u.newer is newer and u.attempt.session is not None]
            for attempt, fate in await self._adopt(run, held, newer=newer):
                if fate is AttemptFate.OVER:
                    run.drop_unconfirmed(attempt)

    async def _adopt(
        self, run: RunState, held: list[RunningAttempt], *, newer: bool
    ) -> list[tuple[RunningAttempt, AttemptFate]]:
        found: list[tuple[RunningAttempt, AttemptFate]] = []
        for at in range(0, len(held), _AT_ONCE):
            page = [(one, one.session.worker_id) for one in held[at : at + _AT_ONCE] if one.session is not None]
            names = [(one.rollout.rollout_id, one.attempt_id, worker_id) for one, worker_id in page]
            adopted = await self._store.rollouts.adopt(run.run_id, names, newer=newer)
            for (one, _), answer in zip(page, adopted, strict=True):
                one.believe_stored(answer.stored)
                found.append((one, answer.fate))
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
