"""Responses sampled at temperature 1 by a real engine, as JSON on stdout: whole ones, ones that are cut and go on again
and again, and cut ones that may not end within `MIN_TOKENS`. Run in a process of its own: the engine's processes are
forked from it.

Arguments: the checkpoint, how many responses of each kind, their length, and `vllm.speculation`. With drafts, all
responses are one group's.
"""

import asyncio
import json
import sys
from contextlib import aclosing
from random import Random
from typing import Any, Final

import msgspec

from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.generation.generation import Assignment, Generation
from ebbtide.rollout_worker.settings import VllmSettings
from ebbtide.types.fleet import AttemptRef, EngineInfo
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids, unpack_tokens

SETTINGS: Final = VllmSettings(dtype="float32", max_model_len=128, enforce_eager=True, threads=1, kv_cache_mib=64)
PROMPT: Final = [3, 1, 4, 1, 5]
#: No response of the last kind samples the end token before this many others; it is a likely one.
MIN_TOKENS: Final = 24
END: Final = 2
_HELD: Final = 64
#: As requests of one session may be sampled. Engines that draft tokens take no `min_p`.
WAYS: Final = [
    {"temperature": 0.5 + 0.1 * number, "top_k": number % 3 * 3, "top_p": 1.0 - 0.04 * number, **min_p}
    for number in range(10)
    for min_p in ({}, {"min_p": 0.02 * (number + 1)})
]
_AT_ONCE: Final = 64
#: Tokens of an attempt before it is cut, on average; of its last ones, up to so many were not stored.
_MEAN: Final = 6
_UNSTORED: Final = 2


class Sampler:
    def __init__(self, engine: VllmEngine, info: EngineInfo, length: int, **sampling: Any) -> None:
        self._engine, self._info = engine, info
        self._sampling = Sampling(**{"max_tokens": length, "ignore_eos": True, **sampling})
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._random = Random(0)

    async def whole(self, name: str) -> dict[str, Any]:
        async with self._room:
            return _facts(await self._attempt(name, b"", self._sampling.max_tokens), [])

    async def cut(self, name: str) -> dict[str, Any]:
        """Attempt after attempt, each behind what the ones before it have stored."""
        stored, cuts = b"", list[int]()
        async with self._room:
            while (count := len(unpack_tokens(stored))) < self._sampling.max_tokens:
                take = min(1 + int(self._random.expovariate(1 / _MEAN)), self._sampling.max_tokens - count)
                made = await self._attempt(f"{name}-{count}-{len(cuts)}", stored, take)
                cuts.append(count)
                if self._ended(made) or take + count == self._sampling.max_tokens:
                    stored += made
                    break
                stored += made[: 12 * self._stored(take)]
        return _facts(stored, cuts[1:])

    def _ended(self, made: bytes) -> bool:
        return int(unpack_tokens(made)["id"][-1]) in self._sampling.stop_token_ids

    def _stored(self, made: int) -> int:
        return max(1, made - self._random.randrange(_UNSTORED + 1))

    async def _attempt(self, name: str, partial: bytes, take: int) -> bytes:
        """The first `take` tokens of one attempt, which is then given up."""
        assignment = Assignment(
            attempt=AttemptRef("run", name, name),
            policy="policy",
            prompt_ids=pack_ids(PROMPT),
            sampling=self._sampling,
            partial=partial,
            group_id="g",
        )
        generation = Generation(assignment, self._info, self._engine.decode)
        made = b""
        async with aclosing(self._engine.generate(generation.request())) as stream:
            async for delta in stream:
                made += generation.accept(delta)
                if len(made) >= 12 * take:
                    break
        return made[: 12 * take]


def _facts(tokens: bytes, cuts: list[int]) -> dict[str, Any]:
    found = unpack_tokens(tokens)
    return {"ids": found["id"].tolist(), "logprobs": found["logprob"].tolist(), "cuts": cuts}


async def main(checkpoint: str, speculation: str, responses: int, length: int) -> None:
    engine = VllmEngine(checkpoint, _AT_ONCE, msgspec.structs.replace(SETTINGS, speculation=speculation))
    try:
        info = await engine.start()
        sampler = Sampler(engine, info, length)
        whole = await asyncio.gather(*(sampler.whole(f"w{number}") for number in range(responses)))
        cut = await asyncio.gather(*(sampler.cut(f"c{number}") for number in range(responses)))
        sampler = Sampler(engine, info, length, min_tokens=MIN_TOKENS, stop_token_ids=(END,))
        held = await asyncio.gather(*(sampler.cut(f"h{number}") for number in range(_HELD)))
        ways = [one for one in WAYS if not (engine.speculates and "min_p" in one)]
        varied = [await Sampler(engine, info, length, **way).cut(f"v{number}") for number, way in enumerate(ways)]
        facts = {"prompt": PROMPT, "whole": whole, "cut": cut, "held": held, "drafts": await _drafts(engine)}
        facts["varied"] = [{**made, "sampling": way} for made, way in zip(varied, ways, strict=True)]
        print(json.dumps(facts))  # noqa: T201 - the test reads it
    finally:
        await engine.stop()


async def _drafts(engine: VllmEngine) -> dict[str, Any]:
    if engine.speculation is None:
        return {}
    await engine.speculation.refresh()
    return engine.speculation.report


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
