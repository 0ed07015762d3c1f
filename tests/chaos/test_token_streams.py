"""Somebody reads interactive rollouts while their worker and then the coordinator are killed: a pause, and no more."""

import asyncio
from random import Random
from typing import Final

from ebbtide.client import Client
from ebbtide.types.rollout import RolloutRequest, TokenChunk
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids, token_count, unpack_ids, unpack_tokens
from tests.chaos.cluster import SCRIPT, Cluster
from tests.chaos.load import RUN, SPEC, publish
from tests.fakes.scripted_engine import follow
from tests.support.waiting import wait_until

_CHATS: Final = 12


def _request(number: int) -> RolloutRequest:
    draw = Random(number)
    prompt = [draw.randrange(2, SCRIPT.vocab_size) for _ in range(8)]
    return RolloutRequest(
        rollout_id=f"chat{number}",
        group_id="chats",
        episode_id=f"e{number}",
        prompt_ids=pack_ids(prompt),
        sampling=Sampling(max_tokens=240, ignore_eos=True),
        interactive=True,
    )


class _ChunkLog:
    """What the SDK's stream of one rollout brought."""

    def __init__(self, client: Client, request: RolloutRequest) -> None:
        self._client, self._request = client, request
        self.chunks: list[TokenChunk] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for chunk in self._client.stream_tokens(RUN, self._request.rollout_id):
            self.chunks.append(chunk)

    @property
    def tokens(self) -> int:
        return sum(token_count(chunk.tokens) for chunk in self.chunks)

    async def check(self) -> None:
        """It ends, and brought what an undisturbed worker makes, each token once."""
        await asyncio.wait_for(self.task, 60)
        prompt = unpack_ids(self._request.prompt_ids).tolist()
        made = [token for token, _ in follow(SCRIPT, prompt, self._request.sampling.max_tokens)]
        assert [int(token) for chunk in self.chunks for token in unpack_tokens(chunk.tokens)["id"]] == made
        assert [chunk.offset for chunk in self.chunks[1:]] == [
            chunk.offset + token_count(chunk.tokens) for chunk in self.chunks[:-1]
        ]


async def test_readers_see_each_token_once_across_the_deaths_of_a_worker_and_of_the_coordinator(
    cluster: Cluster,
) -> None:
    client = await cluster.boot(workers=2)
    await client.submit(SPEC, RUN)
    lease = await client.acquire(RUN, holder="test")
    await publish(lease, step=0)
    requests = [_request(number) for number in range(_CHATS)]
    await lease.submit_rollouts(requests)
    logs = [_ChunkLog(client, request) for request in requests]

    async def all_have(tokens: int) -> None:
        await wait_until(lambda: all(log.tokens >= tokens for log in logs), timeout=60, what=f"{tokens} tokens each")

    await all_have(20)
    cluster.kill("w1")
    await all_have(60)
    cluster.kill("coordinator")
    await cluster.coordinator()
    await all_have(100)
    for log in logs:
        await log.check()
    assert sum(len(log.chunks) for log in logs) > _CHATS * 12, "they came as they were made, not in bulk"
