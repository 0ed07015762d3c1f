"""Rounds of whole groups, live: a slow group goes on behind its step, and whatever dies, each group is trained once."""

import asyncio
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ebbtide.driver.service import drive
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import load_conversations
from ebbtide.types.rollout import RolloutRequest, TrajectoryOutcome
from ebbtide.types.run import RunSpec, RunStatus, check_spec
from tests.support.waiting import wait_until
from tests.unit.trainer.test_driver import (
    END,
    SETTINGS,
    A,
    B,
    Behaviour,
    behaviour,  # noqa: F401 - a fixture
    deeds,
    has_all_groups,
    make_spec,
    poisoned,
    reached,
)

STEPS, GROUPS, SIZE = 4, 2, 3
pytestmark = pytest.mark.usefixtures("behaviour")


def rounds_spec(directory: Path, **changes: Any) -> RunSpec:
    base: dict[str, Any] = {
        "tail": {"rounds": "whole_groups", "rounds_excess": 1.5},
        "batch": {"groups_per_step": GROUPS, "group_size": SIZE, "max_staleness": 1},
        "trainer": {"steps": STEPS},
        "evaluation": {"problems": 0},
    }
    return make_spec(directory, **{**base, **changes})


def slow_cluster(make_cluster: Any, spec: RunSpec) -> Any:
    """One sample of the first group ends only under the second version."""

    def engine(request: RolloutRequest) -> list[int] | None:
        waits = request.rollout_id == "s0.g0.1.t0" and len(cluster.versions) < 2
        return None if waits else [A, B, END]

    cluster: Any = make_cluster(spec, engine)
    return cluster


async def consume(cluster: Any) -> None:
    """Stands for trainer and workers: trains each step once it is whole, and lets engines go on."""
    cluster.announce(0)
    for step in range(STEPS):
        await wait_until(partial(has_all_groups, cluster, step))
        lease = cluster.lease("trainer")
        await lease.commit([TrajectoryOutcome(cursor=one.cursor) for one in cluster.trajectories if one.step == step])
        cluster.announce(step + 1)
        cluster.answer()


async def driven(cluster: Any, client: Any, stop_after: int = 0) -> None:
    """Drive to the end. `stop_after`: the first driver dies after so many deeds of all roles."""
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(consume(cluster))
        if stop_after:
            first = asyncio.create_task(drive(client, cluster.lease("driver"), SETTINGS))
            await wait_until(partial(reached, cluster, first, stop_after), interval=0)
            first.cancel()
            await asyncio.wait({first})
        if not cluster.run.status.ended:
            await drive(client, cluster.lease("driver"), SETTINGS)


def check_steps(cluster: Any) -> None:
    """Each step trained on as many whole groups, and each group was trained once."""
    groups = defaultdict[int, list[str]](list)
    for one in cluster.trajectories:
        groups[one.step].append(one.group_id)
    assert {step: len(set(names)) for step, names in groups.items()} == dict.fromkeys(range(STEPS), GROUPS)
    names = [name for step in groups for name in set(groups[step])]
    assert len(names) == len(set(names))
    assert all(step - int(name[1 : name.index(".")]) in {0, 1} for step in groups for name in groups[step])
    assert cluster.counters["submitted"] == cluster.counters["trained"] == STEPS * GROUPS * SIZE
    assert not cluster.dropped


async def test_a_slow_group_is_trained_a_step_later_with_all_of_its_samples(
    tiny_model: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = slow_cluster(make_cluster, rounds_spec(tiny_model))
    await driven(cluster, make_client(cluster))
    assert cluster.run.status is RunStatus.FINISHED
    check_steps(cluster)
    slow = [one for one in cluster.trajectories if one.group_id == "s0.g0"]
    assert [one.step for one in slow] == [1] * SIZE
    assert {(request.min_version, request.max_version) for request in cluster.rollouts.values()} >= {(1, 0), (2, 0)}
    opened = [event.values for event in cluster.named("round_opened")]
    assert opened[0] == {"step": 0.0, "begun": 3.0, "carried": 0.0, "oldest": 0.0}
    assert opened[1] == {"step": 1.0, "begun": 5.0, "carried": 1.0, "oldest": 1.0}


async def test_a_driver_that_dies_at_any_action_loses_no_group_and_trains_none_twice(
    tiny_model: Path, make_cluster: Any, make_client: Any
) -> None:
    whole = slow_cluster(make_cluster, rounds_spec(tiny_model))
    await driven(whole, make_client(whole))
    for stop_after in range(1, deeds(whole) + 1):
        cluster = slow_cluster(make_cluster, rounds_spec(tiny_model))
        await driven(cluster, make_client(cluster), stop_after)
        assert cluster.run.status is RunStatus.FINISHED, stop_after
        assert cluster.rollouts == whole.rollouts, stop_after
        check_steps(cluster)


async def test_no_driver_asks_for_rollouts_of_steps_whose_groups_are_all_trained(
    tiny_model: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = slow_cluster(make_cluster, rounds_spec(tiny_model))
    await driven(cluster, make_client(cluster))
    assert all(step >= first for step, first in cluster.steps)
    assert cluster.steps[-1][1] >= STEPS - 2


async def test_groups_that_fail_take_their_place_in_a_step(
    behaviour: Behaviour,  # noqa: F811 - pytest hands it
    tiny_model: Path,
    make_cluster: Any,
    make_client: Any,
) -> None:
    behaviour.poison = load_conversations(str(tiny_model)).text([B])
    batch = {"groups_per_step": GROUPS, "group_size": SIZE, "max_staleness": 1, "incomplete_group": "drop"}
    cluster = make_cluster(rounds_spec(tiny_model, batch=batch), poisoned)
    await driven(cluster, make_client(cluster))
    assert cluster.run.status is RunStatus.FINISHED
    assert len(cluster.named("group_dropped")) == 1
    assert cluster.counters["trained"] == (STEPS * GROUPS - 1) * SIZE
    assert cluster.counters["submitted"] == cluster.counters["trained"] + cluster.dropped.total()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"batch": {"max_staleness": 0}}, "batch.max_staleness"),
        ({"trainer": {"name": "external"}}, "tail.rounds"),
        ({"environment": {"name": "agents"}}, "tail.rounds"),
    ],
)
def test_rounds_are_refused_where_no_group_could_be_trained_later(
    changes: dict[str, Any], field: str, tiny_model: Path
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_spec(rounds_spec(tiny_model, **changes))
    assert refused.value.field == field
