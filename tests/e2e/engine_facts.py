"""What a real engine did, as JSON on stdout: run in a process of its own, for the engine's processes are forked
from it.

Arguments: the checkpoint to boot from; optionally another one to install as version 5, and one that must be refused;
the first is installed again after them. On stdin, as JSON: texts whose continuations are asked of the first one.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ebbtide.errors import EbbtideError
from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.settings import VllmSettings
from tests.support.waiting import wait_until

SETTINGS = VllmSettings(dtype="float32", max_model_len=512, enforce_eager=True, threads=1, kv_cache_mib=128)
#: The last one fills two blocks of cached keys and values, which must not outlive their weights.
PROMPTS = [[20 + i, 21, 22, 23 + i] for i in range(11)] + [[(7 * i) % 120 for i in range(300)]]
CUTS = [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45]
LENGTH = 48
Facts = dict[str, Any]


class Asker:
    """Asks an engine, under request ids of its own."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._asked = 0

    async def ask(self, ids: Sequence[int], **changes: Any) -> Facts:
        self._asked += 1
        wanted: Facts = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": LENGTH, "min_tokens": 0}
        wanted |= {"stop_token_ids": (), **changes}
        request = EngineRequest(request_id=f"r{self._asked}", token_ids=ids, **wanted)
        out: Facts = {"ids": [], "logprobs": [], "versions": [], "finish": None}
        async for delta in self._engine.generate(request):
            out["ids"] += delta.ids
            out["logprobs"] += delta.logprobs
            out["versions"] += delta.versions
            out["finish"] = delta.finish
        return out

    async def ask_all(self, prompts: Sequence[Sequence[int]], **changes: Any) -> list[Facts]:
        return await asyncio.gather(*(self.ask(prompt, **changes) for prompt in prompts))


async def gather(asker: Asker) -> Facts:
    """All that is asked of one set of weights."""
    single = await asker.ask(PROMPTS[0])
    batch = await asker.ask_all(PROMPTS)
    cuts = [prompt + whole["ids"][:cut] for prompt, whole, cut in zip(PROMPTS, batch, CUTS, strict=True)]
    resumed = [asker.ask(ids, max_tokens=LENGTH - cut) for ids, cut in zip(cuts, CUTS, strict=True)]
    penalised = await asker.ask(PROMPTS[0], repetition_penalty=1.3)
    stop = single["ids"][20]
    first = single["ids"].index(stop)
    return {
        "single": single,
        "single_resumed": await asker.ask(PROMPTS[0] + single["ids"][:17], max_tokens=LENGTH - 17),
        "batch": batch,
        "batch_resumed": await asyncio.gather(*resumed),
        "stop": stop,
        "stopped": await asker.ask(PROMPTS[0], stop_token_ids=[stop]),
        "stopped_resumed": await asker.ask(PROMPTS[0] + single["ids"][:first], stop_token_ids=[stop]),
        "penalised": penalised,
        "penalised_resumed": await asker.ask(
            PROMPTS[0] + penalised["ids"][:17], max_tokens=LENGTH - 17, repetition_penalty=1.3
        ),
        "not_stopped": await asker.ask(PROMPTS[0], stop_token_ids=[stop], min_tokens=40),
        "without_logprobs": await asker.ask(PROMPTS[0], logprobs=False),
        "sampled": await asker.ask_all(PROMPTS, temperature=0.7, top_p=0.9, max_tokens=32),
        "top_k": await asker.ask_all(PROMPTS, temperature=1.3, top_k=5, max_tokens=32),
    }


async def install_in_flight(engine: VllmEngine, asker: Asker, other: Path) -> Facts:
    """Long responses, with the weights replaced in their middle, and one that was asked for but had not begun.

    Its prompt, asked before, is in the cache of the old weights. So are, later, the blocks of the long responses, half
    made by either weights: `behind` says how each of the texts `longer` goes on, which consist of those blocks.
    """
    running = [asyncio.create_task(asker.ask(prompt, max_tokens=200)) for prompt in PROMPTS[:4]]
    await asker.ask(PROMPTS[5], max_tokens=20)
    await engine.pause("test")
    known = engine._llm.output_processor.request_states  # nothing else tells what vLLM has taken
    begun = len(known)
    waiting = asyncio.create_task(asker.ask(PROMPTS[-1]))
    await wait_until(lambda: len(known) > begun)
    pause_s = await engine.install(5, other / "model.safetensors")
    await engine.resume("test")
    found: Facts = {"pause_s": pause_s, "in_flight": [await task for task in running], "waiting": await waiting}
    found["longer"] = [prompt + whole["ids"][:190] for prompt, whole in zip(PROMPTS, found["in_flight"], strict=False)]
    found["behind"] = [await asker.ask(ids, max_tokens=8) for ids in found["longer"]]
    return found


async def refusal(engine: VllmEngine, path: Path) -> str:
    try:
        await engine.install(6, path)
    except EbbtideError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def files_kept(checkpoint: Path) -> list[str]:
    """Mappings of the checkpoint's files in the processes of the engine and in this one."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    maps = [line for one in processes for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines()]
    return [line for line in maps if str(checkpoint) in line]


def decoded_without_files(engine: VllmEngine, checkpoint: Path) -> str:
    """What two tokens say, told by what the engine has read already."""
    for file in checkpoint.glob("tokenizer*.json"):
        file.unlink()
    return engine.decode([50, 51])


async def main(checkpoint: str, *others: str) -> None:
    engine = VllmEngine(checkpoint, 16, SETTINGS)
    try:
        info = await engine.start()
        asker = Asker(engine)
        further = [await asker.ask(ids, max_tokens=8) for ids in json.load(sys.stdin)]
        facts: Facts = {"further": further, "eos": info.eos_token_ids, "prompts": PROMPTS, "base": await gather(asker)}
        facts["text"] = decoded_without_files(engine, Path(checkpoint))
        if others:
            other, wrong = map(Path, others)
            facts |= await install_in_flight(engine, asker, other)
            facts["updated"] = await gather(asker)
            facts["refused"] = await refusal(engine, wrong / "model.safetensors")
            broken = wrong / "torn.safetensors"
            broken.write_bytes((other / "model.safetensors").read_bytes()[:1000])
            facts["refused_torn"] = await refusal(engine, broken)
            facts["after_refusal"] = await asker.ask(PROMPTS[0])
            facts["files_kept"] = files_kept(other)
            await engine.install(7, Path(checkpoint) / "model.safetensors")
            facts["back"] = await gather(asker)
        print(json.dumps(facts))  # noqa: T201 - the test reads it
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
