"""Where the weights of a borrowed engine are, moved as the guard's grants wish.

Invariant: `residency` is where they are, whole; between two levels it is the one that promises less. Whatever the
level, requests keep all tokens that they have: they wait, and what was given up is computed or loaded again. On a CPU
build weights lie in host memory anyway, so that HOST means to give the keys and values up, all of their memory, and
AWAY the weights too: they come back from the host's mirror, by an install of the version that the engine served.
vLLM's own sleep mode is for GPUs and does nothing there but warn; engines on GPUs stay awake.
"""

import asyncio
import time
from typing import Protocol

from ebbtide import telemetry
from ebbtide.errors import EbbtideError
from ebbtide.rollout_worker.engine import EngineFailed
from ebbtide.types.grants import Residency

log = telemetry.get_logger(__name__)


class SleepingEngine(Protocol):
    """The engine: see `VllmEngine`."""

    async def give_up_cache(self) -> None: ...

    async def give_up_weights(self) -> None: ...


class ResidencySource(Protocol):
    """Where weights come back from: see `Installer`."""

    def rest(self) -> bool:
        """Install nothing more until `restore`; False if that cannot be now."""
        ...

    async def restore(self) -> None:
        """Put what the engine served into it again, and go on installing."""
        ...


class WeightSleep:
    """See the module. The page's limit for keys and values is the caller's to set, before."""

    def __init__(self, engine: SleepingEngine, source: ResidencySource) -> None:
        self._engine, self._source = engine, source
        self._moving = asyncio.Lock()
        self.residency = Residency.AWAKE
        #: Seconds that the last wake-up from either level took; 0: there was none yet.
        self.wake_host_s = self.wake_away_s = 0.0

    async def be(self, wanted: Residency) -> None:
        """Go there, if it can be done now; otherwise `residency` tells, and it is to be wished for again. Raises
        `EngineFailed` if the engine is lost over it."""
        async with self._moving:
            if wanted is Residency.AWAKE:
                await self._wake()
            elif wanted > self.residency:
                await self._go_down(wanted)

    async def _go_down(self, wanted: Residency) -> None:
        if wanted is Residency.AWAY and not self._source.rest():
            wanted = Residency.HOST  # no version to come back to, or one is just being installed
        start = time.monotonic()
        if self.residency is Residency.AWAKE:
            await self._engine.give_up_cache()
            self.residency = Residency.HOST
        if wanted is Residency.AWAY:
            self.residency = Residency.AWAY
            await self._engine.give_up_weights()
        log.info("memory given up", residency=self.residency.name.lower(), took_s=round(time.monotonic() - start, 4))

    async def _wake(self) -> None:
        was, start = self.residency, time.monotonic()
        if was is Residency.AWAY:
            try:
                await self._source.restore()
            except EngineFailed:
                raise
            except EbbtideError as error:
                log.warning("weights do not come back yet", reason=str(error))
                return
        self.residency = Residency.AWAKE
        took_s = time.monotonic() - start
        if was is Residency.AWAY:
            self.wake_away_s = took_s
        elif was is Residency.HOST:
            self.wake_host_s = took_s
        if was is not Residency.AWAKE:
            log.info("awake", took_s=round(took_s, 4))
