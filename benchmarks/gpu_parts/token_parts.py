"""How many tokens a second one worker's process brings through: vLLM alone, Ebbtide's engine, and a whole worker whose
tokens a coordinator stores. Where the device makes more than one Python thread handles, the last ones are lower.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_parts.engines import Facts, booted, checkpoint_for, settings, shape_of
from benchmarks.gpu_parts.harness import PartRun
from benchmarks.gpu_parts.shapes import QWEN3_600M, Shape, prompts
from ebbtide.client import Client, Lease
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids
from tests.chaos.cluster import Cluster
from tests.e2e.engine_facts import Asker

#: Sequences at once; tokens of each.
AT_ONCE: Final = (256, 512)
_SMALL_AT_ONCE: Final = (8, 16)
_LENGTH, _SMALL_LENGTH = 256, 64
_PROMPT: Final = 32
#: The event loop is asked so often whether it is on time.
_PROBE_S: Final = 0.01
_RUN: Final = "tokens"
_THROTTLED: Final = "ebbtide_worker_throttled_seconds_total"


def tokens(run: PartRun) -> None:
    """Tokens a second at each number of sequences, of one engine and of one worker that could hold the most of them."""
    shape, length = shape_of(run, QWEN3_600M), _SMALL_LENGTH if run.small else _LENGTH
    model, counts = checkpoint_for(run, shape), _SMALL_AT_ONCE if run.small else AT_ONCE
    asyncio.run(_by_engine(run, model, shape, counts, length))
    asyncio.run(_by_worker(run, model, shape, counts, length))


async def _by_engine(run: PartRun, model: Path, shape: Shape, counts: Sequence[int], length: int) -> None:
    async with booted(model, max(counts), settings(run)) as (engine, _):
        asker, vllm, ours = Asker(engine), dict[str, Facts](), dict[str, Facts]()
        for count in counts:
            given = prompts(count, _PROMPT, shape)
            await asker.ask_all(given, max_tokens=8)  # the first batch of a size is slower
            alone = _vllm_alone(engine, given, length)
            vllm[str(count)] = await _measured(alone, count * length)
            wanted = asker.ask_all(given, max_tokens=length, temperature=1.0)
            ours[str(count)] = await _measured(wanted, count * length)
            run.tell(tokens_each=length, vllm=vllm, engine=ours)


async def _vllm_alone(engine: VllmEngine, given: list[list[int]], length: int) -> list[Any]:
    """What vLLM's own offline use does: each request's output once, at its end."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    wanted = SamplingParams(
        max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def one(number: int, ids: list[int]) -> Any:
        last: Any = None
        async for output in engine._llm.generate(tokens_input(ids), wanted, f"alone{len(given)}-{number}"):  # noqa: SLF001
            last = output
        return last

    return await asyncio.gather(*(one(number, ids) for number, ids in enumerate(given)))


async def _measured(work: Awaitable[object], made: int) -> Facts:
    """Tokens a second, and how late the event loop was."""
    late = list[float]()

    async def probe() -> None:
        while True:
            asked = time.monotonic()
            await asyncio.sleep(_PROBE_S)
            late.append(time.monotonic() - asked - _PROBE_S)

    probing = asyncio.create_task(probe())
    began, used = time.monotonic(), time.process_time()
    await work
    took = time.monotonic() - began
    probing.cancel()
    late.sort()
    return {
        "tokens_per_s": made / took,
        "processor_share": (time.process_time() - used) / took,
        "loop_late_p99_ms": 1e3 * late[int(0.99 * len(late))] if late else None,
    }


@asynccontextmanager
async def _worker(run: PartRun, model: Path, slots: int) -> AsyncIterator[tuple[Cluster, Client]]:
    """A worker of so many slots beside a coordinator that stores what it sends."""
    folder = run.folder / "cluster"
    folder.mkdir()
    cluster = Cluster(folder)
    try:
        client = await cluster.boot(workers=0)
        chosen = settings(run)
        flags: dict[str, Any] = {"vllm_dtype": chosen.dtype, "vllm_max_model_len": chosen.max_model_len}
        flags |= {"vllm_enforce_eager": True, "vllm_threads": 1} if chosen.enforce_eager else {}
        flags |= {"vllm_kv_cache_mib": chosen.kv_cache_mib} if chosen.kv_cache_mib else {}
        flags |= {"flush_tokens": 32, "flush_interval_ms": 250, "metrics_port": 0}  # the default windows
        await cluster.worker("w1", engine="vllm", model=model, slots=slots, boot_s=240.0, **flags)
        yield cluster, client
    finally:
        await cluster.close()


async def _by_worker(run: PartRun, model: Path, shape: Shape, counts: Sequence[int], length: int) -> None:
    from safetensors.torch import load_file

    found = dict[str, Facts]()
    async with _worker(run, model, max(counts)) as (cluster, client):
        spec = {"name": _RUN, "model": str(model), "environment": {"name": "none"}, "trainer": {"name": "external"}}
        await client.submit(spec, _RUN)
        async with client.claim(_RUN) as lease:
            await lease.publish(load_file(model / "model.safetensors"), step=0)
            for count in counts:
                given = prompts(count, _PROMPT, shape)
                await _finished(lease, [_request(f"warm{count}", at, ids, 8) for at, ids in enumerate(given)])
                throttled = _metric(cluster, _THROTTLED)
                took = await _finished(lease, [_request(f"r{count}", at, ids, length) for at, ids in enumerate(given)])
                waited = _metric(cluster, _THROTTLED) - throttled
                found[str(count)] = {"tokens_per_s": count * length / took, "seconds": took, "throttled_s": waited}
                run.tell(worker=found)


def _request(name: str, number: int, ids: list[int], length: int) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=f"{name}-{number}",
        group_id=f"{name}-{number}",
        episode_id=f"{name}-{number}",
        prompt_ids=pack_ids(ids),
        sampling=Sampling(temperature=1.0, max_tokens=length, ignore_eos=True),
    )


async def _finished(lease: Lease, asked: list[RolloutRequest]) -> float:
    """Seconds until all are there. They are deleted then."""
    began, waiting = time.monotonic(), {one.rollout_id for one in asked}
    await lease.submit_rollouts(asked)
    async for finish in lease.finished():
        waiting.discard(finish.rollout_id)
        if not waiting:
            break
    took = time.monotonic() - began
    await lease.acknowledge(one.rollout_id for one in asked)
    return took


def _metric(cluster: Cluster, name: str) -> float:
    """A counter of the worker's, summed over its labels."""
    port = json.loads((cluster.directory / "w1.json").read_text())["metrics"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
