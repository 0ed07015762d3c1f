"""Runs the whole guard: starts and stops proxy or observer, keeper, enforcer and the workers' socket in order."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

from ebbtide import telemetry
from ebbtide.auth.security import ServerSettings
from ebbtide.grants import locked_folder, socket_path
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.enforcer import Enforcer
from ebbtide.loans.grant_issuer import AllowedMemory, GrantIssuer
from ebbtide.loans.grant_stream import GrantStream
from ebbtide.loans.loan import Loan
from ebbtide.loans.servicer import GRANTS, GrantServicer
from ebbtide.rpc.server import Server
from ebbtide.runtime import Shutdown
from ebbtide.scheduling.coserving.governor import Governor
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.guard_status import StatusReporter
from ebbtide.serving_guard.loans.budget_keeper import BudgetKeeper
from ebbtide.serving_guard.loans.governor_panel import GovernorPanel, Makes
from ebbtide.serving_guard.loans.memory_budget import MemoryBudget
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.serving_guard.traffic.request_books import RequestBooks
from ebbtide.telemetry import rpc_observer
from ebbtide.v1.grants_pb2_grpc import add_GrantsServicer_to_server

log = telemetry.get_logger(__name__)

#: How often the memory that serving uses is counted.
_TICK_S: Final = 0.05
_GAUGES_S: Final = 1.0
#: Streams of workers end at once, with `Draining`; no other call is worth waiting for.
_GRACE_S: Final = 0.5


async def serve(
    shutdown: Shutdown,
    settings: GuardSettings,
    decides: Makes = Governor,
    memory: Callable[..., MemoryBudget] = MemoryBudget,
) -> None:
    """Guard one serving engine until `shutdown` is requested.

    `decides(targets, limits)` and `memory(limit_mib=, serving_kv_mib=, bytes_per_token=)` make the objects that decide
    about budgets and about memory.
    """
    settings.checked()
    with locked_folder(Path(settings.grant_dir)):
        guard = Guard(settings, decides, memory)
        await guard.start(shutdown)
        shutdown.ready(guard.address)
        await shutdown.requested.wait()
        await guard.stop()


class Front(Protocol):
    """The source of the guard's view of user traffic: proxy or observer."""

    address: str  # "" where users do not connect here

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Guard:
    """Connects the parts of the guard. It is started once."""

    def __init__(self, settings: GuardSettings, decides: Makes, memory: Callable[..., MemoryBudget]) -> None:
        folder, targets = Path(settings.grant_dir), settings.targets()
        self._settings = settings
        self._memory = memory(
            limit_mib=settings.memory_limit_mib,
            serving_kv_mib=settings.serving_kv_mib,
            bytes_per_token=settings.serving_kv_bytes_per_token,
        )
        self._books = RequestBooks(time.monotonic(), targets)
        self._borrowers = BorrowerTable(folder, self._memory, metrics.LOANS)
        panel = GovernorPanel(decides, targets, settings.limits())
        self._keeper = keeper = BudgetKeeper(panel, self._borrowers, self._books, model=settings.model)
        self._issuer = GrantIssuer(self._borrowers, memory=self._memory_of, forecast=lambda: keeper.learnt().forecast)
        self._status = StatusReporter(
            settings.mode,
            settings.model,
            keeper=keeper,
            borrowers=self._borrowers,
            issuer=self._issuer,
            books=self._books,
            memory=self._memory,
            clock=time.monotonic,
        )
        self._enforcer = Enforcer(
            self._borrowers,
            yield_s=settings.yield_ms / 1000,
            kill_s=settings.kill_s,
            most=settings.max_stops,
            predicted_s=lambda: keeper.learnt().step_s,
            granting=lambda: keeper.decision.budget.tokens > 0,
        )
        servicer = GrantServicer(GrantStream(self._borrowers, self._issuer), self._status.now)
        listen = ServerSettings.at(f"unix:{socket_path(folder).absolute()}")
        services = [(add_GrantsServicer_to_server, servicer, GRANTS)]
        self._server = Server(listen, services, observe=rpc_observer(), private=True)
        self._front: Front = self._proxy() if settings.mode == "proxy" else self._observer()

    @property
    def address(self) -> str:
        """Where users' requests go; in mode observe, where workers connect."""
        return self._front.address or self._server.address

    async def start(self, shutdown: Shutdown) -> None:
        await self._front.start()
        self._keeper.review()
        await self._server.start()
        for work, name in ((self._enforcer.run(), "enforcer"), (self._tick(), "memory"), (self._gauges(), "gauges")):
            shutdown.spawn(self._contained(work, name), name)
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """End grants first, so that serving has its engine to itself; then give requests under way their time."""
        self._stop_lending()
        self._enforcer.close()
        await self._server.stop(_GRACE_S)
        await self._front.stop()

    def _memory_of(self, loan: Loan) -> AllowedMemory:
        idle_s = self._keeper.idle_s(loan.wake_s)
        return self._memory.allowed(time.monotonic(), loan.worker_id, idle_s=idle_s)

    def _stop_lending(self) -> None:
        self._borrowers.close()
        self._keeper.close()

    async def _contained(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A failure ends lending. It ends the guard too only in mode observe, where no request passes through it."""
        try:
            await work
        except Exception:
            self._stop_lending()
            if self._settings.mode == "observe":
                raise
            log.exception("lends nothing any more, until it is started again; users' requests go on", task=name)

    def _proxy(self) -> Front:
        from ebbtide.serving_guard.proxy.proxy import Proxy

        return Proxy(self._settings.proxy, self._settings.upstream, self._keeper, self._settings.listen)

    def _observer(self) -> Front:
        from ebbtide.serving_guard.metrics_observer import MetricsObserver

        url = self._settings.metrics_url or f"{self._settings.upstream.rstrip('/')}/metrics"
        return MetricsObserver(
            url,
            self._keeper,
            self._books,
            self._memory,
            interval_s=self._settings.observe_ms / 1000,
            borrowed=lambda: bool(self._borrowers.all()),
        )

    async def _tick(self) -> None:
        while True:
            if self._settings.mode == "proxy":
                self._memory.tokens_inside(time.monotonic(), self._books.tokens_inside)
            self._issuer.send_changes()
            await asyncio.sleep(_TICK_S)

    async def _gauges(self) -> None:
        while True:
            self._status.set_gauges()
            await asyncio.sleep(_GAUGES_S)
