"""Engines on a device that belongs to somebody else: how soon they stop, what they give back, and a trainer that lends
its device to one between its steps.
"""

import asyncio
import random
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from msgspec.structs import replace

from benchmarks.gpu_parts.engines import Facts, apart, booted, checkpoint_for, rounding, settings, shape_of, told
from benchmarks.gpu_parts.harness import PartRun
from benchmarks.gpu_parts.shapes import QWEN3_600M, Shape, prompts
from ebbtide.gpu_memory import Device, open_device
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, free_address, local_cluster
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.guard_link import WeightSleep
from ebbtide.types.grants import Budget, Residency
from ebbtide.types.run import RunStatus
from tests.e2e.borrowed_facts import Watched
from tests.e2e.kv_budget_facts import Keeper, Mirror
from tests.e2e.test_generating_trainer import ENVIRONMENT, spec_of, status

_STEP_TOKENS: Final = 256
_SLOTS: Final = 64
_KV_MIB: Final = 4096
_RECLAIMS: Final = 50
_CUTS: Final = 12
_EVER: Final = 1e9
#: NVML's reading is used for so long.
_FRESH_S: Final = 0.15
_STEPS: Final = 5
#: The guard's word for the time in which the trainer has its device.
_HELD: Final = "held"


def borrowed(run: PartRun) -> None:
    """A borrowed engine under its guard's page: reclaims, cuts of its cache, and both levels of sleep."""
    shape = shape_of(run, QWEN3_600M)
    model = checkpoint_for(run, shape)
    asyncio.run(_borrowed(run, model, shape))


async def _borrowed(run: PartRun, model: Path, shape: Shape) -> None:
    page = BorrowedEngine(run.folder / "worker.page", _STEP_TOKENS)
    chosen = settings(run, kv_cache_mib=_KV_MIB) if run.on_gpu and not run.small else settings(run)
    slots = 16 if run.small else _SLOTS
    async with booted(model, slots, chosen, page) as (engine, seconds):
        run.tell(boot_s=seconds, **await told(engine))
        watched, keeper = Watched(engine, page.page), Keeper(page)
        page.page.renew(_EVER)
        run.tell(reclaims=await reclaims(watched, prompts(slots, 24, shape)))
        keeper.grant(tokens=_STEP_TOKENS)
        whole = await _all(watched, shape)
        run.tell(cuts=await cuts(run, watched, keeper, shape, whole))
        device = open_device(page.device) if run.on_gpu else None
        slept = list[Facts]()
        for level in (Residency.HOST, Residency.AWAY):
            slept.append(await _sleep(run, engine, watched, level, device, model, shape, whole))
            run.tell(weights_bytes=page.weights_bytes, sleeps=slept)


async def reclaims(watched: Watched, given: list[list[int]]) -> Facts:
    """How long after a budget was taken away the last step ended, in seconds and in mean steps."""
    tasks = watched.ask(given, max_tokens=600)
    await watched.queued(len(given))
    before, took, late = watched.page.steps(), list[float](), list[float]()
    for _ in range(_RECLAIMS):
        watched.page.write_budget(Budget(_STEP_TOKENS, len(given), _EVER))
        await watched.steps(2)
        ended, began = await watched.reclaim()
        took.append(ended)
        late.append(began)
    steps = watched.page.steps()
    step_s = (steps.busy_s - before.busy_s) / max(1, steps.steps - before.steps)
    watched.page.write_budget(Budget(_STEP_TOKENS, len(given), _EVER))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    took.sort()
    if max(late) > 0:
        raise ValueError("a step began after its budget was taken away")
    p99 = took[int(0.99 * len(took))]
    return {"step_s": step_s, "p50_s": median(took), "p99_s": p99, "p99_steps": p99 / step_s}


