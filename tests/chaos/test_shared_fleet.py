"""Two runs on workers that go back and forth between them: rollouts are handed over, and each comes out whole."""

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack

import pytest

from ebbtide.client import Client, Lease
from ebbtide.types.rollout import FinishedRollout, RolloutRequest
from ebbtide.types.tokens import unpack_ids, unpack_tokens
from tests.chaos.cluster import FLUSH_TOKENS, SCRIPT, Cluster
from tests.chaos.load import SPEC, make_requests, publish
from tests.fakes.scripted_engine import END, follow
from tests.support.waiting import wait_until

_ROLLOUTS = 80
#: So few slots that each run's rollouts wait for many turns.
_SLOTS = 8


class Side:
    """One of the runs: its rollouts, and what came of them."""

    def __init__(self, lease: Lease, first: int) -> None:
        self.lease = lease
        self.requests: dict[str, RolloutRequest] = {one.rollout_id: one for one in make_requests(first, _ROLLOUTS)}
        self.came: dict[str, FinishedRollout] = {}
        self._task = asyncio.create_task(self._collect())

    @classmethod
    async def begin(cls, client: Client, run_id: str, first: int) -> "Side":
        await client.submit(SPEC, run_id)
        side = cls(await client.acquire(run_id, holder=run_id), first)
        await publish(side.lease, step=first)
        await side.lease.submit_rollouts(side.requests.values())
        return side

    async def _collect(self) -> None:
        async for finish in self.lease.finished():
            assert finish.rollout_id not in self.came
            self.came[finish.rollout_id] = finish

    def expected(self, name: str) -> list[int]:
        request = self.requests[name]
        script = follow(SCRIPT, unpack_ids(request.prompt_ids).tolist(), request.sampling.max_tokens)
        ids = [token for token, _ in script]
        return ids[: ids.index(END) + 1] if END in ids else ids

    async def whole(self) -> None:
        """Wait for all of it, and compare each token."""
        await wait_until(lambda: len(self.came) == len(self.requests), timeout=90, what="all rollouts")
        for name, finish in self.came.items():
            assert unpack_tokens(finish.tokens)["id"].tolist() == self.expected(name), name

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.lease.release()


async def _two(cluster: Cluster, stack: AsyncExitStack) -> list[Side]:
    client = await cluster.boot(workers=0, timeslice_s=0.5)
    sides = [await Side.begin(client, run_id, first) for run_id, first in (("one", 0), ("two", 1000))]
    for side in sides:
        stack.push_async_callback(side.close)
    await asyncio.gather(*(cluster.worker(name, slots=_SLOTS) for name in ("w1", "w2", "w3")))
    return sides


def _generated_twice(cluster: Cluster, sides: list[Side]) -> int:
    made: dict[str, int] = defaultdict(int)
    for record in cluster.ledger():
        made[record.rollout_id] += record.generated
    return sum(made[name] - len(side.expected(name)) for side in sides for name in side.requests)


@pytest.mark.timeout(240)
async def test_no_token_is_generated_twice_when_workers_go_over_to_another_run(cluster: Cluster) -> None:
    async with AsyncExitStack() as stack:
        sides = await _two(cluster, stack)
        await asyncio.gather(*(side.whole() for side in sides))
        assert _generated_twice(cluster, sides) == 0
        records = cluster.ledger()
        assert any(record.start for record in records)  # some went on elsewhere, or here later
        assert {record.run_id for record in cluster.ledger("w1")} | {
            record.run_id for record in cluster.ledger("w2")
        } == {"one", "two"}


@pytest.mark.timeout(240)
async def test_workers_killed_while_they_go_back_and_forth_lose_no_more_than_their_flush_windows(
    cluster: Cluster,
) -> None:
    async with AsyncExitStack() as stack:
        sides = await _two(cluster, stack)
        for number in range(3):
            least = sum(len(side.came) for side in sides) + 15
            await wait_until(lambda: sum(len(side.came) for side in sides) >= least, timeout=60)  # noqa: B023
            cluster.kill(f"w{number + 1}")
            await cluster.worker(f"w{number + 4}", slots=_SLOTS)
        await asyncio.gather(*(side.whole() for side in sides))
        interruptions = len(cluster.ledger()) - 2 * _ROLLOUTS
        assert 0 <= _generated_twice(cluster, sides) <= FLUSH_TOKENS * interruptions
