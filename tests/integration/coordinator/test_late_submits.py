"""What a run keeps of its past is bounded, and late submits are recognised all the same."""

import time
from typing import Any

import pytest

from ebbtide.coordinator.api.calls import AT_ONCE
from ebbtide.coordinator.fleet import worker_registry
from ebbtide.coordinator.rules.overload import Work
from ebbtide.errors import InvalidRequest, NoCapacity
from ebbtide.store.scripts import LuaScript, run_key, script
from ebbtide.v1 import rollouts_pb2, runs_pb2, types_pb2
from tests.support.waiting import wait_until

ACCEPTED, KNOWN, COMPLETED = 1, 2, 3
KEPT = 8
STOP = types_pb2.FINISH_REASON_STOP


@pytest.fixture
def frugal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs keep little of their past."""
    bounds = "LEAST_KEPT, MOST_KEPT, QUOTA_OF_ONE = 256, 16384,"
    assert bounds in script("submit").text.decode()

    def changed(name: str) -> LuaScript:
        text = script(name).text.decode().replace(bounds, f"LEAST_KEPT, MOST_KEPT, QUOTA_OF_ONE = {KEPT}, {KEPT},")
        return LuaScript(name, text.replace("REMEMBERED_S = 10", "REMEMBERED_S = 0"))

    monkeypatch.setattr("ebbtide.store.connection.script", changed)


async def submit(run: Any, *rollout_ids: str, **order: Any) -> list[int]:
    rollouts = [run.request(rollout_id) for rollout_id in rollout_ids]
    request = rollouts_pb2.SubmitRequest(lease=run.lease, rollouts=rollouts, **order)
    return list((await run.cluster.call(run.cluster.rollouts.Submit, request)).outcomes)


async def end(run: Any, *rollout_ids: str) -> None:
    """Others begin and end, and the ids of former ones are forgotten."""
    await run.submit(*rollout_ids)
    await run.cancel(*rollout_ids)


async def members(cluster: Any, command: str, name: str, member: str = "") -> int:
    return int(await cluster.coordinator.link.call(command, run_key("r", name, member)))


async def test_large_submits_wait_while_the_coordinator_is_late_and_small_ones_do_not(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await cluster.run()
    cluster.coordinator.state.shed(Work.VIEWS)
    monkeypatch.setattr(worker_registry, "_VIEW_WAITS_S", 3600.0)
    assert await submit(run, "small") == [ACCEPTED]
    monkeypatch.setattr(worker_registry, "_VIEW_WAITS_S", 0.3)
    began = time.monotonic()
    names = [f"x{number}" for number in range(AT_ONCE + 1)]
    assert await submit(run, *names) == [ACCEPTED] * len(names)
    assert time.monotonic() - began >= 0.3


@pytest.mark.usefixtures("frugal")
async def test_a_repeated_submit_is_recognised_after_the_ids_of_its_rollouts_are_forgotten(cluster: Any) -> None:
    run = await cluster.run()
    assert await submit(run, "a", "b", sequence=1, settled=1) == [ACCEPTED, ACCEPTED]
    await run.cancel("a", "b")
    await end(run, *(f"x{number}" for number in range(3 * KEPT)))
    assert await submit(run, "a", "b", sequence=1, settled=1) == [COMPLETED, COMPLETED]
    assert await submit(run, "c", sequence=7, settled=7) == [ACCEPTED]
    assert await submit(run, "a", sequence=1, settled=1) == [COMPLETED]  # settled since
    assert await submit(run, "never", sequence=5, settled=1) == [COMPLETED]  # nobody waits for it
    assert await submit(run, "a") == [ACCEPTED]  # without a number: only the newest ids are kept
    assert await run.count("submitted") == 2 + 3 * KEPT + 2


@pytest.mark.usefixtures("frugal")
async def test_submits_come_in_any_order_while_they_are_not_settled(cluster: Any) -> None:
    run = await cluster.run()
    assert await submit(run, "c", sequence=3, settled=1) == [ACCEPTED]
    assert await submit(run, "a", "c", sequence=1, settled=1) == [ACCEPTED, KNOWN]
    await run.cancel("a", "c")
    await end(run, *(f"x{number}" for number in range(3 * KEPT)))
    assert await submit(run, "b", sequence=2, settled=1) == [ACCEPTED]
    assert await submit(run, "a", "c", sequence=1, settled=1) == [COMPLETED, COMPLETED]
    assert await members(cluster, "ZCARD", "SUBMITS", "trainer") == 3
    await submit(run, "d", sequence=4, settled=4)
    assert await members(cluster, "ZCARD", "SUBMITS", "trainer") == 1


async def test_events_that_were_not_counted_make_room_for_new_ones(cluster: Any) -> None:
    run = await cluster.run()
    link = cluster.coordinator.link
    last = int(await link.call("HINCRBY", run_key("r", "RUN"), "events", 3000))
    for number in range(last - 2999, last + 1):
        fields = ("k", "step", "key", "", "m", "", "v", "{}", "l", "{}", "at", "0")
        await link.call("XADD", run_key("r", "CHATTER"), f"{number}-0", *fields)
    await link.call("HDEL", run_key("r", "RUN"), "chatter")
    await run.submit("a")
    for _ in range(3):  # each writes an event
        worker = await cluster.worker("w")
        await worker.has("a")
        await worker.break_streams()
    assert await members(cluster, "XLEN", "CHATTER") < 3000
    assert int(await link.call("HGET", run_key("r", "RUN"), "chatter")) >= 0


async def test_each_lease_counts_its_submits_from_one(cluster: Any) -> None:
    run = await cluster.run()
    await submit(run, "a", sequence=900, settled=900)
    former = run.lease
    await run.claim()
    assert await submit(run, "b", sequence=1, settled=1) == [ACCEPTED]
    driver = type(run)(cluster, "r")
    await driver.claim(role="driver")
    assert await submit(driver, "c", sequence=1, settled=1) == [ACCEPTED]
    assert run.lease.fence != former.fence
    await run.finish(types_pb2.RUN_STATUS_FAILED)

    async def gone() -> bool:
        return not await members(cluster, "EXISTS", "DONE_ORDER")

    await wait_until(gone)
    assert not await members(cluster, "EXISTS", "SUBMITS", "trainer")


@pytest.mark.usefixtures("frugal")
async def test_a_new_driver_learns_what_is_over_of_the_steps_that_it_asks_for_again(cluster: Any) -> None:
    run = await cluster.run()
    ids = [f"s4.{number}" for number in range(3 * KEPT)]
    await submit(run, *ids, step=4)
    worker = await cluster.worker("w1", slots=4)
    await worker.has(*ids[:2])
    for rollout_id in ids[:2]:
        await worker.add(rollout_id, 0, 1, STOP)
    await run.complete("e", *ids[:2])
    await run.cancel(*ids[2:])
    await end(run, *(f"x{number}" for number in range(3 * KEPT)))
    await run.claim()  # what counts its submits dies with it
    assert set(await submit(run, *ids, step=4, sequence=1, settled=1)) == {COMPLETED}
    await run.complete("e", *ids[:2])
    assert len(await run.trajectories(1)) == 1
    assert await submit(run, "s5", step=5, first_step=5) == [ACCEPTED]
    await end(run, *(f"y{number}" for number in range(3 * KEPT)))
    assert await members(cluster, "SCARD", "DONE") <= KEPT
    assert await submit(run, ids[0], "s4.new", step=4) == [COMPLETED, COMPLETED]


@pytest.mark.usefixtures("frugal")
async def test_the_past_of_a_run_stops_growing(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1", slots=4)
    for number in range(4 * KEPT):
        await submit(run, f"a{number}", sequence=number + 1, settled=number + 1)
        await worker.has(f"a{number}")
        await worker.add(f"a{number}", 0, 1, STOP)
        await run.complete(f"e{number}", f"a{number}")
    kept = [await members(cluster, *one) for one in (("SCARD", "DONE"), ("LLEN", "DONE_ORDER"), ("XLEN", "SPANS"))]
    assert kept[0] == kept[1] == KEPT
    assert kept[2] < 3 * KEPT or kept[2] <= 100  # a stream is trimmed by whole blocks
    assert await members(cluster, "ZCARD", "SUBMITS", "trainer") == 1


async def test_a_submit_whose_numbers_contradict_each_other_is_refused_by_name(cluster: Any) -> None:
    run = await cluster.run()
    for field, order in (
        ("settled", {"sequence": 1, "settled": 2}),
        ("settled", {"sequence": 1 << 20, "settled": 1}),
        ("sequence", {"sequence": 1 << 60, "settled": 1 << 60}),
        ("step", {"step": 3, "first_step": 4}),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await submit(run, "a", **order)
        assert refused.value.field == field
    assert await run.count("submitted") == 0


@pytest.mark.usefixtures("frugal")
async def test_a_quota_full_of_ids_of_steps_that_never_end_names_the_remedy_and_takes_it(cluster: Any) -> None:
    run = await cluster.run(quota_bytes=1 << 20)

    async def fill() -> None:
        for number in range(20):
            ids = [f"s{number}.{at}" for at in range(1000)]
            await submit(run, *ids, step=4)
            await run.cancel(*ids)

    with pytest.raises(NoCapacity, match="give first_step"):
        await fill()
    assert await submit(run, "next", step=5, first_step=5) == [ACCEPTED]
    assert await members(cluster, "SCARD", "DONE") < 8192
    assert await submit(run, "s0.0", step=4) == [COMPLETED]


async def test_events_that_stay_fill_the_quota_and_others_make_room(cluster: Any) -> None:
    run = await cluster.run(quota_bytes=1 << 20)

    async def report(kind: str, number: int) -> None:
        events = [runs_pb2.RunEvent(kind=kind, key=f"{number}.{i}", message="m" * 30_000) for i in range(10)]
        await cluster.call(cluster.runs.Report, runs_pb2.ReportRequest(lease=run.lease, events=events))

    for number in range(10):
        await report("note", number)
    assert await run.submit("a") == [ACCEPTED]  # beside 16 KiB: the oldest notes went, and their keys
    assert await members(cluster, "SCARD", "EVENT_KEYS") < 10
    for number in range(3):
        await report("step", number)
    with pytest.raises(NoCapacity, match="quota_bytes"):
        await report("step", 3)
    with pytest.raises(NoCapacity, match="quota_bytes"):
        await run.send(*(run.request(f"b{number}", prompt_ids=bytes(4000)) for number in range(40)))


async def test_the_oldest_ended_runs_lose_their_history_when_all_keep_too_much(cluster_with: Any) -> None:
    async with cluster_with(keep_ended_bytes=700) as cluster:
        for name in ("old", "new"):
            run = await cluster.run(name)
            await run.submit("a")
            await run.cancel("a")
            await run.finish(types_pb2.RUN_STATUS_FAILED)

        async def dropped() -> bool:
            return not await cluster.coordinator.link.call("EXISTS", run_key("old", "EVENTS"))

        await wait_until(dropped, what="the older run's events are deleted")
        assert await cluster.coordinator.link.call("EXISTS", run_key("new", "EVENTS"))
        listed = (await cluster.call(cluster.runs.ListRuns, runs_pb2.ListRunsRequest())).runs
        assert [one.run_id for one in listed] == ["old", "new"]
