"""Several runs on one fleet, with a real store and real streams: who gets the workers, and what becomes of rollouts."""

import asyncio
from typing import Any

import msgspec
import pytest

from benchmarks.sharing import OVERTAKEN, SCENES, WORKERS, Stage, overtaken, play
from ebbtide.coordinator.dispatch import worker_allocator
from ebbtide.errors import AlreadyExists, InvalidRequest, NotReady
from ebbtide.store.scripts import run_key
from ebbtide.types.fleet import EndCause
from ebbtide.types.rollout import RolloutKind
from ebbtide.types.run import EvaluationSpec, Run, ShareSpec, SlotPriority
from ebbtide.types.tokens import token_count
from ebbtide.v1 import runs_pb2, types_pb2
from ebbtide.wire import from_proto
from tests.integration.coordinator.conftest import TOKEN
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP


async def record(cluster: Any, run_id: str) -> Run:
    return from_proto(await cluster.call(cluster.runs.GetRun, runs_pb2.GetRunRequest(run_id=run_id)), Run)


@pytest.mark.timeout(180)
async def test_three_runs_get_token_shares_by_their_weights_and_no_group_is_left_behind(cluster_with: Any) -> None:
    """A short look at what `benchmarks/sharing.py` measures over a minute; a busy machine makes it coarse."""
    async with cluster_with(timeslice_s=1.0) as cluster, Stage(cluster.server.address, TOKEN) as stage:
        await stage.submit({"a": ShareSpec(), "b": ShareSpec(), "c": ShareSpec(weight=2.0)})
        stage.attach()
        await wait_until(lambda: all(one.groups for one in stage.drivers.values()), 60, what="every run ends groups")
        tokens = await stage.tokens(15.0)
        total = sum(tokens.values())
        assert tokens["a"] / total == pytest.approx(0.25, rel=0.25)
        assert tokens["b"] / total == pytest.approx(0.25, rel=0.25)
        assert tokens["c"] / total == pytest.approx(0.5, rel=0.25)
        told = (await record(cluster, "c")).share
        assert told is not None
        assert told.due == pytest.approx(0.5)
        assert told.lately == pytest.approx(0.5, abs=0.2)
        assert sum(state.share.workers for state in cluster.coordinator.state.runs.values()) == WORKERS
        assert all(overtaken(one.groups) <= OVERTAKEN for one in stage.drivers.values())
        stage.check()  # each response came whole: no token lost, none twice


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scene", SCENES)
async def test_over_a_minute_each_run_gets_what_it_was_promised_within_a_twentieth(scene: str) -> None:
    found = await play(SCENES[scene], 60.0)
    assert found["kept"], found


@pytest.mark.timeout(180)
async def test_a_floor_holds_under_overload(cluster_with: Any) -> None:
    runs = {"low": ShareSpec(weight=0.01, floor=0.3, priority=-1)}
    runs |= {f"high{number}": ShareSpec(weight=10.0, priority=1) for number in range(3)}
    async with cluster_with(timeslice_s=1.0) as cluster, Stage(cluster.server.address, TOKEN) as stage:
        await stage.submit(runs)
        stage.attach()
        await wait_until(lambda: all(one.groups for one in stage.drivers.values()), 60, what="every run ends groups")
        tokens = await stage.tokens(12.0)
        assert tokens["low"] / sum(tokens.values()) > 0.22
        stage.check()


async def test_floors_that_the_fleet_cannot_promise_together_are_refused_by_name(cluster: Any) -> None:
    await cluster.run("a", share=ShareSpec(floor=0.6))

    async def submit(name: str) -> str:
        try:
            await cluster.run(name, version=False, share=ShareSpec(floor=0.4))
        except NotReady as error:
            return str(error)
        return ""

    answers = await asyncio.gather(*(submit(name) for name in ("b", "c", "d")))  # at once: one of them is promised it
    assert sorted(bool(answer) for answer in answers) == [False, True, True]
    assert "share.floor: 0.4 of the fleet cannot be promised" in max(answers)
    lucky = "bcd"[answers.index("")]
    await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id=lucky))
    other = next(name for name in "bcd" if name != lucky)
    assert await submit(other) == ""
    await cluster.run("e")  # who asks for none is promised none


async def test_a_run_that_is_submitted_again_is_not_asked_for_its_floor_twice(cluster: Any) -> None:
    for _ in range(2):
        await cluster.run("a", share=ShareSpec(floor=0.8), version=False)


