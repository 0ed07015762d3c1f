"""Workers hear of which group a rollout is, where its run lets them draft from the group."""

import gc
import weakref
from typing import Any

import pytest

from ebbtide.types.rollout import RolloutKind
from ebbtide.types.run import TailSpec
from ebbtide.v1 import runs_pb2, types_pb2
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(("speculation", "groups"), [("grouped", {"a": "g", "e": "h"}), ("off", {"a": "", "e": ""})])
async def test_assignments_name_the_group_of_rollouts_only_where_their_run_lets_workers_draft(
    cluster: Any, speculation: Any, groups: dict[str, str]
) -> None:
    run = await cluster.run(tail=TailSpec(speculation=speculation))
    worker = await cluster.worker("w1")
    await run.submit("a")
    await run.submit("e", group_id="h", kind=RolloutKind.EVAL)
    await worker.has("a", "e")
    assert {name: one.group_id for name, one in worker.assigned.items()} == groups


async def test_of_a_run_that_is_over_nothing_stays_though_its_workers_go_on(cluster: Any) -> None:
    run = await cluster.run(tail=TailSpec(speculation="grouped"))
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    await worker.add("a", 0, 5, STOP)
    state = cluster.coordinator.state
    kept = weakref.ref(state.runs["r"])
    await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id="r"))
    await wait_until(lambda: not state.runs and not state.ended, what="the run is over")

    def gone() -> bool:
        gc.collect()
        return kept() is None

    await wait_until(gone, what="nothing refers to the run")
    assert [session.worker_id for session in state.sessions.values()] == ["w1"]
