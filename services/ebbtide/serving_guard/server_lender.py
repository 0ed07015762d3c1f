"""Lends the device of a serving engine: its users come first, and what their SLO leaves is lent.

Starts and stops proxy or observer, keeper, enforcer and the workers' socket in order.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from ebbtide import telemetry
from ebbtide.runtime import Shutdown
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.borrowers import AllowedMemory, BorrowerTable, Loan
from ebbtide.serving_guard.budget_keeper import BudgetKeeper
from ebbtide.serving_guard.governor.budget_decider import Makes, MultiModelGovernor
from ebbtide.serving_guard.governor.governor import Governor
from ebbtide.serving_guard.lender import GrantIssuer, Lender
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.serving_guard.servicer import LOANS, NoLoans
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.serving_guard.slo_stats import SloStats
from ebbtide.types.grants import GuardStatus, ModelLatency
from ebbtide.v1.loans_pb2_grpc import add_LoansServicer_to_server

log = telemetry.get_logger(__name__)

#: How often the memory that serving uses is counted.
_TICK_S: Final = 0.05
_GAUGES_S: Final = 1.0


class Front(Protocol):
    """The source of the guard's view of user traffic: proxy or observer."""

    address: str  # "" where users do not connect here

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class ServerLender(Lender):
    """Connects the parts. `decides(targets, limits)` and `memory(limit_mib=, serving_kv_mib=, bytes_per_token=)` make
    the objects that decide about budgets and about memory."""

    _keeper: BudgetKeeper

    def __init__(
        self,
        settings: GuardSettings,
        decides: Makes = Governor,
        memory: Callable[..., MemoryBudget] = MemoryBudget,
    ) -> None:
        targets = settings.targets()
        self._memory = memory(
            limit_mib=settings.memory_limit_mib,
            serving_kv_mib=settings.serving_kv_mib,
            bytes_per_token=settings.serving_kv_bytes_per_token,
        )
        self._stats = SloStats(time.monotonic(), targets)
        borrowers = BorrowerTable(Path(settings.grant_dir), self._memory)
        deciders = MultiModelGovernor(decides, targets, settings.limits())
        keeper = BudgetKeeper(deciders, borrowers, self._stats, model=settings.model)
        issuer = GrantIssuer(borrowers, memory=self._memory_of, forecast=lambda: keeper.learnt().forecast)
        no_loans = (add_LoansServicer_to_server, NoLoans(), LOANS)
        super().__init__(settings, borrowers, keeper, issuer, [no_loans])
        self._front: Front = self._proxy() if settings.mode == "proxy" else self._observer()

    @property
    def address(self) -> str:
        """Where users' requests go; in mode observe, where workers connect."""
        return self._front.address or super().address

    def status(self) -> GuardStatus:
        now, stats, decision, model = time.monotonic(), self._stats, self._keeper.decision, self._settings.model
        learnt = self._keeper.learnt()
        ttft, tpot = stats.latencies(learnt, model)
        return GuardStatus(
            model=model,
            mode=self._settings.mode,
            state=decision.state,
            inside=stats.inside,
            waiting=stats.waiting,
            load=stats.load(now),
            requests=stats.requests,
            failed=stats.failed,
            ttft=ttft,
            tpot=tpot,
            slack_s=decision.slack_s,
            tokens=decision.budget.tokens,
            sequences=decision.budget.sequences,
            borrowers=self._borrower_statuses(now),
            forecast=learnt.forecast,
            memory_limit=self._memory.limit,
            serving_kv_bytes=self._memory.serving_bytes,
            uptime_s=now - stats.began,
            models=tuple(self._other_models()),
        )

    def _other_models(self) -> Iterator[ModelLatency]:
        models = self._stats.models
        main = self._settings.model if self._settings.model in models else ""
        for model in models:
            if model != main:
                ttft, tpot = self._stats.latencies(self._keeper.learnt(model), model)
                yield ModelLatency(model=model, ttft=ttft, tpot=tpot)

    async def start(self, shutdown: Shutdown) -> None:
        await self._front.start()
        await super().start(shutdown)

    async def stop(self) -> None:
        """End grants first; then give requests under way their time."""
        await super().stop()
        await self._front.stop()

    def _work(self) -> dict[str, Coroutine[Any, Any, None]]:
        work = super()._work() | {"memory": self._tick(), "gauges": self._gauges()}
        return {name: self._contained(one, name) for name, one in work.items()}

    def _memory_of(self, loan: Loan) -> AllowedMemory:
        idle_s = self._keeper.idle_s(loan.wake_s)
        return self._memory.allowed(time.monotonic(), loan.worker_id, idle_s=idle_s)

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
            self._stats,
            self._memory,
            interval_s=self._settings.observe_ms / 1000,
            borrowed=lambda: bool(self._borrowers.all()),
        )

    async def _tick(self) -> None:
        while True:
            if self._settings.mode == "proxy":
                self._memory.tokens_inside(time.monotonic(), self._stats.tokens_inside)
            self._issuer.send_changes()
            await asyncio.sleep(_TICK_S)

    async def _gauges(self) -> None:
        while True:
            metrics.LOAD.set(self._stats.load(time.monotonic()))
            metrics.BUDGET_TOKENS.set(self._keeper.decision.budget.tokens)
            await asyncio.sleep(_GAUGES_S)
