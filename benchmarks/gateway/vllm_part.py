"""Part `vllm`: times and processor time of the gateway beside those of vLLM's own OpenAI server."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

from benchmarks.control_plane.measures import cpu_s
from benchmarks.gateway.disturbed_fleet import Notify
from benchmarks.gateway.gateway_plan import AT_ONCE, GatewayPlan
from benchmarks.gateway.stream_timing import block_figures, timed_stream
from benchmarks.gateway.vllm_beside import VOCABULARY, TimedServer, checkpoint, gateway_server, vllm_server
from benchmarks.real_time import real_time
from tests.chaos.cluster import Cluster

#: Events of vLLM's server while processor time is measured; its default is one a token.
_STREAM_INTERVAL: Final = 8
#: Requests before anything is measured: code is imported and kernels are prepared by the first ones.
_WARM: Final = 3

Block = dict[str, float]


async def measure_beside_vllm(plan: GatewayPlan, seed: int, notify: Notify) -> dict[str, Any]:
    """Latencies in alternating blocks of single requests, then processor time per request of many at once.

    All programs are in a real-time class where that is permitted: another program's work would count as a server's.
    """
    random = Random(seed)
    with tempfile.TemporaryDirectory(prefix="ebb-beside-") as name, real_time() as permitted:
        directory = Path(name)
        model = await asyncio.to_thread(checkpoint, directory)
        cluster = Cluster(directory)
        try:
            async with gateway_server(cluster, model) as ours:
                notify("the gateway's worker has its weights")
                async with vllm_server(directory, model, stream_interval=1) as theirs:
                    blocks = [await _pair(ours, theirs, number, plan, random) for number in range(plan.pairs)]
                notify(f"{plan.pairs} pairs of blocks")
                async with vllm_server(directory, model, stream_interval=_STREAM_INTERVAL) as theirs:
                    used = await _cpu(ours, theirs, plan, random)
        finally:
            await cluster.close()
    return latency_figures(blocks) | used | {"blocks": blocks, "real_time": permitted}


def latency_figures(blocks: Sequence[tuple[Block, Block]]) -> dict[str, float]:
    """Medians over pairs of blocks (ours, theirs)."""

    def over(name: str) -> float:
        return round(median(ours[name] - theirs[name] for ours, theirs in blocks), 3)

    return {
        "ttft_overhead_p50_ms": over("ttft_p50_ms"),
        "ttft_overhead_p99_ms": over("ttft_p99_ms"),
        "tpot_over_vllm": round(median(ours["tpot_ms"] / theirs["tpot_ms"] for ours, theirs in blocks), 4),
        "gap_overhead_p99_ms": over("gap_p99_ms"),
    }


async def _pair(
    ours: TimedServer, theirs: TimedServer, number: int, plan: GatewayPlan, random: Random
) -> tuple[Block, Block]:
    """One block at each server. Which one is first alternates, so that a drift of the machine cancels."""
    if number == 0:
        for server in (ours, theirs):
            await _one_by_one(server, _WARM, random)
    if number % 2:
        second = await _one_by_one(theirs, plan.requests, random)
        return await _one_by_one(ours, plan.requests, random), second
    return await _one_by_one(ours, plan.requests, random), await _one_by_one(theirs, plan.requests, random)


async def _one_by_one(server: TimedServer, count: int, random: Random) -> Block:
    return block_figures([await timed_stream(server.client, server.model, random, VOCABULARY) for _ in range(count)])


async def _cpu(ours: TimedServer, theirs: TimedServer, plan: GatewayPlan, random: Random) -> dict[str, float]:
    used = {ours.pid: 0.0, theirs.pid: 0.0}
    for number in range(plan.rounds + 1):
        for server in (ours, theirs) if number % 2 else (theirs, ours):
            before = cpu_s(server.pid)
            await _at_once(server, random)
            used[server.pid] += cpu_s(server.pid) - before if number else 0.0  # the first round warms up
    requests = plan.rounds * AT_ONCE
    return {
        "gateway_cpu_over_vllm": round(used[ours.pid] / used[theirs.pid], 3),
        "gateway_cpu_ms_per_request": round(used[ours.pid] / requests * 1e3, 3),
        "vllm_cpu_ms_per_request": round(used[theirs.pid] / requests * 1e3, 3),
    }


async def _at_once(server: TimedServer, random: Random) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(timed_stream(server.client, server.model, random, VOCABULARY))
