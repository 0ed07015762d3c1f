"""What a real engine still has of two texts after a third one needed room, as JSON on stdout: run in a process of its
own, for the engine's processes are forked from it.

Arguments: the checkpoint. The later text has ended, in the first of two rounds; the cache holds both, and not three.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import Sequence

from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.settings import VllmSettings

#: 1 MiB is 32 blocks of 32 tokens of this network.
SETTINGS = VllmSettings(
    dtype="float32", max_model_len=640, enforce_eager=True, threads=1, kv_cache_mib=1, engine_args='{"block_size": 32}'
)
TEXT, LONG = 320, 544


async def cached(engine: VllmEngine, name: str, ids: Sequence[int]) -> int:
    """Have a text of one round read, and return how many of its tokens the engine had."""
    request = EngineRequest(
        request_id=uuid.uuid4().hex, cache_name=name, token_ids=ids, temperature=0.0,
        top_p=1.0, top_k=0, max_tokens=1, min_tokens=0, stop_token_ids=(),
    )  # fmt: skip
    (delta,) = [delta async for delta in engine.generate(request)]
    return delta.cached


async def round_of(engine: VllmEngine, number: int, *, ends: bool) -> dict[str, int]:
    waiting, ended, filling = (
        [1 + (place * step + number) % 120 for place in range(length)]
        for step, length in ((7, TEXT), (11, TEXT), (13, LONG))
    )
    await cached(engine, f"waiting{number}", waiting)
    await cached(engine, f"ended{number}", ended)
    if ends:
        engine.forget([f"ended{number}", "unknown"])
    await cached(engine, f"filling{number}", filling)
    return {"waiting": await cached(engine, f"waiting{number}", waiting)}


async def main(checkpoint: str) -> None:
    engine = VllmEngine(checkpoint, 4, SETTINGS)
    try:
        await engine.start()
        facts = {"told": await round_of(engine, 1, ends=True), "untold": await round_of(engine, 2, ends=False)}
        print(json.dumps(facts))  # noqa: T201 - the test reads it
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
