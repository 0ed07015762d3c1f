"""A failure of lending does not affect users."""

import asyncio
import json
import tempfile
from functools import partial
from pathlib import Path

import aiohttp

from ebbtide.runtime import Shutdown
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.serving_guard.server_lender import ServerLender
from ebbtide.serving_guard.service import serve
from ebbtide.serving_guard.settings import GuardSettings
from tests.integration.serving_guard.engine import ServingEngine
from tests.integration.serving_guard.guards import status
from tests.support.waiting import wait_until


class Failing(MemoryBudget):
    def tokens_inside(self, now: float, tokens: int) -> None:
        raise OSError("the disk is on fire")


async def test_a_failure_of_lending_takes_all_back_and_leaves_users_their_proxy() -> None:
    with tempfile.TemporaryDirectory(prefix="ebb-") as made:
        folder = Path(made) / "g"
        folder.mkdir(0o700)
        async with ServingEngine() as engine:
            ready = Path(made) / "ready"
            settings = GuardSettings(
                grant_dir=str(folder), listen="127.0.0.1:0", upstream=engine.url, ready_file=str(ready)
            )
            shutdown = Shutdown("serving-guard", settings)
            guard = asyncio.create_task(serve(shutdown, settings, partial(ServerLender, memory=Failing)))
            await wait_until(ready.exists)
            await wait_until(lambda: _is_closed(folder))
            assert not shutdown.requested.is_set()
            url = f"http://{json.loads(ready.read_text())['address']}/metrics"
            async with aiohttp.ClientSession() as users, users.get(url) as answer:
                assert answer.status == 200
            shutdown.requested.set()
            await guard
            await shutdown.close()


async def _is_closed(folder: Path) -> bool:
    state = await status(folder)
    return (state.state, state.tokens) == ("closed", 0)
