"""Holds what the serving-guard grants to this worker now: the lease of the device, and a forecast.

Invariant: the lease in the page ends at most `GRANT_S` after the newest grant, at once when the stream of grants ends,
and it is never renewed while the coordinator does not want this host borrowed. So the engine stands still by itself
when the guard is gone or hangs. Nothing of this outlives the process.
"""

import asyncio
import math
import time
from typing import Final

from ebbtide import telemetry
from ebbtide.grants import Page
from ebbtide.types.grants import GRANT_S, Forecast, Grant, Residency

log = telemetry.get_logger(__name__)

#: Longest time that an install waits for a spell: without one it disturbs the served requests, but the run waits, too.
_PATIENCE_S: Final = 5.0
#: Interval of looks for a grant then.
_PAUSE_S: Final = 0.01


class DeviceLease:
    """The lease, for the engine (through the page) and for installs."""

    def __init__(self, page: Page) -> None:
        """`page`: of the borrowed engine, which reads the lease there."""
        self._page = page
        self.wanted = True  # whether the coordinator wants this host borrowed
        self._granted_at = -math.inf
        self.connected = False  # whether a guard gives grants
        self.sequence = 0  # of the newest grant
        self.forecast = Forecast()
        self.residency = Residency.AWAKE  # where the newest grant wishes the weights

    def want(self, *, wanted: bool) -> None:
        """Let the lease be renewed or not. It ends at once when the host is not wanted."""
        self.wanted = wanted
        if not wanted:
            self._page.renew(0.0)

    def take(self, grant: Grant) -> None:
        """Renew the lease as a grant says, and limit the memory for keys and values."""
        self.connected, self.forecast, self.sequence = True, grant.forecast, grant.sequence
        steps = self._page.steps()
        if steps.block_bytes:
            blocks = grant.kv_bytes // steps.block_bytes
            blocks = blocks if blocks < steps.kv_total else -1
            if blocks != self._page.kv_blocks:
                self._page.limit_kv(blocks)
        self.residency, self._granted_at = grant.residency, time.monotonic()
        free = self.wanted and grant.tokens > 0
        self._page.renew(time.monotonic() + min(grant.expires_s, GRANT_S) if free else 0.0)

    def end(self) -> None:
        """The stream of grants has ended."""
        self._page.renew(0.0)
        self.connected, self.forecast, self._granted_at, self.sequence = False, Forecast(), -math.inf, 0

    async def spell(self, seconds: float) -> None:
        """Wait, within bounds, until the serving engine has no request and probably gets none for so long: then the
        device is free for work other than steps."""
        end = time.monotonic() + _PATIENCE_S
        while not self._spell_of(seconds):
            if time.monotonic() > end:
                log.warning("no spell came: going on without one", waited_s=_PATIENCE_S, wanted_s=seconds)
                return
            await asyncio.sleep(_PAUSE_S)

    def _spell_of(self, seconds: float) -> bool:
        idle = self._page.budget().tokens and self._page.idle()
        forecast = self.forecast.spell_s  # 0: not known
        return bool(idle) and (not forecast or forecast >= seconds)

    def may_wake(self) -> bool:
        """Whether a grant that still holds wishes the weights awake. That is the permission to load them: an engine
        without weights gets neither tokens nor a budget."""
        return self.residency is Residency.AWAKE and time.monotonic() - self._granted_at < GRANT_S
