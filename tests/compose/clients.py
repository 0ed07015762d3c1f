"""Clients of the gateway's published port: a person with `ebbtide run chat`, and agents with the plain `openai` client.

Agents show tokens of role `agent` that are for one run. They come back after the gateway's process was killed.
"""

import asyncio
import subprocess
import sys
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import openai

from ebbtide.auth.roles import Role
from ebbtide.cli.credentials import signing_keys
from ebbtide.client import Client
from ebbtide.types.run import Run, RunStatus
from tests.compose.podman import Failed
from tests.support.waiting import wait_until

SPEC: Final = Path("examples/compose.toml")
#: Sessions of one problem: a whole group, and so a step of training.
_SAMPLES: Final = 2
#: Of a session. Each has one completion, which counts as submitted once its session has a reward.
_TURNS: Final = 2
_KEY_S: Final = 3600.0
_ANSWER_S: Final = 300.0
_VERSION_S: Final = 300.0
_BOOT_S: Final = 120.0
_LOOK_S: Final = 0.2


class GatewayClients:
    """`folder` has the shared secret (`token`) and the key that signs agents' tokens."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url, folder

    async def chat(self, run_id: str) -> str:
        """What `ebbtide run chat` prints of an answer. Raises `Failed`."""
        flags = ["--gateway", self.url, "--token-file", str(self._folder / "token"), "--max-tokens", "16"]
        command = [sys.executable, "-m", "ebbtide.cli", "run", "chat", run_id, "stone", *flags]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout.strip():
            raise Failed(f"ebbtide run chat ended with status {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    async def ask(self, run_id: str) -> int:
        """Ask as an agent, and return the version that answered. Raises `Failed`."""
        async with self._agent(run_id) as agent:
            answer = await _complete(agent, run_id, [{"role": "user", "content": "stone"}])
        made: dict[str, Any] = answer.model_dump()
        if not made["weight_version_end"] or made["usage"]["completion_tokens"] != len(_choice(answer)["token_ids"]):
            raise Failed(f"the gateway answered {made}")
        return int(made["weight_version_end"])

    async def check_strangers(self, run_id: str) -> None:
        """Raises `Failed` if somebody without a valid key is answered."""
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="stolen", max_retries=0) as stranger:
            try:
                await _complete(stranger, run_id, [{"role": "user", "content": "stone"}])
            except openai.AuthenticationError:
                return
        raise Failed("the gateway answered a stranger")

    async def answers(self) -> None:
        """Raises `TimeoutError` if the gateway does not say in time that it is ready."""
        await wait_until(lambda: healthy(self.url), _BOOT_S, interval=_LOOK_S, what="the gateway is ready")

    async def play(self, run_id: str, number: int, between: Callable[[], Awaitable[None]] | None = None) -> None:
        """Play a session of two turns, and reward it with its number. `between` the turns something may happen.

        Raises `Failed`.
        """
        session = f"session-{number}"
        messages = [{"role": "user", "content": "stone"}]
        headers = {"X-Group-ID": "stones"}
        async with self._agent(run_id, f"/sessions/{session}") as agent:
            first = await _complete(agent, run_id, messages, headers)
            if between is not None:
                await between()
                await self.answers()
            messages += [{"role": "assistant", "content": _choice(first)["message"]["content"]}]
            second = await _complete(agent, run_id, [*messages, {"role": "user", "content": "river"}], headers)
        await self._end(run_id, session, [_choice(answer)["token_ids"] for answer in (first, second)], float(number))

    async def _end(self, run_id: str, session: str, sampled: list[list[int]], reward: float) -> None:
        """With a reward, after the trace has been compared with what the client got."""
        head = {"authorization": f"Bearer {self._key(run_id, Role.USER)}"}
        where = f"{self.url}/v1/sessions/{session}"
        async with httpx.AsyncClient(headers=head, timeout=_ANSWER_S) as client:
            trace = (await client.get(where)).raise_for_status().json()
            traced = [turn["completions"][0]["token_ids"] for turn in trace["turns"]]
            if traced != sampled or len(trace["branches"]) != 1 or trace["unmatched_tokens"]:
                raise Failed(f"the session's trace differs from what its client got, {sampled}: {trace}")
            (await client.post(f"{where}/reward", json={"reward": reward})).raise_for_status()

    def _agent(self, run_id: str, prefix: str = "") -> openai.AsyncOpenAI:
        url = f"{self.url}{prefix}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=self._key(run_id), max_retries=0, timeout=_ANSWER_S)

    def _key(self, run_id: str, role: Role = Role.AGENT) -> str:
        return signing_keys.issue(self._folder, role, run_id=run_id, ttl_s=_KEY_S, name="team")


async def healthy(url: str) -> bool:
    """Whether a service below this URL says that it is."""
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx.TransportError:
            return False


async def train_on_sessions(client: Client, clients: GatewayClients, between: Callable[[], Awaitable[None]]) -> Run:
    """Submit a run whose episodes agents play, play what one step takes, and wait for its end. Raises `Failed`."""
    run_id = (await client.submit(_spec())).run_id

    async def newest() -> bool:
        return (await client.run(run_id)).newest is not None

    await wait_until(newest, _VERSION_S, interval=_LOOK_S, what="the first version of the agents' run")
    await clients.play(run_id, 0, between)
    for number in range(1, _SAMPLES):
        await clients.play(run_id, number)
    async with asyncio.timeout(_ANSWER_S):
        async for _ in client.watch(run_id):
            pass
    run = await client.run(run_id)
    books = [run.counters.get(name) for name in ("sessions_completed", "submitted", "trained")]
    if run.status is not RunStatus.FINISHED or books != [_SAMPLES, _TURNS * _SAMPLES, _TURNS * _SAMPLES] or run.dropped:
        raise Failed(f"the agents' run ended as {run}")
    return run


def _spec() -> dict[str, Any]:
    """One step on one group of sessions, from the model of the example."""
    spec: dict[str, Any] = tomllib.loads(SPEC.read_text())
    trainer = spec["trainer"] | {"steps": 1, "minibatches": 1, "checkpoint_every": 1}
    kept = {name: spec[name] for name in ("model", "seed")}
    batch = {"groups_per_step": 1, "group_size": _SAMPLES, "max_staleness": 1}
    return kept | {"name": "agents", "environment": {"name": "agents"}, "batch": batch, "trainer": trainer}


async def _complete(
    agent: openai.AsyncOpenAI, run_id: str, messages: list[dict[str, str]], headers: dict[str, str] | None = None
) -> Any:
    asked: dict[str, Any] = {"model": run_id, "messages": messages, "max_tokens": 16, "extra_headers": headers}
    return await agent.chat.completions.create(**asked, extra_body={"return_token_ids": True})


def _choice(answer: Any) -> dict[str, Any]:
    """The answer's only choice."""
    (choice,) = answer.model_dump()["choices"]
    found: dict[str, Any] = choice
    return found
