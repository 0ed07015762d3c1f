"""Takes, renews and releases the fleet's lease, or waits for it as a standby.

Invariant: the store decides who leads, and checks each write. The lease tells standbys when to take over and clients
where to call: a coordinator whose lease may be over reports that it does not serve, until the store has renewed it.
When the process dies, the lease expires. The store counts the lease's time, so that no two clocks are compared; a
leader's belief ends before its lease does, because it counts from before it asked for the renewal.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.errors import StoreUnavailable
from ebbtide.runtime import race
from ebbtide.store.connection import TermSuperseded
from ebbtide.store.store import Store

log = telemetry.get_logger(__name__)
#: Releasing the lease saves the next leader a wait; it is not worth a longer one here.
_RELEASE_S: Final = 1.0


class Election:
    """Call `stand_by` or `seize`, then `keep`, then `release`. Takes no store whose schema it cannot read."""

    def __init__(self, store: Store) -> None:
        self._store, self._lease = store, store.leadership
        self._address, self._leads = "", False
        self._tenure = LeaderTenure(-math.inf)

    async def stand_by(self, address: str, heard: Callable[[str], None]) -> None:
        """Wait until the lease is free, and take it. `heard` receives the leader's address whenever it changes."""
        log.info("standing by")
        await race(self._wait(address, heard), self._store.link.lost())

    async def _wait(self, address: str, heard: Callable[[str], None]) -> None:
        watch, leader, waits, hindrance = StandbyWatch(), "", True, ""
        while waits:
            asked = time.monotonic()
            try:
                held = await self._lease.leader(TTL_S)
                if watch.free(time.monotonic(), held=bool(held)):
                    await self._store.check()
                    asked = time.monotonic()
                    held = await self._lease.take(address, TTL_S)
                    waits = bool(held)
                if held and held != leader:
                    heard(leader := held)
                    log.info("another coordinator leads", at=leader)
                hindrance = ""
            except StoreUnavailable as error:
                if str(error) != hindrance:
                    hindrance = str(error)
                    log.warning("could not lead", reason=hindrance)
            if waits:
                await asyncio.sleep(LOOK_S)
        self._begin(address, asked)

    async def seize(self, address: str) -> None:
        """Take the lease from any holder. Raises `StoreUnavailable`."""
        await self._store.check()
        asked = time.monotonic()
        await self._lease.seize(address, TTL_S)
        self._begin(address, asked)

    def _begin(self, address: str, asked: float) -> None:
        self._address, self._leads, self._tenure = address, True, LeaderTenure(asked)
        metrics.leads.set(1)
        log.info("leads", at=address)

    async def keep(self, serving: Callable[[bool], Awaitable[None]]) -> None:
        """Renew the lease for ever. Calls `serving` when it may have expired, and when it is renewed again. Raises
        `TermSuperseded` once another coordinator has taken over.
        """
        tenure, certain = self._tenure, True
        superseded = self._store.link.superseded
        while not superseded.is_set():
            asked = time.monotonic()
            with suppress(StoreUnavailable):  # full, or away
                await self._lease.renew(self._address, TTL_S, patience_s=tenure.patience_s(asked))
                tenure.renewed = asked
            if certain is not (tenure.rest_s(time.monotonic()) > 0):
                certain = not certain
                metrics.leads.set(certain)
                log.warning("the lease is renewed again" if certain else "the lease could not be renewed in time")
                await serving(certain)
            rest_s = tenure.rest_s(time.monotonic())
            with suppress(TimeoutError):  # wake early enough to report a lease that is about to expire
                async with asyncio.timeout(rest_s if 0.0 < rest_s < RENEW_S else RENEW_S):
                    await superseded.wait()
        raise TermSuperseded

    async def release(self) -> None:
        """Try to let another take over at once. Call when all loops that write have ended."""
        if self._leads and not self._store.link.superseded.is_set():
            with suppress(StoreUnavailable, TermSuperseded):
                await self._lease.release(patience_s=_RELEASE_S)
        self._leads = False
        metrics.leads.set(0)


#: How long a lease lasts, and how often it is renewed: three renewals may fail. All coordinators of a fleet need the
#: same value, as a standby shortens a lease of more than that.
TTL_S: Final = 2.0
RENEW_S: Final = 0.5
#: How often a standby checks the lease.
LOOK_S: Final = 0.2
#: A standby needs answers for so long before it believes that the lease is free: after an absence of the store, a live
#: leader needs time to reach it again and renew.
STEADY_S: Final = TTL_S
#: A longer pause between answers was an absence, of the store or of the standby.
_GAP_S: Final = 1.0


class StandbyWatch:
    """Tracks what a standby sees of the lease."""

    def __init__(self) -> None:
        self._seen = self._since = float("-inf")

    def free(self, now: float, *, held: bool) -> bool:
        """Whether to take over, given the store's answer whether the lease is held."""
        if now - self._seen > _GAP_S:
            self._since = now
        self._seen = now
        return not held and now - self._since >= STEADY_S


class LeaderTenure:
    """Tracks a leader's own lease."""

    def __init__(self, now: float) -> None:
        self.renewed = now  # when it asked for the last renewal that succeeded

    def rest_s(self, now: float) -> float:
        """For how long it certainly still leads; 0.0 once another may have taken over."""
        return max(0.0, self.renewed + TTL_S - now)

    def patience_s(self, now: float) -> float:
        """How long a renewal may take: until the lease ends, and then until the next renewal is due."""
        return max(self.rest_s(now), RENEW_S)
