"""Runs' ends: who keeps data of runs hears of them, workers are told to forget them, and nothing is left here."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import InvalidRequest, StoreUnavailable
from ebbtide.rpc.run_endings import MAX_HELD
from ebbtide.rpc.status_table import translated
from ebbtide.types.run import RunStatus
from ebbtide.v1 import fleet_pb2, runs_pb2, types_pb2
from tests.support.waiting import wait_until

CANCELLED, FINISHED = types_pb2.RUN_STATUS_CANCELLED, types_pb2.RUN_STATUS_FINISHED


@asynccontextmanager
async def watching(cluster: Any, *held: str) -> AsyncIterator[Any]:
    call = cluster.runs.WatchEnded(types_pb2.WatchEndedRequest(held=held))
    with translated("coordinator"):
        yield call
    call.cancel()


def names(message: types_pb2.RunsEnded) -> dict[str, int]:
    return {run.run_id: run.status for run in message.ended}


async def cancel(cluster: Any, run_id: str) -> None:
    await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id=run_id))


async def test_who_asks_hears_of_runs_that_ended_before_and_of_each_that_ends_then(cluster: Any) -> None:
    over, live = await cluster.run("over"), await cluster.run("live")
    await over.finish()
    async with watching(cluster, "over", "live", "unknown") as call:
        first = await call.read()
        assert names(first) == {"over": FINISHED}
        assert list(first.live) == ["live"]
        assert first.store_life
        await cancel(cluster, live.run_id)
        assert names(await call.read()) == {"live": CANCELLED}


async def test_a_run_that_ends_while_the_answer_is_made_is_told_of_as_it_ended(cluster: Any, monkeypatch: Any) -> None:
    over, live = await cluster.run("over"), await cluster.run("live")
    await over.finish()
    runs = cluster.coordinator.store.runs
    read = runs.read

    async def slowly(run_id: str) -> Any:
        monkeypatch.undo()
        await live.finish()
        return await read(run_id)

    monkeypatch.setattr(runs, "read", slowly)
    async with watching(cluster, "live", "over") as call:
        first = await call.read()
        assert list(first.live) == ["live"]  # else it would pass for one whose record has expired
        assert names(first) == {"over": FINISHED}
        assert names(await call.read()) == {"live": FINISHED}


async def test_a_run_is_given_back_though_who_cancelled_it_went_away(cluster: Any, monkeypatch: Any) -> None:
    await cluster.run("left")
    runs = cluster.coordinator.store.runs
    end, ended, gone = runs.end, asyncio.Event(), asyncio.Event()

    async def late(*args: Any, **more: Any) -> None:
        await end(*args, **more)
        ended.set()
        await gone.wait()

    monkeypatch.setattr(runs, "end", late)
    call = cluster.runs.CancelRun(runs_pb2.CancelRunRequest(run_id="left"))
    await asyncio.wait_for(ended.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert "left" in cluster.coordinator.state.runs
    gone.set()
    await wait_until(lambda: "left" not in cluster.coordinator.state.runs, what="the end of the run")


async def end_in_the_store(cluster: Any, run_id: str) -> None:
    """As a call does whose answer was lost."""
    await cluster.coordinator.store.runs.end(run_id, RunStatus.CANCELLED, "", drop="cancelled", lease=None, keep_s=60)


async def test_a_run_that_ended_in_the_store_alone_holds_up_no_other(cluster: Any) -> None:
    over, live = await cluster.run("over"), await cluster.run("live")
    await over.submit("a")
    await live.submit("b")
    workers = [await cluster.worker("w1"), await cluster.worker("w2")]
    await wait_until(lambda: sorted(one for worker in workers for one in worker.assigned) == ["a", "b"])
    await end_in_the_store(cluster, "over")
    for worker in workers:
        await worker.break_streams()
    await (await cluster.worker("w3")).has("b")
    await wait_until(lambda: list(cluster.coordinator.state.runs) == ["live"])


async def test_who_claims_any_run_is_given_none_that_ended_in_the_store_alone(cluster: Any) -> None:
    await cluster.run("over")
    live = await cluster.run("live")
    await cluster.call(cluster.runs.ReleaseLease, live.lease)  # else it would be chosen for its other half
    await end_in_the_store(cluster, "over")
    request = runs_pb2.ClaimRunRequest(run_id="", role="driver", holder="any")
    assert (await cluster.call(cluster.runs.ClaimRun, request)).ref.run_id == "live"
    assert list(cluster.coordinator.state.runs) == ["live"]


async def test_a_run_whose_end_was_not_answered_is_given_back(cluster: Any, monkeypatch: Any) -> None:
    worker = await cluster.worker("w1")
    run = await cluster.run()
    await run.submit("a")
    await worker.has("a")
    runs = cluster.coordinator.store.runs
    end = runs.end

    async def unanswered(*args: Any, **more: Any) -> None:
        await end(*args, **more)
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(runs, "end", unanswered)
    with pytest.raises(StoreUnavailable):
        await cancel(cluster, "r")
    await wait_until(lambda: worker.forgotten == ["r"])  # nobody calls again
    assert not cluster.coordinator.state.runs


async def test_a_restarted_coordinator_says_the_same(cluster: Any) -> None:
    await cluster.run("over")
    await cancel(cluster, "over")
    await cluster.restart()
    async with watching(cluster, "over") as call:
        assert names(await call.read()) == {"over": CANCELLED}


async def test_questions_about_too_many_runs_and_what_is_no_id_are_refused(cluster: Any) -> None:
    for held in (["a/b"], ["a"] * (MAX_HELD + 1)):
        with pytest.raises(InvalidRequest, match="held"):
            async with watching(cluster, *held) as call:
                await call.read()


async def test_the_workers_of_a_run_are_told_to_forget_it(cluster: Any) -> None:
    worker = await cluster.worker("w1")
    run = await cluster.run()
    await run.submit("a")
    await worker.has("a")
    await cancel(cluster, "r")
    await wait_until(lambda: worker.forgotten == ["r"])
    assert worker.cancelled == ["a"]


async def test_a_worker_that_comes_back_with_an_ended_runs_version_is_told_so(cluster: Any) -> None:
    await cluster.run()
    await cancel(cluster, "r")
    version = types_pb2.PolicyVersion(policy="policy", version=1)
    worker = await cluster.worker("w1", run_id="r", installed=[version])
    await wait_until(lambda: worker.forgotten == ["r"])


@pytest.mark.parametrize("kind", ["installed", "install_failed"])
async def test_a_worker_whose_install_outlasted_its_run_is_told_so(cluster: Any, kind: str) -> None:
    worker = await cluster.worker("w1", installs=False)
    run = await cluster.run()
    await run.submit("a")
    await wait_until(lambda: worker.installed == [1])
    await worker.break_streams()
    await wait_until(lambda: not cluster.coordinator.state.sessions)
    await cancel(cluster, "r")
    again = await cluster.worker("w1")  # what it is pulling it does not name
    said = fleet_pb2.Installed if kind == "installed" else fleet_pb2.InstallFailed
    await again.say(**{kind: said(version=types_pb2.PolicyVersion(policy="policy", version=1), run_id="r")})
    await wait_until(lambda: again.forgotten == ["r"])


async def test_a_worker_whose_install_outlasted_its_coordinator_serves_on(cluster: Any) -> None:
    run = await cluster.run()
    await cluster.restart()
    worker = await cluster.worker("w1")
    version = types_pb2.PolicyVersion(policy="policy", version=1)
    await worker.say(installed=fleet_pb2.Installed(version=version, run_id="r"))
    await run.submit("a")
    await worker.has("a")
    assert not worker.forgotten


async def test_a_worker_that_came_with_a_runs_version_is_told_of_its_end_while_it_turns_to_another(
    cluster: Any,
) -> None:
    await cluster.run()
    other = await cluster.run("other")
    await other.submit("a")
    version = types_pb2.PolicyVersion(policy="policy", version=1)
    worker = await cluster.worker("w1", installs=False, run_id="r", installed=[version])
    (session,) = cluster.coordinator.state.sessions.values()
    await wait_until(lambda: session.target == ("other", 1))
    await cancel(cluster, "r")
    await wait_until(lambda: worker.forgotten == ["r"])


async def test_what_a_worker_came_with_is_no_news_once_another_runs_version_took_its_place(cluster: Any) -> None:
    await cluster.run()
    other = await cluster.run("other")
    await other.submit("a")
    version = types_pb2.PolicyVersion(policy="policy", version=1)
    worker = await cluster.worker("w1", run_id="r", installed=[version])
    await worker.has("a")
    await cancel(cluster, "r")
    await cancel(cluster, "other")
    await wait_until(lambda: worker.forgotten)
    assert worker.forgotten == ["other"]


async def test_ended_runs_leave_nothing_in_the_coordinators_memory(cluster: Any) -> None:
    worker = await cluster.worker("w1")
    await wait_until(lambda: "ebbtide_coordinator_workers" in dict(series()), what="the first look at the gauges")
    state, samples = cluster.coordinator.state, len(series())
    made = weakref.WeakSet[RunState]()
    for number in range(20):
        run = await cluster.run(f"r{number}")
        made.add(state.runs[run.run_id])
        await run.submit("a", "b")
        await wait_until(lambda: worker.assigned)
        failed = fleet_pb2.InstallFailed(
            version=types_pb2.PolicyVersion(policy="policy", version=9), run_id=run.run_id, architecture="x"
        )
        await worker.say(install_failed=failed)
        await cancel(cluster, run.run_id)
        await wait_until(lambda: not worker.assigned)
    await wait_until(lambda: not state.runs and not state.ended)
    (session,) = state.sessions.values()
    await wait_until(lambda: session.installed is None)
    left = (session.attempts, session.pending, session.held, session.unfit, session.target, session.run_id)
    assert not any(left)
    rounds = cluster.coordinator.rounds
    await wait_until(lambda: not rounds._unserved._lacking and not rounds._moves._asked)
    gc.collect()
    assert len(made) <= 1, "the last one may still be in a frame"
    await wait_until(lambda: len(series()) <= samples, what="the gauges of ended runs to go")


def series() -> list[tuple[str, Any]]:
    """All that is measured, by name and labels, but for calls, whose labels are methods."""
    found = [(sample.name, sorted(sample.labels.items())) for one in REGISTRY.collect() for sample in one.samples]
    return [one for one in found if one[0].startswith("ebbtide_coordinator")]
