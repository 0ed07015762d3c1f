"""A worker that is given notice of five seconds leaves within them, and not one token is generated twice; whatever it
was about, and whoever gave the notice.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Final

import pytest
from msgspec.structs import replace

from ebbtide.types.fleet import WorkerState
from tests.chaos.cluster import SCRIPT, Cluster
from tests.chaos.load import Begin, Load
from tests.chaos.phases import PART
from tests.chaos.trainer import LARGE
from tests.support.waiting import wait_until

NOTICE_S: Final = 5.0
Notice = Callable[[Cluster], Awaitable[None]]


async def signalled(cluster: Cluster) -> None:
    cluster.ask_to_end("w1")


async def asked_by_an_operator(cluster: Cluster) -> None:
    running = await cluster.client().drain_worker("w1", within_s=NOTICE_S)
    assert running >= 8


@pytest.fixture(
    params=[asked_by_an_operator, pytest.param(signalled, marks=pytest.mark.nightly)], ids=["drain", "sigterm"]
)
def notice(request: pytest.FixtureRequest) -> Notice:
    give: Notice = request.param
    return give


async def leaves(cluster: Cluster, load: Load, notice: Notice) -> None:
    """Within the notice, with work in hand, and a status that says that all was handed over."""
    await load.submit(64)
    await wait_until(lambda: load.in_flight("w1") >= 8, what="rollouts at w1")
    began = time.monotonic()
    await notice(cluster)
    await wait_until(lambda: not cluster.process["w1"].running(), timeout=2 * NOTICE_S, what="its end")
    assert time.monotonic() - began <= NOTICE_S
    assert cluster.process["w1"].returncode == 0


async def check(cluster: Cluster, load: Load) -> None:
    await load.settle()
    assert load.generated_twice() == 0
    assert load.interruptions() >= 8
    assert not cluster.logged("coordinator", "lost")


async def test_it_leaves_in_the_midst_of_its_work(cluster: Cluster, begin: Begin, notice: Notice) -> None:
    load = await begin()
    await load.submit(64)
    await load.more_tokens(64 * 12)
    await leaves(cluster, load, notice)
    await check(cluster, load)


async def test_it_leaves_in_the_midst_of_a_pull(cluster: Cluster, begin: Begin, notice: Notice) -> None:
    cluster.routed = True
    load = await begin()
    await load.submit(64)
    await load.more_tokens(64 * 4)
    pulling = cluster.ways["w1", "relay"].back
    pulling.limit = pulling.passed + PART
    await load.publish(step=1, elements=LARGE)
    await wait_until(lambda: pulling.silent, what="a part of the version")
    await leaves(cluster, load, notice)
    await check(cluster, load)


async def test_it_leaves_in_the_midst_of_an_install(cluster: Cluster, begin: Begin, notice: Notice) -> None:
    cluster.script = replace(SCRIPT, install_s=2.0)
    load = await begin()
    client = cluster.client()
    await load.submit(64)
    await load.more_tokens(64 * 4)
    await load.publish(step=1)

    async def installing() -> bool:
        return any(one.worker_id == "w1" and one.state is WorkerState.INSTALLING for one in await client.workers())

    await wait_until(installing, timeout=20, what="the install")
    await leaves(cluster, load, notice)
    await check(cluster, load)
