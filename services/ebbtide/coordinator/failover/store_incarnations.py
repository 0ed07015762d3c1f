"""The store's lives: what the coordinator does when the store came back and may know less.

Invariant: `state.life` is the life that the last link found, and a run is `settled` only if that very life was told of
its live attempts. Workers keep a rollout's whole output until its finish is durable, and leases what they were
acknowledged: so what the store forgot comes again, and here it is only kept from being taken for old. An attempt whose
rollout the store does not know at all is a widow for a while: the lease that submitted it sends it again.
All of this is lost with the process; a coordinator that starts reads from the store whether its life was settled.
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
#: Workers and leases send again what the store forgot within seconds; this is patience with slow ones.
DOUBT_S: Final = 30.0
_AT_ONCE: Final = 512


class StoreIncarnations:
    def __init__(self, state: CoordinatorState, store: Store, *, lease_ttl_s: float) -> None:
        self._state, self._store, self._lease_ttl_s = state, store, lease_ttl_s
        self._settled = ""  # the life that all runs are settled in, as the store knows
        self._asked = ""  # the life whose condition is known
        self._came = 0.0  # when it came

    async def begin(self) -> None:
        """At the coordinator's start, with the store's condition known: find out whether it came back meanwhile."""
        link = self._store.link
        self._state.life = StoreIncarnation(link.incarnation, link.durable_after_s)
        self._asked, self._settled = link.incarnation, await self._store.runs.settled_incarnation()
        if self._settled and self._settled != link.incarnation:
            self._doubt()

    def _doubt(self) -> None:
        if self._state.life.durable_after_s:
            self._state.doubt_until = time.monotonic() + DOUBT_S

    def came(self) -> None:
        """A link to the store came up. Calls that the last one took with it may or may not have been done: look."""
        state, link = self._state, self._store.link
        if link.incarnation != state.life.name:
            former, state.life = state.life, StoreIncarnation(link.incarnation, link.durable_after_s)
            self._came = time.monotonic()
            former.over.set()
            self._doubt()
            for run in state.runs.values():
                run.settled.clear()
            for session in state.sessions.values() if former.durable_after_s else ():
                session.resend.set()
            log.warning("the store came back", at=link.where, runs=len(state.runs))
        for run in state.runs.values():
            run.stale = True
        state.wake.set()

    async def settle(self, run: RunState) -> bool:
        """Tell the store of the attempts that live on. False if the run is over. Call with the run's lock held."""
        life = self._state.life
        if self._asked != life.name:
            was, life.durable_after_s = life.durable_after_s, (await self._store.condition()).durable_after_s
            self._asked = life.name
            self._doubt()
            if life.durable_after_s != was:  # append streams have the form that they were opened with
                for session in self._state.sessions.values():
                    session.resend.set()
        if self._settled != life.name and not await self._store.runs.settle(run.run_id, self._lease_ttl_s):
            return False
        ended = self._unfinish(run)
        held = [one for one in run.running.values() if one.session is not None and not one.leaving]
        for attempt, fate in await self._adopt(run, held, newer=True):
            if fate is AttemptFate.OVER and attempt in ended:
                attempt.part()  # its finish is there; its worker will ask
                del run.running[attempt.waiting.rollout_id]
            if fate is AttemptFate.UNKNOWN:
                del run.running[attempt.waiting.rollout_id]
                run.widows[attempt.waiting.rollout_id] = UnconfirmedAttempt(
                    attempt, time.monotonic() + DOUBT_S, newer=True
                )
        log.info("run settled", run_id=run.run_id, attempts=len(held), forgotten=len(run.widows))
        return True

    def _unfinish(self, run: RunState) -> set[RunningAttempt]:
        """Take finished attempts that their workers still have, and whose finish may be forgotten, for running ones."""
        taken: set[RunningAttempt] = set()
        for attempt, session, until in run.ending:
            if until > self._came and not session.gone and attempt.waiting.rollout_id not in run.running:
                attempt.give(session)
                run.running[attempt.waiting.rollout_id] = attempt
                taken.add(attempt)
        run.ending.clear()
        return taken

    async def settled(self) -> None:
        """Once all runs are, note it: who starts after this has nothing to settle."""
        life = self._state.life.name
        if self._settled != life and all(run.settled.is_set() for run in self._state.runs.values()):
            await self._store.runs.keep_incarnation(life)
            self._settled = life

    async def remarry(self, run: RunState) -> None:
        """Ask whether the widows' rollouts came again. Call with the run's lock held, before its rollouts are read."""
        for newer in (True, False):
            held = [w.attempt for w in run.widows.values() if w.newer is newer and w.attempt.session is not None]
            for attempt, fate in await self._adopt(run, held, newer=newer):
                if fate is AttemptFate.OVER:
                    self._part(run, attempt)

    async def _adopt(
        self, run: RunState, held: list[RunningAttempt], *, newer: bool
    ) -> list[tuple[RunningAttempt, AttemptFate]]:
        found: list[tuple[RunningAttempt, AttemptFate]] = []
        for at in range(0, len(held), _AT_ONCE):
            page = [(one, one.session.worker_id) for one in held[at : at + _AT_ONCE] if one.session is not None]
            names = [(one.waiting.rollout_id, one.attempt_id, worker_id) for one, worker_id in page]
            adopted = await self._store.rollouts.adopt(run.run_id, names, newer=newer)
            for (one, _), answer in zip(page, adopted, strict=True):
                one.stored = answer.stored
                found.append((one, answer.fate))
        return found

    def rejoin(self, run: RunState) -> None:
        """Give widows their rollouts, where these run as their attempts again. Call when the rollouts were read."""
        for rollout_id, widow in list(run.widows.items()):
            attempt, session = run.running.get(rollout_id), widow.attempt.session
            if attempt is not None and attempt.attempt_id == widow.attempt.attempt_id and session is not None:
                del run.widows[rollout_id]
                widow.attempt.part()
                attempt.give(session)
                session.resend.set()

    def expire(self, run: RunState) -> None:
        """End the widows whose rollouts did not come again."""
        now = time.monotonic()
        for widow in list(run.widows.values()):
            if widow.due <= now or widow.attempt.session is None:
                self._part(run, widow.attempt)

    def _part(self, run: RunState, attempt: RunningAttempt) -> None:
        run.widows.pop(attempt.waiting.rollout_id, None)  # `expire` comes in between the awaits of `remarry`
        if (session := attempt.session) is not None:
            session.cancel([attempt.ref])
            attempt.part()
