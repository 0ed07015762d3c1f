"""A run of the built-in trainer and driver, killed in every part: it ends, and its books are right."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from ebbtide.client import Client
from ebbtide.types.run import Run, RunEvent, RunStatus
from tests.chaos.cluster import FLUSH_TOKENS, Cluster
from tests.support.waiting import wait_until

RUN: Final = "r"
STEPS: Final = 6
EPISODES: Final = STEPS * 4 * 4


class House:
    """Cluster, trainer and driver."""

    def __init__(self, cluster: Cluster, client: Client, output: Path) -> None:
        self.cluster, self.client, self.output = cluster, client, output

    async def start(self, *names: str) -> None:
        await asyncio.gather(*map(self._start, names))

    async def _start(self, name: str) -> None:
        services = {"coordinator": self.cluster.process["coordinator"], "relay": self.cluster.process["relay"]}
        where: dict[str, Any] = {key: process.address for key, process in services.items()}
        where["output_roots"] = self.output
        if name == "trainer":
            where |= {"threads": 1, "device": "cpu", "keep_checkpoints": 99}
        await self.cluster.start(name, name, holder=name, **where)

    def checkpoint(self, step: int) -> Path:
        return self.output / RUN / "checkpoints" / f"step-{step:06d}"

    async def past(self, step: int) -> None:
        """Wait until the version of `step` is announced."""

        async def announced() -> bool:
            newest = (await self.client.run(RUN)).newest
            return newest is not None and newest.step >= step

        await wait_until(announced, timeout=40, what=f"the version of step {step}")

    async def ended(self) -> tuple[Run, list[RunEvent]]:
        events = [event async for event in self.client.watch(RUN)]
        return await self.client.run(RUN), events


@pytest.fixture
async def house(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> House:
    """Everything running, the run submitted."""
    house = House(cluster, await cluster.boot(lease_ttl_s=2, recover_grace_s=3), tmp_path / "output")
    spec: dict[str, Any] = {
        "name": "whole",
        "model": str(tiny_model),
        "output": str(house.output),
        "environment": {"name": "number_guessing", "params": {"max_turns": 2}},
        "sampling": {"max_tokens": 24, "stop_token_ids": [1]},
        "batch": {"groups_per_step": 4, "group_size": 4, "max_staleness": 1},
        "trainer": {"steps": STEPS, "checkpoint_every": 2},
        "evaluation": {"problems": 4, "every": 3},
    }
    await house.client.submit(spec, RUN)
    await house.start("driver", "trainer")
    return house


async def test_a_run_whose_trainer_and_driver_are_killed_trains_every_episode_once(house: House) -> None:
    await wait_until(house.checkpoint(2).exists, timeout=40, interval=0.001, what="a checkpoint")
    house.cluster.kill("trainer")  # most often before it could tell what it had consumed
    await house.start("trainer")
    for step, victims in ((3, ("driver",)), (5, ("driver", "trainer"))):
        await house.past(step)
        house.cluster.kill(*victims)
        await house.start(*victims)
    check_books(house, *await house.ended())


async def test_a_run_that_loses_everything_but_its_disks_goes_on_where_it_was(house: House) -> None:
    cluster = house.cluster
    await house.past(3)
    cluster.redis.kill()
    cluster.kill("trainer", "w1", "relay", "driver", "coordinator", "w2")
    cluster.redis.start()
    await cluster.coordinator(lease_ttl_s=2, recover_grace_s=1)
    await cluster.relay()
    await asyncio.gather(cluster.worker("w3"), cluster.worker("w4"), house.start("driver", "trainer"))
    check_books(house, *await house.ended())


def check_books(house: House, run: Run, events: list[RunEvent]) -> None:
    assert run.status is RunStatus.FINISHED, run.message
    assert not run.dropped
    assert run.counters["submitted"] == run.counters["trained"] >= EPISODES
    versions = [event.values["version"] for event in events if event.kind == "version"]
    assert versions == sorted(set(versions))
    assert len(versions) == STEPS + 1
    assert sorted(event.values["step"] for event in events if event.kind == "evaluation") == [0, 3, 6]
    trained = consumed(house.output / RUN / "checkpoints")
    assert set(trained.values()) == {1}
    assert len(trained) == EPISODES
    ledger = house.cluster.ledger()
    interruptions = len(ledger) - len({record.rollout_id for record in ledger})
    twice = sum(record.generated for record in ledger) - run.counters["tokens_stored"]
    assert 0 <= twice <= FLUSH_TOKENS * interruptions


def consumed(checkpoints: Path) -> Counter[str]:
    """How often each episode was trained on, by the checkpoints of the lineage that survived."""
    found: Counter[str] = Counter()
    for path in checkpoints.glob("step-*/trainer/state.json"):
        found.update(item["episode_id"] for item in json.loads(path.read_text())["training"]["consumed"])
    return found
