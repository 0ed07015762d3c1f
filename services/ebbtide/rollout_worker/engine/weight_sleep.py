"""Moves the weights of a borrowed engine to where the guard's grants wish them.

Invariant: `residency` is where the weights are, whole; between two levels it is the one that promises less. At every
level, requests keep their tokens: they wait, and the engine computes or loads again what it gave up.

- On a GPU vLLM's sleep mode gives all memory of the engine back at either level. At HOST a copy of the weights waits in
  host memory; at AWAY there is none. The engine goes to either level from AWAKE alone: at HOST it has given the GPU's
  memory back already, and could drop its copy only by taking that memory again.
- On a CPU build weights lie in host memory anyway: HOST means that the engine gives up all memory of keys and values,
  and AWAY that of the weights too.

From AWAY, an install of the version that the engine served, or of the one wished for by now, brings the weights back
from the host's mirror.
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

    @property
    def by_stages(self) -> bool: ...

    async def give_up_cache(self) -> None: ...

    async def give_up_weights(self) -> None: ...

    async def wake(self) -> None: ...


class ResidencySource(Protocol):
    """Brings weights back: see `Installer`."""

    def rest(self) -> bool:
        """Install nothing until `restore`; False if this is impossible now."""
        ...

    async def restore(self) -> None:
        """Load the version that the engine served again, and go on installing."""
        ...


class WeightSleep:
    """Moves the weights. The caller sets the page's limit for keys and values before."""

    def __init__(self, engine: SleepingEngine, source: ResidencySource) -> None:
        self._engine, self._source = engine, source
        self._moving = asyncio.Lock()
        self.residency = Residency.AWAKE
        #: Duration of the last wake-up from either level; 0: there was none yet.
        self.wake_host_s = self.wake_away_s = 0.0
        self._hindrance = ""  # why the weights did not come back lately

    @property
    def moving(self) -> bool:
        """Whether the weights are on their way."""
        return self._moving.locked()

    async def be(self, wanted: Residency) -> None:
        """Move the weights, if it is possible now: `residency` tells, and callers may try again. Raises `EngineFailed`
        if the engine is lost."""
        async with self._moving:
            if wanted is Residency.AWAKE:
                await self._wake()
            elif wanted > self.residency:
                await self._go_down(wanted)

    async def _go_down(self, wanted: Residency) -> None:
        by_stages = self._engine.by_stages
        if self.residency is Residency.HOST and not by_stages:
            return
        if wanted is Residency.AWAY and not self._source.rest():
            wanted = Residency.HOST  # there is no version to come back to, or one is being installed
        start = time.monotonic()
        if self.residency is Residency.AWAKE and (by_stages or wanted is Residency.HOST):
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
                if str(error) != self._hindrance:  # each grant asks again, several times a second
                    self._hindrance = str(error)
                    log.warning("weights do not come back yet", reason=self._hindrance)
                return
        elif was is Residency.HOST:
            await self._engine.wake()
        self.residency, self._hindrance = Residency.AWAKE, ""
        took_s = time.monotonic() - start
        if was is Residency.AWAY:
            self.wake_away_s = took_s
        elif was is Residency.HOST:
            self.wake_host_s = took_s
        if was is not Residency.AWAKE:
            log.info("awake", took_s=round(took_s, 4))
