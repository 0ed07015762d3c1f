"""A borrowed worker's host and its guard: the host takes itself back for a moment or for long, and gives itself again.

In place of `Borrowing`, which would need the guard's process and a page of shared memory: the engine is paused and not
stepped within a budget, and the worker is held and tells of it as it does in earnest.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, Final

from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.runtime import Shutdown
from ebbtide.types.fleet import BorrowedState, WorkerKind
from tests.simulation.loop import SimLoop

_RECLAIM: Final = "grant"
#: A worker says that it is held once it has been for so long; an install waits for a grant for so long at most.
_HELD_S: Final = 0.25
_PATIENCE_S: Final = 5.0
#: How long a host keeps itself, and lends itself, in virtual seconds.
_RECLAIMS_S: Final = (0.01, 0.1, 0.5, 1.5, 4.0, 15.0)
_GRANTS_S: Final = (0.2, 1.0, 5.0)


class Lease:
    """In place of `DeviceLease`: it holds while the host lends itself."""

    def __init__(self, _page: Any) -> None:
        self.granted = asyncio.Event()

    async def spell(self, seconds: float) -> None:
        del seconds  # of an install: none here is long against a grant
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.granted.wait()
        except TimeoutError:
            return

    def may_wake(self) -> bool:
        return self.granted.is_set()


class Host:
    """Stands for the worker's side of the grants."""

    def __init__(
        self, attempts: LocalAttempts, lease: Lease, draw: random.Random, taken: Callable[[float], None]
    ) -> None:
        self._attempts, self._engine, self._draw, self._taken = attempts, attempts.engine, draw, taken
        self._granted, self._wanted = lease.granted, asyncio.Event()
        self._wanted.set()
        self._spell_s = self._share = self._disturbance = 0.0

    @property
    def state(self) -> BorrowedState:
        return BorrowedState(
            granted=_RECLAIM not in self._attempts.holds,
            share=self._share,
            spell_s=self._spell_s,
            disturbance=self._disturbance,
        )

    def want(self, *, wanted: bool, reason: str) -> None:
        if wanted:
            self._wanted.set()
        else:  # quiet from the next reclaim on
            self._wanted.clear()
            self._disturbance = 0.0

    async def run(self) -> None:
        draw = self._draw
        while True:
            self._granted.clear()
            await self._engine.pause(_RECLAIM)
            lasts_s = draw.choice(_RECLAIMS_S) * draw.uniform(0.5, 1.5)
            self._spell_s = draw.choice((0.0, 0.3, lasts_s, 30.0))
            self._taken(lasts_s)
            await self._stand_still(lasts_s)
            self._share, self._spell_s = draw.random(), draw.choice((0.0, 0.5, 5.0, 60.0))
            self._disturbance = draw.choice((0.0, 0.0, 0.0, 0.0, 0.1, 1.0))
            self._attempts.holds.end(_RECLAIM)
            await self._engine.resume(_RECLAIM)
            self._granted.set()
            await asyncio.sleep(draw.choice(_GRANTS_S) * draw.uniform(0.5, 1.5))

    async def _stand_still(self, seconds: float) -> None:
        await asyncio.sleep(min(_HELD_S, seconds))
        if seconds > _HELD_S:
            self._attempts.holds.begin(_RECLAIM)
            await asyncio.sleep(seconds - _HELD_S)
        await self._wanted.wait()


def page(settings: WorkerSettings, _worker_id: str) -> Any:
    """In place of the page of a borrowed worker's engine."""
    return SimpleNamespace(page=None) if settings.kind is WorkerKind.BORROWED else None


def borrower(loop: SimLoop, seed: int, taken: Callable[[float], None]) -> Any:
    """In place of what begins to borrow from a guard. `taken`: told of each reclaim, and for how long it is."""

    async def borrow(
        _stack: AsyncExitStack,
        shutdown: Shutdown,
        _settings: WorkerSettings,
        worker_id: str,
        _page: Any,
        lease: Lease,
        attempts: LocalAttempts,
        _sleeping: None,
    ) -> Host:
        host = Host(attempts, lease, random.Random(f"{seed} {worker_id} {loop.now}"), taken)
        shutdown.spawn(host.run(), "host")
        return host

    return borrow
