"""One seed, from boot to the last check."""

import asyncio
import gc
import sys
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.simulation.loop import Stuck
from tests.simulation.phases import Chaos
from tests.simulation.planting import lua
from tests.simulation.verdict import judge
from tests.simulation.world import World

#: Virtual seconds that all runs may take, whatever is done to them, and once nothing is done to them any more.
_LIMIT_S: Final = 900.0
_CALM_S: Final = 150.0
#: So little is kept of the past that what goes with it is missed.
_LITTLE_KEPT: Final = lua(
    ("LEAST_KEPT, MOST_KEPT, QUOTA_OF_ONE = 256, 16384,", "LEAST_KEPT, MOST_KEPT, QUOTA_OF_ONE = 8, 8,"),
    ("REMEMBERED_S = 10", "REMEMBERED_S = 0"),
)


class Outcome(Struct, kw_only=True):
    """What came of a seed. `wrong`: empty if all held."""

    seed: int
    wrong: str = ""
    digest: int = 0
    virtual_s: float = 0.0
    steps: int = 0
    runs: int = 0
    takeovers: int = 0  # by a coordinator that stood by
    rollouts: int = 0
    reclaims: int = 0
    cells: list[str] = []
    trace: list[str] | None = None


def simulate(seed: int, *, trace: bool = False, faults: bool = True, record: Path | None = None) -> Outcome:
    """Run a seed; without `faults` nothing happens to its world. `record`: a folder for coordinators' decisions."""
    gc.disable()
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with _LITTLE_KEPT():
            return _simulate(seed, trace=trace, faults=faults, record=record)
    finally:
        gc.collect()  # what processes left is closed here, and some of it protests
        gc.enable()
        sys.unraisablehook = hook


def _simulate(seed: int, *, trace: bool, faults: bool, record: Path | None) -> Outcome:
    world = World(seed, trace=trace, record=record)
    chaos = Chaos(world, seed) if faults else None
    with world.patched():
        wrong = _run(world, chaos)
        world.close()
    return Outcome(
        seed=seed,
        wrong=wrong,
        digest=world.digest,
        virtual_s=world.loop.now,
        steps=world.loop.steps,
        runs=len(world.plan.runs),
        rollouts=sum(len(journal.requests) for journal in world.journals.values()),
        takeovers=world.monitor.leadership.takeovers,
        reclaims=world.reclaims,
        cells=[str(cell) for cell in chaos.struck] if chaos else [],
        trace=world.trace,
    )


def _run(world: World, chaos: Chaos | None) -> str:
    loop = world.loop
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_live(world, chaos))
    except Stuck as error:
        world.monitor.fail(str(error))
    finally:
        asyncio.set_event_loop(None)
    return world.monitor.wrong


async def _live(world: World, chaos: Chaos | None) -> None:
    monitor = world.monitor
    world.boot()
    if chaos is None:
        world.outlook.calm = True
    else:
        world.loop.outside.spawn(chaos.run(), "chaos")
    while (live := world.live) and not monitor.wrong:
        if world.loop.now > (world.calm_at + _CALM_S if world.outlook.calm else _LIMIT_S):
            monitor.fail(f"{', '.join(live)} did not come to an end")
        await asyncio.sleep(0.25)
    if not monitor.wrong:
        await judge(world)
