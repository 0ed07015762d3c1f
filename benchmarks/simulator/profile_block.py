"""Observes how fast one bound worker is, by the worker's own ledger, on rollouts of fixed lengths.

These are the observations that profiles are fitted to: other concurrencies, prompts and lengths than those of judged
settings, through the same coordinator, on the same cores, in blocks between them.
"""

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import Final

from msgspec import Struct
from safetensors.numpy import load_file

from benchmarks.simulator.bound_fleet import BoundFleet
from benchmarks.simulator.random_policy import VOCABULARY
from ebbtide.client import Client, Lease
from ebbtide.ledger import read_ledger
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import EXTERNAL, Sampling
from ebbtide.types.tokens import pack_ids
from tests.support.waiting import wait_until

#: Engine steps over which a step's time is averaged: so many turns that one more or less changes little.
_WINDOW_STEPS: Final = 24
_LOOK_S: Final = 0.01
_CELL_S: Final = 180.0
_DROPPED: Final = "profile"


class GridCell(Struct, frozen=True, kw_only=True):
    """Rollouts that are submitted together to an engine that has nothing else."""

    concurrency: int
    prompt: int  # tokens
    length: int  # tokens of each response


#: Judged settings have prompts of 48 and 160 tokens and lengths that vary; none keeps a concurrency for long.
GRID: Final = (
    GridCell(concurrency=1, prompt=24, length=72),
    GridCell(concurrency=2, prompt=96, length=96),
    GridCell(concurrency=4, prompt=24, length=120),
    GridCell(concurrency=8, prompt=256, length=120),
    GridCell(concurrency=12, prompt=24, length=144),
    GridCell(concurrency=16, prompt=24, length=120),
    GridCell(concurrency=16, prompt=448, length=120),
    GridCell(concurrency=1, prompt=640, length=48),
)
#: In half a minute: enough to see that the path works, too few to trust the fit.
QUICK_GRID: Final = (GRID[0], GRID[2], GRID[4], GRID[6])


class DecodeWindow(Struct, frozen=True, kw_only=True):
    """Some engine steps in which the same sequences decoded and nothing was read."""

    batch: int
    context: float  # tokens of context over all sequences, on average
    steps: float
    seconds: float  # of all these steps


class FirstTokens(Struct, frozen=True, kw_only=True):
    """From the call that submits a cell to its tokens."""

    concurrency: int
    prompt: int
    first_s: float  # to the first token of any rollout
    all_s: float  # until each rollout had one


class EngineBlock(Struct, frozen=True, kw_only=True):
    """What one pass over the grid showed. `whole_core`: the engine had no turns, as beside a served one."""

    at_s: float  # since the session's begin
    whole_core: bool
    windows: list[DecodeWindow]
    firsts: list[FirstTokens]


class _Progress(Struct):
    """Looks at a cell's rollouts: (second since their submission, tokens of each rollout that has any)."""

    looks: list[tuple[float, tuple[int, ...]]] = []


async def engine_block(
    fleet: BoundFleet, client: Client, run_id: str, *, grid: Sequence[GridCell], at_s: float, whole_core: bool = False
) -> EngineBlock:
    """Observes the only worker that is attached, in a run of its own."""
    (worker,) = fleet.present
    spec = {"name": "profile", "model": str(fleet.model), "environment": {"name": "none"}}
    await client.submit({**spec, "trainer": {"name": EXTERNAL}}, run_id)
    windows: list[DecodeWindow] = []
    firsts: list[FirstTokens] = []
    async with client.claim(run_id, holder="profile") as lease:
        await lease.publish(load_file(fleet.model / "model.safetensors"), step=0)
        await _installed(client, worker)
        # The first rollouts after a boot warm the engine up.
        for number, cell in enumerate((grid[0], *grid)):
            progress = await _observe(fleet, lease, worker, cell, f"c{number}")
            if number:
                windows += decode_windows(cell, progress.looks)
                firsts.append(_firsts(cell, progress.looks))
        await lease.finish()
    return EngineBlock(at_s=at_s, whole_core=whole_core, windows=windows, firsts=firsts)


async def _installed(client: Client, worker: str) -> None:
    async def has() -> bool:
        return any(one.worker_id == worker and one.installed for one in await client.workers())

    await wait_until(has, timeout=60, interval=0.05, what=f"the policy at {worker}")


async def _observe(fleet: BoundFleet, lease: Lease, worker: str, cell: GridCell, name: str) -> _Progress:
    """Has the cell generated, and looks at the ledger meanwhile."""
    wanted = {f"{name}.{number}" for number in range(cell.concurrency)}
    ledger, progress, began = fleet.ledger(worker), _Progress(), time.monotonic()
    await lease.submit_rollouts([_request(rollout_id, cell) for rollout_id in wanted])
    while True:
        made = {
            record.rollout_id: record.generated
            for record in (read_ledger(ledger, newest=4 * cell.concurrency) if ledger.exists() else ())
            if record.run_id == lease.run_id and record.rollout_id in wanted
        }
        now = time.monotonic() - began
        progress.looks.append((now, tuple(made.values())))
        if len(made) == cell.concurrency and min(made.values()) >= cell.length:
            break
        if now > _CELL_S:
            raise TimeoutError(f"{worker} made {sum(made.values())} tokens of {cell} in {now:.0f} s")
        await asyncio.sleep(_LOOK_S)
    await _acknowledge(lease, wanted)
    return progress


async def _acknowledge(lease: Lease, wanted: set[str]) -> None:
    """Waits until all have finished for the coordinator, too, and forgets them."""
    missing = set(wanted)
    async for finished in lease.finished():
        missing.discard(finished.rollout_id)
        if not missing:
            break
    await lease.acknowledge(wanted, drop_reason=_DROPPED)


def _request(rollout_id: str, cell: GridCell) -> RolloutRequest:
    """Makes prompts at random: none is found in the cache of another."""
    random = Random(rollout_id)
    return RolloutRequest(
        rollout_id=rollout_id,
        group_id=rollout_id,
        episode_id=rollout_id,
        prompt_ids=pack_ids([random.randrange(3, VOCABULARY) for _ in range(cell.prompt)]),
        sampling=Sampling(max_tokens=cell.length, ignore_eos=True),
    )


def _firsts(cell: GridCell, looks: Sequence[tuple[float, tuple[int, ...]]]) -> FirstTokens:
    return FirstTokens(
        concurrency=cell.concurrency,
        prompt=cell.prompt,
        first_s=next(at for at, made in looks if any(made)),
        all_s=next(at for at, made in looks if _all_begun(cell, made)),
    )


def _all_begun(cell: GridCell, made: Sequence[int]) -> bool:
    return len(made) == cell.concurrency and min(made) > 0


def decode_windows(cell: GridCell, looks: Sequence[tuple[float, tuple[int, ...]]]) -> list[DecodeWindow]:
    """Cuts the time in which all of the cell's rollouts decoded into windows of many steps."""
    steady = [(at, sum(made)) for at, made in looks if _all_begun(cell, made) and max(made) < cell.length]
    found: list[DecodeWindow] = []
    if not steady:
        return found
    begin, before = steady[0]
    for at, made in steady[1:]:
        if (steps := (made - before) / cell.concurrency) >= _WINDOW_STEPS:
            context = cell.concurrency * cell.prompt + (before + made) / 2
            found.append(DecodeWindow(batch=cell.concurrency, context=context, steps=steps, seconds=at - begin))
            begin, before = at, made
    return found
