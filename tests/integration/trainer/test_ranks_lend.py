"""Runs of a trainer whose two ranks are on two hosts: between its steps engines have both devices, and in them none."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebbtide.client import Client
from ebbtide.types.run import RunSpec
from tests.integration.serving_guard.borrower import Borrowing
from tests.integration.serving_guard.trainer_guards import TrainerGuardProcess, trainer_guard_process
from tests.integration.trainer.conftest import Cluster
from tests.integration.trainer.test_runs import check_books, ended, trained
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

MakeSpec = Callable[..., RunSpec]
SILENT_S = 8.0


@pytest.fixture(scope="module")
def folders() -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(prefix="ebb-") as made:
        found = [Path(made) / name / "g" for name in "ab"]
        for path in found:
            path.mkdir(0o700, parents=True)
        yield found


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis, tiny_model: Path, folders: list[Path]
) -> Iterator[Cluster]:
    assert redis_server.command("FLUSHALL") == b"+OK\r\n"
    runner = (str(Path(__file__).parent / "two_hosts.py"), *map(str, folders))
    flags = ("--rank-timeout-s", str(SILENT_S))
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), redis_server.url, flags, trainer_runner=runner)
    try:
        cluster.start(tiny_model)
        yield cluster
    finally:
        cluster.close()


class Hosts:
    """The guards of both hosts, and an engine on each."""

    def __init__(self, guards: list[TrainerGuardProcess], workers: list[Borrowing]) -> None:
        self.guards, self.workers = guards, workers

    async def step(self) -> None:
        """Wait until the engines of both hosts step."""
        stood = [worker.page.steps().steps for worker in self.workers]
        for worker, steps in zip(self.workers, stood, strict=True):
            await wait_until(lambda: worker.page.steps().steps > steps + 3, 30, what="steps")  # noqa: B023


@pytest.fixture
async def hosts(folders: list[Path]) -> AsyncIterator[Hosts]:
    async with AsyncExitStack() as stack:
        guards = [stack.enter_context(trainer_guard_process(folder)) for folder in folders]
        for guard in guards:
            await guard.ready()
        yield Hosts(guards, [stack.enter_context(Borrowing(folder)) for folder in folders])


@pytest.mark.timeout(300)
async def test_every_step_takes_both_devices_back_and_lends_them_again(
    cluster: Any, client: Client, make_spec: MakeSpec, hosts: Hosts
) -> None:
    run, events = await ended(client, (await client.submit(make_spec())).run_id)
    check_books(run, events)
    for guard in hosts.guards:
        status = await guard.status()
        assert status.take_backs >= run.spec.trainer.steps
        assert status.lent_s > 0 < status.held_s
        assert status.run_id == run.run_id
    assert all(worker.page.steps().steps > 0 for worker in hosts.workers)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("killed", [pytest.param(0, id="first"), pytest.param(1, id="other")])
async def test_both_devices_are_lent_after_a_rank_was_killed_until_the_next_trainer_takes_them_back(
    cluster: Any, client: Client, make_spec: MakeSpec, hosts: Hosts, killed: int
) -> None:
    name = f"killed-{killed}"
    await client.submit(make_spec(), name)
    await wait_until(partial(trained, client, name, 2), timeout=90)
    process = cluster.programs["trainer"].process
    ranks = {child.environ()["RANK"]: child for child in psutil.Process(process.pid).children()}
    ranks[str(killed)].kill()
    assert await asyncio.to_thread(process.wait, 60) != 0
    await hosts.step()
    await wait_until(lambda: all_abandoned(hosts), 10)
    leases = [(await one.status()).lease for one in hosts.guards]
    await asyncio.to_thread(cluster.programs["trainer"].start)
    run, events = await ended(client, name)
    check_books(run, events)
    for guard, lease in zip(hosts.guards, leases, strict=True):
        assert (await guard.status()).lease > lease


async def all_abandoned(hosts: Hosts) -> bool:
    """A device that was lent stays so for a second after its owner's end."""
    return [(await one.status()).state for one in hosts.guards] == ["abandoned", "abandoned"]
