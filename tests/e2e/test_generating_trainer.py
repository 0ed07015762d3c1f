"""A trainer without any other worker trains a run on real engines: they generate on its device between its steps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from ebbtide.client import Client
from ebbtide.demo.token_accounts import read_attempts, settle
from ebbtide.grants import Page, page_path, socket_path
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, free_address, local_cluster
from ebbtide.rpc.channel import open_socket
from ebbtide.types.grants import DeviceStatus
from ebbtide.types.run import Run, RunEvent, RunSpec, RunStatus
from ebbtide.v1.loans_pb2 import WatchDeviceRequest
from ebbtide.v1.loans_pb2_grpc import LoansStub
from ebbtide.wire import from_proto
from tests.support.waiting import wait_until
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.timeout(600)

STEPS, GROUPS, SIZE = 3, 4, 4
#: Its rewards differ, so that there is something to learn of random text.
ENVIRONMENT = "tests.integration.trainer.environments_for_tests:make_source"


def spec_of(model: Path, output: Path, steps: int = STEPS) -> RunSpec:
    return msgspec.convert(
        {
            "name": "generating",
            "model": str(model),
            "output": str(output),
            "environment": {"name": ENVIRONMENT},
            "sampling": {"max_tokens": 48},
            "batch": {"groups_per_step": GROUPS, "group_size": SIZE},
            "trainer": {"steps": steps, "learning_rate": 1e-3, "checkpoint_every": 1},
            "evaluation": {"problems": 4, "every": steps},
        },
        RunSpec,
    )


@asynccontextmanager
async def generating(directory: Path, model: Path) -> AsyncIterator[tuple[LocalCluster, Client]]:
    """A cluster whose one worker runs on the trainer's device."""
    address, relay = free_address(), free_address()
    async with local_cluster(directory, print) as cluster:
        await cluster.boot(
            ClusterShape(
                model=model,
                workers=0,
                slots=16,
                coordinator=address,
                relay=relay,
                generate=True,
                environments=(ENVIRONMENT,),
            )
        )
        async with Client(address, relay, token=cluster.token_file.read_text()) as client:
            yield cluster, client


async def status(cluster: LocalCluster) -> DeviceStatus:
    async with open_socket(socket_path(cluster.grants)) as channel:
        async for message in LoansStub(channel).WatchDevice(WatchDeviceRequest(), timeout=10):
            return from_proto(message, DeviceStatus)
    raise AssertionError("no status")


async def ended(client: Client, run_id: str) -> tuple[Run, list[RunEvent]]:
    events = [event async for event in client.watch(run_id)]
    return await client.run(run_id), events


def check_books(run: Run, events: list[RunEvent]) -> None:
    assert run.status is RunStatus.FINISHED, run.message
    assert run.counters["submitted"] == run.counters["trained"] + run.counters.get("dropped", 0)
    assert {event.values["step"] for event in events if event.kind == "step"} == set(
        range(1, run.spec.trainer.steps + 1)
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), head=32)


async def test_a_run_trains_with_no_other_worker_and_no_token_is_regenerated(tmp_path: Path, model: Path) -> None:
    async with generating(tmp_path / "cluster", model) as (cluster, client):
        run_id = (await client.submit(spec_of(model, tmp_path / "output"), "r")).run_id
        async with asyncio.timeout(400):
            run, events = await ended(client, run_id)
        check_books(run, events)
        device = await status(cluster)
        assert device.take_backs >= STEPS
        assert device.lent_s > 0 < device.held_s
        accounts = settle(read_attempts(cluster.ledgers, run_id), [])
        assert accounts.twice == 0, "planned cuts cost no token"
        assert accounts.generated > 0
        borrower = device.borrowers[0]
        assert borrower.stops == 0


async def test_a_run_goes_on_after_trainer_and_guard_and_worker_were_killed(tmp_path: Path, model: Path) -> None:
    async with generating(tmp_path / "cluster", model) as (cluster, client):
        run_id = (await client.submit(spec_of(model, tmp_path / "output", steps=4), "r")).run_id
        page = Page(page_path(cluster.grants, cluster.workers[0]))
        for name in ("trainer", "trainer-guard", cluster.workers[0]):
            stepped = page.steps().steps
            await wait_until(lambda: page.steps().steps > stepped, 120, what="steps")  # noqa: B023
            cluster.launcher.crash(name)
        async with asyncio.timeout(400):
            run, events = await ended(client, run_id)
        check_books(run, events)
