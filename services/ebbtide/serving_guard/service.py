"""The whole guard: proxy or observer, keeper, borrowers, enforcer and the socket, started and ended in order."""

import asyncio
import fcntl
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from ebbtide import telemetry
from ebbtide.auth.security import ServerSettings
from ebbtide.errors import InvalidRequest
from ebbtide.grants import check_folder, socket_path
from ebbtide.rpc.server import Server
from ebbtide.runtime import Shutdown
from ebbtide.scheduling.coserving.governor import Governor
from ebbtide.serving_guard.guard_status import StatusReporter
from ebbtide.serving_guard.loans.borrower_table import BorrowerTable
from ebbtide.serving_guard.loans.budget_keeper import BudgetKeeper
from ebbtide.serving_guard.loans.enforcer import Enforcer
from ebbtide.serving_guard.loans.governor_panel import GovernorPanel, Makes
from ebbtide.serving_guard.loans.memory_budget import MemoryBudget
from ebbtide.serving_guard.servicer import SERVICE, GrantServicer
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.serving_guard.traffic.request_books import RequestBooks
from ebbtide.telemetry import rpc_observer
from ebbtide.v1.grants_pb2_grpc import add_GrantsServicer_to_server

log = telemetry.get_logger(__name__)

#: What serving uses of the pair's memory is counted so often.
_TICK_S: Final = 0.05
_GAUGES_S: Final = 1.0
#: Streams of workers end at once, as `Draining`; nothing else is worth waiting for.
_GRACE_S: Final = 0.5


async def serve(
    shutdown: Shutdown,
    settings: GuardSettings,
    decides: Makes = Governor,
    memory: Callable[..., MemoryBudget] = MemoryBudget,
) -> None:
    """Guard one serving engine until told to end.

    `decides(targets, limits)` and `memory(limit_mib=, serving_kv_mib=, bytes_per_token=)` make what decides about
    budgets and about memory.
    """
    settings.checked()
    guard = Guard(settings, decides, memory)
    with locked(Path(settings.grant_dir)):
        await guard.start(shutdown)
        shutdown.ready(guard.address)
        await shutdown.requested.wait()
        await guard.stop()


class Front(Protocol):
    """Where the guard hears of user traffic."""

    address: str  # "" where users do not come here

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Guard:
    """Made and started once."""

    def __init__(self, settings: GuardSettings, decides: Makes, memory: Callable[..., MemoryBudget]) -> None:
        folder = Path(settings.grant_dir)
        check_folder(folder, field="grant_dir")
        self._settings = settings
        self.memory = memory(
            limit_mib=settings.memory_limit_mib,
            serving_kv_mib=settings.serving_kv_mib,
            bytes_per_token=settings.serving_kv_bytes_per_token,
        )
        targets = settings.targets()
        self.books = RequestBooks(time.monotonic(), targets)
        self.borrowers = BorrowerTable(folder, self.memory)
        panel = GovernorPanel(decides, targets, settings.limits())
        self.keeper = BudgetKeeper(panel, self.borrowers, self.books, model=settings.model)
        self.borrowers.idle_s = self.keeper.idle_s
        self.borrowers.forecast = lambda: self.keeper.learnt().forecast
        self.status = StatusReporter(
            settings.mode,
            settings.model,
            keeper=self.keeper,
            borrowers=self.borrowers,
            books=self.books,
            memory=self.memory,
            clock=time.monotonic,
        )
        services = [(add_GrantsServicer_to_server, GrantServicer(self.borrowers, self.status), SERVICE)]
        listen = ServerSettings.at(f"unix:{socket_path(folder).absolute()}")
        self._server = Server(listen, services, observe=rpc_observer(), private=True)
        self._enforcer = self._enforcing()
        self._front: Front = self._proxy() if settings.mode == "proxy" else self._observer()

    @property
    def address(self) -> str:
        """Where users' requests go; in mode observe, where workers do."""
        return self._front.address or self._server.address

    async def start(self, shutdown: Shutdown) -> None:
        await self._front.start()
        self.keeper.start()
        await self._server.start()
        for work, name in ((self._enforcer.run(), "enforcer"), (self._tick(), "memory"), (self._gauges(), "gauges")):
            shutdown.spawn(self._contained(work, name), name)
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Grants first, so that serving has its engine to itself; then requests under way have their time."""
        self.borrowers.close()
        self.keeper.close()
        self._enforcer.close()
        await self._server.stop(_GRACE_S)
        await self._front.stop()

    def _enforcing(self) -> Enforcer:
        return Enforcer(
            self.borrowers,
            yield_s=self._settings.yield_ms / 1000,
            kill_s=self._settings.kill_s,
            most=self._settings.max_stops,
            predicted_s=lambda: self.keeper.learnt().step_s,
            granting=lambda: self.keeper.decision.budget.tokens > 0,
        )

    async def _contained(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """What fails there ends lending; it ends the guard too only where no user's request goes through it."""
        try:
            await work
        except Exception:
            self.borrowers.close()
            self.keeper.close()
            if self._settings.mode == "observe":
                raise
            log.exception("lends nothing any more, until it is started again; users' requests go on", task=name)

    def _proxy(self) -> Front:
        from ebbtide.serving_guard.proxy.proxy import Proxy

        return Proxy(self._settings.proxy, self._settings.upstream, self.keeper, self._settings.listen)

    def _observer(self) -> Front:
        from ebbtide.serving_guard.metrics_observer import MetricsObserver

        url = self._settings.metrics_url or f"{self._settings.upstream.rstrip('/')}/metrics"
        return MetricsObserver(
            url,
            self.keeper,
            self.books,
            self.memory,
            interval_s=self._settings.observe_ms / 1000,
            borrowed=lambda: bool(self.borrowers.all()),
        )

    async def _tick(self) -> None:
        told: dict[str, Any] = {}
        while True:
            if self._settings.mode == "proxy":
                self.memory.tokens_inside(time.monotonic(), self.books.tokens_inside)
            now = {loan.worker_id: self.borrowers.allowed(loan) for loan in self.borrowers.all()}
            if now != told:
                told = now
                self.borrowers.news.set()
            await asyncio.sleep(_TICK_S)

    async def _gauges(self) -> None:
        while True:
            self.status.set_gauges()
            await asyncio.sleep(_GAUGES_S)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One guard in a folder. Raises `InvalidRequest` naming `grant_dir` if another one has it."""
    check_folder(folder, field="grant_dir")
    with (folder / "guard.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest(f"another guard runs in {folder}; name another folder", field="grant_dir") from None
        yield
