"""What thousands of open streams, and a thousand completions of one key, do to a gateway's other calls.

Each figure compares blocks that took turns in the same run, so what else the machine does lengthens both.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.gateway.stream_plan import StreamPlan
from benchmarks.gateway.stream_town import RUN_ID, StreamTown
from benchmarks.gateway.unary_calls import Times, joined, unary_figures, unary_times, worst
from tests.chaos.cluster import Cluster

Notify = Callable[[str], None]
_NAMED: Final = 5


async def measure_streams(plan: StreamPlan, notify: Notify) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ebb-streams-") as directory:
        cluster = Cluster(Path(directory))
        cluster.patience_s = 300.0
        try:
            async with StreamTown.running(cluster, plan) as town:
                notify("the gateway has its parsers and the run's model")
                part = _StreamsPart(town, plan, notify)
                many = await part.many_streams()
                one = await part.one_key()
                greedy = await part.greedy_key()
        finally:
            await cluster.close()
    return {
        "streams_callback_max_ms": many["callback_max_ms"],
        "streams_unary_p99_over_few": worst(many["unary"], "p99_over"),
        "one_key_callback_max_ms": one["callback_max_ms"],
        "one_key_unary_p99_over_few": worst(one["unary"], "p99_over"),
        "greedy_key_other_p50_over_alone": worst(greedy["unary"], "p50_over"),
        "greedy_key_other_p99_over_alone": worst(greedy["unary"], "p99_over"),
        "many_streams": many,
        "one_key": one,
        "greedy_key": greedy,
    }


class _StreamsPart:
    """The first streams, `plan.few` of them, stay open all the time."""

    def __init__(self, town: StreamTown, plan: StreamPlan, notify: Notify) -> None:
        self._town, self._plan, self._notify = town, plan, notify

    async def many_streams(self) -> dict[str, Any]:
        """`plan.many` streams, of all keys alike."""
        plan, keys = self._plan, list(self._town.keys)
        await self._open(keys, plan.few // plan.keys, plan.few)
        return await self._in_turn("many streams", keys, (plan.many - plan.few) // plan.keys)

    async def one_key(self) -> dict[str, Any]:
        """As many streams of one key as its limit lets in, of `plan.one_key`. Those of the few are none of its own."""
        key, plan = self._town.other_key, self._plan
        return await self._in_turn("streams of one key", [key], plan.one_key, caller=self._town.keys[0])

    async def greedy_key(self) -> dict[str, Any]:
        """One key asks for many completions at once, again and again."""
        plan, key = self._plan, self._town.keys[0]
        blocks: dict[str, list[Times]] = {"alone": [], "beside": []}
        loops, seen = [], []
        await self._town.clients("close", keep=0)
        for _ in range(plan.rounds):
            blocks["alone"].append(await self._times())
            asked = {"requests": plan.greedy, "completions": plan.completions, "tokens": plan.greedy_tokens}
            await self._town.clients("greedy", key=key, **asked)
            await asyncio.sleep(self._plan.settle_s)
            times, loop, found = await self._watched()
            await self._town.clients("greedy", key=key, **(asked | {"requests": 0}))
            await asyncio.sleep(self._plan.settle_s)
            blocks["beside"].append(times)
            loops.append(loop)
            seen.append(found)
            self._notify(f"greedy key: {found}, longest {loop['longest'][:2]}")
        return {
            "unary": unary_figures(joined(blocks["alone"]), joined(blocks["beside"])),
            "callback_max_ms": max(one["callbacks"]["max_ms"] for one in loops),
            "blocks": seen,
            "longest": [one["longest"][:_NAMED] for one in loops],
        }

    async def _in_turn(self, name: str, keys: list[str], streams: int, caller: str = "") -> dict[str, Any]:
        """Blocks with the few, and with so many more of each key. All callbacks from the first opening on count."""
        few, many, loops, seen, refused = list[Times](), list[Times](), [], [], dict[str, int]()
        for _ in range(self._plan.rounds):
            few.append(await self._times(caller))
            await self._town.loop()
            opened = await self._open(keys, streams, streams * len(keys))
            refused |= opened["refused"]
            loops.append(opening := await self._town.loop())
            self._notify(f"{name}: {opened}, longest {opening['longest'][:2]}")
            await asyncio.sleep(self._plan.settle_s)
            times, loop, found = await self._watched(caller)
            many.append(times)
            await self._town.clients("close", keep=self._plan.few)
            await asyncio.sleep(self._plan.settle_s)
            loops += [loop, leaving := await self._town.loop()]
            seen.append(found | {"opening_s": opened["seconds"]})
            self._notify(f"{name}: {found}, longest {loop['longest'][:2]}; leaving {leaving['longest'][:2]}")
        return {
            "unary": unary_figures(joined(few), joined(many)),
            "callback_max_ms": max(one["callbacks"]["max_ms"] for one in loops),
            "callback_max_open_ms": max(one["callbacks"]["max_ms"] for one in loops[1::3]),
            "refused": refused,
            "blocks": seen,
            "longest": [one["longest"][:_NAMED] for one in loops],
        }

    async def _open(self, keys: list[str], streams: int, wanted: int) -> dict[str, Any]:
        opened = await self._town.clients("open", keys=keys, streams=streams)
        if opened["open"] + sum(opened["refused"].values()) != wanted or not opened["open"]:
            raise RuntimeError(f"of {wanted} streams {opened['open']} were opened: {opened['refused']}")
        return opened

    async def _times(self, caller: str = "") -> Times:
        key = caller or self._town.other_key
        return await unary_times(self._town.gateway, RUN_ID, key, self._plan.block_s)

    async def _watched(self, caller: str = "") -> tuple[Times, dict[str, Any], dict[str, Any]]:
        """The times of a block, what the gateway's loop did, and what the streams' clients saw."""
        await self._town.clients("measure")
        await self._town.loop()
        before = self._town.cpu()
        times = await self._times(caller)
        loop, found = await self._town.loop(), await self._town.clients("measure")
        shares = {name: round((now - before[name]) / loop["seconds"], 3) for name, now in self._town.cpu().items()}
        return times, loop, found | {"cpu_shares": shares | {"clients": found.pop("cpu_share")}}
