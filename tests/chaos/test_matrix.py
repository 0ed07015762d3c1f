"""The fault matrix on real processes: whatever happens to whom and when, every rollout ends once and unharmed."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS
from tests.chaos.phases import PHASES
from tests.chaos.scene import Cell, Scene
from tests.fakes.clocks import compiler

#: In each `make test`: one of each victim, and of each kind of silence.
FAST: Final = (
    Cell("worker", "freeze", "flush", 4.0),
    Cell("worker", "partition", "pull", 4.0),
    Cell("coordinator", "kill", "migration"),
    Cell("redis", "freeze", "decode", 4.0),
    Cell("trainer", "kill", "pull"),
)

#: victim: fault: phases. The nightly rest.
_NIGHTLY: Final = {
    "worker": {
        "kill": "prefill decode flush pull migration move drain",
        "freeze": "idle prefill decode flush pull migration move drain",
        "slow": "decode flush pull migration",
        "mute": "decode flush migration",
        "deaf": "decode pull drain",
        "partition": "idle prefill decode flush migration move drain",
        "clock": "decode migration",
    },
    "coordinator": {
        "kill": "idle prefill decode flush pull migration move drain",
        "freeze": "decode flush migration",
        "slow": "decode migration",
        "mute": "decode",
        "partition": "decode migration",
        "clock": "decode migration",
    },
    "redis": {
        "kill": "idle flush pull migration drain",
        "freeze": "flush migration move",
        "slow": "decode",
        "mute": "flush",
        "deaf": "decode",
        "partition": "migration",
        "clock": "decode migration",
    },
    "relay": {
        "kill": "migration",
        "freeze": "pull",
        "slow": "pull",
        "mute": "pull",
        "deaf": "pull",
        "partition": "pull",
        "clock": "pull",
    },
    "trainer": {
        "kill": "idle decode",
        "freeze": "decode pull",
        "slow": "pull",
        "deaf": "decode",
        "partition": "decode pull",
        "clock": "decode",
    },
}
NIGHTLY: Final = tuple(
    Cell(victim, fault, phase)
    for victim, faults in _NIGHTLY.items()
    for fault, phases in faults.items()
    for phase in phases.split()
)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def survive(cell: Cell, directory: Path, stack: AsyncExitStack) -> None:
    if cell.fault == "clock" and compiler() is None:
        pytest.skip("no C compiler: a program's clock is set by a library that is compiled for it")
    cluster = Cluster(directory, routed=True)
    stack.push_async_callback(cluster.close)
    scene = Scene(cluster, cell)
    stack.push_async_callback(scene.close)
    await scene.boot()
    async with AsyncExitStack() as violence:
        async with PHASES[cell.phase](scene):
            await violence.enter_async_context(FAULTS[cell.fault](scene))
        goes_on = scene.start_more()
    await goes_on
    await scene.settle()


@pytest.mark.parametrize("cell", FAST, ids=str)
async def test_a_fault_changes_no_token_and_ends_no_rollout_twice(
    cell: Cell, tmp_path: Path, stack: AsyncExitStack
) -> None:
    await survive(cell, tmp_path, stack)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", NIGHTLY, ids=str)
async def test_no_fault_at_any_moment_changes_a_token_or_ends_a_rollout_twice(
    cell: Cell, tmp_path: Path, stack: AsyncExitStack
) -> None:
    await survive(cell, tmp_path, stack)
