"""One load of one trace, under all policies: the same arrivals, block by block, in an order that turns.

Invariant: a block that was measured is on disk before the next begins, under a name made of all that it depends on: a
benchmark that was interrupted goes on there.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
import msgspec

from benchmarks.pair.keeping import Keeping
from benchmarks.pair.plan import BLOCK_S, Scene, block_order
from benchmarks.pair.policies import OURS, Guard, Slo, guard
from benchmarks.pair.results.figures import TPOT_FACTOR, TTFT_FACTOR, Alone, Block, Cell, percentile
from benchmarks.pair.stack import MODEL, WORKER, Pair, installed, settle
from benchmarks.pair.stray import stray_process
from benchmarks.pair.traffic import Speeds
from benchmarks.pair.virtual.pair_costs_fit import StepSample
from ebbtide.demo.coserving.coserving_client import TrafficPlan, body, send
from ebbtide.demo.coserving.coserving_records import BudgetMoment, ServedAnswer
from ebbtide.demo.coserving.request_traffic import TrafficRequest
from ebbtide.grants import Page, page_path
from ebbtide.types.grants import GuardStatus

_LEAD_S: Final = 1.5
_SETTLE_S: Final = 1.0
_ROOT: Final = Path(__file__).parents[2]
#: How often a policy that aborts is asked whether it does.
_ABORT_S: Final = 0.25
#: How often the page is looked at for the picture.
_WATCH_S: Final = 0.05
#: Where nobody is held to one.
_ANY: Final = Slo(ttft_s=1.0, tpot_s=1.0)
#: Requests at once by which it is probed what a further one costs the others.
_TOGETHER: Final = 8


class Measuring:
    """Measures blocks, or finds them measured."""

    def __init__(
        self,
        pair: Pair,
        keeping: Keeping,
        speeds: Speeds,
        tell: Callable[[str], None],
        *,
        noise: bool = False,
        block_s: float = BLOCK_S,
    ) -> None:
        """`noise`: all but `alone` is measured beside a stray process."""
        self.pair, self._keeping, self._tell = pair, keeping, tell
        self._noise, self._block_s = noise, block_s
        self._tables = ",".join(map(str, (speeds.fixed_s, speeds.prompt_s, speeds.token_s, speeds.more_s)))

    async def scene(self, scene: Scene, policies: Sequence[str], extra: dict[str, str]) -> dict[str, Cell]:
        """All `policies` over `scene`: first `alone`, which says what the SLO is, then the others, `alone-again` among
        them, block by block. The order turns, and every other block has it backward: so none is always the last on a
        machine that becomes slower."""
        cells: dict[str, Cell] = {policy: Cell(policy=policy, blocks=[]) for policy in policies}
        blocks = scene.blocks(self._block_s)
        for number, block in enumerate(blocks):
            cells["alone"].blocks.append(await self._block(scene, number, block, "alone", _ANY, {}))
        slo = slo_of(cells["alone"])
        rest = [policy for policy in policies if policy != "alone"]
        for number, block in enumerate(blocks):
            for policy in block_order(rest, number):
                cells[policy].blocks.append(await self._block(scene, number, block, policy, slo, extra))
        return cells

    async def speed_alone(self, seconds: float) -> Alone:
        """The rollout engine by itself, once the policy is installed."""
        self.pair.pin(self.pair.cores)
        async with guard(self.pair, "rollouts", _ANY, self.pair.url("serving"), {}):
            await installed(self.pair)
            await self.pair.lent()
            await settle(3.0)
            moments: list[BudgetMoment] = []
            watching = asyncio.create_task(watch(self.pair, moments))
            before, start = sum(self.pair.generated().values()), time.monotonic()
            await settle(seconds)
            tokens, elapsed = sum(self.pair.generated().values()), time.monotonic() - start
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            steps, busy_s = moments[-1].steps - moments[0].steps, moments[-1].busy_s - moments[0].busy_s
            return Alone(
                tokens_per_s=(tokens - before) / elapsed, step_s=busy_s / max(1, steps), samples=samples(moments)
            )

    async def drain(self) -> None:
        """See all rollouts to their ends, so that the books can be closed."""
        async with guard(self.pair, "unguarded", _ANY, self.pair.url("serving"), {}):
            await self.pair.drained()

    async def block(
        self,
        scene: Scene,
        requests: list[TrafficRequest],
        policy: str,
        slo: Slo = _ANY,
        extra: dict[str, str] | None = None,
    ) -> Block:
        """One block by itself."""
        return await self._block(scene, 0, requests, policy, slo, extra or {})

    async def _block(
        self, scene: Scene, number: int, requests: list[TrafficRequest], policy: str, slo: Slo, extra: dict[str, str]
    ) -> Block:
        arrivals = [(one.at, one.prompt, one.output) for one in requests]
        flags = sorted(extra.items()) if policy.partition(":")[0] in OURS else []
        name, told = f"{scene.name}-{policy}-{number}", [arrivals, slo.ttft_s, slo.tpot_s, flags, self._tables]
        noisy = self._noise and policy != "alone"
        if noisy:
            name, told = f"{name}-noise", [*told, "noise", number]
        if (block := self._keeping.block(name, told)) is not None:
            return block
        async with AsyncExitStack() as stack:
            stray = await stack.enter_async_context(stray_process(self.pair.directory, number)) if noisy else None
            block = await self._measure(requests, policy, slo, extra)
            block.stray = stray.share if stray else 0.0
        self._keeping.keep_block(name, told, block)
        good = [one for one in block.answers if not one.failed]
        p99 = percentile(Cell(policy=policy, blocks=[block]).ttft, 99) * 1e3
        self._tell(
            f"{scene.name} block {number + 1}, {policy}: {len(good)} answers in {block.seconds:.0f} s, "
            f"p99 TTFT {p99:.0f} ms, {(block.harvested - block.wasted) / block.seconds:.0f} rollout tokens/s"
        )
        return block

    async def _measure(self, requests: list[TrafficRequest], policy: str, slo: Slo, extra: dict[str, str]) -> Block:
        pair, split = self.pair, policy == "split"
        first, *others = sorted(pair.cores)
        upstream = await pair.serve("split", 1, {first}) if split else await pair.serve("serving", 2)
        pair.pin(set(others) or pair.cores if split else pair.cores)
        async with guard(pair, policy, slo, upstream, extra, self._tables) as made:
            if not policy.startswith("alone"):
                await pair.lent()
            await settle(_SETTLE_S)
            moments: list[BudgetMoment] = []
            beside = [asyncio.create_task(watch(pair, moments))]
            if policy.startswith("rose"):
                beside.append(asyncio.create_task(abort(pair, made)))
            try:
                block = await self._replayed(made, requests, policy)
                status = await made.status()
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
        pair.feed.check()
        block.reclaims, block.status, block.moments = _reclaims(status), msgspec.to_builtins(status), moments
        return block

    async def _replayed(self, made: Guard, requests: list[TrafficRequest], policy: str) -> Block:
        """What was answered and harvested, from second 0 of the requests to their last token."""
        pair, aborted = self.pair, set(self.pair.feed.aborted)
        starts = time.monotonic() + _LEAD_S
        replaying = asyncio.create_task(self._replay(made.url, TrafficPlan(starts=starts, requests=requests)))
        try:
            await asyncio.sleep(starts - time.monotonic())
            before = pair.generated()
            answers = await replaying
        finally:
            replaying.cancel()
        seconds, after = time.monotonic() - starts, pair.generated()
        gone = pair.feed.aborted - aborted
        return Block(
            policy=policy,
            seconds=seconds,
            answers=answers,
            harvested=sum(after.values()) - sum(before.values()),
            wasted=sum(after.get(name, 0) - before.get(name, 0) for name in gone),
            again=sum(after.get(name, 0) for name in gone),
        )

    async def _replay(self, url: str, plan: TrafficPlan) -> list[ServedAnswer]:
        files = self.pair.directory / "plan.json", self.pair.directory / "answers.json"
        files[0].write_bytes(msgspec.json.encode(plan))
        command = [sys.executable, "-m", "ebbtide.demo.coserving.coserving_client", "--url", url, "--model", MODEL]
        command += [
            "--plan",
            str(files[0]),
            "--out",
            str(files[1]),
            "--seed",
            str(time.time_ns()),
        ]  # new prompts: none is to be found in a cache
        process = await asyncio.create_subprocess_exec(*command, cwd=_ROOT)
        try:
            if await process.wait():
                raise RuntimeError("the replaying client failed")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return msgspec.json.decode(files[1].read_bytes(), type=list[ServedAnswer])


async def probe(url: str) -> Speeds:
    """How fast the engine is alone: medians of a few requests of each length, one after the other."""
    random = Random(time.time_ns())

    async def one(session: aiohttp.ClientSession, prompt: int, output: int) -> tuple[float, float]:
        start = time.monotonic()
        first, last = await send(session, url, body(MODEL, TrafficRequest(0.0, prompt, output), random))
        return first - start, (last - first) / (output - 1)

    async with aiohttp.ClientSession() as session:
        await one(session, 256, 8)
        found = {size: [await one(session, size, 24) for _ in range(5)] for size in (64, 512)}
        many = await asyncio.gather(*(one(session, 64, 96) for _ in range(_TOGETHER)))
    short, long = (statistics.median(ttft for ttft, _ in found[size]) for size in found)
    prompt_s = (long - short) / (512 - 64)
    token_s = statistics.median(tpot for tpots in found.values() for _, tpot in tpots)
    together_s = statistics.median(tpot for _, tpot in many)
    return Speeds(
        fixed_s=max(1e-3, short - 64 * prompt_s),
        prompt_s=prompt_s,
        token_s=token_s,
        more_s=max(0.0, together_s - token_s) / (_TOGETHER - 1),
    )


def slo_of(alone: Cell) -> Slo:
    """ROSE's own multiples of the p99 alone."""
    return Slo(ttft_s=TTFT_FACTOR * percentile(alone.ttft, 99), tpot_s=TPOT_FACTOR * percentile(alone.tpot, 99))


