"""What is done to one program, by the fault's name. Each is entered with the violence and left with its undoing."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from tests.chaos.scene import Scene
from tests.fakes.links import Direction
from tests.support.waiting import wait_until

#: How long each lasts, seconds. Frozen ones sleep through every timeout there is, the keepalive's 15 s among them.
FROZEN_S: Final = 30.0
SLOW_S: Final = 12.0
SILENT_S: Final = 12.0
JUMP_S: Final = 3600

_BEAT_S: Final = 0.1
_SHARE: Final = 0.1  # of its time that a slow program may run


@asynccontextmanager
async def kill(scene: Scene) -> AsyncIterator[None]:
    scene.cluster.kill(scene.victim)
    yield
    await scene.revive()


@asynccontextmanager
async def freeze(scene: Scene) -> AsyncIterator[None]:
    scene.cluster.freeze(scene.victim)
    async with lasting(scene.lasts or FROZEN_S):
        yield
    scene.cluster.thaw(scene.victim)


@asynccontextmanager
async def slow(scene: Scene) -> AsyncIterator[None]:
    """Ten times slower: it runs for a tenth of each tenth of a second."""
    slowing = asyncio.create_task(_slow_down(scene))
    async with lasting(scene.lasts or SLOW_S):
        yield
    slowing.cancel()
    await asyncio.gather(slowing, return_exceptions=True)


async def _slow_down(scene: Scene) -> None:
    try:
        while True:
            scene.cluster.freeze(scene.victim)
            await asyncio.sleep(_BEAT_S * (1 - _SHARE))
            scene.cluster.thaw(scene.victim)
            await asyncio.sleep(_BEAT_S * _SHARE)
    finally:
        scene.cluster.thaw(scene.victim)


@asynccontextmanager
async def mute(scene: Scene) -> AsyncIterator[None]:
    """Half-open: what it sends does not arrive, what is sent to it does."""
    async with _held(scene, scene.outward()):
        yield


@asynccontextmanager
async def deaf(scene: Scene) -> AsyncIterator[None]:
    """Half-open: nothing reaches it, what it sends arrives."""
    async with _held(scene, scene.inward()):
        yield


@asynccontextmanager
async def partition(scene: Scene) -> AsyncIterator[None]:
    async with _held(scene, scene.outward() + scene.inward()):
        yield


@asynccontextmanager
async def _held(scene: Scene, directions: list[Direction]) -> AsyncIterator[None]:
    assert directions
    for direction in directions:
        direction.hold()
    async with lasting(scene.lasts or SILENT_S):
        yield
    for direction in directions:
        direction.release()


@asynccontextmanager
async def clock(scene: Scene) -> AsyncIterator[None]:
    """Its wall clock jumps ahead by an hour, and back by two."""
    assert scene.clock is not None
    scene.clock.jump(JUMP_S)
    async with lasting(2.0):
        yield
    scene.clock.jump(-JUMP_S)


@asynccontextmanager
async def lasting(seconds: float) -> AsyncIterator[None]:
    """Ends so long after it began, or with what is in it."""
    end = time.monotonic() + seconds
    yield
    await wait_until(lambda: time.monotonic() >= end, timeout=seconds + 1)


FAULTS: Final[dict[str, Callable[[Scene], AbstractAsyncContextManager[None]]]] = {
    "kill": kill,
    "freeze": freeze,
    "slow": slow,
    "mute": mute,
    "deaf": deaf,
    "partition": partition,
    "clock": clock,
}
