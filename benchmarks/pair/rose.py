"""ROSE's co-serving policy as it is reported (arXiv 2605.06534; by notes on it, for there is no code).

At each moment, over the served requests r, with offline tables That of the engine's own latencies:

    S_prf(r) = t_arrive(r) + B_TTFT - now - That_prf(L_r)        where r waits for its first token
    S_dec(r) = t_last_token(r) + B_TPOT - now - That_dec(b)      where it decodes
    rollouts are admitted iff min S_prf > 0 and min S_dec > 0

Memory: the rollouts' KV budget R is fixed for an RL step, and headroom H (a fifth of the memory) kept for serving. Once
the serving engine's use of H crosses a watermark, R is halved, once; victims are aborted whole; R stays frozen until
the next RL step begins. Watermark, the exact H, the length of an RL step and the margin below the SLO that the test is
held to are not stated. The setting `EBBTIDE_ROSE` names them as `STEP_S,WATERMARK,HEADROOM,HELD`: the watermark as a
fraction of H, H as a fraction of the memory, and what of B_TTFT and B_TPOT the test reckons with.
"""

import os
from typing import Final

from benchmarks.pair.rivals import run_rival
from ebbtide.scheduling.coserving.budget_decider import (
    NOTHING_INSIDE,
    BudgetDecider,
    BudgetDecision,
    LatencyTargets,
    LearntCosts,
    StepLimits,
)
from ebbtide.serving_guard.loans.memory_budget import AllowedMemory, MemoryBudget
from ebbtide.types.grants import GRANT_S, BorrowerReport, Budget, Forecast, Hello, Residency

#: That_prf (of a prompt, and of each of its tokens) and That_dec (of one request, and of each further one) of the
#: served model, as probed before the benchmark: seconds.
TABLES: Final = "EBBTIDE_ROSE_TABLES"
SETTING: Final = "EBBTIDE_ROSE"


class _Request:
    __slots__ = ("arrived", "last", "prompt")

    def __init__(self, arrived: float, prompt: int) -> None:
        self.arrived, self.prompt = arrived, prompt
        self.last = 0.0


class Rose(BudgetDecider):
    """The admission. Its tick is every event of the traffic, and the moment at which the least slack is used up."""

    def __init__(self, targets: LatencyTargets, limits: StepLimits) -> None:
        held, self._limits = float(os.environ[SETTING].split(",")[3]), limits
        self._ttft, self._tpot = held * targets.ttft_s, held * targets.tpot_s
        self._fixed, self._token, self._decode, self._more = map(float, os.environ[TABLES].split(","))
        self._inside: dict[str, _Request] = {}

    def arrived(self, now: float, request: str, prompt_tokens: int, *, streamed: bool = True) -> None:
        self._inside[request] = _Request(now, prompt_tokens)

    def produced(self, now: float, request: str, tokens: int) -> None:
        if one := self._inside.get(request):
            one.last = now

    def ended(self, now: float, request: str, ok: bool) -> None:
        self._inside.pop(request, None)

    def observed(self, now: float, inside: int, waiting: int) -> None: ...

    def stepped(self, now: float, tokens: int, seconds: float) -> None: ...

    def decide(self, now: float) -> BudgetDecision:
        limits = self._limits
        if not self._inside:
            budget = Budget(limits.tokens, limits.sequences, now + GRANT_S)
            return BudgetDecision(budget, "idle", NOTHING_INSIDE, now + GRANT_S / 2)
        decoding = sum(one.last > 0 for one in self._inside.values())
        decode = self._decode + self._more * max(0, decoding - 1)
        until = min(self._slack_ends(one, decode) for one in self._inside.values())
        if until <= now:
            return BudgetDecision(Budget(), "reclaimed", 0.0, now + GRANT_S / 2)
        budget = Budget(limits.tokens, limits.sequences, min(until, now + GRANT_S))
        return BudgetDecision(budget, "shared", until - now, min(until, now + GRANT_S / 2))

    def hold_s(self, now: float, stepping_since: float | None) -> float:
        return 0.0

    def learnt(self, now: float) -> LearntCosts:
        return LearntCosts(forecast=Forecast(share=1.0, spell_s=3600.0))

    def pays(self, now: float, wake_s: float) -> bool:
        return True

    def _slack_ends(self, one: _Request, decode: float) -> float:
        if not one.last:
            return one.arrived + self._ttft - (self._fixed + self._token * one.prompt)
        return one.last + self._tpot - decode


class RoseMemory(MemoryBudget):
    """The KV policy; the methods of `ebbtide.serving_guard.loans.memory_budget.MemoryBudget`."""

    def __init__(self, *, limit_mib: int = 0, serving_kv_mib: int = 0, bytes_per_token: int = 0) -> None:
        super().__init__(limit_mib=limit_mib, serving_kv_mib=serving_kv_mib, bytes_per_token=bytes_per_token)
        step_s, watermark, self._headroom, _ = map(float, os.environ[SETTING].split(","))
        self._token_bytes, self._step_s = bytes_per_token, step_s
        self._watermark = watermark * self._headroom * self.limit
        self._began = 0.0
        self._cut = False
        self._kv: dict[str, int] = {}

    def tokens_inside(self, now: float, tokens: int) -> None:
        self.serving_bytes = min(tokens * self._token_bytes, self._pool or tokens * self._token_bytes)
        if now - self._began >= self._step_s:  # the next RL step
            self._began, self._cut = now, False
        self._cut |= self.serving_bytes > self._watermark

    def usage(self, now: float, share: float) -> None: ...

    def joined(self, worker_id: str, hello: Hello) -> None:
        self._kv[worker_id] = hello.kv_bytes

    def left(self, worker_id: str) -> None:
        self._kv.pop(worker_id, None)

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None: ...

    def allowed(self, now: float, worker_id: str, *, idle_s: float) -> AllowedMemory:
        del idle_s
        self.tokens_inside(now, self.serving_bytes // max(1, self._token_bytes))
        budget = min(self._kv.get(worker_id, 0), int((1 - self._headroom) * self.limit))
        phase = "cut" if self._cut else "normal"
        return AllowedMemory(budget // 2 if self._cut else budget, phase, Residency.AWAKE)


if __name__ == "__main__":
    run_rival(Rose, RoseMemory, __doc__ or "")
