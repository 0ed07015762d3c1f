"""Reports the guard's state in one record, and sets its gauges."""

from collections.abc import Callable, Iterator

from ebbtide.loans.borrower_status import borrower_status
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.grant_issuer import GrantIssuer
from ebbtide.serving_guard import metrics
from ebbtide.serving_guard.loans.budget_keeper import BudgetKeeper
from ebbtide.serving_guard.loans.memory_budget import MemoryBudget
from ebbtide.serving_guard.traffic.request_books import RequestBooks
from ebbtide.types.grants import GuardStatus, ModelLatency


class StatusReporter:
    """Reads the other parts of the guard; has no state of its own."""

    def __init__(
        self,
        mode: str,
        model: str,
        *,
        keeper: BudgetKeeper,
        borrowers: BorrowerTable,
        issuer: GrantIssuer,
        books: RequestBooks,
        memory: MemoryBudget,
        clock: Callable[[], float],
    ) -> None:
        self._mode, self._model = mode, model
        self._keeper, self._borrowers, self._issuer = keeper, borrowers, issuer
        self._books, self._memory, self._clock = books, memory, clock

    def now(self) -> GuardStatus:
        now, books, decision = self._clock(), self._books, self._keeper.decision
        learnt = self._keeper.learnt()
        ttft, tpot = books.latencies(learnt, self._model)
        return GuardStatus(
            model=self._model,
            mode=self._mode,
            state=decision.state,
            inside=books.inside,
            waiting=books.waiting,
            load=books.load(now),
            requests=books.requests,
            failed=books.failed,
            ttft=ttft,
            tpot=tpot,
            slack_s=decision.slack_s,
            tokens=decision.budget.tokens,
            sequences=decision.budget.sequences,
            borrowers=tuple(borrower_status(loan, self._issuer.allowed(loan), now) for loan in self._borrowers.all()),
            forecast=learnt.forecast,
            memory_limit=self._memory.limit,
            serving_kv_bytes=self._memory.serving_bytes,
            uptime_s=now - books.began,
            models=tuple(self._others()),
        )

    def _others(self) -> Iterator[ModelLatency]:
        models = self._books.models
        main = self._model if self._model in models else ""
        for model in models:
            if model != main:
                ttft, tpot = self._books.latencies(self._keeper.learnt(model), model)
                yield ModelLatency(model=model, ttft=ttft, tpot=tpot)

    def set_gauges(self) -> None:
        metrics.LOAD.set(self._books.load(self._clock()))
        metrics.BUDGET_TOKENS.set(self._keeper.decision.budget.tokens)
