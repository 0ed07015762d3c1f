"""An installer, and what stands around it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.rollout_worker.generation.local_attempts import GenerationHolds
from ebbtide.rollout_worker.installs.installer import Installer, InstallReports
from ebbtide.rollout_worker.installs.weight_store import TargetVersion
from ebbtide.types.weights import PolicyVersion


def version(number: int) -> TargetVersion:
    return TargetVersion("run", PolicyVersion(policy="policy", version=number))


class Worker:
    """What stands around an installer: an engine and a mirror that take note, attempts that forbid nothing."""

    def __init__(self, lender: Any = None) -> None:
        self.made: list[tuple[int, bool]] = []  # versions, and whether changes were made use of
        self.looks: list[str] = []
        self.bad: set[int] = set()
        self.pulling = asyncio.Event()  # cleared: pulls do not end
        self.pulling.set()
        self.installing = asyncio.Event()  # cleared: installs do not end
        self.installing.set()
        self.gone: set[int] = set()
        attempts: Any = SimpleNamespace(holds=GenerationHolds(), ended=asyncio.Event(), admit=lambda *_: True)
        store: Any = self
        engine: Any = self
        self.installer = Installer(engine, store, attempts, InstallReports(lambda _: None), lender)

    async def install(self, number: int, path: Path, changes: Path | None = None) -> float:
        if number in self.bad:
            raise InvalidRequest("another architecture", field="weights")
        await self.installing.wait()
        self.made.append((number, changes is not None))
        return 0.0

    def fits(self, manifest: object) -> bool:
        return True

    def forget(self, run_id: str) -> None:
        self.looks.append(f"forgot {run_id}")

    async def begin(self, wanted: TargetVersion, change: object = None) -> object:
        if wanted.version.version in self.gone:
            raise Unavailable("retired")
        return object()

    def serves(self, manifest: object) -> None:
        pass

    def announce(self, install_s: float) -> None:
        pass

    def refused(self, version: PolicyVersion) -> None:
        self.looks.append(f"refused {version.version}")

    @asynccontextmanager
    async def locked(self, *_: object) -> AsyncIterator[tuple[Path, Path | None]]:
        self.looks.append("pull")
        await self.pulling.wait()
        self.looks.append("locked")
        yield Path("weights"), Path("changes")