async def cuts(run: PartRun, watched: Watched, keeper: Keeper, shape: Shape, whole: list[Facts]) -> Facts:
    """Cuts of the cache at random moments: seconds until they were obeyed. Raises `ValueError` if a step used more than
    it was left, or if what came out is not what comes out without cuts."""
    running, chosen, took, over = asyncio.create_task(_all(watched, shape)), random.Random(1), list[float](), 0
    await watched.steps(4)
    used = max(4, watched.page.steps().kv_used)
    while not running.done() and len(took) < _CUTS:
        took.append(await keeper.cut(chosen.randrange(used)))
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            over += keeper.over
            await asyncio.sleep(0.002)
        keeper.page.limit_kv(-1)
        await watched.steps(2) if not running.done() else None
    keeper.page.limit_kv(-1)
    if over or (different := apart(whole, await running, rounding(run))):
        raise ValueError(
            f"{over} steps used more than they were left" if over else f"cuts changed answers: {different[:3]}"
        )
    return {"cuts": len(took), "mean_s": mean(took), "longest_s": max(took)}


async def _all(watched: Watched, shape: Shape) -> list[Facts]:
    return await watched.asker.ask_all(prompts(8, 24, shape), max_tokens=200)


async def _sleep(
    run: PartRun,
    engine: VllmEngine,
    watched: Watched,
    level: Residency,
    device: Device | None,
    model: Path,
    shape: Shape,
    whole: list[Facts],
) -> Facts:
    """Down and up again with requests under way: bytes of the device, seconds, and whether answers stay the same."""
    mirror: Any = Mirror(engine, model / "model.safetensors")
    sleeping = WeightSleep(engine, mirror)
    running = asyncio.create_task(_all(watched, shape))
    await watched.steps(4)
    free = await _free(device)
    down_s = await _timed(sleeping.be(level))
    asleep = await _free(device)
    up_s = await _timed(sleeping.be(Residency.AWAKE))
    answers = await running
    later, within = await _all(watched, shape), rounding(run)
    if different := [*apart(whole, answers, within), *apart(whole, later, within)]:
        raise ValueError(f"sleep changed answers: {different[:3]}")
    freed = None if free is None or asleep is None else asleep - free
    return {"level": level.name.lower(), "down_s": down_s, "up_s": up_s, "freed_bytes": freed}


async def _free(device: Device | None) -> int | None:
    if device is None:
        return None
    await asyncio.sleep(_FRESH_S)
    return device.memory()[0]


async def _timed(work: Any) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


def lending(run: PartRun) -> None:
    """A trainer and the engine that borrows its card between steps, five steps; the engine is killed once while the
    trainer has the card, and must boot beside it. Raises `ValueError` if the run does not end well."""
    shape = shape_of(run, QWEN3_600M)
    asyncio.run(_lending(run, checkpoint_for(run, shape)))


async def _lending(run: PartRun, model: Path) -> None:
    from ebbtide.client import Client

    address, relay = free_address(), free_address()
    async with local_cluster(run.folder / "cluster", print) as cluster:
        shape = ClusterShape(
            model=model,
            workers=0,
            slots=16,
            coordinator=address,
            relay=relay,
            generate=True,
            environments=(ENVIRONMENT,),
        )
        began = time.monotonic()
        await cluster.boot(shape)
        run.tell(boot_s=time.monotonic() - began)
        async with Client(address, relay, token=cluster.token_file.read_text()) as client:
            spec = spec_of(model, run.folder / "output", _STEPS)
            spec = replace(spec, trainer=replace(spec.trainer, checkpoint_every=_STEPS))
            run_id = (await client.submit(spec, "lending")).run_id
            killing = asyncio.create_task(_kill_while_held(cluster))
            try:
                events = [event async for event in client.watch(run_id)]
            finally:
                killing.cancel()
            found = await client.run(run_id)
        device = await status(cluster)
        steps = [event.values for event in events if event.kind == "step"]
        killed = killing.done() and not killing.cancelled()
        run.tell(steps=steps, killed=killed, take_backs=device.take_backs, lent_s=device.lent_s, held_s=device.held_s)
        if found.status is not RunStatus.FINISHED or len(steps) < _STEPS or not killed:
            raise ValueError(f"the run is {found.status} after {len(steps)} steps (killed: {killed}): {found.message}")


async def _kill_while_held(cluster: LocalCluster) -> None:
    """Kills the engine's worker at the first moment after a loan at which the trainer has its card."""
    found = await status(cluster)
    while not (found.take_backs > 0 and found.state == _HELD):
        await asyncio.sleep(0.02)
        found = await status(cluster)
    cluster.launcher.crash(cluster.workers[0])
