"""The programs of a loaded coordinator, each a process of its own: Redis, the coordinator, and the workers' process."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]


def code_of(checkout: Path) -> dict[str, str]:
    """The environment of a program that runs the product's code of a checkout, and these benchmarks. Its generated
    code must be there: `make env` makes it.
    """
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (checkout / "common", checkout / "services", checkout / "lab", ROOT)))
    }


class House:
    """An async context manager. All processes die with its block, or at once if starting fails. `environment`: what the
    coordinator's differs in.
    """

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._stack = AsyncExitStack()
        self._environment = environment
        self.token = secrets.token_hex(16)
        self.redis = EmbeddedRedis()
        self.address = ""
        self.coordinator = 0  # pid

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self._stack.enter_context(self.redis)
        self.address, self.coordinator = await self._coordinator("coordinator", **self._environment)
        self._fleet = await self._fleet_of("benchmarks.control_plane.fleet")

    async def _coordinator(
        self,
        name: str,
        *flags: str,
        module: str = "ebbtide.coordinator",
        listen: str = "127.0.0.1:0",
        **environment: str,
    ) -> tuple[str, int]:
        """Start a coordinator; returns its address and pid. Its log is `NAME.log` in the store's folder."""
        ready, said = self.redis.directory / f"{name}.json", self.redis.directory / f"{name}.log"
        ready.unlink(missing_ok=True)
        log = self._stack.enter_context(said.open("ab"))
        process = await self._process(
            *(module, "--server-listen", listen, "--store-url", self.redis.url, *flags),
            *("--ready-file", str(ready), "--log-level", "warning", "--die-with-parent", str(os.getpid())),
            environment=environment,
            stdout=log,
            stderr=log,
        )
        await wait_until(lambda: ready.exists() or process.returncode is not None, timeout=30, what=name)
        if process.returncode is not None:
            raise RuntimeError(f"{name} ended with {process.returncode} as it started: {said.read_text()[-2000:]}")
        return json.loads(ready.read_text())["address"], process.pid

    async def _fleet_of(self, module: str, *args: str) -> asyncio.subprocess.Process:
        """Start a process of workers."""
        return await self._process(
            module, self.address, *args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 28
        )

    async def _process(
        self, module: str, *args: str, environment: Mapping[str, str] = MappingProxyType({}), **options: Any
    ) -> asyncio.subprocess.Process:
        environment = {**os.environ, "EBBTIDE_TOKEN": self.token, **code_of(ROOT), **environment}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *args, env=environment, cwd=ROOT, **options
        )
        self._stack.push_async_callback(_end, process)
        return process

    async def fleet(self, do: str, **more: Any) -> dict[str, Any]:
        """Give the workers' process an order, and return its answer."""
        return await order(self._fleet, do, **more)


async def order(process: asyncio.subprocess.Process, do: str, **more: Any) -> dict[str, Any]:
    """Give a process of workers an order, and return its answer."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the workers' process has no pipes")
    process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the workers' process ended; its output says why")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
