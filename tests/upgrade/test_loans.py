"""Devices change hands between programs of this commit and of the one before, in both directions: a trainer's by an
arbiter, and a served engine's by a guard."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ebbtide.testing import wait_until
from tests.integration.device_arbiter.arbiters import ArbiterProcess, arbiter_process, owner_process
from tests.integration.serving_guard.borrower import Borrowing
from tests.integration.serving_guard.engine import ServingEngine, ask
from tests.integration.serving_guard.guards import guard_process
from tests.upgrade.previous import Previous

PROGRAMS = ("arbiter", "trainer", "worker")


@pytest.fixture
def lending(previous: Previous) -> Previous:
    if not (previous.folder / "services/ebbtide/device_arbiter").exists():
        pytest.skip(f"revision {previous.revision} has no device-arbiter")
    return previous


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


async def steps_on(worker: Borrowing) -> None:
    stood = worker.page.steps().steps
    await wait_until(lambda: worker.page.steps().steps > stood + 3, 20, what="steps")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "older",
    [
        pytest.param(set(names), id="-".join(names))
        for names in (("arbiter",), ("trainer",), ("worker",), ("arbiter", "worker"), ("trainer", "worker"))
    ],
)
async def test_a_device_is_lent_and_taken_back_whichever_of_the_three_is_older(
    lending: Previous, grant_dir: Path, stack: ExitStack, older: set[str]
) -> None:
    environment = {name: {**os.environ, **(lending.environment if name in older else {})} for name in PROGRAMS}
    arbiter = stack.enter_context(arbiter_process(grant_dir, environment=environment["arbiter"], silent_s=2.5))
    await arbiter.ready()
    worker = stack.enter_context(Borrowing(grant_dir, environment=environment["worker"]))
    await steps_on(worker)  # nobody owns the device
    with owner_process(grant_dir, environment=environment["trainer"]) as owner:
        assert await has_state(arbiter, "held")
        assert not worker.page.offered().tokens
        assert not worker.page.steps().stepping
        owner.kill()
        await steps_on(worker)
    with owner_process(grant_dir, lease=2, environment=environment["trainer"]):
        assert await has_state(arbiter, "held")
        assert (await arbiter.status()).lease == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("older_worker", [False, True])
async def test_a_served_engines_guard_is_upgraded_and_rolled_back_beside_a_worker(
    previous: Previous, grant_dir: Path, older_worker: bool
) -> None:
    new = dict(os.environ)
    old = {**new, **previous.environment}
    async with ServingEngine() as engine:
        with Borrowing(grant_dir, environment=old if older_worker else new) as worker:
            for environment in (old, new, old):
                with guard_process(grant_dir, engine.url, environment) as guard:
                    await guard.ready()
                    await steps_on(worker)
                    assert b"[DONE]" in await ask(guard.url)
                await wait_until(lambda: not worker.page.budget().tokens, 20, what="the grant ends with its guard")


async def has_state(arbiter: ArbiterProcess, state: str) -> bool:
    return (await arbiter.status()).state == state