async def watch(pair: Pair, moments: list[BudgetMoment]) -> None:
    """Note what the rollouts may take and took, until cancelled."""
    page = Page(page_path(pair.grants, WORKER))
    try:
        while True:
            steps, offered = page.steps(), page.budget()
            moments.append(
                BudgetMoment(
                    at_s=time.monotonic(),
                    tokens=offered.tokens,
                    sequences=offered.sequences,
                    generated=steps.scheduled,
                    busy_s=steps.busy_s,
                    steps=steps.steps,
                )
            )
            await asyncio.sleep(_WATCH_S)
    finally:
        page.close()


def samples(moments: Sequence[BudgetMoment]) -> list[StepSample]:
    """What the engine did between two moments."""
    return [
        StepSample(after.steps - before.steps, after.generated - before.generated, after.busy_s - before.busy_s)
        for before, after in pairwise(moments)
    ]


async def abort(pair: Pair, made: Guard) -> None:
    """ROSE's victims: when its budget was cut, whole rollouts go, fewest tokens first, until the rest fits."""
    used, cut = 0, False
    while True:
        found: Any = (await made.status()).borrowers
        now_cut = bool(found) and found[0].memory == "cut"
        if now_cut and not cut and used > found[0].kv_bytes:
            made_by = pair.generated()
            running = sorted((name for name in pair.feed.open if made_by.get(name)), key=lambda name: made_by[name])
            await pair.feed.give_up(running[: round((1 - found[0].kv_bytes / used) * len(running))])
        if found and not now_cut:
            used = found[0].kv_bytes_used
        cut = now_cut
        await asyncio.sleep(_ABORT_S)


def _reclaims(status: GuardStatus) -> tuple[float, float, int]:
    for one in status.borrowers:
        return one.reclaim_p50_s, one.reclaim_p99_s, one.reclaims
    return 0.0, 0.0, 0
