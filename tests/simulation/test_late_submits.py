"""A day of a run in virtual time: the store does not grow, and a submit that is a day late is recognised."""

import asyncio
import time
from typing import Final
from unittest.mock import patch

from ebbtide.client.held_lease import LeaseJournal
from ebbtide.store.connection import StoreConnection
from ebbtide.store.scripts import run_key, run_prefix
from ebbtide.store.store import Store
from ebbtide.types.rollout import RolloutRequest, SubmitOrder, SubmitOutcome
from ebbtide.types.run import EnvironmentSpec, LeaseRef, RunSpec, Sampling
from ebbtide.types.tokens import pack_ids
from tests.simulation.loop import Proc
from tests.simulation.world import World

RUN: Final = "day"
#: The smallest quota: it keeps the fewest ids.
QUOTA: Final = 1 << 20
KEPT: Final = 256
EVERY_S: Final = 300.0
DAY_S: Final = 86_400.0
BATCH: Final = 24


def batch(number: int) -> list[RolloutRequest]:
    sampling = Sampling(max_tokens=1)
    return [
        RolloutRequest(
            rollout_id=f"x{number}.{i}", group_id="g", episode_id="e", prompt_ids=pack_ids([1]), sampling=sampling
        )
        for i in range(BATCH)
    ]


async def submit(store: Store, lease: LeaseRef, number: int, order: SubmitOrder) -> set[SubmitOutcome]:
    rows = await store.rollouts.submit(lease, batch(number), quota_bytes=QUOTA, max_open=4096, order=order)
    return {row.outcome for row in rows}


def members(world: World) -> int:
    """Of all of the run's keys."""
    items = ((key, item.value) for key, item in world.store.data.items() if key.startswith(run_prefix(RUN).encode()))
    return sum(len(value) for _, value in items)


async def live_a_day(world: World) -> None:
    link = StoreConnection("redis://127.0.0.1:6379/0")
    await link.open()
    store, journal = Store(link, "term"), LeaseJournal()
    await store.runs.take_over()
    await store.runs.submit(RUN, RunSpec(name=RUN, model="m", environment=EnvironmentSpec(name="e"), quota_bytes=QUOTA))
    lease = await store.leases.claim(RUN, "trainer", "here", 2 * DAY_S)
    journal.renewed("life", 2.0, time.monotonic())
    orders, sizes, began = list[SubmitOrder](), list[int](), time.monotonic()
    while time.monotonic() - began < DAY_S:
        orders.append(journal.order(step=None, first_step=0))
        assert await submit(store, lease, len(orders) - 1, orders[-1]) == {SubmitOutcome.ACCEPTED}
        journal.add(asyncio.Event().wait, 100, time.monotonic(), orders[-1].sequence)
        await store.rollouts.cancel(lease, [one.rollout_id for one in batch(len(orders) - 1)], "cancelled")
        await asyncio.sleep(EVERY_S)
        journal.renewed("life", 2.0, time.monotonic())
        sizes.append(members(world))
    assert max(sizes[len(sizes) // 2 :]) <= sizes[len(sizes) // 2] + 8
    assert await submit(store, lease, 0, orders[0]) == {SubmitOutcome.COMPLETED}
    newest = len(orders) - KEPT // BATCH + 1
    unnumbered = [await submit(store, lease, number, SubmitOrder()) for number in (newest, 0)]
    assert unnumbered == [{SubmitOutcome.COMPLETED}, {SubmitOutcome.ACCEPTED}]
    assert int(await link.call("ZCARD", run_key(RUN, "SUBMITS", "trainer"))) == 1
    await link.close()


def test_a_submit_is_recognised_a_day_after_its_rollouts_were_over_and_the_store_does_not_grow() -> None:
    world = World(0)
    # Nothing here waits until a write is durable: four looks a second, for a day, would be most of the test's time.
    seldom = patch.multiple("ebbtide.store.durability", _SAMPLE_S=60.0, _REST_S=30.0)
    with world.patched(), seldom:
        asyncio.set_event_loop(world.loop)
        try:
            world.start("redis")
            world.loop.run_until_complete(Proc("coordinator", world.loop).spawn(live_a_day(world), "a day"))
        finally:
            asyncio.set_event_loop(None)
            world.close()
