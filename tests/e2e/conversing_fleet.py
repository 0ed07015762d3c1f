"""Real engines behind a gateway, and conversations of plain `openai` clients that are asked turn by turn.

Invariant: `living` are the workers that were booted and not killed since.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import openai
from msgspec import Struct
from safetensors.numpy import load_file, save_file

from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.client import Client
from tests.chaos.cluster import TOKEN, Cluster
from tests.engine_config import engine_config
from tests.fakes.model_texts import save_chat_tokenizer
from tests.support.waiting import wait_until

RUN_ID: Final = "talk"
#: Of an answer.
TOKENS: Final = 128
#: An answer with so many tokens, and as many to come, is in its middle: of the first ones some are stored.
_BEGUN: Final = 24
#: Ids of the tests' tokenizer, with its special tokens.
_VOCABULARY: Final = 424
_SPECIAL: Final = 420  # the first of them
_WEIGHTS: Final = "model.safetensors"
_BOOT_S: Final = 240.0


def make_chat_checkpoint(folder: Path, **options: Any) -> Path:
    """A random network with the tests' tokenizer, which greedily samples no special token: an answer's text has them
    not, and where a client sends it back its ids could not be known again. `options`: see `make_checkpoint`.
    """
    model = make_checkpoint(folder, 1, vocab_size=_VOCABULARY, **options)
    weights = load_file(model / _WEIGHTS)
    weights["lm_head.weight"][_SPECIAL:] = 0.0
    save_file(weights, model / _WEIGHTS, metadata={"format": "pt"})
    save_chat_tokenizer(model)
    return model


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
        self._config.write_text(engine_config())

    @classmethod
    @asynccontextmanager
    async def running(cls, cluster: Cluster, *, workers: int) -> AsyncIterator["ConversingFleet"]:
        """Workers, a gateway before them, and a run with a version."""
        model = await asyncio.to_thread(make_chat_checkpoint, cluster.directory / "model")
        fleet = cls(cluster, await cluster.boot(workers=0), model)
        spec = {"name": "talk", "model": str(model), "environment": {"name": "none"}, "trainer": {"name": "external"}}
        await fleet.client.submit(spec, RUN_ID)
        async with fleet.client.claim(RUN_ID) as lease, asyncio.TaskGroup() as group:
            group.create_task(lease.publish(load_file(model / _WEIGHTS), step=0))
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

    async def kill_amid_answers(self) -> str:
        """SIGKILL the worker with most half-made answers, once there is one. Returns its name."""
        found = await wait_until(self._amid_answers, _BOOT_S, interval=0.005, what="a worker with half-made answers")
        victim: str = found
        self.living.remove(victim)
        self.cluster.kill(victim)
        return victim

    def _amid_answers(self) -> str:
        ends = {name: [one.start + one.generated for one in self.cluster.ledger(name)] for name in self.living}
        halves = {name: sum(_BEGUN <= end <= TOKENS - _BEGUN for end in all_) for name, all_ in ends.items()}
        busiest = max(self.living, key=lambda name: halves[name])
        return busiest if halves[busiest] else ""

    async def ask(self, messages: list[dict[str, str]], session_id: str) -> tuple[str, SaidTurn]:
        """One turn of a session."""
        answer: Any = await self._http.chat.completions.create(
            model=RUN_ID,
            messages=messages,  # type: ignore[arg-type]  # plain dicts
            max_tokens=TOKENS,
            temperature=0.0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            extra_headers={"X-Session-ID": session_id},
        )
        (choice,) = answer.choices
        return choice.message.content or "", SaidTurn(answer.prompt_token_ids, choice.token_ids)

    async def _open_gateway(self) -> None:
        coordinator = self.cluster.process["coordinator"].address
        process = await self.cluster.start(
            "gateway", "gateway", boot_s=_BOOT_S, listen="127.0.0.1:0", coordinator=coordinator, holder="gateway"
        )
        self._http = openai.AsyncOpenAI(base_url=f"http://{process.address}/v1", api_key=TOKEN, max_retries=0)


class Conversations:
    """So many conversations under one name, asked in rounds of one turn each."""

    def __init__(self, fleet: ConversingFleet, name: str, count: int) -> None:
        self.turns: list[list[SaidTurn]] = [[] for _ in range(count)]
        self._fleet, self._name = fleet, name
        self._messages: list[list[dict[str, str]]] = [[] for _ in range(count)]

    async def ask_all(self) -> None:
        """One turn of each conversation, all at once."""
        async with asyncio.TaskGroup() as group:
            for number in range(len(self.turns)):
                group.create_task(self._turn(number))

    async def _turn(self, number: int) -> None:
        messages, turns = self._messages[number], self.turns[number]
        messages.append({"role": "user", "content": f"The dog {number} jumps over {'fox ' * len(turns)}and sleeps."})
        text, turn = await self._fleet.ask(messages, f"{self._name}{number}")
        messages.append({"role": "assistant", "content": text})
        turns.append(turn)
