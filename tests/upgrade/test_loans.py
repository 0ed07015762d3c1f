"""Devices change hands between programs of this commit and of the one before, in both directions: a trainer's and a
served engine's, each by its guard."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.integration.serving_guard.borrower import Borrowing
from tests.integration.serving_guard.engine import ServingEngine, ask
from tests.integration.serving_guard.guards import guard_process
from tests.integration.serving_guard.trainer_guards import TrainerGuardProcess, owner_process, trainer_guard_process
from tests.support.waiting import wait_until
from tests.upgrade.previous import Previous

PROGRAMS = ("guard", "trainer", "worker")
_SILENT_S = 2.5


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def lender(grant_dir: Path, environment: dict[str, str]) -> AbstractContextManager[TrainerGuardProcess]:
    """The guard of a trainer's device, of this commit or of the one before."""
    return trainer_guard_process(grant_dir, environment=environment, trainer_silent_s=_SILENT_S)


async def steps_on(worker: Borrowing) -> None:
    stood = worker.page.steps().steps
    await wait_until(lambda: worker.page.steps().steps > stood + 3, 20, what="steps")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "older",
    [
        pytest.param(set(names), id="-".join(names))
        for names in (("guard",), ("trainer",), ("worker",), ("guard", "worker"), ("trainer", "worker"))
    ],
)
async def test_a_device_is_lent_and_taken_back_whichever_of_the_three_is_older(
    previous: Previous, grant_dir: Path, stack: ExitStack, older: set[str]
) -> None:
    environment = {name: {**os.environ, **(previous.environment if name in older else {})} for name in PROGRAMS}
    guard = stack.enter_context(lender(grant_dir, environment["guard"]))
    await guard.ready()
    worker = stack.enter_context(Borrowing(grant_dir, environment=environment["worker"]))
    await steps_on(worker)  # nobody owns the device
    with owner_process(grant_dir, environment=environment["trainer"]) as owner:
        assert await has_state(guard, "held")
        assert not worker.page.offered().tokens
        assert not worker.page.steps().stepping
        owner.kill()
        await steps_on(worker)
    with owner_process(grant_dir, lease=2, environment=environment["trainer"]):
        assert await has_state(guard, "held")
        assert (await guard.status()).lease == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_trainer_keeps_its_device_while_its_guard_is_upgraded_and_rolled_back(
    previous: Previous, grant_dir: Path, stack: ExitStack, how: signal.Signals
) -> None:
    new = dict(os.environ)
    old = {**new, **previous.environment}
    guard = stack.enter_context(lender(grant_dir, old))
    await guard.ready()
    worker = stack.enter_context(Borrowing(grant_dir, environment=old))
    await steps_on(worker)
    with owner_process(grant_dir, environment=new):
        stood = worker.page.steps().steps
        for environment in (new, old):
            with lender(grant_dir, environment) as second:
                assert second.process.wait(20) == 1, "two of them do not lend one device"
            assert await has_state(guard, "held")
            guard.end(how)
            guard = stack.enter_context(lender(grant_dir, environment))
            await guard.ready()
            await wait_until(lambda: has_state(guard, "held"), 20, what="the trainer has its device")  # noqa: B023
            assert (await guard.status()).lease == 1
            assert worker.page.steps().steps == stood, "no engine computed meanwhile"
    await steps_on(worker)


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


async def has_state(guard: TrainerGuardProcess, state: str) -> bool:
    return (await guard.status()).state == state
