"""What an engine of several ranks, or on a GPU, did with versions that came with their changes, as JSON on stdout.

Arguments: the checkpoint to boot from, another one, the changes from the first to it, and the ranks of the engine.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from ebbtide.errors import EbbtideError
from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.engine.vllm import cpu_build
from ebbtide.rollout_worker.engine.vllm.version_updates import ask_ranks
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.settings import VllmSettings

Facts = dict[str, Any]


async def ask(engine: VllmEngine, number: int) -> Facts:
    request = EngineRequest(
        request_id=f"r{number}",
        token_ids=[20, 21, 22, 23],
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        max_tokens=16,
        min_tokens=0,
        stop_token_ids=(),
    )
    out: Facts = {"ids": [], "logprobs": []}
    async for delta in engine.generate(request):
        out["ids"] += delta.ids
        out["logprobs"] += delta.logprobs
    return out


async def forced(engine: VllmEngine, weights: Path, changes: Path) -> str:
    """What is said of changes that are applied although layers are packed, which fails while writing."""
    engine._updates._obstacles = [""]
    try:
        await engine.install(4, weights, changes)
    except EbbtideError as error:
        return type(error).__name__
    return ""


async def main(first: str, second: str, changes: str, ranks: str) -> None:
    settings = VllmSettings(
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        threads=1,
        kv_cache_mib=64,
        tensor_parallel_size=int(ranks),
    )
    engine = VllmEngine(first, 4, settings)
    try:
        await engine.start()
        reports = await ask_ranks(engine._llm, "report")
        facts: Facts = {"boxes": engine.boxes, "reports": reports, "base": await ask(engine, 0)}
        other = Path(second) / "model.safetensors"
        await engine.install(1, other, Path(changes))
        facts["changed"] = await ask(engine, 1)
        await engine.install(2, Path(first) / "model.safetensors")
        facts["back"] = await ask(engine, 2)
        await engine.install(3, other)
        facts["reloaded"] = await ask(engine, 3)
        if cpu_build.is_cpu_build():
            facts["forced"] = await forced(engine, Path(first) / "model.safetensors", Path(changes))
        print(json.dumps(facts))  # noqa: T201 - the test reads it
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
