"""What a run remembers of its attempts: the timeline, and what was counted."""

from typing import Any

import pytest

from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.store.scripts import run_key
from ebbtide.types.fleet import EndCause, WorkerState
from ebbtide.types.rollout import DropReason, RolloutKind
from ebbtide.types.tokens import pack_ids
from ebbtide.v1 import fleet_pb2, rollouts_pb2, runs_pb2, types_pb2
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP


async def timeline(cluster: Any, cursor: str = "") -> list[runs_pb2.AttemptSpan]:
    request = runs_pb2.ReadTimelineRequest(run_id="r", cursor=cursor)
    return [span async for span in cluster.runs.ReadTimeline(request, timeout=10)]


async def spans(cluster: Any, count: int) -> list[runs_pb2.AttemptSpan]:
    found: list[runs_pb2.AttemptSpan] = []

    async def all_there() -> bool:
        found[:] = await timeline(cluster)
        return len(found) >= count

    await wait_until(all_there, what=f"{count} spans")
    assert len(found) == count
    return found


async def test_the_timeline_tells_which_worker_made_which_tokens_when(cluster: Any) -> None:
    run, first = await cluster.run(), await cluster.worker("w1")
    await run.submit("a")
    await first.has("a")
    await first.add("a", 0, 5)
    await first.break_streams()
    second = await cluster.worker("w2")
    await second.has("a")
    await second.add("a", 5, 3, STOP)
    one, two = await spans(cluster, 2)
    assert (one.worker_id, one.first, one.last, one.first_version, one.last_version) == ("w1", 0, 5, 1, 1)
    assert (one.end, EndCause(one.cause)) == ("worker lost: its stream broke", EndCause.WORKER_LOST)
    assert (two.worker_id, two.first, two.last, two.end) == ("w2", 5, 8, "finished")
    assert two.attempt_id == second.assigned["a"].attempt.attempt_id != one.attempt_id
    assert 0 <= one.begin_s <= one.end_s <= two.begin_s <= two.end_s
    assert await timeline(cluster, one.cursor) == [two]


async def test_every_attempt_leaves_one_span_however_it_ends(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    await run.submit("a", "b", "c", "d")
    await worker.has("a", "b", "c", "d")
    await worker.add("a", 0, 1, STOP)
    await run.cancel("b")
    await run.complete("e.c", "c", drop=DropReason.TIMEOUT)
    await run.finish(types_pb2.RUN_STATUS_FAILED)
    found = {span.rollout_id: span for span in await spans(cluster, 4)}
    ends = {rollout_id: (span.end, EndCause(span.cause)) for rollout_id, span in found.items()}
    assert ends == {
        "a": ("finished", EndCause.FINISHED),
        "b": ("cancelled", EndCause.CANCELLED),
        "c": ("cancelled", EndCause.CANCELLED),
        "d": ("run ended", EndCause.RUN_ENDED),
    }
    assert (found["d"].first, found["d"].last, found["d"].first_version) == (0, 0, 0)


async def test_a_span_names_the_group_episode_turn_and_prompt_of_its_rollout(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    more = {"group_id": "s7.g2", "episode_id": "s7.g2.1", "turn": 3, "prompt_ids": pack_ids(range(5))}
    request = rollouts_pb2.SubmitRequest(lease=run.lease, rollouts=[run.request("a", **more)], step=7)
    await cluster.call(cluster.rollouts.Submit, request)
    await run.submit("b", kind=RolloutKind.EVAL)
    await worker.has("a", "b")
    await worker.add("a", 0, 2, STOP)
    await worker.add("b", 0, 2, STOP)
    found = {span.rollout_id: span for span in await spans(cluster, 2)}
    one, two = found["a"], found["b"]
    assert (one.group_id, one.episode_id, one.turn, one.prompt_tokens) == ("s7.g2", "s7.g2.1", 3, 5)
    assert (one.evaluation, one.HasField("step"), one.step) == (False, True, 7)
    assert (two.evaluation, two.HasField("step"), two.prompt_tokens) == (True, False, 3)


async def test_a_span_with_a_cause_of_a_later_release_is_read(cluster: Any) -> None:
    await cluster.run()
    link, key = cluster.coordinator.link, run_key("r", "SPANS")
    fields = {"r": "a", "a": "a1", "w": "w1", "f": 0, "l": 0, "b": 1, "v": b"", "o": "", "e": 2, "why": "new", "c": 99}
    await link.call("XADD", key, "*", *(part for field in fields.items() for part in field))
    (span,) = await spans(cluster, 1)
    assert (EndCause(span.cause), span.end, span.HasField("step")) == (EndCause.NOT_STATED, "new", False)


async def test_what_no_timeline_can_have_is_refused(cluster: Any) -> None:
    await cluster.run()
    with pytest.raises(NotFound):
        await run_of(cluster, run_id="none")
    with pytest.raises(InvalidRequest):
        await run_of(cluster, run_id="r", cursor="later")


async def run_of(cluster: Any, **request: Any) -> Any:
    from ebbtide.rpc.status_table import translated

    with translated("coordinator"):
        return await cluster.runs.ReadTimeline(runs_pb2.ReadTimelineRequest(**request), timeout=10).read()


async def test_a_lost_worker_is_counted_with_what_it_cost(cluster: Any) -> None:
    run = await cluster.run()
    first = await cluster.worker("w1", flush_tokens=32)
    await run.submit("a")
    await first.has("a")
    await first.add("a", 0, 5)
    await first.break_streams()
    second = await cluster.worker("w2")
    await second.has("a")
    await second.add("a", 5, 3, STOP)

    async def counted() -> bool:
        return any(name.startswith("resume:le:") for name in (await run.get()).counters)

    await wait_until(counted, what="the resume is counted")
    counters = (await run.get()).counters
    assert counters["tokens_lost_at_most"] == 32  # its rate is not known: the whole window
    assert (counters["resumed_midway"], counters["tokens_resumed"]) == (1, 5)
    assert sum(n for name, n in counters.items() if name.startswith("detection:le:")) == 1
    assert counters["attempts:le:2"] == 1
    assert "moved" not in counters


async def test_a_lost_worker_costs_no_more_than_it_can_have_made(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", flush_tokens=1 << 20)
    await run.submit("a")
    await worker.has("a")
    await worker.add("a", 0, 5)
    await worker.say(heartbeat=fleet_pb2.Heartbeat(state=types_pb2.WORKER_STATE_READY, tokens_per_s=10.0))
    await wait_until(lambda: cluster.coordinator.fleet.workers()[0].tokens_per_s == 10.0, what="the heartbeat is heard")
    await worker.break_streams()

    async def lost() -> Any:
        return await run.count("queued")

    await wait_until(lost, what="the rollout is back in line")
    assert await run.count("tokens_lost_at_most") < 59  # of 64, 5 are stored
    (listed,) = cluster.coordinator.fleet.workers()
    assert (listed.state, listed.running) == (WorkerState.LOST, 1)
    assert "stream" in listed.reason
