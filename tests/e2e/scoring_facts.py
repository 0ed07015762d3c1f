"""What a real engine says of prompts, as JSON on stdout: run in a process of its own, for the engine's processes are
forked from it.

Arguments: the checkpoint to boot from, and another one to install as version 5.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.settings import VllmSettings
from tests.support.waiting import wait_until

#: Prompts are read in pieces of 128 tokens: the longer ones in several steps.
SETTINGS = VllmSettings(
    dtype="float32",
    max_model_len=512,
    enforce_eager=True,
    threads=1,
    kv_cache_mib=128,
    engine_args=json.dumps({"max_num_batched_tokens": 128}),
)
PROMPTS = [[20], [20, 21, 22, 23], [(7 * i) % 120 for i in range(300)], [(11 * i) % 120 for i in range(257)]]
ALTERNATIVES = 3
Facts = dict[str, Any]


async def scored(engine: VllmEngine, name: str, ids: Sequence[int], alternatives: int = ALTERNATIVES) -> Facts:
    request = EngineRequest(
        request_id=name,
        token_ids=ids,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        max_tokens=1,
        min_tokens=0,
        stop_token_ids=(),
        prompt_logprobs=alternatives,
    )
    deltas = [delta async for delta in engine.generate(request)]
    (delta,) = deltas
    assert delta.scores is not None
    return {
        "places": delta.scores.tolist(),
        "ids": list(delta.ids),
        "logprobs": list(delta.logprobs),
        "versions": list(delta.versions),
    }


async def all_scored(engine: VllmEngine, name: str) -> list[Facts]:
    """Every prompt alone, so that no other one shares a step with it."""
    return [await scored(engine, f"{name}{number}", ids) for number, ids in enumerate(PROMPTS)]


async def asked_directly(engine: VllmEngine, name: str, ids: Sequence[int]) -> list[Facts | None]:
    """What vLLM answers to a client of its own, in its usual form."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    wanted = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=ALTERNATIVES, detokenize=False)
    found: Any = None
    async for output in engine._llm.generate(tokens_input(list(ids)), wanted, name):
        found = output.prompt_logprobs or found
    return [one and {str(token): (known.logprob, known.rank) for token, known in one.items()} for one in found]


async def install_before_a_score(engine: VllmEngine, other: Path) -> Facts:
    """A prompt that was asked for under the old weights, and read under the new ones."""
    await engine.pause("test")
    known = engine._llm.output_processor.request_states  # nothing else tells what vLLM has taken
    waiting = asyncio.create_task(scored(engine, "waiting", PROMPTS[2]))
    await wait_until(lambda: bool(known))
    await engine.install(5, other / "model.safetensors")
    await engine.resume("test")
    return await waiting


async def install_within_a_score(engine: VllmEngine, other: Path) -> list[Facts]:
    """Many prompts of which some were scored, and some read in part, when the weights were replaced."""
    asked = [asyncio.create_task(scored(engine, f"within{number}", PROMPTS[2])) for number in range(12)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    await engine.pause("test")
    await engine.install(7, other / "model.safetensors")
    await engine.resume("test")
    return [await one for one in asked]


async def main(checkpoint: str, other: str) -> None:
    engine = VllmEngine(checkpoint, 16, SETTINGS)
    try:
        await engine.start()
        first = await all_scored(engine, "first")
        facts: Facts = {
            "first": first,
            "again": await all_scored(engine, "again"),  # their blocks are cached by now
            "direct": [await asked_directly(engine, f"d{number}", ids) for number, ids in enumerate(PROMPTS)],
            "own": await scored(engine, "own", PROMPTS[2], 0),
            "together": await asyncio.gather(
                *(scored(engine, f"t{number}", ids) for number, ids in enumerate(PROMPTS * 3))
            ),
            "waiting": await install_before_a_score(engine, Path(other)),
            "updated": await all_scored(engine, "updated"),
            "within": await install_within_a_score(engine, Path(checkpoint)),
        }
        print(json.dumps(facts))  # noqa: T201 - the test reads it
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
