"""Programs of this commit and of the one before work together, whichever is replaced first and in both directions, over
one store and one relay's directory: nothing is lost, nothing is made twice, and the run ends.
"""

import asyncio

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.load import RUN, SPEC, Load
from tests.chaos.trainer import all_requests
from tests.support.waiting import wait_until
from tests.upgrade.previous import Previous

#: Of each worker: so few that none can take all the rollouts of a step before another has its weights.
_SLOTS = 6
#: Rollouts behind the last replacement.
_LAST = 48
PROGRAMS = ("coordinator", "relay", "w1", "w2", "w3", "trainer")


def test_the_code_before_is_run_as_it_was(previous: Previous) -> None:
    """No module of this commit stands in for one of that."""
    names = ("coordinator.service", "rollout_worker.service", "weight_relay.service", "client", "v1.fleet_pb2_grpc")
    assert not previous.foreign_modules(*(f"ebbtide.{name}" for name in names), "tests.chaos.trainer")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("direction", ["upgrade", "rollback"])
async def test_a_fleet_is_replaced_program_by_program_under_a_live_run(
    cluster: Cluster, previous: Previous, direction: str
) -> None:
    old, new = (previous.environment, {}) if direction == "upgrade" else ({}, previous.environment)
    cluster.environment |= dict.fromkeys(PROGRAMS, old)
    cluster.worker_settings = {"slots": _SLOTS}
    client = await cluster.boot(workers=2)
    await client.submit(SPEC, RUN)
    coordinator, relay = (cluster.process[name].address for name in ("coordinator", "relay"))
    await cluster.start("trainer", "tests.chaos.trainer", holder="trainer", coordinator=coordinator, relay=relay)

    async def stored(least: int) -> None:
        async def reached() -> bool:
            return (await client.run(RUN)).counters.get("tokens_stored", 0) >= least

        await wait_until(reached, timeout=60, interval=0.05, what=f"{least} tokens stored")

    await stored(200)
    cluster.environment |= dict.fromkeys(PROGRAMS, new)
    await _replaced(cluster, "coordinator")
    await cluster.coordinator()  # the trainer, the relay and both workers are still the others
    await stored(1000)
    await wait_until(lambda: cluster.ledger("w2"), timeout=60, interval=0.05, what="work of w2")
    joining = asyncio.create_task(cluster.worker("w3"))
    await _replaced(cluster, "w2")
    await joining
    await _replaced(cluster, "relay")
    await cluster.relay()
    trainer = cluster.process["trainer"]
    await wait_until(lambda: not trainer.running(), timeout=120, interval=0.05, what="the trainer's end")
    assert trainer.returncode == 0
    load = await Load.claim(cluster, client, all_requests())
    try:
        await load.submit(_LAST)
        run = await load.settle()
    finally:
        await load.close()
    assert run.counters["submitted"] == len(all_requests()) + _LAST
    assert all(cluster.ledger(name) for name in ("w1", "w2", "w3"))
    load.check_losses()


async def _replaced(cluster: Cluster, name: str) -> None:
    """End it as a supervisor does."""
    cluster.ask_to_end(name)
    process = cluster.process[name]
    await wait_until(lambda: not process.running(), timeout=60, what=f"the end of {name}")
    assert process.returncode == 0, name
