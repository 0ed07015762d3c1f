"""A store that takes no writes says so, and has done nothing: no mirror is read again for it, and no run waits for
another's refusal.
"""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ebbtide.coordinator.dispatch.dispatch_round import StartPacing
from ebbtide.errors import StoreUnavailable
from ebbtide.store.records import WritesRefused
from ebbtide.v1 import fleet_pb2, types_pb2
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP


@pytest.fixture
def own_redis(tmp_path: Path) -> Any:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


def counted(cluster: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> Counter[str]:
    """How often a call of the store's rollouts began from now on, by run."""
    calls, topic = Counter[str](), cluster.coordinator.store.rollouts
    call = getattr(topic, name)

    def counting(run_id: str, *args: Any, **options: Any) -> Any:
        calls[run_id] += 1
        return call(run_id, *args, **options)

    monkeypatch.setattr(topic, name, counting)
    return calls


async def test_a_full_store_has_no_mirror_read_again_and_is_asked_ever_more_seldom(
    cluster_with: Any, own_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster_with(own_redis.url) as cluster:
        run, live = await cluster.run(), cluster.coordinator.state.runs["r"]
        await run.submit("a", "b")
        read, placed = (counted(cluster, monkeypatch, name) for name in ("open_rollouts", "place"))
        own_redis.command("CONFIG", "SET", "maxmemory", "1")
        worker = await cluster.worker("w1")
        with pytest.raises(StoreUnavailable, match="full"):
            await run.submit("c")
        await wait_until(lambda: placed["r"] == 4, what="the fourth try")
        assert not live.mirror.stale
        assert not read
        assert not worker.assigned
        before = time.monotonic()
        await wait_until(lambda: placed["r"] == 5, what="the fifth")
        assert time.monotonic() - before > 1.0
        own_redis.command("CONFIG", "SET", "maxmemory", "0")
        await worker.has("a", "b")
        assert not read


async def test_the_refusal_of_one_run_ends_no_round_for_the_others(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, other = await cluster.run("refused"), await cluster.run("other")
    topic = cluster.coordinator.store.rollouts
    place, tries = topic.place, Counter[str]()

    async def refusing(run_id: str, rows: Any) -> Any:
        tries[run_id] += 1
        if run_id == "refused":
            raise WritesRefused("the store has fewer replicas than its min-replicas-to-write; start them")
        return await place(run_id, rows)

    monkeypatch.setattr(topic, "place", refusing)
    workers = [await cluster.worker(f"w{number}") for number in range(2)]
    await refused.submit("a")
    await wait_until(lambda: tries["refused"], what="a refusal")
    await other.submit("b")
    await wait_until(lambda: any("b" in worker.assigned for worker in workers), 5)
    monkeypatch.setattr(topic, "place", place)
    await wait_until(lambda: any("a" in worker.assigned for worker in workers), 15)


async def test_an_unknown_outcome_still_has_the_mirror_read_again(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, topic = await cluster.run(), cluster.coordinator.store.rollouts
    place, read = topic.place, counted(cluster, monkeypatch, "open_rollouts")
    read_before = list[int]()  # each placement

    async def once(run_id: str, rows: Any) -> Any:
        read_before.append(read["r"])
        placed = await place(run_id, rows)
        if len(read_before) == 1:
            raise StoreUnavailable("the answer was lost")
        return placed

    monkeypatch.setattr(topic, "place", once)
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")  # once nobody continued the attempt that the store had begun
    assert read_before == [0, 1]


async def test_a_long_reading_of_one_mirror_delays_no_other_run(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.run("long")
    other = await cluster.run("other")
    workers = [await cluster.worker(f"w{number}") for number in range(2)]
    versions, reading, go_on = cluster.coordinator.store.runs.versions, asyncio.Event(), asyncio.Event()

    async def slow(run_id: str) -> Any:
        if run_id == "long":
            reading.set()
            await go_on.wait()
        return await versions(run_id)

    monkeypatch.setattr(cluster.coordinator.store.runs, "versions", slow)
    cluster.coordinator.state.mark_stale()
    await reading.wait()
    await other.submit("a")
    await wait_until(lambda: any("a" in worker.assigned for worker in workers), what="the other run's rollout starts")
    live = cluster.coordinator.state.runs["long"]
    assert live.mirror.stale, "nothing is placed by it until it is read"
    live.mirror.mark_stale()  # what this reading may have missed
    go_on.set()
    await wait_until(lambda: not live.mirror.stale)


async def test_patience_is_not_begun_anew_when_a_mirror_is_read_again(cluster: Any) -> None:
    run, live = await cluster.run(), cluster.coordinator.state.runs["r"]
    await run.submit("a")
    queued = live.queue.get("a")
    live.mirror.mark_stale()
    await wait_until(lambda: live.queue.get("a") is not queued, what="it is read again")
    assert live.queue.get("a").since == queued.since


async def test_a_rollout_that_finishes_as_it_is_queued_again_leaves_the_mirror_as_it_is(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    read = counted(cluster, monkeypatch, "open_rollouts")
    topic, asked = cluster.coordinator.store.rollouts, asyncio.Event()
    requeue = topic.requeue

    async def late(run_id: str, attempts: Any, why: Any) -> Any:
        await worker.add("a", 0, 2, STOP)
        found = await requeue(run_id, attempts, why)
        asked.set()
        return found

    monkeypatch.setattr(topic, "requeue", late)
    ref = worker.assigned["a"].attempt
    await worker.say(released=fleet_pb2.Released(attempts=[ref], reason="moved", cause=types_pb2.END_CAUSE_MOVED))
    await asked.wait()
    await run.submit("b")
    await worker.has("b")
    assert await run.count("finished") == 1
    assert not read


async def test_hosts_that_were_taken_back_are_freed_though_no_rollout_may_start(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, worker = await cluster.run(), await cluster.worker("lent", kind=types_pb2.WORKER_KIND_BORROWED)
    said = fleet_pb2.Borrowed(granted=True, share=0.8, spell_s=60.0)
    await worker.beat(borrowed=said)
    await run.submit("a")
    await worker.has("a")
    await worker.add("a", 0, 3)
    await cluster.worker("steady")
    monkeypatch.setattr(StartPacing, "held_s", lambda *_: 0.2)
    said.granted, said.spell_s = False, 300.0
    await worker.beat(held=True, borrowed=said)
    await wait_until(lambda: worker.asked == ["a"], 20, what="it is asked for the rollout")
