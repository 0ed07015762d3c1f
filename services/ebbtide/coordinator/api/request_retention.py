"""Deletes finished requests and ended sessions after their time, and drops sessions that nobody continues.

Invariant: the store says what is due, by its own clock, so a restart delays nothing that is due by more than a round.
`_bare` has the runs that are known to have neither requests nor sessions: these are not asked for. It is lost with the
process; the next one asks for each run once.
"""

import asyncio
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator.coordinator_parts import CoordinatorParts
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import StoreUnavailable
from ebbtide.types.run import LeaseRef, is_gateway

log = telemetry.get_logger(__name__)
#: Longest time between two rounds. What is due takes store memory until then.
_LOOK_S: Final = 5.0
#: Rounds in the shortest of the two times.
_ROUNDS: Final = 4


class RequestRetention:
    def __init__(self, parts: CoordinatorParts) -> None:
        self._state, self._store, self._attempts = parts.state, parts.store, parts.attempts
        self._notifier = parts.notifier
        self.kept_s, self.idle_s = parts.settings.request_kept_s, parts.settings.session_idle_s
        self._bare: set[str] = set()

    def note(self, run_id: str, lease: LeaseRef) -> None:
        """Note, before a store call under this lease, that the run may have requests or sessions from now on."""
        if is_gateway(lease.role):
            self._bare.discard(run_id)

    async def expire_for_ever(self) -> None:
        """Look after all runs regularly, and after a store that was away soon."""
        pause_s = min(_LOOK_S, self.kept_s / _ROUNDS, self.idle_s / _ROUNDS)
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.round()
            except StoreUnavailable as error:
                log.warning("store away", reason=str(error))

    async def round(self) -> None:
        """Delete what is due now, of all runs."""
        live = self._state.at_work(self._state.clock())
        self._bare &= self._state.runs.keys()
        for run in live:
            if run.run_id not in self._bare:
                async with self._attempts.while_it_lives(run):
                    await self._expire(run)

    async def _expire(self, run: RunState) -> None:
        self._bare.add(run.run_id)  # unless a request comes meanwhile
        try:
            left = True
            while left:
                async with run.changing():
                    found = await self._store.sessions.expire(run.run_id, kept_s=self.kept_s, idle_s=self.idle_s)
                    self.forget(run, found.ended)
                left = found.due > 0
        except BaseException:
            self._bare.discard(run.run_id)
            raise
        if found.left:
            self._bare.discard(run.run_id)

    def forget(self, run: RunState, ended: list[tuple[str, str]]) -> None:
        """Stop requests that the store cancelled, as (rollout, attempt or ""), and notify the readers of their tokens.
        Call with the run's lock held.
        """
        self._attempts.over(run, ended)
        for rollout_id, _ in ended:
            self._notifier.notify("tokens", run.run_id, rollout_id)
