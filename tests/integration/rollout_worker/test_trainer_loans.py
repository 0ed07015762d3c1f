"""A worker on a trainer's device goes on after each of the trainer's steps, exactly where it stood still."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ebbtide.grants import Page, page_path
from ebbtide.trainer.lending.device_loan import DeviceLoan
from ebbtide.types.run import Sampling
from tests.integration.serving_guard.trainer_guards import trainer_guard_process
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
LONG = Sampling(temperature=1.0, max_tokens=4000)
SWITCHES = 20


async def test_planned_cuts_cost_no_token_and_at_most_two_steps(
    house: House, grant_dir: Path, expected: Callable[[int], list[int]]
) -> None:
    # The bounds of the enforcer are tested elsewhere: here a busy machine is no reason to stop the engine.
    with trainer_guard_process(grant_dir, yield_ms=20_000) as guard:
        await guard.ready()
        loan = DeviceLoan(grant_dir, run_id="run", lease=1)
        owning = asyncio.create_task(loan.run())
        try:
            loan.lend()
            worker = await house.process("--kind", "borrowed", "--grant-dir", str(grant_dir))
            page = Page(page_path(grant_dir, house.name))
            house.coordinator.assign("r", LONG)
            length, beats = 0, house.coordinator.heard["heartbeat"]
            for _ in range(SWITCHES):
                await wait_until(lambda: house.coordinator.length("r") > length + 5, 20)  # noqa: B023
                before = page.steps().steps
                await loan.take_back(spell_s=3.0)
                steps = page.steps()
                assert not steps.stepping
                assert steps.steps <= before + 2
                await wait_until(lambda: house.coordinator.length("r") == page.steps().scheduled, 10)
                length = house.coordinator.length("r")
                await wait_until(lambda: beats[-1].held, 10)
                assert 0 < beats[-1].borrowed.spell_s <= 3.0
                assert house.coordinator.length("r") == page.steps().scheduled == length, "no token without permission"
                loan.lend()
            assert house.coordinator.ids("r")[:length] == expected(length)
            worker.kill()
        finally:
            owning.cancel()
            with suppress(asyncio.CancelledError):
                await owning