async def test_a_run_may_be_submitted_again_whether_its_share_was_written_out_or_not(cluster: Any) -> None:
    await cluster.run("a", version=False)
    key, link = run_key("a", "RUN"), cluster.coordinator.link
    spec = msgspec.json.decode(await link.call("HGET", key, "spec"))
    assert "share" not in spec, "what the release before does not know is left out where it has its default"
    assert "priority" not in spec["evaluation"]
    spec["share"] = msgspec.to_builtins(ShareSpec())  # as one that leaves nothing out has it
    await link.call("HSET", key, "spec", msgspec.json.encode(spec))
    await cluster.run("a", version=False)
    with pytest.raises(AlreadyExists):
        await cluster.run("a", version=False, share=ShareSpec(weight=2.0))


async def test_a_promise_outlives_the_coordinator(cluster: Any) -> None:
    await cluster.run("a", share=ShareSpec(floor=0.8))
    await cluster.restart()
    with pytest.raises(NotReady, match=r"a \(0\.8\)"):
        await cluster.run("b", share=ShareSpec(floor=0.5))


async def test_what_is_wrong_with_a_share_is_named(cluster: Any) -> None:
    for share, field in (
        (ShareSpec(weight=0.0), "spec.share.weight"),
        (ShareSpec(floor=1.5), "spec.share.floor"),
        (ShareSpec(priority=11), "spec.share.priority"),
        (ShareSpec(ceiling=0.0), "spec.share.ceiling"),
        (ShareSpec(floor=0.5, ceiling=0.4), "share.floor"),
    ):
        with pytest.raises(InvalidRequest) as raised:
            await cluster.run("a", share=share)
        assert raised.value.field == field


async def test_a_worker_that_goes_over_hands_its_rollouts_on_with_their_tokens(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.coordinator.rules.move_costs._LEAVE_S", 0.2)
    low = await cluster.run("low")
    worker = await cluster.worker("w1", slots=2)
    await low.submit("l1", "l2", "l3")
    await wait_until(lambda: len(worker.assigned) == 2)
    started = sorted(worker.assigned)
    for name in started:
        await worker.add(name, 0, 3)
    high = await cluster.run("high", share=ShareSpec(priority=1))
    await high.submit("h1")
    await wait_until(lambda: set(started) <= set(worker.asked), what="it is asked for all of the run")
    assert "h1" not in worker.assigned  # two runs' rollouts are never with one worker
    await worker.hand_back(*started, cause=EndCause.MOVED)
    await worker.has("h1")
    assert set(worker.assigned) == {"h1"}
    await worker.add("h1", 0, 1, STOP)
    del worker.assigned["h1"]
    await worker.has(*started)
    for name in started:
        assert token_count(worker.assigned[name].partial) == 3
        assert (await worker.add(name, 3, 1, STOP)).finished
    assert await low.count("tokens_stored") == 8
    assert await low.count("moved") == 2


async def test_rollouts_that_are_about_to_end_end_where_they_are(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_allocator, "finishes_first", lambda **_: True)
    low = await cluster.run("low")
    worker = await cluster.worker("w1", slots=2)
    await low.submit("l1", "l2")
    await worker.has("l1", "l2")
    high = await cluster.run("high", share=ShareSpec(priority=1))
    await high.submit("h1")
    await wait_until(lambda: cluster.coordinator.state.runs["high"].share.workers == 1)
    for name in ("l1", "l2"):
        await worker.add(name, 0, 1, STOP)
    await worker.has("h1")
    assert worker.asked == []


async def test_a_later_turn_of_a_group_goes_before_groups_that_came_later(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", slots=1)
    await run.submit("a.t0", group_id="a")
    await worker.has("a.t0")
    await run.submit("b.t0", group_id="b")
    await run.submit("a.t1", group_id="a", turn=1)
    await worker.add("a.t0", 0, 1, STOP)
    del worker.assigned["a.t0"]
    await wait_until(lambda: worker.assigned)
    assert set(worker.assigned) == {"a.t1"}


@pytest.mark.parametrize(("setting", "most"), [(SlotPriority.BEFORE, 7), (SlotPriority.BACKGROUND, 2)])
async def test_evaluation_and_training_both_run_where_both_wait(cluster: Any, setting: SlotPriority, most: int) -> None:
    run = await cluster.run(evaluation=EvaluationSpec(problems=1, priority=setting))
    await run.submit(*(f"t{number:02}" for number in range(20)))
    await run.submit(*(f"e{number:02}" for number in range(20)), kind=RolloutKind.EVAL, priority=-1)
    worker = await cluster.worker("w1", slots=1)
    served = ""
    for _ in range(9):
        await wait_until(lambda: worker.assigned)
        ((name, _),) = worker.assigned.items()
        served += name[0]
        assert (await worker.add(name, 0, 1, STOP)).finished
        del worker.assigned[name]
    assert 1 <= served.count("e") <= most
    assert served.count("t") >= 2


async def test_a_run_that_has_ended_has_no_share(cluster: Any) -> None:
    run = await cluster.run()
    assert (await record(cluster, "r")).share is not None
    await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id=run.run_id))
    assert (await record(cluster, "r")).share is None
