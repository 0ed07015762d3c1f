"""What an engine says of groups of requests, as JSON on stdout; run in a process of its own, for the engine's processes
are forked from it.

Arguments: the checkpoint to boot from, another one to install as version 1, and `vllm.speculation`.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

from ebbtide.rollout_worker.engine import DraftSource, EngineRequest
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.settings import VllmSettings

SETTINGS: Final = VllmSettings(dtype="float32", max_model_len=512, enforce_eager=True, threads=1, kv_cache_mib=128)
PROMPTS: Final = [[20 + i, 21, 22, 23 + i] for i in range(4)]
LENGTH: Final = 120
#: Where members of a group are cut, as by kills, and go on behind what was stored.
CUTS: Final = (1, 17, 60, 119)
Facts = dict[str, Any]


class GroupAsker:
    """Asks an engine for members of groups."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._asked = 0

    async def ask(
        self, prompt: int, member: str, partial: list[int] | None = None, *, group: str = "", **changes: Any
    ) -> Facts:
        self._asked += 1
        made = partial or []
        wanted: Facts = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_tokens": 0, "stop_token_ids": ()}
        request = EngineRequest(
            request_id=f"r{self._asked}",
            token_ids=PROMPTS[prompt] + made,
            max_tokens=LENGTH - len(made),
            drafts=DraftSource(group=group or f"g{prompt}", rollout_id=member, made=len(made)),
            **(wanted | changes),
        )
        out: Facts = {"ids": [], "logprobs": [], "versions": []}
        async for delta in self._engine.generate(request):
            out["ids"] += delta.ids
            out["logprobs"] += delta.logprobs
            out["versions"] += delta.versions
        return out

    async def groups(self) -> list[list[Facts]]:
        """Of each prompt a first member, and then others that are cut and go on."""
        first = await asyncio.gather(*(self.ask(prompt, "first") for prompt in range(len(PROMPTS))))
        return await asyncio.gather(*(self._group(prompt, one) for prompt, one in enumerate(first)))

    async def _group(self, prompt: int, first: Facts) -> list[Facts]:
        asked = (self.ask(prompt, f"cut at {cut}", first["ids"][:cut]) for cut in CUTS)
        return [first, *await asyncio.gather(*asked)]


async def gather(engine: VllmEngine, other: Path) -> Facts:
    asker = GroupAsker(engine)
    facts: Facts = {"groups": await asker.groups()}
    stop = facts["groups"][0][0]["ids"][30]
    facts["stopped"] = await asker.ask(0, "stopped", stop_token_ids=[stop])
    facts["held"] = await asker.ask(0, "held", stop_token_ids=[stop], min_tokens=35)
    await engine.install(1, other / "model.safetensors")
    facts["installed"] = await asker.groups()
    if speculation := engine.speculation:
        await speculation.refresh()
        facts["own"] = dict(speculation.report)
        # A group of which nothing was made here is drafted from what a rollout that was moved here brings along.
        told = facts["installed"][1][0]["ids"]
        await asker.ask(1, "moved", told[:-1], group="moved")
        facts["late"] = await asker.ask(1, "late", group="moved")
        await speculation.refresh()
        facts["moved"] = dict(speculation.report)
        await engine.install(2, other / "model.safetensors")
        await speculation.refresh()
        facts["replaced"] = dict(speculation.report)
    return facts


async def main(checkpoint: str, other: str, speculation: str) -> None:
    from msgspec.structs import replace

    settings = replace(SETTINGS, speculation=speculation)
    engine = VllmEngine(checkpoint, 32, settings)
    try:
        await engine.start()
        print(json.dumps(await gather(engine, Path(other))))  # noqa: T201 - the test reads it
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
