"""What is over in a coordinator is freed without a full garbage collection, which there never is while it runs."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.types.fleet import EndCause
from ebbtide.v1 import runs_pb2, types_pb2
from tests.fakes import cycles as fakes
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
#: The product's code that runs in a coordinator.
OURS = ("ebbtide.coordinator", "ebbtide.step_pacing", "ebbtide.store", "ebbtide.types")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    with fakes.no_collector():
        yield


def cycles() -> Counter[str]:
    """What of the coordinator nothing refers to, except itself."""
    return fakes.cycles(OURS, "services/ebbtide/coordinator")


async def finish(worker: Any, *rollout_ids: str) -> None:
    for name in rollout_ids:
        await worker.has(name)
        assert (await worker.add(name, 0, 4, STOP)).finished
        worker.assigned.pop(name, None)


async def test_rollouts_that_finish_leave_no_cycle(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w", slots=16)
    worker.beats()
    await finish(worker, *await submitted(run, "before", 4))  # what is made once is no leak
    cycles()
    await finish(worker, *await submitted(run, "a", 48))
    await run.finished(52)
    assert cycles() == {}


async def test_rollouts_that_change_workers_and_workers_that_come_and_go_leave_no_cycle(cluster: Any) -> None:
    run, first = await cluster.run(), await cluster.worker("w1")
    names = await submitted(run, "a", 6)
    for name in names:
        await first.has(name)
        await first.add(name, 0, 2)
    cycles()
    for turn in range(4):
        second = await cluster.worker(f"v{turn}")
        await first.break_streams()
        for name in names:
            await second.has(name)
            await second.add(name, 2 * turn + 2, 2)
        await second.hand_back(names[0], cause=EndCause.FAILED)
        await second.has(names[0])
        first = second
    await wait_until(lambda: len(cluster.coordinator.state.sessions) == 1, what="the others are gone")
    assert cycles() == {}


async def test_a_run_that_ends_leaves_no_cycle(cluster: Any) -> None:
    await run_and_cancel(cluster)


async def test_nor_does_one_whose_decisions_are_recorded(cluster_with: Any, tmp_path: Path) -> None:
    async with cluster_with(record_decisions=str(tmp_path / "decisions")) as cluster:
        await run_and_cancel(cluster)


async def run_and_cancel(cluster: Any) -> None:
    worker = await cluster.worker("w", slots=16)
    cycles()
    for number in range(3):
        run = await cluster.run(f"r{number}")
        names = await submitted(run, f"a{number}", 8)
        await finish(worker, *names[:4])
        await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id=run.run_id))
        await wait_until(lambda: not cluster.coordinator.state.runs, what="the run is over")
        del run
    await asyncio.sleep(0)
    assert cycles() == {}


async def test_of_episodes_that_are_over_nothing_is_remembered_and_of_acknowledged_ones_the_newest(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.coordinator.state.run_episodes._ACKNOWLEDGED", 4)
    run, worker = await cluster.run(), await cluster.worker("w", slots=16)
    worker.beats()
    await run.send(*(run.request(f"a{n}", group_id=f"g{n // 4}", episode_id=f"e{n}") for n in range(16)))
    await finish(worker, *(f"a{n}" for n in range(15)))
    await run.finished(15)
    episodes = cluster.coordinator.state.runs[run.run_id].episodes
    assert (len(episodes.prefixes), episodes.group_place("g0", 99), episodes.group_place("g3", 99)) == (16, 1, 13)
    await run.acknowledge(*(f"a{n}" for n in range(8)))
    for n in range(8, 15):
        await run.complete(f"e{n}", f"a{n}")
    assert set(episodes.prefixes) == {"e4", "e5", "e6", "e7", "e15"}  # which may have another turn, and which runs
    assert [episodes.group_place(f"g{n}", 90 + n) for n in range(4)] == [90, 5, 92, 13]


async def submitted(run: Any, prefix: str, count: int) -> list[str]:
    names = [f"{prefix}{number}" for number in range(count)]
    await run.submit(*names)
    return names
