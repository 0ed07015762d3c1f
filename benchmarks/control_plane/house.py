"""The programs of the level, each a process of its own: Redis, the coordinator, and the workers' process."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.staged import Staged
from ebbtide.testing import EmbeddedRedis, wait_until

ROOT: Final = Path(__file__).parents[2]


class House(Staged):
    """All processes die with this one."""

    def __init__(self) -> None:
        super().__init__()
        self.token = secrets.token_hex(16)
        self.redis = EmbeddedRedis()
        self.address = ""
        self.coordinator = 0  # pid

    async def _start(self) -> None:
        self._stack.enter_context(self.redis)
        ready = self.redis.directory / "ready.json"
        log = self._stack.enter_context((self.redis.directory / "coordinator.log").open("wb"))
        process = await self._process(
            *("ebbtide.coordinator", "--server-listen", "127.0.0.1:0", "--store-url", self.redis.url),
            *("--ready-file", str(ready), "--log-level", "warning", "--die-with-parent", str(os.getpid())),
            stdout=log,
            stderr=log,
        )
        await wait_until(lambda: ready.exists() or process.returncode is not None, timeout=30, what="the coordinator")
        if process.returncode is not None:
            raise RuntimeError((self.redis.directory / "coordinator.log").read_text()[-2000:])
        self.address, self.coordinator = json.loads(ready.read_text())["address"], process.pid
        self._fleet = await self._process(
            "benchmarks.control_plane.fleet", self.address, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 28
        )

    async def _process(self, module: str, *args: str, **options: Any) -> asyncio.subprocess.Process:
        environment = {**os.environ, "EBBTIDE_TOKEN": self.token, "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *args, env=environment, cwd=ROOT, **options
        )
        self._stack.push_async_callback(_end, process)
        return process

    async def fleet(self, do: str, **more: Any) -> dict[str, Any]:
        """Give the workers' process an order, and return its answer."""
        if self._fleet.stdin is None or self._fleet.stdout is None:
            raise RuntimeError("the workers' process has no pipes")
        self._fleet.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        line = await self._fleet.stdout.readline()
        if not line:
            raise RuntimeError("the workers' process ended; its output says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
