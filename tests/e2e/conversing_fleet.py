"""Real engines behind a gateway, and conversations of plain `openai` clients that are asked turn by turn.

Invariant: `living` are the workers that were booted and not killed since.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import openai
from msgspec import Struct
from safetensors.numpy import load_file

from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.client import Client
from tests.chaos.cluster import TOKEN, Cluster
from tests.fakes.model_texts import save_chat_tokenizer

RUN_ID: Final = "talk"
#: Ids of the tests' tokenizer, with its special tokens.
_VOCABULARY: Final = 424
_ENGINE: Final = """
[vllm]
dtype = "float32"
enforce_eager = true
threads = 1
kv_cache_mib = 64
"""
_BOOT_S: Final = 240.0


class SaidTurn(Struct, frozen=True):
    """One answer: the prompt as the model read it, and what it made of it."""

    prompt_ids: list[int]
    ids: list[int]


class ConversingFleet:
    """Made by `running`."""

    def __init__(self, cluster: Cluster, client: Client, model: Path) -> None:
        self.cluster, self.client = cluster, client
        self.living: list[str] = []
        self._model, self._booted = model, 0
        self._config = cluster.directory / "worker.toml"
        self._config.write_text(_ENGINE)

    @classmethod
    @asynccontextmanager
    async def running(cls, cluster: Cluster, *, workers: int) -> AsyncIterator["ConversingFleet"]:
        """Workers, a gateway before them, and a run with a version."""
        model = await asyncio.to_thread(make_checkpoint, cluster.directory / "model", 1, vocab_size=_VOCABULARY)
        save_chat_tokenizer(model)
        fleet = cls(cluster, await cluster.boot(workers=0), model)
        spec = {"name": "talk", "model": str(model), "environment": {"name": "none"}, "trainer": {"name": "external"}}
        await fleet.client.submit(spec, RUN_ID)
        async with fleet.client.claim(RUN_ID) as lease, asyncio.TaskGroup() as group:
            group.create_task(lease.publish(load_file(model / "model.safetensors"), step=0))
            for _ in range(workers):
                group.create_task(fleet.join())
            group.create_task(fleet._open_gateway())
        async with fleet._http:
            yield fleet

    async def join(self) -> None:
        """Boot a worker."""
        self._booted += 1
        name = f"w{self._booted}"
        flags: dict[str, Any] = {"engine": "vllm", "model": self._model, "config": self._config, "slots": 8}
        await self.cluster.worker(name, boot_s=_BOOT_S, **flags)
        self.living.append(name)

    async def kill_busiest(self) -> str:
        """SIGKILL the worker with most rollouts. Returns its name."""
        running = {one.worker_id: one.running for one in await self.client.workers()}
        victim = max(self.living, key=lambda name: running.get(name, 0))
        self.living.remove(victim)
        self.cluster.kill(victim)
        return victim

    async def ask(
        self, messages: list[dict[str, str]], session_id: str, tokens: int, seen: Callable[[int], None]
    ) -> tuple[str, SaidTurn]:
        """One turn of a session as a stream. `seen` hears how many tokens have come."""
        chunks: Any = await self._http.chat.completions.create(
            model=RUN_ID,
            messages=messages,  # type: ignore[arg-type]  # plain dicts
            max_tokens=tokens,
            temperature=0.0,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            extra_headers={"X-Session-ID": session_id},
        )
        text, prompt_ids, ids = "", [], []
        async for chunk in chunks:
            prompt_ids = prompt_ids or chunk.prompt_token_ids
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ids += choice.token_ids
            seen(len(ids))
        return text, SaidTurn(prompt_ids, ids)

    async def _open_gateway(self) -> None:
        coordinator = self.cluster.process["coordinator"].address
        process = await self.cluster.start(
            "gateway", "gateway", boot_s=_BOOT_S, listen="127.0.0.1:0", coordinator=coordinator, holder="gateway"
        )
        self._http = openai.AsyncOpenAI(base_url=f"http://{process.address}/v1", api_key=TOKEN, max_retries=0)


class Conversations:
    """So many conversations under one name, asked in rounds of one turn each."""

    def __init__(self, fleet: ConversingFleet, name: str, count: int, *, tokens: int) -> None:
        self.turns: list[list[SaidTurn]] = [[] for _ in range(count)]
        self._fleet, self._name, self._tokens = fleet, name, tokens
        self._messages: list[list[dict[str, str]]] = [[] for _ in range(count)]
        self._seen = [0] * count
        self._changed = asyncio.Event()

    async def round(self, meanwhile: Callable[[], Awaitable[None]] | None = None, *, behind: int = 0) -> None:
        """One turn of each conversation, all at once. `meanwhile` is done once each has got `behind` tokens."""
        self._seen = [0] * len(self.turns)
        async with asyncio.TaskGroup() as group:
            for number in range(len(self.turns)):
                group.create_task(self._turn(number))
            if meanwhile is not None:
                while min(self._seen) < behind:
                    self._changed.clear()
                    await self._changed.wait()
                assert max(self._seen) < self._tokens, "nothing is under way any more"
                await meanwhile()

    async def _turn(self, number: int) -> None:
        messages, turns = self._messages[number], self.turns[number]
        messages.append({"role": "user", "content": f"The dog {number} jumps over {'fox ' * len(turns)}and sleeps."})

        def seen(tokens: int) -> None:
            self._seen[number] = tokens
            self._changed.set()

        text, turn = await self._fleet.ask(messages, f"{self._name}{number}", self._tokens, seen)
        messages.append({"role": "assistant", "content": text})
        turns.append(turn)
