"""The way of a rollout through the two streams, and the fences on it."""

from typing import Any

import pytest

from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.types.fleet import EndCause
from ebbtide.types.tokens import pack_ids, unpack_tokens
from ebbtide.v1 import fleet_pb2, rollouts_pb2, types_pb2
from ebbtide.v1.fleet_pb2 import AppendAck
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
STORED, GAP, SUPERSEDED = AppendAck.STATUS_STORED, AppendAck.STATUS_GAP, AppendAck.STATUS_SUPERSEDED


async def test_a_rollout_goes_from_submit_to_a_worker_to_the_finished_stream(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    assert await run.submit("a", "b") == [1, 1]
    await worker.has("a", "b")
    assert worker.installed == [1]
    ack = await worker.add("a", 0, 8)
    assert (ack.status, ack.stored, ack.finished, worker.durable) == (STORED, 8, False, True)
    assert (await worker.add("a", 8, 2, STOP)).finished
    (done,) = await run.finished(1)
    assert (done.rollout_id, done.reason, done.attempts) == ("a", STOP, 1)
    assert list(unpack_tokens(done.tokens)["id"]) == list(range(10))


async def test_rollouts_that_finished_together_come_in_one_message_for_who_asks_for_groups(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a", "b", "c")
    await worker.has("a", "b", "c")
    for name in ("a", "b", "c"):
        await worker.add(name, 0, 2, STOP)
    alone = await run.finished(3)
    assert [(one.rollout_id, len(one.others)) for one in alone] == [("a", 0), ("b", 0), ("c", 0)]
    (group,) = await run.finished(1, grouped=True)
    assert [group.rollout_id, *(one.rollout_id for one in group.others)] == ["a", "b", "c"]
    assert [one.cursor for one in group.others] == [one.cursor for one in alone[1:]]
    (rest,) = await run.finished(1, cursor=group.cursor, grouped=True)
    assert (rest.rollout_id, [one.rollout_id for one in rest.others]) == ("b", ["c"])


async def test_a_repeat_is_harmless_and_a_gap_or_overlap_is_told_where_to_go_on(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    await worker.add("a", 0, 8)
    assert [(a.status, a.stored) for a in [await worker.add("a", 0, 8), await worker.add("a", 3, 5)]] == [
        (STORED, 8)
    ] * 2
    assert [(a.status, a.stored) for a in [await worker.add("a", 9, 1), await worker.add("a", 4, 8)]] == [(GAP, 8)] * 2
    assert (await worker.add("a", 8, 2, STOP)).finished
    repeated = await worker.add("a", 8, 2, STOP)
    assert (repeated.status, repeated.stored, repeated.finished) == (STORED, 10, True)
    assert len((await run.finished(1))[0].tokens) == 10 * 12
    assert await run.count("tokens_stored") == 10


async def test_a_repeat_writes_nothing_to_the_store(cluster: Any) -> None:
    async def appended() -> str:
        stats: bytes = await cluster.coordinator.link.call("INFO", "commandstats")
        return next(line for line in stats.decode().splitlines() if line.startswith("cmdstat_append:"))

    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a", "b")
    await worker.has("a", "b")
    await worker.send(worker.delta("a", 0, 8), worker.delta("b", 0, 8))
    before = await appended()
    acks = await worker.send(worker.delta("a", 0, 8), worker.delta("b", 4, 4), worker.delta("a", 9, 1))
    assert [(ack.status, ack.stored) for ack in acks] == [(STORED, 8), (STORED, 8), (GAP, 8)]
    assert await appended() == before


async def test_several_deltas_of_one_rollout_in_one_message_follow_on(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a", "b")
    await worker.has("a", "b")
    acks = await worker.send(worker.delta("a", 0, 4), worker.delta("b", 0, 3), worker.delta("a", 4, 4, STOP))
    assert [(ack.stored, ack.finished) for ack in acks] == [(4, False), (3, False), (8, True)]


async def test_a_broken_stream_requeues_at_once_and_the_next_worker_gets_the_partial(cluster: Any) -> None:
    run = await cluster.run()
    first, second = await cluster.worker("w1", slots=2), None
    await run.submit("a", "b")
    await first.has("a", "b")
    await first.send(first.delta("a", 0, 8), first.delta("b", 0, 0))
    await first.break_streams()
    second = await cluster.worker("w2")
    await second.has("a", "b")
    assert second.assigned["a"].partial == first.delta("a", 0, 8).tokens
    assert second.assigned["b"].partial == b""
    assert second.assigned["a"].attempt.attempt_id != first.assigned["a"].attempt.attempt_id
    assert (await second.add("a", 8, 2, STOP)).finished
    (done,) = await run.finished(1)
    assert (len(done.tokens), done.attempts) == (120, 2)
    record = await run.get()
    assert (record.counters["attempts"], record.counters["resumed_midway"], record.counters["tokens_resumed"]) == (
        4,
        1,
        8,
    )
    events = {event.labels["rollout"]: event for event in await run.events("resumed", 2)}
    assert dict(events["a"].labels) == {"rollout": "a", "from": "w1", "to": "w2"}
    assert events["a"].values["offset"] == 8
    (lost,) = [event for event in await run.events("worker", 2) if event.labels["state"] == "lost"]
    assert lost.values["rollouts"] == 2


async def test_a_superseded_attempt_cannot_append(cluster: Any) -> None:
    run = await cluster.run()
    first = await cluster.worker("w1", slots=1)
    await run.submit("a")
    await first.has("a")
    await first.add("a", 0, 4)
    first._control.cancel()  # its append stream stays open, as a frozen worker's would
    second = await cluster.worker("w2")
    await second.has("a")
    old = first.delta("a", 4, 4)
    with pytest.raises(NotFound, match="attach again"):
        await first.send(old)
    (ack,) = await second.send(old)  # even through a living session, the old attempt id counts for nothing
    assert ack.status == SUPERSEDED
    assert (await second.add("a", 4, 4)).stored == 8


async def test_a_silent_worker_is_lost_and_its_rollouts_go_elsewhere(cluster_with: Any) -> None:
    async with cluster_with(heartbeat_timeout_s=0.4) as cluster:
        run = await cluster.run()
        first = await cluster.worker("w1", slots=1)
        await run.submit("a")
        await first.has("a")
        second = await cluster.worker("w2", slots=1)

        async def beats_and_has_it() -> bool:
            await second.say(heartbeat=fleet_pb2.Heartbeat(state=types_pb2.WORKER_STATE_READY))
            return "a" in second.assigned

        await wait_until(beats_and_has_it, interval=0.05)
        await wait_until(lambda: isinstance(first.ended, NotFound))


async def test_released_attempts_go_on_elsewhere_and_do_not_count_against_their_rollout(cluster_with: Any) -> None:
    async with cluster_with(max_stalled_attempts=1) as cluster:
        run = await cluster.run()
        first = await cluster.worker("w1")
        await run.submit("a")
        await first.has("a")
        await first.say(draining=fleet_pb2.Draining(deadline_s=5))
        await first.hand_back("a", cause=EndCause.WORKER_LEAVES)
        second = await cluster.worker("w2")
        await second.has("a")
        assert (await run.events("worker", 2))[1].labels["state"] == "draining"


async def test_a_rollout_that_never_gets_a_token_becomes_a_dead_letter_with_evidence(cluster_with: Any) -> None:
    async with cluster_with(max_stalled_attempts=2) as cluster:
        run = await cluster.run()
        await run.submit("a", "b")
        for number in range(3):
            worker = await cluster.worker(f"w{number}")
            await worker.has(*(("a", "b") if number < 2 else ("b",)))
            await worker.add("b", number * 4, 4)  # b makes progress each time, a never does
            await worker.break_streams()
        (letter,) = await run.finished(1)
        assert (letter.rollout_id, letter.reason) == ("a", types_pb2.FINISH_REASON_DEAD_LETTERED)
        assert "w0" in letter.message
        assert "w1" in letter.message
        await run.acknowledge("a", drop="dead_lettered")
        assert (await run.get()).dropped == {"dead_lettered": 1}


async def test_a_prompt_longer_than_every_context_becomes_a_dead_letter_with_evidence(
    cluster: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ebbtide.coordinator.dispatch.unserved_work._LONGER_GRACE_S", 0.1)
    monkeypatch.setattr("ebbtide.coordinator.dispatch.dispatch_round._MEASURE_EVERY_S", 0.0)
    run = await cluster.run()
    await run.submit("long", prompt_ids=pack_ids([1] * 256))  # nobody is there yet to say that it is too long
    await run.submit("short")
    worker = await cluster.worker("w1")
    await worker.has("short")
    (letter,) = await run.finished(1)
    assert (letter.rollout_id, letter.reason) == ("long", types_pb2.FINISH_REASON_DEAD_LETTERED)
    assert "256 tokens" in letter.message
    assert "longest context attached (256)" in letter.message
    assert set(worker.assigned) == {"short"}


async def test_tokens_stream_from_an_offset_to_the_finish(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    await worker.add("a", 0, 8)
    stream = cluster.rollouts.StreamTokens(rollouts_pb2.StreamTokensRequest(run_id="r", rollout_id="a", offset=5))
    first = await stream.read()
    assert (first.offset, list(unpack_tokens(first.tokens)["id"]), first.reason) == (5, [5, 6, 7], 0)
    await worker.add("a", 8, 2, STOP)
    last = await stream.read()
    assert (last.offset, list(unpack_tokens(last.tokens)["id"]), last.reason) == (8, [8, 9], STOP)


async def test_what_no_worker_may_send_is_refused_by_name(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    nothing: Any = lambda message: None  # noqa: E731
    for delta, spoil, named in [
        (worker.delta("a", 0, 1), lambda message: setattr(message, "tokens", b"x" * 13), "^tokens"),
        (worker.delta("a", 0, 1), lambda message: message.numbers.__setitem__(0, 7), r"^deltas\[0\].number"),
        (worker.delta("a", 0, 1), lambda message: message.offsets.append(3), "^numbers"),
        (worker.delta("a", 0, 1), lambda message: message.finishes.add(index=1, reason=STOP), "^finishes"),
        (worker.delta("a", 60, 5), nothing, r"^deltas\[0\].tokens.*max_tokens"),
        (worker.delta("a", 0, 1, types_pb2.FINISH_REASON_CANCELLED), nothing, r"^deltas\[0\].finish"),
    ]:
        message = worker.message(delta)
        spoil(message)
        with pytest.raises(InvalidRequest, match=named):
            await worker.exchange(message)
        await worker.open_append()


async def test_turns_of_one_episode_prefer_one_worker(cluster: Any) -> None:
    run = await cluster.run()
    workers = {name: await cluster.worker(name) for name in ("w1", "w2", "w3")}
    await wait_until(lambda: all(worker.installed for worker in workers.values()))
    await run.submit("t0", episode_id="e")
    await wait_until(lambda: any("t0" in worker.assigned for worker in workers.values()))
    home = next(worker for worker in workers.values() if "t0" in worker.assigned)
    await run.submit("x1", "x2", "x3", "x4")
    await home.add("t0", 0, 1, STOP)
    for turn in range(1, 4):
        await run.submit(f"t{turn}", episode_id="e")
        await home.has(f"t{turn}")
        await home.add(f"t{turn}", 0, 1, STOP)


async def test_the_stores_answer_to_a_placement_is_bounded_in_bytes(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.store.rollouts._PLACE_BYTES", 500, raising=False)
    rollouts, answers = cluster.coordinator.store.rollouts, list[int]()
    place = rollouts.place

    async def noted(*asked: Any) -> Any:
        placed = await place(*asked)
        answers.append(len(placed))
        return placed

    monkeypatch.setattr(rollouts, "place", noted)
    run, names = await cluster.run(), [f"a{number}" for number in range(6)]
    await run.submit(*names, prompt_ids=pack_ids([1] * 100))
    worker = await cluster.worker("w1")
    await worker.has(*names)
    assert sum(answers) == 6
    assert max(answers) <= 2
    for name in names:
        assert (await worker.add(name, 0, 2, STOP)).finished
