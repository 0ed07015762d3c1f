"""Readers of tokens are served from the append; nothing that dies in between costs them a token or gives one twice."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.types.rollout import FinishReason, RolloutKind, TokenChunk
from ebbtide.types.tokens import token_count, unpack_tokens
from ebbtide.v1 import fleet_pb2, types_pb2
from tests.integration.coordinator.conftest import TOKEN
from tests.integration.coordinator.gateways import answer, asked, gateway
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP


class SdkReader:
    """Reads one rollout by the SDK, for which only the number of tokens matters when a stream breaks."""

    def __init__(self, cluster: Any, rollout_id: str, offset: int = 0) -> None:
        self.chunks: list[TokenChunk] = []
        self._client = Client(cluster.server.address, security=ClientSecurity(token=TOKEN), patience_s=20.0)
        self.task = asyncio.create_task(self._read(rollout_id, offset))

    async def _read(self, rollout_id: str, offset: int) -> None:
        async with self._client as client:
            async for chunk in client.stream_tokens("r", rollout_id, offset):
                self.chunks.append(chunk)

    @property
    def ids(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in unpack_tokens(chunk.tokens)["id"]]

    async def has(self, tokens: int) -> None:
        await wait_until(lambda: len(self.ids) >= tokens, what=f"{tokens} tokens")
        assert self.ids == list(range(tokens))

    async def ended(self) -> list[int]:
        await asyncio.wait_for(self.task, 20)
        assert self.chunks[-1].reason is not None
        return self.ids


@pytest.fixture
def chunks() -> Callable[[str], float]:
    """Messages to readers since the test began, by where their tokens came from: `pushed` or `read`."""

    def count(kind: str) -> float:
        return REGISTRY.get_sample_value("ebbtide_coordinator_token_chunks_total", {"kind": kind}) or 0.0

    before = {kind: count(kind) for kind in ("pushed", "read")}
    return lambda kind: count(kind) - before[kind]


async def test_a_gateway_that_follows_more_rollouts_than_a_connection_takes_calls_still_calls(cluster: Any) -> None:
    await cluster.run()
    names = [f"a{number}" for number in range(1100)]
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([asked(name) for name in names])
        following = [asyncio.create_task(answer(lease, name)) for name in names]
        name = "ebbtide_coordinator_token_readers"
        await wait_until(lambda: REGISTRY.get_sample_value(name) == len(names), what="all are followed")
        async with asyncio.timeout(20):
            await lease.cancel_rollouts(names)
            answers = await asyncio.gather(*following)
        assert {last.reason for _, last in answers} == {FinishReason.CANCELLED}


async def test_a_reader_that_is_there_gets_tokens_from_the_append_and_a_late_one_the_first_from_the_store(
    cluster: Any, chunks: Callable[[str], float]
) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a", "b")
    await worker.has("a", "b")
    early = SdkReader(cluster, "a")
    await wait_until(lambda: REGISTRY.get_sample_value("ebbtide_coordinator_token_readers") == 1)
    await worker.send(worker.delta("a", 0, 3), worker.delta("b", 0, 9))
    await early.has(3)
    await worker.send(worker.delta("b", 9, 2), worker.delta("a", 3, 2))
    await early.has(5)
    assert (chunks("pushed"), chunks("read")) == (2, 0)
    late = SdkReader(cluster, "a")
    await late.has(5)
    assert chunks("read") == 1
    await worker.add("a", 5, 1, STOP)
    assert await early.ended() == await late.ended() == list(range(6))
    assert (chunks("pushed"), chunks("read")) == (4, 1)
    await wait_until(lambda: REGISTRY.get_sample_value("ebbtide_coordinator_token_readers") == 0)


async def test_a_rollout_that_goes_on_at_another_worker_goes_on_in_its_readers_stream(
    cluster: Any, chunks: Callable[[str], float]
) -> None:
    run = await cluster.run()
    first = await cluster.worker("w1")
    await run.submit("a")
    await first.has("a")
    reader = SdkReader(cluster, "a")
    await wait_until(lambda: REGISTRY.get_sample_value("ebbtide_coordinator_token_readers") == 1)
    await first.add("a", 0, 4)
    await reader.has(4)
    old = first.delta("a", 4, 3)
    await first.break_streams()
    second = await cluster.worker("w2")
    await second.has("a")
    (ack,) = await second.send(old)
    assert ack.status == fleet_pb2.AppendAck.STATUS_SUPERSEDED
    await second.add("a", 4, 2)
    await reader.has(6)
    await second.add("a", 6, 1, STOP)
    assert await reader.ended() == list(range(7))
    assert chunks("pushed") == 3


async def test_a_coordinator_that_restarts_costs_readers_a_pause_alone(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    await worker.add("a", 0, 4)
    held = [fleet_pb2.HeldAttempt(attempt=worker.assigned["a"].attempt, offset=4)]
    before = SdkReader(cluster, "a")
    await before.has(4)
    before.task.cancel()
    await cluster.restart()
    version = types_pb2.PolicyVersion(policy="policy", version=1, step=0, root=bytes([1]) * 32)
    back = await cluster.worker("w1", held=held, installed=[version])
    back.assigned.update(worker.assigned)
    after = SdkReader(cluster, "a", offset=4)
    await back.add("a", 4, 3)
    await wait_until(lambda: token_count(after.chunks[0].tokens) == 3 if after.chunks else False)
    await back.add("a", 7, 1, STOP)
    assert before.ids + await after.ended() == list(range(8))


async def test_a_cancelled_rollout_ends_its_readers_at_once(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    reader = SdkReader(cluster, "a")
    await worker.add("a", 0, 2)
    await reader.has(2)
    await run.cancel("a")
    await wait_until(reader.task.done, timeout=1.5, what="the reader's end, long before it looks again")
    assert reader.task.exception() is not None


async def test_a_cancelled_request_ends_its_readers_behind_the_tokens_that_it_has(cluster: Any) -> None:
    run = await cluster.run()
    await run.claim(holder="g1", role="gateway")
    worker = await cluster.worker("w1")
    await run.submit("q", kind=RolloutKind.REQUEST, interactive=True)
    await worker.has("q")
    assert worker.assigned["q"].interactive
    reader = SdkReader(cluster, "q")
    await worker.add("q", 0, 2)
    await reader.has(2)
    await run.cancel("q")
    assert await reader.ended() == [0, 1]
    assert reader.chunks[-1].reason is FinishReason.CANCELLED
