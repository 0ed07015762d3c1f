"""What goes on when the violence begins, by the phase's name. Each is entered by waiting until it has come, and left,
with the violence under way, by letting go of what was held up.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from tests.chaos.load import RUN
from tests.chaos.scene import Scene
from tests.chaos.trainer import LARGE
from tests.fakes.links import Direction
from tests.support.waiting import wait_until

#: Bytes of a version after which its way is closed: some tiles have come whole by then, and one in part.
PART: Final = (9 << 20) + 1000
ROLLOUTS: Final = 64  # as many as two workers hold


@asynccontextmanager
async def idle(scene: Scene) -> AsyncIterator[None]:
    """Workers have the weights, and nothing to do."""
    client = scene.cluster.client()

    async def installed() -> bool:
        return all(worker.installed for worker in await client.workers())

    await wait_until(installed, timeout=30, what="weights on all workers")
    yield


@asynccontextmanager
async def prefill(scene: Scene) -> AsyncIterator[None]:
    """The engine has requests for which no token came yet."""
    await scene.load.submit(ROLLOUTS)

    def begun() -> bool:
        return sum(record.generated == 0 for record in scene.cluster.ledger("w1")) >= 8

    await wait_until(begun, timeout=30, what="requests in the engine")
    yield


@asynccontextmanager
async def decode(scene: Scene) -> AsyncIterator[None]:
    if scene.victim == "trainer":
        await _stored(scene, 500)
    else:
        await scene.load.submit(ROLLOUTS)
        await scene.load.more_tokens(ROLLOUTS * 8)
    yield


@asynccontextmanager
async def flush(scene: Scene) -> AsyncIterator[None]:
    """Tokens are on their way to the store, or their acknowledgement is on its way back."""
    await scene.load.submit(ROLLOUTS)
    await scene.load.more_tokens(ROLLOUTS * 8)
    ways = scene.cluster.ways
    match scene.cell.victim:
        case "worker":
            direction = ways["w1", "coordinator"].forth
        case "redis":
            direction = ways["coordinator", "redis"].back
        case _:
            direction = ways["w1", "coordinator"].back
    direction.hold()
    await wait_until(lambda: direction.silent, what="a flush under way")
    yield
    direction.release()


@asynccontextmanager
async def pull(scene: Scene) -> AsyncIterator[None]:
    """A worker has a part of a version; of a trainer, the relay has a part of what it publishes."""
    ways = scene.cluster.ways
    if scene.victim == "trainer":
        direction = ways["trainer", "relay"].forth
    else:
        await scene.load.submit(ROLLOUTS // 2)
        await scene.load.more_tokens(ROLLOUTS)
        direction = ways["w1", "relay"].back
    direction.limit = direction.passed + PART
    if scene.victim != "trainer":
        await scene.load.publish(step=1, elements=LARGE)
        await scene.load.submit(ROLLOUTS // 2, version=2)
    await wait_until(lambda: direction.silent, timeout=30, what="weights under way")
    yield
    direction.release()


@asynccontextmanager
async def migration(scene: Scene) -> AsyncIterator[None]:
    """Of a dead worker's rollouts, one after the other goes to w2, which is full."""
    await scene.load.submit(ROLLOUTS)
    await scene.load.more_tokens(ROLLOUTS * 8)
    scene.cluster.kill("w1")
    await wait_until(lambda: any(one.start for one in scene.cluster.ledger("w2")), timeout=30, what="a migration")
    yield


@asynccontextmanager
async def move(scene: Scene) -> AsyncIterator[None]:
    """Rollouts that w1, whose speed is known, has not begun go to w2, which has just joined and has nothing to do."""
    cluster = scene.cluster
    await cluster.route("w2", "coordinator")
    way = cluster.ways["w2", "coordinator"]
    way.hold()
    joining = asyncio.create_task(scene.join())
    await scene.load.submit(8)  # as many as a worker is given before any has begun
    await scene.load.more_tokens(8 * 24)
    await wait_until(lambda: cluster.logged("w2", "engine ready"), timeout=30, what="the boot of w2")
    await scene.load.submit(6)
    await wait_until(lambda: len(cluster.ledger("w1")) == 14, timeout=30, what="all of them on one worker")
    way.release()
    await joining
    await scene.load.counted("moved", 1)
    yield


@asynccontextmanager
async def drain(scene: Scene) -> AsyncIterator[None]:
    """A worker was told to leave, and what it has not sent yet is held up on its way."""
    await scene.load.submit(ROLLOUTS)
    await scene.load.more_tokens(ROLLOUTS * 8)
    direction: Direction = scene.cluster.ways["w1", "coordinator"].forth
    direction.hold()
    scene.cluster.ask_to_end("w1")
    await wait_until(lambda: scene.cluster.logged("w1", "asked to end"), what="the signal taken")
    yield
    direction.release()


async def _stored(scene: Scene, least: int) -> None:
    client = scene.cluster.client()

    async def stored() -> bool:
        return (await client.run(RUN)).counters.get("tokens_stored", 0) >= least

    await wait_until(stored, timeout=30, interval=0.05, what=f"{least} tokens")


PHASES: Final[dict[str, Callable[[Scene], AbstractAsyncContextManager[None]]]] = {
    "idle": idle,
    "prefill": prefill,
    "decode": decode,
    "flush": flush,
    "pull": pull,
    "migration": migration,
    "move": move,
    "drain": drain,
}
