"""What is counted, what is kept, and what is refused: every training rollout ends as trained or dropped."""

from typing import Any

import pytest

from ebbtide.errors import AlreadyExists, InvalidRequest, NoCapacity, NotReady
from ebbtide.types.rollout import RolloutKind
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids
from ebbtide.v1 import types_pb2
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
ACCEPTED, KNOWN, COMPLETED = 1, 2, 3


async def _finish(worker: Any, *rollout_ids: Any) -> Any:
    await worker.has(*rollout_ids)
    for rollout_id in rollout_ids:
        assert (await worker.add(rollout_id, 0, 4, STOP)).finished


async def test_submit_is_idempotent_in_every_state_of_a_rollout(cluster: Any) -> None:
    run = await cluster.run()
    assert await run.submit("a") == [ACCEPTED]
    assert await run.submit("a", "b", "b") == [KNOWN, ACCEPTED, KNOWN]
    worker = await cluster.worker("w1")
    await worker.has("a", "b")
    assert await run.submit("a") == [KNOWN]
    await _finish(worker, "a")
    assert await run.submit("a") == [KNOWN]
    await run.complete("e.a", "a")
    assert await run.submit("a") == [COMPLETED]
    assert await run.count("submitted") == 2


async def test_the_same_id_with_another_body_is_refused_and_nothing_of_the_call_taken(cluster: Any) -> None:
    run = await cluster.run()
    await run.submit("a")
    with pytest.raises(AlreadyExists, match="rollout a"):
        await run.send(run.request("new"), run.request("a", prompt_ids=pack_ids([9])))
    assert await run.count("submitted") == 1
    assert await run.submit("a", min_version=1, priority=3) == [KNOWN]  # when, not what


async def test_the_books_add_up_whatever_becomes_of_a_rollout(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", slots=4)
    await run.submit(*"abcdef")
    await worker.has("a", "b", "c", "d")
    await run.submit("v", kind=RolloutKind.EVAL)
    await _finish(worker, "a", "b", "c", "d")
    await worker.has("e", "f", "v")
    await run.complete("e.a", "a")
    await run.complete("e.b", "b", drop="environment_failure")
    await run.acknowledge("c")
    await run.acknowledge("d", drop="too_stale")
    await run.cancel("e")
    await wait_until(lambda: worker.cancelled == ["e"])
    with pytest.raises(NotReady, match="2 training rollouts"):
        await run.finish()
    (trajectory,) = await run.trajectories(1)
    assert trajectory.rollouts == 1
    await run.commit(trajectory.cursor)
    await run.complete("e.f", "f", drop="episode_timeout")  # still running
    await wait_until(lambda: worker.cancelled == ["e", "f"])
    await _finish(worker, "v")
    await run.complete("e.v", "v", evaluation=True)
    record = await run.get()
    assert dict(record.dropped) == {"environment_failure": 1, "too_stale": 1, "cancelled": 1, "episode_timeout": 1}
    assert record.counters["submitted"] == record.counters["trained"] + sum(record.dropped.values()) == 6
    assert [record.counters[name] for name in ("eval_submitted", "eval_completed")] == [1, 1]
    assert [record.counters[name] for name in ("queued", "running", "finished", "trajectories", "bytes")] == [0] * 5
    ended = await run.finish()
    assert ended.status == types_pb2.RUN_STATUS_FINISHED
    assert (await run.finish()).counters == ended.counters


async def test_completing_an_episode_twice_makes_one_trajectory(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a", "b")
    await _finish(worker, "a", "b")
    await run.complete("e", "a")
    await run.complete("e", "a")
    await run.complete("e2", "b")
    found = await run.trajectories(2)
    assert [one.episode_id for one in found] == ["e", "e2"]
    assert [one.episode_id for one in await run.trajectories(1, cursor=found[0].cursor)] == ["e2"]
    await run.commit(found[0].cursor)
    await run.commit(found[0].cursor, found[1].cursor)
    assert await run.count("trained") == 2


async def test_episodes_that_cannot_be_completed_are_refused_by_name(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a", "b")
    await _finish(worker, "a")
    await worker.has("b")
    with pytest.raises(InvalidRequest, match=r"episodes\[0\].rollout_ids\[1\]: b is not finished"):
        await run.complete("e", "a", "b")
    with pytest.raises(InvalidRequest, match=r"episodes\[0\].rollout_ids\[0\]: z was never submitted"):
        await run.complete("e", "z")
    with pytest.raises(InvalidRequest, match=r"episodes\[0\].trajectory"):
        await run.complete("e", "a", evaluation=True)
    with pytest.raises(InvalidRequest, match=r"rollout_ids\[0\]: b is not finished"):
        await run.acknowledge("b")
    assert await run.count("finished") == 1


async def test_the_quota_pushes_back_on_submit_and_recovers_when_data_is_committed(cluster: Any) -> None:
    run = await cluster.run(quota_bytes=1 << 20)
    prompt = pack_ids([7] * 200)
    full = [
        run.request(f"x{number}", prompt_ids=prompt) for number in range(1308)
    ]  # of 1,048,576 bytes, 2,176 are free
    assert set(await run.send(*full)) == {ACCEPTED}
    large = pack_ids([7] * 600)
    for late in ([run.request("y", prompt_ids=large)], [run.request("z"), run.request("y", prompt_ids=large)]):
        with pytest.raises(NoCapacity, match="quota_bytes") as refused:
            await run.send(*late)
        assert refused.value.retry_after_s > 0
    assert await run.count("submitted") == 1308
    worker = await cluster.worker("w1", slots=1)
    await _finish(worker, "x0")
    await run.complete("e.x0", "x0")
    (trajectory,) = await run.trajectories(1)
    await run.commit(trajectory.cursor)
    assert await run.send(run.request("y", prompt_ids=prompt)) == [ACCEPTED]  # beside what is kept of x0
    assert await run.count("bytes") == 1308 * 800


async def test_a_full_queue_pushes_back_on_submit(cluster_with: Any) -> None:
    async with cluster_with(max_open=3) as cluster:
        run = await cluster.run()
        await run.submit("a", "b")
        with pytest.raises(NoCapacity, match="queue"):
            await run.submit("c", "d")
        assert await run.submit("c") == [ACCEPTED]
        worker = await cluster.worker("w1")
        await _finish(worker, "a")
        assert await run.submit("d") == [ACCEPTED]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"prompt_ids": pack_ids([])}, r"rollouts\[0\].prompt_ids: must hold at least one"),
        ({"prompt_ids": b"\0\0\0"}, r"rollouts\[0\].prompt_ids"),
        ({"prompt_ids": pack_ids([1] * 256)}, r"rollouts\[0\].prompt_ids: 256 tokens"),
        ({"prompt_ids": pack_ids([1000])}, r"rollouts\[0\].prompt_ids: token id 1000"),
        ({"sampling": Sampling(seed=3)}, r"rollouts\[0\].sampling.seed"),
        ({"sampling": Sampling(presence_penalty=0.5)}, r"rollouts\[0\].sampling.presence_penalty"),
        ({"min_version": 3, "max_version": 2}, r"rollouts\[0\].min_version"),
        ({"group_id": "a/b"}, r"rollouts\[0\].group_id"),
    ],
)
async def test_what_could_not_be_generated_is_refused_at_submit_by_name(cluster: Any, more: Any, named: Any) -> None:
    run = await cluster.run()
    await cluster.worker("w1")
    with pytest.raises(InvalidRequest, match=named):
        await run.submit("a", **more)
    assert await run.count("submitted") == 0
